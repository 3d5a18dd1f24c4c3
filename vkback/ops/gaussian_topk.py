"""GAUSSIAN_TOPK (shaders/norm): activation sparsity by a cutoff that the mean and the standard deviation of a row give. GAUSSIAN_GEGLU:
with the gated unit behind it, of one token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.cost import Cost, total
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.ggml_words import one_of_types, sized, type_word
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, cost_rule, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant


@register
class GaussianTopk(Op):
    """GAUSSIAN_TOPK(x F32 [..., dim]; scale) -> max(x - mean - scale * standard deviation, 0) of each row."""

    name = "GAUSSIAN_TOPK"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Two sums over the row, and the difference."""
        x = node.inputs[0]
        return {"fadd": 4 * x.elements, "fmul": x.elements, "sqrt": x.elements // x.shape[-1]}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        cutoff = x.mean(axis=-1, keepdims=True) + params["scale"] * x.std(axis=-1, keepdims=True)
        return [np.maximum(x - cutoff, 0.0)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, y = node.inputs[0], node.outputs[0]
        if (x.type, y.type, x.shape) != ("F32", "F32", y.shape):
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected F32 of one shape")
        dim = x.shape[-1]
        rows = x.elements // dim
        choice = ctx.tuning.pick("norm", dim=dim, rows=rows)
        wg = workgroup_size(ctx.caps, choice["wg_size"], dim)
        push = (rows, dim, float(node.params["scale"]))
        return [by_rows(node, ctx, "norm/gaussian_topk.comp", (Arg(x), Arg(y, "w")), push, rows, wg, choice, flops=6 * x.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-4, "f32 sums of a row; few values are left, so that the rms is small beside those that were summed")

    def build_case(self, ne: Shape = (3, 100), scale: float = 1.0, seed: int = 5) -> Case:
        """Normal values about 0.5."""
        sized(ne)

        def make(rng: np.random.Generator) -> Problem:
            node = Node(self.name, (Tensor("x", "F32", ne, "input"),), (Tensor("y", "F32", ne),), {"scale": scale})
            return Problem(node, {"x": (rng.standard_normal(ne) + 0.5).astype(np.float32)})

        return Case(self.name, {"ne": ne, "scale": scale, "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case()
        yield self.build_case((2, 16384), 1.6448533535003662)
        yield self.build_case((1, 1030), -0.5)

    def full_cases(self) -> Iterator[Case]:
        for rows, dim, scale in product((1, 33), (2, 64, 1025, 8192), (-1.0, 0.0, 1.5)):
            yield self.build_case((rows, dim), scale)


@register
class GaussianGeglu(Op):
    """GAUSSIAN_GEGLU(gate F32 [1, dim], up F32 [1, dim]; scale) -> GEGLU(GAUSSIAN_TOPK(gate), up), F32 or Q8_1: of one token."""

    name = "GAUSSIAN_GEGLU"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """That of its chain."""
        return total(cost_rule(n).arithmetic(n, n_kv) for n in self.unfused(node))

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        (gate,) = OPS["GAUSSIAN_TOPK"].reference(inputs[:1], params)
        return OPS["GEGLU"].reference([gate, inputs[1]], {})

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        gate, up, y = *node.inputs, node.outputs[0]
        dim, q8 = gate.shape[-1], y.type == "Q8_1"
        if dim % (32 if q8 else 4) or {t.elements for t in (gate, up, y)} != {dim} or {gate.type, up.type} != {"F32"}:
            raise PlanError(f"[{self.name}] {node.name}: {gate}, {up} to {y}: expected rows of one token of as many whole quads, or units")
        choice = ctx.tuning.pick("norm", dim=dim, rows=1)
        wg = max(workgroup_size(ctx.caps, choice["wg_size"], dim // 4), 8)
        reduce, subgroup = reduction(ctx.caps, wg, lanes=8 if q8 else 1)
        args = (Arg(gate), Arg(up), Arg(y, "w"))
        return [
            Dispatch(
                Variant.of("norm/gaussian_geglu.comp", {**reduce, "DIM": dim, "OUT_Q8_1": int(q8)}, subgroup_size=subgroup),
                args,
                pack_push(float(node.params["scale"])),
                (ceil_div(dim // 4, wg), 1, 1),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=sum(nbytes(a.tensor) for a in args),
                flops=20 * dim,
                waits=SpinWaits(whole=(gate.name,), part=(up.name,)),
            )
        ]

    def unfused(self, node: Node) -> list[Node]:
        gate, up = node.inputs
        cut = Tensor(f"{node.name}.cut", "F32", gate.shape)
        return [Node("GAUSSIAN_TOPK", (gate,), (cut,), node.params), Node("GEGLU", (cut, up), node.outputs)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if node.outputs[0].type == "Q8_1":
            return Tolerance(4e-4, 0.4, "outputs are rounded to 8 bits: few values are left, so that amax is up to twenty times their rms")
        return Tolerance(1e-9, 1e-3, "f32 sums of a row; few values are left, so that the rms is small beside those that were summed")

    def build_case(self, dim: int = 128, scale: float = 1.0, out: str = "f32", seed: int = 61) -> Case:
        """Normal values about 0.5, and up about 0."""
        y_type = one_of_types(out, ("F32", "Q8_1"), "out")

        def make(rng: np.random.Generator) -> Problem:
            gate, up = (Tensor(name, "F32", (1, dim), "input") for name in ("gate", "up"))
            values = {t.name: (rng.standard_normal(t.shape) + shift).astype(np.float32) for t, shift in ((gate, 0.5), (up, 0.0))}
            return Problem(Node(self.name, (gate, up), (Tensor("y", y_type, (1, dim)),), {"scale": scale}), values)

        return Case(self.name, {"dim": dim, "scale": scale, "out": type_word(y_type), "seed": seed}, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(100)
        yield self.build_case(160, 1.6448533535003662, "q8_1")
        yield self.build_case(16384, 1.6448533535003662, "q8_1")
        yield self.build_case(16384, 1.6448533535003662).where(sync="sentinel")

    def full_cases(self) -> Iterator[Case]:
        for dim, scale, out in product((32, 1056, 8192, 24576), (-1.0, 0.0, 1.5), ("f32", "q8_1")):
            yield self.build_case(dim, scale, out)
