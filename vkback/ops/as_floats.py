"""Operands of any type as one kernel reads them: F32 values one after the other."""

from __future__ import annotations

from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Dispatch
from vkback.ops.general import copy_dispatch
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.ops.storage import in_planes
from vkback.ops.view import View


def as_floats(node: Node, ctx: LowerContext, x: Tensor, view: View | None = None) -> tuple[list[Dispatch], Tensor]:
    """The values of a tensor, or of a view of it, as F32: itself where it is that, else copies and the tensor that they fill.

    Raises PlanError where a type cannot be read or the view does not fit.
    """
    if view is not None and view == View.whole(x.shape):
        view = None
    if view is None and x.type == "F32" and not in_planes(x):
        return [], x
    y = Tensor(f"{node.name}.{x.name}", "F32", view.shape if view else x.shape)
    if in_planes(x):
        return OPS["CONT"].lower(Node("CONT", (x,), (y,), {"view": view} if view else {}), ctx), y
    return [copy_dispatch(x, y, node, ctx, source=view)], y
