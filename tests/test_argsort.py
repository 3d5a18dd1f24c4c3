"""Sorting."""

from __future__ import annotations

import pytest

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.base import OPS, Case, LowerContext
from vkback.shader import ShaderLibrary

CASES = [c for name in ("ARGSORT",) for c in OPS[name].cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text
