"""vkbench serve against a small server of this process that speaks OpenAI's streams, well and badly."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_kit import call
from waiting import PATIENCE_S

from vkback.cli import vkbench
from vkback.cli.shell import UsageError
from vkback.cli.vkbench_client import Address, Client, Reply, RequestFailed, address_of
from vkback.cli.vkbench_serve import Level, Load, run_level
from vkback.report.serve_table import SERVE, percentiles

Send = Callable[[bytes], Awaitable[None]]
Answer = Callable[["FakeServer", dict[str, Any], Send], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: Any) -> str:
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n"


def piece(text: str) -> str:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


async def answer_well(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
    """A word a piece, as many as are asked for, then the usage: a prompt has two tokens a word and one for its beginning."""
    text = asked["prompt"] if "prompt" in asked else asked["messages"][0]["content"]
    await send(STREAM + chunk(": waiting\n\n"))
    for number in range(asked["max_tokens"]):
        delta = {"delta": {"content": f"w{number} "}} if "messages" in asked else {"text": f"w{number} "}
        await asyncio.sleep(server.pause_s)
        await send(chunk(event({"choices": [{"index": 0, **delta}]})))
    usage = {"prompt_tokens": 2 * len(text.split()) + 1, "completion_tokens": asked["max_tokens"]}
    await send(chunk(event({"choices": [], "usage": usage}) + event("[DONE]")) + b"0\r\n\r\n")


@dataclass
class FakeServer:
    """answer: writes the whole reply to a completion. most: requests that were there at once."""

    port: int = 0
    answer: Answer = answer_well
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    here: int = 0
    most: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lower = head.lower()
        body = await reader.readexactly(int(lower.partition("content-length: ")[2].split()[0]))

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        if head.startswith("GET"):
            page = {"/v1/models": {"data": [{"id": "fake"}]}, "/health": {"device": "Test GPU"}}[head.split()[1]]
            text = json.dumps(page).encode()
            await send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        else:
            self.heads.append(head)
            self.asked.append(json.loads(body))
            self.here += 1
            self.most = max(self.most, self.here)
            try:
                await self.answer(self, self.asked[-1], send)
            except ConnectionResetError:
                writer.transport.abort()
            finally:
                self.here -= 1
        writer.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    loop = asyncio.new_event_loop()

    async def start() -> None:
        listening = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = listening.sockets[0].getsockname()[1]

    async def end() -> None:
        """Streams to clients that went."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    assert not thread.is_alive()
    loop.run_until_complete(end())
    loop.close()


@pytest.fixture
def bench(server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """stdout and stderr of the command against that server."""

    def bench(line: str, code: int = 0) -> tuple[str, str]:
        assert call(monkeypatch, vkbench.main, "serve", "--url", server.url, *line.split()) == code
        shown = capsys.readouterr()
        return shown.out, shown.err

    return bench


# --- a server that answers


async def answer_four_at_once(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
    """From the fifth of those that are measured on, none is answered before four were there at once."""
    until = time.monotonic() + PATIENCE_S
    while len([a for a in server.asked if a["max_tokens"] == 16]) > 4 and server.most < 4 and time.monotonic() < until:
        await asyncio.sleep(0.001)
    await answer_well(server, asked, send)


def test_every_number_of_clients_has_a_row(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    server.answer = answer_four_at_once
    out, err = bench("--clients 1,4 --prompt-tokens 41 --max-tokens 16")
    lines = out.splitlines()
    assert lines[0] == f"{server.url}: fake, Test GPU; random prompts of 41 tokens, 16 tokens to generate"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:5]]
    head = ["clients", "done", "errors", "prompt", "output", "t/s", "TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "ITL ms p50/p90/p99"]
    assert rows[0] == head
    assert [row[:5] for row in rows[2:]] == [["1", "4", "0", "41", "16"], ["4", "16", "0", "41", "16"]]
    assert all(len(cell.split("/")) == 3 for row in rows[2:] for cell in row[6:])
    assert len({len(line) for line in lines[1:5]}) == 1
    assert err == ""
    assert server.most == 4, "as many at once as there are clients"
    measured = [a for a in server.asked if a["max_tokens"] == 16]
    assert len(measured) == 4 + 16
    assert all(a["model"] == "fake" and a["ignore_eos"] and a["temperature"] == 0 and a["stream"] for a in server.asked)
    assert len({a["prompt"] for a in measured}) == 20 and {len(a["prompt"].split()) for a in measured} == {20}


def test_a_prompt_has_as_many_words_as_make_its_tokens(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    (row,) = json.loads(bench("--clients 2 --prompt-tokens 201 --max-tokens 4 --json")[0])
    assert (row["prompt_tokens"], row["n_prompt"], row["done"]) == (201 * 8, 201, 8)


def test_machine_formats(server: FakeServer, bench: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    line = "--clients 2 --requests 6 --prompt-tokens 9 --max-tokens 5 --seed 3 -o"
    (row,) = map(json.loads, bench(f"{line} jsonl --save {tmp_path / 'r.md'}")[0].splitlines())
    assert (row["clients"], row["requests"], row["done"], row["errors"], row["output_tokens"], row["seed"]) == (2, 6, 6, 0, 30, 3)
    assert row["output_ts"] == pytest.approx(30 / row["duration_s"])
    assert row["total_ts"] == pytest.approx((30 + 54) / row["duration_s"]) and row["requests_s"] == pytest.approx(6 / row["duration_s"])
    assert len(row["samples_ttft_ms"]) == len(row["samples_tpot_ms"]) == 6
    assert row["ttft_p50_ms"] == pytest.approx(percentiles(row["samples_ttft_ms"])[0])
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
    assert (row["model"], row["device"], row["chat"], row["ignore_eos"], row["n_gen"]) == ("fake", "Test GPU", False, True, 5)
    assert row["command"].startswith("vkbench serve --url http://127.0.0.1:") and row["test_time"].endswith("Z")
    assert (tmp_path / "r.md").read_text().startswith(f"    {row['command']}\n\n{row['test_time'][:10]}, {server.url}\n\n")
    header, values = bench(f"{line} csv")[0].splitlines()
    assert (
        header.split(",")[:7] == ["url", "model", "device", "clients", "requests", "errors", "n_prompt"]
        and '"fake","Test GPU","2"' in values
    )
    db = sqlite3.connect(":memory:")
    db.executescript(bench(f"{line} sql")[0])
    assert db.execute("SELECT clients, done, itl_p99_ms > 0 FROM serve_bench").fetchall() == [(2, 6, 1)]
    types = {name: kind for _, name, kind, *_ in db.execute("PRAGMA table_info(serve_bench)")}
    db.close()
    assert types == SERVE.field_types() and (types["ttft_p50_ms"], types["clients"], types["url"]) == ("REAL", "INTEGER", "TEXT")


def test_times_are_those_of_the_stream(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    server.pause_s = 0.02
    (row,) = json.loads(bench("--clients 1 --requests 3 --prompt-tokens 9 --max-tokens 6 --json")[0])
    assert row["ttft_p50_ms"] > 19, "the server waits for 20 ms before each piece"
    for name in ("tpot", "itl"):
        assert row[f"{name}_p50_ms"] > 5, "less than 20 ms where the piece before came late on a busy machine"
    assert row["duration_s"] >= 3 * 6 * 0.02 and row["output_ts"] < 50


def test_times_of_a_reply() -> None:
    reply = Reply(began=10.0, pieces=[10.5, 10.6, 10.9], prompt_tokens=7, output_tokens=9)
    assert reply.ttft_s == 0.5 and reply.tpot_s == pytest.approx(0.4 / 8) and reply.gaps_s == pytest.approx([0.1, 0.3])
    assert Reply(10.0, [10.5, 10.7]).tpot_s == pytest.approx(0.2), "without a count, a piece is a token"
    assert Reply(10.0, [10.5], output_tokens=1).tpot_s is None
    assert percentiles([1.0, 2.0, 3.0]) == pytest.approx([2.0, 2.8, 2.98]) and percentiles([]) == [None, None, None]


def test_chats_prompts_of_a_file_and_keys(server: FakeServer, bench: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n\nanother longer prompt\n")
    line = f"--clients 1 --requests 3 --max-tokens 4 --prompts {file} --chat --api-key secret -m other --no-warmup --json"
    (row,) = json.loads(bench(line)[0])
    contents = [a["messages"][0]["content"] for a in server.asked]
    assert contents == ["one prompt", "one prompt", "another longer prompt", "one prompt"], "one to see what the server takes"
    assert (row["prompts"], row["n_prompt"], row["prompt_tokens"], row["chat"], row["model"]) == (str(file), 0, 5 + 7 + 5, True, "other")
    assert all("Authorization: Bearer secret\r\n" in head and head.startswith("POST /v1/chat/completions ") for head in server.heads)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a b"}\n{"prompt": "c"}\n')
    assert json.loads(bench(f"--clients 1 --requests 2 --max-tokens 4 --prompts {lines} --json")[0])[0]["prompt_tokens"] == 5 + 3


def test_prompts_are_other_ones_each_time_but_with_a_seed(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    def prompts(line: str) -> list[str]:
        server.asked.clear()
        bench(f"--clients 1 --requests 2 --prompt-tokens 41 --max-tokens 2 {line}")
        return [a["prompt"] for a in server.asked if a["max_tokens"] == 2]

    assert prompts("") != prompts("")
    assert prompts("--seed 5") == prompts("--seed 5")


async def answer_without_extras(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
    """Knows no ignore_eos, counts nothing, and sends without chunks, with CRLF, two tokens in a piece, none in the last."""
    if "ignore_eos" in asked:
        body = b'{"error": {"message": "ignore_eos is no field of this endpoint"}}'
        await send(b"HTTP/1.0 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        return
    await send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    text = "".join(piece(f"a{n} b{n}") for n in range(asked["max_tokens"])) + piece("") + event("[DONE]")
    await send(text.replace("\n", "\r\n").encode())


def test_a_server_may_know_less(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    server.answer = answer_without_extras
    out, err = bench("--clients 2 --prompt-tokens 12 --max-tokens 3 --json")
    (row,) = json.loads(out)
    assert (row["done"], row["errors"], row["output_tokens"], row["prompt_tokens"], row["ignore_eos"]) == (8, 0, 24, 0, False)
    assert err == (
        "vkbench: the server does not take ignore_eos: texts may end before --max-tokens\n"
        "vkbench: the server does not count prompts: --prompt-tokens is taken for words\n"
    )


# --- one that does not


def whole(status: str, kind: str, text: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


REFUSED = whole("429 Too Many Requests", "application/json", '{"error": {"message": "the queue is full", "code": 429}}')

BAD: dict[str, tuple[bytes, str]] = {
    "refused": (REFUSED, "HTTP 429: the queue is full"),
    "a page": (whole("502 Bad Gateway", "text/html", "<html>\nno\nserver</html>"), "HTTP 502: <html> no server</html>"),
    "without a body": (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "HTTP 503: without a reason"),
    "no stream": (whole("200 OK", "application/json", "{}"), "the reply is application/json, expected text/event-stream"),
    "cut": (STREAM + chunk(piece("a")) + b"40\r\ndata: {", "the connection was closed before the reply was whole"),
    "cut in its head": (b"HTTP/1.1 200 OK\r\nContent-Type: text", "the connection was closed before the reply was whole"),
    "nothing": (b"", "the connection was closed before the reply was whole"),
    "ends early": (STREAM + chunk(piece("a")) + b"0\r\n\r\n", "the stream ended before [DONE]"),
    "no token": (STREAM + chunk(event("[DONE]")) + b"0\r\n\r\n", "the reply has no token"),
    "an error": (STREAM + chunk(piece("a") + event({"error": {"message": "lost"}})), "an error in the stream: lost"),
    "llama-server's error": (STREAM + chunk('error: {"code":500,"message":"slot gone"}\n\n'), "an error in the stream: slot gone"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9\r\n", "the reply is none of OpenAI's API: its first line is 'SSH-2.0-OpenSSH_9'"),
    "no JSON": (STREAM + chunk(event("{broken")), "the reply is none of OpenAI's API: Expecting property name"),
    "a list": (STREAM + chunk(event("[1]")), "the reply is none of OpenAI's API: an event is [1], expected an object"),
    "other choices": (STREAM + chunk(event({"choices": ["a"]})), "the reply is none of OpenAI's API: its choices are ['a']"),
    "nested": (STREAM + chunk(event("[" * 100_000)), "the reply is none of OpenAI's API: "),
    "no UTF-8": (STREAM + b"8\r\ndata: \xff\n\r\n", "the reply is none of OpenAI's API: 'utf-8' codec"),
    "no chunk": (STREAM + b"zz\r\n", "the reply is none of OpenAI's API: invalid literal"),
}
"""What comes, and what is said of it."""


@pytest.mark.parametrize(("sent", "said"), BAD.values(), ids=BAD)
def test_what_goes_wrong_is_counted_and_said(sent: bytes, said: str, server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    """Of 8 requests each second one."""

    async def answer(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
        if asked["max_tokens"] == 3 and len(server.asked) % 2:
            await send(sent)
        else:
            await answer_well(server, asked, send)

    server.answer = answer
    out, err = bench("--clients 1 --requests 8 --prompt-tokens 9 --max-tokens 3 --no-warmup --json")
    (row,) = json.loads(out)
    assert (row["requests"], row["done"], row["errors"], row["output_tokens"]) == (8, 4, 4, 12)
    assert err.startswith(f"vkbench: 1 client: 4 of 8 requests failed: {said}") and err.count("\n") == 1, "each kind once"


def test_reasons_that_differ_in_a_number_do_not_fill_the_screen() -> None:
    level = Level(2, [], Counter({"a stream was cut": 5, **{f"HTTP 400: {number} tokens": 1 for number in range(50)}}), 1.0)
    lines = [*level.failure_lines()]
    assert lines[0] == "2 clients: 5 of 55 requests failed: a stream was cut" and len(lines) == 5
    assert lines[-1] == "2 clients: 47 of 55 requests failed: for other reasons"


async def reset(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
    await send(STREAM + chunk(piece("a")))
    raise ConnectionResetError


def test_a_connection_that_is_cut(server: FakeServer) -> None:
    server.answer = reset
    with pytest.raises(RequestFailed, match=r"the connection was (reset|closed before the reply was whole)"):
        asyncio.run(Client(address_of(server.url)).stream("/v1/completions", {"max_tokens": 1}))


def test_a_request_without_end(server: FakeServer) -> None:
    server.pause_s = 0.2
    with pytest.raises(RequestFailed, match=r"no end within 0\.3 s"):
        asyncio.run(Client(address_of(server.url), timeout_s=0.3).stream("/v1/completions", {"max_tokens": 50, "prompt": ""}))


def test_rows_without_any_reply_are_shown_and_are_an_error(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    async def full(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
        if asked["max_tokens"] == 3:
            await send(REFUSED)
        else:
            await answer_well(server, asked, send)

    server.answer = full
    out, err = bench("--clients 1,2 --requests 4 --prompt-tokens 9 --max-tokens 3", code=1)
    assert [cell.strip() for cell in out.splitlines()[3].split("|")[1:7]] == ["1", "0", "4", "", "", "0.00"]
    assert err.splitlines() == [
        "vkbench: 1 client: 4 of 4 requests failed: HTTP 429: the queue is full",
        "vkbench: 2 clients: 4 of 4 requests failed: HTTP 429: the queue is full",
        "vkbench: error: 1 client, 2 clients: no request was done",
    ]


def test_a_server_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, vkbench.main, "serve", "--url", "http://127.0.0.1:1") == 1
    said = "http://127.0.0.1:1: the connection was refused; start a server there, or give another address as --url"
    assert capsys.readouterr() == ("", f"vkbench: error: {said}\n")


def test_a_server_that_refuses_the_first_request_is_one_line(server: FakeServer, bench: Callable[..., tuple[str, str]]) -> None:
    async def answer(server: FakeServer, asked: dict[str, Any], send: Send) -> None:
        await send(whole("401 Unauthorized", "application/json", '{"error": {"message": "the API key is missing"}}'))

    server.answer = answer
    out, err = bench("--clients 1", code=1)
    assert (out, err) == ("", f"vkbench: error: {server.url}: HTTP 401: the API key is missing; a first request has to succeed\n")


def test_rows_that_were_measured_are_kept_on_an_interrupt(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(load: Load, clients: int, *others: Any, **named: Any) -> Any:
        if clients > 1:
            raise KeyboardInterrupt
        return await run_level(load, clients, *others, **named)

    monkeypatch.setattr("vkback.cli.vkbench_serve.run_level", interrupted)
    line = f"serve --url {server.url} --clients 1,2 --requests 2 --prompt-tokens 9 --max-tokens 3 --json"
    assert call(monkeypatch, vkbench.main, *line.split()) == 130
    assert [row["clients"] for row in json.loads(capsys.readouterr().out)] == [1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--url 127.0.0.1:8080", "--url 127.0.0.1:8080: expected the address of a server, as http://127.0.0.1:8080"),
        ("--url http://x:99999", "--url http://x:99999: expected the address of a server, as http://127.0.0.1:8080"),
        ("--url ftp://x", "--url ftp://x: expected the address of a server, as http://127.0.0.1:8080"),
        ("--clients 0", "--clients 0: expected at least 1"),
        ("--clients x", "--clients x: expected a number, a list as 128,256, or a range as 1-4, 0-8192+2048 or 1-512*2"),
        ("--prompts BLANK", "--prompts BLANK: has no prompt; expected one a line"),
        ("--prompts NONE", "--prompts NONE: cannot be read: No such file or directory"),
        ("--prompts WRONG", "--prompts WRONG: line 2: expected an object with a text as its field prompt"),
        ("-o xml", "-o xml: expected one of md, csv, json, jsonl, sql"),
    ],
)
def test_a_wrong_command_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("BLANK", "NONE", "WRONG")}
    Path(files["BLANK"]).write_text("\n \n", encoding="utf-8")
    Path(files["WRONG"]).write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert call(monkeypatch, vkbench.main, "serve", *(files.get(word, word) for word in line.split())) == 2
    for name, path in files.items():
        said = said.replace(name, path)
    assert capsys.readouterr() == ("", f"vkbench: error: {said}\n")


@pytest.mark.parametrize(
    ("url", "address", "header"),
    [
        ("http://127.0.0.1:8080", Address("127.0.0.1", 8080, False, ""), "127.0.0.1:8080"),
        ("https://example.com/api/v1/", Address("example.com", 443, True, "/api"), "example.com:443"),
        ("http://[::1]:80/v1", Address("::1", 80, False, ""), "[::1]:80"),
    ],
)
def test_addresses(url: str, address: Address, header: str) -> None:
    assert address_of(url) == address and address.header == header
    with pytest.raises(UsageError, match="expected the address of a server"):
        address_of(f"{url} and more")


def test_other_servers_errors_end_no_level(server: FakeServer) -> None:
    """A server that leaves in the middle: the rest of the requests is counted, and the level ends."""
    load = Load(Client(Address("127.0.0.1", 1, False, "")), False, 4, 3, [], random.Random(1))
    level = asyncio.run(run_level(load, 3, 12))
    assert level.requests == 12 and level.failures == {"the connection was refused": 12} and level.duration_s > 0
