"""MUL_MAT of batches, views and operands that the device made: brought into the form that the GEMV kernels take.

A batch of one matrix is a GEMV with more tokens. Of several it is a MUL_MAT_ID of n tokens: matrices are experts, every row of x is a
slot, and a small kernel writes which matrix each slot takes. Slots lie slice after slice, not token after token as experts' do, but only
their number and their matrix matter. So every weight type and all kernels serve batches: for few tokens the GEMV kernels, which
read a matrix once a slot, from the cache after the first; for many a grouped GEMM, which reads it once a tile of slots.

What does not lie as the kernels need it is copied before: x that is a view or F16 to F32 rows, a weight that is a view to F32, and values
that are no weight (a cache, an activation) into the device layout of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Rounded, Tolerance
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.general import copy_dispatch
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.choice import F16_TOLERANCE, ProductChoice, choose
from vkback.ops.matmul.linear import Linear, linear_tolerance
from vkback.ops.matmul.linear_node import LinearNode
from vkback.ops.op import OPS
from vkback.ops.quantize import rounded_rows, rounded_tolerance
from vkback.ops.storage import nbytes
from vkback.ops.view import View

VIEWS = ("w_view", "x_view")
"""Params: the View of an operand to take in its place."""


def is_batched(node: Node) -> bool:
    """Whether a MUL_MAT is more than a stored weight times some tokens."""
    w, x = node.inputs
    return len(w.shape) != 2 or len(x.shape) != 2 or w.kind != "weight" or x.type in ("F16", "BF16") or any(v in node.params for v in VIEWS)


@dataclasses.dataclass(frozen=True)
class Batch:
    """w [outer, inner, m, k], x [outer * outer_repeat, inner * inner_repeat, n, k]."""

    outer: int
    inner: int
    outer_repeat: int
    inner_repeat: int
    m: int
    k: int
    n: int

    @classmethod
    def of(cls, node: Node) -> Batch:
        """Raises PlanError when the operands do not fit."""
        w, x = (node.params[v].shape if v in node.params else t.shape for v, t in zip(VIEWS, node.inputs, strict=True))
        if len(w) > 4 or len(x) > 4 or len(w) < 2 or len(x) < 2:
            raise PlanError(f"[MUL_MAT] {node.name}: {list(w)} times {list(x)}: expected two to four axes")
        (outer, inner, m, k), (x_outer, x_inner, n, x_k) = ((1,) * (4 - len(s)) + tuple(s) for s in (w, x))
        if k != x_k or x_outer % outer or x_inner % inner:
            raise PlanError(f"[MUL_MAT] {node.name}: {list(w)} times {list(x)}: expected equal last axes, and x's others multiples of w's")
        return cls(outer, inner, x_outer // outer, x_inner // inner, m, k, n)

    @property
    def matrices(self) -> int:
        return self.outer * self.inner

    @property
    def slices(self) -> int:
        """Matrices to multiply."""
        return self.matrices * self.outer_repeat * self.inner_repeat


def reference(node_params: Mapping[str, Any], inputs: Sequence[Array]) -> Array:
    """x times w transposed in float64, [..., n, m]."""
    w, x = (node_params[v].of(np.ascontiguousarray(t)) if v in node_params else t for v, t in zip(VIEWS, inputs, strict=True))
    four = [np.asarray(t, np.float64).reshape((1,) * (4 - t.ndim) + t.shape) for t in (w, x)]
    for axis in (0, 1):
        four[0] = np.repeat(four[0], four[1].shape[axis] // four[0].shape[axis], axis=axis)
    return np.asarray(four[1] @ four[0].swapaxes(-1, -2))


def lower(node: Node, ctx: LowerContext) -> list[Dispatch]:
    """Copies first, then one product; see the module's text."""
    before, product, operands = _product(node, ctx)
    by_name = {t.name: t for t in (*operands, node.outputs[0])}
    for d in Linear().lower(product, ctx):
        args = tuple(dataclasses.replace(a, tensor=by_name.get(a.tensor.name, a.tensor)) for a in d.args)
        before.append(dataclasses.replace(d, args=args, op=node.op if d.op == "LINEAR" else d.op, label=node.name))
    return before


def _product(node: Node, ctx: LowerContext) -> tuple[list[Dispatch], Node, tuple[Tensor, Tensor]]:
    """The copies, the product of what they make, and its operands in the shapes that they were made in."""
    batch = Batch.of(node)
    y = node.outputs[0]
    if y.elements != batch.slices * batch.n * batch.m or y.type != "F32":
        raise PlanError(f"[MUL_MAT] {node.name}: output {y}, expected F32 of {batch.slices} slices of [{batch.n}, {batch.m}]")
    before, w = weight_operand(node, ctx)
    copies, x = token_operand(node, ctx)
    before += copies
    if batch.matrices == 1:
        tokens = batch.slices * batch.n
        inputs: tuple[Tensor, ...] = _shaped(w, batch.m, batch.k), _shaped(x, tokens, batch.k)
        return before, Node("LINEAR", inputs, (_shaped(y, tokens, batch.m),), {"roles": ("w", "x")}, node.choice), (w, x)
    if batch.slices * batch.n > ctx.caps.max_workgroup_count[2]:
        raise PlanError(
            f"[MUL_MAT] {node.name}: {batch.slices} slices of {batch.n} tokens, the device takes {ctx.caps.max_workgroup_count[2]} "
            "workgroups along z (maxComputeWorkGroupCount); cut the batch"
        )
    ids = Tensor(f"{node.name}.matrices", "I32", (batch.n, batch.slices))
    before.append(_matrices(node, batch, ids, ctx))
    inputs = _shaped(w, batch.matrices, batch.m, batch.k), _shaped(x, batch.n, batch.slices, batch.k), ids
    outputs = (_shaped(y, batch.n, batch.slices, batch.m),)
    return before, Node("LINEAR", inputs, outputs, {"roles": ("w", "x", "ids")}, node.choice), (w, x)


def choose_kernel(node: Node, ctx: LowerContext) -> ProductChoice:
    """The kernel of the product behind the copies."""
    return choose(LinearNode.of(_product(node, ctx)[1]), ctx)


def _choice(node: Node, ctx: LowerContext) -> ProductChoice:
    return node.choice if isinstance(node.choice, ProductChoice) else choose_kernel(node, ctx)


def tolerance(node: Node, ctx: LowerContext) -> Tolerance:
    choice = _choice(node, ctx)
    return F16_TOLERANCE if choice.rounds == "F16" else linear_tolerance(_rounds_x(node, choice), False)


def rounded(inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
    """See Op.rounded."""
    if not _rounds_x(node, _choice(node, ctx)):
        return None
    w, x = (node.params[v].of(np.ascontiguousarray(t)) if v in node.params else t for v, t in zip(VIEWS, inputs, strict=True))
    return Rounded([reference({}, (w, rounded_rows(x)))], rounded_tolerance(x.shape[-1]))


def _rounds_x(node: Node, choice: ProductChoice) -> bool:
    """Whether the kernel takes x rounded to Q8_1 on the way."""
    return choice.rounds == "Q8_1" and node.inputs[1].type != "Q8_1"


def _shaped(tensor: Tensor, *shape: int) -> Tensor:
    return dataclasses.replace(tensor, shape=shape)


def weight_operand(node: Node, ctx: LowerContext) -> tuple[list[Dispatch], Tensor]:
    """w as the kernels take it: itself, or a copy as F32 in the device layout."""
    w = node.inputs[0]
    view = node.params.get("w_view", View.whole(w.shape))
    if w.kind == "weight" and "w_view" not in node.params:
        return [], w
    view.check(w, "MUL_MAT")
    before: list[Dispatch] = []
    if w.kind == "weight":
        plain = Tensor(f"{node.name}.w_f32", "F32", view.shape)
        before += OPS["CPY"].lower(Node("CPY", (w,), (plain,), {"view": view}), ctx)
        w, view = plain, View.whole(view.shape)
    if w.type == "BF16":
        plain = Tensor(f"{node.name}.w_f32", "F32", view.shape)
        before.append(copy_dispatch(w, plain, node, ctx, source=view))
        w, view = plain, View.whole(view.shape)
    if w.type not in ("F32", "F16"):
        raise PlanError(f"[MUL_MAT] {node.name}: {w}: expected F32, F16, BF16 or a weight")
    four = view.four()
    rows, k = prod(four.shape[:3]), four.shape[3]
    units = ceil_div(k, 32)
    laid = Tensor(f"{node.name}.w_units", "F32", (*four.shape[:3], 32 * units))
    threads = 8 * rows * units
    choice = ctx.tuning.pick("copy", elements=laid.elements)
    before.append(
        by_threads(
            node,
            ctx,
            "copy/as_weight.comp",
            (Arg(w), Arg(laid, "w")),
            (*four.shape, *four.strides, four.offset, units),
            threads,
            {"FROM_F16": int(w.type == "F16")},
            choice=choice,
            moved=view.elements * (2 if w.type == "F16" else 4) + nbytes(laid),
        )
    )
    return before, laid


def token_operand(node: Node, ctx: LowerContext) -> tuple[list[Dispatch], Tensor]:
    """x as the kernels take it: itself, or a copy as F32 rows."""
    x = node.inputs[1]
    if x.type not in ("F16", "BF16") and "x_view" not in node.params:
        return [], x
    view = node.params.get("x_view", View.whole(x.shape))
    rows = Tensor(f"{node.name}.x_f32", "F32", view.shape)
    if x.type == "BF16":
        return [copy_dispatch(x, rows, node, ctx, source=view)], rows
    return OPS["CPY"].lower(Node("CPY", (x,), (rows,), {"view": view}), ctx), rows


def _matrices(node: Node, batch: Batch, ids: Tensor, ctx: LowerContext) -> Dispatch:
    """Writes the matrix of every slice."""
    return by_threads(
        node,
        ctx,
        "gemm_f32/slices.comp",
        (Arg(ids, "w"),),
        (ids.elements, batch.n, batch.inner * batch.inner_repeat, batch.inner_repeat, batch.outer_repeat, batch.inner),
        ids.elements,
    )
