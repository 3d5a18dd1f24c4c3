"""Products of few tokens by cooperative matrices with weights decoded in registers: packing in unit order, products of every type."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chain_kit import nmse, run_chain
from device_kit import upload_weight
from kernel_paths import planned_for
from shapes import product

import vkback
from vkback import quants
from vkback.device import Device
from vkback.device.capabilities import MatrixShape
from vkback.graph import Node, Tensor
from vkback.harness import runner
from vkback.ops.codebooks import decoder
from vkback.ops.cooperative_matrix import matrix_shapes, row_lanes
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm_reg
from vkback.ops.matmul.choice import F16_TOLERANCE
from vkback.ops.matmul.gemm_problem import Gemm, GemmShape
from vkback.ops.matmul.linear_cases import mul_mat_case, mul_mat_id_case
from vkback.ops.matmul.linear_node import QUANTS, weight
from vkback.ops.matmul.linear_rope import stored_by_products
from vkback.ops.op import OPS
from vkback.ops.storage import shards, weight_push
from vkback.plan.weight_layout import stored_type
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

INF, NAN = float("inf"), float("nan")
H200 = planned_for("nvidia_h200_linux")
SHAPES = tuple(MatrixShape(16, n, 16, "f16", "f16", "f32", "f32", False, "subgroup") for n in (8, 16))
WITH_MATRICES = dataclasses.replace(H200, caps=dataclasses.replace(H200.caps, cooperative_matrix_shapes=SHAPES))
CUT: dict[str, Any] = {"kernel": "coop_reg", "tile_m": 16, "tile_n": 8, "warp_m": 8, "slice_k": 2}
"""A cut that a CPU driver compiles in seconds."""


@pytest.fixture(scope="module")
def kernels() -> ShaderLibrary:
    return ShaderLibrary()


def by_registers(ctx: LowerContext, device: Device) -> LowerContext:
    if not matrix_shapes(device.caps):
        pytest.skip(f"{device.caps.name} has no cooperative matrices")
    return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"gemm": CUT}, "coop_reg"))


def unit_place(column: int, k: int, stride: int, shape: GemmShape, lanes: int) -> int:
    """The place of a value, as shaders/gemm/units.glsl describes it: block, lane and element of a matrix."""
    _, columns, depth = shape.matrix
    t = shape.row_lanes
    groups, each = lanes // t, depth // t
    unit, value = divmod(k, 32)
    own = columns // groups
    if stride // (4 * own * lanes) % 2 == 0:  # an even number of blocks
        block, unit = unit // (2 * t) * 2 + unit % 2, unit // 2 % t
    else:
        block, unit = divmod(unit, t)
    matrix, element = divmod(value, each)
    number = (matrix * own + column % columns // groups) * each + element
    lane = column % groups * t + unit
    word = (column // columns) * stride + (block * 4 * own + number // 8) * lanes + lane
    return 8 * word + number % 8


def test_every_value_has_a_place_of_its_own() -> None:
    """All places of a packed tensor are used, each once, for NVIDIA's order of rows and llvmpipe's."""
    for k in (300, 500):  # an odd number of blocks, or an even one
        for matrix, t, lanes in (((16, 16, 16), 4, 32), ((16, 8, 16), 4, 32), ((8, 8, 8), 8, 8)):
            shape = GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=matrix, row_lanes=t)
            caps = dataclasses.replace(H200.caps, subgroup_size=lanes)
            tensor = gemm_reg.packed_units("x", 5, k, shape)
            stride = gemm_reg.units_stride(k, shape, caps)
            columns, padded = tensor.shape
            places = {unit_place(c, i, stride, shape, lanes) for c in range(columns) for i in range(padded)}
            assert places == set(range(prod(tensor.shape))), (matrix, k)


def test_a_lane_finds_x_of_the_units_that_it_decodes() -> None:
    """Of aligned rows in NVIDIA's order: lane t of block 2 s + u of a column decodes unit 8 s + 2 t + u, and the words of that block and
    lane are that unit's 32 values of x."""
    k, t, lanes = 1024, 4, 32
    for columns in (8, 16):
        shape = GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=(16, columns, 16), row_lanes=t)
        stride = gemm_reg.units_stride(k, shape, dataclasses.replace(H200.caps, subgroup_size=lanes))
        own = columns * t // lanes
        for column in range(columns):
            for unit in range(k // 32):
                words = {unit_place(column, 32 * unit + v, stride, shape, lanes) // 8 for v in range(32)}
                assert {word // lanes // (4 * own) for word in words} == {unit // 8 * 2 + unit % 2}
                assert {word % lanes for word in words} == {column % (lanes // t) * t + unit // 2 % t}


ALIGNED_UNITS = """#version 450
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = 4) in;
#define PATH_INT 0
#define UNITS_ALIGNED 1
#include "quant/weights.glsl"
layout(push_constant) uniform Push { Weights w; } p;
#include "quant/place.glsl"
#include QUANT_FILE
layout(std430, set = 0, binding = 1) writeonly buffer Y { vec4 y4[]; };

void main() {
    const uint row = gl_WorkGroupID.x, step = gl_WorkGroupID.y, lane = gl_LocalInvocationID.x;
#ifdef UNIT_TABLE
    unit_table(lane, 4);
    barrier();
#endif
    UnitRaw raw[2];
    [[unroll]] for (uint u = 0; u < 2; u++) raw[u] = unit_load(Place(row, 8u * step + 2u * lane, 0u, u));
#if UNIT_HEADS
    raw[1].head = raw[0].head;
    [[unroll]] for (uint u = 0; u < 2; u++) raw[u].sub = 2u * lane + u;
#endif
    [[unroll]] for (uint u = 0; u < 2; u++) {
        vec4 w[8];
        unit_decode(raw[u], w);
        [[unroll]] for (uint i = 0; i < 8; i++) y4[(row * p.w.units + 8u * step + 2u * lane + u) * 8u + i] = w[i];
    }
}
"""
"""What a lane of NVIDIA's order loads in a step of aligned rows, in a kernel that needs no matrices."""


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", [name for name in quants.WEIGHT_TYPES if gemm_reg.lane_units(name, 4) == 2])
def test_two_neighbouring_units_of_a_lane(quant: str, tmp_path: Path) -> None:
    """Every unit of aligned rows is decoded as its blocks say, the second of a pair from the place and the head of the first."""
    rows, k = 5, 768
    (tmp_path / "aligned.comp").write_text(ALIGNED_UNITS)
    with vkback.Device() as dev:
        raw = quants.random_blocks(quant, rows, k, np.random.default_rng(8))
        stored = Tensor("w", quant, (rows, k), "weight")
        w, y = upload_weight(dev, stored, raw), dev.empty((rows, k))
        (shard,) = shards(stored, dev.caps)
        kernel = dev.compile(tmp_path / "aligned.comp", decoder(quant, dev.caps, stored_type(quant, k, dev.caps) != quant))
        kernel(w, y, push=weight_push(quant, shard.layout, k), groups=(rows, k // 256, 1))
        np.testing.assert_allclose(y.numpy(), quants.decode(quant, raw), rtol=1e-6, atol=1e-7)


@pytest.mark.vulkan
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("k", "factor"), [(256, 1.0), (300, 1.0), (300, 0.25), (500, 1.0)])
def test_packing(k: int, factor: float, norm: bool, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Runs everywhere: packing itself needs no matrices. The order is that of matrices of 8x8x8 on a CPU driver, of 16x16x16 elsewhere."""
    caps, n = device.caps, 5
    matrix, t = ((8, 8, 8), 8) if caps.subgroup_size == 8 else ((16, 16, 16), 4)
    shape = GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=matrix, row_lanes=t)
    rng = np.random.default_rng(5)
    values = rng.standard_normal((n, k)).astype(np.float32)
    scale = rng.uniform(0.5, 2, k).astype(np.float32)
    x, w = Tensor("x", "F32", (n, k), "input"), Tensor("w", "F32", (k,), "input")
    y = gemm_reg.packed_units("y", n, k, shape)
    d = gemm_reg.pack_units(x, y, n, shape, caps, norm=w if norm else None, eps=1e-5 if norm else None, scale=factor)
    chosen = {"x": values} | ({"w": scale} if norm else {})
    got = run_chain(device, kernels, ctx, [d], chosen, (x, w) if norm else (x,), (y,))["y"].reshape(-1)
    want = values.astype(np.float64)
    if norm:
        want = want / np.sqrt(np.square(want).mean(-1, keepdims=True) + 1e-5) * scale
    full = np.zeros((n, y.shape[1]))
    full[:, :k] = factor * want
    full = full.reshape(n, -1, 4)[..., [0, 2, 1, 3]].reshape(n, -1)  # K order
    stride = gemm_reg.units_stride(k, shape, caps)
    places = np.array([[unit_place(c, i, stride, shape, caps.subgroup_size) for i in range(y.shape[1])] for c in range(n)])
    np.testing.assert_allclose(got[places], full, rtol=1e-3, atol=1e-4)  # f16: 2^-11 of a value


@pytest.mark.vulkan
@pytest.mark.parametrize(("n_used", "k"), [(1, 64), (4, 2880), (8, 300)])
def test_packing_of_a_sum_of_experts(n_used: int, k: int, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """The sum with its residual, as MOE_REDUCE makes it, and that normed and packed; rows of one round of threads and of several."""
    caps, n = device.caps, 3
    matrix, t = ((8, 8, 8), 8) if caps.subgroup_size == 8 else ((16, 16, 16), 4)
    shape = GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=matrix, row_lanes=t)
    rng = np.random.default_rng(7)
    shapes = {"slots": (n, n_used, k), "weights": (n, n_used), "residual": (n, k), "norm": (k,)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    slots, weights, residual, norm = inputs = tuple(Tensor(name, "F32", shape, "input") for name, shape in shapes.items())
    sums, y = Tensor("sums", "F32", (n, k)), gemm_reg.packed_units("y", n, k, shape)
    d = gemm_reg.pack_units(slots, y, n, shape, caps, norm=norm, eps=1e-5, scale=0.5, experts=gemm_reg.ExpertSum(weights, residual, sums))
    got = run_chain(device, kernels, ctx, [d], values, inputs, (sums, y))
    want = (values["slots"].astype(np.float64) * values["weights"][..., None]).sum(1) + values["residual"]
    np.testing.assert_allclose(got["sums"], want, rtol=1e-5, atol=1e-5)  # an f32 sum of at most nine terms
    full = np.zeros((n, y.shape[1]))
    full[:, :k] = 0.5 * want / np.sqrt(np.square(want).mean(-1, keepdims=True) + 1e-5) * values["norm"]
    full = full.reshape(n, -1, 4)[..., [0, 2, 1, 3]].reshape(n, -1)  # K order
    stride = gemm_reg.units_stride(k, shape, caps)
    places = np.array([[unit_place(c, i, stride, shape, caps.subgroup_size) for i in range(y.shape[1])] for c in range(n)])
    np.testing.assert_allclose(got["y"].reshape(-1)[places], full, rtol=1e-3, atol=1e-4)  # f16: 2^-11 of a value
    with pytest.raises(PlanError, match=r"\[gemm\] y: sums of slots"):
        gemm_reg.pack_units(slots, y, n, shape, caps, experts=gemm_reg.ExpertSum(weights, residual, sums))


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("value", "scale", "word"),
    [
        (65504.0, 1.0, None),
        (65505.0, 1.0, 65505.0),
        (-1e5, 1.0, 1e5),
        (-1e5, 0.25, None),
        (1e6, 0.25, 2.5e5),
        (-INF, 1.0, INF),
        (NAN, 0.5, NAN),
    ],
)
def test_packing_tells_what_f16_cannot_hold(
    value: float,
    scale: float,
    word: float | None,
    device: Device,
    kernels: ShaderLibrary,
    ctx: LowerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One value among others of 1, on every device."""
    caps, n, k = device.caps, 3, 300
    matrix, t = ((8, 8, 8), 8) if caps.subgroup_size == 8 else ((16, 16, 16), 4)
    shape = GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=matrix, row_lanes=t)
    values = np.random.default_rng(6).uniform(-1, 1, (n, k)).astype(np.float32)
    values[2, 299] = value
    seen: dict[str, float] = {}
    own = runner.overflowed

    def noted(prepared: Any, after: Any) -> dict[str, float]:
        seen.update(own(prepared, after))
        return {}

    monkeypatch.setattr(runner, "overflowed", noted)
    x, y = Tensor("x", "F32", (n, k), "input"), gemm_reg.packed_units("y", n, k, shape)
    got = run_chain(device, kernels, ctx, [gemm_reg.pack_units(x, y, n, shape, caps, scale=scale)], {"x": values}, (x,), (y,))["y"]
    stride = gemm_reg.units_stride(k, shape, caps)
    at = unit_place(1, 0, stride, shape, caps.subgroup_size)
    assert got.reshape(-1)[at] == pytest.approx(scale * values[1, 0], rel=1e-3)
    np.testing.assert_equal(seen, {} if word is None else {"y.overflow": np.float32(word)})


@pytest.mark.vulkan
@pytest.mark.parametrize("amax", [1e5, 1e6])
def test_activations_beyond_f16(
    amax: float, device: Device, kernels: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are scaled, and the products are those of other activations; were the overflow word not looked at, they would be wrong."""
    use = by_registers(ctx, device)
    problem = mul_mat_case("Q4_K", 45, 5, 256, amax=amax).build()
    assert "gemm/coop_reg.comp" in {d.kernel.source for d in OPS[problem.node.op].lower(problem.node, use)}
    y, want = problem.node.outputs[0].name, runner.reference(problem)
    found = nmse(runner.run_problem(device, kernels, problem, use)[y], want[y])
    assert 1e-9 < found <= F16_TOLERANCE.nmse, "f16 has a part in it"
    monkeypatch.setattr(runner, "overflowed", lambda prepared, after: {})
    assert nmse(runner.run_problem(device, kernels, problem, use)[y], want[y]) > 10 * F16_TOLERANCE.nmse


def run_product(
    device: Device,
    kernels: ShaderLibrary,
    ctx: LowerContext,
    quant: str,
    m: int,
    n: int,
    k: int,
    cut: tuple[int, int, int, int] = (16, 8, 8, 2),
    **more: Any,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """What the kernel makes of a random product and what numpy does. cut: tile_m, tile_n, warp_m, slice_k; more: glu, bias, residual,
    x_shared."""
    rng = np.random.default_rng(m + n)
    shape = gemm_reg.shape_of(*cut, row_lanes(ctx), device.caps, x_shared=more.get("x_shared", False))
    assert shape is not None
    w, x = weight("w", quant, (m, k)), Tensor("x", "F32", (n, k), "input")
    y = Tensor("y", "F32", (n, m // 2 if more.get("glu") else m))
    values: dict[str, Any] = {"w": quants.random_blocks(quant, m, k, rng, std=0.5), "x": rng.uniform(-1, 1, (n, k)).astype(np.float32)}
    bias, residual = Tensor("bias", "F32", (m,), "input"), Tensor("residual", "F32", (n, y.shape[1]), "input")
    inputs = [w, x]
    for tensor in (bias, residual):
        if more.get(tensor.name):
            values[tensor.name] = rng.uniform(-2, 2, tensor.shape).astype(np.float32)
            inputs.append(tensor)
    packed = gemm_reg.packed_units("x16", n, k, shape)
    problem = Gemm(
        w,
        packed,
        y,
        n,
        glu=more.get("glu", ""),
        bias=bias if more.get("bias") else None,
        residual=residual if more.get("residual") else None,
    )
    chain = [gemm_reg.pack_units(x, packed, n, shape, device.caps), *gemm_reg.lower(problem, shape, device.caps)]
    got = run_chain(device, kernels, ctx, chain, values, tuple(inputs), (y,))["y"]
    want = values["x"].astype(np.float64) @ quants.decode(quant, values["w"]).reshape(m, -1)[:, :k].astype(np.float64).T
    want = want + values.get("bias", 0.0)
    if more.get("glu"):
        want = want[:, 0::2] / (1 + np.exp(-want[:, 0::2])) * want[:, 1::2]
    return got, np.asarray(want + values.get("residual", 0.0))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", QUANTS)
def test_product(quant: str, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Odd rows, columns that leave a tile part empty, rows of K that leave a block part empty."""
    use = by_registers(ctx, device)
    for m, n, k in ((37, 5, 768), (16, 8, 256)):
        assert nmse(*run_product(device, kernels, use, quant, m, n, k)) <= F16_TOLERANCE.nmse, (m, n, k)


@pytest.mark.vulkan
def test_slices_that_are_no_power_of_two(device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Twelve subgroups share rows of few steps, so that most have none, and rows of 24 or more."""
    use = by_registers(ctx, device)
    for k in (288, 6144):
        assert nmse(*run_product(device, kernels, use, "Q8_0", 24, 4, k, (16, 8, 8, 12))) <= F16_TOLERANCE.nmse, k


@pytest.mark.vulkan
@pytest.mark.parametrize("more", [{"glu": "silu"}, {"bias": True, "residual": True}, {"residual": True}], ids=str)
def test_epilogue(more: dict[str, Any], device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    use = by_registers(ctx, device)
    assert nmse(*run_product(device, kernels, use, "Q4_K", 50, 3, 512, **more)) <= 4 * F16_TOLERANCE.nmse  # GLU multiplies two such sums


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("cut", "k", "more"),
    [
        ((16, 16, 8, 1), 768, {"glu": "silu"}),
        ((16, 16, 8, 2), 480, {"bias": True, "residual": True}),  # the last block has zeros
        ((16, 16, 16, 3), 1024, {"residual": True}),  # slices with other numbers of steps, two matrices of rows a subgroup
        ((48, 32, 8, 2), 512, {}),  # stored in several passes
    ],
    ids=str,
)
def test_x_through_shared_memory(
    cut: tuple[int, int, int, int], k: int, more: dict[str, Any], device: Device, kernels: ShaderLibrary, ctx: LowerContext
) -> None:
    """Odd rows and columns; the same bits as with x in registers, where the slices are the same."""
    use = by_registers(ctx, device)
    quant = "Q8_0" if k % 256 else "Q4_K"
    got, want = run_product(device, kernels, use, quant, 74, 19, k, cut, x_shared=True, **more)
    assert nmse(got, want) <= 4 * F16_TOLERANCE.nmse
    np.testing.assert_array_equal(got, run_product(device, kernels, use, quant, 74, 19, k, cut, **more)[0])


@pytest.mark.vulkan
def test_gate_and_up_store_what_down_reads(device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    use = by_registers(ctx, device)
    shape = gemm_reg.shape_of(16, 8, 8, 2, row_lanes(use), device.caps)
    assert shape is not None
    n, k, middle, m, rng = 5, 256, 256, 40, np.random.default_rng(7)
    gate_up, down = weight("gate_up", "Q4_K", (2 * middle, k)), weight("down", "Q4_K", (m, middle))
    assert gemm_reg.stores_units(gate_up, True, shape, device.caps)
    assert not gemm_reg.stores_units(weight("w", "Q4_K", (2 * middle + 64, k)), True, shape, device.caps)  # no whole blocks
    x, y = Tensor("x", "F32", (n, k), "input"), Tensor("y", "F32", (n, m))
    x16, act = gemm_reg.packed_units("x16", n, k, shape), gemm_reg.packed_units("act", n, middle, shape)
    chain = [
        gemm_reg.pack_units(x, x16, n, shape, device.caps),
        *gemm_reg.lower(Gemm(gate_up, x16, act, n, glu="silu"), shape, device.caps),
        *gemm_reg.lower(Gemm(down, act, y, n), shape, device.caps),
    ]
    values: dict[str, Any] = {w.name: quants.random_blocks("Q4_K", w.shape[0], w.shape[1], rng, std=0.3) for w in (gate_up, down)}
    values["x"] = rng.uniform(-1, 1, (n, k)).astype(np.float32)
    got = run_chain(device, kernels, use, chain, values, (gate_up, down, x), (y,))["y"]
    w1, w2 = (quants.decode("Q4_K", values[w.name]).reshape(w.shape).astype(np.float64) for w in (gate_up, down))
    both = values["x"].astype(np.float64) @ w1.T
    want = (both[:, 0::2] / (1 + np.exp(-both[:, 0::2])) * both[:, 1::2]) @ w2.T
    assert nmse(got, want) <= 4 * F16_TOLERANCE.nmse  # two products one after the other, a GLU between


HEADS = OPS["LINEAR_ROPE_SET_ROWS"]


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "more",
    [
        {"split": True, "bias": True, "n_dims": 16},
        {"ext_factor": 1.0, "freq_scale": 1 / 32},
        {"n_dims": -1},
        {"mode": "neox"},
        {"mode": "neox", "split": True, "bias": True, "n_dims": 16},
    ],
    ids=str,
)
def test_heads_have_the_bits_of_the_stage(more: dict[str, Any], device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Turned by the angles of ROPE_ANGLES, against products whose heads QKV_ROPE_SET_ROWS turns and stores."""
    use = by_registers(ctx, device)
    problem = HEADS.build_case("F16", 5, 4, 2, 32, 64, **more).build()
    node, store = problem.node, problem.node.params["store"]
    nodes = [node]
    if store.params["n_dims"]:
        angles = dataclasses.replace(node.inputs[-1], name="made", kind="node")
        nodes = [Node("ROPE_ANGLES", (store.inputs[1],), (angles,), store.params)]
        nodes.append(dataclasses.replace(node, inputs=(*node.inputs[:-1], angles)))
    assert "rope/rope.comp" not in {d.kernel.source for n in nodes for d in OPS[n.op].lower(n, use)}
    with runner.Workbench(device, kernels) as bench:
        found, want = (bench.run(runner.prepare(problem, use, chain)) for chain in (nodes, HEADS.unfused(node)))
    for name, values in want.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), values.view(np.uint32), err_msg=name)


@pytest.mark.vulkan
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("quant", QUANTS)
def test_experts_of_every_type(quant: str, shared: bool, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """More slots of an expert than columns of a tile, experts without any; rows that fill no tile."""
    use = by_registers(ctx, device)
    problem = mul_mat_id_case(quant, 6, 2, 45, 23, 512, shared=shared).build()
    assert "gemm/coop_reg_experts.comp" in {d.kernel.source for d in OPS[problem.node.op].lower(problem.node, use)}
    y, want = problem.node.outputs[0].name, runner.reference(problem)
    assert nmse(runner.run_problem(device, kernels, problem, use)[y], want[y]) <= F16_TOLERANCE.nmse


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", ["Q4_K", "MXFP4", "Q6_K"])
def test_bits_of_a_slot_do_not_depend_on_others(quant: str, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """A token alone with its experts, among others that choose the same, and among others that choose others: the same bits."""
    use = by_registers(ctx, device)
    case = mul_mat_id_case(quant, 6, 2, 48, 13, 512, shared=True)
    problem = case.build()
    y, (x, ids) = problem.node.outputs[0].name, (problem.values[name].copy() for name in ("x", "ids"))
    ids[3] = 1, 4
    rows = []
    for others in ((1, 4), (4, 1), (0, 5), (2, 1)):
        ids[:3], ids[4:] = others, others
        x[:3] = np.random.default_rng(sum(others)).uniform(-1, 1, x[:3].shape)
        values = {**problem.values, "x": x.copy(), "ids": ids.copy()}
        rows.append(runner.run_problem(device, kernels, dataclasses.replace(problem, values=values), use)[y].reshape(13, 2, 48)[3])
    for row in rows[1:]:
        np.testing.assert_array_equal(row.view(np.uint32), rows[0].view(np.uint32))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", ["Q4_K", "MXFP4"])
def test_bits_do_not_depend_on_row_tiles_of_a_workgroup(quant: str, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Five tiles of rows, the last of which is not whole, in workgroups of one, two and four; more steps along K than subgroups share."""
    use = by_registers(ctx, device)
    problem = mul_mat_id_case(quant, 6, 2, 72, 7, 1280, shared=True).build()
    y, rows, groups = problem.node.outputs[0].name, [], []
    for each in (1, 2, 4):
        tuned = dataclasses.replace(use, tuning=Overrides(ctx.tuning, {"gemm": {**CUT, "tiles_each": each}}, "test"))
        products = [d for d in OPS[problem.node.op].lower(problem.node, tuned) if d.kernel.source == "gemm/coop_reg_experts.comp"]
        groups.append(products[0].groups[0])
        rows.append(runner.run_problem(device, kernels, problem, tuned)[y])
    assert groups == [groups[0], groups[0] // 5 * 3, groups[0] // 5 * 2]
    assert nmse(rows[0], runner.reference(problem)[y]) <= F16_TOLERANCE.nmse
    for other in rows[1:]:
        np.testing.assert_array_equal(other.view(np.uint32), rows[0].view(np.uint32))


def test_which_heads_products_can_turn_and_store() -> None:
    """Without a norm, into F16 caches; four rows of a thread in one head; rows in a known order."""

    def able(ctx: LowerContext = WITH_MATRICES, caches: str = "F16", head_dim: int = 64, **params: Any) -> bool:
        node = HEADS.build_case("Q4_K", 8, 4, 2, head_dim, 256, n_dims=params.pop("n_dims", 0)).build().node
        store = node.params["store"]
        inputs = tuple(dataclasses.replace(t, type=caches) if t.kind == "state" else t for t in store.inputs)
        store = dataclasses.replace(store, inputs=inputs, params={**store.params, **params})
        return stored_by_products(node.params["parts"], store, ctx)

    assert able() and able(n_dims=32) and able(head_dim=80) and able(n_dims=-1, mode="neox")
    assert able(mode="neox") and able(mode="neox", n_dims=32)
    assert not able(has_norm=True) and not able(caches="Q8_0")
    assert not able(head_dim=66) and not able(n_dims=30)
    assert not able(dataclasses.replace(WITH_MATRICES, row_lanes=0))


def test_tables_choose_it_for_few_tokens() -> None:
    """Dense products of 3 to 64 tokens on Hopper; not where the order of rows is unknown, nor with --act f32."""

    def kernels(n: int, **changes: Any) -> set[str]:
        node = product("llama-8b", "qkv", "Q4_K", n).node()
        return {d.kernel.source for d in OPS["LINEAR"].lower(node, dataclasses.replace(WITH_MATRICES, **changes))}

    for n in (3, 4, 8, 9, 16, 17, 48, 64):
        assert "gemm/coop_reg.comp" in kernels(n), n
        assert not any(k.startswith("gemm/") for k in kernels(n, row_lanes=0)), n
        assert not any(k.startswith("gemm/coop") for k in kernels(n, act="f32")), n
    assert "gemm/coop_mat.comp" in kernels(65)


def test_what_is_refused() -> None:
    shape = gemm_reg.shape_of(16, 16, 16, 16, 4, WITH_MATRICES.caps)
    assert shape is not None and shape.matrix == (16, 16, 16)
    assert gemm_reg.shape_of(16, 8, 16, 16, 4, WITH_MATRICES.caps) is not None
    assert gemm_reg.shape_of(16, 16, 16, 16, 0, WITH_MATRICES.caps) is None  # order of rows unknown
    assert gemm_reg.shape_of(1024, 16, 16, 16, 4, WITH_MATRICES.caps) is None  # too many threads
    w, x = weight("w", "Q4_K", (64, 256)), Tensor("x", "F32", (4, 256), "input")
    with pytest.raises(PlanError, match="coop_reg makes F32 of packed F16"):
        gemm_reg.lower(Gemm(w, x, Tensor("y", "F32", (4, 64)), 4), shape, WITH_MATRICES.caps)
