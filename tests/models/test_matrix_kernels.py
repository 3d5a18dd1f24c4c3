"""Softcaps, chunks, windows and spans of texts in the kernels of cooperative matrices, where a device has such: Mesa's CPU driver from
version 25.2 on does. tests/models/test_prompt_logits.py has the other families."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prompt_kernels import KERNEL_NMSE, engine_of, kernels_of, skip_without

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models.synth import SHAPES, synthesize
from vkback.models.texts import Texts
from vkback.plan.planner import plan

pytestmark = pytest.mark.vulkan

MATRIX = "attention/prompt/prompt_matrix.comp"
N_CTX = 128
LENGTHS = (61, 100)
"""A program of 64 with padding; 64, 32 and 16 with padding. Windows and chunks have 9 rows."""
INT_DOT_NMSE = 1e-3
"""Of a token, whose GEMVs round activations to 8 bits (tests/models/test_references.py)."""


@contextmanager
def running(name: str, folder: Path, device: Device) -> Iterator[Engine]:
    """An engine of a tiny model whose prompts go through matrices."""
    skip_without("coop_mat", device.caps)
    synthesize(f"{name}-Q8_0", folder / "model.gguf")
    with engine_of(folder / "model.gguf", device, "coop_mat", n_ctx=N_CTX) as engine:
        yield engine


@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gemma3", "tiny-gemma4", "tiny-gemma4-ple", "tiny-gemma4-moe", "tiny-llama4"])
def test_prompts_are_the_twin_s(name: str, tmp_path: Path, device: Device) -> None:
    with running(name, tmp_path, device) as engine:
        ids = np.random.default_rng(15).integers(engine.model.hp.n_vocab, size=max(LENGTHS) + 1).tolist()
        want = NumpyTwin(tmp_path / "model.gguf", n_ctx=N_CTX).logits(ids)
        for length in LENGTHS:
            assert MATRIX in kernels_of(engine, length)
            engine.reset()
            got = engine.prompt_logits(ids[:length])
            rows = np.square(got - want[:length]).sum(axis=1) / np.square(want[:length]).sum(axis=1)
            # Other experts for a token now and then, where two are near each other.
            assert (np.median(rows) if SHAPES[name].n_expert else nmse(got, want[:length])) <= KERNEL_NMSE["coop_mat"]
            assert np.mean(rows > 100 * KERNEL_NMSE["coop_mat"]) <= (0.1 if SHAPES[name].n_expert else 0.0)
            engine.reset()
            engine.prompt(ids[:length])
            after = nmse(engine.decode_logits(ids[length]), want[length])
            assert after <= (10 if SHAPES[name].n_expert else 1) * INT_DOT_NMSE


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-nomic-bert", "tiny-modern-bert", "tiny-gemma-embedding"])
def test_texts_are_the_twin_s(name: str, tmp_path: Path, device: Device) -> None:
    """Two texts in one program, which see nothing of each other."""
    with running(name, tmp_path, device) as engine:
        rng = np.random.default_rng(15)
        texts = [rng.integers(engine.model.hp.n_vocab, size=length).tolist() for length in (53, 40)]
        schedule = plan(engine.model.text_graph(128, N_CTX, Texts(2, "none")), engine.ctx)
        assert MATRIX in {d.kernel.source for d in schedule.dispatches()}
        got = np.concatenate(list(engine.vectors(texts, "none")))
        assert nmse(got, NumpyTwin(tmp_path / "model.gguf", n_ctx=N_CTX).embed(texts, "none")) <= KERNEL_NMSE["coop_mat"]
