"""The weighted sum of a token's experts."""

from __future__ import annotations

import pytest
from kernel_paths import with_params

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.moe.reduce import MoeReduce
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
@pytest.mark.parametrize("case", list(MoeReduce().cases()), ids=lambda c: c.line)
@pytest.mark.parametrize("wg_size", [8, 128])
def test_case(case: Case, wg_size: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size))
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("m", "width"), [(2048, 4), (30, 1)])
def test_four_at_a_time_where_rows_allow(m: int, width: int, ctx: LowerContext) -> None:
    (d,) = MoeReduce().lower(MoeReduce().build_case(1, 4, m, False, 1).build().node, ctx)
    assert dict(d.kernel.defines)["WIDTH"] == width
