"""Texts of a batch that run beside others and have drafts in the columns that a step has left: they stay what they are without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from batch_drafts_kit import PROMPTS, equal_times  # noqa: F401  a fixture
from tiny_models import tiny

import vkback
from vkback.device import Device
from vkback.engine.batch import batch as batch_module
from vkback.engine.batch.batch import Batch, Request
from vkback.engine.drafts import DraftCounts, Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.models.registry import Model

N_CTX, PAGE, VOCAB = 256, 16, 331

DRAFTING = LoadOptions(ctx=N_CTX, spec_type="ngram-simple", act="f32")
"""With it, an engine keeps recurrent states to go back to."""

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(temp=0.8, top_k=20, seed=3),
    "min_p": Sampler(temp=0.6, top_k=0, top_p=0.9, min_p=0.02, seed=5),
    "penalties": Sampler(temp=0.7, repeat_penalty=1.2, penalty_last_n=-1, seed=7),
}

OTHERS = {
    "DRY": Sampler(dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=()),
    "a chain": Sampler(temp=0.9, typical_p=0.8, xtc_probability=0.4, xtc_threshold=0.05, seed=8),
    "penalties of few, a bias": Sampler(temp=0.5, repeat_penalty=1.3, frequency_penalty=0.1, penalty_last_n=3, logit_bias=((7, 4.0),)),
    "mirostat": Sampler(temp=0.8, mirostat=2, seed=10),
}


def requests(drafts: Sequence[Drafts | None], n: int = 150, samplers: Mapping[str, Sampler] = SAMPLERS) -> list[Request]:
    both = zip(PROMPTS, samplers.values(), drafts, strict=True)
    return [Request(prompt, n, sampler, stop_at_eos=False, drafts=own) for prompt, sampler, own in both]


def made(engine: Engine, asked: Sequence[Request], columns: int = 16) -> tuple[list[list[int]], list[DraftCounts]]:
    """Texts of one batch, and their drafts. Every step has the same columns, so that bits do not hang on who is in it."""
    with Batch(engine, sequences=4, page=PAGE, rows=60 * PAGE, pinned=True, max_step_tokens=columns) as batch:
        ids = [batch.add(request) for request in asked]
        texts: dict[int, list[int]] = {id: [] for id in ids}
        counts = dict.fromkeys(ids, DraftCounts())
        for update in batch.run():
            texts[update.id] += update.tokens
            counts[update.id] = update.took.drafts
        assert batch.counters.drafts == sum(counts.values(), DraftCounts())
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages
        return list(texts.values()), list(counts.values())


def known(texts: Sequence[Sequence[int]], by: int, every: int = 1) -> list[Drafts]:
    """Drafts by position: every n-th token is another one by so much, the others are right."""
    rows = [
        [*prompt, *((t + by) % VOCAB if by and i % every == every - 1 else t for i, t in enumerate(text))] for prompt, text in both(texts)
    ]
    return [Drafts(known=tuple(row)) for row in rows]


def both(texts: Sequence[Sequence[int]]) -> zip[tuple[tuple[int, ...], Sequence[int]]]:
    return zip(PROMPTS, texts, strict=True)


ARCHITECTURES = ("llama", "gpt-oss", "qwen35", "mamba2", "lfm2")
"""Attention alone, and with recurrent states of each kind."""


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "arch", [pytest.param(each, marks=[pytest.mark.exhaustive] if each in ("gpt-oss", "lfm2") else []) for each in ARCHITECTURES]
)
def test_texts_beside_others_are_the_same_with_any_drafts(arch: str, tmp_path: Path, device: Device) -> None:
    with Engine.open(tiny(arch, tmp_path), device, DRAFTING) as engine:
        texts, counts = made(engine, requests([None] * 4, 60))
        assert counts == [DraftCounts()] * 4
        found, counts = made(engine, requests(known(texts, 0), 60))
        assert found == texts
        assert all(c.drafted == c.accepted > 30 for c in counts), "right ones are all accepted"
        found, counts = made(engine, requests(known(texts, 1), 60))
        assert found == texts and all(c.accepted == 0 < c.drafted for c in counts)
        found, counts = made(engine, requests(known(texts, 1, every=3), 60))
        assert found == texts and all(0 < c.accepted < c.drafted for c in counts)


@pytest.mark.vulkan
@pytest.mark.parametrize("arch", ("mamba2", "qwen35", "lfm2"))
def test_states_come_from_an_engine_that_keeps_more(arch: str, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where states take too much memory a batch keeps two of each, and its texts have no drafts beside others."""
    path, prompt = tiny(arch, tmp_path), tuple(range(40, 63))
    asked = [Request(prompt[i:], 20, stop_at_eos=False, drafts=Drafts()) for i in (0, 4, 9)]

    def texts(engine: Engine) -> list[tuple[int, ...]]:
        with Batch(engine, sequences=3, page=PAGE) as batch:
            ids = [batch.add(request) for request in asked]
            updates = batch.run()
            assert batch.counters.drafts == DraftCounts()
            return [tuple(t for u in updates if u.id == id for t in u.tokens) for id in ids]

    with Engine.load(path, device, n_ctx=N_CTX, act="f32") as engine:
        assert engine.max_columns == 1
        expected = texts(engine)
    monkeypatch.setattr(batch_module, "KEPT_SHARE", 0.0)
    monkeypatch.setattr(Model, "recurrent_bytes", 1)
    with Engine.open(path, device, DRAFTING) as engine:
        assert engine.max_columns == 8
        assert texts(engine) == expected


@pytest.mark.vulkan
def test_texts_beside_others_have_drafts_with_every_sampler_but_mirostat(tmp_path: Path, device: Device) -> None:
    with Engine.load(tiny("llama", tmp_path), device, n_ctx=N_CTX, act="f32") as engine:
        texts, _ = made(engine, requests([None] * 4, 60, OTHERS))
        for by, every in ((0, 1), (1, 1), (1, 3)):
            found, counts = made(engine, requests(known(texts, by, every), 60, OTHERS))
            assert found == texts
            assert all(c.drafted > 0 for c in counts[:3]) and all((c.accepted > 0) == (every > 1 or not by) for c in counts[:3])
            assert counts[3] == DraftCounts(), "its samplers move on with each token"


@pytest.mark.vulkan
def test_drafts_beside_others_are_found_in_each_text(tmp_path: Path, device: Device) -> None:
    """A greedy text of a tiny model repeats itself."""
    with Engine.load(tiny("llama", tmp_path), device, n_ctx=N_CTX, act="f32") as engine:
        asked = requests([Drafts()] * 4)
        texts, _ = made(engine, [replace(request, drafts=None) for request in asked])
        found, counts = made(engine, asked)
        assert found == texts
        assert counts[0].accepted > 0


@pytest.mark.vulkan
def test_texts_with_drafts_come_go_and_make_room(tmp_path: Path, device: Device) -> None:
    """Few pages, texts that are cancelled, ends within drafts, a fork: what is left is the same text."""
    with Engine.load(tiny("llama", tmp_path), device, n_ctx=N_CTX, act="f32") as engine:
        texts, _ = made(engine, requests([None] * 4))
        asked = requests(known(texts, 1, every=5))
        with Batch(engine, sequences=3, page=PAGE, rows=26 * PAGE, pinned=True, max_step_tokens=16, reuse=False) as batch:
            ids = [batch.add(request) for request in asked]
            gone = batch.add(replace(asked[0], client="other"))
            found: dict[int, list[int]] = {id: [] for id in [*ids, gone]}
            while batch.busy:
                for update in batch.advance():
                    found[update.id] += update.tokens
                if found[gone] and gone in batch.scheduler.texts:
                    batch.cancel(gone)
            assert [found[id] for id in ids] == texts
            assert batch.scheduler.preemptions > 0 and batch.counters.drafts.accepted > 20
            assert batch.pool.free == batch.pool.n_pages


@pytest.mark.vulkan
def test_several_texts_from_python_have_drafts_at_once(device: Device) -> None:
    prompts = [3 * f"the {what} went down to the river with his horse and his dog, and " for what in ("old man", "captain")]
    with vkback.load("demo-dense", device.index, 256, act="f32", exact="requests", sequences=4, spec_type="ngram-simple") as model:
        drafted = model.batch(prompts, max_tokens=60, temperature=0, ignore_eos=True)
        plain = model.batch(prompts, max_tokens=60, temperature=0, ignore_eos=True, draft_max=0)
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]
        assert sum(result.timings.draft_accepted for result in drafted) > 0
        assert not any(result.timings.draft_tokens for result in plain)
