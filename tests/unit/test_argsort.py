"""Sorting."""

from __future__ import annotations

import pytest
from kernel_paths import planned_for

from vkback.graph import Node, Tensor
from vkback.ops.lowering import PlanError
from vkback.ops.op import OPS


@pytest.mark.parametrize("k", [0, 17])
def test_more_than_a_row_holds_is_refused(k: int) -> None:
    node = Node("TOP_K", (Tensor("x", "F32", (2, 16)),), (Tensor("y", "I32", (2, k)),), {"k": k})
    with pytest.raises(PlanError, match=rf"\[TOP_K\] y: k = {k} of x F32\[2, 16\] .*: expected 1 to 16"):
        OPS["TOP_K"].lower(node, planned_for("nvidia_h200_linux"))
