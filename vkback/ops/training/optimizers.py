"""OPT_STEP_SGD and OPT_STEP_ADAMW (shaders/training/optimizer.comp): weights and state in f32, changed in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from vkback.constants import power
from vkback.graph import Node, Tensor
from vkback.graph.tensor import Kind
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost, times
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import in_planes, shards


def adamw_params(step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Array:
    """The params of OPT_STEP_ADAMW at a step, counted from 1: F32 [7]. The corrections are those of the betas as F32 holds them: 1 - beta2
    has lost digits there, which then cancel."""
    corrections = (1.0 / float(1 - power(float(np.float32(beta)), step)) for beta in (beta1, beta2))
    return np.array([lr, beta1, beta2, eps, weight_decay, *corrections], np.float32)


class _OptStep(Op):
    """(w, dw, *state, params [, scale]) -> w and state, in place."""

    states: ClassVar[int] = 0
    count: ClassVar[int] = 2
    cost: ClassVar[Cost]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return times(self.cost, node.inputs[0].elements)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        w, dw, *rest = node.inputs
        state, params, scale = rest[: self.states], rest[self.states], rest[self.states + 1 :]
        if any(t.elements != w.elements or t.type != "F32" for t in (w, dw, *state)) or any(map(in_planes, (dw, *state))):
            given = ", ".join(map(str, (w, dw, *state)))
            raise PlanError(f"[{self.name}] {node.name}: {given}: expected F32, as many values in each, and no stored weight but the first")
        if params.elements != self.count or [t.name for t in node.outputs] != [t.name for t in (w, *state)]:
            raise PlanError(f"[{self.name}] {node.name}: expected {self.count} params, not {params}, and as outputs what changes in place")
        defines: dict[str, str | int] = {"ADAMW": int(bool(state)), "SCALED": len(scale), "IN_PLANES": int(in_planes(w))}
        if not in_planes(w):
            pieces: list[tuple[Arg, str, tuple[int, ...]]] = [(Arg(w, "rw"), "", (w.elements,))]
        else:
            k = w.shape[-1]
            parts = shards(w, ctx.caps)
            pieces = [
                (Arg(w, "rw", i), f"rows of shard {i}" if len(parts) > 1 else "", (s.rows * k, s.row0 * k, k, s.layout.part_stride // 4))
                for i, s in enumerate(parts)
            ]
        dispatches = []
        for weight, part, push in pieces:
            args = (weight, Arg(dw), Arg(params), *(Arg(t, "rw", part=part) for t in state), *map(Arg, scale))
            dispatches.append(by_threads(node, ctx, "training/optimizer.comp", args, push, push[0], defines, flops=12 * push[0]))
        return dispatches

    def build_case(
        self,
        type: str = "f32",
        ne: Shape = (10, 5, 4, 3),
        step: int = 3,
        decay: float = 0.01,
        scaled: bool = False,
        stored: bool = False,
        seed: int = 43,
    ) -> Case:
        """step: as the bias is corrected for; scaled: the gradient is multiplied by a number in memory; stored: w is a stored weight."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        if stored:
            shape = (prod(shape[:-1]), shape[-1])
        if step < 1 or decay < 0:
            raise CaseLineError(f"{self.name}: step={step}, decay={decay}: expected a step from 1, and a decay from 0")

        def make(rng: np.random.Generator) -> Problem:
            names = ("w", "dw", "m", "v")[: 2 + self.states]
            kinds: dict[str, Kind] = {"w": "weight" if stored else "state", "dw": "input"}
            tensors = [Tensor(name, "F32", shape, kinds.get(name, "state")) for name in names]
            values = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name in names}
            if "v" in values:
                values["v"] = rng.uniform(0.1, 1, shape).astype(np.float32)
            if stored:
                values["w"] = values["w"].view(np.uint8)
            values["params"] = np.array([0.1, decay], np.float32) if not self.states else adamw_params(step, 0.1, 0.9, 0.98, 1e-6, decay)
            inputs = [*tensors, Tensor("params", "F32", (self.count,), "input")]
            if scaled:
                inputs.append(Tensor("scale", "F32", (1,), "input"))
                values["scale"] = np.array([0.37], np.float32)
            outputs = (tensors[0], *tensors[2:])
            return Problem(Node(self.name, tuple(inputs), outputs), values)

        shown: dict[str, Any] = {"type": "f32", "ne": ne_of(shape)} | ({"step": step} if self.states else {})
        shown |= {"decay": decay, "scaled": int(scaled), **({"stored": 1} if stored else {}), "seed": seed}
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(37, 3, 1, 1))
        yield self.build_case(ne=(37, 3, 1, 1), decay=0.5, scaled=True)
        yield self.build_case(ne=(70, 5, 1, 1), stored=True)

    def full_cases(self) -> Iterator[Case]:
        for step in (1, 1000):
            yield self.build_case(ne=(4096, 33, 1, 1), step=step)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(1536, 576, 1, 1))


@register
class OptStepSgd(_OptStep):
    """OPT_STEP_SGD(w, dw, params [2] [, scale [1]]) -> w. params: learning rate, weight decay."""

    name = "OPT_STEP_SGD"
    cost: ClassVar[Cost] = {"fmul": 3, "fadd": 2}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, dw, (lr, decay), *scale = (np.asarray(i, np.float64) for i in inputs)
        return [w * (1.0 - lr * decay) - lr * dw * (scale[0] if scale else 1.0)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-13, 1e-6, "five f32 operations, each 2^-24 of at most the weight")


@register
class OptStepAdamw(_OptStep):
    """OPT_STEP_ADAMW(w, dw, m, v, params [7] [, scale [1]]) -> w, m, v. params: learning rate, beta1, beta2, eps, weight decay,
    1 / (1 - beta1^t), 1 / (1 - beta2^t) (`adamw_params`)."""

    name = "OPT_STEP_ADAMW"
    states = 2
    count = 7
    cost: ClassVar[Cost] = {"fmul": 10, "fadd": 6, "fdiv": 1, "sqrt": 1}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, dw, m, v, (lr, beta1, beta2, eps, decay, c1, c2), *scale = (np.asarray(i, np.float64) for i in inputs)
        g = dw * (scale[0] if scale else 1.0)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        return [w * (1.0 - lr * decay) - lr * m * c1 / (np.sqrt(v * c2) + eps), m, v]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 5e-6, "about twenty f32 operations; square root and division are allowed 2.5 ulp each")
