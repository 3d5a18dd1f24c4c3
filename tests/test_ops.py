"""Every case of every op against its reference."""

from __future__ import annotations

import pytest

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

IN_SEVERAL_WAYS = {"MUL_MAT", "MUL_MAT_ID", "MAT_VEC", "MOE_REDUCE"}
"""Ops whose own tests run every case on more than one path or shape."""

CASES = [c for name, op in OPS.items() if name not in IN_SEVERAL_WAYS for c in op.cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text
