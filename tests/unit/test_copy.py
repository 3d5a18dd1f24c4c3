"""Ops that only move values."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for

from vkback.graph import Node, Tensor
from vkback.harness.cases import find_case
from vkback.ops.case_line import CaseLineError
from vkback.ops.lowering import PlanError
from vkback.ops.op import OPS
from vkback.ops.view import View
from vkback.plan.schedule import into_stages

H200 = planned_for("nvidia_h200_linux")


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
        ("PERMUTE", [(1, 2, 3, 4, 5)], (5, 4, 3, 2, 1), {"axes": (4, 3, 2, 1, 0)}, r"expected F32 .* of at most four axes"),
    ],
)
def test_shapes_that_do_not_fit(op: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], params: dict[str, object], text: str) -> None:
    node = Node(op, tuple(Tensor(f"x{i}", "F32", s) for i, s in enumerate(shapes)), (Tensor("y", "F32", out),), params)
    with pytest.raises(PlanError, match=rf"\[{op}\] y: .*{text}"):
        OPS[op].lower(node, H200)


WEIGHT = Tensor("x", "Q4_0", (6, 64), "weight")


@pytest.mark.parametrize(
    ("x", "y", "params", "text"),
    [
        (Tensor("x", "F32", (4, 6)), "F16", {"view": View(0, (4, 5), (6, 1))}, "expected as many values on either side"),
        (Tensor("x", "F32", (4, 6)), "F32", {"view": View(1, (4, 6), (6, 1))}, "ends at value 24, the tensor has 24"),
        (Tensor("x", "F32", (4, 6)), "F32", {"view": View(0, (1, 1, 1, 4, 6), (0, 0, 0, 6, 1))}, "expected at most four axes"),
        (WEIGHT, "F32", {"view": View(16, (6, 64), (64, 1))}, "ends at value 399, the tensor has 384"),
        (WEIGHT, "F32", {"view": View(0, (64, 6), (1, 64))}, "not made of whole rows from a multiple of 32 on"),
    ],
)
def test_copies_that_cannot_be(x: Tensor, y: str, params: dict[str, View], text: str) -> None:
    shape = params["view"].shape if params and "as many" not in text else (4, 6) if x is not WEIGHT else x.shape
    with pytest.raises(PlanError, match=text):
        OPS["CPY"].lower(Node("CPY", (x,), (Tensor("y", y, shape),), params), H200)


def kernels(x: Tensor, y: Tensor, **params: View) -> list[str]:
    """Shaders of a CPY, in order."""
    inputs = (x, y) if "to" in params else (x,)
    return [d.kernel.source for d in OPS["CPY"].lower(Node("CPY", inputs, (y,), params), H200)]


def test_what_the_kernels_of_models_cannot_write_goes_by_the_general_one() -> None:
    x, odd = Tensor("x", "F32", (4, 3)), Tensor("y", "F16", (4, 4), "state")
    assert kernels(x, odd, to=View(0, (4, 3), (4, 1))) == ["copy/general.comp"]
    assert kernels(Tensor("x", "F32", (3, 5)), Tensor("y", "F16", (3, 5))) == ["copy/general.comp"]
    assert kernels(Tensor("x", "F32", (4, 6)), Tensor("y", "F16", (4, 6))) == ["copy/convert.comp"]
    assert kernels(WEIGHT, Tensor("y", "F16", (6, 64))) == ["copy/decode.comp"]
    assert kernels(WEIGHT, Tensor("y", "BF16", (6, 64))) == ["copy/decode.comp", "copy/general.comp"]
    assert kernels(Tensor("x", "F16", (6, 64)), Tensor("y", "Q4_0", (6, 64))) == ["copy/general.comp", "encode/encode.comp"]
    assert kernels(WEIGHT, Tensor("y", "Q4_0", (6, 64))) == ["copy/plane_rows.comp"] * 2


@pytest.mark.parametrize(
    "line",
    [
        "DUP(type=q4_0,ne=[31,1,1,1])",
        "DUP(type=q4_0,ne=[32,33,1,1],permute=[1,0,2,3])",
        "CPY(type_src=q4_0,type_dst=f32,ne_src=[31,1,1,1])",
        "CPY(type_src=f32,type_dst=q4_0,ne_src=[31,1,1,1])",
        "SET_ROWS(type_src=f32,type_dst=q4_0,type_idx=i64,ne=[31,5,1,3])",
        "GET_ROWS(type=q4_0,n=31,m=5,r=4)",
        "CONCAT(type=q4_0,ne_a=[31,3,2,2],ne_b_d=7,dim=1,v=3)",
        "MUL_MAT(type_a=q4_0,type_b=f32,m=16,n=1,k=31)",
        "MUL_MAT_ID(type_a=q4_0,type_b=f32,n_mats=4,n_used=2,b=0,m=16,n=1,k=31)",
        "OUT_PROD(type_a=q4_0,type_b=f32,m=31,n=3,k=5)",
    ],
)
def test_rows_of_no_whole_blocks_make_no_case(line: str) -> None:
    with pytest.raises(CaseLineError, match="block"):
        find_case(line)


@pytest.mark.parametrize(
    "line",
    [
        "LINEAR(type_a=Q4_0,m=96,n=1,k=31)",
        "LINEAR_HEADS(type_a=Q4_0,n_head=5,m=96,k=31,n=1)",
        "CPY(type_src=q4_0,type_dst=F32,ne=[5,31],weight=1)",
        "REPEAT(type=q4_0,ne=[31,3,2,1],nr=[1,2,1,2])",
        "CONT(type=q4_0,ne=[31,1,1,1])",
        "PAD(type=q4_0,ne_a=[31,5,3,2])",
    ],
)
def test_nor_are_they_a_failed_case(line: str) -> None:
    """Ops whose lines are the project's own, or which take no quantized types: not supported, with the reason."""
    with pytest.raises(PlanError, match=r"block|not supported"):
        find_case(line).build()
