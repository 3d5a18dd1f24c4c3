"""Steps with drafts against steps without: samplers, kinds of drafts, architectures, types of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, of_a_kind

import vkback
from vkback.api import GenerateOptions
from vkback.checks import OptionError
from vkback.device import BufferRange, Device
from vkback.engine.draft_model import ROOM, check_draft_model
from vkback.engine.drafts import ENOUGH, DraftError, Drafts, Pace, StepTimes, kept_slots
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.graph import Graph
from vkback.models.registry import Model
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.ops.sampling.sample import noise
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import Program

OF_A_KIND = ("tiny-llama", "tiny-deepseek2", "tiny-gpt-oss", "tiny-gemma3", "tiny-qwen3moe", "tiny-mamba2", "tiny-qwen35")
"""Attention of each kind, experts, and recurrent states; the others cross these."""

N_CTX = 128
N = 40

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(temp=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3),
    "filters": Sampler(temp=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=4),
    "penalties": Sampler(repeat_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, penalty_last_n=5),
    "penalties of all": Sampler(temp=0.7, repeat_penalty=1.1, penalty_last_n=-1, seed=5),
    "bias": Sampler(temp=0.5, logit_bias=((7, 4.0), (9, -np.inf)), seed=6),
    "DRY": Sampler(dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=()),
    "a chain": Sampler(temp=0.9, typical_p=0.8, xtc_probability=0.4, xtc_threshold=0.05, seed=8),
    "DRY, a chain, penalties": Sampler(temp=0.6, min_p=0.0, samplers=("dry", "temperature", "top_p"), dry_multiplier=1.0, seed=9),
}


def made(engine: Engine, prompt: Sequence[int], sampler: Sampler, drafts: Drafts | None, n: int = N, eos: bool = False) -> list[int]:
    engine.reset()
    engine.prompt(prompt[:-1])
    return list(engine.generate(prompt[-1], n, sampler=sampler, stop_at_eos=eos, drafts=drafts))


def drafts_about(prompt: Sequence[int], text: Sequence[int], vocab: int) -> dict[str, tuple[int, ...]]:
    """Drafts by position, beside those that are looked up: none, of the very text, of others."""
    whole, rng = [*prompt, *text], np.random.default_rng(1)
    some = [t if rng.random() < 0.7 else int(rng.integers(vocab)) for t in whole]
    return {
        "none": (-1,),
        "right": tuple(whole),
        "wrong": tuple((t + 1) % vocab for t in whole),
        "random": tuple(rng.integers(0, vocab, N_CTX).tolist()),
        "some": tuple(some),
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Engine:
    path = tmp_path_factory.mktemp("drafts") / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    return Engine.load(path, device, n_ctx=N_CTX)


PROMPT = (5, 6, 7, 5, 6, 8, 5, 6, 7)


CROSSED = ("temperature", "penalties of all", "a chain")
"""What the other samplers have in them, too."""


def samplers_by_columns() -> Iterator[Any]:
    """Both widths of a step for the first sampler. Of the others that are not CROSSED each has one, in turn, since a width is compiled anew
    for each; a chain, whose kernel takes a CPU driver a minute at 8, has 4."""
    turn = 0
    for name in SAMPLERS:
        own = 4 if "chain" in name else (4, 8)[turn % 2]
        for columns in (4, 8):
            crossed = name in CROSSED or (name != "greedy" and columns != own)
            yield pytest.param(name, columns, marks=[pytest.mark.exhaustive] if crossed else [])
        turn += name not in CROSSED


@pytest.mark.vulkan
@pytest.mark.parametrize(("name", "columns"), [*samplers_by_columns()])
def test_a_text_has_the_same_bits_whatever_its_drafts_are(name: str, columns: int, llama: Engine) -> None:
    sampler, vocab = SAMPLERS[name], llama.model.hp.n_vocab
    text = made(llama, PROMPT, sampler, Drafts(pinned=columns, known=(-1,)))
    assert llama.draft_counts.drafted == 0
    assert made(llama, PROMPT, sampler, Drafts(pinned=columns)) == text
    for kind, known in drafts_about(PROMPT, text, vocab).items():
        assert made(llama, PROMPT, sampler, Drafts(pinned=columns, known=known)) == text, kind
        counts = llama.draft_counts
        if kind == "right":
            assert counts.accepted == counts.drafted == N - counts.steps and counts.steps <= -(-N // columns) + 1
        elif kind == "wrong":
            assert counts.accepted == 0 and counts.drafted > 0


@pytest.mark.vulkan
def test_other_numbers_of_drafts_give_the_same_text(llama: Engine) -> None:
    text = made(llama, PROMPT, Sampler(), Drafts(pinned=8, known=(-1,)))
    for drafts in (Drafts(most=3, pinned=8), Drafts(least=5, most=7, pinned=8), Drafts(match=3, pinned=8)):
        assert made(llama, PROMPT, Sampler(), drafts) == text
    assert made(llama, PROMPT, Sampler(), Drafts(pinned=8), n=1) == text[:1]
    assert made(llama, PROMPT, Sampler(), Drafts(pinned=8, known=tuple([*PROMPT, *text])), n=3) == text[:3]


@pytest.mark.vulkan
def test_a_text_ends_within_the_drafts_that_were_right(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = made(llama, PROMPT, SAMPLERS["temperature"], Drafts(pinned=8, known=(-1,)))
    end = next(i for i in range(4, N) if text[i] not in text[:i])
    monkeypatch.setattr(llama, "end_ids", lambda stop_at_eos: [text[end]] if stop_at_eos else [])
    right = Drafts(pinned=8, known=tuple([*PROMPT, *text]))
    assert made(llama, PROMPT, SAMPLERS["temperature"], right, eos=True) == text[: end + 1]
    assert llama.n_past == len(PROMPT) + end


@pytest.mark.vulkan
def test_a_text_fills_the_context_to_its_end(llama: Engine) -> None:
    n = N_CTX - len(PROMPT) + 1
    text = made(llama, PROMPT, Sampler(), Drafts(pinned=16, known=(-1,)), n=n)
    assert len(text) == n
    assert made(llama, PROMPT, Sampler(), Drafts(pinned=16), n=n) == text
    assert llama.n_past == N_CTX


@pytest.mark.vulkan
def test_a_text_goes_on_after_it_was_left(llama: Engine) -> None:
    """Rows of drafts that were not accepted, and of what ran ahead, are not read."""
    text = made(llama, PROMPT, Sampler(), Drafts(pinned=8, known=(-1,)))
    known = tuple([*PROMPT, *text[:20], *[3] * 60])
    llama.reset()
    llama.prompt(PROMPT[:-1])
    begun = llama.generate(PROMPT[-1], N, stop_at_eos=False, drafts=Drafts(pinned=8, known=known))
    found = [next(begun) for _ in range(13)]
    begun.close()
    found += llama.generate(found[-1], N - 13, stop_at_eos=False, drafts=Drafts(pinned=8))
    assert found == text


def judged(engine: Engine, sampler: Sampler, prompt: Sequence[int], text: Sequence[int], margin: float) -> None:
    """Every token is the one that the model picks from what stands before it, or as good as that within the rounding of kernels of other
    shapes, measured in deviations of the scores."""
    engine.reset()
    logits = engine.prompt_logits([*prompt, *text][:-1])[len(prompt) - 1 :].astype(np.float64)
    for i, (row, token) in enumerate(zip(logits, text, strict=True)):
        scores = row / sampler.temp + noise(sampler.seed, len(prompt) - 1 + i, np.arange(len(row))) if sampler.temp else row
        behind = float(scores.max() - scores[token])
        assert behind <= margin * (row / (sampler.temp or 1.0)).std(), (i, token, int(scores.argmax()), behind)


@pytest.mark.vulkan
def test_widths_that_change_within_a_text_give_it_within_rounding(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    widths = cycle((1, 4, 16, 8, 1, 16, 4))
    monkeypatch.setattr(Pace, "_best", lambda self, times: next(widths))
    with Engine.load(path, device, n_ctx=512, act="f32") as engine:
        for name in ("temperature", "penalties"):
            plain = made(engine, PROMPT, SAMPLERS[name], None, 150)
            some = drafts_about(PROMPT, plain, engine.model.hp.n_vocab)["some"]
            assert made(engine, PROMPT, SAMPLERS[name], Drafts(known=some), 150) == plain
            assert engine.draft_counts.accepted > 20
            assert made(engine, PROMPT, SAMPLERS[name], Drafts(), 150) == plain


@pytest.mark.vulkan
def test_results_of_a_submit_are_its_own_whatever_runs_behind_it(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a text in the last, short submit was lost where that had ended before the one in front of it was read."""
    texts = ((sampler, made(llama, PROMPT, sampler, None, 9)) for sampler in (Sampler(temp=0.8, seed=seed) for seed in range(20)))
    sampler, text = next((sampler, text) for sampler, text in texts if text[8] not in text[:8])
    monkeypatch.setattr(llama, "end_ids", lambda stop_at_eos: [text[8]] if stop_at_eos else [])
    submit = llama.device.submit

    def slow(commands: object) -> object:
        ticket = submit(commands)  # type: ignore[arg-type]
        ticket.wait()
        return ticket

    monkeypatch.setattr(llama.device, "submit", slow)
    for _ in range(3):
        assert made(llama, PROMPT, sampler, None, 9, eos=True) == text
        made(llama, PROMPT, sampler, None, 1)  # whose submit takes the next read-back


@pytest.mark.vulkan
def test_an_exact_engine_gives_a_text_its_bits_in_steps_of_any_width(tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, exact=True) as engine:
        for sampler in (Sampler(), SAMPLERS["temperature"]):
            plain = made(engine, PROMPT, sampler, None)
            known = tuple([*PROMPT, *plain[:25], *[3] * 40])
            assert made(engine, PROMPT, sampler, Drafts(pinned=4, known=known)) == plain
            assert engine.draft_counts.accepted > 10


@pytest.mark.vulkan
def test_python_drafts_and_tells(device: Device, drafts_pay: None) -> None:
    prompt = 3 * "the old man went down to the river with his horse and his dog, and "
    options: GenerateOptions = {"max_tokens": 90, "temperature": 0.0, "ignore_eos": True}
    with vkback.load("demo-dense", device.index, 512, act="f32", spec_type="ngram-simple") as model:
        plain = model.generate(prompt, draft_max=0, max_tokens=90, temperature=0, ignore_eos=True)
        assert (plain.timings.draft_tokens, plain.timings.draft_accepted) == (0, 0)
        results = [model.generate(prompt, **options) for _ in range(2)]
        for result in results:
            assert result.tokens == plain.tokens, "what it copies is sure"
            assert 30 < result.timings.draft_accepted <= result.timings.draft_tokens
        with model.stream(prompt, **options) as stream:
            assert "".join(piece.text for piece in stream) == plain.text
        session = model.session()
        session.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
        session.generate(max_tokens=50, temperature=0, ignore_eos=True)
        assert session.tokens[-90:] == plain.tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_type": "ngram-map-k"}, "spec_type is 'ngram-map-k' .str., expected one of none, ngram-simple"),
        ({"draft_max": 2, "draft_min": 3}, "draft_min is 3 .int., expected at most draft_max, 2"),
        ({"spec_pinned": 5}, "spec_pinned is 5 .int., expected 4, 8, 16, or 0"),
        ({"draft_max": -1}, "draft_max is -1 .int., expected a whole number, 0 or more"),
    ],
)
def test_how_texts_draft_is_checked_when_it_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LoadOptions(**given)


def test_drafts_by_default_are_those_of_a_gpu() -> None:
    assert LoadOptions().drafts(software=True) is None
    assert LoadOptions().drafts(software=False) == Drafts()
    assert LoadOptions(spec_type="none").drafts(software=False) is None
    assert LoadOptions(spec_type="none", spec_pinned=8).drafts(software=False) == Drafts(0, pinned=8)
    assert LoadOptions(draft_max=3, draft_min=2).drafts(software=False) == Drafts(3, 2)


@pytest.fixture(scope="module")
def with_draft_model(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Engine:
    """A target whose draft model is itself."""
    path = tmp_path_factory.mktemp("draft model") / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    engine = Engine.load(path, device, n_ctx=N_CTX)
    engine.attach_draft_model(Engine.load(path, device, n_ctx=N_CTX + ROOM))
    return engine


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ["greedy", "temperature", "penalties"])
def test_a_draft_model_changes_no_text(name: str, with_draft_model: Engine) -> None:
    engine, sampler = with_draft_model, SAMPLERS[name]
    text = made(engine, PROMPT, sampler, Drafts(pinned=4, known=(-1,)))
    for most in (3, 2):
        assert made(engine, PROMPT, sampler, Drafts(most, pinned=4, model=True)) == text
        counts = engine.draft_counts
        assert len(counts.by_place) == most
        if name == "greedy":
            assert counts.accepted > 0.9 * counts.drafted - most, "it drafts what it would pick itself"
    other = (*PROMPT, *text[3:13])  # the draft model goes on from another text
    text = made(engine, other, sampler, Drafts(pinned=4, known=(-1,)))
    assert made(engine, other, sampler, Drafts(3, pinned=4, model=True)) == text


@pytest.mark.vulkan
def test_drafts_end_before_a_token_of_too_little_probability(with_draft_model: Engine) -> None:
    """The draft model is the target, so what it gives to each token of the text is known."""
    engine, n = with_draft_model, 30
    text = made(engine, PROMPT, Sampler(), Drafts(pinned=4, known=(-1,)), n)
    engine.reset()
    engine.prompt(PROMPT[:-1])
    rows = [engine.decode_logits(token).astype(np.float64) for token in (PROMPT[-1], *text[:-1])]
    sure = [float(1 / np.exp(row - row.max()).sum()) for row in rows]
    p_min = float(np.sort(sure)[n // 2 - 1 : n // 2 + 1].mean())  # between two, half of them have it
    assert made(engine, PROMPT, Sampler(), Drafts(3, pinned=4, model=True, p_min=p_min), n) == text
    steps = drafted = at = 0
    while at < n:
        most = min(3, n - at - 1)
        drafts = next((i for i in range(most) if sure[at + i] < p_min), most)
        steps, drafted, at = steps + 1, drafted + drafts, at + drafts + 1
    counts = engine.draft_counts
    assert (counts.steps, counts.drafted) == (steps, drafted) and 0 < counts.accepted == counts.drafted
    assert made(engine, PROMPT, Sampler(), Drafts(3, pinned=4, model=True, p_min=1.0), n) == text
    assert engine.draft_counts.drafted == 0


@pytest.mark.vulkan
def test_a_draft_model_fills_the_context_and_rests_where_it_does_not_pay(with_draft_model: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, n = with_draft_model, N_CTX - len(PROMPT) + 1
    text = made(engine, PROMPT, Sampler(), Drafts(pinned=4, known=(-1,)), n=n)
    assert made(engine, PROMPT, Sampler(), Drafts(3, pinned=4, model=True), n=n) == text
    assert engine.n_past == N_CTX
    monkeypatch.setattr(StepTimes, "of_seconds", lambda plain, by_class: StepTimes(dict.fromkeys(by_class, 9.0)))
    slow = made(engine, PROMPT, Sampler(), Drafts(3, model=True), n=n)
    assert len(slow) == n and ENOUGH <= engine.draft_counts.steps <= 2 * (ENOUGH + 3), "once more after 64 tokens"


@pytest.mark.vulkan
def test_a_model_of_other_tokens_does_not_draft(llama: Engine, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    other = builtin_model("demo-dense")
    monkeypatch.setattr(Engine, "attach_draft_model", None)  # it is refused before its weights are loaded
    with pytest.raises(DraftError, match=r"demo-dense.*: 4096 tokens, model.gguf has 331; expected one of its family"):
        vkback.load(llama.model.file.path, device.index, 64, model_draft=other)
    recurrent = tmp_path / "recurrent.gguf"
    synthesize("tiny-mamba2-Q8_0", recurrent)
    with pytest.raises(DraftError, match=r"recurrent.gguf: has recurrent states, which cannot go back"):
        check_draft_model(llama.model, Model.open(recurrent))
    with pytest.raises(DraftError, match="has no draft model"):
        made(llama, PROMPT, Sampler(), Drafts(3, model=True))
    with pytest.raises(OptionError, match="expected draft-simple or draft-eagle3 with model_draft, and only then"):
        LoadOptions(spec_type="draft-simple")


@pytest.mark.vulkan
def test_steps_with_drafts_are_planned_beside_what_runs(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX) as engine:
        text = made(engine, PROMPT, Sampler(), Drafts(pinned=4, known=(-1,)))
    use_barriers: list[Callable[[str], None]] = []
    drafts_planned: list[str] = []

    def planned(graph: Graph, ctx: LowerContext, *, fusion: str, crossing: Sequence[str] = ()) -> Schedule:
        drafts_planned.extend(n.op for n in graph.nodes if n.op == "LOOKUP")
        while use_barriers:
            use_barriers.pop()("for a test")  # while a thread plans
        return plan(graph, ctx, fusion=fusion, crossing=crossing)

    monkeypatch.setattr("vkback.engine.plans.plan", planned)
    for turned_over in (False, True):
        with Engine.load(path, device, n_ctx=N_CTX) as engine:
            drafts_planned.clear()
            if turned_over:
                use_barriers.append(engine.use_barriers)
            ahead = engine.compile_drafts_ahead(Drafts(pinned=4), [Sampler()])
            assert ahead is not None
            ahead.wait()
            assert made(engine, PROMPT, Sampler(), Drafts(pinned=4)) == text
            assert len(drafts_planned) == 1 + turned_over, "what was planned without barriers is not used with them"
    with Engine.load(path, device, n_ctx=N_CTX) as engine:
        engine.compile_drafts_ahead(Drafts(), [Sampler(), SAMPLERS["filters"]])  # and is closed before that has ended
        engine.compile_drafts_ahead(None, [])


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", ["tiny-mamba2", pytest.param("tiny-qwen35", marks=pytest.mark.exhaustive)])
def test_recurrent_states_go_back(shape: str, tmp_path: Path, device: Device) -> None:
    """Whatever was drafted, after a text that was left within a step, and after steps that were measured."""
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.open(path, device, LoadOptions(ctx=N_CTX, spec_pinned=8)) as engine:
        vocab = engine.model.hp.n_vocab
        for name in ("greedy", "filters", "penalties of all"):
            sampler = SAMPLERS[name]
            text = made(engine, PROMPT, sampler, Drafts(pinned=8, known=(-1,)))
            for kind, known in drafts_about(PROMPT, text, vocab).items():
                assert made(engine, PROMPT, sampler, Drafts(pinned=8, known=known)) == text, (name, kind)
            engine.reset()
            engine.prompt(PROMPT[:-1])
            right = tuple([*PROMPT, *text])
            begun = engine.generate(PROMPT[-1], N, sampler=sampler, stop_at_eos=False, drafts=Drafts(pinned=8, known=right))
            found = [next(begun) for _ in range(13)]
            begun.close()
            saved = engine.snapshot()
            rest = partial(engine.generate, found[-1], N - 13, sampler=sampler, stop_at_eos=False, drafts=Drafts(pinned=8, known=right))
            assert found + list(rest()) == text
            engine.restore(saved)
            assert found + list(rest()) == text
        plain = made(engine, PROMPT, Sampler(), None)
        assert made(engine, PROMPT, Sampler(), Drafts(4)) == plain
        with pytest.raises(
            DraftError, match=r"steps of 16 columns, but recurrent states are kept for 8; expected a load with --spec-pinned 16"
        ):
            made(engine, PROMPT, Sampler(), Drafts(pinned=16))
    with Engine.load(path, device, n_ctx=N_CTX) as engine:
        assert made(engine, PROMPT, Sampler(), Drafts()) == plain and engine.draft_counts.steps == 0
        engine.restore(saved)
        assert engine.n_past == len(saved.tokens), "a state has one form, however many are kept"


def test_recurrent_states_are_kept_for_as_many_columns_as_they_may_be_large() -> None:
    assert kept_slots(None, 1000) == 2 and kept_slots(Drafts(0), 1000) == 2
    assert kept_slots(Drafts(), 1000) == 9
    assert kept_slots(Drafts(), 63 << 20) == 5
    assert kept_slots(Drafts(), 200 << 20) == 2
    assert kept_slots(Drafts(pinned=16), 200 << 20) == 17


MARGIN = 2e-3
"""As of tests/models/test_batch.py: f32 sums in another order."""


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", of_a_kind(TINY, OF_A_KIND))
def test_drafts_of_every_architecture(shape: str, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.open(path, device, LoadOptions(ctx=N_CTX, act="f32", spec_pinned=4)) as engine:
        sampler, vocab = SAMPLERS["temperature"], engine.model.hp.n_vocab
        text = made(engine, PROMPT, sampler, Drafts(pinned=4, known=(-1,)), 24)
        known = drafts_about(PROMPT, text, vocab)
        for kind in ("right", "some"):
            assert made(engine, PROMPT, sampler, Drafts(pinned=4, known=known[kind]), 24) == text, kind
            assert engine.draft_counts.accepted > 0
        judged(engine, sampler, PROMPT, text, MARGIN)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("shape", "k", "v"), [("tiny-llama", "q8_0", "q4_0"), ("tiny-deepseek2", "q4_0", "q4_0"), ("tiny-llama", "f32", "f16")]
)
def test_drafts_over_every_type_of_cache(shape: str, k: str, v: str, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", cache_type_k=k, cache_type_v=v) as engine:
        sampler, vocab = SAMPLERS["temperature"], engine.model.hp.n_vocab
        text = made(engine, PROMPT, sampler, Drafts(pinned=8, known=(-1,)), 24)
        known = drafts_about(PROMPT, text, vocab)
        for kind in ("right", "some"):
            assert made(engine, PROMPT, sampler, Drafts(pinned=8, known=known[kind]), 24) == text, kind
        judged(engine, sampler, PROMPT, text, 0.05 if "q4_0" in (k, v) else 0.02)


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen35", pytest.param("tiny-gpt-oss", marks=pytest.mark.exhaustive)])
def test_barrier_free_steps_with_drafts_pass_their_trial(
    shape: str, tmp_path: Path, device: Device, barrier_free: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial compares a step with the same step: from the same position, text and states. Here by its logits, since plans for CPU
    drivers have barriers between most stages of several columns."""
    found = vars(Program)["last_waited_for"]

    def logits(program: Program) -> BufferRange | None:
        return program.range("result_output") if "result_output" in program.schedule.slots else found.__get__(program)

    monkeypatch.setattr(Program, "last_waited_for", property(logits))
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    with Engine.open(path, device, LoadOptions(ctx=N_CTX, spec_pinned=8)) as engine:
        plain = made(engine, PROMPT, Sampler(), Drafts(pinned=8, known=(-1,)))
        before = len(engine.schedule().barrier_free)
        assert before
        assert made(engine, PROMPT, Sampler(), Drafts(7, pinned=8, known=(*PROMPT, *plain))) == plain
        engine.reset()
        engine.prompt(PROMPT[:-1])
        engine.prepare_drafts(PROMPT[-1], Sampler(), Drafts(7))
        assert len(engine.schedule().barrier_free) == before, "the check of the first run found another result"
