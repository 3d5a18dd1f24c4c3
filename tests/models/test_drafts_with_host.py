"""Drafts of texts between whose tokens the host is needed: a grammar's masks, log probabilities. They stay what they are without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import tiny

import vkback
from vkback.api import GenerateOptions
from vkback.device import BufferRange, Device
from vkback.engine.constraint import Ahead, JsonGrammar, only_token
from vkback.engine.drafts import Drafts, HostPace, Probe, StepTimes
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.models.registry import Model
from vkback.paths import builtin_model

N_CTX, VOCAB = 128, 331
PROMPT = (5, 6, 7, 5, 6, 8, 5, 6, 7)

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(temp=0.8, top_k=20, seed=3),
    "penalties": Sampler(temp=0.7, repeat_penalty=1.2, penalty_last_n=-1, seed=5),
}


class Every:
    """A constraint of tiny models: the token at place n of the text is one of a third of the vocabulary, at every fifth place one alone."""

    def __init__(self, ends_after: int = 1000) -> None:
        self.taken: list[int] = []
        self._ends_after = ends_after

    @property
    def ended(self) -> bool:
        return len(self.taken) >= self._ends_after

    def _mask(self, place: int) -> npt.NDArray[np.int32]:
        ids = np.arange(place % 3, VOCAB, 3) if place % 5 else np.array([(7 * place) % VOCAB])
        bits = np.zeros(32 * -(-VOCAB // 32), np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self) -> npt.NDArray[np.int32]:
        return self._mask(len(self.taken))

    def take(self, token: int) -> None:
        mask = self.mask()
        assert int(mask[token >> 5]) >> (token & 31) & 1, "only what may come does"
        self.taken.append(token)

    def ahead(self, tokens: Sequence[int], most: int) -> Ahead:
        found, place = Ahead(masks=[self.mask()]), len(self.taken)
        for i in range(most):
            mask = self._mask(place + i)
            token = only_token(mask)
            if token < 0 and i < len(tokens):
                token = tokens[i]
            if token < 0 or not int(mask[token >> 5]) >> (token & 31) & 1 or place + i + 1 >= self._ends_after:
                break
            found.tokens.append(token)
            found.masks.append(self._mask(place + i + 1))
        return found


def made(
    engine: Engine, sampler: Sampler, drafts: Drafts | None, constraint: Every | None, logits: bool = False, n: int = 40
) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
    engine.reset()
    engine.prompt(PROMPT[:-1])
    found: list[npt.NDArray[np.float32]] = []
    on_logits = found.append if logits else None
    text = list(
        engine.generate(PROMPT[-1], n, sampler=sampler, stop_at_eos=False, drafts=drafts, on_logits=on_logits, constraint=constraint)
    )
    return text, found


def opened(arch: str, folder: Path, device: Device) -> Engine:
    return Engine.open(tiny(arch, folder), device, LoadOptions(ctx=N_CTX, act="f32", spec_type="ngram-simple", spec_pinned=8))


@pytest.mark.vulkan
@pytest.mark.parametrize("arch", ["llama", "qwen35", pytest.param("gpt-oss", marks=pytest.mark.exhaustive)])
def test_a_text_with_masks_and_logits_is_the_same_with_any_drafts(arch: str, tmp_path: Path, device: Device) -> None:
    with opened(arch, tmp_path, device) as engine:
        for name, sampler in SAMPLERS.items():
            for constrained, logits in ((True, False), (False, True), (True, True)):
                said = f"{name}, masks {constrained}, logits {logits}"

                text, rows = made(engine, sampler, Drafts(pinned=8, known=(-1,), most=0), Every() if constrained else None, logits)
                assert engine.draft_counts.drafted == 0 and len(rows) == (len(text) if logits else 0)
                whole = (*PROMPT, *text)
                for kind, drafts in {
                    "found": Drafts(pinned=8),
                    "right": Drafts(pinned=8, known=whole),
                    "wrong": Drafts(pinned=8, known=tuple((t + 3) % VOCAB for t in whole)),
                }.items():
                    found, seen = made(engine, sampler, drafts, Every() if constrained else None, logits)
                    assert found == text, (said, kind)
                    assert all(np.array_equal(a, b) for a, b in zip(rows, seen, strict=True)), (said, kind)
                    counts = engine.draft_counts
                    if kind == "right":
                        assert counts.accepted == counts.drafted == len(text) - counts.steps >= 30, said


@pytest.mark.vulkan
def test_a_step_with_drafts_is_one_upload_and_one_submit(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without."""
    uploads = list[int]()
    upload = Device.upload_many

    def counted(self: Device, pairs: Sequence[tuple[BufferRange, npt.NDArray[Any]]]) -> None:
        uploads.append(len(pairs))
        upload(self, pairs)

    monkeypatch.setattr(Device, "upload_many", counted)
    with opened("llama", tmp_path, device) as engine:
        counts = {}
        for n in (8, 24):
            uploads.clear()
            assert len(made(engine, Sampler(), Drafts(pinned=8), Every(), n=n)[0]) == n
            counts[n] = len(uploads), engine.draft_counts.steps, engine.draft_counts.accepted
        assert counts[24][2] > counts[8][2] > 0
        assert counts[24][0] - counts[8][0] <= 24 - 8 - (counts[24][2] - counts[8][2]), "one a step"


@pytest.mark.vulkan
def test_a_text_ends_where_its_constraint_does(tmp_path: Path, device: Device) -> None:
    with opened("llama", tmp_path, device) as engine:
        text, _ = made(engine, Sampler(), Drafts(pinned=8, most=0, known=(-1,)), Every(13))
        assert len(text) == 13
        assert made(engine, Sampler(), Drafts(pinned=8, known=(*PROMPT, *text)), Every(13))[0] == text


@pytest.mark.vulkan
def test_json_is_the_same_text_with_drafts(device: Device) -> None:
    pytest.importorskip("llguidance", reason="JSON by a schema needs llguidance")
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"enum": ["one", "another"]}, "and_of_another_property": {"type": "boolean"}},
        "required": ["a_long_name_of_a_property", "and_of_another_property"],
    }
    with vkback.load("demo-dense", device.index, 256, act="f32", spec_type="ngram-simple", spec_pinned=8) as model:
        for how in (
            GenerateOptions(max_tokens=90, json_schema=schema, temperature=0.0),
            GenerateOptions(max_tokens=90, json_schema=schema, temperature=1.5, seed=4, logprobs=2),
        ):
            without = how.copy()
            without["draft_max"] = 0
            plain, drafted = model.generate("A thing as JSON: ", **without), model.generate("A thing as JSON: ", **how)
            assert drafted.tokens == plain.tokens and drafted.logprobs == plain.logprobs
            assert drafted.timings.draft_accepted > 5, "what alone may come is drafted"


def test_forced_text_is_drafted_as_the_vocabulary_splits_it() -> None:
    """Masks leave one token alone wherever the bytes are forced, though others begin with fewer of them."""
    pytest.importorskip("llguidance", reason="JSON by a schema needs llguidance")
    model = Model.open(builtin_model("demo-dense"))
    schema = {"type": "object", "properties": {n: {"type": "boolean"} for n in ("a_long_name", "of another")}, "required": ["a_long_name"]}
    constraint = JsonGrammar(model.tokenizer, model.hp.n_vocab).constraint(schema)
    text = model.tokenizer.encode('{"a_long_name": true, "of another": false}', add_bos=False)
    for word in ("a_long_name", "of another"):
        ids = model.tokenizer.encode(f'{word}"', add_bos=False)
        assert len(ids) > 2 and bytes(f'{word}"', "utf-8") == b"".join(model.tokenizer.token_bytes(i) for i in ids)
    longest = 0
    for i, token in enumerate(text):
        found = constraint.ahead([], 16)
        assert found.tokens == text[i : i + len(found.tokens)] and len(found.masks) == len(found.tokens) + 1
        longest = max(longest, len(found.tokens))
        constraint.take(token)
    assert longest == len(model.tokenizer.encode('a_long_name"', add_bos=False))


def test_one_token_of_a_mask_is_known() -> None:
    mask = np.zeros(4, np.int32)
    assert only_token(mask) == -1
    mask[2] = 1 << 5
    assert only_token(mask) == 69
    mask[2] = -(2**31)
    assert only_token(mask) == 95
    mask[0] = 1
    assert only_token(mask) == -1 == only_token(np.array([3, 0], np.int32))


def test_what_may_follow_is_read_behind_the_longest_match() -> None:
    probe = Probe([1, 2, 3, 4, 1, 2])
    assert probe.ahead(3) == [3, 4, 1] and probe.ahead(0) == []
    probe.take(3)
    assert probe.ahead(2) == [4, 1]
    probe.take(9)
    assert probe.ahead(2) == []
    assert Probe([7, 7]).ahead(4) == [7, 7, 7, 7]
    assert Probe([5, 6, 5], [1, 5, 8, -1]).ahead(2) == [6, 5] and Probe([5], [1, 5, 8, -1]).ahead(3) == [8]


def test_drafts_that_the_host_looks_up_stop_where_they_do_not_pay() -> None:
    times = StepTimes({4: 1.5, 8: 1.8})
    pace = HostPace(Drafts(most=7), times)
    assert pace.columns(0) == 1 and pace.columns(3) == 4 and pace.columns(7) == 8
    for _ in range(6):
        pace.take([1, 2, 3], [9], 4)
    assert pace.columns(7) == 1
    for _ in range(60):
        pace.take([1], [1], 1)  # plain steps tell how drafts would have done
    assert pace.columns(7) > 1
    unmeasured = HostPace(Drafts(most=7), None)
    assert unmeasured.columns(7) == 1 and unmeasured.wants_drafts(7, 100) and not unmeasured.wants_drafts(7, 10)
    assert HostPace(Drafts(pinned=8, most=0), None).columns(0) == 8
    before = pace.columns(7)
    for _ in range(8000):
        pace.take([], [1], 1)  # a long text in which nothing is found
    assert pace.columns(7) == before
