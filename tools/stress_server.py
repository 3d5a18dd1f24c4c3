"""Many requests at once, and thousands of malformed ones, against `vkback serve`: each is answered or refused, and the server stays as it
was.

    python tools/stress_server.py [--at-once 200] [--rounds 6] [--malformed 5000] [--seed 0] [-m demo-dense]

Starts a server of its own on a free port. Rounds of requests at once, chats and completions, streamed or not, some that leave in the
middle: all others must be answered whole or refused with 429, none lost. Malformed requests, in as many rounds, must get 4xx, and
the server's log no traceback. Its memory must be as large after the last round of either kind as after the second. Status 1 where any of
this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "It was a dark and stormy night and"
MESSAGES = [{"role": "user", "content": "Hello"}]
PATHS: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": MESSAGES}}
MAX_TOKENS = 120
MAX_KIB = 4096
"""Memory that the rounds after the second may add: what 200 connections take comes and goes."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""What several threads' heaps keep of freed memory comes and goes by 30 MiB, and would hide a leak."""
START_S = 120.0

WRONG: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1.5, "1", []),
    "temperature": (-1, "0", True, {}),
    "top_p": (-0.1, 1.1, "1"),
    "top_k": (2**40, 0.5),
    "min_p": (2, "a"),
    "seed": (1.5, "1"),
    "stop": (5, ["a"] * 300, [1]),
    "presence_penalty": (9, "1"),
    "frequency_penalty": (-9, []),
    "repeat_penalty": (0, "1"),
    "ignore_eos": ("true", 1),
    "logit_bias": ({"a": 1}, {"1": 101}, {"-1": 1}, {"99999999": 1}, []),
    "n": (0, 129, "1"),
    "logprobs": (-1, 21, "x"),
    "stream": ("yes", 1),
    "stream_options": (5, {}, {"x": 1}),
    "model": ("gpt", 5),
    "unknown": (1,),
    "tools": ([1],),
    "prompt": ("", [], [-1], [10**9], ["a", ""], [[1], "a"], {}),
    "echo": ("yes",),
    "suffix": ("a",),
    "best_of": (0, 129, "2"),
    "messages": ([], "x", [{}], [{"role": "user"}], [{"role": 1, "content": ""}], [1]),
    "top_logprobs": (1, 99),
    "response_format": (
        "json_object",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": [1]}},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    ),
}
"""Field -> values that no endpoint of a strict server takes (some fields are of one endpoint only)."""

BROKEN = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"prompt": "x", "temperature": NaN}',
    b'"' + b"a" * 99,
    b" " * 100_001,
    b'{"prompt": null, "messages": null}',
    b'{"prompt": "x", "prompt": 5}',
    b'{"prompt": "\\ud800"',
    b"\x00" * 64,
    b'{"prompt": "x"}{}',
)


@dataclass(frozen=True)
class Request:
    """A request as it goes over the line."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def _post(path: str, body: bytes) -> Request:
    return Request("POST", path, {"Content-Type": "application/json"}, body)


def malformed(count: int, seed: int = 0) -> list[Request]:
    """So many requests that no server may answer. First every wrong value and broken body once, then a draw of them, of requests cut short,
    of bytes, and of wrong headers, methods and paths."""
    fields = [(key, value) for key, values in WRONG.items() for value in values]
    found = [_post(path, json.dumps(body | {key: value}).encode()) for path, body in PATHS.items() for key, value in fields]
    found += [_post(path, body) for path in PATHS for body in BROKEN]
    rng = random.Random(seed)
    while len(found) < count:
        path, body = rng.choice(list(PATHS.items()))
        text = json.dumps(body | {"max_tokens": 1}).encode()
        kind = rng.randrange(6)
        if kind == 0:
            key, value = rng.choice(fields)
            more = {key: value for key, value in rng.sample(fields, 2) if key not in body}
            found.append(_post(path, json.dumps(body | {"max_tokens": 1} | more | {key: value}).encode()))
        elif kind == 1:
            found.append(_post(path, text[: rng.randrange(len(text))]))
        elif kind == 2:
            found.append(_post(path, rng.randbytes(rng.randrange(200))))
        elif kind == 3:  # a sign of the form, made another one
            at = rng.choice([i for i, b in enumerate(text) if b in b'{}[]":,'])
            found.append(_post(path, text[:at] + rng.choice((b"", b"\x00", b"?", b"{{", b"\xc3")) + text[at + 1 :]))
        elif kind == 4:
            content = rng.choice(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonx"))
            found.append(Request("POST", path, {"Content-Type": content}, text))
        else:
            method = rng.choice(("GET", "PUT", "DELETE", "PATCH"))
            place = rng.choice((path, "/v1/" + rng.randbytes(6).hex(), "/v1/models/nothing", path + "/x", "/%00", "/../etc/passwd"))
            found.append(Request(method, place, {}, b""))
    return found[:count]


def refused(status: int, text: str) -> str:
    """What is wrong with the answer to a malformed request; "" if nothing is."""
    if not 400 <= status < 500:
        return f"status {status}, expected 4xx: {text[:200]}"
    if "Traceback" in text:
        return "a traceback in the answer"
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error object in the answer: {text[:200]}"
    return "" if set(error) == {"message", "type", "param", "code"} and error["message"] else f"another error object: {text[:200]}"


async def send_malformed(client: httpx.AsyncClient, requests: list[Request], at_once: int = 8) -> tuple[Counter[int], list[str]]:
    """Statuses, and what was wrong with which request."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    left = iter(requests)

    async def some() -> None:
        for request in left:
            try:
                reply = await client.request(request.method, request.path, headers=request.headers, content=request.body)
            except httpx.HTTPError as e:
                wrong.append(f"{request.method} {request.path} {request.body[:80]!r}: no answer: {e!r}")
                continue
            statuses[reply.status_code] += 1
            if why := refused(reply.status_code, reply.text):
                wrong.append(f"{request.method} {request.path} {request.body[:80]!r}: {why}")

    await asyncio.gather(*(some() for _ in range(at_once)))
    return statuses, wrong


async def send_at_once(client: httpx.AsyncClient, count: int, rng: random.Random, tokens: int = 4) -> tuple[Counter[str], list[str]]:
    """How so many requests at once ended, and what was wrong. Every eleventh leaves when it has its first byte."""

    async def one(number: int) -> str:
        path, body = rng.choice(list(PATHS.items()))
        stream = rng.random() < 0.5
        asked = body | {"max_tokens": tokens, "temperature": 0, "stream": stream}
        async with client.stream("POST", path, json=asked) as reply:
            if number % 11 == 10:
                return "left"
            text = (await reply.aread()).decode()
        if reply.status_code == 429:
            return "refused" if int(reply.headers["retry-after"]) >= 1 else "429 without Retry-After"
        if reply.status_code != 200:
            return f"status {reply.status_code}: {text[:200]}"
        if stream:
            return "answered" if text.endswith("data: [DONE]\n\n") and '"error"' not in text else f"a stream cut short: {text[-200:]}"
        return "answered" if json.loads(text)["usage"]["completion_tokens"] == tokens else f"another answer: {text[:200]}"

    ends = await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)
    told = Counter(end if isinstance(end, str) else f"lost: {end!r}" for end in ends)
    return told, [end for end in told if end not in ("answered", "refused", "left")]


def garbage(port: int, seed: int) -> str:
    """Bytes that are no HTTP at all; what was wrong with the answer, "" if nothing was."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(random.Random(seed).randbytes(64) + b"\r\n\r\n")
        line.shutdown(socket.SHUT_WR)
        answer = line.recv(4096)
    return "" if not answer or answer.startswith(b"HTTP/1.1 4") else f"bytes got {answer[:60]!r}"


@contextmanager
def server(model: str, log: Path, max_queue: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server of its own and its port; ended by SIGTERM."""
    command = [
        sys.executable,
        "-m",
        "vkback.cli.main",
        "serve",
        "-m",
        model,
        "--port",
        "0",
        "--chat-template",
        "plain",
        "--ctx",
        "128",
        "--strict",
        "--strict-model",
        "--max-tokens",
        str(MAX_TOKENS),
        "--max-queue",
        str(max_queue),
        "--max-body",
        "100000",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | ONE_HEAP)
    try:
        until = time.monotonic() + START_S
        while not (found := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8", errors="replace"))):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start:\n{log.read_text(encoding='utf-8', errors='replace')}")
            time.sleep(0.1)
        yield process, int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def resident_kib(pid: int) -> int:
    """Memory of a process that no file stands behind."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])


async def stress(pid: int, port: int, at_once: int, rounds: int, bad: int, seed: int) -> list[str]:
    """All that was wrong."""
    wrong: list[str] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as client:
        rng = random.Random(seed)
        memory: dict[str, list[int]] = {"requests at once": [], "malformed requests": []}
        cases = malformed(bad, seed)
        for kind, resident in memory.items():
            for number in range(rounds):
                begun = time.monotonic()
                if kind == "requests at once":
                    told, more = await send_at_once(client, at_once, rng)
                    sent, counts = at_once, ", ".join(f"{n} {end}" for end, n in sorted(told.items()))
                else:
                    part = cases[number * bad // rounds : (number + 1) * bad // rounds]
                    statuses, more = await send_malformed(client, part)
                    sent, counts = len(part), ", ".join(f"{n} got {status}" for status, n in sorted(statuses.items()))
                wrong += more
                resident.append(resident_kib(pid))
                print(f"{sent} {kind}: {counts}; {time.monotonic() - begun:.1f} s, {resident[-1]} KiB resident", flush=True)
            if rounds > 2 and resident[-1] - resident[1] > MAX_KIB:
                wrong.append(f"{kind}: memory grew by {resident[-1] - resident[1]} KiB after the second round, at most {MAX_KIB} may be")
        wrong += [why for i in range(min(20, bad)) if (why := garbage(port, i))]
        last = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        health = (await client.get("/health")).json()
        if last.status_code != 200 or health["status"] not in ("idle", "busy") or health["queued"]:
            wrong.append(f"afterwards: {last.status_code} {last.text[:200]}, health {health}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--malformed", type=int, default=5000)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-m", "--model", default="demo-dense")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with server(args.model, log, args.max_queue) as (process, port):
            wrong = asyncio.run(stress(process.pid, port, args.at_once, args.rounds, args.malformed, args.seed))
        if process.returncode not in (0, -signal.SIGTERM):
            wrong.append(f"the server ended with status {process.returncode}")
        if "Traceback" in log.read_text(errors="replace", encoding="utf-8"):
            wrong.append(f"its log has a traceback:\n{log.read_text(errors='replace', encoding='utf-8')[-3000:]}")
    print("\n".join(wrong[:20]) or "nothing was lost, refused otherwise, or left behind")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
