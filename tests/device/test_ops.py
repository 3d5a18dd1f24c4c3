"""Every case of every op against its reference."""

from __future__ import annotations

import pytest
from suite_cases import CASES

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text
