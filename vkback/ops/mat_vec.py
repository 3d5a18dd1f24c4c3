"""MAT_VEC: a stored weight times few tokens, with what is fused around it (vkback/ops/mat_vec_node.py), and its suite's cases.

One family of kernels (shaders/mat_vec) serves every weight type, dense and by experts. Which kernel it is, the tables and the device decide
(vkback/ops/mat_vec_config.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Recipe, Tensor
from vkback.ops.base import (
    MAX_GROUPS_X,
    OPS,
    Adjustment,
    Arg,
    Array,
    Case,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    Shard,
    SpinWaits,
    Tolerance,
    ceil_div,
    nbytes,
    pack_push,
    register,
    shards,
)
from vkback.ops.glu import SWIGLU_OAI
from vkback.ops.mat_vec_config import PER_TILE, MatVecConfig, choice_problem, configure, prologue_problem, shader_defines
from vkback.ops.mat_vec_node import FUSED_ROLES, MatVecNode
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.reference import REFERENCES
from vkback.shader import Variant

QUANTS = quants.WEIGHT_TYPES
RARE = frozenset(name for name in QUANTS if quants.quant(name).rare)


def spin_waits(node: MatVecNode, config: MatVecConfig) -> SpinWaits | None:
    """What the kernel waits for in a barrier-free stage; x must come through shared memory."""
    if config.prologue == "none" or config.columns > 1 or node.n > 1:
        return None
    first = [node.extra[role].name for role in ("ids", "expert_weights", "logits") if role in node.extra]
    if node.experts == "each" and len(node.x.shape) == 3 and node.x.shape[1] > 1:
        return SpinWaits(tuple(first), (node.x.name,))
    return SpinWaits((*first, node.x.name))


def launch(node: MatVecNode, config: MatVecConfig, index: int, pieces: Sequence[Shard], reason: str, ctx: LowerContext) -> Dispatch:
    """The launch for shard `index` of the weight."""
    shard, routed = pieces[index], node.experts != "none"
    rows = node.m if routed else shard.rows
    slices = {"none": ceil_div(node.n, config.columns), "each": node.n * node.n_used, "summed": node.n}[node.experts]
    tiles = ceil_div(rows, config.tile_rows)
    most = ceil_div(config.groups, slices) if config.groups else tiles
    groups = min(most, tiles)
    gy = ceil_div(groups, MAX_GROUPS_X)
    config = dataclasses.replace(config, loops_tiles=groups < tiles, rows_full=rows % config.tile_rows == 0)
    if config.groups and not config.loops_tiles:
        too_many = Adjustment("groups", config.groups, PER_TILE, "there are no more tiles than that")
        config = dataclasses.replace(config, adjustments=(*config.adjustments, too_many))
    y_row0 = int(node.node.params.get("row0", 0)) + (0 if routed else shard.row0 >> node.glu)
    q8_in, q8_out = node.x.type == "Q8_1", node.y.type == "Q8_1"
    push = pack_push(
        *weight_push(node.w.type, shard.layout, node.k),
        rows,
        node.k,
        node.n,
        quants.q8_1_stride(node.k) // 16 if q8_in else node.k,
        quants.q8_1_stride(node.rows_total) // 16 if q8_out else node.rows_total,
        y_row0,
        0 if routed else shard.row0,
        ceil_div(node.rows_total, 32),
        node.x.shape[1] if routed and len(node.x.shape) == 3 else 1,
        float(node.node.params.get("eps", 0.0)),
    )
    whole = node.rows_total == node.m >> node.glu and len(pieces) == 1
    weight_bytes = shard.layout.nbytes
    if routed:
        weight_bytes = weight_bytes * min(node.n * node.n_used, node.w.shape[0]) // node.w.shape[0]
    choice_moved = sum(map(nbytes, (node.extra["logits"], *node.chosen))) if node.chosen else 0
    return Dispatch(
        Variant("mat_vec/mat_vec.comp", tuple(sorted(shader_defines(config, ctx.caps).items())), config.required),
        (
            Arg(node.w, "r", index),
            Arg(node.x),
            Arg(node.y, "w", part="" if whole else f"rows {y_row0}"),
            *map(Arg, node.extra.values()),
            *(Arg(t, "w") for t in node.chosen),
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


@register
class MatVec(Op):
    """The fused form; the roles are in vkback/ops/mat_vec_node.py."""

    name = "MAT_VEC"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        by = dict(zip(params["roles"], (np.asarray(i, np.float64) if i.dtype.kind == "f" else i for i in inputs), strict=True))
        w, x = by["w"], by["x"]
        if "norm" in by:
            x = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + params["eps"]) * by["norm"]
        chosen: list[Array] = []
        if "logits" in by:
            chosen = OPS["TOPK_MOE"].reference([by["logits"]], params)
            by["ids"] = chosen[1]
        if "ids" in by:
            ids = by["ids"]
            x = np.broadcast_to(x, (*ids.shape, x.shape[-1]))
            y = np.einsum("nsmk,nsk->nsm", w[ids], x)
        else:
            y = x @ w.T
        if "bias" in by:
            y = y + (by["bias"].reshape(len(w), -1)[by["ids"]] if "ids" in by else by["bias"])
        if params.get("glu"):
            (y,) = REFERENCES["SWIGLU_OAI" if "limit" in params else "SWIGLU"]([y[..., 0::2], y[..., 1::2]], params)
        if "expert_weights" in by:
            y = np.einsum("nsm,ns->nm", y, by["expert_weights"])
        if "residual" in by:
            y = y + by["residual"]
        return [y, *chosen]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        mat_vec = MatVecNode.of(node)
        path, why = mat_vec.path(ctx)
        before: list[Dispatch] = []
        if mat_vec.chosen and (problem := choice_problem(node, ctx)):
            raise PlanError(f"[mat_vec] {node.name}: it cannot choose its experts: {problem}; give TOPK_MOE a node of its own")
        if "norm" in mat_vec.extra:
            problem = prologue_problem(mat_vec.w.type, mat_vec.k, mat_vec.n, path, ctx)
            if problem:
                raise PlanError(f"[mat_vec] {node.name}: x cannot be normed in the prologue: {problem}; give the norm a node of its own")
        elif path == "int" and mat_vec.x.type == "F32":
            x8 = Tensor(f"{node.name}.x_q8_1", "Q8_1", mat_vec.x.shape)
            before = quantize_dispatch(mat_vec.x, x8, ctx)
            mat_vec = dataclasses.replace(mat_vec, x=x8)
        config = configure(mat_vec, path, ctx)
        reason = f"{path}: {why}; {config.wg} threads, {config.lanes} lanes, {config.rows} rows: {config.source}"
        pieces = shards(mat_vec.w, ctx.caps)
        return before + [launch(mat_vec, config, i, pieces, reason, ctx) for i in range(len(pieces))]

    def cases(self) -> Iterator[Case]:
        for quant in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
            for n in (1, 3):
                yield fused_case(quant, 96, 512, n, ("residual",))
                yield fused_case(quant, 96, 512, n, ("bias",))
                yield fused_case(quant, 128, 512, n, (), glu=True)
                yield fused_case(quant, 128, 512, n, ("bias",), glu=True)
                yield fused_case(quant, 128, 512, n, (), glu=True, out="Q8_1")
                yield fused_case(quant, 64, 512, n, ("ids",), glu=True)
                yield fused_case(quant, 64, 512, n, ("ids",), glu=True, out="Q8_1")
                yield fused_case(quant, 100, 256, n, ("ids", "expert_weights"))
                yield fused_case(quant, 100, 256, n, ("ids", "expert_weights", "residual"))
                yield fused_case(quant, 100, 256, n, ("bias", "ids", "expert_weights", "residual"))
                yield fused_case(quant, 64, 512, n, ("bias", "ids"), glu=True, oai=True, out="Q8_1")
            yield fused_case(quant, 128, 512, 1, ("norm",))
            yield fused_case(quant, 128, 1024, 1, ("norm",), glu=True, out="Q8_1")
            yield fused_case(quant, 64, 512, 1, ("logits",), glu=True, out="Q8_1")
            yield fused_case(quant, 64, 512, 1, ("norm", "bias", "logits"), glu=True, ties=True)
        yield fused_case("MXFP4", 192, 2880, 1, ("norm", "bias", "ids"), glu=True, oai=True, out="Q8_1")
        yield fused_case("MXFP4", 192, 2880, 1, ("norm", "bias", "logits"), glu=True, oai=True, out="Q8_1", gating="softmax_weight")
        yield fused_case("MXFP4", 100, 256, 2, (), glu=True, oai=True)
        for n in (1, 3):
            yield split_case(fused_case("Q4_K", 100, 256, n, ("bias",)), (64, 33, 3))
            yield split_case(fused_case("Q8_0", 192, 256, n, ("residual",), out="Q8_1"), (64, 32, 96))

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        mat_vec = MatVecNode.of(node)
        path, _ = mat_vec.path(ctx)
        return mat_vec_tolerance(path == "int" and mat_vec.x.type == "F32", mat_vec.y.type == "Q8_1", mat_vec.glu)


def mat_vec_tolerance(q8_in: bool, q8_out: bool, glu: bool = False) -> Tolerance:
    """One bound for all mat-vecs. q8_in: x is rounded on the way; an x that comes as Q8_1 is the reference's, too.

    Rounding to q8_1 has a step of amax/127: on uniform data an NMSE of (1/127)^2/12 * 3 = 1.5e-5, on Gaussian data about 4e-5, once for
    activations and once more where the output is stored so. In a GLU the gate's error goes through silu, which passes it on at up to
    twice its size, four times in the square: (4 gate + 1 up + 1 output) * 4e-5 = 2.4e-4, over a few dozen values twice that by chance.
    """
    if glu and (q8_in or q8_out):
        return Tolerance(5e-4, 0.25, "8-bit activations through silu(gate) * up: six times 4e-5, and as much again for few values")
    if q8_in or q8_out:
        return Tolerance(2e-4, 0.25, "8-bit activations: step amax/127 a unit, and again for a Q8_1 output")
    return Tolerance(1e-9, 2e-3, "f32 sums of k products, relative error about sqrt(k) * 2^-24")


def _rows_of(node: Node, row0: int, rows: int) -> Node:
    """The part of a MAT_VEC node that makes some rows of its output."""
    glu, total = int(bool(node.params.get("glu"))), node.outputs[0].shape[-1]

    def cut(role: str, t: Tensor) -> Tensor:
        return dataclasses.replace(t, name=f"{t.name}.{row0}", shape=(rows << glu, *t.shape[1:])) if role in ("w", "bias") else t

    inputs = tuple(cut(role, t) for role, t in zip(node.params["roles"], node.inputs, strict=True))
    return Node("MAT_VEC", inputs, node.outputs, {**node.params, "row0": row0, "rows_total": total})


def split_case(case: Case, split: tuple[int, ...]) -> Case:
    """A MAT_VEC case without ids of which nodes make so many output rows each, all into one tensor."""

    def make(rng: np.random.Generator) -> Problem:
        whole = case.make(rng)
        node, glu = whole.node, int(bool(whole.node.params.get("glu")))
        parts, values, row0 = [], dict(whole.values), 0
        for rows in split:
            part = _rows_of(node, row0, rows)
            parts.append(part)
            for t, old in zip(part.inputs, node.inputs, strict=True):
                if t.name != old.name:
                    values[t.name] = whole.values[old.name][row0 << glu : (row0 + rows) << glu]
            row0 += rows
        if row0 != node.outputs[0].shape[-1]:
            raise ValueError(f"split {split} of {node.outputs[0].shape[-1]} rows")
        return Problem(node, values, tuple(parts))

    params = {k: v for k, v in case.params.items() if k != "seed"} | {"split": split, "seed": case.seed}
    return dataclasses.replace(case, params=params, make=make)


def weight_push(quant: str, layout: quants.DeviceLayout, k: int) -> list[int]:
    """The `Weights` block of shaders/quant/weights.glsl, in 16-byte words: units, part, plane[4]."""
    stem = layout.planes[0].name.rstrip("0123456789")
    parts = sum(p.name.rstrip("0123456789") == stem for p in layout.planes)
    others = [p.offset // 16 for p in layout.planes[parts:]]
    return [ceil_div(k, 32), layout.part_stride // 16, *others, *([0] * (4 - len(others)))]


def weight(name: str, quant: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, quant, shape, "weight", Recipe("plain", (name,)))


def fused_case(
    quant: str, m: int, k: int, n: int, roles: tuple[str, ...], *, glu: bool = False, oai: bool = False, out: str = "F32",
    experts: int = 6, used: int = 3, gating: str = "softmax", norm_w: bool = True, ties: bool = False, seed: int = 7,
) -> Case:
    """A case of the fused family; with ids: `experts` experts of which each token uses `used` (expert 0 is never chosen); oai: the GLU is
    SWIGLU_OAI; with logits: gating and norm_w as TOPK_MOE's gating and norm, ties: the logits are whole numbers."""
    choosing = "logits" in roles
    choice = {"gating": gating, "norm_w": norm_w, "ties": ties} if choosing else {}

    def make(rng: np.random.Generator) -> Problem:
        routed = choosing or "ids" in roles
        shape = (experts, m, k) if routed else (m, k)
        w = weight("w", quant, shape)
        x = Tensor("x", "F32", (n, used if "expert_weights" in roles else 1, k) if routed else (n, k), "input")
        rows = m >> glu
        y_shape = (n, used, rows) if routed and "expert_weights" not in roles else (n, rows)
        outs = [Tensor("y", out, y_shape)]
        if choosing:
            outs += [Tensor("weights", "F32", (n, used)), Tensor("ids", "I32", (n, used))]
        extra = {
            "norm": Tensor("norm", "F32", (k,), "weight"),
            "bias": Tensor("bias", "F32", (experts * m if routed else m,), "weight"),
            "residual": Tensor("residual", "F32", y_shape, "input"),
            "ids": Tensor("ids", "I32", (n, used), "input"),
            "logits": Tensor("logits", "F32", (n, experts), "input"),
            "expert_weights": Tensor("expert_weights", "F32", (n, used), "input"),
        }
        inputs = [extra[r] for r in FUSED_ROLES if r in roles]
        params = {"roles": ("w", "x", *(r for r in FUSED_ROLES if r in roles)), "glu": glu, "eps": 1e-5, **(SWIGLU_OAI if oai else {})}
        if choosing:
            params |= {"n_used": used, "norm": norm_w, "gating": gating, "scale": 1.5}
        node = Node("MAT_VEC", (w, x, *inputs), tuple(outs), params)
        values: dict[str, Array] = {
            "w": quants.random_blocks(quant, prod(shape[:-1]), k, rng, std=0.5),
            "x": rng.uniform(-1, 1, x.shape).astype(np.float32),
        }
        for t in inputs:
            values[t.name] = rng.uniform(-1, 1, t.shape).astype(np.float32)
        if "ids" in roles:
            values["ids"] = np.stack([rng.permutation(np.arange(1, experts))[:used] for _ in range(n)]).astype(np.int32)
        if choosing:
            logits = 3 * rng.standard_normal((n, experts), np.float32)
            values["logits"] = np.round(logits) if ties else logits
        return Problem(node, values)

    params = {"type_a": quant, "m": m, "n": n, "k": k, "fused": "+".join(roles) or "none", "glu": glu, "out": out}
    return Case("MAT_VEC", params | ({"oai": True} if oai else {}) | choice | {"seed": seed}, make, seed)


def mul_mat_case(quant: str, m: int, n: int, k: int, *, seed: int = 7) -> Case:
    def make(rng: np.random.Generator) -> Problem:
        w, x = weight("w", quant, (m, k)), Tensor("x", "F32", (n, k), "input")
        node = Node("MUL_MAT", (w, x), (Tensor("y", "F32", (n, m)),))
        return Problem(node, {"w": quants.random_blocks(quant, m, k, rng, std=0.5), "x": rng.uniform(-1, 1, (n, k)).astype(np.float32)})

    return Case("MUL_MAT", {"type_a": quant, "type_b": "f32", "m": m, "n": n, "k": k, "seed": seed}, make, seed)


def mul_mat_id_case(quant: str, experts: int, used: int, m: int, n: int, k: int, *, shared: bool, seed: int = 7) -> Case:
    def make(rng: np.random.Generator) -> Problem:
        w = weight("w", quant, (experts, m, k))
        x = Tensor("x", "F32", (n, 1 if shared else used, k), "input")
        ids = Tensor("ids", "I32", (n, used), "input")
        node = Node("MUL_MAT_ID", (w, x, ids), (Tensor("y", "F32", (n, used, m)),))
        return Problem(node, {
            "w": quants.random_blocks(quant, experts * m, k, rng, std=0.5),
            "x": rng.uniform(-1, 1, x.shape).astype(np.float32),
            "ids": np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32),
        })

    params = {"type_a": quant, "type_b": "f32", "n_mats": experts, "n_used": used, "b": shared, "m": m, "n": n, "k": k, "seed": seed}
    return Case("MUL_MAT_ID", params, make, seed)
