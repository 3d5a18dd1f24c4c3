"""Workgroup shapes of the GEMV family: whatever the tables say, the result is the same product."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import with_params, without_subgroups

from vkback.device import Device
from vkback.harness.runner import run_case, run_problem
from vkback.ops.lowering import Act, LowerContext
from vkback.ops.matmul.gemv import GemvConfig
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

SHAPES = [
    {"wg": 8, "lanes": 8, "rows": 1, "unroll": 1, "prefetch": "none", "groups": "per_tile"},
    {"wg": 8, "lanes": 1, "rows": 1, "unroll": 2, "prefetch": "weights", "groups": "per_tile"},
    {"wg": 32, "lanes": 4, "rows": 2, "unroll": 4, "prefetch": "none", "groups": 2},
    {"wg": 64, "lanes": 32, "rows": 4, "unroll": 2, "prefetch": "weights", "groups": 3},
    {"wg": 32, "lanes": 8, "rows": 2, "unroll": 1, "prefetch": "weights", "groups": "per_tile", "x_in_shared": True},
    {"wg": 64, "lanes": 64, "rows": 1, "unroll": 1, "prefetch": "none", "groups": 2, "x_in_shared": True},
    {"wg": 64, "lanes": 64, "rows": 2, "unroll": 1, "prefetch": "none", "groups": 2},
    {"wg": 16, "lanes": 4, "rows": 2, "unroll": 2, "prefetch": "weights+x", "groups": "per_tile"},
    {"wg": 16, "lanes": 2, "rows": 2, "unroll": 4, "prefetch": "weights+x", "lane_order": "blocked", "groups": 2},
    {
        "wg": 16,
        "lanes": 4,
        "rows": 1,
        "unroll": 2,
        "prefetch": "weights",
        "lane_order": "blocked",
        "groups": "per_tile",
        "x_in_shared": True,
    },
]


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("shared", [False, True], ids=["subgroup", "shared"])
def test_any_shape(shape: dict[str, int], shared: bool, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    fixed = with_params(dataclasses.replace(without_subgroups(ctx) if shared else ctx, act="q8_1"), **shape)
    for case in (
        mul_mat_case("Q4_K", 70, 1, 768),
        mul_mat_case("Q6_K", 70, 3, 768),
        fused_case("Q8_0", 192, 512, 1, (), glu=True, out="Q8_1"),
        fused_case("Q2_K", 100, 256, 2, ("ids", "expert_weights", "residual")),
    ):
        outcome = run_case(device, library, case, fixed)
        assert outcome.ok, f"{case.line}: {outcome.text}"


@pytest.mark.vulkan
def test_threads_that_are_no_power_of_two(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """As an H200 takes for 5120 rows: 128 tiles of 40."""
    fixed = with_params(dataclasses.replace(ctx, act="q8_1"), wg=160, lanes=32, rows=4, unroll=1, prefetch="weights")
    outcome = run_case(device, library, mul_mat_case("Q4_K", 70, 1, 768), fixed)
    assert outcome.ok, outcome.text


def test_a_workgroup_that_reduces_has_a_power_of_two_of_threads(ctx: LowerContext) -> None:
    fixed = with_params(dataclasses.replace(ctx, act="q8_1"), wg=160, lanes=32, rows=4, unroll=1, prefetch="none")
    for roles, threads in (((), 160), (("norm",), 128)):
        configs = [d.config for d in OPS["LINEAR"].lower(fused_case("Q4_K", 70, 768, 1, roles).build().node, fixed)]
        found = [c for c in configs if isinstance(c, GemvConfig)]
        assert [c.wg for c in found] == [threads]
        assert ("power of two" in "".join(a.why for a in found[0].adjustments)) == (threads == 128)


@pytest.mark.vulkan
@pytest.mark.parametrize("act", ["f32", "q8_1"])
def test_column_has_the_same_bits_whatever_goes_with_it(act: Act, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    fixed = with_params(
        dataclasses.replace(ctx, act=act), kernel="gemv", **SHAPES[0]
    )  # the tables may choose others for other numbers of tokens
    many = mul_mat_case("Q4_K", 33, 5, 512).build()
    together = run_problem(device, library, many, fixed)["y"]
    one = mul_mat_case("Q4_K", 33, 1, 512).build()
    for column in range(5):
        values = {"w": many.values["w"], "x": many.values["x"][column : column + 1]}
        alone = run_problem(device, library, dataclasses.replace(one, values=values), fixed)["y"]
        np.testing.assert_array_equal(alone[0], together[column])


@pytest.mark.vulkan
def test_shards_find_their_rows_of_bias_and_residual(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    small = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_storage_buffer_range=40_000))
    for roles in (("bias",), ("residual",)):
        case = fused_case("Q8_0", 192, 512, 2, roles)
        assert len(OPS["LINEAR"].lower(case.build().node, small)) > 2, "cut into shards"
        outcome = run_case(device, library, case, small)
        assert outcome.ok, f"{case.line}: {outcome.text}"
