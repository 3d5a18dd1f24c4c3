"""Softmax and sums of rows."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_paths import with_params, without_subgroups

from vkback.device import Device
from vkback.evaluate.judge import judge
from vkback.harness.cases import find_case
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

WIDE = (
    "SOFT_MAX(type=f32,ne=[100000,2,1,1],mask=0)",
    "SOFT_MAX(type=f32,ne=[100000,2,1,1],mask=1,scale=5.000000)",
    "SOFT_MAX(type=f32,ne=[300000,1,1,1],mask=1,sinks=1,scale=0.010000)",
    "CROSS_ENTROPY_LOSS_BACK(type=f32,ne=[100000,3,1,1])",
)
"""Rows so wide that the roundings of a sum are more than those of its terms."""

CASES = [c for name in ("SOFT_MAX", "SUM_ROWS") for c in OPS[name].cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("subgroups", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_workgroups_of_several_subgroups(case: Case, subgroups: bool, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    wide = with_params(ctx, wg_size=64)
    outcome = run_case(device, library, case, wide if subgroups else without_subgroups(wide))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("line", WIDE)
@pytest.mark.parametrize("wg_size", [32, 256])
def test_wide_rows_are_within_their_bound(line: str, wg_size: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, find_case(line), with_params(ctx, wg_size=wg_size))
    assert outcome.ok, outcome.text


def test_the_bound_knows_the_spread(ctx: LowerContext) -> None:
    """Values far below the largest may be off by more of themselves, and a row that one value holds has a small rms: a fault of 1e-3 of one
    value in 40 is beyond the bound of either."""
    op = OPS["SOFT_MAX"]
    for scale in (0.01, 0.5, 5.0):
        problem = find_case(f"SOFT_MAX(type=f32,ne=[4096,4,1,1],mask=0,scale={scale:f})").build()
        inputs = [problem.values[t.name] for t in problem.node.inputs]
        (want,) = op.reference(inputs, problem.node.params)
        tolerance = op.tolerance_at(inputs, problem.node, ctx)
        assert 1e-14 < tolerance.nmse < 1e-8
        assert judge(want.astype(np.float32), want, tolerance).ok
        wrong = want.copy()
        wrong[want == want.max()] *= 1.001
        assert not judge(wrong, want, tolerance).ok
        wrong = np.where(np.arange(want.size).reshape(want.shape) % 40 == 0, 0.999 * want, want)
        assert not judge(wrong, want, tolerance).ok
    wide, narrow = (op.tolerance(find_case(f"SOFT_MAX(type=f32,ne=[{n},1,1,1])").build().node, ctx) for n in (1000000, 100))
    assert wide.nmse > narrow.nmse
