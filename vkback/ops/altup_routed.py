"""ALTUP_PREDICT_ROUTED and ALTUP_CORRECT_ROUTED (shaders/altup/routed.comp): vkback/ops/altup.py of one token with the norms, the router
and the residual before it, each as one dispatch.

Every workgroup finds the sums over a row by itself and mixes some columns of all streams, so that a layer waits for one stage where there
were three behind barriers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.altup import MAX_STREAMS
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.ggml_words import one_of_types, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_node import weight
from vkback.ops.op import OPS, Op, register
from vkback.ops.quantize import Q8_1_TOLERANCE
from vkback.ops.storage import nbytes, shards, weight_push
from vkback.ops.workgroup import power_of_two, reduction, workgroup_size
from vkback.quants import UNIT
from vkback.shader import Variant

ROUTERS = ("F16", "F32")
"""Types of the router's weight."""


class AltUpRouted(Op):
    """Inputs (active, others, router_norm, router, coef [, what is normed, post_norm ...]); outputs (active, others ...)."""

    correct: bool

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        values = [np.asarray(i, np.float64) for i in inputs]
        active, others, router_norm, router, coef, *more = values
        made = []
        if more:
            made = OPS["RMS_NORM_MUL"].reference(more[:2], params)
        if self.correct:
            made = [made[0] + more[2]]
        (read,) = OPS["RMS_NORM_MUL"].reference([made[0] if self.correct else active, router_norm], params)
        streams = len(router)
        coef = coef.reshape(-1, streams)
        plain = OPS["ALTUP_CORRECT" if self.correct else "ALTUP_PREDICT"]
        return plain.reference([active, others, read @ router.T, coef, *made, *more[3:]], {})

    def problem(self, node: Node, ctx: LowerContext) -> str:
        """Why the kernel cannot make it; "" if it can."""
        active, others, _, router, coef = node.inputs[:5]
        (n, dim), streams = active.shape, router.shape[0]
        first, rest, *scaled = node.outputs
        fits = 2 <= streams <= MAX_STREAMS and router.shape == (streams, dim) and others.shape == (n, streams - 1, dim)
        fits = fits and coef.elements == streams ** (2 if self.correct else 3)
        fits = fits and (first.shape, rest.shape) == (active.shape, others.shape)
        fits = fits and all(t.elements == dim for t in (*node.inputs[5:], *scaled))
        if n != 1 or not fits:
            return f"{', '.join(map(str, node.inputs))} do not fit"
        if router.type not in ROUTERS or len(shards(router, ctx.caps)) > 1:
            return f"{router} is no router in one piece, expected one of {', '.join(ROUTERS)}"
        if dim % 4 or (scaled and scaled[0].type == "Q8_1" and dim % UNIT):
            return f"rows of {dim} values are no whole quads, or units of a Q8_1 output"
        if (buffers := len(node.inputs) + len(node.outputs) + 1) > ctx.caps.max_storage_bindings:
            return f"it binds {buffers} storage buffers, {ctx.caps.name} takes {ctx.caps.max_storage_bindings}"
        return ""

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if problem := self.problem(node, ctx):
            raise PlanError(f"[{self.name}] {node.name}: {problem}")
        active, others, _, router, _, *more = node.inputs
        first, rest, *scaled = node.outputs
        dim, streams = active.shape[1], router.shape[0]
        q8 = bool(scaled) and scaled[0].type == "Q8_1"
        choice = ctx.tuning.pick("norm", dim=dim, rows=1)
        # Two quads of each stream's router and of what it reads are as many registers as a thread should take.
        wg = max(workgroup_size(ctx.caps, max(choice["wg_size"], power_of_two(ceil_div(dim, 8))), dim // 4), 8)
        reduce, subgroup = reduction(ctx.caps, wg, lanes=8 if q8 else 1)
        each = max(8, wg // power_of_two(streams))
        (shard,) = shards(router, ctx.caps)
        defines = {
            **reduce,
            "DIM": dim,
            "STREAMS": streams,
            "QUADS_EACH": each,
            "CORRECT": int(self.correct),
            "ADDED": int(bool(more) and not self.correct),
            "ROUTER_F16": int(router.type == "F16"),
            "OUT_Q8_1": int(q8),
        }
        args = (*map(Arg, node.inputs[:5]), Arg(first, "w"), Arg(rest, "w"), *map(Arg, more), *(Arg(t, "w") for t in scaled))
        part = weight_push(router.type, shard.layout, dim)[1]
        made = tuple(t.name for t in more[:1])
        also = more[2] if self.correct else active
        return [
            Dispatch(
                Variant.of("altup/routed.comp", defines, subgroup_size=subgroup),
                args,
                pack_push(part, float(node.params["eps"])),
                (ceil_div(dim // 4, each), 1, 1),
                node.op,
                node.name,
                f"{wg} threads, {each} quads of {streams} streams: {choice.source}",
                nbytes=sum(nbytes(a.tensor) for a in args),
                flops=2 * dim * (streams + 4 + streams * (1 if self.correct else streams)),
                waits=SpinWaits(whole=made, also=(also.name,), also_part=(others.name,)),
            )
        ]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of its chain: two norms at most, the router's product, and the mixing."""
        dim, streams = node.inputs[0].shape[1], node.inputs[3].shape[0]
        norms = 2 if len(node.inputs) > 5 else 1
        mixed = dim * (node.inputs[4].elements + streams * (1 if self.correct else streams))
        return {"fmul": dim * (3 * norms + streams) + mixed, "fexp": streams, "fdiv": norms, "sqrt": norms}

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if node.outputs[-1].type == "Q8_1":
            return Q8_1_TOLERANCE
        return Tolerance(1e-11, 1e-4, "f32 sums of a row, norms and tanh within 4 ulp, sums of some twenty products")

    def chain(self, node: Node, made: Tensor | None, steps: list[Node]) -> list[Node]:
        """The plain nodes behind what makes `made`."""
        active, others, router_norm, router, coef, *more = node.inputs
        read = made if self.correct and made is not None else active
        normed = Tensor(f"{node.name}.read", "F32", active.shape)
        logits = Tensor(f"{node.name}.logits", "F32", (1, router.shape[0]))
        steps.append(Node("RMS_NORM_MUL", (read, router_norm), (normed,), node.params))
        steps.append(Node("MUL_MAT", (router, normed), (logits,)))
        inputs = (active, others, logits, coef, *([made] if made is not None else []), *more[3:])
        outputs = node.outputs
        q8 = self.correct and outputs[2].type == "Q8_1"
        if q8:
            outputs = (*outputs[:2], Tensor(f"{node.name}.scaled", "F32", outputs[2].shape))
        steps.append(Node("ALTUP_CORRECT" if self.correct else "ALTUP_PREDICT", inputs, outputs))
        if q8:
            steps.append(Node("QUANTIZE_Q8_1", (outputs[2],), node.outputs[2:]))
        return steps

    def made_case(self, n_embd: int, streams: int, more: Mapping[str, Shape], coef: int, router: str, out: str, seed: int) -> Case:
        router = one_of_types(router, ROUTERS, "router")
        if n_embd < 4 or n_embd % 4 or not 2 <= streams <= MAX_STREAMS:
            raise CaseLineError(f"n_embd={n_embd}, streams={streams}: expected whole fours of values, and 2 to {MAX_STREAMS} streams")
        row = (1, n_embd)

        def make(rng: np.random.Generator) -> Problem:
            w = weight("router", router, (streams, n_embd))
            shapes: dict[str, Shape] = {
                "active": row,
                "others": (1, streams - 1, n_embd),
                "router_norm": (n_embd,),
                "coef": (coef,),
                **more,
            }
            tensors = {name: Tensor(name, "F32", shape, "weight" if len(shape) == 1 else "input") for name, shape in shapes.items()}
            values: dict[str, Array] = {name: rng.uniform(-1.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()}
            values["router_norm"] = (values["router_norm"] / np.sqrt(n_embd)).astype(np.float32)
            values["router"] = quants.random_blocks(router, streams, n_embd, rng, std=0.5)
            inputs = [tensors[name] for name in ("active", "others", "router_norm")] + [w] + [tensors[name] for name in ("coef", *more)]
            outputs = [Tensor("y_active", "F32", row), Tensor("y_others", "F32", shapes["others"])]
            outputs += [Tensor("y_scaled", out, row)] if self.correct else []
            return Problem(Node(self.name, tuple(inputs), tuple(outputs), {"eps": 1e-6}), values)

        shown: dict[str, Any] = {"n_embd": n_embd, "streams": streams, "router": type_word(router)}
        shown |= {"out": type_word(out)} if self.correct else {"added": int(bool(more))}
        return Case(self.name, {**shown, "seed": seed}, make, seed)


@register
class AltUpPredictRouted(AltUpRouted):
    """ALTUP_PREDICT_ROUTED(active F32 [1, n_embd], others F32 [1, streams - 1, n_embd], router_norm F32 [n_embd], router F16 or F32
    [streams, n_embd], coef F32 [streams^3] [, made F32 [1, n_embd], post_norm F32 [n_embd]]; eps) -> (active, others): ALTUP_PREDICT by the
    logits that the router makes of the active stream normed; what is added is `made` normed."""

    name = "ALTUP_PREDICT_ROUTED"
    correct = False

    def unfused(self, node: Node) -> list[Node]:
        made, steps = None, list[Node]()
        if len(node.inputs) > 5:
            made = Tensor(f"{node.name}.made", "F32", node.inputs[0].shape)
            steps.append(Node("RMS_NORM_MUL", node.inputs[5:7], (made,), node.params))
        return self.chain(node, made, steps)

    def build_case(self, n_embd: int = 128, streams: int = 4, added: bool = False, router: str = "f16", seed: int = 53) -> Case:
        """Values in +-1.5, norms of the router as small as sums of so many products need."""
        more: dict[str, Shape] = {"made": (1, n_embd), "post_norm": (n_embd,)} if added else {}
        return self.made_case(n_embd, streams, more, streams**3, router, "F32", seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(96)
        yield self.build_case(2048, added=True)
        yield self.build_case(100, 3, added=True, router="f32")
        yield self.build_case(2048, added=True).where(sync="sentinel")

    def full_cases(self) -> Iterator[Case]:
        for n_embd, streams, added, router in product((4, 100, 2048, 5120), (2, 4, 8), (False, True), ("f16", "f32")):
            yield self.build_case(n_embd, streams, added, router)


@register
class AltUpCorrectRouted(AltUpRouted):
    """ALTUP_CORRECT_ROUTED(active, others, router_norm, router, coef F32 [streams^2], made F32 [1, n_embd], post_norm F32 [n_embd],
    residual F32 [1, n_embd], output_scale F32 [n_embd]; eps) -> (active, others, scaled F32 or Q8_1 [1, n_embd]): ALTUP_CORRECT of `made`
    normed and the residual, by the logits that the router makes of their sum normed."""

    name = "ALTUP_CORRECT_ROUTED"
    correct = True

    def unfused(self, node: Node) -> list[Node]:
        made, post_norm, residual = node.inputs[5:8]
        summed = Tensor(f"{node.name}.made", "F32", node.inputs[0].shape)
        return self.chain(node, summed, [Node("RMS_NORM_MUL_ADD", (made, post_norm, residual), (summed,), node.params)])

    def build_case(self, n_embd: int = 128, streams: int = 4, router: str = "f16", out: str = "f32", seed: int = 53) -> Case:
        """Values in +-1.5, norms of the router as small as sums of so many products need."""
        row = (1, n_embd)
        more: dict[str, Shape] = {"made": row, "post_norm": (n_embd,), "residual": row, "output_scale": (n_embd,)}
        return self.made_case(n_embd, streams, more, streams**2, router, one_of_types(out, ("F32", "Q8_1"), "out"), seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(100, 3, "f32")
        yield self.build_case(96, out="q8_1")
        yield self.build_case(2048, out="q8_1")
        yield self.build_case(2048).where(sync="sentinel")
        yield self.build_case(2048, out="q8_1").where(sync="sentinel")

    def full_cases(self) -> Iterator[Case]:
        for n_embd, streams, router, out in product((32, 160, 2048, 5120), (2, 4, 8), ("f16", "f32"), ("f32", "q8_1")):
            yield self.build_case(n_embd, streams, router, out)
