"""Weights decoded to f16 for cooperative matrices (shaders/gemm/unit_f16.glsl), both ways, and which are too coarse for one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from device_kit import upload_weight
from kernel_paths import planned_for
from make_gguf import llama_metadata, llama_tensors, write_gguf
from prompt_kernels import KERNEL_NMSE, engine_of, skip_without

import vkback
from vkback import quants
from vkback.device import Device
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.graph import Tensor
from vkback.harness import runner
from vkback.ops.codebooks import decoder
from vkback.ops.matmul.choice import choose
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.ops.matmul.linear_cases import mul_mat_case
from vkback.ops.matmul.linear_node import LinearNode
from vkback.ops.storage import shards, weight_push
from vkback.plan.passes.linear import as_linear
from vkback.plan.weight_layout import stored_type

WITH_STEPS = [name for name in quants.WEIGHT_TYPES if quants.quant(name).step_factor]
CASES = [(name, False) for name in quants.WEIGHT_TYPES] + [(name, True) for name in WITH_STEPS]

UNITS_TO_F16 = """#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
layout(local_size_x = 8) in;
#define PATH_INT 0
#define DECODES_F16
#include "quant/weights.glsl"
layout(push_constant) uniform Push { Weights w; } p;
#include "quant/place.glsl"
#include QUANT_FILE
#include "gemm/pack.glsl"
#include "gemm/unit_f16.glsl"
layout(std430, set = 0, binding = 1) writeonly buffer Y { uvec4 y4[]; };

void main() {
    const uint row = gl_WorkGroupID.x, unit = gl_WorkGroupID.y * 8u + gl_LocalInvocationID.x, at = (row * p.w.units + unit) * 4u;
#ifdef UNIT_TABLE
    unit_table(gl_LocalInvocationID.x, 8);
    barrier();
#endif
    if (unit >= p.w.units) return;
    uvec4 words[4];
    unit_f16(unit_load(place(row, unit)), row != 0u, words);
    [[unroll]] for (uint i = 0; i < 4; i++) y4[at + i] = words[i];
}
"""
"""The decoder in a kernel that needs no matrices. Of row 0 it makes zeros."""


@pytest.mark.vulkan
@pytest.mark.parametrize(("quant", "subnormals"), CASES)
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_units_become_f16(quant: str, subnormals: bool, std: float, tmp_path: Path) -> None:
    """Weights of a model's size, and larger ones. Scale and bias are rounded to f16, then the sum, and on llvmpipe, which has no fma of
    f16, the product: four errors of 2^-24 / 3 of the energy each, 8e-8 if all were of the size of the weights. A block with an offset has
    biases and products of more than twice that size: 6 * 8e-8. Measured 3e-8 to 3.3e-7."""
    rows, k = 5, 768
    (tmp_path / "to_f16.comp").write_text(UNITS_TO_F16)
    with vkback.Device() as dev:
        if not dev.caps.fp16:
            pytest.skip(f"{dev.caps.name} has no f16 arithmetic")
        raw = quants.random_blocks(quant, rows, k, np.random.default_rng(8), std=std)
        assert not quants.coarse(quant, raw)
        stored = Tensor("w", quant, (rows, k), "weight")
        w, y = upload_weight(dev, stored, raw), dev.empty((rows, k // 2))
        (shard,) = shards(stored, dev.caps)
        defines = decoder(quant, dev.caps, stored_type(quant, k, dev.caps) != quant)
        kernel = dev.compile(tmp_path / "to_f16.comp", defines, spec={"SUBNORMALS": int(subnormals)})
        kernel(w, y, push=weight_push(quant, shard.layout, k), groups=(rows, -(-k // 256), 1))
        halves = y.numpy().view(np.float16).reshape(rows, k // 4, 4)[:, :, [0, 2, 1, 3]].reshape(rows, k)  # K order
    got = halves.astype(np.float64) * (64.0 if subnormals else 1.0)
    want = quants.decode(quant, raw).astype(np.float64)
    assert not got[0].any() and np.isfinite(got).all()
    assert nmse(got[1:], want[1:]) < 5e-7


@pytest.mark.parametrize("quant", quants.WEIGHT_TYPES)
def test_coarse_weights_are_seen(quant: str) -> None:
    """Steps grow with the weights; types without any are never coarse, and never decoded by way of subnormals."""
    found = [quants.coarse(quant, quants.random_blocks(quant, 4, 512, np.random.default_rng(1), std=std)) for std in (0.02, 0.1, 30.0)]
    assert found == [False, False, quant in WITH_STEPS]


@pytest.mark.parametrize("quant", [name for name in WITH_STEPS if name.endswith("_K") and name in ("Q2_K", "Q4_K", "Q5_K")])
def test_so_are_large_offsets(quant: str) -> None:
    raw = quants.random_blocks(quant, 1, 256, np.random.default_rng(1))
    dmin = 82 if quant == "Q2_K" else 2
    for half, coarse in ((0x43FF, False), (0x4400, True), (0xC400, True)):
        raw[0, dmin : dmin + 2].view(np.uint16)[:] = half
        assert quants.coarse(quant, raw) == coarse


def test_tables_coarse_weights_and_types_decide() -> None:
    """On the H200 few tokens take subnormals, prompts do not; coarse weights and types without steps never do."""
    ctx = planned_for("nvidia_h200_linux")
    for quant, n, expected in (("Q4_K", 4, True), ("Q6_K", 16, True), ("Q4_K", 16, True), ("Q4_K", 512, False), ("F16", 4, False)):
        (gemv,) = as_linear([mul_mat_case(quant, 64, n, 256).build().node])
        node = LinearNode.of(gemv)
        shape = choose(node, ctx).shape
        assert shape is not None and shape.subnormals == expected
        coarse = choose(node, dataclasses.replace(ctx, coarse=frozenset({node.w.name}))).shape
        assert coarse is not None and not coarse.subnormals and coarse.kernel == shape.kernel


def test_a_case_knows_its_coarse_weights() -> None:
    small, large = (mul_mat_case("Q4_K", 64, 5, 256).build() for _ in range(2))
    name = small.node.inputs[0].name
    raw = quants.random_blocks("Q4_K", 64, 256, np.random.default_rng(1), std=8.0)
    large = dataclasses.replace(large, values={**large.values, name: raw})
    assert runner.coarse_weights(small) == frozenset() and runner.coarse_weights(large) == {name}


@pytest.mark.vulkan
@pytest.mark.parametrize("kernel", ["coop_reg", "coop_mat"])
def test_a_model_with_coarse_weights(kernel: GemmKernel, tmp_path: Path, device: Device) -> None:
    """Weights of one matrix have steps of about 1: by way of subnormals they overflow. The loader tells; plans leave just them out."""
    skip_without(kernel, device.caps)
    tensors = llama_tensors(tied=False)
    for name, (_, values) in tensors.items():
        if values.ndim == 2:
            gain = {"blk.0.ffn_up.weight": 256.0, "blk.0.ffn_down.weight": 1 / 256}.get(name, 1.0)
            tensors[name] = "Q8_0", quants.encode("Q8_0", np.float32(gain) * values)
    path = write_gguf(tmp_path / "coarse.gguf", "llama", llama_metadata(context_length=96), tensors)
    ids = [int(i) for i in np.random.default_rng(4).integers(32, size=16)]
    with engine_of(path, device, kernel, n_ctx=96, ubatch=16, subnormals=True) as engine:
        assert engine.ctx.coarse == {"blk.0.ffn_gate.weight+blk.0.ffn_up.weight"} and not engine.ctx.beyond_f16
        products = [d for d in dict(engine.prompt_schedules(16))[16].dispatches() if d.kernel.source == f"gemm/{kernel}.comp"]
        by_subnormals = {d.label: dict(d.kernel.spec).get("SUBNORMALS", 0) for d in products}
        assert sorted(set(by_subnormals.values())) == [0, 1], by_subnormals
        assert nmse(engine.prompt_logits(ids), NumpyTwin(path).logits(ids)) <= KERNEL_NMSE[kernel]
