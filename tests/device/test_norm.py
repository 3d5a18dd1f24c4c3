"""Norms, plain and fused."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

CASES = [c for name in ("RMS_NORM", "NORM", "RMS_NORM_MUL", "ADD_RMS_NORM_MUL") for c in OPS[name].cases()]
H200 = planned_for("nvidia_h200_linux")
FEW = [c for c in CASES if c.params["ne"] in ((1, 512), (2, 511), (2, 1025), (3, 2048), (2, 37), (1, 100))]


@pytest.mark.vulkan
@pytest.mark.parametrize("wg_size", [16, 64, 256])
@pytest.mark.parametrize("case", FEW, ids=lambda c: c.line)
def test_workgroups_of_several_subgroups(case: Case, wg_size: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", FEW, ids=lambda c: c.line)
def test_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(with_params(ctx, wg_size=64)))
    assert outcome.ok, outcome.text


def test_wrong_weight() -> None:
    x = Tensor("x", "F32", (2, 64))
    node = Node("RMS_NORM_MUL", (x, Tensor("w", "F32", (63,), "weight")), (Tensor("y", "F32", (2, 64)),), {"eps": 1e-5})
    with pytest.raises(PlanError) as error:
        OPS["RMS_NORM_MUL"].lower(node, H200)
    assert str(error.value) == "[RMS_NORM_MUL] y: the weight is w F32[63], expected F32[64] for rows of x F32[2, 64]"


def test_wrong_output_type() -> None:
    node = Node("RMS_NORM", (Tensor("x", "F32", (2, 64)),), (Tensor("y", "I32", (2, 64)),), {"eps": 1e-5})
    with pytest.raises(PlanError) as error:
        OPS["RMS_NORM"].lower(node, H200)
    assert str(error.value) == "[RMS_NORM] y: y I32[2, 64]: expected a type of floats"


def test_a_row_of_4096_stays_in_registers() -> None:
    node = Node("RMS_NORM", (Tensor("x", "F32", (1, 4096)),), (Tensor("y", "F32", (1, 4096)),), {"eps": 1e-5})
    (dispatch,) = OPS["RMS_NORM"].lower(node, H200)
    defines = dict(dispatch.kernel.defines)
    assert dispatch.groups == (1, 1, 1)
    assert 0 < int(defines["ROUNDS"]) * int(defines["WG_SIZE"]) * 4 <= 2 * 4096
    assert dispatch.nbytes == 2 * 4 * 4096
