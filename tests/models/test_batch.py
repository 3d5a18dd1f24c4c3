"""Many texts at once against each of them alone: architectures, cache types, classes of steps, page shortage, cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import TINY, of_a_kind, tiny_in_whole_units

from vkback.device import Device
from vkback.engine.batch.batch import Batch, Request, Update
from vkback.engine.batch.scheduler import MAX_STEPS, ScheduleError
from vkback.engine.constraint import Ahead
from vkback.engine.engine import Engine, EngineError
from vkback.engine.sampler import Sampler, SamplerError
from vkback.models.synth import synthesize
from vkback.ops.sampling.sample import noise

N_CTX = 96
PAGE = 16

MARGIN = 2e-3
"""Of the scores' deviation: kernels of another number of columns add in another order, in f32, over a few hundred products a layer.
Measured differences of logits are below 1e-5 of it."""


def requests(count: int, vocab: int, seed: int) -> list[Request]:
    """Prompts of 1 to 40 tokens, some of which begin alike, greedy and sampled in turn."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, vocab, 40)
    found = []
    for i in range(count):
        prompt = rng.integers(0, vocab, int(rng.integers(1, 41)))
        if i % 3 == 0:
            prompt[: len(prompt) // 2] = start[: len(prompt) // 2]
        sampler = Sampler() if i % 2 else Sampler(temp=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=i)
        found.append(Request(tuple(prompt.tolist()), int(rng.integers(1, 30)), sampler, stop_at_eos=False, client=f"client {i % 3}"))
    return found


def served(batch: Batch, wanted: Sequence[Request], seed: int) -> list[list[int]]:
    """The texts that a batch makes of requests that come one by one."""
    rng = np.random.default_rng(seed)
    texts: dict[int, list[int]] = {}
    waiting, order = list(wanted), []
    while waiting or batch.busy:
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                order.append(batch.add(waiting.pop(0)))
                texts[order[-1]] = []
        for made in batch.advance():
            texts[made.id] += made.tokens
            assert made.reason in ("", "length")
    return [texts[id] for id in order]


def judged(engine: Engine, request: Request, text: Sequence[int], margin: float = MARGIN) -> None:
    """Every token of a text is the one that the model alone picks from what stands before it, or one whose score is so close to that one's
    that kernels of other shapes may turn them."""
    assert len(text) == request.max_tokens
    engine.reset()
    tokens = [*request.tokens, *text]
    logits = engine.prompt_logits(tokens[:-1])[len(request.tokens) - 1 :].astype(np.float64)
    temp, ids = request.sampler.temp, np.arange(logits.shape[1])
    for i, (row, token) in enumerate(zip(logits, text, strict=True)):
        scores = row / temp + noise(request.sampler.seed, len(request.tokens) - 1 + i, ids) if temp else row
        behind = float(scores.max() - scores[token])
        assert behind <= margin * (row / (temp or 1.0)).std(), (i, token, int(scores.argmax()), behind)


def with_logits(batch: Batch, request: Request, others: Sequence[Request] = ()) -> tuple[list[int], np.ndarray]:
    """The tokens of a text and the logits that each was picked from, while others are served."""
    for other in others[::2]:
        batch.add(other)
    id = batch.add(replace(request, logits=True))
    for other in others[1::2]:
        batch.add(other)
    updates = [made for made in batch.run() if made.id == id]
    return [token for made in updates for token in made.tokens], np.concatenate([made.logits for made in updates if made.logits])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def bits_hold(batch: Batch, others: Sequence[Request]) -> None:
    """A text is made token by token from its first one. Then beginnings of it are prompts, whose tokens are columns of the same class of
    step, several in one step: what follows has the same bits, whoever else is served."""
    text, logits = with_logits(batch, Request((5,), 20, stop_at_eos=False))
    whole = [5, *text]
    for known in (5, 13):
        before = batch.scheduler.prefilled
        made, found = with_logits(batch, Request(tuple(whole[:known]), 21 - known, stop_at_eos=False), others[:2])
        if batch.engine.model.architecture.recurrent:
            assert batch.scheduler.prefilled == 0, "a step moves a recurrent state on by one token"
        else:
            assert batch.scheduler.prefilled - before >= known - 1
            assert made == whole[known:] and same_bits(found, logits[known - 1 :])


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", of_a_kind(TINY))
def test_texts_of_every_architecture_are_those_of_each_alone(shape: str, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, act="f32") as engine:
        wanted = requests(10, engine.model.hp.n_vocab, 1)
        with Batch(engine, sequences=4, page=PAGE, rows=12 * PAGE, pinned=True, prefill=16) as batch:
            texts = served(batch, wanted, 2)
            batch.prefixes.clear()
            assert batch.pool.free == batch.pool.n_pages
            bits_hold(batch, wanted)
        for request, text in zip(wanted, texts, strict=True):
            judged(engine, request, text)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("shape", "k", "v"),
    [
        ("tiny-llama", "q8_0", "q4_0"),
        ("tiny-deepseek2", "q4_0", "q4_0"),
        ("tiny-llama", "f32", "f16"),
        *(pytest.param(shape, "q8_0", "q4_0", marks=pytest.mark.exhaustive) for shape in TINY if shape != "tiny-llama"),
    ],
)
def test_texts_over_every_type_of_cache(shape: str, k: str, v: str, tmp_path: Path, device: Device) -> None:
    path = tiny_in_whole_units(shape, tmp_path / "model.gguf")
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", cache_type_k=k, cache_type_v=v) as engine:
        wanted = requests(8, engine.model.hp.n_vocab, 3)
        with Batch(engine, sequences=4, page=PAGE, rows=12 * PAGE, pinned=True) as batch:
            texts = served(batch, wanted, 4)
        for request, text in zip(wanted, texts, strict=True):
            # A value on the edge between two levels may go to the other, which moves a logit by a share of what rounding does.
            judged(engine, request, text, 0.05 if "q4_0" in (k, v) else 0.02)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Engine:
    path = tmp_path_factory.mktemp("batch") / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    return Engine.load(path, device, n_ctx=N_CTX)


def updates_of(batch: Batch, id: int) -> list[Update]:
    return [made for made in batch.run() if made.id == id]


@pytest.mark.vulkan
def test_pinned_steps_give_a_text_its_bits_whoever_else_is_served(llama: Engine) -> None:
    wanted = requests(12, llama.model.hp.n_vocab, 5)
    with Batch(llama, sequences=8, page=PAGE, rows=16 * PAGE, pinned=True) as batch:
        alone = []
        for request in wanted:
            batch.prefixes.clear()
            id = batch.add(request)
            alone.append([token for made in updates_of(batch, id) for token in made.tokens])
        batch.prefixes.clear()
        assert served(batch, wanted, 6) == alone


@pytest.mark.vulkan
def test_short_prompts_are_read_in_the_steps_of_others(tmp_path: Path, device: Device) -> None:
    """Nothing but steps runs, of classes that follow the number of columns, and each text is what it is alone."""
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, act="f32") as engine:
        wanted = [replace(request, tokens=request.tokens[:20]) for request in requests(12, engine.model.hp.n_vocab, 11)]
        with Batch(engine, sequences=8, page=PAGE, rows=40 * PAGE, max_step_tokens=16, prefill=20) as batch:
            texts = served(batch, wanted, 12)
            prompts = sum(len(request.tokens) - 1 for request in wanted)
            assert batch.counters.seconds["prompts"] == 0.0 and batch.scheduler.prefilled == batch.counters.read
            assert prompts // 2 < batch.counters.read <= prompts
            batch.prefixes.clear()
            assert batch.pool.free == batch.pool.n_pages
        for request, text in zip(wanted, texts, strict=True):
            judged(engine, request, text)


@pytest.mark.vulkan
def test_the_device_does_not_wait_between_steps_and_a_read(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt comes while a text runs: the read is submitted behind the steps in flight, and steps behind the read before `advance`
    is left; what the steps made is told then."""
    with Batch(llama, sequences=2, page=PAGE, rows=20 * PAGE, prompt_share=0.9) as batch:
        first = batch.add(Request((1, 2, 3), 60, stop_at_eos=False))
        told = 0
        while told < 4:
            told += sum(len(made.tokens) for made in batch.advance() if made.id == first)
        batch.add(Request(tuple(range(70)), 4, stop_at_eos=False))
        given: list[str] = []
        for owner, name in ((llama, "prompt"), (batch.scheduler, "done_step"), (batch.scheduler, "next")):
            call = getattr(owner, name)

            def noted(*args: Any, call: Callable[..., Any] = call, name: str = name, **kwargs: Any) -> Any:
                given.append(name)
                found = call(*args, **kwargs)
                if name == "next":
                    given[-1] = type(found).__name__
                return found

            monkeypatch.setattr(owner, name, noted)
        while "prompt" not in given:
            made = batch.advance()
        at = given.index("prompt")
        assert given[at - 1 : at + 2] == ["Read", "prompt", "done_step"], given
        assert given[-1] == "Step" and [update.id for update in made] == [first]
        assert {update.reason for update in batch.run() if update.reason} == {"length"}


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "shape", ["tiny-llama", "tiny-gpt-oss", pytest.param("tiny-granitehybrid", marks=pytest.mark.exhaustive), "tiny-qwen35"]
)
def test_requests_keep_their_bits(shape: str, tmp_path: Path, device: Device, in_chunks: None) -> None:
    """exact="requests": the logits of a text have the same bits alone, beside others, behind rows that were read for others, as the next
    turn of a conversation or all at once, and after it made room for others. Prompts have 3 to 60 tokens, in pieces of 16, each a chunk
    of a recurrence."""
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, ubatch=16, exact="requests") as engine:
        vocab = engine.model.hp.n_vocab
        rng = np.random.default_rng(3)
        start = rng.integers(0, vocab, 40).tolist()
        longer = [Request((*start, *rng.integers(0, vocab, n).tolist()), 20, stop_at_eos=False) for n in (8, 20)]
        wanted = [*longer, Request((5, 6, 7), 20, stop_at_eos=False), Request(tuple(start[:17]), 20, Sampler(temp=0.8, seed=3), False)]
        others = [*requests(4, vocab, 13), *longer]
        with Batch(engine, sequences=4, page=PAGE, rows=40 * PAGE) as batch:
            assert batch.limits.pinned and (batch.limits.border, batch.limits.classes) == (16, (4,))
            alone = []
            for request in wanted:
                batch.prefixes.clear()
                alone.append(with_logits(batch, request))
            for request, (tokens, logits) in zip(wanted, alone, strict=True):
                before = batch.prefixes.tokens_reused
                found = with_logits(batch, request, others)
                assert found[0] == tokens and same_bits(found[1], logits)
                reused = batch.prefixes.tokens_reused - before
                assert (reused > 0) is not engine.model.architecture.recurrent, "others have begun alike"
            text = Request((*wanted[0].tokens, *alone[0][0], 1, 2, 3), 8, stop_at_eos=False)
            next_turn = with_logits(batch, text)
            batch.prefixes.clear()
            at_once = with_logits(batch, text)
            assert next_turn[0] == at_once[0] and same_bits(next_turn[1], at_once[1])
        with Batch(engine, sequences=4, page=PAGE, rows=8 * PAGE) as batch:
            for request, (tokens, logits) in zip(wanted, alone, strict=True):
                found = with_logits(batch, request, [Request((9,), 60, stop_at_eos=False)] * 6)
                assert found[0] == tokens and same_bits(found[1], logits)
            assert batch.scheduler.preemptions > 0


@pytest.mark.vulkan
def test_pages_run_short_and_come_back(llama: Engine) -> None:
    wanted = [Request(tuple(range(i, i + 20)), 60, stop_at_eos=False) for i in range(6)]
    with Batch(llama, sequences=8, page=PAGE, rows=10 * PAGE, pinned=True) as batch:
        alone = []
        for request in wanted:
            batch.prefixes.clear()
            alone.append([token for made in updates_of(batch, batch.add(request)) for token in made.tokens])
        batch.prefixes.clear()
        assert batch.scheduler.preemptions == 0
        assert served(batch, wanted, 7) == alone
        assert batch.scheduler.preemptions > 0
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages


@pytest.mark.vulkan
def test_a_beginning_that_was_read_before_is_not_read_again(llama: Engine) -> None:
    prompt = tuple(range(70))
    with Batch(llama, sequences=2, page=PAGE, rows=20 * PAGE) as batch:
        first = [t for made in updates_of(batch, batch.add(Request(prompt, 5, stop_at_eos=False))) for t in made.tokens]
        read = batch.counters.read
        again = [t for made in updates_of(batch, batch.add(Request(prompt, 5, stop_at_eos=False))) for t in made.tokens]
        assert again == first
        assert (read, batch.counters.read - read) == (69, 69 % PAGE)


@pytest.mark.vulkan
def test_a_text_that_is_cancelled_leaves_its_pages_at_once(llama: Engine) -> None:
    with Batch(llama, sequences=4, page=PAGE, rows=12 * PAGE) as batch:
        stays, leaves = (batch.add(Request(tuple(range(n)), 40, stop_at_eos=False)) for n in (10, 30))
        seen = 0
        while seen < 3:
            seen += sum(len(made.tokens) for made in batch.advance() if made.id == leaves)
        batch.cancel(leaves)
        held = batch.pool.pages_for(10 + 40)  # of the other at most
        steps = batch.counters.steps
        rest: list[Update] = []
        while batch.pool.n_pages - batch.pool.available > held or len(batch.scheduler.texts) > 1:
            rest += batch.advance()
        assert batch.counters.steps - steps <= MAX_STEPS, "of the submits in flight, and one"
        rest += batch.run()
        assert [made.reason for made in rest if made.id == leaves] == ["cancelled"]
        assert rest[-1].id == stays and rest[-1].reason == "length"
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages


@pytest.mark.vulkan
def test_penalties_and_bias_are_each_text_s_own(llama: Engine) -> None:
    plain = Request((1, 2, 3), 20, stop_at_eos=False)
    other = Request((1, 2, 3), 20, Sampler(repeat_penalty=3.0, logit_bias=((7, 50.0),)), stop_at_eos=False)
    with Batch(llama, sequences=4, page=PAGE, rows=12 * PAGE, pinned=True) as batch:
        ids = [batch.add(plain), batch.add(other), batch.add(plain)]
        texts: dict[int, list[int]] = {id: [] for id in ids}
        for made in batch.run():
            texts[made.id] += made.tokens
    llama.reset()
    llama.prompt([1, 2])
    alone = list(llama.generate(3, 20, sampler=other.sampler, stop_at_eos=False))
    assert texts[ids[0]] == texts[ids[2]]
    assert texts[ids[1]][:5] == alone[:5] and texts[ids[1]] != texts[ids[0]]


@pytest.mark.vulkan
def test_a_slot_forgets_the_penalties_of_the_text_before(llama: Engine) -> None:
    plain, other = Request((1, 2, 3), 20, stop_at_eos=False), Request((4, 5), 30, Sampler(repeat_penalty=3.0), stop_at_eos=False)
    biased = Request((1, 2, 3), 4, Sampler(repeat_penalty=3.0, logit_bias=((7, 50.0),)), stop_at_eos=False)
    with Batch(llama, sequences=2, page=PAGE, rows=12 * PAGE, pinned=True) as batch:
        alone = [t for update in updates_of(batch, batch.add(plain)) for t in update.tokens]
        batch.add(other)
        before = batch.add(biased)
        while not any(update.id == before and update.reason for update in batch.advance()):
            pass
        assert [t for update in updates_of(batch, batch.add(plain)) for t in update.tokens] == alone


@pytest.mark.vulkan
def test_recurrent_states_survive_preemption(tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize("tiny-granitehybrid-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX) as engine:
        wanted = [Request(tuple(range(i, i + 20)), 60, stop_at_eos=False) for i in range(5)]
        with Batch(engine, sequences=4, page=PAGE, rows=10 * PAGE, pinned=True) as batch:
            alone = [[t for update in updates_of(batch, batch.add(request)) for t in update.tokens] for request in wanted]
            assert batch.scheduler.preemptions == 0
            assert served(batch, wanted, 7) == alone
            assert batch.scheduler.preemptions > 0


@pytest.mark.vulkan
def test_logits_come_with_their_tokens(llama: Engine) -> None:
    request = Request((5, 6, 7), 6, stop_at_eos=False, logits=True)
    with Batch(llama, sequences=2, page=PAGE, rows=12 * PAGE) as batch:
        made = updates_of(batch, batch.add(request))
    assert [int(m.logits[0].argmax()) for m in made] == [m.tokens[0] for m in made]
    assert len(made) == 6


@pytest.mark.vulkan
def test_more_ends_of_a_text_than_a_loop_holds_are_refused_before_it_runs(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "end_ids", lambda stop_at_eos: list(range(17)))
    with Batch(llama, sequences=2, page=PAGE, rows=4 * PAGE) as batch:
        with pytest.raises(SamplerError, match="17 end-of-text ids, at most 16 are supported"):
            batch.add(Request((1, 2), 3))
        assert not batch.busy


@pytest.mark.vulkan
def test_what_cannot_be_served_is_refused(llama: Engine) -> None:
    with Batch(llama, sequences=2, page=PAGE, rows=4 * PAGE) as batch:
        with pytest.raises(ScheduleError, match=r"70 tokens of prompt and 20 new ones fill 89 rows, .* expected at most 4 pages"):
            batch.add(Request(tuple(range(70)), 20))
        with pytest.raises(EngineError, match=r"token 0 is 331, expected an id in 0\.\.330"):
            batch.add(Request((331,), 1))
        assert not batch.busy


class Anything:
    """A constraint that allows all tokens."""

    ended = False

    def mask(self) -> npt.NDArray[np.int32]:
        return np.full(11, -1, np.int32)

    def take(self, token: int) -> None:
        pass

    def ahead(self, tokens: Sequence[int], most: int) -> Ahead:
        return Ahead()


def tokens_of(updates: Sequence[Update], id: int) -> list[int]:
    return [token for made in updates if made.id == id for token in made.tokens]


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-deepseek2", "tiny-granitehybrid"])
def test_a_fork_goes_on_from_all_that_a_text_is(shape: str, tmp_path: Path, device: Device) -> None:
    """With the same sampler it is the same text; with another one what the model alone makes from there. Its pages are those of the first
    one, but for the last, of which it has a copy; a recurrent model's is read anew where steps of the first one are in flight."""
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, act="f32") as engine, Batch(engine, sequences=4, page=PAGE, rows=20 * PAGE) as batch:
        first = batch.add(Request(tuple(range(40)), 30, stop_at_eos=False))
        made: list[Update] = []
        while len(tokens_of(made, first)) < 10:
            made += batch.advance()
        begin, read = tokens_of(made, first), batch.counters.read
        same = batch.fork(first)
        own = batch.fork(first, sampler=Sampler(temp=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3), max_tokens=24)
        again = batch.fork(own, max_tokens=20)
        made += batch.run()
        if not engine.model.architecture.recurrent:
            assert batch.counters.read == read, "nothing is read twice"
        assert tokens_of(made, same) == tokens_of(made, first)
        for id, most in ((own, 24), (again, 20)):
            assert tokens_of(made, id)[: len(begin)] == begin and len(tokens_of(made, id)) == most
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages
        rest = tokens_of(made, own)[len(begin) :]
        sampler = Sampler(temp=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3)
        judged(engine, Request((*range(40), *begin), len(rest), sampler, stop_at_eos=False), rest)


@pytest.mark.vulkan
def test_forks_share_pages(llama: Engine) -> None:
    with Batch(llama, sequences=4, page=PAGE, rows=20 * PAGE) as batch:
        first = batch.add(Request(tuple(range(70)), 20, stop_at_eos=False))
        made: list[Update] = []
        while len(tokens_of(made, first)) < 4:
            made += batch.advance()
        for _ in range(3):
            batch.fork(first)
        while batch.scheduler.running < 4:
            made += batch.advance()
        assert batch.pool.n_pages - batch.pool.available <= 4 + 4 * 2, "70 rows fill four pages, which all have; 20 more take two of each"
        made += batch.run()
        assert len({tuple(tokens_of(made, id)) for id in range(first, first + 4)}) == 1


@pytest.mark.vulkan
def test_what_cannot_be_forked_is_refused(llama: Engine) -> None:
    with Batch(llama, sequences=2, page=PAGE, rows=12 * PAGE) as batch:
        with pytest.raises(ScheduleError, match="text 5: is not in work, so that it cannot be forked"):
            batch.fork(5)
        id = batch.add(Request((1, 2, 3), 20, stop_at_eos=False))
        made: list[Update] = []
        while not made:
            made = batch.advance()
        count = len(tokens_of(made, id))
        with pytest.raises(ScheduleError, match=f"max_tokens is 1; expected more than the {count} tokens that it has made"):
            batch.fork(id, max_tokens=1)
        with pytest.raises(EngineError, match=r"token 0 is 331, expected an id in 0\.\.330"):
            batch.fork(id, sampler=Sampler(logit_bias=((331, 1.0),)))
        held = batch.add(Request((1, 2, 3), 20, stop_at_eos=False, constraint=Anything()))
        with pytest.raises(EngineError, match=f"text {held}: has a constraint, which knows one text alone"):
            batch.fork(held)
        batch.cancel(held)
        batch.run()
        assert not batch.scheduler.texts


@pytest.mark.vulkan
def test_texts_that_begin_alike_read_a_prompt_once(llama: Engine) -> None:
    """As the n choices of a prompt do: whole pages are read for the first one, the rest of the last page by each."""
    with Batch(llama, sequences=4, page=PAGE, rows=30 * PAGE) as batch:
        for seed in range(4):
            batch.add(Request(tuple(range(70)), 5, Sampler(temp=0.8, seed=seed), stop_at_eos=False))
        batch.run()
        assert batch.counters.read == 69 + 3 * (69 % PAGE)
