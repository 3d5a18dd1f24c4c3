"""vkback serve, over HTTP on one small model: replies, limits, errors, clients that leave, a device that is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from cli_kit import call
from make_gguf import llama_metadata, llama_tensors, write_gguf
from processes import let_signals_end, run_program
from waiting import PATIENCE_S, wait_until

import vkback
from vkback.api import LoadedModel
from vkback.cli import main, serve, vkbench
from vkback.cli.shell import UsageError
from vkback.device import Device, DeviceLost
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine, EngineError
from vkback.gguf.file import GgufFile
from vkback.gguf.tokenizer import Tokenizer
from vkback.models.texts import Pooling
from vkback.paths import builtin_model
from vkback.shader.errors import NoCompiler

pytest.importorskip("starlette", reason="vkback[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="vkback[serve] is not installed")

from pydantic import BaseModel, ConfigDict, Field  # noqa: E402  these need the packages above

from tools import stress_server  # noqa: E402
from vkback.server import app as app_module  # noqa: E402
from vkback.server import run as run_module  # noqa: E402
from vkback.server import schema  # noqa: E402
from vkback.server.app import Limits, build_app  # noqa: E402
from vkback.server.errors import BadRequest  # noqa: E402
from vkback.server.queued import QueuedRequest  # noqa: E402
from vkback.server.worker import Worker  # noqa: E402

PROMPT = "It was a dark and stormy night, and"
MODEL = "demo-dense-Q4_K_M"
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": 6}


class Served:
    """A server in a thread, the worker behind it, and a client."""

    def __init__(
        self,
        device: Device,
        limits: Limits,
        api_key: str | None = None,
        max_queue: int = 8,
        path: Path | None = None,
        template: str = "plain",
        strict: bool = True,
        template_kwargs: dict[str, Any] | None = None,
        parallel: int = 1,
        n_ctx: int = 128,
        cors: tuple[str, ...] | list[str] = (),
        drafts: Drafts | None = None,
        pooling: Pooling | None = None,
        lora: Sequence[Path] = (),
    ) -> None:
        self.loads = 0
        self.lost = False  # whether the device cannot be opened
        path = path or builtin_model("demo-dense")

        def load() -> LoadedModel:
            if self.lost:
                raise DeviceLost("[device] the device stopped")
            self.loads += 1
            adapters: dict[str, Any] = {"lora": list(lora) or None, "lora_switched": True}
            return LoadedModel(Engine.load(path, device, n_ctx=n_ctx, act="f32", progress=False, **adapters), drafts=drafts)

        self.worker = Worker(load, max_queue=max_queue, parallel=parallel)
        hosts = ["127.0.0.1"]
        shared: dict[str, Any] = {"template": template, "template_kwargs": template_kwargs, "strict": strict, "strict_model": strict}
        shared["pooling"] = pooling
        app = build_app(self.worker, api_key=api_key, limits=limits, hosts=hosts, cors=cors, **shared)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on such alone
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def text(self, **body: Any) -> Any:
        reply = self.post("/v1/completions", **{"prompt": PROMPT, **GREEDY, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        reply = self.post(path, stream=True, **body)
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
        *events, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def wait(self, state: str) -> None:
        wait_until(lambda: self.worker.state == state, lambda: f"the worker is {self.worker.state}: {state}")

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._socket.close()


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(body_bytes=100_000, tokens=120))
    yield served
    served.close()
    assert served.worker.state == "stopped"


# --- replies


@pytest.mark.vulkan
def test_ids_of_a_model_without_vocabulary(device: Device, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "ids.gguf", "llama", llama_metadata() | {"tokenizer.ggml.model": "no_vocab"}, llama_tensors())
    served = Served(device, Limits(), path=path)
    try:
        body = served.text(prompt=[1, 2, 3], max_tokens=5, logprobs=1)
        (choice,) = body["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 5 and body["usage"]["completion_tokens"] == 5
        events = served.events("/v1/completions", prompt=[1, 2, 3], temperature=0, max_tokens=5)
        assert [id for event in events for id in event["choices"][0].get("token_ids", [])] == choice["token_ids"]
        for endpoint, asked in (("completions", {"prompt": "Hello"}), ("chat/completions", {"messages": MESSAGES})):
            reply = served.post(f"/v1/{endpoint}", **asked)
            assert reply.status_code == 400 and "has no vocabulary" in reply.json()["error"]["message"]
    finally:
        served.close()


@pytest.mark.vulkan
def test_a_completion_is_what_the_interface_gives_streamed_or_not(served: Served, device: Device) -> None:
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)) as model:
        result = model.generate(PROMPT, temperature=0, max_tokens=6, logprobs=2)
    body = served.text(logprobs=2)
    (choice,) = body["choices"]
    assert (body["object"], body["model"], choice["index"]) == ("text_completion", MODEL, 0)
    assert (choice["text"], choice["finish_reason"]) == (result.text, "length")
    assert choice["logprobs"]["tokens"] == [t.text for t in result.logprobs]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([t.logprob for t in result.logprobs], abs=1e-3)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 6
    prompt = result.timings.prompt_tokens
    counts = {key: value for key, value in body["usage"].items() if key != "prompt_tokens_details"}
    assert counts == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    events = served.events("/v1/completions", prompt=PROMPT, **GREEDY, stream_options={"include_usage": True})
    *pieces, last, usage = events
    assert "".join(event["choices"][0]["text"] for event in pieces) == result.text
    assert (last["choices"][0]["finish_reason"], usage["choices"], usage["usage"]["completion_tokens"]) == ("length", [], 6)
    assert len({event["id"] for event in events}) == 1


@pytest.mark.vulkan
def test_a_chat_streamed_or_not_and_what_it_shares_with_the_one_before_is_not_read_again(served: Served) -> None:
    whole = served.post("/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=1, **GREEDY).json()
    (choice,) = whole["choices"]
    assert (whole["object"], choice["message"]["role"], choice["finish_reason"]) == ("chat.completion", "assistant", "length")
    assert len(choice["logprobs"]["content"]) == 6
    for entry in choice["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    first, *pieces, last = served.events("/v1/chat/completions", messages=parts, **GREEDY)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""} and first["object"] == "chat.completion.chunk"
    assert "".join(event["choices"][0]["delta"]["content"] for event in pieces) == choice["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "length"
    usage = served.post("/v1/chat/completions", messages=MESSAGES, **GREEDY).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.mark.vulkan
def test_seed_stop_bias_and_token_ids(served: Served) -> None:
    first = served.text(seed=4, temperature=1)
    served.text(prompt="Another")
    assert served.text(seed=4, temperature=1)["choices"][0]["text"] == first["choices"][0]["text"]
    greedy = served.text()["choices"][0]["text"]
    stop = greedy.strip()[2:4]
    stopped = served.text(stop=[stop])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (greedy[: greedy.index(stop)], "stop")
    ids = served.worker.tokenizer.encode(PROMPT)
    assert served.text(prompt=ids)["choices"][0]["text"] == greedy
    (token,) = {served.worker.tokenizer.encode(greedy, add_bos=False)[0]}
    assert served.text(logit_bias={str(token): -100}, max_tokens=2)["choices"][0]["text"] != greedy[: len(greedy) // 3]


@pytest.mark.vulkan
def test_the_openai_client(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    pieces = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    text = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    assert text.choices[0].text == served.text()["choices"][0]["text"]
    pieces = client.completions.create(model=MODEL, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    *pieces, usage = pieces
    assert "".join(p.choices[0].text for p in pieces) == text.choices[0].text
    assert usage.usage.total_tokens == text.usage.total_tokens
    person = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person, temperature=0)
    assert isinstance(person.choices[0].message.parsed, Person) and person.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[], **GREEDY)


@pytest.mark.vulkan
def test_the_openai_client_gets_its_own_replies_back_into_the_conversation(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)

    def ask(messages: list[Any], **options: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=messages, **GREEDY, **options).choices[0].message

    first = ask(MESSAGES)
    again = {"role": "user", "content": "And?"}
    second = ask([*MESSAGES, first, again])
    assert second.content == ask([*MESSAGES, {"role": "assistant", "content": first.content}, again]).content
    assert ask([*MESSAGES, first.model_dump(), again]).content == second.content, "with all the nulls of the client's own class"
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person, temperature=0).choices[0].message
    assert ask([*MESSAGES, parsed, again]).content
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, **GREEDY) as stream:
        list(stream)
        assert ask([*MESSAGES, stream.current_completion_snapshot.choices[0].message, again]).content == second.content


NOTHING = ("refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning_content", "name", "content")


@pytest.mark.vulkan
def test_null_is_not_given(served: Served) -> None:
    """Of every field that a client may send, those that this server does not know included, and of the fields of a message."""
    asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 1}
    plain = served.post("/v1/chat/completions", **asked).json()["choices"]
    known = {name for kind in (schema.ChatRequest, schema.CompletionRequest) for name in kind.model_fields}
    for name in sorted((known | {"audio", "prediction", "modalities", "reasoning_effort"}) - {"messages", *GREEDY}):
        reply = served.post("/v1/chat/completions", **asked, **{name: None})
        assert reply.status_code == 200 and reply.json()["choices"] == plain, (name, reply.text)
    with_nulls = {"response_format": {"type": "json_object", "json_schema": None}, "stream_options": {"include_usage": None}}
    reply = served.post("/v1/chat/completions", **asked, stream=True, **with_nulls)
    assert reply.status_code == 200, reply.text
    values: tuple[Any, ...] = (None, [], "", {})
    for value in values:
        for name in NOTHING:
            if name in ("name", "content", "reasoning_content") and isinstance(value, (list, dict)):
                continue
            if name == "name" and value == "":
                continue
            said = {"role": "assistant", "content": ""} | {name: value}
            reply = served.post("/v1/chat/completions", **asked | {"messages": [*MESSAGES, said, *MESSAGES]})
            assert reply.status_code == 200, (name, value, reply.text)
    without = served.post("/v1/chat/completions", **asked | {"messages": [*MESSAGES, {"role": "assistant"}, *MESSAGES]})
    empty = served.post("/v1/chat/completions", **asked | {"messages": [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]})
    assert without.json()["choices"] == empty.json()["choices"] == reply.json()["choices"]


@pytest.mark.vulkan
def test_several_prompts_are_several_choices(served: Served) -> None:
    texts = [PROMPT, "Another", "Who goes there"]
    ids = [served.worker.tokenizer.encode(text) for text in texts]
    alone = [served.text(prompt=text, logprobs=1) for text in texts]
    assert served.text(prompt=[PROMPT])["choices"][0]["text"] == alone[0]["choices"][0]["text"]
    for prompts in (texts, ids):
        body = served.text(prompt=prompts, logprobs=1)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        for choice, one in zip(body["choices"], alone, strict=True):
            assert choice["text"] == one["choices"][0]["text"] and choice["finish_reason"] == "length"
            assert choice["logprobs"]["text_offset"] == one["choices"][0]["logprobs"]["text_offset"]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert body["usage"][count] == sum(one["usage"][count] for one in alone)
    *events, usage = served.events("/v1/completions", prompt=texts, **GREEDY, stream_options={"include_usage": True})
    assert usage["usage"]["completion_tokens"] == 18 and len({event["id"] for event in events}) == 1
    for index, one in enumerate(alone):
        of_one = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in of_one) == one["choices"][0]["text"]
        assert [choice["finish_reason"] for choice in of_one if choice["finish_reason"]] == ["length"]
    assert served.text(prompt=[ids[1]])["choices"][0]["text"] == alone[1]["choices"][0]["text"]
    long = served.post("/v1/completions", prompt=["x", "word " * 500], **GREEDY)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    reply = served.post("/v1/completions", prompt=["x", "word " * 500], stream=True, **GREEDY)
    *_, last, rest = reply.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "context_length_exceeded" and rest == ""


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Moby", "Dick"]
    size: Annotated[int, Field(ge=1, le=9)]


@pytest.mark.vulkan
def test_a_reply_is_of_the_schema_that_was_asked_for(served: Served) -> None:
    def format_of(schema: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}

    path, names = "/v1/chat/completions", {"enum": ["Moby Dick", "Ahab"]}
    whole = served.post(path, messages=MESSAGES, response_format=format_of(names), seed=1, temperature=2).json()["choices"][0]
    assert json.loads(whole["message"]["content"]) in names["enum"] and whole["finish_reason"] == "stop"
    _, *pieces, last = served.events(path, messages=MESSAGES, response_format=format_of(names), seed=1, temperature=2)
    assert "".join(event["choices"][0]["delta"]["content"] for event in pieces) == whole["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "stop"
    anything = served.text(response_format={"type": "json_object"}, max_tokens=3)["choices"][0]["text"]
    assert anything.lstrip().startswith("{")
    plain = served.text(response_format={"type": "text"}, max_tokens=3)["choices"][0]["text"]
    assert plain == served.text(max_tokens=3)["choices"][0]["text"]
    for stream in (False, True):
        refused = served.post(path, messages=MESSAGES, response_format=format_of({"type": "nonsense"}), stream=stream)
        assert refused.status_code == 400 and "the schema cannot be compiled: Invalid type: nonsense" in refused.text


# --- many, and those that leave


@pytest.mark.vulkan
def test_two_dozen_at_once_are_answered_or_told_to_come_again(served: Served) -> None:
    """`tools/stress_server.py` sends 200 at once."""

    async def send() -> tuple[Counter[str], list[str]]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=PATIENCE_S) as client:
            return await stress_server.send_at_once(client, 24, random.Random(1), tokens=2)

    ends, wrong = asyncio.run(send())
    assert not wrong, wrong
    assert ends["left"] == 2 and ends.total() == 24
    assert ends["answered"] + ends["left"] >= 8, "the queue has room for eight, of which some may be those that leave"
    served.wait("idle")
    assert served.worker.queued == 0


def answer_later(served: Served, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event) -> None:
    """Have the worker answer no request before `go_on` is set."""
    answer = served.worker._answer
    monkeypatch.setattr(served.worker, "_answer", lambda request: (go_on.wait(PATIENCE_S), answer(request)))


def stop_at_a_piece(served: Served, monkeypatch: pytest.MonkeyPatch, prompt: str = PROMPT, *, running: int = 1) -> None:
    """Have the worker stop at a piece of a prompt's text, once so many run, until the client of that has left."""
    piece = served.worker.piece

    def stopped(request: QueuedRequest, chunk: vkback.Chunk) -> None:
        piece(request, chunk)
        if request.prompt == prompt and served.worker.running == running:
            assert request.cancelled.wait(PATIENCE_S)

    monkeypatch.setattr(served.worker, "piece", stopped)


@pytest.mark.vulkan
def test_a_full_queue_says_when_to_come_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    answer_later(served, monkeypatch, go_on)
    with ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(served.post, "/v1/completions", prompt=PROMPT, temperature=0, max_tokens=1) for _ in range(12)]
        refused = [reply.result() for reply in itertools.islice(as_completed(replies), 3)]  # one runs, eight wait
        go_on.set()
        answered = [reply.result() for reply in replies if reply.result() not in refused]
    assert {r.status_code for r in refused} == {429} and {r.json()["error"]["code"] for r in refused} == {"queue_full"}
    assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
    assert len({r.json()["choices"][0]["text"] for r in answered}) == 1 and len(answered) == 9


@pytest.mark.vulkan
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_a_piece(served, monkeypatch)
    before = served.worker.counts.cancelled
    body = json.dumps({"prompt": PROMPT, "max_tokens": 110, "stream": stream, "temperature": 0}).encode()
    headers = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", "")).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head + body)
        served.wait("busy")
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
    served.wait("idle")
    assert served.worker.counts.cancelled == before + 1


@pytest.mark.vulkan
def test_a_stream_that_waits_gets_its_head_and_comments(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no proxy and no client takes it for dead. What it gets in the end is what it would have got at once."""
    asked = {"messages": MESSAGES, "stream": True, **GREEDY}
    *events, _, _ = served.post("/v1/chat/completions", **asked).text.split("\n\n")
    at_once = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
    go_on = threading.Event()
    answer_later(served, monkeypatch, go_on)
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.05)
    with served.client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        head = [next(lines) for _ in range(6)]
        assert '"role": "assistant"' in head[0] and head[2::2] == [": waiting"] * 2
        go_on.set()
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest.pop() == "data: [DONE]"
    assert [json.loads(line[6:])["choices"][0]["delta"] for line in (head[0], *rest)] == at_once
    go_on.clear()
    with served.client.stream("POST", "/v1/completions", json={"prompt": "word " * 500, "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines) == ": waiting"
        go_on.set()
        *_, last = (line for line in lines if line)
    assert json.loads(last[6:])["error"]["code"] == "context_length_exceeded", "an error after the head is the last event"


@pytest.mark.vulkan
def test_a_server_that_ends_tells_those_who_run_and_wait_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(device, Limits())
    go_on = threading.Event()
    answer_later(served, monkeypatch, go_on)
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.05)
    try:
        asked = {"prompt": PROMPT, "stream": True}
        with ThreadPoolExecutor(2) as pool, served.client.stream("POST", "/v1/completions", json=asked) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": waiting"
            waits = pool.submit(served.post, "/v1/completions", prompt=PROMPT)
            wait_until(lambda: served.worker.queued)
            served.worker.end()
            *_, last = (line for line in lines if line)
            assert json.loads(last[6:])["error"] == {
                "message": "[server] the server is ending",
                "type": "server_error",
                "param": None,
                "code": "unavailable",
            }
            assert waits.result().status_code == 503 and served.post("/v1/completions", prompt="x").status_code == 503
        assert not go_on.is_set(), "nobody waited for the device"
    finally:
        go_on.set()
        served.close()


@pytest.mark.vulkan
def test_each_request_is_a_line_of_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vkback.server")
    served.text()
    served.events("/v1/completions", prompt=[PROMPT, PROMPT], **GREEDY)
    served.post("/v1/completions", prompt="x", temperature="hot\n")
    served.client.get("/a%0ab")
    served.client.get("/health")
    served.post("/v1/completions", prompt=["x", "word " * 500], stream=True, **GREEDY)
    wait_until(lambda: len(caplog.messages) >= 5, lambda: f"five lines beside {caplog.messages}")
    whole, stream, wrong, nowhere, cut = caplog.messages
    seconds = r"127\.0\.0\.1 POST /v1/completions %s, \d+\.\d\d s, "
    assert re.fullmatch(seconds % 200 + r"prompt \d+ tokens, \d+ known; reply 6, length", whole), whole
    assert re.fullmatch(seconds % 200 + r"prompt \d+ tokens, \d+ known; reply 12, length, length", stream), stream
    assert re.fullmatch(seconds % 400 + r"invalid_value: \[server\] temperature: expected .*; got \"hot\\n\"", wrong), wrong
    assert "GET /a%0ab 404" in nowhere
    assert re.match(seconds % 200 + r"prompt \d+ tokens, .* length, context_length_exceeded: ", cut), cut


@pytest.mark.vulkan
def test_clients_take_turns(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    done = threading.Event()

    def request(client: str, name: str) -> QueuedRequest:
        def put(event: Any) -> None:
            if isinstance(event, vkback.Result):
                order.append(name)
                if len(order) == 5:
                    done.set()

        return QueuedRequest(PROMPT, False, {"max_tokens": 2, "temperature": 0}, client, time.monotonic() + PATIENCE_S, put)

    go_on = threading.Event()
    answer_later(served, monkeypatch, go_on)
    for client, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")):
        served.worker.submit(request(client, name))
    go_on.set()
    assert done.wait(PATIENCE_S)
    assert [name for name in order if name != "a1"] in (["b1", "c1", "a2", "a3"], ["a2", "b1", "c1", "a3"])


@pytest.mark.vulkan
def test_a_request_whose_time_is_over_ends_with_what_it_has(served: Served) -> None:
    ended: list[vkback.Result] = []
    done = threading.Event()

    def put(event: Any) -> None:
        request.deadline = 0.0
        if isinstance(event, vkback.Result):
            ended.append(event)
            done.set()

    request = QueuedRequest(PROMPT, False, {"max_tokens": 100, "temperature": 0}, "a", time.monotonic() + PATIENCE_S, put)
    served.worker.submit(request)
    assert done.wait(PATIENCE_S)
    assert ended[0].finish_reason == "length" and 0 < len(ended[0].tokens) < 100


@pytest.mark.vulkan
def test_a_device_that_hangs_does_not_hold_the_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(served.worker, "_answer", lambda request: hang.wait(PATIENCE_S))
    monkeypatch.setattr(app_module, "_time_left", lambda request: 0.05)
    try:
        reply = served.post("/v1/completions", prompt=PROMPT, **GREEDY)
        assert reply.status_code == 503 and "has not answered" in reply.text
    finally:
        hang.set()


@pytest.mark.vulkan
def test_the_examples_of_the_page(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands and the Python of docs/server.md, to this server's port."""
    page = (Path(__file__).resolve().parents[2] / "docs/server.md").read_text(encoding="utf-8")
    page = page.replace("127.0.0.1:8080", f"127.0.0.1:{served.port}").replace('"max_tokens": 64', '"max_tokens": 5').replace("=64", "=5")
    commands = [line.strip() for line in page.replace("\\\n", " ").splitlines() if line.startswith("    curl ")]
    assert len(commands) == 2
    if shutil.which("curl") is None:
        print("curl is not installed: its two commands are not run")
        commands = []
    for command in commands:
        done = run_program(shlex.split(command))
        assert done.returncode == 0 and '"choices"' in done.stdout, done.stdout + done.stderr
    pytest.importorskip("openai", reason="the openai package is not installed")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    capsys.readouterr()
    exec(compile(example, "docs/server.md", "exec"), {})
    assert capsys.readouterr().out.strip()


# --- what is refused


@pytest.mark.vulkan
def test_malformed_requests_get_4xx_and_no_traceback(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The first 400 of `tools/stress_server.py`, and bytes that are no HTTP."""

    async def send() -> tuple[Counter[int], list[str]]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=PATIENCE_S) as client:
            return await stress_server.send_malformed(client, stress_server.malformed(400))

    statuses, wrong = asyncio.run(send())
    assert not wrong, wrong[:5]
    assert statuses.total() == 400 and set(statuses) >= {400, 404, 405, 413, 415}
    assert [stress_server.garbage(served.port, seed) for seed in range(5)] == [""] * 5
    assert served.text(max_tokens=1)["usage"]["completion_tokens"] == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_an_answer_to_a_malformed_request_is_looked_at() -> None:
    body = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": "c"}})
    assert stress_server.refused(400, body) == ""
    for status, text, what in (
        (200, body, "status 200"),
        (400, "Traceback", "a traceback"),
        (400, "{}", "no error object"),
        (404, '{"error": {"message": "m"}}', "another error object"),
    ):
        assert stress_server.refused(status, text).startswith(what)


@pytest.mark.vulkan
def test_errors_name_what_is_wrong(served: Served) -> None:
    reply = served.post("/v1/completions", prompt="x", max_tokens=1.5)
    assert (
        reply.json()["error"]["param"] == "max_tokens"
        and "expected a whole number; below 0: as many as there may be; got 1.5" in reply.text
    )
    assert served.post("/v1/completions", prompt="x", model="gpt").status_code == 404
    assert served.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert served.client.post("/v1/completions", content=b" " * 200_000, headers={"Content-Type": "application/json"}).status_code == 413


@pytest.mark.vulkan
def test_a_path_that_is_none_gets_the_names_of_those_that_are(served: Served) -> None:
    for path, near in (
        ("/v1/chat/completion", " Did you mean /v1/chat/completions?"),
        ("/api/chat", " Ollama's API is not served:"),
        ("/x", ""),
    ):
        reply = served.post(path, messages=MESSAGES)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "unknown_endpoint")
        assert error["message"].startswith(f"[server] POST {path}: there is no such endpoint.{near}")
        assert "There are /v1/chat/completions, " in error["message"]
    error = served.client.get("/v1/completions")
    assert error.status_code == 405 and error.json()["error"]["message"] == "[server] GET /v1/completions: this endpoint takes POST"
    assert served.client.get("/v1/messages").json()["type"] == "error", "Anthropic's form"
    assert served.text(**GREEDY, prompt=PROMPT)["choices"] == served.post("/completions", **GREEDY, prompt=PROMPT).json()["choices"]


@pytest.mark.vulkan
def test_another_host_is_refused_in_the_api_s_form_with_what_cures_it(served: Served) -> None:
    for host in ("llm.example.com", "llm.example.com:8080"):
        reply = served.client.get("/health", headers={"Host": host})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["code"] == "invalid_host" and error["type"] == "invalid_request_error"
        assert "'llm.example.com'" in error["message"] and "--allowed-hosts llm.example.com" in error["message"]
        assert "--host 0.0.0.0" in error["message"]
    assert served.client.get("/health", headers={"Host": "127.0.0.1:1"}).status_code == 200


@pytest.mark.parametrize(
    ("header", "hosts", "ok"),
    [
        ("LLM.example.com:80", ["llm.example.com"], True),
        ("a.example.com", ["*.example.com"], True),
        ("example.com", ["*.example.com"], False),
        ("badexample.com", ["*.example.com"], False),
        ("[::1]:8080", ["[::1]"], True),
        ("[::1]", ["[::1]"], True),
        ("::1", ["[::1]"], False),
        ("anything", ["*"], True),
        ("", ["localhost"], False),
        ("localhost.evil.example", ["localhost"], False),
        ("127.0.0.1:x", ["127.0.0.1"], False),
    ],
)
def test_host_headers(header: str, hosts: list[str], ok: bool) -> None:
    async def nothing(*_: Any) -> None:
        raise AssertionError("not called")

    assert app_module.HostCheck(nothing, hosts)._knows(app_module.host_of(header)) is ok


@pytest.mark.vulkan
def test_a_text_beyond_the_context_has_the_code_and_the_words_that_clients_look_for(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=r"This model's maximum context length is 128 tokens\.") as chat:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 500}])
    with pytest.raises(openai.BadRequestError, match=r"your prompt resulted in \d{3,} tokens\. Please reduce the length") as text:
        client.completions.create(model=MODEL, prompt="word " * 500)
    assert all("context_length_exceeded" in str(e.value) for e in (chat, text)), "where LangChain looks for it"
    assert [(e.value.code, e.value.param) for e in (chat, text)] == [("context_length_exceeded", name) for name in ("messages", "prompt")]


@pytest.mark.vulkan
def test_max_tokens_above_what_fits_is_as_many_as_fit(served: Served) -> None:
    banned = {str(token): -100 for token in served.worker.tokenizer.eos_ids}
    most = served.text(prompt="x", max_tokens=10**6, logit_bias=banned)
    assert most["choices"][0]["finish_reason"] == "length" and most["usage"]["completion_tokens"] == 120, "the server's limit"
    prompt = "word " * 20
    rest = served.text(prompt=prompt, max_tokens=4096, logit_bias=banned)
    assert rest["choices"][0]["finish_reason"] == "length" and rest["usage"]["total_tokens"] in (128, 129), "the context's"
    chat = served.post("/v1/chat/completions", messages=MESSAGES, max_completion_tokens=4096, temperature=0, logit_bias=banned).json()
    assert chat["choices"][0]["finish_reason"] == "length"


@pytest.mark.vulkan
@pytest.mark.parametrize("error", [EngineError("[engine] m.gguf: logits are not numbers at position 7"), NoCompiler("[shader] no glslc")])
def test_a_fault_of_model_or_device_is_no_bad_request(served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(served.worker.model.engine, "prompt", fail)
        reply = served.post("/v1/completions", prompt=PROMPT, **GREEDY)
    told = reply.json()["error"]
    assert (reply.status_code, told["type"], told["code"]) == (500, "server_error", "internal_error") and told["message"] == str(error)
    assert served.text()["usage"]["completion_tokens"] == 6


WRONG_VALUES: tuple[Any, ...] = (
    5,
    -1,
    1.5,
    10**40,
    "",
    "x",
    True,
    [],
    {},
    [1, "a"],
    ["a", ""],
    [[]],
    [[-1]],
    {"a": "b"},
    [{"a": 1}],
    {"type": 5},
    [{"type": "text"}],
    [{"role": "user", "content": [{"type": "text", "text": 4}]}],
    [{"role": "user", "content": {"a": 1}}],
    {"type": "json_schema"},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    {"type": "json_object", "json_schema": {"x": 1}},
    {"type": "json_schema", "json_schema": {"schema": 5, "name": 5, "strict": "x"}},
    {"include_usage": "yes"},
    {"1": 101},
    "x" * 300,
)
INNER = re.compile(
    r"pydantic|Input should|Value error|Field required|constrained|literal|union|valid(ator|ation)|function-|(list|dict|tuple|set)\[|"
    r"\b(str|int|float|bool|dict|NoneType|none_required)\b|items? after|[a-z]_error"
)
"""Words of the library that checks, and of Python's types."""


def fields_of(kind: type[BaseModel]) -> set[str]:
    found = set()
    for name, field in kind.model_fields.items():
        found.add(field.alias or name)
        for inner in schema._models(field.annotation):
            found |= fields_of(inner)
    return found


@pytest.mark.parametrize("kind", [schema.CompletionRequest, schema.ChatRequest])
def test_no_error_tells_inner_names(kind: type[BaseModel]) -> None:
    """Every field of a request, of messages, parts and formats, with values of every wrong kind."""
    good = {"prompt": "x"} if kind is schema.CompletionRequest else {"messages": MESSAGES}
    fields = [field.alias or name for name, field in kind.model_fields.items()]
    bodies = [good | {name: value} for name in [*fields, "unknown"] for value in WRONG_VALUES]
    if kind is schema.ChatRequest:
        for name in [*schema.ChatMessage.model_fields, "unknown"]:
            bodies += [{"messages": [*MESSAGES, MESSAGES[0] | {name: value}]} for value in WRONG_VALUES]
    names, refused = fields_of(kind) | {"unknown", "x", "a"}, Counter[str]()
    for body in bodies:
        try:
            schema.parse(kind, json.dumps(body).encode())
        except BadRequest as e:
            said = str(e).removeprefix("[server] ").split("; got ")[0]
            assert not INNER.search(said), (body, said)
            assert e.param is None or e.param in names or all(part.isdigit() or part in names for part in e.param.split(".")), (
                body,
                e.param,
            )
            assert "nothing" not in said, f"{body}: its field has no description"
            refused[e.param if e.param in fields else (e.param or "").split(".")[0]] += 1
    assert set(refused) >= {*fields, "unknown"}, "each field was refused at least once"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stop": 5}, "stop: expected a text of at most 4096 characters, or a list of at most 256 of them; got 5"),
        ({"temperature": "hot"}, 'temperature: expected a number of at least 0; got "hot"'),
        ({"speculative_n_max": 1}, r"speculative_n_max: is no field of this endpoint. Did you mean speculative.n_max\?"),
        ({"tempreature": 1}, r"tempreature: is no field of this endpoint. Did you mean temperature\?"),
        ({"messages": None}, "messages: is missing; expected at least one message"),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing; expected a message as"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "content.0: audio is not supported"),
        ({"messages": [{"role": "tool", "content": "5", "tool_call_id": 5}]}, "tool_call_id: expected the id of a call, a text; got 5"),
        ({"messages": [MESSAGES[0] | {"tool_calls": [{"function": {"name": "f"}}]}]}, "messages.0: tool_calls are in a message of"),
        ({"tools": 5}, "tools: expected a list of tools, as"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
    ],
)
def test_errors_of_fields_are_in_plain_words(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        schema.parse(schema.ChatRequest, json.dumps({"messages": MESSAGES} | body).encode())


# --- beside the endpoints of text


@pytest.mark.vulkan
def test_models_health_metrics_and_page(served: Served) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL and served.client.get(f"/v1/models/{MODEL}").json() == model
    served.wait("idle")
    health = served.client.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "idle" and health.json()["queued"] == 0
    metrics = dict(line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(metrics["vkback_device_up"]) == 1
    assert float(metrics["vkback_generated_tokens_total"]) == served.worker.counts.generated_tokens
    page = served.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "http://" not in page.text and "https://" not in page.text


@pytest.mark.vulkan
def test_a_lost_device_is_told_and_opened_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> Any:
        raise DeviceLost("[device] the device stopped")

    loads, model = served.loads, served.worker.model
    monkeypatch.setattr(model.engine, "prompt", lose)
    served.lost = True
    for _ in range(2):  # it is lost; it cannot be opened
        reply = served.post("/v1/completions", prompt=PROMPT, **GREEDY)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "device_lost"
        health = served.client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "device_lost"
    served.lost = False
    assert served.text()["usage"]["completion_tokens"] == 6 and served.loads == loads + 1
    assert served.client.get("/health").json()["lost"] == 1


@pytest.mark.vulkan
def test_a_device_lost_in_a_stream_is_its_last_event(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served.worker.model
    generate = model.engine.generate

    def lose(*given: Any, **options: Any) -> Iterator[int]:
        tokens = generate(*given, **options)
        yield from (next(tokens) for _ in range(3))
        tokens.close()
        raise DeviceLost("[device] the device stopped")

    monkeypatch.setattr(model.engine, "generate", lose)
    reply = served.post("/v1/completions", prompt=PROMPT, stream=True, **GREEDY)
    *pieces, last, rest = reply.text.split("\n\n")
    assert reply.status_code == 200 and pieces and rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "device_lost"
    assert served.text()["usage"]["completion_tokens"] == 6


@pytest.mark.vulkan
def test_an_api_key_is_asked_for_and_time_ends_a_request(device: Device) -> None:
    served = Served(device, Limits(request_s=0.0), api_key="sécret")
    try:
        assert served.client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert served.client.get(path).status_code == 401
            assert served.client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert served.client.get(path, headers={"Authorization": "Bearer sécret".encode()}).status_code == 200
        assert served.post("/v1/completions", prompt="x").status_code == 401
        late = served.client.post("/v1/completions", json={"prompt": "x"}, headers={"Authorization": "Bearer sécret".encode()})
        assert late.status_code == 503 and late.json()["error"]["code"] == "unavailable"
    finally:
        served.close()


@pytest.mark.vulkan
def test_serve_with_the_built_in_model_its_log_and_sigterm_within_a_stream(tmp_path: Path) -> None:
    """As a program: without a template, under another name and for another host, ended while a reply streams."""
    command = [sys.executable, "-m", "vkback.cli.main", "serve", "--port", "0", "-c", "512", "--alias", "house"]
    with (tmp_path / "log").open("wb") as out:
        process = subprocess.Popen([*command, "--allowed-hosts", "llm.example.com"], stderr=out, stdout=out, preexec_fn=let_signals_end)
    try:

        def log() -> str:
            return (tmp_path / "log").read_text()

        def started() -> re.Match[str] | None:
            assert process.poll() is None, log()
            return re.search(r"running on http://127\.0\.0\.1:(\d+)", log())

        found = wait_until(started, log)
        assert 'demo-dense-Q4_K_M.gguf has no chat template: taken is --chat-template plain, and "User:" ends a reply' in log()
        with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=PATIENCE_S) as client:
            for host in ("llm.example.com", "localhost", "127.0.0.1", f"[::1]:{found[1]}"):
                assert client.get("/v1/models", headers={"Host": host}).json()["data"][0]["id"] == "house"
            assert client.get("/health", headers={"Host": "other.example.com"}).json()["error"]["code"] == "invalid_host"
            asked = {"messages": MESSAGES, "temperature": 1.5, "seed": 3, "model": MODEL}
            reply = client.post("/v1/chat/completions", json=asked | {"max_tokens": 60}).json()
            assert reply["model"] == "house" and "User:" not in reply["choices"][0]["message"]["content"]
            banned = {str(token): -100 for token in Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense"))).eos_ids}
            endless = {"prompt": PROMPT, "logit_bias": banned, "stream": True, "max_tokens": 480, "logprobs": 0}
            with client.stream("POST", "/v1/completions", json=endless) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                *_, last = (line for line in lines if line)
                assert json.loads(last[6:])["error"]["message"] == "[server] the server is ending"
        assert process.wait(PATIENCE_S) in (-signal.SIGTERM, 128 + signal.SIGTERM), log()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log() and "CancelledError" not in log(), log()
    assert re.search(r"\d\d:\d\d:\d\d 127\.0\.0\.1 POST /v1/chat/completions 200, .* s, prompt \d+ tokens", log())
    assert re.search(r"POST /v1/completions 200, .* s, unavailable: \[server\] the server is ending", log())


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("template", "code", "said"),
    [
        (None, 0, r"vkback: warning: \[chat\] demo-dense-Q4_K_M.gguf has no chat template; give one: .* answer with that error"),
        ("{% if %}", 2, "vkback: error: --chat-template .*own: .*Expected an expression"),
        ("{{ 'a' * 10**8 }}", 2, "vkback: error: --chat-template .*own: .*its chat template makes more than"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", 0, ""),
    ],
)
def test_serve_looks_at_the_chat_template_when_it_starts(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    template: str | None,
    code: int,
    said: str,
) -> None:
    (tmp_path / "own").write_text(template or "")
    monkeypatch.setattr(LoadedModel, "_builtin", False)
    monkeypatch.setattr(run_module, "run_app", lambda *_, **__: None)
    given = () if template is None else ("--chat-template", str(tmp_path / "own"))
    assert call(monkeypatch, main.main, "serve", "--port", "0", "-c", "64", "--device", str(device.index), *given) == code
    err = capsys.readouterr().err
    assert re.search(said, err) and ("warning" in err) == (template is None), err


@pytest.mark.parametrize(
    ("host", "given", "found"),
    [
        ("127.0.0.1", [], ["127.0.0.1", "[::1]", "localhost"]),
        ("::1", [], ["127.0.0.1", "[::1]", "localhost"]),
        ("0.0.0.0", [], ["*"]),
        ("0.0.0.0", ["a.example"], ["127.0.0.1", "[::1]", "localhost", "a.example"]),
    ],
)
def test_hosts_that_a_server_answers_to(host: str, given: list[str], found: list[str]) -> None:
    assert serve.hosts_of(host, given) == found


def test_a_missing_extra_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PACKAGES", ("starlette", "not_there"))
    with pytest.raises(UsageError, match=r"serve needs what is not installed: not_there. .* pip install 'vkback\[serve\]'"):
        serve.require_packages()


def test_ignore_eos_goes_on_to_the_last_token(served: Served) -> None:
    wanted = {str(token): 100 for token in served.worker.tokenizer.eos_ids}
    assert served.text(logit_bias=wanted)["usage"]["completion_tokens"] < GREEDY["max_tokens"]
    reply = served.text(logit_bias=wanted, ignore_eos=True)
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (GREEDY["max_tokens"], "length")
    refused = served.post("/v1/completions", prompt=PROMPT, ignore_eos=True, response_format={"type": "json_object"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ignore_eos")


# --- its speed


@pytest.mark.parametrize("path", ["", "--chat"])
def test_vkbench_measures_it(path: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"serve --url http://127.0.0.1:{served.port} --clients 1,2 --requests 3 --prompt-tokens 40 --max-tokens 8 --seed 1 --json {path}"
    assert call(monkeypatch, vkbench.main, *line.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["clients"], row["done"], row["errors"]) for row in rows] == [(1, 3, 0), (2, 3, 0)]
    for row in rows:
        assert (row["model"], row["device"]) == (MODEL, served.worker.device_name)
        assert row["ignore_eos"] and row["output_tokens"] == 24
        assert 90 <= row["prompt_tokens"] <= 150, "40 each: the vocabulary has some words in parts"
        assert 0 < row["ttft_p50_ms"] < 1e3 * row["duration_s"] and row["output_ts"] > 0
