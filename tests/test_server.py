"""vkback serve, over HTTP on one small model: replies, limits, errors, clients that leave, a device that is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import shlex
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from processes import run_program

import vkback
from vkback.api import LoadedModel
from vkback.cli import serve
from vkback.cli.shell import UsageError
from vkback.device import Device, DeviceLost
from vkback.models.engine import Engine
from vkback.paths import builtin_model

pytest.importorskip("starlette", reason="vkback[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="vkback[serve] is not installed")

from pydantic import BaseModel, ConfigDict, Field  # noqa: E402  these need the packages above

from tools import stress_server  # noqa: E402
from vkback.server import app as app_module  # noqa: E402
from vkback.server.app import Limits, build_app  # noqa: E402
from vkback.server.worker import Job, Worker  # noqa: E402

PROMPT = "It was a dark and stormy night, and"
MODEL = "demo-dense-Q4_K_M"
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": 6}


class Served:
    """A server in a thread, the worker behind it, and a client."""

    def __init__(self, device: Device, limits: Limits, api_key: str | None = None, max_queue: int = 8) -> None:
        self.loads = 0

        def load() -> LoadedModel:
            self.loads += 1
            return LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False))

        self.worker = Worker(load, max_queue=max_queue)
        app = build_app(self.worker, api_key=api_key, limits=limits, template="plain", hosts=["127.0.0.1"])
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on such alone
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

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
        until = time.monotonic() + 20
        while self.worker.state != state:
            assert time.monotonic() < until, f"the worker is {self.worker.state}, not {state}"
            time.sleep(0.005)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(20)
        self._socket.close()


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(body_bytes=100_000, tokens=120))
    yield served
    served.close()
    assert served.worker.state == "stopped"


# --- replies


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
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=30) as client:
            return await stress_server.send_at_once(client, 24, random.Random(1), tokens=2)

    ends, wrong = asyncio.run(send())
    assert not wrong, wrong
    assert ends["left"] == 2 and ends.total() == 24
    assert ends["answered"] + ends["left"] >= 8, "the queue has room for eight, of which some may be those that leave"
    served.wait("idle")
    assert served.worker.queued == 0


@pytest.mark.vulkan
def test_a_full_queue_says_when_to_come_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    answer = served.worker._answer
    monkeypatch.setattr(served.worker, "_answer", lambda job: (go_on.wait(20), answer(job)))
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
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool) -> None:
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
def test_clients_take_turns(served: Served) -> None:
    order: list[str] = []
    done = threading.Event()

    def job(client: str, name: str) -> Job:
        def put(event: Any) -> None:
            if isinstance(event, vkback.Result):
                order.append(name)
                if len(order) == 5:
                    done.set()

        return Job(PROMPT, False, {"max_tokens": 2, "temperature": 0}, client, time.monotonic() + 20, put)

    for client, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")):
        served.worker.submit(job(client, name))
    assert done.wait(20)
    assert [name for name in order if name != "a1"] in (["b1", "c1", "a2", "a3"], ["a2", "b1", "c1", "a3"])


@pytest.mark.vulkan
def test_a_request_whose_time_is_over_ends_with_what_it_has(served: Served) -> None:
    ended: list[vkback.Result] = []
    done = threading.Event()

    def put(event: Any) -> None:
        job.deadline = 0.0
        if isinstance(event, vkback.Result):
            ended.append(event)
            done.set()

    job = Job(PROMPT, False, {"max_tokens": 100, "temperature": 0}, "a", time.monotonic() + 20, put)
    served.worker.submit(job)
    assert done.wait(20)
    assert ended[0].finish_reason == "length" and 0 < len(ended[0].tokens) < 100


@pytest.mark.vulkan
def test_a_device_that_hangs_does_not_hold_the_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(served.worker, "_answer", lambda job: hang.wait(20))
    monkeypatch.setattr(app_module, "_time_left", lambda job: 0.05)
    try:
        reply = served.post("/v1/completions", prompt=PROMPT, **GREEDY)
        assert reply.status_code == 503 and "has not answered" in reply.text
    finally:
        hang.set()


@pytest.mark.vulkan
def test_the_examples_of_the_page(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands and the Python of docs/server.md, to this server's port."""
    page = (Path(__file__).resolve().parent.parent / "docs/server.md").read_text(encoding="utf-8")
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
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=30) as client:
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
    for status, text, what in ((200, body, "status 200"), (400, "Traceback", "a traceback"), (400, "{}", "no error object"),
                               (404, '{"error": {"message": "m"}}', "another error object")):  # fmt: skip
        assert stress_server.refused(status, text).startswith(what)


@pytest.mark.vulkan
def test_errors_name_what_is_wrong(served: Served) -> None:
    reply = served.post("/v1/completions", prompt="x", max_tokens=500)
    assert reply.json()["error"]["param"] == "max_tokens" and "at most 120" in reply.text
    reply = served.post("/v1/completions", prompt="word " * 500)
    assert reply.status_code == 400 and "the context has 128" in reply.text
    assert served.post("/v1/completions", prompt="x", model="gpt").status_code == 404
    assert served.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert served.client.post("/v1/completions", content=b" " * 200_000, headers={"Content-Type": "application/json"}).status_code == 413
    assert served.client.get("/health", headers={"Host": "other.example"}).status_code == 400
    assert served.client.get("/v1/nothing").json()["error"]["code"] and served.client.get("/v1/completions").status_code == 405


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

    loads, model, load = served.loads, served.worker._model, served.worker._load
    assert model is not None
    monkeypatch.setattr(model.engine, "prompt", lose)
    monkeypatch.setattr(served.worker, "_load", lose)
    for _ in range(2):  # it is lost; it cannot be opened
        reply = served.post("/v1/completions", prompt=PROMPT, **GREEDY)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "device_lost"
        health = served.client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "device_lost"
    monkeypatch.setattr(served.worker, "_load", load)
    assert served.text()["usage"]["completion_tokens"] == 6 and served.loads == loads + 1
    assert served.client.get("/health").json()["lost"] == 1


@pytest.mark.vulkan
def test_a_device_lost_in_a_stream_is_its_last_event(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served.worker._model
    assert model is not None
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


def test_a_missing_extra_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PACKAGES", ("starlette", "not_there"))
    with pytest.raises(UsageError, match=r"serve needs not_there, .* pip install 'vkback\[serve\]'"):
        serve.require_packages()
