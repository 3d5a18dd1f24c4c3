"""A model that several threads and tasks use at once: each text is what it is alone, whether the calls share a batch or take turns."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_api_batch import assert_greedy, assert_pages_come_back
from tiny_models import tiny
from waiting import PATIENCE_S, wait_until

import vkback
from vkback.api import ModelError
from vkback.api.shared import TextRequest
from vkback.device import Device, DeviceLost
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine, EngineError
from vkback.paths import builtin_model

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


PROMPTS = [[5 + i * j % 300 for j in range(3 + 7 * i)] for i in range(1, 6)]
THEN, AT_LAST, AND = [7, 11], [13], [17]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("threads"))


def loaded(path: Path, device: Device, sequences: int | None) -> vkback.LoadedModel:
    return vkback.LoadedModel(Engine.load(path, device, n_ctx=256, act="f32"), sequences=sequences)


@pytest.fixture(scope="module")
def shared(path: Path, device: Device) -> Iterator[vkback.LoadedModel]:
    """Its texts share the steps of a batch."""
    with loaded(path, device, 8) as model:
        yield model


@pytest.fixture(scope="module")
def turns(path: Path, device: Device) -> Iterator[vkback.LoadedModel]:
    """Its calls take turns."""
    with loaded(path, device, 1) as model:
        yield model


@pytest.fixture(params=["shared", "turns"])
def model(request: pytest.FixtureRequest) -> vkback.LoadedModel:
    found: vkback.LoadedModel = request.getfixturevalue(request.param)
    return found


def assert_text(model: vkback.LoadedModel, prompt: str | Sequence[int], tokens: Sequence[int]) -> None:
    """What the engine makes of the prompt alone; where rounding may have turned it, each token judged by itself."""
    ids = tuple(model.ids(prompt, start=True))
    if len(ALONE.get(ids, ())) < len(tokens):
        with model.using("test") as engine:
            engine.prompt(ids[:-1])
            ALONE[ids] = tuple(engine.generate(ids[-1], max(len(tokens), 26), stop_at_eos=False))
    if tuple(tokens) != ALONE[ids][: len(tokens)]:
        assert_greedy(model, ids, tokens)


ALONE: dict[tuple[int, ...], tuple[int, ...]] = {}
"""Texts of prompts, by their tokens."""


def conversation(model: vkback.LoadedModel, number: int, together: threading.Barrier) -> list[vkback.Result]:
    """Three rounds of a session, each begun by all conversations together."""
    session, found = model.session(), []
    for prompt in (PROMPTS[number % len(PROMPTS)] * 2, THEN, AT_LAST):
        together.wait(PATIENCE_S)
        found.append(session.generate(prompt, max_tokens=6 + number, **GREEDY))
    assert session.tokens[-len(found[-1].tokens) :] == found[-1].tokens
    return found


def assert_conversation(model: vkback.LoadedModel, number: int, results: list[vkback.Result]) -> None:
    text: list[int] = []
    for prompt, result in zip((PROMPTS[number % len(PROMPTS)] * 2, THEN, AT_LAST), results, strict=True):
        text += model.ids(prompt, start=not text)
        assert len(result.tokens) == 6 + number
        assert_text(model, text, result.tokens)
        text += result.tokens


@pytest.mark.vulkan
def test_eight_threads_with_a_session_each_have_the_texts_of_each_alone(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = model.opened.paged.counters if model.opened else None
    before = (steps.steps, steps.columns) if steps else (0, 0)
    together, submit = threading.Barrier(8), model.texts.submit
    asked: list[TextRequest] = []

    def counted(request: TextRequest) -> None:
        submit(request)
        asked.append(request)

    monkeypatch.setattr(model.texts, "submit", counted)
    with ThreadPoolExecutor(8) as pool:
        with model.using("the test", keep=True) if model.shared else nullcontext():
            rounds = pool.map(lambda number: conversation(model, number, together), range(8))
            wait_until(lambda: len(asked) == 8 or not model.shared)  # so that the first eight texts begin beside each other
        found = list(rounds)
    for number, results in enumerate(found):
        assert_conversation(model, number, results)
    if model.shared:
        assert model.opened is not None
        counters = model.opened.paged.counters
        # How the later rounds meet is up to the system: alone they would have a step a token.
        assert counters.columns - before[1] > counters.steps - before[0], "they ran beside each other"
        assert any(result.timings.reused_tokens >= 64 for results in found for result in results[1:]), "pages of their beginning"
        assert_pages_come_back(model)


@pytest.mark.vulkan
def test_streams_of_several_threads_and_of_one_go_on_beside_each_other(model: vkback.LoadedModel) -> None:
    def streamed(prompt: Sequence[int]) -> tuple[int, ...]:
        return tuple(token for piece in model.stream(prompt, max_tokens=12, **GREEDY) for token in piece.tokens)

    with ThreadPoolExecutor(4) as pool:
        for prompt, tokens in zip(PROMPTS, pool.map(streamed, PROMPTS), strict=True):
            assert len(tokens) == 12
            assert_text(model, prompt, tokens)
    # Of one thread, piece by piece in turn, with another call in between.
    session = model.session()
    streams = [session.stream(PROMPTS[0], max_tokens=9, seed=3), *(model.stream(p, max_tokens=9, seed=3) for p in PROMPTS[1:3])]
    for turn in range(6):
        for stream in streams:
            next(stream, None)
        if turn == 2:
            model.logits([1, 2, 3])
    found = [stream.finished().tokens for stream in streams]
    assert found == [model.generate(p, max_tokens=9, seed=3).tokens for p in PROMPTS[:3]]
    assert session.tokens[-9:] == found[0]
    assert len(session.generate(AND, max_tokens=3).tokens) <= 3


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", ["granitehybrid", "llama"])
def test_a_stream_of_a_model_with_states_is_paused_and_goes_on(shape: str, tmp_path: Path, device: Device) -> None:
    """Options that the loop keeps state for go on, too."""
    options: dict[str, Any] = {"max_tokens": 12, "seed": 4, "repeat_penalty": 1.3, "ignore_eos": True}
    with vkback.LoadedModel(Engine.load(tiny(shape, tmp_path), device, n_ctx=64)) as model:
        want = model.generate([1, 2, 3], **options).tokens
        stream = model.stream([1, 2, 3], **options)
        made: tuple[int, ...] = ()
        for piece in stream:
            made += piece.tokens
            model.generate([7, 8], max_tokens=2)
        assert made == want


@pytest.mark.vulkan
def test_a_later_call_of_its_session_cuts_a_stream_off(model: vkback.LoadedModel) -> None:
    session = model.session()
    stream = session.stream(PROMPTS[0], max_tokens=40, **GREEDY)
    next(stream)
    session.generate(AND, max_tokens=2)
    with pytest.raises(ModelError, match=r"this stream was ended by a later call, session\.stream; take all of it before that call"):
        next(stream)
    assert stream.result.finish_reason == "closed"


@pytest.mark.vulkan
def test_sixteen_streams_of_tasks_some_of_which_are_cancelled(model: vkback.LoadedModel) -> None:
    """The last one is left without a word."""

    async def taken(number: int) -> tuple[int, ...]:
        made: tuple[int, ...] = ()
        async for piece in model.astream(PROMPTS[number % len(PROMPTS)], max_tokens=10 + number, **GREEDY):
            made += piece.tokens
        return made

    async def both() -> list[Any]:
        tasks = [asyncio.create_task(taken(number)) for number in range(16)]
        left = model.astream(PROMPTS[0], max_tokens=200, **GREEDY)
        await anext(left)
        for task in tasks[1::4]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        whole = await asyncio.gather(
            *(model.agenerate(p, max_tokens=5, **GREEDY) for p in PROMPTS), model.agenerate(PROMPTS, n=2, max_tokens=2)
        )
        many = model.batch_stream(PROMPTS[:2], max_tokens=3, **GREEDY)
        assert {index async for index, _ in many} == {0, 1} and None not in many.results
        return [*found, *whole]

    *streams, a, b, c, d, e, many = asyncio.run(both())
    for number, tokens in enumerate(streams):
        if number % 4 == 1:
            assert isinstance(tokens, asyncio.CancelledError)
        else:
            assert len(tokens) == 10 + number
            assert_text(model, PROMPTS[number % len(PROMPTS)], tokens)
    for prompt, result in zip(PROMPTS, (a, b, c, d, e), strict=True):
        assert_text(model, prompt, result.tokens)
    assert [result.seed for result in many] == [0, 1] * len(PROMPTS)
    gc.collect()
    assert_pages_come_back(model)


@pytest.mark.vulkan
def test_a_task_takes_the_stream_of_a_session(model: vkback.LoadedModel) -> None:
    async def said() -> list[tuple[int, ...]]:
        session = model.session()
        async with session.stream(PROMPTS[0], max_tokens=6, **GREEDY) as stream:
            tokens = [token async for piece in stream for token in piece.tokens]
        assert tuple(tokens) == stream.result.tokens
        return [stream.tokens, (await session.stream(AND, max_tokens=4, **GREEDY).afinished()).tokens]

    session = model.session()
    assert asyncio.run(said()) == [session.generate(p, max_tokens=n, **GREEDY).tokens for p, n in ((PROMPTS[0], 6), (AND, 4))]


@pytest.mark.vulkan
def test_conversations_at_once(device: Device) -> None:
    with vkback.LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32"), sequences=4) as model:
        assert_conversations(model)


def assert_conversations(model: vkback.LoadedModel) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Who is there?", "Hello")]
    found = model.chat(chats, max_tokens=6, **GREEDY)
    assert [result.text for result in found] == [model.chat(chat, max_tokens=6, **GREEDY).text for chat in chats]
    assert [r.text for r in model.chat(["Who is there?", "Hello"], max_tokens=6, **GREEDY)] == [r.text for r in found]
    several = model.chat(chats[0], n=3, max_tokens=4, seed=5)
    assert [r.seed for r in several] == [5, 6, 7]
    assert several[1].tokens == model.chat(chats[0], max_tokens=4, seed=6).tokens
    with model.stream_chat(chats, max_tokens=6, **GREEDY) as stream:
        pieces = list(stream)
    for index, result in enumerate(found):
        assert "".join(chunk.text for i, chunk in pieces if i == index) == result.text
    assert asyncio.run(model.achat(chats[0], max_tokens=6, **GREEDY)).text == found[0].text
    assert [r.seed for r in model.generate("Once", n=2, max_tokens=1)] == [0, 1]
    assert len(list(model.stream(["Once", "Then"], max_tokens=2, **GREEDY))) >= 2
    with pytest.raises(vkback.VkbackError, match=r"messages\[1\]: at least .* tokens, the context has 128"):
        model.chat(["Hello", "word " * 4000], max_tokens=2)


@pytest.mark.vulkan
def test_states_of_sessions_that_share_a_batch_are_saved_and_loaded(shared: vkback.LoadedModel, tmp_path: Path) -> None:
    session = shared.session()
    session.generate(PROMPTS[0], max_tokens=7, **GREEDY)
    session.save(tmp_path / "state")
    later, fork = shared.session(), session.fork()
    later.load(tmp_path / "state")
    assert later.tokens == session.tokens == fork.tokens
    assert later.generate(max_tokens=4, **GREEDY).tokens == fork.generate(max_tokens=4, **GREEDY).tokens

    def same(ids: Any, logits: Any) -> None:
        """Makes the engine go on from where the batch is."""

    slow = session.generate(max_tokens=4, logits_processor=same, **GREEDY)
    assert slow.tokens == fork.tokens[-4:]
    session.generate(AND, max_tokens=2, **GREEDY)
    session.stream_from(PROMPTS[1], max_tokens=2, logits_processor=same).finished()
    session.reset()
    assert session.tokens == () and session.generate([1], max_tokens=1, logits_processor=same).timings.prompt_tokens >= 1


@pytest.mark.vulkan
def test_a_model_that_is_closed_ends_the_texts_of_all_threads(path: Path, device: Device) -> None:
    model = loaded(path, device, 4)
    begun = threading.Barrier(4)

    def streamed(prompt: Sequence[int]) -> str:
        stream = model.stream(prompt, max_tokens=200, **GREEDY)
        next(stream)
        begun.wait()
        try:
            for _ in stream:
                pass
        except ModelError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(streamed, prompt) for prompt in PROMPTS[:3]]
        begun.wait()
        model.close()
    assert all("is closed: this text needs an open one; load it again" in end.result() for end in ends)
    with pytest.raises(ModelError, match="is closed"):
        model.generate([1])


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("error", "next_works"), [(EngineError("[batch] ran out of pages"), True), (DeviceLost("[device] the device stopped"), False)]
)
def test_what_fails_for_all_ends_every_text_with_that_error(
    error: Exception, next_works: bool, path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(path, device, 4) as model:
        model.batch(PROMPTS[:1], max_tokens=1)
        assert model.opened is not None
        advance, calls = model.opened.batch.advance, iter([False] * 3)

        def failing() -> Any:
            if next(calls, True):
                raise error
            return advance()

        monkeypatch.setattr(model.opened.batch, "advance", failing)

        def said(prompt: Sequence[int]) -> Exception | None:
            return pool_error(lambda: model.generate(prompt, max_tokens=50, **GREEDY))

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(said, PROMPTS[:3]))
        assert error in found
        if next_works:
            assert len(model.generate(PROMPTS[0], max_tokens=3, **GREEDY).tokens) == 3


def pool_error(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as found:
        return found
    return None


@pytest.mark.vulkan
def test_turns_are_fair_and_a_waiting_thread_can_be_interrupted(turns: vkback.LoadedModel) -> None:
    """Those that wait come first in the order in which they came; a stream keeps its turn for a slice of time."""
    order: list[int] = []

    def call(number: int) -> None:
        with turns.using("test", keep=True):
            order.append(number)

    threads = []
    with turns.using("a long call", keep=True):
        for number in range(6):
            threads.append(threading.Thread(target=call, args=(number,)))
            threads[-1].start()
            wait_until(lambda: turns.waiting == len(threads))
    for thread in threads:
        thread.join()
    assert order == list(range(6))
    longest: list[float] = []

    def waits() -> None:
        for _ in range(5):
            begun = time.monotonic()
            call(0)
            longest.append(time.monotonic() - begun)

    other = threading.Thread(target=waits)
    stream = turns.stream(PROMPTS[0], max_tokens=60, **GREEDY)
    next(stream)
    other.start()
    stream.finished()
    other.join()
    assert len(longest) == 5


@pytest.mark.vulkan
def test_a_text_that_has_the_engine_alone_gives_way_to_other_calls(path: Path, device: Device) -> None:
    """It drafts by the engine's own loop; a call that takes its turn meanwhile changes nothing of it, and need not wait for its end."""
    with vkback.LoadedModel(Engine.load(path, device, n_ctx=256, act="f32"), sequences=4) as plain:
        want = plain.generate(PROMPTS[0], max_tokens=150, **GREEDY).tokens
        logits = plain.logits(PROMPTS[1])
    drafts = Drafts(pinned=4, known=(*PROMPTS[0], *want))
    with vkback.LoadedModel(Engine.load(path, device, n_ctx=256, act="f32"), sequences=4, drafts=drafts) as model:
        stream = model.stream(PROMPTS[0], max_tokens=150, **GREEDY)
        made = next(stream).tokens
        for _ in range(3):
            assert np.allclose(model.logits(PROMPTS[1]), logits, atol=1e-4)
        whole = stream.finished()
        assert whole.timings.draft_accepted > 20 and whole.tokens[: len(made)] == made and len(whole.tokens) == 150
        assert_greedy(model, PROMPTS[0], whole.tokens)
        assert_pages_come_back(model)
