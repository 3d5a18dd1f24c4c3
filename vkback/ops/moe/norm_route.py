"""Norm, router and choice of experts of few tokens by one dispatch (shaders/topk/norm_route.comp), as a pure lowering helper.

A step of few tokens has four small stages between attention's output product and the first product by experts: norm and packing, the
router's product, the choice, the route. Each takes a launch, and hardly any time beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.choice import ROUTE_BYTES
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.gemm_reg import blocks_of, units_stride
from vkback.ops.matmul.route import max_tiles
from vkback.ops.moe.topk import expert_choice, topk_choice
from vkback.ops.storage import nbytes, shards, weight_push
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.quants import UNIT
from vkback.shader import Variant

SHADER = "topk/norm_route.comp"

WG = 256

FEW = 16
"""Up to so many tokens the products by experts keep the barrier ahead of them: thousands of their workgroups would wait for few."""

BINDINGS = 15
"""With both biases, arrivals, those expected, and the state of spin-waits."""


@dataclass(frozen=True)
class NormRoute:
    """What it computes.

    x       F32 [n, k], norm F32 [k], eps: of the RMS norm
    router  weight F32 [n_expert, k]; bias F32 [n_expert] or none
    units   F16, x normed and packed for products of `shape`
    weights, ids, route, tile_n, params  as of a TOPK_ROUTE (vkback/ops/matmul/pack_nodes.py)
    selection_bias  TOPK_MOE's bias
    """

    x: Tensor
    norm: Tensor
    eps: float
    router: Tensor
    units: Tensor
    shape: GemmShape
    weights: Tensor
    ids: Tensor
    route: Tensor
    tile_n: int
    params: dict[str, Any]
    bias: Tensor | None = None
    selection_bias: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Scratch."""
        return Tensor(f"{self.route.name}.logits", "F32", (self.x.shape[0], self.router.shape[0]))

    @property
    def topk(self) -> Node:
        """The TOPK_MOE in it."""
        extra = () if self.selection_bias is None else (self.selection_bias,)
        return Node("TOPK_MOE", (self.logits, *extra), (self.weights, self.ids), self.params)


def experts_each(problem: NormRoute, ctx: LowerContext) -> int:
    """Experts of a workgroup; 0 where the tables want launches of their own, or the kernel cannot do it."""
    wanted = topk_choice(problem.topk, problem.logits, ctx)["experts_each"]
    (_, k), caps = problem.router.shape, ctx.caps
    fits = problem.router.type == "F32" and k % UNIT == 0 and len(shards(problem.router, caps)) == 1 and problem.shape.kernel == "coop_reg"
    if wanted == "none" or not fits or caps.max_storage_bindings < BINDINGS:
        return 0
    choice = expert_choice(problem.topk, problem.logits, ctx, bias=problem.selection_bias)
    need = choice.shared_bytes + ROUTE_BYTES * choice.n_expert + 8 * WG + 4 * k + 16
    return int(wanted) if need <= caps.max_shared_memory else 0


def lower(problem: NormRoute, each: int, ctx: LowerContext, label: str) -> Dispatch:
    """The dispatch. each: experts of a workgroup."""
    caps, (n_expert, k), n = ctx.caps, problem.router.shape, problem.x.shape[0]
    wg = workgroup_size(caps, WG)
    lanes = min(32, caps.subgroup_min, wg)
    reduce, subgroup = reduction(caps, wg, lanes=lanes)
    choice = expert_choice(problem.topk, problem.logits, ctx, bias=problem.selection_bias)
    _, columns, depth = problem.shape.matrix
    blocks = blocks_of(k, problem.shape)
    args = [
        Arg(problem.x),
        Arg(problem.norm),
        Arg(problem.router),
        Arg(problem.units, "w"),
        Arg(problem.weights, "w"),
        Arg(problem.ids, "w"),
        Arg(problem.route, "w"),
        Arg(problem.logits, "rw"),
        Arg(Tensor(f"{problem.route.name}.tickets", "I32", (n + 1,), "counter"), "rw"),
        Arg(overflow_word(problem.units), "rw"),
    ]
    defines: Defines = {
        **reduce,
        **choice.defines,
        "LANES": lanes,
        "EXPERTS_EACH": each,
        "K": k,
        "X_QUADS": blocks * problem.shape.row_lanes * UNIT // 4,
        "Y_STRIDE": units_stride(k, problem.shape, caps),
        "SG": caps.subgroup_size,
        "FN": columns,
        "FK": depth,
        "ROW_LANES": problem.shape.row_lanes,
        "TILE_N": problem.tile_n,
        "EXPERTS": n_expert,
        "HAS_BIAS": int(problem.bias is not None),
    }
    for name, tensor in (("BIND_BIAS", problem.bias), ("BIND_SELECTION_BIAS", problem.selection_bias)):
        if tensor is not None:
            defines[name] = len(args)
            args.append(Arg(tensor))
    (shard,) = shards(problem.router, caps)
    part = weight_push(problem.router.type, shard.layout, k)[1]
    groups = ceil_div(n_expert, each)
    tiles = max_tiles(problem.ids.elements, n_expert, problem.tile_n)
    return Dispatch(
        Variant.of(SHADER, defines, subgroup_size=subgroup),
        tuple(args),
        pack_push(n, part, tiles, problem.eps, float(problem.params["scale"]), ctx.f16_scale(problem.units)),
        (groups, n, 1),
        "NORM_ROUTE",
        label,
        f"{groups} workgroups a token, {each} experts each",
        nbytes=nbytes(problem.x) + nbytes(problem.units) + nbytes(problem.router) + nbytes(problem.route),
        flops=2 * n * n_expert * k,
        waits=SpinWaits(counted=(problem.x.name,), arrives=int(n > FEW)),
    )
