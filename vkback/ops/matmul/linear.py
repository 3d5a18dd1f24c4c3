"""LINEAR: a stored weight times few tokens, with what is fused around it (vkback/ops/matmul/linear_node.py).

One family of kernels (shaders/gemv) serves every weight type, dense and by experts. Which kernel it is, the tables and the device decide
(vkback/ops/matmul/gemv.py).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Rounded, Tolerance, f16_values
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.family import Adjustment
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import case_sets, linear_cases, low_rank
from vkback.ops.matmul.choice import F16_TOLERANCE, F16_WEIGHTS, ProductChoice, choice_of, choose
from vkback.ops.matmul.gemm_lower import lower_node
from vkback.ops.matmul.gemv import PER_TILE, GemvConfig, choice_problem, configure, prologue_problem, shader_defines
from vkback.ops.matmul.linear_node import LinearNode, LinearParams, bindings
from vkback.ops.op import OPS, Op, register
from vkback.ops.quantize import quantize_dispatch, rounded_rows, rounded_tolerance
from vkback.ops.storage import Shard, nbytes, shards, weight_push
from vkback.shader import Variant


def spin_waits(node: LinearNode, config: GemvConfig) -> SpinWaits | None:
    """What the kernel waits for in a barrier-free stage; x must come through shared memory."""
    if config.prologue == "none" or config.columns > 1 or node.n > 1:
        return None
    first = [node.extra[role].name for role in ("ids", "expert_weights", "logits") if role in node.extra]
    residual = tuple(node.extra[role].name for role in ("multiplier", "residual") if role in node.extra)
    if node.experts == "heads" or (node.experts == "each" and len(node.x.shape) == 3 and node.x.shape[1] > 1):
        return SpinWaits(tuple(first), (node.x.name,), also_part=residual)
    also = (node.extra["post_residual"].name,) if "post_residual" in node.extra else ()
    return SpinWaits((*first, node.x.name), also=also, also_part=residual)


def launch(node: LinearNode, config: GemvConfig, index: int, pieces: Sequence[Shard], reason: str, ctx: LowerContext) -> Dispatch:
    """The launch for shard `index` of the weight."""
    shard, routed = pieces[index], node.experts != "none"
    rows = node.m if routed else shard.rows
    slices = {"none": ceil_div(node.n, config.columns), "summed": node.n}.get(node.experts, node.n * node.n_used)
    tiles = ceil_div(rows, config.tile_rows)
    # A limit on workgroups is divided among the slices of the grid; without one, each tile has its workgroup.
    most = ceil_div(config.groups, slices) if config.groups else tiles
    groups = min(most, tiles)
    # More workgroups than one axis of the grid may have go into the second.
    gy = ceil_div(groups, MAX_GROUPS_X)
    config = dataclasses.replace(config, loop_tiles=groups < tiles, m_aligned=rows % config.tile_rows == 0)
    # A limit that is never reached is reported as an adjustment.
    if config.groups and not config.loop_tiles:
        too_many = Adjustment("groups", config.groups, PER_TILE, "there are no more tiles than that")
        config = dataclasses.replace(config, adjustments=(*config.adjustments, too_many))
    y_row0 = node.params.row0 + (0 if routed else shard.row0 >> node.glu)
    q8_in, q8_out = node.x.type == "Q8_1", node.y.type == "Q8_1"
    x_width = node.x.shape[-1] if node.experts == "heads" else node.k
    push = pack_push(
        *weight_push(node.w.type, shard.layout, node.k),
        rows,
        node.k,
        node.n,
        quants.q8_1_stride(x_width) // 16 if q8_in else x_width,
        quants.q8_1_stride(node.rows_total) // 16 if q8_out else node.rows_total,
        y_row0,
        0 if routed else shard.row0,
        ceil_div(node.rows_total, 32),
        node.x.shape[1] if routed and len(node.x.shape) == 3 else 1,
        float(node.params.eps),
        *((float(node.params.gelu_scale), node.params.multiplier_at) if "multiplier" in node.extra else ()),
    )
    whole = node.rows_total == (node.m >> node.glu) * (node.n_used if node.experts == "heads" else 1) and len(pieces) == 1
    weight_bytes = shard.layout.nbytes
    # Of the experts only those chosen are read: at most one per token and choice.
    if routed:
        weight_bytes = weight_bytes * min(node.n * node.n_used, node.w.shape[0]) // node.w.shape[0]
    stores_sum = node.summed is not None and index == 0  # once, whatever the shards
    config = dataclasses.replace(config, stores_sum=stores_sum)
    choice_moved = sum(map(nbytes, (node.extra["logits"], *node.chosen))) if node.chosen else 0
    return Dispatch(
        Variant.of("gemv/gemv.comp", shader_defines(config, ctx.caps), subgroup_size=config.required),
        (
            Arg(node.w, "r", index),
            Arg(node.x),
            Arg(node.y, "w", part="" if whole else f"rows {y_row0}"),
            *map(Arg, node.extra.values()),
            *(Arg(t, "w") for t in node.chosen),
            *((Arg(node.summed, "w"),) if node.summed is not None and stores_sum else ()),
        ),
        push,
        (ceil_div(groups, gy), gy, slices + bool(node.chosen)),  # one more slice to store the choice
        node.node.op,
        node.node.name,
        reason,
        nbytes=weight_bytes + nbytes(node.x) + nbytes(node.y) + choice_moved,
        weight_bytes=weight_bytes,
        flops=2 * rows * node.k * node.n * node.n_used,
        waits=spin_waits(node, config),
        config=config,
    )


def by_gemv(node: LinearNode, choice: ProductChoice, ctx: LowerContext) -> list[Dispatch]:
    """The dispatches of a product by the GEMV kernels: x rounded to Q8_1 where nobody did, and a launch for each shard of the weight."""
    path, before = choice.path, list[Dispatch]()
    # A norm in the prologue takes x as floats, and rounds it there.
    if path == "int" and node.x.type == "F32" and not node.norms_x:
        x8 = Tensor(f"{node.node.name}.x_q8_1", "Q8_1", node.x.shape)
        before = quantize_dispatch(node.x, x8, ctx)
        node = node.with_x(x8)
    config = configure(node, path, ctx)
    reason = f"{path}: {choice.path_source}; {config.wg} threads, {config.lanes} lanes, {config.rows} rows: {config.source}"
    pieces = shards(node.w, ctx.caps)
    return before + [launch(node, config, i, pieces, reason, ctx) for i in range(len(pieces))]


@register
class Linear(Op):
    """The fused form; the roles are in vkback/ops/matmul/linear_node.py."""

    name = "LINEAR"
    ggml_nmse = 5e-3  # of its MUL_MAT_VEC_FUSION
    weight_type = "type_a"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        p = LinearParams.of(params)
        by = self._by_role(inputs, p)
        x = by["x"]
        summed: list[Array] = []
        if "post_norm" in by:
            x = x / self._rms(x, p) * by["post_norm"] + by["post_residual"]
            summed = [x] if p.sum else []
        if "norm_bias" in by:
            x = self._layer_norm(x, by, p)
        elif "norm" in by:
            x = x / self._rms(x, p) * by["norm"]
        return self._of_normed(x, by, p) + summed

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        """The integer path rounds an F32 x: with an RMS norm after it is multiplied by the weight and before it is divided by the rms,
        with a layer norm behind all of it."""
        gemv = LinearNode.of(node)
        if choice_of(gemv, ctx).rounds != "Q8_1" or gemv.x.type != "F32":
            return None
        p = gemv.params
        by = self._by_role(inputs, p)
        x, summed = by["x"], []
        if "post_norm" in by:
            x = x / self._rms(x, p) * by["post_norm"] + by["post_residual"]
            summed = [x] if p.sum else []
        if "norm_bias" in by:
            x = rounded_rows(self._layer_norm(x, by, p))
        elif "norm" in by:
            x = rounded_rows(x.astype(np.float32) * by["norm"].astype(np.float32)) / self._rms(x, p)
        else:
            x = rounded_rows(x)
        return Rounded(self._of_normed(x, by, p) + summed, rounded_tolerance(gemv.k, p.activates))

    def as_f16(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> list[Array] | None:
        """x as F16, and weights that were decoded in it, with roundings that differ from type to type: as noise."""
        if choice_of(LinearNode.of(node), ctx).rounds != "F16":
            return None
        roles = node.params["roles"]
        inputs = [f16_values(v) if role == "x" else v for role, v in zip(roles, inputs, strict=True)]
        y, *more = self.reference(inputs, node.params)
        residual = next((v for role, v in zip(roles, inputs, strict=True) if role == "residual"), None)
        made = y if residual is None else y - np.asarray(residual).reshape(y.shape)
        return [y + f16_weight_noise(made, node.name), *more]

    @staticmethod
    def _by_role(inputs: Sequence[Array], params: LinearParams) -> dict[str, Array]:
        return dict(zip(params.roles, (np.asarray(i, np.float64) if i.dtype.kind == "f" else i for i in inputs), strict=True))

    @staticmethod
    def _rms(x: Array, params: LinearParams) -> Array:
        return np.asarray(np.sqrt(np.mean(np.square(x), -1, keepdims=True) + params.eps))

    @staticmethod
    def _layer_norm(x: Array, by: Mapping[str, Array], params: LinearParams) -> Array:
        (normed,) = OPS["NORM_MUL_ADD"].reference([x, by["norm"], by["norm_bias"]], {"eps": params.eps})
        return normed

    @staticmethod
    def _of_normed(x: Array, by: dict[str, Array], params: LinearParams) -> list[Array]:
        """The outputs from an x that is normed already, where there is a norm."""
        w = by["w"]
        chosen: list[Array] = []
        if "logits" in by:
            bias = [by["selection_bias"]] if "selection_bias" in by else []
            chosen = OPS["TOPK_MOE"].reference([by["logits"], *bias], params.choice)
            by["ids"] = chosen[1]
        if "ids" in by:
            ids = by["ids"]
            x = np.broadcast_to(x, (*ids.shape, x.shape[-1]))
            y = np.einsum("nsmk,nsk->nsm", w[ids], x)
        else:
            y = x @ w.T
        if "bias" in by:
            y = y + (by["bias"].reshape(len(w), -1)[by["ids"]] if "ids" in by else by["bias"])
        if params.glu:
            (y,) = OPS[params.glu_op].reference([y[..., 0::2], y[..., 1::2]], params.clamp)
        elif params.gelu:
            (y,) = OPS["GELU"].reference([y], {})
        elif params.squared_relu:
            y = np.square(np.maximum(y, 0.0))
        if "expert_weights" in by:
            y = np.einsum("nsm,ns->nm", y, by["expert_weights"])
        if "multiplier" in by:
            y = y * _multiplier(by["multiplier"], params.multiplier_at, y.shape)
        if "residual" in by:
            y = y + by["residual"]
        if params.softcap:
            y = params.softcap * np.tanh(y / params.softcap)
        return [y, *chosen]

    def choose(self, node: Node, ctx: LowerContext) -> ProductChoice:
        return choose(LinearNode.of(node), ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        gemv = LinearNode.of(node)
        if (by_rank := _of_low_rank(gemv, ctx)) is not None:
            return by_rank
        choice = choice_of(gemv, ctx)
        if choice.shape is not None:
            return lower_node(gemv, choice, ctx)
        if gemv.chosen and (problem := choice_problem(node, ctx)):
            raise PlanError(f"[gemv] {node.name}: it cannot choose its experts: {problem}; give TOPK_MOE a node of its own")
        if gemv.norms_x:
            problem = prologue_problem(gemv.w.type, gemv.k, gemv.n, choice.path, ctx, bindings(gemv))
            if problem:
                raise PlanError(f"[gemv] {node.name}: x cannot be normed in the prologue: {problem}; give the norm a node of its own")
        return by_gemv(gemv, choice, ctx)

    def cases(self) -> Iterator[Case]:
        return case_sets.quick_fused()

    def full_cases(self) -> Iterator[Case]:
        return case_sets.full_fused()

    def perf_cases(self) -> Iterator[Case]:
        return case_sets.perf_fused()

    def case(self, params: Mapping[str, Any]) -> Case:
        return linear_cases.fused_from(params)

    def build_case(self, *args: Any, **kwargs: Any) -> Case:
        return linear_cases.fused_case(*args, **kwargs)

    def unfused(self, node: Node) -> list[Node]:
        from vkback.ops.matmul.linear_chain import unfused

        return unfused(node)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        gemv = LinearNode.of(node)
        rounds = choice_of(gemv, ctx).rounds
        if rounds == "F16" and gemv.y.type == "F32":
            return F16_TOLERANCE
        q8_in = rounds == "Q8_1" and gemv.x.type == "F32"
        return linear_tolerance(q8_in, gemv.y.type == "Q8_1", gemv.params.activates)


def _multiplier(values: Array, at: int, shape: tuple[int, ...]) -> Array:
    """Those values of a multiplier that count."""
    return values if values.size == prod(shape) else values.reshape(-1)[at : at + prod(shape)].reshape(shape)


def _of_low_rank(node: LinearNode, ctx: LowerContext) -> list[Dispatch] | None:
    """The dispatches of a product with a factor of low rank in training; None for others."""
    if ctx.act not in ("f32", "f16") or set(node.node.params) - {"roles"} or not node.extra.keys() <= {"residual"}:
        return None
    if node.x.type != "F32" or node.y.type != "F32" or not low_rank.is_factor(node.w, node.n, ctx):
        return None
    before = node.extra.get("residual")
    if before is not None and low_rank.makes_rank(node.w, back=False):
        return None
    return low_rank.product(node.node, ctx, node.x, node.w, node.y, back=False, before=before)


def f16_weight_noise(made: Array, name: str) -> Array:
    """What weights rounded to F16 may do to the sums of a product: noise seeded by its name, so large that the band of one product ends at
    the op's own tolerance."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(made.shape)
    return np.asarray(noise * np.sqrt(F16_WEIGHTS * np.mean(np.square(made))))


def linear_tolerance(q8_in: bool, q8_out: bool, glu: bool = False) -> Tolerance:
    """One bound for all GEMVs. q8_in: x is rounded on the way; an x that comes as Q8_1 is the reference's, too.

    Rounding to q8_1 has a step of amax/127: on uniform data an NMSE of (1/127)^2/12 * 3 = 1.5e-5, on Gaussian data about 4e-5, once for
    activations and once more where the output is stored so. In a GLU the gate's error goes through silu, which passes it on at up to
    twice its size, four times in the square: (4 gate + 1 up + 1 output) * 4e-5 = 2.4e-4, over a few dozen values twice that by chance.
    """
    if glu and (q8_in or q8_out):
        return Tolerance(5e-4, 0.25, "8-bit activations through silu(gate) * up: six times 4e-5, and as much again for few values")
    if q8_in or q8_out:
        return Tolerance(2e-4, 0.25, "8-bit activations: step amax/127 a unit, and again for a Q8_1 output")
    return Tolerance(1e-9, 2e-3, "f32 sums of k products, relative error about sqrt(k) * 2^-24")
