"""Models with delta nets or Mamba-2 blocks whose prompts go in chunks of tokens: prompts in pieces, states saved and gone back to,
against the twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prompt_kernels import kernels_of, logits_after

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin

N_CTX = 96
IDS = [int(t) for t in np.random.default_rng(44).integers(0, 160, 75)]
FLOAT_NMSE = 1e-6
"""As in test_engine.py."""

DELTA = {"ssm/delta_chunk_ut.comp", "ssm/delta_chunk_state.comp"}
SCAN = {f"ssm/scan_chunk_{part}.comp" for part in ("products", "states", "output")}

Tiny = Callable[[str], Path]


@pytest.fixture
def engine(request: pytest.FixtureRequest, tiny: Tiny, device: Device, in_chunks: None) -> Iterator[Engine]:
    with Engine.load(tiny(request.param), device, n_ctx=N_CTX, act="f32", progress=False, ubatch=32) as loaded:
        yield loaded


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("engine", "chunked"),
    [
        *((f"tiny-{name}", DELTA) for name in ("qwen35", "qwen35moe", "qwen3next")),
        *((f"tiny-{name}", SCAN) for name in ("mamba2", "falcon-h1-normed", "nemotron_h", "nemotron_h_moe", "granitehybrid")),
    ],
    indirect=["engine"],
)
def test_prompts_in_chunks_are_the_twin_s(engine: Engine, chunked: set[str]) -> None:
    """Of two whole programs and one with padding; in pieces that end within a chunk; from a state that was saved between two of them."""
    assert kernels_of(engine, len(IDS)) >= chunked
    want = NumpyTwin(engine.model.file.path, n_ctx=N_CTX).logits(IDS)
    engine.reset()
    assert nmse(engine.prompt_logits(IDS), want) < FLOAT_NMSE
    for cuts in ((5, 38), (16, 17, 33), (32, 64)):
        pieces = [IDS[a:b] for a, b in zip((0, *cuts), (*cuts, len(IDS)), strict=True)]
        assert nmse(logits_after(engine, pieces), want[-1]) < FLOAT_NMSE, cuts
    engine.reset()
    engine.prompt(IDS[:37])
    saved = engine.snapshot()
    rest = engine.prompt_logits(IDS[37:])
    engine.reset()
    engine.prompt(IDS[::-1])
    engine.restore(saved)
    assert np.array_equal(engine.prompt_logits(IDS[37:]), rest)
    assert nmse(rest, want[37:]) < FLOAT_NMSE
    engine.restore(saved)
    assert nmse(np.stack([engine.decode_logits(t) for t in IDS[37:42]]), want[37:42]) < FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize(("name", "chunked"), [("tiny-qwen35", DELTA), ("tiny-mamba2", SCAN)])
def test_chunks_leave_the_state_where_steps_with_drafts_look_for_it(
    name: str, chunked: set[str], tiny: Tiny, device: Device, in_chunks: None
) -> None:
    """In a ring of nine slots, and a state saved from it goes to one of two."""
    path = tiny(name)
    want = NumpyTwin(path, n_ctx=N_CTX).logits(IDS[:45])
    with Engine.open(path, device, LoadOptions(ctx=N_CTX, act="f32", ubatch=32, spec_pinned=8)) as engine:
        assert kernels_of(engine, 44) >= chunked
        assert nmse(logits_after(engine, [IDS[:45]]), want[-1]) < FLOAT_NMSE
        engine.reset()
        engine.prompt(IDS[:44])
        saved = engine.snapshot()
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", progress=False, ubatch=32) as plain:
        plain.restore(saved)
        assert nmse(plain.decode_logits(IDS[44]), want[-1]) < FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-falcon-h1"])
def test_exact_texts_keep_their_bits_where_the_tables_want_chunks(name: str, tiny: Tiny, device: Device, in_chunks: None) -> None:
    """exact=True goes token by token; tests/models/test_batch.py has exact="requests", which keeps chunks."""
    path = tiny(name)
    with Engine.load(path, device, n_ctx=N_CTX, progress=False, ubatch=32, exact=True) as engine:
        assert not kernels_of(engine, 40) & (DELTA | SCAN)
        alone = np.stack([engine.decode_logits(t) for t in IDS[:40]])
        engine.reset()
        assert np.array_equal(engine.prompt_logits(IDS[:40]).view(np.uint32), alone.view(np.uint32))
