"""CROSS_ENTROPY_LOSS and CROSS_ENTROPY_LOSS_BACK (shaders/training): of token ids, or of a matrix of labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost, times
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, Tape, register
from vkback.ops.soft_max import softmax_tolerance, threads_of_a_row
from vkback.ops.training.gradients import Gradient, Scalar
from vkback.ops.training.soft_max_back import soft_max
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant

MEAN_WG = 256
"""Threads that add up the losses of all rows."""


def log_sum_exp(x: Array) -> Array:
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))[..., 0]


def labels_of(logits: Array, targets: Array) -> tuple[Array, int]:
    """Targets as a matrix of labels of the logits' shape, all zero in rows that do not count, and how many rows count."""
    if targets.shape == logits.shape and targets.dtype.kind == "f":
        return np.asarray(targets, np.float64), prod(logits.shape[:-1])
    ids = targets.reshape(-1)
    counts = (ids >= 0) & (ids < logits.shape[-1])
    labels = np.zeros((len(ids), logits.shape[-1]))
    labels[np.flatnonzero(counts), ids[counts]] = 1.0
    return labels.reshape(logits.shape), max(int(counts.sum()), 1)


def mean_loss(logits: Array, labels: Array, count: int) -> float:
    return float(np.sum(labels * (log_sum_exp(logits)[..., None] - logits))) / count


def _row_kernel(node: Node, ctx: LowerContext, shader: str, args: Sequence[Arg], logits: Tensor, defines: Defines) -> Dispatch:
    """A workgroup a row of the logits."""
    dim, rows = logits.shape[-1], prod(logits.shape[:-1])
    choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
    wg = workgroup_size(ctx.caps, choice["wg_size"], ceil_div(dim, 4))
    return by_rows(node, ctx, shader, args, (rows, dim), rows, wg, choice, defines, flops=6 * logits.elements)


def _check(node: Node, logits: Tensor, targets: Tensor) -> bool:
    """Whether targets are a matrix of labels. Raises PlanError for what is neither that nor an id for each row."""
    if targets.type == "F32" and targets.shape == logits.shape:
        return True
    rows = prod(logits.shape[:-1])
    if targets.type != "I32" or targets.elements != rows:
        raise PlanError(f"[{node.op}] {node.name}: targets {targets} of {logits}: expected I32[{rows}], or F32 labels of the logits' shape")
    return False


def _case(op: str, back: bool, shape: Shape, ids: bool, given: Mapping[str, Any], seed: int) -> Case:
    """given: inplace, lse"""

    def make(rng: np.random.Generator) -> Problem:
        logits = Tensor("logits", "F32", shape, "input")
        rows = prod(shape[:-1])
        values: dict[str, Array] = {"logits": rng.uniform(-6, 6, shape).astype(np.float32)}
        if ids:
            targets = Tensor("targets", "I32", (rows,), "input")
            values["targets"] = rng.integers(0, shape[-1], rows).astype(np.int32)
            values["targets"][1::5] = -1
        else:
            targets = Tensor("labels", "F32", shape, "input")
            values["labels"] = soft_max(rng.uniform(-4, 4, shape)).astype(np.float32)
        lse = Tensor("lse", "F32", (rows,), "input" if back else "node")
        more = (lse,) if given["lse"] else ()
        if not back:
            outputs = (Tensor("loss", "F32", (1,)), *more)
            return Problem(Node(op, (logits, targets), outputs, {} if more else {"lse": False}), values)
        values["dloss"] = np.array([0.7], np.float32)
        if more:
            values["lse"] = log_sum_exp(values["logits"].astype(np.float64)).reshape(-1).astype(np.float32)
        out = logits if given["inplace"] else Tensor("dlogits", "F32", shape)
        return Problem(Node(op, (Tensor("dloss", "F32", (1,), "input"), logits, targets, *more), (out,)), values)

    shown = {"type": "f32", "ne": ne_of(shape), "ids": int(ids), **{key: int(value) for key, value in given.items()}, "seed": seed}
    return Case(op, shown, make, seed)


@register
class CrossEntropyLoss(Op):
    """CROSS_ENTROPY_LOSS(logits [..., v], targets I32 [rows] or labels F32 [..., v] [; lse]) -> loss F32 [1], lse F32 [rows].

    With lse=False there is one output. Of targets, the mean of -log softmax(logits)[target] over the rows with a target within 0 .. v - 1,
    0 if there is none; of labels, -sum of labels * log softmax(logits) over the number of rows.
    """

    name = "CROSS_ENTROPY_LOSS"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return times({"fadd": 2, "fexp": 1}, node.inputs[0].elements)

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """Of the logits, which it overwrites: there is no second matrix of their size."""
        logits, targets = node.inputs
        if len(node.outputs) < 2:
            return super().backward(node, dy, tape)
        tape.add("CROSS_ENTROPY_LOSS_BACK", (dy, logits, targets, node.outputs[1]), (logits,))
        return [logits, None]

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits = np.asarray(inputs[0], np.float64)
        labels, count = labels_of(logits, inputs[1])
        loss = np.array([mean_loss(logits, labels, count)])
        return [loss, log_sum_exp(logits).reshape(-1)] if params.get("lse", True) else [loss]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits, targets = node.inputs
        loss, *more = node.outputs
        labels = _check(node, logits, targets)
        rows = prod(logits.shape[:-1])
        if len(more) != bool(node.params.get("lse", True)):
            raise PlanError(f"[{self.name}] {node.name}: {1 + len(more)} outputs: expected the loss and, unless lse is False, lse")
        of_rows = Tensor(f"{node.name}.rows", "F32", (rows,))
        lse = more[0] if more else Tensor(f"{node.name}.lse", "F32", (rows,))
        defines: Defines = {"LABELS": int(labels)}
        wg = workgroup_size(ctx.caps, MEAN_WG, rows)
        reduce, subgroup = reduction(ctx.caps, wg)
        return [
            _row_kernel(
                node, ctx, "training/cross_entropy.comp", (Arg(logits), Arg(targets), Arg(of_rows, "w"), Arg(lse, "w")), logits, defines
            ),
            Dispatch(
                Variant.of("training/mean_loss.comp", {**reduce, **defines}, subgroup_size=subgroup),
                (Arg(of_rows), Arg(targets), Arg(loss, "w")),
                pack_push(rows, logits.shape[-1]),
                (1, 1, 1),
                node.op,
                node.name,
                f"{wg} threads",
                nbytes=8 * rows,
                flops=rows,
            ),
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of positive terms; an exponential of at most 0 and a logarithm, each a few ulp")

    def build_case(self, type: str = "f32", ne: Shape = (10, 5, 4, 3), ids: bool = False, lse: bool = False, seed: int = 59) -> Case:
        """ids: targets are ids, every fifth -1, in place of labels; lse: the second output is wanted, too."""
        one_of_types(type, ("F32",))
        return _case(self.name, False, shape_of(ne), ids, {"lse": lse}, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(37, 3, 2, 1))
        yield self.build_case(ne=(1000, 7, 1, 1), ids=True, lse=True)

    def full_cases(self) -> Iterator[Case]:
        for dim, rows in ((2, 3), (49152, 5), (257, 700)):
            for ids in (False, True):
                yield self.build_case(ne=(dim, rows, 1, 1), ids=ids)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(49152, 512, 1, 1), ids=True)


@register
class CrossEntropyLossBack(Gradient):
    """CROSS_ENTROPY_LOSS_BACK(dloss F32 [1], logits, targets or labels [, lse F32 [rows]]) -> dlogits, which may be logits.

    Labels of a row are taken to add up to 1. lse is what CROSS_ENTROPY_LOSS made; without it the kernel does so again.
    """

    name = "CROSS_ENTROPY_LOSS_BACK"
    cost: ClassVar[Cost] = {"fmul": 1, "fadd": 2, "fexp": 1}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dloss, logits = (np.asarray(i, np.float64) for i in inputs[:2])
        labels, count = labels_of(logits, inputs[2])
        counts = labels.sum(axis=-1, keepdims=True) > 0
        return [np.where(counts, soft_max(logits) - labels, 0.0) * dloss.reshape(-1)[0] / count]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        dloss, logits = (np.asarray(i, np.float64) for i in inputs[:2])
        labels, count = labels_of(logits, inputs[2])
        total = labels.sum(axis=-1, keepdims=True)
        labels = labels / np.where(total > 0, total, 1.0)  # in f32 they do not add up to 1 quite
        return Scalar((logits,), lambda x: float(dloss.reshape(-1)[0]) * mean_loss(x, labels, count))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dloss, logits, targets, *lse = node.inputs
        dlogits = node.outputs[0]
        labels = _check(node, logits, targets)
        if dlogits.elements != logits.elements or dloss.elements != 1 or any(t.elements != prod(logits.shape[:-1]) for t in lse):
            raise PlanError(f"[{self.name}] {node.name}: {', '.join(map(str, node.inputs))} to {dlogits}: they do not fit")
        args = (Arg(dloss), Arg(logits), Arg(targets), Arg(dlogits, "w"), *map(Arg, lse))
        defines: Defines = {"LABELS": int(labels), "LSE": len(lse)}
        return [_row_kernel(node, ctx, "training/cross_entropy_back.comp", args, logits, defines)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(
            1e-10, 1e-4, "f32; exp(logit - lse) has 3 + 2 |logit - lse| ulp by Vulkan's rules, 2e-6 at 16; lse is off by 2^-22"
        )

    def tolerance_at(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Tolerance:
        """That of the softmax, over what is left of it without the labels."""
        plain = self.tolerance(node, ctx)
        logits = np.asarray(inputs[1], np.float64)
        p = soft_max(logits)
        wg, _ = threads_of_a_row(node.inputs[1], ctx)
        of_p = softmax_tolerance(logits, np.abs(logits), p, wg)
        labels, _ = labels_of(logits, inputs[2])
        left = np.where(labels.sum(axis=-1, keepdims=True) > 0, p - labels, 0.0)
        share = float(np.square(p).sum()) / max(float(np.square(left).sum()), 1e-30)
        return Tolerance(max(plain.nmse, of_p.nmse * share), max(plain.worst, of_p.worst * share**0.5), of_p.reason)

    def build_case(
        self, type: str = "f32", ne: Shape = (10, 5, 4, 3), ids: bool = False, inplace: bool = False, lse: bool = False, seed: int = 61
    ) -> Case:
        """ids: targets are ids, every fifth -1, in place of labels; inplace: the logits become their gradient; lse: is given."""
        one_of_types(type, ("F32",))
        if len(ne) < 1:
            raise CaseLineError(f"{self.name}: ne=[]: expected sizes")
        return _case(self.name, True, shape_of(ne), ids, {"inplace": inplace, "lse": lse}, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(37, 3, 2, 1))
        yield self.build_case(ne=(1000, 7, 1, 1), ids=True, inplace=True, lse=True)
        yield self.build_case(ne=(70, 7, 1, 1), ids=True)

    def full_cases(self) -> Iterator[Case]:
        for dim, rows in ((2, 3), (49152, 5), (257, 700)):
            for ids, inplace, lse in ((False, True, False), (True, False, False), (True, True, True)):
                yield self.build_case(ne=(dim, rows, 1, 1), ids=ids, inplace=inplace, lse=lse)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(49152, 512, 1, 1), ids=True, inplace=True, lse=True)
