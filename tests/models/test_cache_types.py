"""KV caches of other types than F16: models with them against the twin with the same rounding, their states, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.device.spirv import inspect
from vkback.engine.engine import Engine, EngineError
from vkback.errors import ModelError
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.harness.runner import run_case
from vkback.models import Model
from vkback.models.builder import CacheTypes
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary

TOKENS = np.random.default_rng(5).integers(0, 300, 40).tolist()
N_CTX = 96


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("shape", "k", "v"),
    [
        ("tiny-llama", "q8_0", "q4_0"),
        ("tiny-deepseek2", "q4_0", "q4_0"),
        ("tiny-llama", "f32", "f16"),
        ("tiny-deepseek2", "f32", "f32"),
        ("tiny-gemma4-ple", "f32", "f16"),
        ("tiny-llama4", "f16", "f32"),
    ],
)
def test_logits_and_states(shape: str, k: str, v: str, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "model.gguf"
    synthesize(f"{shape}-Q8_0", path)
    types = CacheTypes(k.upper(), v.upper()), CacheTypes()
    twins = [NumpyTwin(path, n_ctx=N_CTX, cache=cache).forward(TOKENS)["result_output"] for cache in types]
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", progress=False, cache_type_k=k, cache_type_v=v) as engine:
        got = [engine.prompt_logits(TOKENS[:32]), *(engine.decode_logits(t)[None] for t in TOKENS[32:36])]
        snapshot = engine.snapshot()
        rest = [engine.decode_logits(t)[None] for t in TOKENS[36:]]
        # A value on the edge between two levels may go to the other: a small share of what rounding to the levels changes at all.
        assert nmse(np.concatenate([*got, *rest]), twins[0]) <= 0.2 * nmse(twins[1], twins[0])
        engine.reset()
        engine.prompt(TOKENS[::-1])
        engine.restore(snapshot)
        again = [engine.decode_logits(t)[None] for t in TOKENS[36:]]
        assert np.array_equal(np.concatenate(again).view(np.uint32), np.concatenate(rest).view(np.uint32))
        text = list(engine.generate(TOKENS[0], 12, stop_at_eos=False))
        engine.restore(snapshot)
        for token in TOKENS[36:]:
            engine.decode_logits(token)
        assert list(engine.generate(TOKENS[0], 12, stop_at_eos=False)) == text
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", progress=False) as engine, pytest.raises(EngineError, match="type of cache"):
        engine.restore(snapshot)


@pytest.mark.vulkan
def test_what_is_refused(tmp_path: Path, device: Device) -> None:
    with pytest.raises(ModelError, match=r"cache_type_v is 'q5_1' \(str\), expected one of f16, "):
        Engine.load(builtin_model("demo-dense"), device, cache_type_v="q5_1")
    synthesize("tiny-qwen3-Q8_0", tmp_path / "odd.gguf")
    with pytest.raises(EngineError, match=r"odd\.gguf: heads of 40 values are no multiple of 32, which a q8_0 cache needs; use f16"):
        Engine.load(tmp_path / "odd.gguf", device, cache_type_k="q8_0")


@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "amd_rx_7900_xtx_radv", "broadcom_v3d_7_1_pi5"])
def test_a_quantized_cache_takes_its_share_of_memory(profile: str, models: Callable[[str], Model]) -> None:
    opened, ctx = models("demo-dense"), planned_for(profile)
    sizes = {}
    for kind in ("F16", "Q8_0", "Q4_0"):
        for n in (1, 64):
            schedule = plan(opened.graph(n, 256, head="last", cache=CacheTypes(kind, kind)), ctx)
            reads = {a.tensor.type for d in schedule.dispatches() if d.op in ("FLASH_ATTN_EXT", "ATTN_DECODE") for a in d.args[:4]}
            assert kind in reads and {"F16", "Q8_0", "Q4_0"} & reads == {kind}, "attention reads the cache as it is"
            sizes[kind] = sum(t.elements for t in schedule.tensors().values() if t.kind == "state" and t.type == kind)
    assert len(set(sizes.values())) == 1


@pytest.mark.vulkan
def test_a_token_stores_scales_without_16_bit_storage(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Three units a row: two rows, and two heads, have their scales in one word."""
    bare = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, storage_16bit=False))
    op = OPS["ATTN_DECODE"]
    case = next(c for c in op.cases() if c.params.get("type_k") == "q8_0" and c.params["hd"] == 96)
    (dispatch,) = op.lower(case.build().node, bare)
    assert inspect(library.spirv(dispatch.kernel)).missing(bare.caps) == []
    outcome = run_case(device, library, case, bare)
    assert outcome.ok, outcome.text
