"""Chunks of a text whose logits are wanted, side by side in one program: the values are those of each chunk alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_batch import MARGIN
from tiny_models import TINY, of_a_kind

import vkback
from vkback.device import Device
from vkback.engine.engine import SCORED_BYTES, Engine
from vkback.engine.text_vectors import TextVectors
from vkback.models import Model
from vkback.models.synth import synthesize

CHUNK, FIRST, CHUNKS = 24, 12, 5
QUICK = ["tiny-llama", "tiny-llama4", "tiny-deepseek2", "tiny-gpt-oss", "tiny-gemma2", "tiny-granitehybrid"]
"""Plain attention, a window of chunks, MLA, sinks beside a window, softcaps, recurrent states."""


def chunks_of(vocab: int) -> list[list[int]]:
    ids = np.random.default_rng(7).integers(0, vocab, (CHUNKS, CHUNK))
    return [[int(id) for id in row] for row in ids]


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", of_a_kind(TINY, QUICK))
def test_logits_side_by_side_are_those_of_each_text_alone(shape: str, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    recurrent = Model.open(path).architecture.recurrent
    with Engine.load(path, device, n_ctx=32, act="f32") as engine:
        texts = chunks_of(engine.model.hp.n_vocab)
        alone = list(engine.logits_side_by_side(texts, FIRST, at_once=1))
        for at_once in (2, 5):
            found = list(engine.logits_side_by_side(texts, FIRST, at_once=at_once))
            for own, beside in zip(alone, found, strict=True):
                assert own.shape == beside.shape == (CHUNK - FIRST, engine.model.hp.n_vocab)
                assert np.abs(own - beside).max() <= MARGIN * own.std(), (at_once, np.abs(own - beside).max() / own.std())
                assert not recurrent or np.array_equal(own, beside), "one by one"


@pytest.mark.vulkan
@pytest.mark.parametrize("cache", ["q8_0", "q4_0"])
def test_a_perplexity_is_within_its_bound_over_every_type_of_cache(cache: str, tmp_path: Path, device: Device) -> None:
    """A token's loss moves by twice the largest difference of its logits at most; the logarithm of a perplexity is the mean loss."""
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with vkback.load(path, ctx=32, act="f32", cache_type_k=cache, cache_type_v=cache) as model:
        ids = [id for chunk in chunks_of(model.n_vocab) for id in chunk]
        scored: dict[int, list[np.ndarray]] = {1: [], 5: []}
        value = {}
        for sequences, logits in scored.items():

            def keep(found: np.ndarray, _: object, logits: list[np.ndarray] = logits) -> None:
                logits.append(np.array(found))

            value[sequences] = model.perplexity(ids, chunk=CHUNK, sequences=sequences, on_scored=keep)
        most = max(np.abs(a - b).max() for a, b in zip(scored[1], scored[5], strict=True))
        assert abs(np.log(value[5].value / value[1].value)) <= 2 * most <= 0.05 * np.std(scored[1])
        assert value[5].tokens == value[1].tokens == CHUNKS * (CHUNK - FIRST - 1)


@pytest.mark.vulkan
@pytest.mark.parametrize("exact", [True, "requests"])
def test_an_exact_perplexity_has_the_same_bits_whatever_is_beside(exact: Any, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with vkback.load(path, ctx=32, exact=exact) as model:
        ids = [id for chunk in chunks_of(model.n_vocab) for id in chunk]
        alone, beside = (model.perplexity(ids, chunk=CHUNK, sequences=sequences) for sequences in (1, 5))
        assert alone == beside == model.perplexity(ids, chunk=CHUNK)


@pytest.mark.vulkan
def test_as_many_chunks_at_once_as_pay_and_fit(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with Engine.load(path, device, n_ctx=64, act="f32", ubatch=64) as engine:
        widths: list[int] = []
        real = TextVectors.logits

        def logits(self: TextVectors, texts: Sequence[Sequence[int]], first: int, **how: int) -> Iterator[np.ndarray]:
            widths.append(how["at_once"])
            return real(self, texts, first, **how)

        monkeypatch.setattr(TextVectors, "logits", logits)

        def width(length: int, count: int) -> int:
            del widths[:]
            texts = [[1] * length] * count
            assert sum(1 for _ in engine.logits_side_by_side(texts, length // 2)) == count
            return widths[0] if widths else 1

        assert (width(16, 4), width(32, 4), width(64, 4)) == (4, 2, 1), "those that fill a program of 64 tokens"
        assert (width(8, 9), width(8, 1)) == (5, 1), "no emptier last program than need be"
        monkeypatch.setattr(device, "free_memory", lambda: 1000)
        for on_device, for_host, expected in ((7, 1, 4), (15, 1, 2), (31, 1, 1), (7, SCORED_BYTES // 48, 2)):  # of each token
            monkeypatch.setattr(TextVectors, "bytes_of", lambda _, n, kind, a=on_device, b=for_host: (a * n, b * n))
            assert width(16, 4) == expected, "half of the free memory, and no more logits than so many"
