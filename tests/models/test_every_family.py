"""Every family goes through the same table: prompts in pieces over every type of cache, their states, barrier-free stages, adapters.
Logits and states over F16 are in test_references.py, batches of sequences in test_batch.py, `--exact` in test_exact.py, drafts in
test_drafts.py; these go through all families, too. In the quick run one family of a kind goes through the tests here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, of_a_kind, tiny_in_whole_units

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models import GgufFile, Model
from vkback.models.adapter import Given, merge, with_adapters, write_adapter
from vkback.models.builder import CacheTypes
from vkback.models.synth import synthesize

N_CTX = 64
TOKENS = np.random.default_rng(5).integers(0, 300, 40).tolist()
PIECES = (1, 2, 13, 16)
"""Lengths of pieces of a prompt, with micro-batches of 8; the rest of TOKENS is decoded. Windows of tiny models have 9 rows."""
FLOAT_NMSE = 1e-6
"""As of tests/models/test_references.py."""

OF_A_KIND = ("tiny-qwen35moe", "tiny-gemma4-ple", "tiny-lfm2")
"""A delta net and gates, layers that read others' rows, a short convolution; the others cross these."""

ALL = of_a_kind(TINY, OF_A_KIND)


def by_pieces(engine: Engine) -> np.ndarray:
    """Logits of TOKENS; a state is saved behind the pieces, another text read, and the state restored."""
    got, at = [], 0
    for length in PIECES:
        got.append(engine.prompt_logits(TOKENS[at : at + length]))
        at += length
    snapshot = engine.snapshot()
    rest = [engine.decode_logits(t)[None] for t in TOKENS[at:]]
    engine.reset()
    engine.prompt(TOKENS[::-1])
    engine.restore(snapshot)
    again = [engine.decode_logits(t)[None] for t in TOKENS[at:]]
    assert np.array_equal(np.concatenate(again).view(np.uint32), np.concatenate(rest).view(np.uint32))
    return np.concatenate([*got, *rest])


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_0"])
def test_prompts_in_pieces_over_every_type_of_cache(name: str, type: str, tmp_path: Path, device: Device) -> None:
    path = tiny_in_whole_units(name, tmp_path / "model.gguf")
    plain = NumpyTwin(path, n_ctx=N_CTX).logits(TOKENS)
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", ubatch=8, progress=False, cache_type_k=type, cache_type_v=type) as engine:
        got = by_pieces(engine)
        if type == "f16" or not engine.model.architecture.attends:
            assert nmse(got, plain) <= FLOAT_NMSE
            return
    want = NumpyTwin(path, n_ctx=N_CTX, cache=CacheTypes(type.upper(), type.upper())).logits(TOKENS)
    # A value on the edge between two levels may go to the other: a small share of what rounding to the levels changes at all.
    assert nmse(got, want) <= 0.2 * nmse(plain, want)


@pytest.mark.vulkan
@pytest.mark.exhaustive
@pytest.mark.parametrize("act", ["q8_1", "f32"])
@pytest.mark.parametrize("name", TINY)
def test_barrier_free_stages_change_no_bit(
    name: str, act: Any, tmp_path: Path, device: Device, barrier_free: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the quick run those of tests/models/test_architectures.py, whose heads are odd, go through it."""
    path = tiny_in_whole_units(name, tmp_path / "model.gguf")

    def decoded() -> tuple[np.ndarray, int]:
        with Engine.load(path, device, n_ctx=N_CTX, act=act, progress=False) as engine:
            free = len(engine.schedule().barrier_free)
            logits = np.stack([engine.decode_logits(t) for t in TOKENS[:20]])
            assert len(engine.schedule().barrier_free) == free, "the check of the first run found another result"
            return logits, free

    found, free = decoded()
    assert free > 0
    monkeypatch.undo()  # barriers, as the tables of this device choose
    want, free = decoded()
    assert free == 0
    assert np.array_equal(found.view(np.uint32), want.view(np.uint32))


def matrices(model: Model) -> list[str]:
    """Of the file's tensors those that an adapter can stand beside: whole matrices that multiply activations, and the embedding table."""
    f = GgufFile.open(model.file.path)
    nodes = model.graph(1, 1, head="all").nodes
    used = {node.inputs[0].name for node in nodes if node.op == "MUL_MAT"}
    made = {part: weight for weight, parts in model.file.joined.items() for part in parts}
    held = {t.name for name, t in model.file.tensors.items() if made.get(name, name) in used}
    return [name for name, t in f.tensors.items() if name in held and len(t.shape) == 2 and f.is_whole(name)]


def adapter(path: Path, out: Path, names: Sequence[str], rank: int = 3) -> Given:
    """Of some matrices of a model's file; its values change logits by about as much as they are."""
    f, rng = GgufFile.open(path), np.random.default_rng(5)
    values: dict[str, Any] = {}
    for name in names:
        m, k = f.tensor(name).shape
        values |= {f"{name}.lora_a": 0.1 * rng.standard_normal((rank, k)), f"{name}.lora_b": 0.1 * rng.standard_normal((m, rank))}
    write_adapter(out, f.arch, "test", 2.0 * rank, {key: v.astype(np.float32) for key, v in values.items()})
    return Given(out, 0.5)


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ALL)
def test_adapters(name: str, tmp_path: Path, device: Device) -> None:
    """Of every matrix that a layer multiplies by: beside the weights as merged into them, by the twin and on the device."""
    path = tmp_path / "model.gguf"
    synthesize(f"{name}-Q8_0", path)
    plain = Model.open(path)
    names = [found for found in matrices(plain) if found.startswith("blk.")]
    layers = {found.split(".")[1] for found in names}
    assert layers == {str(il) for il in range(plain.hp.n_layer) if any(t.startswith(f"blk.{il}.") for t in plain.file.tensors)}
    files = [adapter(path, tmp_path / "adapter.gguf", names)]
    want = NumpyTwin(with_adapters(plain, files), n_ctx=N_CTX).logits(TOKENS)
    merge(path, files, tmp_path / "sum.gguf", type="F32")
    assert nmse(want, NumpyTwin(tmp_path / "sum.gguf", n_ctx=N_CTX).logits(TOKENS)) <= FLOAT_NMSE
    assert nmse(want, NumpyTwin(path, n_ctx=N_CTX).logits(TOKENS)) > 1e-3
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", ubatch=8, lora=files, progress=False) as engine:
        assert nmse(by_pieces(engine), want) <= FLOAT_NMSE
