"""ARGMAX and TOPK_MOE (shaders/topk).

    ARGMAX    logits F32 [n, vocab] -> I32 [n]: index of the largest, of equals the first; -1 for a row with a NaN
    TOPK_MOE  logits F32 [n, n_expert] -> weights F32 [n, n_used], ids I32 [n, n_used]
              params: n_used, norm, gating, scale
              The n_used largest logits, largest first, of equals the lower id first. gating "softmax": their share of the softmax over
              all experts, with norm over the chosen; "softmax_weight": softmax over the chosen; "sigmoid": the logistic function, with
              norm divided by the sum. Sums are clamped to at least 2^-14 before they divide; scale multiplies at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.base import (
    POWERS,
    Arg,
    Array,
    Case,
    Choice,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    Tolerance,
    ceil_div,
    declare,
    nbytes,
    pack_push,
    register,
    spread,
)
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant

declare("argmax", match={"vocab": "number", "n": "number"}, params={"wg_size": POWERS, "per_thread": (1, 2, 4, 8, 16, 32, 64)})
declare(
    "topk_moe",
    match={"n_expert": "number", "n_used": "number", "n": "number"},
    params={"wg_size": POWERS, "block": (16, 32, 64, 128, 256, 512, 1024)},
)

TOPK_PARAMS = ("n_used", "norm", "gating", "scale")
"""Params of TOPK_MOE, and of every op that chooses experts."""

LEAST_WEIGHT_SUM = 2.0**-14
"""Sums of expert weights are clamped to this, the smallest normal F16, before they divide."""


def argmax_dispatch(node: Node, ctx: LowerContext, logits: Tensor, results: Sequence[Arg], extra: Defines, capacity: int) -> Dispatch:
    """The one dispatch of ARGMAX, and the first of SAMPLE. results: bound after the scratch; extra: further defines."""
    n, vocab = logits.shape
    choice = ctx.tuning.pick("argmax", vocab=vocab, n=n)
    wg = workgroup_size(ctx.caps, choice["wg_size"], vocab)
    groups = ceil_div(vocab, wg * choice["per_thread"])
    reduce, subgroup = reduction(ctx.caps, wg)
    defines: Defines = {**reduce, **extra, "PER_THREAD": choice["per_thread"]}
    name = node.name
    return Dispatch(
        kernel=Variant("topk/argmax.comp", tuple(sorted(defines.items())), subgroup),
        args=(
            Arg(logits),
            Arg(Tensor(f"{name}.partial", "I32", (n, groups, 2)), "rw"),
            Arg(Tensor(f"{name}.tickets", "I32", (n,), "counter"), "rw"),
            *results,
        ),
        push=pack_push(vocab, capacity),
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
    peer_nmse = 0.0

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.where(np.isnan(inputs[0]).any(axis=-1), -1, np.argmax(inputs[0], axis=-1)).astype(np.int32)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return [argmax_dispatch(node, ctx, node.inputs[0], [Arg(node.outputs[0], "w")], {"THEN": 0}, 0)]

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
            yield self.build_case(n, vocab, kind, seed)

    def full_cases(self) -> Iterator[Case]:
        for n, vocab, kind in product((1, 2, 7), (1, 2, 31, 33, 1000, 32000, 151936), ("normal", "ties", "negative", "zeros")):
            yield self.build_case(n, vocab, kind)

    def perf_cases(self) -> Iterator[Case]:
        for vocab in (32000, 151936):
            yield self.build_case(1, vocab, "normal")

    def build_case(self, n: int, vocab: int, kind: str, seed: int = 1) -> Case:
        """kind: normal, negative; ties (whole numbers); zeros (of both signs); nan (in the last row; others infinite)."""

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

        return Case(self.name, {"n": n, "vocab": vocab, "kind": kind, "seed": seed}, make, seed)


GATES: Mapping[tuple[str, bool], int] = {
    ("softmax", True): 0, ("softmax_weight", True): 0, ("softmax_weight", False): 0, ("softmax", False): 1, ("sigmoid", False): 2,
    ("sigmoid", True): 3,
}  # fmt: skip
"""GATE of shaders/topk/choose.glsl by gating and norm. A softmax over all divided by the sum of the chosen is one over the chosen."""


def topk_choice(node: Node, logits: Tensor, ctx: LowerContext) -> Choice:
    n, n_expert = logits.shape
    return ctx.tuning.pick("topk_moe", n_expert=n_expert, n_used=node.params["n_used"], n=n)


@dataclass(frozen=True)
class ExpertChoice:
    """What shaders/topk/choose.glsl is built for.

    block  experts that are counted at once
    gate   as in GATES
    """

    n_expert: int
    n_used: int
    block: int
    gate: int

    @property
    def sums_all(self) -> bool:
        """Whether it reduces over all experts: a softmax over them."""
        return self.gate == GATES["softmax", False]

    @property
    def defines(self) -> Defines:
        return {"N_EXPERT": self.n_expert, "USED": self.n_used, "BLOCK": self.block, "GATE": self.gate}

    @property
    def shared_bytes(self) -> int:
        """Shared memory, without a reduction's."""
        blocks = ceil_div(self.n_expert, self.block)
        candidates = blocks * min(self.n_used, self.block)
        return 4 * blocks * self.block + 8 * self.n_used + (16 * ceil_div(candidates, 4) + 4 * candidates if blocks > 1 else 0)


def expert_choice(node: Node, logits: Tensor, ctx: LowerContext) -> ExpertChoice:
    """Of a node with TOPK_MOE's params. Raises PlanError for an unknown gating or too many used."""
    n_expert, n_used = logits.shape[-1], node.params["n_used"]
    gate = GATES.get((node.params["gating"], bool(node.params["norm"])))
    if gate is None:
        known = ", ".join(sorted({g for g, _ in GATES}))
        raise PlanError(f"[topk] {node.name}: unknown gating {node.params['gating']!r}, expected one of {known}")
    if not 1 <= n_used <= n_expert:
        raise PlanError(f"[topk] {node.name}: {n_used} of {n_expert} experts; expected at least 1 and at most all of them")
    block = min(topk_choice(node, logits, ctx)["block"], ceil_div(n_expert, 4) * 4)
    return ExpertChoice(n_expert, n_used, block, gate)


def choice_of(node: Node, logits: Tensor) -> Node:
    """The TOPK_MOE by these logits, of a node whose last outputs are the chosen experts' weights and ids."""
    return Node("TOPK_MOE", (logits,), node.outputs[-2:], {k: node.params[k] for k in TOPK_PARAMS})


def softmax(x: Array) -> Array:
    """Over the last axis, in float64."""
    x = np.asarray(x, np.float64)
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


@register
class TopkMoe(Op):
    """The router of a mixture of experts; see the module's text."""

    name = "TOPK_MOE"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        logits = np.asarray(inputs[0], np.float64)
        # Ordered by logits: two that differ may have one probability after rounding.
        ids = np.argsort(-logits, axis=-1, kind="stable")[:, : params["n_used"]]
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
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), LEAST_WEIGHT_SUM)
        return [weights * params["scale"], ids.astype(np.int32)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        logits = node.inputs[0]
        n, n_expert = logits.shape
        choice = topk_choice(node, logits, ctx)
        wg = workgroup_size(ctx.caps, choice["wg_size"], n_expert)
        reduce, subgroup = reduction(ctx.caps, wg)
        experts = expert_choice(node, logits, ctx)
        defines: Defines = {**reduce, **experts.defines}
        need = experts.shared_bytes + 8 * wg  # the last for a reduction
        room = ctx.caps.max_shared_memory
        if need > room:
            raise PlanError(f"[topk] {node.name}: {n_expert} experts need {need} bytes of shared memory, {ctx.caps.name} has {room}")
        return [
            Dispatch(
                kernel=Variant("topk/router.comp", tuple(sorted(defines.items())), subgroup),
                args=(Arg(logits), Arg(node.outputs[0], "w"), Arg(node.outputs[1], "w")),
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

    def full_cases(self) -> Iterator[Case]:
        experts = (
            (8, 2), (8, 8), (16, 1), (31, 3), (32, 4), (60, 4), (64, 6), (72, 6), (128, 8), (160, 6), (256, 8), (288, 8), (512, 10),
            (160, 160),
        )  # fmt: skip
        gates = (("softmax", False), ("softmax", True), ("softmax_weight", False), ("sigmoid", False), ("sigmoid", True))
        for (n_expert, used), n, (gating, norm), ties in product(experts, (1, 4, 22), gates, (False, True)):
            yield self.build_case(n, n_expert, used, norm, gating, 2.0 if n == 4 else 1.0, ties)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case(n, 128, 8, True, "softmax", 1.0, False)

    def build_case(
        self, n: int, n_expert: int, n_used: int, norm: bool, gating: str, scale: float, ties: bool, seed: int = 1
    ) -> Case:
        """ties: the logits are whole numbers."""

        def make(rng: np.random.Generator) -> Problem:
            logits = Tensor("ffn_moe_logits", "F32", (n, n_expert))
            x = 3 * rng.standard_normal(logits.shape, np.float32)
            outs = (Tensor("ffn_moe_weights", "F32", (n, n_used)), Tensor("ffn_moe_topk", "I32", (n, n_used)))
            params = {"n_used": n_used, "norm": norm, "gating": gating, "scale": scale}
            return Problem(Node(self.name, (logits,), outs, params), {logits.name: np.round(x) if ties else x})

        shown = {"n": n, "n_expert": n_expert, "n_used": n_used, "norm": norm, "gating": gating, "scale": scale, "ties": ties}
        shown |= {"seed": seed}
        return Case(self.name, shown, make, seed)
