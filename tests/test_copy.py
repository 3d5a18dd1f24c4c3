"""Ops that only move values."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.base import OPS, Case, LowerContext, PlanError
from vkback.plan.schedule import into_stages
from vkback.shader import ShaderLibrary

H200 = planned_for("nvidia_h200_linux")
CASES = [c for name in ("CPY", "CONT", "REPEAT", "CONCAT", "PAD", "PERMUTE") for c in OPS[name].cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text


def test_concat_is_one_stage() -> None:
    case = next(OPS["CONCAT"].cases())
    dispatches = OPS["CONCAT"].lower(case.build().node, H200)
    assert len(dispatches) == 2
    assert len(into_stages(dispatches)) == 1


@pytest.mark.parametrize(
    ("op", "shapes", "out", "params", "text"),
    [
        ("PERMUTE", [(3, 5)], (3, 5), {"axes": (1, 0)}, r"output y F32\[3, 5\], expected shape \[5, 3\]"),
        ("CONCAT", [(3, 5), (2, 4)], (5, 5), {"axis": 0}, r"inputs \[\(3, 5\), \(2, 4\)\] do not fit"),
        ("PAD", [(3, 5)], (2, 5), {"shape": (2, 5)}, r"inputs \[\(3, 5\)\] do not fit"),
        ("PERMUTE", [(1, 2, 3, 4, 5)], (5, 4, 3, 2, 1), {"axes": (4, 3, 2, 1, 0)}, "expected F32 of at most four axes"),
    ],
)
def test_shapes_that_do_not_fit(op: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], params: dict[str, object], text: str) -> None:
    node = Node(op, tuple(Tensor(f"x{i}", "F32", s) for i, s in enumerate(shapes)), (Tensor("y", "F32", out),), params)
    with pytest.raises(PlanError, match=rf"\[{op}\] y: .*{text}"):
        OPS[op].lower(node, H200)


def test_an_odd_number_of_f16_values_is_refused() -> None:
    node = Node("CPY", (Tensor("x", "F32", (3, 5)),), (Tensor("y", "F16", (3, 5)),))
    with pytest.raises(PlanError, match="an odd number of F16 values is not supported"):
        OPS["CPY"].lower(node, H200)
