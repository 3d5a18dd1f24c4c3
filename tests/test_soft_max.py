"""Softmax and sums of rows."""

from __future__ import annotations

import pytest
from kernel_paths import with_params, without_subgroups

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

CASES = [c for name in ("SOFT_MAX", "SUM_ROWS") for c in OPS[name].cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("subgroups", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_workgroups_of_several_subgroups(case: Case, subgroups: bool, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    wide = with_params(ctx, wg_size=64)
    outcome = run_case(device, library, case, wide if subgroups else without_subgroups(wide))
    assert outcome.ok, outcome.text
