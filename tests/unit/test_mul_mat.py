"""MUL_MAT beyond a stored weight times some tokens: batches, views, operands that the device made."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.graph import Node, Tensor
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.mul_mat import batched_case
from vkback.ops.op import OPS
from vkback.ops.view import View, laid_out
from vkback.plan.schedule import into_stages

H200 = planned_for("nvidia_h200_linux")


def kernels(node: Node, ctx: LowerContext = H200) -> list[list[str]]:
    return [[d.kernel.source for d in stage] for stage in into_stages(OPS["MUL_MAT"].lower(node, ctx))]


def test_one_matrix_is_a_product_with_more_tokens() -> None:
    node = batched_case("Q4_K", 16, 4, 256, (1, 1), (2, 3)).build().node
    (d,) = OPS["MUL_MAT"].lower(node, dataclasses.replace(H200, act="f32"))
    assert d.kernel.source == "gemm/f32.comp" and dict(d.kernel.defines)["GROUPED"] == 0
    assert d.flops == 2 * 16 * 256 * 24


def test_several_matrices_take_two_stages() -> None:
    node = batched_case("Q4_K", 16, 4, 256, (2, 3), (1, 2)).build().node
    assert kernels(node, dataclasses.replace(H200, act="f32")) == [["gemm_f32/slices.comp"], ["gemv/gemv.comp"]]


@pytest.mark.parametrize(("tokens", "last"), [(16, "gemv/gemv.comp"), (17, "gemm/f32.comp")])
def test_many_tokens_take_a_grouped_mat_mat(tokens: int, last: str) -> None:
    """However many matrices there are: MLA's are as many as heads."""
    floats = dataclasses.replace(H200, act="f32")
    found = kernels(batched_case("Q4_K", 16, tokens, 256, (1, 3), (1, 1)).build().node, floats)
    assert found[-1] == [last] and (["gemm/route.comp"] in found) == (tokens > 16)
    many = batched_case("Q4_K", 16, tokens, 256, (1, 1500), (1, 1)).build().node
    little = dataclasses.replace(floats, caps=dataclasses.replace(H200.caps, max_shared_memory=16384))
    assert kernels(many, little)[-1] == ["gemv/gemv.comp"]


def test_views_are_copied_side_by_side() -> None:
    node = batched_case("Q4_K", 16, 4, 256, (2, 3), (1, 2), order=(0, 2, 1, 3)).build().node
    first, second, third = kernels(node)
    assert sorted(first) == ["copy/box.comp", "copy/decode.comp", "gemm_f32/slices.comp"]
    assert (second, third) == (["copy/as_weight.comp"], ["gemv/gemv.comp"])


def test_a_cache_is_no_weight() -> None:
    node = batched_case("F16", 17, 1, 64, (1, 2), (1, 4), plain=True).build().node
    assert sorted(kernels(node)[0]) == ["copy/as_weight.comp", "gemm_f32/slices.comp"]


@pytest.mark.parametrize(
    ("w", "x", "y", "text"),
    [
        ((2, 16, 64), (3, 1, 64), (3, 1, 16), r"\[2, 16, 64\] times .*: expected equal last axes, and x's others multiples of w's"),
        ((2, 16, 64), (4, 1, 32), (4, 1, 16), "expected equal last axes"),
        ((2, 16, 64), (4, 1, 64), (4, 1, 17), r"output y F32\[4, 1, 17\], expected F32 of 4 slices of \[1, 16\]"),
        ((1, 2, 3, 16, 64), (6, 1, 64), (6, 1, 16), "expected two to four axes"),
        ((2, 16, 64), (2, 40000, 64), (2, 40000, 16), "2 slices of 40000 tokens, the device takes 65535 workgroups along z"),
    ],
)
def test_batches_that_cannot_be(w: tuple[int, ...], x: tuple[int, ...], y: tuple[int, ...], text: str) -> None:
    node = Node("MUL_MAT", (Tensor("w", "F32", w, "weight"), Tensor("x", "F32", x)), (Tensor("y", "F32", y),))
    with pytest.raises(PlanError, match=text):
        OPS["MUL_MAT"].lower(node, H200)


def test_integers_are_no_weight() -> None:
    node = Node("MUL_MAT", (Tensor("w", "I32", (2, 16, 64)), Tensor("x", "F32", (2, 1, 64))), (Tensor("y", "F32", (2, 1, 16)),))
    with pytest.raises(PlanError, match=r"w I32\[2, 16, 64\]: expected F32, F16, BF16 or a weight"):
        OPS["MUL_MAT"].lower(node, H200)


def test_a_view_finds_what_was_laid_out() -> None:
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    inner, view = laid_out(values.shape, (1, 0, 2), gap=2)
    memory = np.full(inner, -1)
    memory[..., 1:5] = values.transpose(1, 0, 2)
    assert inner == (3, 2, 6)
    np.testing.assert_array_equal(view.of(memory), values)
    assert View.whole((3, 4)).four() == View(0, (1, 1, 3, 4), (0, 0, 4, 1))
