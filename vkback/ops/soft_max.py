"""SOFT_MAX and SUM_ROWS (shaders/soft_max): a workgroup a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.base import (
    Arg,
    Array,
    Case,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    Shape,
    Tolerance,
    ceil_div,
    nbytes,
    pack_push,
    register,
    spread,
)
from vkback.ops.cost import Cost, times
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant


def _dispatch(node: Node, ctx: LowerContext, *, sum_rows: bool) -> Dispatch:
    x, *mask = node.inputs
    dim, rows = x.shape[-1], prod(x.shape[:-1])
    choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
    wg = workgroup_size(ctx.caps, choice["wg_size"], ceil_div(dim, 4))
    defines, subgroup = reduction(ctx.caps, wg)
    defines |= {"MASK": len(mask), "SUM": int(sum_rows)}
    return Dispatch(
        Variant("soft_max/soft_max.comp", tuple(sorted(defines.items())), subgroup),
        (Arg(x), *map(Arg, mask), Arg(node.outputs[0], "w" if sum_rows else "rw")),
        pack_push(rows, dim, prod(mask[0].shape[:-1]) if mask else 1, float(node.params.get("scale", 1.0))),
        spread(rows),
        node.op,
        node.name,
        f"{wg} threads: {choice.source}",
        nbytes=sum(map(nbytes, (*node.inputs, *node.outputs))),
        flops=(1 if sum_rows else 8) * rows * dim,
    )


SHAPES: tuple[Shape, ...] = (
    (1, 1), (1, 32), (2, 33), (4, 1, 128), (7, 1024), (3, 4096), (2, 16, 1000), (1, 151936), (1, 643251), (5, 4, 3, 70),
)  # fmt: skip
"""Of the full set."""


@register
class SoftMax(Op):
    """SOFT_MAX(x [..., dim] [, mask [..., dim]]; scale) -> softmax of scale * x + mask over the last axis.

    The mask's rows are those of x's last axes, used again for each of the leading ones; -inf hides a value, and a row that is hidden
    altogether gives zeros.
    """

    name = "SOFT_MAX"
    formula = "soft_max(x)"
    peer_nmse = 1e-6

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        z = np.asarray(inputs[0], np.float64) * params.get("scale", 1.0)
        if len(inputs) > 1:
            z = z + inputs[1]
        top = z.max(axis=-1, keepdims=True)
        e = np.exp(z - np.where(np.isfinite(top), top, 0.0))
        total = e.sum(axis=-1, keepdims=True)
        return [np.divide(e, total, out=np.zeros_like(e), where=total > 0)]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value: its scale and the sum's inverse, subtraction of the maximum and the sum, an exponential. A mask adds its slope and a
        sum, and each row the power that ALiBi's slope is, as ggml's op has it: without ALiBi the slope is 1."""
        x, *mask = node.inputs
        per_value = {"fmul": 3, "fadd": 3, "fexp": 1} if mask else {"fmul": 2, "fadd": 2, "fexp": 1}
        return ({"fpow": prod(x.shape[:-1])} if mask else {}) | times(per_value, x.elements)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, *mask = node.inputs
        if mask and mask[0].shape != x.shape[len(x.shape) - len(mask[0].shape) :]:
            raise PlanError(f"[SOFT_MAX] {node.name}: mask {mask[0]} does not fit {x}: expected its last axes")
        return [_dispatch(node, ctx, sum_rows=False)]

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (3, 2, 37), (5, 1), (1, 20000)):
            for masked in (False, True):
                yield self.build_case(shape, masked)

    def full_cases(self) -> Iterator[Case]:
        for shape in SHAPES:
            for masked in (False, True):
                yield self.build_case(shape, masked)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case((32, 4096))

    def build_case(self, ne: Shape, mask: bool = False, scale: float = 0.5, seed: int = 37) -> Case:
        """Values uniform in +-20; the mask hides a third of them and its first row altogether where there are several."""

        def make(rng: np.random.Generator) -> Problem:
            inputs = [Tensor("x", "F32", ne, "input")]
            values: dict[str, Array] = {"x": rng.uniform(-20, 20, ne).astype(np.float32)}
            if mask:
                inputs.append(Tensor("mask", "F32", ne[-2:], "input"))
                hidden = np.where(rng.random(ne[-2:]) < 1 / 3, -np.inf, 0.0)
                hidden[-1, 0] = 0.0
                if len(hidden) > 1:
                    hidden[0] = -np.inf
                values["mask"] = hidden.astype(np.float32)
            return Problem(Node("SOFT_MAX", tuple(inputs), (Tensor("y", "F32", ne),), {"scale": scale}), values)

        return Case("SOFT_MAX", {"ne": ne, "mask": mask, "scale": scale, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-3, "f32; exp(z - max) with |z| up to 20 has 3 + 2|z| ulp by Vulkan's rules: 3e-6 relative; small rms")


@register
class SumRows(Op):
    """SUM_ROWS(x [..., dim]) -> [..., 1]."""

    name = "SUM_ROWS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.asarray(inputs[0], np.float64).sum(axis=-1, keepdims=True)]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fadd": node.inputs[0].elements}

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return [_dispatch(node, ctx, sum_rows=True)]

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (3, 2, 37), (5, 1)):
            yield self.build_case(shape)

    def full_cases(self) -> Iterator[Case]:
        for shape in SHAPES:
            yield self.build_case(shape)

    def build_case(self, ne: Shape, seed: int = 41) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            node = Node("SUM_ROWS", (Tensor("x", "F32", ne, "input"),), (Tensor("y", "F32", (*ne[:-1], 1)),))
            return Problem(node, {"x": rng.uniform(-0.5, 1.5, ne).astype(np.float32)})

        return Case("SUM_ROWS", {"ne": ne, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of dim values, relative error about sqrt(dim) * 2^-24")
