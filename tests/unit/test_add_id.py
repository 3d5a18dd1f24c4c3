"""The experts' biases added to their outputs."""

from __future__ import annotations

import pytest

from vkback.graph import Node, Tensor
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.moe.add_id import AddId


def test_a_bias_of_other_rows_is_refused(ctx: LowerContext) -> None:
    a, b = Tensor("a", "F32", (1, 2, 8)), Tensor("b", "F32", (20,), "weight")
    node = Node("ADD_ID", (a, b, Tensor("ids", "I32", (1, 2))), (Tensor("y", "F32", a.shape),))
    with pytest.raises(PlanError, match=r"^\[ADD_ID\] y: b F32\[20\] and ids .* do not fit a F32\[1, 2, 8\]; expected rows of 8 values"):
        AddId().lower(node, ctx)
