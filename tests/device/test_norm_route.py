"""Norm, router, choice of experts and route of few tokens by one dispatch (shaders/topk/norm_route.comp)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from chain_kit import run_chain
from test_gemm_reg import unit_place

from vkback.device import Device
from vkback.graph import Tensor
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul import gemm_reg
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.linear_node import weight
from vkback.ops.matmul.route import max_tiles, route_tensor
from vkback.ops.moe import norm_route
from vkback.ops.moe.topk import TopkMoe
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides


@pytest.fixture(scope="module")
def kernels() -> ShaderLibrary:
    return ShaderLibrary()


def problem_of(n: int, n_expert: int, k: int, n_used: int, gating: str, bias: bool, selects: bool, caps: Any) -> norm_route.NormRoute:
    matrix, t = ((8, 8, 8), 8) if caps.subgroup_size == 8 else ((16, 16, 16), 4)
    shape = GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=matrix, row_lanes=t)
    params = {"n_used": n_used, "norm": True, "gating": gating, "scale": 1.5}
    return norm_route.NormRoute(
        Tensor("x", "F32", (n, k), "input"),
        Tensor("norm", "F32", (k,), "weight"),
        1e-5,
        weight("w", "F32", (n_expert, k)),
        gemm_reg.packed_units("units", n, k, shape),
        shape,
        Tensor("weights", "F32", (n, n_used)),
        Tensor("ids", "I32", (n, n_used)),
        route_tensor("route", n * n_used, n_expert, 8),
        8,
        params,
        Tensor("bias", "F32", (n_expert,), "weight") if bias else None,
        Tensor("selection_bias", "F32", (n_expert,), "weight") if selects else None,
    )


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("n", "n_expert", "k", "n_used", "gating", "bias", "selects", "each"),
    [
        (1, 8, 64, 2, "softmax", False, False, 8),
        (5, 32, 2880, 4, "softmax_weight", True, False, 8),
        (3, 60, 96, 4, "softmax", False, False, 16),
        (9, 128, 256, 8, "sigmoid", True, True, 8),
    ],
)
def test_one_dispatch(
    n: int,
    n_expert: int,
    k: int,
    n_used: int,
    gating: str,
    bias: bool,
    selects: bool,
    each: int,
    device: Device,
    kernels: ShaderLibrary,
    ctx: LowerContext,
) -> None:
    """Packed rows, weights and ids as the ops of their own make them; tiles that have each slot once, with its expert."""
    p = problem_of(n, n_expert, k, n_used, gating, bias, selects, device.caps)
    ctx = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"topk_moe": {"experts_each": each}}, "one dispatch"))
    if norm_route.experts_each(p, ctx) != each:
        pytest.skip(f"{device.caps.name} binds {device.caps.max_storage_bindings} buffers, the kernel {norm_route.BINDINGS}")
    rng = np.random.default_rng(11)
    given = [t for t in (p.x, p.norm, p.router, p.bias, p.selection_bias) if t is not None]
    values = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in given}
    values["w"] = (3 / np.sqrt(k) * values["w"]).astype(np.float32)
    stored = values | {"w": values["w"].view(np.uint8).reshape(n_expert, -1)}
    d = norm_route.lower(p, each, ctx, "router")
    got = run_chain(device, kernels, ctx, [d], stored, tuple(given), (p.units, p.weights, p.ids, p.route))
    x = values["x"].astype(np.float64)
    normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * values["norm"]
    logits = normed @ values["w"].T.astype(np.float64) + (values["bias"] if bias else 0.0)
    weights, ids = TopkMoe().reference([logits, *([values["selection_bias"]] if selects else [])], p.params)
    np.testing.assert_array_equal(got["ids"].reshape(n, n_used), ids)
    np.testing.assert_allclose(got["weights"].reshape(n, n_used), weights, rtol=1e-4)  # exp of f32 logits up to 10
    places_of = gemm_reg.units_stride(k, p.shape, device.caps)
    width = p.units.shape[1]
    full = np.zeros((n, width))
    full[:, :k] = normed
    full = full.reshape(n, -1, 4)[..., [0, 2, 1, 3]].reshape(n, -1)  # K order
    places = np.array([[unit_place(c, i, places_of, p.shape, device.caps.subgroup_size) for i in range(width)] for c in range(n)])
    np.testing.assert_allclose(got["units"].reshape(-1)[places], full, rtol=1e-3, atol=1e-4)  # f16: 2^-11 of a value
    tiles = max_tiles(n * n_used, n_expert, 8)
    route = got["route"].reshape(-1)
    slots = route[4 * tiles :]
    assert sorted(slots) == list(range(n * n_used))
    seen = []
    for expert, first, count, _ in route[: 4 * tiles].reshape(-1, 4):
        assert all(ids.reshape(-1)[s] == expert for s in slots[first : first + count])
        seen += list(slots[first : first + count])
    assert sorted(seen) == list(range(n * n_used))


def test_tables_decide(ctx: LowerContext) -> None:
    """Launches of their own where no row says otherwise, and where the router's weight is no F32."""
    p = problem_of(2, 32, 2880, 4, "softmax_weight", True, False, ctx.caps)
    assert norm_route.experts_each(p, ctx) == 0
    wanted = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"topk_moe": {"experts_each": 8}}, "one dispatch"))
    other = dataclasses.replace(p, router=weight("w", "F16", (32, 2880)))
    assert norm_route.experts_each(other, wanted) == 0
