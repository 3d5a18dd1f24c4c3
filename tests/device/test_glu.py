"""Gated linear units."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for, without_subgroups

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [c for c in OPS["SWIGLU"].cases() if c.params.get("out") == "q8_1"], ids=lambda c: c.line)
def test_q8_1_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(ctx))
    assert outcome.ok, outcome.text


def test_shapes_that_do_not_fit() -> None:
    gate, up = Tensor("gate", "F32", (2, 64)), Tensor("up", "F32", (2, 32))
    with pytest.raises(PlanError) as error:
        OPS["SWIGLU"].lower(Node("SWIGLU", (gate, up), (Tensor("y", "F32", (2, 64)),)), planned_for("nvidia_h200_linux"))
    assert str(error.value) == "[SWIGLU] y: up F32[2, 32] does not fit the output y F32[2, 64]: expected as many values"
