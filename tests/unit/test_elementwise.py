"""Ops on single values."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for

from vkback.graph import Node, Tensor
from vkback.ops.elementwise import repetition
from vkback.ops.lowering import PlanError
from vkback.ops.op import OPS

H200 = planned_for("nvidia_h200_linux")


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ((3, 8), (8,), (1, 8)),
        ((3, 8), (3, 1), (8, 3)),
        ((2, 3, 8), (3, 1), (8, 3)),
        ((2, 3, 8), (1, 3, 8), (1, 24)),
        ((2, 3, 8), (2, 1, 8), None),
        ((2, 8), (3, 2, 8), None),
        ((6,), (2, 3), (1, 6)),
    ],
)
def test_repetition(a: tuple[int, ...], b: tuple[int, ...], want: tuple[int, int] | None) -> None:
    assert repetition(a, b) == want


def test_a_hole_in_the_repetition_takes_a_launch_of_its_own() -> None:
    node = Node("MUL", (Tensor("a", "F32", (2, 3, 8)), Tensor("b", "F32", (2, 1, 8))), (Tensor("y", "F32", (2, 3, 8)),))
    assert [d.kernel.source for d in OPS["MUL"].lower(node, H200)] == ["copy/box.comp", "elementwise/binary.comp"]


@pytest.mark.parametrize("b", [(2, 8), (3, 3, 8), (2, 2, 3, 8)])
def test_what_does_not_fill_is_refused(b: tuple[int, ...]) -> None:
    node = Node("MUL", (Tensor("a", "F32", (2, 3, 8)), Tensor("b", "F32", b)), (Tensor("y", "F32", (2, 3, 8)),))
    with pytest.raises(PlanError) as error:
        OPS["MUL"].lower(node, H200)
    assert str(error.value) == (
        f"[MUL] y: b F32{list(b)} cannot be repeated to fill a F32[2, 3, 8], or the output y F32[2, 3, 8] is not of its size"
    )


def test_a_missing_parameter_is_named() -> None:
    x = Tensor("x", "F32", (4,))
    with pytest.raises(PlanError, match=r"\[SCALE\] parameters missing: bias"):
        OPS["SCALE"].lower(Node("SCALE", (x,), (Tensor("y", "F32", (4,)),), {"scale": 2.0}), H200)


def test_a_large_grid_spills_to_y() -> None:
    x = Tensor("x", "F32", (8_400_000, 13))
    (d,) = OPS["NEG"].lower(Node("NEG", (x,), (Tensor("y", "F32", x.shape),)), H200)
    assert d.groups[0] <= 65535
    assert d.groups[0] * d.groups[1] * int(dict(d.kernel.defines)["WG_SIZE"]) * 4 >= x.elements
