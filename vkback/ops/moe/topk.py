"""ARGMAX and TOPK_MOE (shaders/topk).

ARGMAX    logits F32 [n, vocab] -> I32 [n]: index of the largest, of equals the first; -1 for a row with a NaN
TOPK_MOE  logits F32 [n, n_expert] [, bias F32 [n_expert]] -> weights F32 [n, n_used], ids I32 [n, n_used]
          params: n_used, norm, gating, scale [, n_group, n_group_used]
          The n_used largest logits, largest first, of equals the lower id first. gating "softmax": their share of the softmax over
          all experts, with norm over the chosen; "softmax_weight": softmax over the chosen; "sigmoid": the logistic function, with
          norm divided by the sum. Sums are clamped to at least 2^-14 before they divide; scale multiplies at the end.
          bias: experts are ordered by sigmoid, or softmax over all, plus bias; weights are without it. n_group: of so many groups of
          neighbouring experts, the n_group_used best ones' experts alone count. A group is as good as its best logit (softmax:
          DeepSeek-V2), or as the sum of the two best values that experts are ordered by (sigmoid: DeepSeek-V3). Neither goes with a
          softmax over the chosen, groups not with a softmax and a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost, times, total
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.family import POWERS, Choice, CountOr, declare
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of
from vkback.ops.glu import SIGMOID_COST
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant

declare("argmax", match={"vocab": "number", "n": "number"}, params={"wg_size": POWERS, "per_thread": (1, 2, 4, 8, 16, 32, 64)})
declare(
    "topk_moe",
    match={"n_expert": "number", "n_used": "number", "n": "number"},
    params={
        "wg_size": POWERS,
        "block": (16, 32, 64, 128, 256, 512, 1024),
        # Experts of a workgroup where few tokens' norm, router, choice and route are one dispatch (shaders/topk/norm_route.comp).
        "experts_each": CountOr("none"),
    },
)

TOPK_PARAMS = ("n_used", "norm", "gating", "scale", "n_group", "n_group_used")
"""Params of TOPK_MOE, and of every op that chooses experts; the groups' are optional."""


def topk_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a node's params that choose experts."""
    return {key: params[key] for key in TOPK_PARAMS if key in params}


MIN_WEIGHT_SUM = 2.0**-14
"""Sums of expert weights are clamped to this, the smallest normal F16, before they divide."""


def argmax_dispatch(
    node: Node, ctx: LowerContext, logits: Tensor, results: Sequence[Arg], extra: Defines, loop: Sequence[int] = (0,)
) -> Dispatch:
    """The one dispatch of ARGMAX, and the first of SAMPLE. results: bound after the scratch; extra: further defines; loop: push constants
    of shaders/sample/loop.glsl."""
    n, vocab = logits.shape
    choice = ctx.tuning.pick("argmax", vocab=vocab, n=n)
    wg = workgroup_size(ctx.caps, choice["wg_size"], vocab)
    groups = ceil_div(vocab, wg * choice["per_thread"])
    reduce, subgroup = reduction(ctx.caps, wg)
    defines: Defines = {**reduce, **extra, "PER_THREAD": choice["per_thread"]}
    name = node.name
    return Dispatch(
        kernel=Variant.of("topk/argmax.comp", defines, subgroup_size=subgroup),
        args=(
            Arg(logits),
            Arg(Tensor(f"{name}.partial", "I32", (n, groups, 2)), "rw"),
            Arg(Tensor(f"{name}.tickets", "I32", (n,), "counter"), "rw"),
            *results,
        ),
        push=pack_push(vocab, *loop),
        groups=(groups, n, 1),
        op=node.op,
        label=name,
        reason=choice.source,
        nbytes=nbytes(logits),
        flops=logits.elements,
    )


@register
class Argmax(Op):
    """See the module's text."""

    name = "ARGMAX"
    ggml_nmse = 0.0
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.where(np.isnan(inputs[0]).any(axis=-1), -1, np.argmax(inputs[0], axis=-1)).astype(np.int32)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return [argmax_dispatch(node, ctx, node.inputs[0], [Arg(node.outputs[0], "w")], {"MODE": 0})]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "an index is right or wrong")

    def cases(self) -> Iterator[Case]:
        for seed, (n, vocab, kind) in enumerate(
            (
                (1, 1, "normal"),
                (1, 151936, "normal"),
                (3, 4099, "normal"),
                (2, 3001, "ties"),
                (3, 2050, "nan"),
                (1, 70, "negative"),
                (1, 999, "zeros"),
            ),
            1,
        ):
            yield self.build_case(ne=(vocab, n), kind=kind, seed=seed)

    def full_cases(self) -> Iterator[Case]:
        for n, vocab, kind in product((1, 2, 7), (1, 2, 31, 33, 1000, 32000, 151936), ("normal", "ties", "negative", "zeros")):
            yield self.build_case(ne=(vocab, n), kind=kind)

    def perf_cases(self) -> Iterator[Case]:
        for vocab in (32000, 151936):
            yield self.build_case(ne=(vocab,))

    def build_case(self, type: str = "f32", ne: Shape = (10, 100, 1, 1), kind: str = "normal", seed: int = 1) -> Case:
        """kind: normal, negative; ties (whole numbers); zeros (of both signs); nan (in the last row; others infinite)."""
        one_of_types(type, ("F32",))
        shape = shape_of(ne)
        n, vocab = prod(shape[:-1]), shape[-1]
        if kind not in ("normal", "negative", "ties", "zeros", "nan") or (kind == "nan" and n < 2):
            raise CaseLineError(f"ARGMAX: kind={kind}: expected normal, negative, ties, zeros, or of two rows and more nan")

        def make(rng: np.random.Generator) -> Problem:
            x = rng.standard_normal((n, vocab), np.float32)
            if kind == "ties":
                x = np.round(x)
            elif kind == "nan":
                x[-1, vocab // 2] = np.nan
                x[0, -1] = np.inf
                x[1] = -np.inf
            elif kind == "negative":
                x = -np.abs(x) - 1
            elif kind == "zeros":
                x = np.where(rng.random(x.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
                x[:, 0] = -0.0
            logits = Tensor("result_output", "F32", (n, vocab))
            return Problem(Node(self.name, (logits,), (Tensor("ids", "I32", (n,)),)), {"result_output": x})

        shown = {"type": type.lower(), "ne": ne_of(shape)} | ({"kind": kind} if kind != "normal" else {})
        return Case(self.name, {**shown, "seed": seed}, make, seed)


GATES: Mapping[tuple[str, bool], int] = {
    ("softmax", True): 0,
    ("softmax_weight", True): 0,
    ("softmax_weight", False): 0,
    ("softmax", False): 1,
    ("sigmoid", False): 2,
    ("sigmoid", True): 3,
}
"""GATE of shaders/topk/choose.glsl by gating and norm. A softmax over all divided by the sum of the chosen is one over the chosen."""


SIGMOIDS = (GATES["sigmoid", False], GATES["sigmoid", True])


def topk_choice(node: Node, logits: Tensor, ctx: LowerContext) -> Choice:
    n, n_expert = logits.shape
    return ctx.tuning.pick("topk_moe", n_expert=n_expert, n_used=node.params["n_used"], n=n)


@dataclass(frozen=True)
class ExpertChoice:
    """What shaders/topk/choose.glsl is built for.

    block  experts that are counted at once
    gate   as in GATES
    bias   whether a bias takes part in the order
    groups (of how many groups, how many count)
    """

    n_expert: int
    n_used: int
    block: int
    gate: int
    bias: bool = False
    groups: tuple[int, int] = (1, 1)

    @property
    def sums_all(self) -> bool:
        """Whether it reduces over all experts: a softmax over them that weighs or orders."""
        return self.gate == GATES["softmax", False] or (self.bias and self.gate not in SIGMOIDS)

    @property
    def defines(self) -> Defines:
        n_group, n_used = self.groups
        return {
            "N_EXPERT": self.n_expert,
            "USED": self.n_used,
            "BLOCK": self.block,
            "GATE": self.gate,
            "SELECT_BIAS": int(self.bias),
            "N_GROUP": n_group,
            "GROUPS_USED": n_used,
            "GROUP_TOP": 2 if self.gate in SIGMOIDS else 1,
        }

    @property
    def shared_bytes(self) -> int:
        """Shared memory, without a reduction's."""
        blocks = ceil_div(self.n_expert, self.block)
        candidates = blocks * min(self.n_used, self.block)
        grouped = self.groups[0] > 1
        by_value = self.bias or (grouped and self.gate in SIGMOIDS)
        fixed = 4 * blocks * self.block + (12 if by_value else 8) * self.n_used + 4 * self.groups[0] * grouped
        return fixed + (16 * ceil_div(candidates, 4) + 4 * candidates if blocks > 1 else 0)


def expert_choice(node: Node, logits: Tensor, ctx: LowerContext, *, bias: Tensor | None = None) -> ExpertChoice:
    """Of a node with TOPK_MOE's params. Raises PlanError for an unknown gating, a bias or groups that do not fit, or too many used."""
    n_expert, n_used = logits.shape[-1], node.params["n_used"]
    gate = GATES.get((node.params["gating"], bool(node.params["norm"])))
    if gate is None:
        known = ", ".join(sorted({g for g, _ in GATES}))
        raise PlanError(f"[topk] {node.name}: unknown gating {node.params['gating']!r}, expected one of {known}")
    if not 1 <= n_used <= n_expert:
        raise PlanError(f"[topk] {node.name}: {n_used} of {n_expert} experts; expected at least 1 and at most all of them")
    groups = int(node.params.get("n_group", 1)), int(node.params.get("n_group_used", 1))
    fits = gate in SIGMOIDS or (node.params["gating"] == "softmax" and groups[0] == 1)
    if bias is not None and not (fits and bias.elements == n_expert):
        raise PlanError(
            f"[topk] {node.name}: bias {bias} with gating {node.params['gating']!r} and {groups[0]} groups; expected {n_expert} values, "
            "and sigmoid, or softmax and no groups"
        )
    if groups_problem(n_expert, n_used, *groups):
        raise PlanError(f"[topk] {node.name}: {groups_problem(n_expert, n_used, *groups)}")
    block = min(topk_choice(node, logits, ctx)["block"], ceil_div(n_expert, 4) * 4)
    return ExpertChoice(n_expert, n_used, block, gate, bias is not None, groups)


def groups_problem(n_expert: int, n_used: int, n_group: int, n_group_used: int) -> str:
    """Why n_used experts cannot be chosen from n_group_used of n_group groups; "" when they can."""
    if n_group < 1 or n_expert % n_group or not 1 <= n_group_used <= n_group:
        return f"{n_group_used} of {n_group} groups of {n_expert} experts; expected a divisor of them, and at most all groups used"
    if n_used > n_expert // n_group * n_group_used:
        return f"{n_used} experts of {n_group_used} groups of {n_expert // n_group}; expected at most as many as these have"
    return ""


def choice_of(node: Node, logits: Tensor, bias: Tensor | None = None) -> Node:
    """The TOPK_MOE by these logits, of a node whose last outputs are the chosen experts' weights and ids."""
    return Node("TOPK_MOE", (logits, *([bias] if bias is not None else [])), node.outputs[-2:], topk_params(node.params))


def softmax(x: Array) -> Array:
    """Over the last axis, in float64."""
    x = np.asarray(x, np.float64)
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def order_of(logits: Array, bias: Sequence[Array], params: Mapping[str, Any]) -> Array:
    """What experts are ordered by, float64 [n, n_expert]: -inf where their group does not count. bias: one, or none."""
    n_group, sigmoid = params.get("n_group", 1), params["gating"] == "sigmoid"
    order = logits
    if bias or (n_group > 1 and sigmoid):
        order = (1.0 / (1.0 + np.exp(-logits)) if sigmoid else softmax(logits)) + (np.asarray(bias[0], np.float64) if bias else 0.0)
    if n_group == 1:
        return order
    grouped = order.reshape(len(order), n_group, -1)
    scores = np.sort(grouped, axis=-1)[:, :, -2 if sigmoid else -1 :].sum(axis=-1)
    best = np.argsort(-scores, axis=-1, kind="stable")[:, : params["n_group_used"]]
    counts = np.zeros(scores.shape, bool)
    np.put_along_axis(counts, best, True, axis=-1)
    return np.where(counts[:, :, None], grouped, -np.inf).reshape(order.shape)


@register
class TopkMoe(Op):
    """The router of a mixture of experts; see the module's text."""

    name = "TOPK_MOE"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Softmax or sigmoid of the logits it is taken of (all, or those of the experts chosen), a bias for the choice, the division by the
        weights' sum and their scale. Sorting is comparisons."""
        logits, weights = node.inputs[0], node.outputs[0]
        gating = node.params["gating"]
        over = logits if gating == "softmax" else weights
        gate = SIGMOID_COST if gating == "sigmoid" else {"fmul": 1, "fadd": 2, "fexp": 1}
        parts = [times(gate, over.elements), {"fadd": logits.elements * (len(node.inputs) > 1)}, {"fmul": weights.elements}]
        return total([*parts, {"fadd": weights.elements, "fdiv": weights.elements}] if node.params["norm"] else parts)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits = np.asarray(inputs[0], np.float64)
        # Ordered by logits: two that differ may have one probability after rounding.
        ids = np.argsort(-order_of(logits, inputs[1:], params), axis=-1, kind="stable")[:, : params["n_used"]]
        chosen = np.take_along_axis(logits, ids, axis=-1)
        if params["gating"] == "softmax":
            weights = np.take_along_axis(softmax(logits), ids, axis=-1)
        elif params["gating"] == "softmax_weight":
            weights = softmax(chosen)
        elif params["gating"] == "sigmoid":
            weights = 1.0 / (1.0 + np.exp(-chosen))
        else:
            raise NotImplementedError(f"TOPK_MOE with gating {params['gating']!r}")
        if params["norm"]:
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), MIN_WEIGHT_SUM)
        return [weights * params["scale"], ids.astype(np.int32)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits = node.inputs[0]
        n, n_expert = logits.shape
        choice = topk_choice(node, logits, ctx)
        wg = workgroup_size(ctx.caps, choice["wg_size"], n_expert)
        reduce, subgroup = reduction(ctx.caps, wg)
        experts = expert_choice(node, logits, ctx, bias=next(iter(node.inputs[1:]), None))
        defines: Defines = {**reduce, **experts.defines}
        need = experts.shared_bytes + 8 * wg  # the last for a reduction
        room = ctx.caps.max_shared_memory
        if need > room:
            raise PlanError(f"[topk] {node.name}: {n_expert} experts need {need} bytes of shared memory, {ctx.caps.name} has {room}")
        return [
            Dispatch(
                kernel=Variant.of("topk/router.comp", defines, subgroup_size=subgroup),
                args=(Arg(logits), Arg(node.outputs[0], "w"), Arg(node.outputs[1], "w"), *map(Arg, node.inputs[1:])),
                push=pack_push(n, float(node.params["scale"])),
                groups=spread(n),
                op=node.op,
                label=node.name,
                reason=choice.source,
                nbytes=nbytes(logits) + sum(nbytes(t) for t in node.outputs),
                flops=4 * logits.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        n_used = node.params["n_used"]
        worst = 1e-5 * max(2.0, n_used**0.5)
        reason = "exp of logits up to 20 in f32 is off by 20 * 6e-8, sum and quotient by more; one of n is up to sqrt(n) times their rms"
        return Tolerance(1e-11, worst, reason)

    def cases(self) -> Iterator[Case]:
        for seed, (n, n_expert, n_used, norm, gating, scale, ties) in enumerate(
            (
                (1, 8, 2, True, "softmax", 1.0, False),
                (1, 128, 8, True, "softmax", 1.0, False),
                (4, 128, 8, True, "softmax", 1.0, True),
                (3, 60, 4, False, "softmax", 2.0, False),
                (2, 32, 4, False, "softmax_weight", 1.0, False),
                (2, 256, 8, True, "sigmoid", 2.5, False),
                (2, 511, 10, False, "sigmoid", 1.0, True),
                (1, 512, 32, True, "softmax", 1.0, True),
                (1, 160, 160, False, "softmax", 1.0, False),
                (1, 9, 9, True, "softmax", 1.0, True),
            ),
            1,
        ):
            yield self.build_case(n, n_expert, n_used, norm, gating, scale, ties, seed)
        for seed, (n, n_expert, n_used, norm, gating, bias, groups) in enumerate(
            (
                (3, 256, 8, True, "sigmoid", True, (8, 4)),
                (1, 64, 6, False, "sigmoid", True, (1, 1)),
                (4, 160, 6, False, "softmax", False, (8, 3)),
                (2, 160, 6, True, "softmax", False, (8, 3)),
                (3, 24, 4, True, "sigmoid", False, (4, 1)),
                (2, 320, 20, False, "sigmoid", True, (2, 2)),
                (3, 64, 6, True, "softmax", True, (1, 1)),
                (3, 64, 1, True, "softmax", True, (1, 1)),
                (2, 160, 6, False, "softmax", True, (1, 1)),
                (2, 511, 10, True, "softmax", True, (1, 1)),
                (1, 7, 3, True, "softmax", True, (1, 1)),
            ),
            20,
        ):
            yield self.build_case(n, n_expert, n_used, norm, gating, 2.5, False, seed, bias, *groups)

    def full_cases(self) -> Iterator[Case]:
        experts = (
            (8, 2),
            (8, 8),
            (16, 1),
            (31, 3),
            (32, 4),
            (60, 4),
            (64, 6),
            (72, 6),
            (128, 8),
            (160, 6),
            (256, 8),
            (288, 8),
            (512, 10),
            (160, 160),
        )
        gates = (("softmax", False), ("softmax", True), ("softmax_weight", False), ("sigmoid", False), ("sigmoid", True))
        for (n_expert, used), n, (gating, norm), ties in product(experts, (1, 4, 22), gates, (False, True)):
            yield self.build_case(n, n_expert, used, norm, gating, 2.0 if n == 4 else 1.0, ties)
        both = (False, True)
        for (n_expert, used), n, norm, bias, groups in product(experts[5:], (1, 22), both, both, ((1, 1), (4, 4), (8, 4))):
            if not groups_problem(n_expert, used, *groups):
                yield self.build_case(n, n_expert, used, norm, "sigmoid", 2.0, False, 1, bias, *groups)
                yield self.build_case(n, n_expert, used, norm, "softmax", 2.0, False, 1, bias and groups[0] == 1, *groups)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case(n, 128, 8, True, "softmax", 1.0, False)

    def build_case(
        self,
        n: int,
        n_expert: int,
        n_used: int,
        norm: bool,
        gating: str,
        scale: float,
        ties: bool,
        seed: int = 1,
        bias: bool = False,
        n_group: int = 1,
        n_group_used: int = 1,
    ) -> Case:
        """ties: the logits are whole numbers. With a softmax and a bias the last expert has a bias that no weight outbids, and in the first
        token a weight of no size."""

        groups = {"n_group": n_group, "n_group_used": n_group_used} if n_group > 1 else {}

        def make(rng: np.random.Generator) -> Problem:
            logits = Tensor("ffn_moe_logits", "F32", (n, n_expert))
            x = 3 * rng.standard_normal(logits.shape, np.float32)
            outs = (Tensor("ffn_moe_weights", "F32", (n, n_used)), Tensor("ffn_moe_topk", "I32", (n, n_used)))
            params = {"n_used": n_used, "norm": norm, "gating": gating, "scale": scale, **groups}
            values: dict[str, Array] = {logits.name: np.round(x) if ties else x}
            inputs = [logits]
            if bias:
                inputs.append(Tensor("bias", "F32", (n_expert,), "weight"))
                values["bias"] = rng.uniform(-0.3, 0.3, n_expert).astype(np.float32)
                if gating == "softmax":
                    values["bias"][-1], values[logits.name][0, -1] = 2.0, -30.0
            return Problem(Node(self.name, tuple(inputs), outs, params), values)

        shown = {"n": n, "n_expert": n_expert, "n_used": n_used, "norm": norm, "gating": gating, "scale": scale, "ties": ties}
        shown |= {"seed": seed, **({"bias": bias} if bias else {}), **groups}
        return Case(self.name, shown, make, seed)
