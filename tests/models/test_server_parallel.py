"""vkback serve --parallel: clients at once, each with the text that it would have alone. Those that leave, fail or take too long harm
nobody."""

from __future__ import annotations

import gc
import json
import mmap
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_server import GREEDY, MESSAGES, MODEL, PROMPT, Served, stop_at_a_piece
from waiting import PATIENCE_S, wait_until

import vkback
from vkback.device import Device, DeviceLost
from vkback.engine.batch.caches import PagedCaches
from vkback.engine.batch.scheduler import Step
from vkback.engine.engine import Engine, EngineError
from vkback.ops.sampling.sample import noise
from vkback.paths import builtin_model
from vkback.server.app import Limits
from vkback.server.errors import ServerError, Unavailable
from vkback.server.queued import QueuedRequest
from vkback.server.worker import Worker, sequences_of

MARGIN = 2e-3
"""Of the logits' deviation: steps of more columns add in another order (tests/models/test_api_batch.py)."""

PROMPTS = [PROMPT, "Another", "Who goes there", "The sea was calm", "She said", "The old man", "In the morning", "Nobody knew"]


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(), parallel=8, max_queue=64)
    yield served
    served.close()
    assert served.worker.state == "stopped"


def pages_in_use(served: Served) -> int:
    batch = served.worker.batch
    assert batch is not None
    return batch.pool.n_pages - batch.pool.available


def assert_idle(served: Served) -> None:
    """Nothing runs, and no page is held but by the prefix cache."""
    wait_until(
        lambda: not served.worker.running and not pages_in_use(served),
        lambda: f"{served.worker.running} run and hold {pages_in_use(served)} pages: the end of both",
    )


def begin_together(served: Served, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have the worker begin so many requests that come from here on in one round, but for the first, which it may begin before the others
    have come. A busy machine may let them run one after the other."""
    worker, came = served.worker, False
    take = worker.take

    def together(running: int) -> Sequence[QueuedRequest] | None:
        nonlocal came
        if running and not came:
            wait_until(lambda: running + worker.queued >= count, lambda: f"{running} run, {worker.queued} wait: the coming of {count}")
            came = True
        return take(running)

    monkeypatch.setattr(worker, "take", together)


def assert_text(served: Served, prompt: str, text: str, count: int, seed: int | None) -> None:
    """The text that the model makes alone, up to where its two best scores are closer than rounding may put them."""
    model = served.worker.model
    ids = model.ids(prompt, start=True)
    sampling: dict[str, Any] = {"temperature": 0} if seed is None else {"seed": seed, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    alone = model.generate(prompt, max_tokens=count, **sampling).tokens
    texts = [model.tokenizer.decode(alone[: i + 1]) for i in range(len(alone))]
    if text == texts[-1]:
        return
    at = next(i for i, part in enumerate(texts) if not text.startswith(part.rstrip("\ufffd")))
    row = model.logits([*ids, *alone[:at]])[-1].astype(np.float64)
    scores = row if seed is None else row + noise(seed, len(ids) - 1 + at, np.arange(len(row)))
    second, best = np.sort(scores)[-2:]
    assert best - second <= MARGIN * row.std(), (text, texts[-1])


def ask(served: Served, number: int, count: int) -> tuple[str, str, int, int | None]:
    """One of many clients: completions, streamed or not, greedy or with a seed."""
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    prompt, seed = PROMPTS[number % len(PROMPTS)], None if number % 2 else 100 + number
    sampling: dict[str, Any] = {"temperature": 0} if seed is None else {"temperature": 1, "seed": seed, "top_p": 1}
    extra = {} if seed is None else {"top_k": 0, "min_p": 0}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": count, "extra_body": {"ignore_eos": True, **extra}, **sampling}
        if number % 3:
            return prompt, client.completions.create(**asked).choices[0].text, count, seed
        return prompt, "".join(piece.choices[0].text for piece in client.completions.create(stream=True, **asked)), count, seed


def answered(served: Served, clients: int, each: int) -> list[tuple[str, str, int, int | None]]:
    """What so many clients at once get, none of them twice or never."""
    with ThreadPoolExecutor(clients) as pool:
        found = [
            answer
            for answers in pool.map(lambda n: [ask(served, n + i, 8 + n % 5) for i in range(each)], range(clients))
            for answer in answers
        ]
    assert len(found) == clients * each
    assert_idle(served)
    return found


def assert_all_right(served: Served, clients: int, each: int) -> None:
    for answer in answered(served, clients, each):
        assert_text(served, *answer)


@pytest.mark.vulkan
def test_eight_openai_clients_at_once_get_the_texts_that_each_would_have_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = served.worker.batch
    assert batch is not None
    steps, columns = batch.counters.steps, batch.counters.columns
    with monkeypatch.context() as patch:
        begin_together(served, patch, 8)
        assert_all_right(served, 8, 1)
    assert batch.counters.columns - columns > 2 * (batch.counters.steps - steps), "they ran beside each other"
    device = served.worker.model.engine.device
    for _ in range(20):  # until there are programs for every number of columns that they need
        before = device.live_objects()
        with monkeypatch.context() as patch:
            begin_together(served, patch, 8)
            assert_all_right(served, 8, 1)
        if device.live_objects() == before:
            break
    assert device.live_objects() == before and not batch.scheduler.texts and not batch.busy, "nothing is left of a request"


MEMORY = Path("/proc/self/statm")

ROUNDS, MAX_ROUNDS = 4, 60
"""Rounds of which none may add an object, and all there may be before those: which numbers of columns and steps meet is up to the machine,
and each is recorded when it first does."""

GROWTH = 256 << 10
"""Bytes of the process that a round of 64 clients may add once all programs are there: 4 KiB a request, which the allocator's holes are
worth. What is kept of a request would be more: its text, its events and the pages of its connection."""


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(MEMORY.read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE


@pytest.mark.vulkan
@pytest.mark.exhaustive
def test_64_openai_clients_at_once(served: Served) -> None:
    """All texts right, none lost, and memory flat: that of the process, of which the clients' is a part, and the device's objects."""
    assert_all_right(served, 64, 2)
    if not MEMORY.exists():
        pytest.skip(f"{MEMORY} says what a process has in memory, and this system has none")
    device, taken = served.worker.model.engine.device, list[int]()
    live: list[dict[str, int]] = []
    while len(live) < MAX_ROUNDS and not (len(live) >= ROUNDS and live[-1] == live[-ROUNDS]):
        answered(served, 64, 1)
        taken.append(resident())
        live.append(device.live_objects())
    print(f"MB of the process after each of {len(live)} rounds:", *(f"{n / 1e6:.2f}" for n in taken))
    assert live[-1] == live[-ROUNDS], "objects of the device"
    assert taken[-1] - taken[-ROUNDS] <= GROWTH * (ROUNDS - 1), taken


@pytest.mark.vulkan
def test_n_choices_are_those_of_seeds_that_follow_each_other(served: Served) -> None:
    alone = [served.text(seed=seed, temperature=1, ignore_eos=True)["choices"][0]["text"] for seed in (5, 6, 7)]
    body = served.text(n=3, seed=5, temperature=1, ignore_eos=True)
    assert [choice["text"] for choice in body["choices"]] == alone
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    prompt = len(served.worker.tokenizer.encode(PROMPT))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (prompt, 18), "a prompt counts once"
    *events, usage = served.events(
        "/v1/completions", prompt=PROMPT, n=3, seed=5, temperature=1, max_tokens=6, ignore_eos=True, stream_options={"include_usage": True}
    )
    choices = [event["choices"][0] for event in events]
    assert ["".join(c["text"] for c in choices if c["index"] == i) for i in range(3)] == alone
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2] and usage["usage"] == body["usage"]
    chat = served.post("/v1/chat/completions", messages=MESSAGES, n=2, **GREEDY).json()["choices"]
    assert len(chat) == 2 and chat[0]["message"] == chat[1]["message"]


@pytest.mark.vulkan
def test_best_of_is_the_text_whose_tokens_are_the_likeliest(served: Served) -> None:
    asked = {"seed": 5, "temperature": 1.5, "ignore_eos": True}
    every = served.text(n=4, logprobs=0, **asked)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 6 for c in every]
    order = sorted(range(4), key=lambda i: -means[i])
    found = served.text(best_of=4, n=2, **asked)
    assert [c["text"] for c in found["choices"]] == [every[i]["text"] for i in order[:2]]
    assert all(c["logprobs"] is None for c in found["choices"]) and found["usage"]["completion_tokens"] == 24
    for wrong, said in (({"best_of": 1, "n": 2}, "expected at least n"), ({"best_of": 3, "stream": True}, "stream: false")):
        reply = served.post("/v1/completions", prompt=PROMPT, **wrong)
        assert reply.status_code == 400 and said in reply.json()["error"]["message"]


@pytest.mark.vulkan
def test_requests_with_schemas_and_logprobs_run_beside_others(served: Served) -> None:
    names = {"enum": ["Moby Dick", "Ahab"]}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": names}}
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(6) as pool:
        json_texts = [pool.submit(served.post, path, messages=MESSAGES, response_format=schema, seed=i, temperature=2) for i in range(2)]
        likely = [pool.submit(served.text, prompt=prompt, logprobs=2) for prompt in PROMPTS[:2]]
        refused = pool.submit(served.post, "/v1/completions", prompt="word " * 500)
        wrong = pool.submit(
            served.post, path, messages=MESSAGES, response_format=schema | {"json_schema": {"schema": {"type": "nonsense"}}}
        )
    for reply in json_texts:
        choice = reply.result().json()["choices"][0]
        assert json.loads(choice["message"]["content"]) in names["enum"] and choice["finish_reason"] == "stop"
    for found in likely:
        told = found.result()["choices"][0]["logprobs"]
        assert told["token_logprobs"] == [max(top.values()) for top in told["top_logprobs"]] and len(told["tokens"]) == 6
    assert refused.result().json()["error"]["code"] == "context_length_exceeded"
    assert wrong.result().status_code == 400 and "cannot be compiled" in wrong.result().text
    assert_idle(served)


@pytest.mark.vulkan
def test_a_client_that_leaves_frees_its_pages_and_the_others_go_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_together(served, monkeypatch, 2)
    stop_at_a_piece(served, monkeypatch, running=2)
    before = served.worker.counts.cancelled
    asked = {"prompt": PROMPT, "max_tokens": 110, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head.encode() + body)
        other = pool.submit(served.text, prompt="She said", max_tokens=40, ignore_eos=True)
        assert connection.recv(10).startswith(b"HTTP/1.1 2")
        wait_until(lambda: served.worker.running == 2)
        assert not other.done()
        connection.close()
        assert other.result()["usage"]["completion_tokens"] == 40
    assert_idle(served)
    assert served.worker.counts.cancelled == before + 1


@pytest.mark.vulkan
def test_pages_of_a_client_that_left_are_free_within_a_step(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes its text out before the next step, so that none has a column of it, and its pages are free when those have ended
    that were in flight then."""
    batch = served.worker.batch
    assert batch is not None
    events: dict[str, list[Any]] = {"stays": [], "leaves": []}
    asked: vkback.GenerateOptions = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
    stays, leaves = (QueuedRequest(PROMPT, False, asked, name, time.monotonic() + PATIENCE_S, put.append) for name, put in events.items())
    noted: list[tuple[str, int]] = []
    next_action, done_step = batch.scheduler.next, batch.scheduler.done_step

    def note(name: str) -> None:
        noted.append((name, sum(len(text.pages) for text in batch.scheduler.texts.values() if text.client == "leaves")))

    def given(**how: Any) -> Any:
        """Once the text has made some tokens its client leaves, between two steps."""
        if not leaves.cancelled.is_set() and len(events["leaves"]) > 3 and batch.scheduler.running == 2:
            served.worker.cancel(leaves)
            note("left")
        action = next_action(**how)
        if isinstance(action, Step) and leaves.cancelled.is_set():
            note("with it" if any(c.text.client == "leaves" for c in action.columns) else "without it")
        return action

    def done(*args: Any) -> None:
        done_step(*args)
        if leaves.cancelled.is_set():
            note("done")

    monkeypatch.setattr(batch.scheduler, "next", given)
    monkeypatch.setattr(batch.scheduler, "done_step", done)
    run(served, [stays, leaves])
    assert noted[0][0] == "left" and noted[0][1] > 0
    free = next(i for i, (_, pages) in enumerate(noted) if not pages)
    names = [name for name, _ in noted]
    assert names[:free].count("with it") <= 1, noted  # what the round gives in which it left
    assert "with it" not in names[free:] and names[: free + 1].count("done") <= batch.limits.in_flight + 1, noted
    assert len(events["stays"][-1].tokens) == 100
    assert_idle(served)


def run(served: Served, requests: Sequence[QueuedRequest]) -> None:
    for request in requests:
        served.worker.submit(request)
    wait_until(lambda: not served.worker.running and not served.worker.queued)


@pytest.mark.vulkan
def test_a_request_whose_time_is_over_ends_with_what_it_has(served: Served) -> None:
    ends: dict[str, list[Any]] = {"late": [], "other": [], "never": []}

    def put(name: str) -> Any:
        def take(event: Any) -> None:
            ends[name].append(event)
            if name == "late":
                late.deadline = 0.0

        return take

    options: vkback.GenerateOptions = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    late = QueuedRequest(PROMPT, False, options, "a", time.monotonic() + PATIENCE_S, put("late"))
    other = QueuedRequest("She said", False, options, "b", time.monotonic() + PATIENCE_S, put("other"))
    never = QueuedRequest("She said", False, options, "c", 0.0, put("never"))
    run(served, [late, other, never])
    assert ends["late"][-1].finish_reason == "length" and 0 < len(ends["late"][-1].tokens) < 40
    assert len(ends["other"][-1].tokens) == 40
    (error,) = ends["never"]
    assert isinstance(error, Unavailable)


@pytest.mark.vulkan
def test_what_fails_for_all_ends_those_that_run_and_the_next_ones_are_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the batch, which is opened anew; a lost device, with which the model is."""
    loads = served.loads
    errors: tuple[tuple[Exception, int, str], ...] = (
        (EngineError("[batch] ran out of pages"), 500, "internal_error"),
        (DeviceLost("[device] the device stopped"), 503, "device_lost"),
    )
    for error, status, code in errors:
        batch = served.worker.batch
        advance = batch.advance  # type: ignore[union-attr]
        calls = iter([False] * 4)

        def failing(error: Exception = error, advance: Any = advance, calls: Iterator[bool] = calls) -> Any:
            if next(calls, True):
                raise error
            return advance()

        monkeypatch.setattr(batch, "advance", failing)
        with ThreadPoolExecutor(3) as pool:
            replies = [pool.submit(served.post, "/v1/completions", prompt=p, max_tokens=100, ignore_eos=True) for p in PROMPTS[:3]]
        told = [
            (reply.result().status_code, reply.result().json()["error"]["code"]) for reply in replies if reply.result().status_code != 200
        ]
        assert told and set(told) == {(status, code)}
        assert served.text()["usage"]["completion_tokens"] == 6
    assert served.loads == loads + 1 and served.client.get("/health").json()["lost"] == 1


@pytest.mark.vulkan
def test_a_fault_of_one_request_is_its_own(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.worker.model.engine
    unread = "Nobody reads this, for it is longer than what goes through the steps of other texts."
    read, bad = engine.prompt, served.worker.tokenizer.encode(unread)

    def prompt(tokens: Sequence[int], meanwhile: Callable[[], object] | None = None) -> None:
        if list(tokens) == bad[:-1]:
            raise EngineError("[engine] m.gguf: logits are not numbers at position 7")
        read(tokens, meanwhile)

    monkeypatch.setattr(engine, "prompt", prompt)
    ends: dict[str, list[Any]] = {name: [] for name in ("bad", "good")}
    options: vkback.GenerateOptions = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    until = time.monotonic() + PATIENCE_S
    good = QueuedRequest("She said", False, options, "a", until, ends["good"].append)
    run(served, [good, QueuedRequest(unread, False, options, "a", until, ends["bad"].append)])
    (error,) = ends["bad"]
    assert isinstance(error, ServerError) and "logits are not numbers" in str(error)
    assert len(ends["good"][-1].tokens) == 12


@pytest.mark.vulkan
def test_metrics_of_what_runs_at_once(served: Served) -> None:
    before = served.worker.counts.reused_tokens
    long = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
    first, again = (served.text(prompt=long)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2))
    assert (first, again) == (0, 64) and served.worker.counts.reused_tokens == before + 64, "a page"
    assert_idle(served)
    text = served.client.get("/metrics").text
    told = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}
    batch = served.worker.batch
    assert batch is not None
    assert told['vkback_sequences{state="running"}'] == told['vkback_cache_pages{state="used"}'] == told["vkback_queued_requests"] == 0
    assert told['vkback_cache_pages{state="free"}'] + told['vkback_cache_pages{state="known"}'] == batch.pool.n_pages
    assert told["vkback_prefix_hits_total"] >= 1 and told["vkback_preemptions_total"] == 0 and told["vkback_parallel_requests"] == 8
    finished = told['vkback_requests_total{end="finished"}']
    assert told["vkback_time_to_first_token_seconds_count"] >= finished > 0
    assert told["vkback_inter_token_latency_seconds_count"] > 0
    assert told["vkback_generated_tokens_total"] == served.worker.counts.generated_tokens


@pytest.mark.vulkan
def test_as_many_requests_at_once_as_memory_allows(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default up to a limit, of a share of rows each; as asked, or an error that says how many fit."""
    with Engine.load(builtin_model("demo-dense"), device, n_ctx=4096) as engine:
        assert sequences_of(engine, None, 64, None) == (64, None)
        assert sequences_of(engine, 3, 64, 500) == (3, 3 * 512)
        page = sum(PagedCaches.page_bytes(engine, 64))
        monkeypatch.setattr(engine.device, "free_memory", lambda: 2 * 100 * page)
        assert sequences_of(engine, None, 64, None) == (100 // 16, None)
        assert sequences_of(engine, None, 64, 640) == (10, 6400) and sequences_of(engine, 20, 64, None) == (20, None)
        with pytest.raises(EngineError, match=r"11 requests of 640 rows take 110 pages of the KV cache, memory has room for 100; expected"):
            sequences_of(engine, 11, 64, 640)


@pytest.mark.vulkan
def test_rows_of_each_request_are_those_asked_for(device: Device) -> None:
    def load() -> vkback.LoadedModel:
        return vkback.LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128))

    worker = Worker(load, parallel=None, ctx_per_sequence=64)
    try:
        assert worker.parallel == 8 and worker.batch is not None and worker.batch.pool.n_pages == 8
        ends: list[Any] = []
        request = QueuedRequest("She said", False, {"max_tokens": 2}, "a", time.monotonic() + PATIENCE_S, ends.append)
        worker.submit(request)
        wait_until(lambda: any(isinstance(end, vkback.Result | ServerError) for end in ends))
        result: Any = ends[-1]
        assert result.finish_reason == "length"
    finally:
        worker.close()
