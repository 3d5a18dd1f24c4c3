"""ALTUP_PREDICT and ALTUP_CORRECT (shaders/altup): the streams that Gemma 3n has in place of one residual (AltUp, arXiv 2301.13310).

A layer works on stream 0, the active one. Before it all streams are mixed, behind it each is corrected by what the layer changed. Streams
are two tensors: active F32 [n, n_embd], others F32 [n, streams - 1, n_embd]. How they mix depends on the token: m = tanh(logits).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import sized
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register

MAX_STREAMS = 8
"""That a thread keeps in registers."""


class AltUp(Op):
    """An op of altup.comp: (active, others, logits F32 [n, streams], coef, ...) -> (active, others)."""

    correct: bool

    def launch(self, node: Node, ctx: LowerContext, fits: bool) -> list[Dispatch]:
        active, others, logits, coef, *more = node.inputs
        first, rest, *scaled = node.outputs
        n, n_embd = active.shape
        streams = logits.shape[-1]
        fits = fits and 2 <= streams <= MAX_STREAMS and logits.shape == (n, streams) and others.shape == (n, streams - 1, n_embd)
        fits = fits and (first.shape, rest.shape) == (active.shape, others.shape) and all(t.shape == active.shape for t in scaled)
        if not fits or any(t.type != "F32" for t in (*node.inputs, *node.outputs)):
            raise PlanError(f"[{self.name}] {node.name}: {', '.join(map(str, node.inputs))} to {node.outputs[0]}: they do not fit")
        args = (*map(Arg, node.inputs[:4]), Arg(first, "w"), Arg(rest, "w"), *map(Arg, more), *(Arg(t, "w") for t in scaled))
        defines = {"STREAMS": streams, "CORRECT": int(self.correct), "ADDED": int(bool(more) and not self.correct), "SCALED": len(scaled)}
        push = (active.elements, n_embd)
        flops = 2 * (coef.elements + streams * (1 if self.correct else streams)) * active.elements
        return [by_threads(node, ctx, "altup/altup.comp", args, push, active.elements, defines, flops=flops)]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of each column a multiply-add for each coefficient, and one for what it weighs."""
        active, _, logits, coef = node.inputs[:4]
        weighed = logits.shape[-1] if self.correct else logits.shape[-1] ** 2
        return {"fmul": active.elements * (coef.elements + weighed), "fexp": logits.elements}

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "f32 sums of some twenty products, tanh within 4 ulp")

    def made(self, n_embd: int, n: int, streams: int, more: str, coef: Shape, seed: int, *, scaled: bool = False) -> Case:
        if min(n_embd, n) < 1 or not 2 <= streams <= MAX_STREAMS:
            raise CaseLineError(f"n_embd={n_embd}, n={n}, streams={streams}: expected sizes from 1, and 2 to {MAX_STREAMS} streams")
        shapes: dict[str, Shape] = {"active": (n, n_embd), "others": (n, streams - 1, n_embd), "logits": (n, streams), "coef": coef}
        shapes |= {more: (n, n_embd)} if more else {}
        shapes |= {"output_scale": (n_embd,)} if scaled else {}
        for shape in shapes.values():
            sized(shape)

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(name, "F32", shape, "input") for name, shape in shapes.items())
            values: dict[str, Array] = {t.name: rng.uniform(-1.5, 1.5, t.shape).astype(np.float32) for t in inputs}
            made = {"y_active": "active", "y_others": "others"} | ({"y_scaled": "active"} if scaled else {})
            outputs = tuple(Tensor(name, "F32", shapes[like]) for name, like in made.items())
            return Problem(Node(self.name, inputs, outputs), values)

        shown: dict[str, Any] = {"n_embd": n_embd, "n": n, "streams": streams}
        shown |= {"scaled": int(scaled)} if self.correct else {"added": int(bool(more))}
        return Case(self.name, {**shown, "seed": seed}, make, seed)


@register
class AltUpPredict(AltUp):
    """ALTUP_PREDICT(active, others, logits, coef F32 [streams^3] [, added F32 [n, n_embd]]) -> (active, others), of each
    stream s itself and the sum of all streams r times row (s, r) of coef . m. `added` comes to all but the active one first."""

    name = "ALTUP_PREDICT"
    correct = False

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        active, others, logits, coef, *added = (np.asarray(i, np.float64) for i in inputs)
        x = np.concatenate([active[:, None], others + added[0][:, None] if added else others], axis=1)
        streams = x.shape[1]
        weights = np.einsum("srk,nk->nsr", coef.reshape(streams, streams, streams), np.tanh(logits))
        y = x + np.einsum("nsr,nrd->nsd", weights, x)
        return [y[:, 0], y[:, 1:]]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        streams = node.inputs[2].shape[-1]
        added = node.inputs[4:]
        fits = node.inputs[3].elements == streams**3 and all(t.elements == node.inputs[0].elements for t in added)
        return self.launch(node, ctx, fits)

    def build_case(self, n_embd: int = 128, n: int = 1, streams: int = 4, added: bool = False, seed: int = 47) -> Case:
        """Values in +-1.5."""
        return self.made(n_embd, n, streams, "added" if added else "", (streams * streams, streams), seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(31, 3)
        yield self.build_case(96, 17, added=True)
        yield self.build_case(2048, 1, added=True)

    def full_cases(self) -> Iterator[Case]:
        for n_embd, n, streams, added in product((1, 128, 2048), (1, 33), (2, 4, 8), (False, True)):
            yield self.build_case(n_embd, n, streams, added)


@register
class AltUpCorrect(AltUp):
    """ALTUP_CORRECT(active, others, logits, coef F32 [streams^2], made F32 [n, n_embd] [, output_scale F32 [n_embd]]) -> (active,
    others [, the new active one times output_scale]), of each stream itself and (1 + its row of coef . m) times what made is beyond the
    active one."""

    name = "ALTUP_CORRECT"
    correct = True

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        active, others, logits, coef, made, *scale = (np.asarray(i, np.float64) for i in inputs)
        x = np.concatenate([active[:, None], others], axis=1)
        y = x + (1.0 + np.tanh(logits) @ coef.reshape(x.shape[1], -1).T)[..., None] * (made - active)[:, None]
        return [y[:, 0], y[:, 1:], *(y[:, 0] * s for s in scale)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        active, streams, made = node.inputs[0], node.inputs[2].shape[-1], node.inputs[4]
        fits = node.inputs[3].elements == streams**2 and made.elements == active.elements
        fits = fits and len(node.inputs) - 5 == len(node.outputs) - 2
        return self.launch(node, ctx, fits and all(t.shape == active.shape[-1:] for t in node.inputs[5:]))

    def unfused(self, node: Node) -> list[Node]:
        """With a scale: without it, and the product."""
        if len(node.outputs) < 3:
            return []
        plain = dataclasses.replace(node, inputs=node.inputs[:5], outputs=node.outputs[:2])
        return [plain, Node("MUL", (node.outputs[0], node.inputs[5]), node.outputs[2:])]

    def build_case(self, n_embd: int = 128, n: int = 1, streams: int = 4, scaled: bool = False, seed: int = 47) -> Case:
        """Values in +-1.5."""
        return self.made(n_embd, n, streams, "made", (streams, streams), seed, scaled=scaled)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(31, 3)
        yield self.build_case(2048, 1, scaled=True)

    def full_cases(self) -> Iterator[Case]:
        for n_embd, n, streams, scaled in product((1, 128, 2048), (1, 33), (2, 4, 8), (False, True)):
            yield self.build_case(n_embd, n, streams, scaled)
