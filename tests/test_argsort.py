"""Sorting."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.base import OPS, Case, LowerContext, PlanError
from vkback.shader import ShaderLibrary

CASES = [c for name in ("ARGSORT", "TOP_K") for c in OPS[name].cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("k", [0, 17])
def test_more_than_a_row_holds_is_refused(k: int) -> None:
    node = Node("TOP_K", (Tensor("x", "F32", (2, 16)),), (Tensor("y", "I32", (2, k)),), {"k": k})
    with pytest.raises(PlanError, match=rf"\[TOP_K\] y: k = {k} of x F32\[2, 16\] .*: expected 1 to 16"):
        OPS["TOP_K"].lower(node, planned_for("nvidia_h200_linux"))
