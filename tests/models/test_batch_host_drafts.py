"""Texts of a batch that the host has to see token by token, by a grammar's masks or for their logits, have drafts beside others: they stay
what they are without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batch_drafts_kit import PROMPTS, equal_times  # noqa: F401  a fixture
from test_drafts_with_host import Every
from tiny_models import tiny

import vkback
from vkback.api import GenerateOptions
from vkback.device import BufferRange, Device
from vkback.engine.batch.batch import Batch, Request, Update
from vkback.engine.batch.host_drafts import HostDrafts
from vkback.engine.constraint import Ahead
from vkback.engine.drafts import LONGEST_REST, DraftCounts, Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler

N_CTX, PAGE, VOCAB = 256, 16, 331


EVERY = Sampler(
    temp=0.8,
    top_k=20,
    repeat_penalty=1.2,
    penalty_last_n=-1,
    dry_multiplier=0.8,
    dry_allowed_length=1,
    dry_sequence_breakers=(),
    typical_p=0.9,
    xtc_probability=0.4,
    xtc_threshold=0.05,
)
"""All that a sampler may have beside others: steps are of few kinds, each of which is compiled."""

SAMPLERS = (replace(EVERY, temp=0.0), replace(EVERY, seed=3), replace(EVERY, temp=1.1, seed=7), replace(EVERY, penalty_last_n=5, seed=8))
"""Of the four texts, of which all but the second have masks, and all but the last one logits."""


def requests(drafts: Sequence[Drafts | None], n: int = 30) -> list[Request]:
    plain = [Request(p, n, s, stop_at_eos=False, drafts=d) for p, s, d in zip(PROMPTS, SAMPLERS, drafts, strict=True)]
    masked = [replace(request, constraint=Every() if i != 1 else None) for i, request in enumerate(plain)]
    return [replace(request, logits=i < 3) for i, request in enumerate(masked)]


Made = tuple[list[list[int]], list[list[npt.NDArray[np.float32]]], list[DraftCounts], int]
"""Texts, their logits, their drafts, and steps."""


def made(engine: Engine, asked: Sequence[Request], columns: int = 8, sequences: int = 4) -> Made:
    """Every step has the same columns, so that bits do not hang on who is in it."""
    with Batch(engine, sequences=sequences, page=PAGE, rows=60 * PAGE, pinned=True, max_step_tokens=columns) as batch:
        ids = [batch.add(request) for request in asked]
        texts: dict[int, list[int]] = {id: [] for id in ids}
        rows: dict[int, list[npt.NDArray[np.float32]]] = {id: [] for id in ids}
        counts = dict.fromkeys(ids, DraftCounts())
        for update in batch.run():
            assert update.error is None
            texts[update.id] += update.tokens
            rows[update.id] += update.logits
            counts[update.id] = update.took.drafts
        assert batch.counters.drafts == sum(counts.values(), DraftCounts())
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages
        return list(texts.values()), list(rows.values()), list(counts.values()), batch.counters.steps


def same_rows(found: Sequence[Sequence[npt.NDArray[np.float32]]], expected: Sequence[Sequence[npt.NDArray[np.float32]]]) -> bool:
    pairs = [(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)]
    return all(np.array_equal(a, b) for a, b in pairs)


def known(texts: Sequence[Sequence[int]], kind: str) -> list[Drafts]:
    """Drafts by position: right, wrong, every third wrong, or random."""
    rng = np.random.default_rng(11)
    rows = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        by = {"right": [0], "wrong": [1], "some": [0, 0, 3], "random": rng.integers(0, VOCAB, len(text)).tolist()}[kind]
        rows.append(Drafts(known=(*prompt, *((t + by[i % len(by)]) % VOCAB for i, t in enumerate(text)))))
    return rows


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "arch", ["llama", pytest.param("qwen35", marks=pytest.mark.exhaustive), pytest.param("mamba2", marks=pytest.mark.exhaustive)]
)
def test_texts_with_masks_and_logits_are_the_same_with_any_drafts(arch: str, tmp_path: Path, device: Device) -> None:
    with Engine.open(tiny(arch, tmp_path), device, LoadOptions(ctx=N_CTX, spec_type="ngram-simple", act="f32")) as engine:
        texts, rows, counts, steps = made(engine, requests([None] * 4))
        assert counts == [DraftCounts()] * 4 and [len(own) for own in rows] == [30, 30, 30, 0]
        for kind in ("right", "wrong", "random"):
            found, seen, counts, fewer = made(engine, requests(known(texts, kind)))
            assert found == texts and same_rows(seen, rows), kind
            assert all(c.drafted > 0 for c in counts), kind
            if kind == "right":
                assert all(c.accepted == c.drafted >= 12 for c in counts) and fewer < 0.7 * steps
                assert all(drafted == accepted for c in counts for drafted, accepted in c.by_place)
            if kind == "wrong":  # but where a mask leaves one token alone that one is the draft
                assert counts[0].accepted > 0 == counts[1].accepted
        found, seen, counts, _ = made(engine, requests([Drafts()] * 4))
        assert found == texts and same_rows(seen, rows)
        assert counts[0].accepted > 0, "every fifth token is one that alone may come"


@pytest.mark.vulkan
def test_a_text_with_masks_is_the_same_whoever_else_is_there(tmp_path: Path, device: Device) -> None:
    with Engine.open(tiny("llama", tmp_path), device, LoadOptions(ctx=N_CTX, act="f32")) as engine:
        texts, _, _, _ = made(engine, requests([None] * 4))
        for i in (0, 2):
            found, _, (counts,), _ = made(engine, [requests(known(texts, "some"))[i]])
            assert found == [texts[i]] and 0 < counts.accepted < counts.drafted


@pytest.mark.vulkan
def test_a_text_beside_others_ends_where_its_constraint_does(tmp_path: Path, device: Device) -> None:
    with Engine.open(tiny("llama", tmp_path), device, LoadOptions(ctx=N_CTX, act="f32")) as engine:

        def asked(drafts: Sequence[Drafts | None]) -> list[Request]:
            return [replace(request, constraint=Every(13 + 5 * i)) for i, request in enumerate(requests(drafts))]

        texts, rows, _, _ = made(engine, asked([None] * 4))
        assert [len(text) for text in texts] == [13, 18, 23, 28]
        found, seen, counts, _ = made(engine, asked(known(texts, "right")))
        assert found == texts and same_rows(seen, rows) and all(c.accepted > 3 for c in counts)


@pytest.mark.vulkan
@pytest.mark.exhaustive
def test_texts_with_masks_and_drafts_make_room(tmp_path: Path, device: Device) -> None:
    """Few pages: texts are preempted, and come back with their drafts."""
    with Engine.open(tiny("llama", tmp_path), device, LoadOptions(ctx=N_CTX, act="f32")) as engine:
        texts = made(engine, requests([None] * 4, 60))[0]
        with Batch(engine, sequences=3, page=PAGE, rows=10 * PAGE, pinned=True, max_step_tokens=8, reuse=False) as batch:
            ids = [batch.add(request) for request in requests(known(texts, "some"), 60)]
            found: dict[int, list[int]] = {id: [] for id in ids}
            for update in batch.run():
                found[update.id] += update.tokens
            assert [found[id] for id in ids] == texts
            assert batch.scheduler.preemptions > 0 and batch.counters.drafts.accepted > 5
            assert batch.pool.free == batch.pool.n_pages


@pytest.mark.vulkan
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafts"])
def test_masks_go_to_the_device_with_the_step(drafted: bool, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded, and waited for, belongs to a text's beginning: a step is one submit."""
    uploads: list[int] = []
    upload = Device.upload_many

    def counted(self: Device, pairs: Sequence[tuple[BufferRange, npt.NDArray[Any]]]) -> None:
        uploads.append(len(pairs))
        upload(self, pairs)

    with Engine.open(tiny("llama", tmp_path), device, LoadOptions(ctx=N_CTX, act="f32")) as engine:
        asked = [Request(p, 24, stop_at_eos=False, drafts=Drafts() if drafted else None) for p in PROMPTS[:2]]
        with Batch(engine, sequences=2, page=PAGE, rows=60 * PAGE, pinned=True, max_step_tokens=8) as batch:
            for request in asked:
                batch.add(replace(request, constraint=Every()))
            made: list[Update] = []
            while len({update.id for update in made}) < 2 or batch.counters.drafts.steps < drafted:
                made += batch.advance()
            monkeypatch.setattr(Device, "upload_many", counted)
            before = batch.counters.steps
            made += batch.run()
            assert batch.counters.steps > before + 4 and not uploads
            assert sum(len(update.tokens) for update in made) == 48
            assert (batch.counters.drafts.accepted > 0) == drafted


@pytest.mark.vulkan
def test_json_of_several_texts_is_the_same_with_drafts(device: Device) -> None:
    pytest.importorskip("llguidance", reason="JSON by a schema needs llguidance")
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"enum": ["one", "another"]}, "and_of_another_property": {"type": "boolean"}},
        "required": ["a_long_name_of_a_property", "and_of_another_property"],
    }
    prompts = [f"{what} as JSON: " for what in ("A thing", "Another thing", "What is left")]
    how = GenerateOptions(max_tokens=90, json_schema=schema, temperature=1.5, seed=4, logprobs=2)
    with vkback.load("demo-dense", device.index, 256, act="f32", exact="requests", sequences=8, spec_type="ngram-simple") as model:
        drafted = model.batch(prompts, **how)
        how["draft_max"] = 0
        plain = model.batch(prompts, **how)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain] and [r.logprobs for r in drafted] == [r.logprobs for r in plain]
        assert all(result.timings.draft_accepted > 5 for result in drafted), "what alone may come is drafted"
        assert not any(result.timings.draft_tokens for result in plain)


def test_guesses_that_have_no_part_in_steps_become_few() -> None:
    """Masks of drafts take time."""

    class Counting(Every):
        looks = 0

        def ahead(self, tokens: Sequence[int], most: int) -> Ahead:
            self.looks += len(tokens) > 0
            return super().ahead(tokens, most)

    grammar, rng = Counting(), np.random.default_rng(5)
    text = HostDrafts(Drafts(), grammar, [*range(VOCAB), *range(VOCAB)])
    sure = 0
    for place in range(600):
        text.look(7)
        ids = np.flatnonzero(np.unpackbits(grammar.mask().view(np.uint8), bitorder="little"))
        token = int(rng.choice(ids))
        sure += place % 5 == 0 and text.ahead.tokens[:1] == [token]
        text.take([token])
        grammar.take(token)
    assert sure == 120, "what alone may come is found in any case"
    assert 600 / LONGEST_REST / 2 < grammar.looks < 600 / 4


def test_gains_are_sure_where_one_token_may_come() -> None:
    grammar = Every()
    text = HostDrafts(Drafts(), grammar, PROMPTS[1])
    text.look(3)
    assert text.ahead.tokens[0] == 0 and text.gains[:2] == (1.0, 2.0), "at place 0 one token alone may come"
    text.look(0)
    assert text.ahead.tokens == [] and text.gains == () and len(text.ahead.masks) == 1
    unmasked = HostDrafts(Drafts(), None, PROMPTS[1])
    unmasked.look(3)
    assert unmasked.ahead.tokens == [5, 6, 8] and not unmasked.ahead.masks
    assert all(1.0 > b - a > 0.0 for a, b in zip(unmasked.gains, unmasked.gains[1:], strict=False))
    assert HostDrafts(Drafts(least=4), None, PROMPTS[1]).gains == ()
