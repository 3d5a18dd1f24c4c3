"""FLASH_ATTN_EXT and ATTN_DECODE: attention over an F16 cache (shaders/attention).

    FLASH_ATTN_EXT  q F32 [n, n_head, hd], cache_k and cache_v F16 [n_head_kv, n_ctx, hd], pos I32 [n] [, sinks F32 [n_head]]
                    -> F32 or Q8_1 [n, n_head * hd]
                    params: scale [, window]
    ATTN_DECODE     qkv F32 [1, (n_head + 2 n_head_kv) * hd], pos I32 [1], cache_k, cache_v, angles F32 [1, n_dims / 2, 2] (ROPE_ANGLES)
                    [, q_norm, k_norm F32 [hd]] [, sinks F32 [n_head]] -> the same, cache_k, cache_v
                    params: those of ROPE, n_head, n_head_kv, head_dim, scale [, window, eps], has_norm, has_ff (angles hold factors)
                    Norm and RoPE of queries and key, store of key and value at row pos, attention: one token, one dispatch.

A token at position p sees rows max(0, p + 1 - window) .. p (0 .. p where window is 0 or absent); other rows are not read. hd is a
multiple of 8, and of 32 where the output is Q8_1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops import rope_angles
from vkback.ops.base import (
    OPS,
    POWERS,
    Access,
    Arg,
    Array,
    Case,
    Choice,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    SpinWaits,
    Tolerance,
    ceil_div,
    declare,
    nbytes,
    pack_push,
    register,
)
from vkback.ops.reference import REFERENCES, turn_pairs
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant

LOG2_E = math.log2(math.e)

DECODE_TOKENS = 16
"""Up to this many tokens each have workgroups of their own; beyond, a workgroup takes several tokens and nothing is split."""

HEAD_SIZE_MULTIPLE = 8

MAX_LOADS = 8
"""16-byte loads of K, and as many of V, that a thread holds: 64 registers. More spill, and take a CPU driver a minute to compile."""

declare(
    "attention",
    match={"n": "number", "n_head": "number", "n_head_kv": "number", "head_dim": "number", "n_ctx": "number"},
    params={
        "wg_size": POWERS,  # threads of a workgroup
        "lanes": (1, 2, 4, 8, 16, 32),  # threads that share a row of K
        "steps": (1, 2, 4, 8),  # rows of K a thread holds at once
        "queries": (1, 2, 4, 8, 16),  # (head, token) pairs that share the reads of a workgroup, at most
        "groups": "positive",  # workgroups wanted for one token when the context is full
        "rows_per_split": "positive",  # rows below which a split is not worth its own workgroup
    },
)


@dataclass(frozen=True)
class Shape:
    """What a kernel is built for; see shaders/attention/attention.comp."""

    wg: int
    lanes: int
    by_lanes: bool
    steps: int
    heads: int
    tokens: int
    splits: int
    readers: int
    round: int
    rows_per_split: int
    reduce: Defines
    subgroup: int | None

    @property
    def queries(self) -> int:
        return self.heads * self.tokens


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, max(min(n, limit), 1) + 1) if n % d == 0)


def shape_for(
    choice: Choice, n: int, n_head: int, n_head_kv: int, hd: int, n_ctx: int, window: int, fused: bool, quantizes: bool, ctx: LowerContext
) -> Shape:
    """The tables' choice bent to what head size, heads and device allow: where shared memory is short, the streams meet in more
    rounds, then there are fewer threads."""
    cols = hd // 8
    heads = _largest_divisor(n_head // n_head_kv, choice["queries"])
    tokens = 1 if n <= DECODE_TOKENS else max(1, choice["queries"] // heads)
    rows = min(n_ctx, window) if window else n_ctx
    # Not a function of n: a token's bits do not depend on how many go with it.
    splits = min(ceil_div(choice["groups"], n_head // heads), ceil_div(rows, choice["rows_per_split"])) if tokens == 1 else 1
    queries = heads * tokens
    least = 1 << (cols - 1).bit_length()
    wg = max(workgroup_size(ctx.caps, choice["wg_size"]), least)
    while True:
        fits = [i for i in (1, 2, 4, 8, 16, 32) if i <= wg and cols % i == 0]
        lanes = max((i for i in fits if i <= choice["lanes"]), default=1)
        lanes = next((i for i in fits if i >= lanes and cols // i <= MAX_LOADS), lanes)
        steps = min(choice["steps"], max(1, MAX_LOADS * lanes // cols))
        reduce, subgroup = reduction(ctx.caps, wg, lanes=max(lanes, 8 if quantizes else 1))
        by_lanes = bool(reduce["REDUCE_SUBGROUP"]) and lanes == cols and queries in (1, 2, 4, 8, 16) and queries <= cols
        known = int(reduce["SUBGROUP_SIZE"])
        bundles = wg // cols // (known // cols if known > cols and cols & (cols - 1) == 0 else 1)
        scores = 0 if by_lanes else 2 * steps * (wg // lanes)
        shared = 4 * queries * (hd + scores + 2 * bundles) + 8 * wg + 256
        shared += 4 * hd if fused else 0
        for parts in (i for i in range(1, queries + 1) if queries % i == 0):
            if shared + 4 * bundles * (queries // parts) * hd <= ctx.caps.max_shared_memory:
                rounds = queries // parts
                readers = max(1, min(splits, wg * 4 // (queries * hd), bundles * rounds // queries))
                return Shape(
                    wg, lanes, by_lanes, steps, heads, tokens, splits, readers, rounds, choice["rows_per_split"], reduce, subgroup
                )
        if wg == least:
            raise PlanError(
                f"[attention] {choice.source}: {queries} queries of head size {hd} need {shared + 4 * bundles * hd} bytes of shared "
                f"memory, {ctx.caps.name} has {ctx.caps.max_shared_memory}; lower queries"
            )
        wg //= 2


def _check(node: Node, ctx: LowerContext, cache_k: Tensor, cache_v: Tensor, n_head: int) -> None:
    """Raises PlanError where no kernel fits the heads, or the device cannot bind a cache."""
    n_head_kv, _, hd = cache_k.shape
    if hd % HEAD_SIZE_MULTIPLE or cache_v.shape != cache_k.shape or n_head % n_head_kv:
        raise PlanError(
            f"[attention] {node.name}: {n_head} heads over {cache_k} and {cache_v}; expected one head size, a multiple of "
            f"{HEAD_SIZE_MULTIPLE}, and heads a multiple of kv heads"
        )
    if node.outputs[0].type == "Q8_1" and hd % 32:
        raise PlanError(f"[attention] {node.name}: Q8_1 output needs a head size that is a multiple of 32, got {hd}; make the output F32")
    for cache in (cache_k, cache_v):
        if nbytes(cache) > ctx.caps.max_storage_buffer_range:
            raise PlanError(
                f"[attention] {cache}: {nbytes(cache)} bytes, {ctx.caps.name} binds at most {ctx.caps.max_storage_buffer_range} "
                "at once. Use a smaller context"
            )


def _lower(
    node: Node, ctx: LowerContext, q: Tensor, cache_k: Tensor, cache_v: Tensor, pos: Tensor, n: int, n_head: int,
    extra: Sequence[tuple[str, Tensor]], fused: Defines,
) -> Dispatch:
    """The one dispatch of either op. extra: (role, tensor) bound after the rest as BIND_<ROLE>; fused: defines of ATTN_DECODE."""
    n_head_kv, n_ctx, hd = cache_k.shape
    out = node.outputs[0]
    window = int(node.params.get("window", 0))
    _check(node, ctx, cache_k, cache_v, n_head)
    choice = ctx.tuning.pick("attention", n=n, n_head=n_head, n_head_kv=n_head_kv, head_dim=hd, n_ctx=n_ctx)
    s = shape_for(choice, n, n_head, n_head_kv, hd, n_ctx, window, bool(fused), out.type == "Q8_1", ctx)
    if s.splits > 1 and 7 + len(extra) > ctx.caps.max_storage_bindings:
        s = replace(s, splits=1)  # a Raspberry Pi binds 8 buffers; scratch and counters would be two too many
    # A head's slots of four values (shaders/attention/fused.glsl) go to as many threads, as far as they can add up by shuffles.
    head_lanes = min(32, s.wg, ctx.caps.subgroup_min, 1 << ((hd // 4).bit_length() - 1)) if fused else 1
    groups = (n_head // s.heads, s.splits, ceil_div(n, s.tokens))
    cached: Access = "rw" if fused else "r"
    args = [Arg(q), Arg(cache_k, cached), Arg(cache_v, cached), Arg(pos), Arg(out, "w")]
    splits = [f"{out.name}.splits"] if s.splits > 1 else []
    if splits:
        tiles = groups[0] * groups[2]
        part = s.queries * hd + 4 * ceil_div(s.queries, 2)
        args.append(Arg(Tensor(splits[0], "F32", (tiles, s.splits, part)), "rw"))
        args.append(Arg(Tensor(f"{out.name}.tickets", "I32", (tiles,), "counter"), "rw"))
    defines: Defines = {
        **s.reduce, **fused, "HD": hd, "HEADS": s.heads, "TOKENS": s.tokens, "STEPS": s.steps, "LANES": s.lanes,
        "BY_LANES": int(s.by_lanes), "SPLITS": s.splits, "READERS": s.readers, "ROUND": s.round, "OUT_Q8_1": int(out.type == "Q8_1"),
        "FUSED": int(bool(fused)), "HAS_SINKS": int(any(role == "sinks" for role, _ in extra)),
    }  # fmt: skip
    if fused:
        defines["HEAD_LANES"] = head_lanes
    for binding, (role, _) in enumerate(extra, len(args)):
        defines[f"BIND_{role.upper()}"] = binding
    args += [Arg(t) for _, t in extra]
    rows = min(n_ctx, window) if window else n_ctx
    return Dispatch(
        kernel=Variant("attention/attention.comp", tuple(sorted((k, v) for k, v in defines.items())), s.subgroup),
        args=tuple(args),
        push=pack_push(
            n, n_head, n_head_kv, n_ctx, window, s.rows_per_split, float(node.params["scale"]) * LOG2_E, float(node.params.get("eps", 0.0))
        ),
        groups=groups,
        op=node.op,
        label=node.name,
        reason=choice.source,
        nbytes=nbytes(q) + nbytes(out) + 2 * n_head_kv * rows * hd * 2,
        flops=4 * n * n_head * rows * hd,
        waits=SpinWaits(part=(q.name,), own=tuple(splits)) if fused else None,  # one token, which is never padding
    )


def _tolerance(node: Node) -> Tolerance:
    if node.outputs[0].type == "Q8_1":
        return Tolerance(1e-4, 0.1, "outputs are rounded to 8 bits: 1/254 of the largest of 32, which is up to ten times their rms")
    return Tolerance(1e-10, 1e-4, "f32 sums of exact F16 products; exp2 of logits up to 20 is off by 5e-6, the worst by a few times that")


@register
class FlashAttnExt(Op):
    """Attention of n tokens over the cache; see the module's text."""

    name = "FLASH_ATTN_EXT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return REFERENCES["FLASH_ATTN_EXT"](inputs, params)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, cache_k, cache_v, pos = node.inputs[:4]
        n, n_head = q.shape[:2]
        extra = [("sinks", t) for t in node.inputs[4:]]
        return [_lower(node, ctx, q, cache_k, cache_v, pos, n, n_head, extra, {})]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return _tolerance(node)

    def cases(self) -> Iterator[Case]:
        # (n_head, n_head_kv, hd, n_ctx, positions): one row, one short of and one past a chunk, several splits, padding, many tokens
        shapes: tuple[tuple[int, int, int, int, tuple[int, ...]], ...] = (
            (4, 1, 128, 64, (0,)),
            (8, 2, 128, 300, (299,)),
            (8, 2, 64, 300, (65,)),
            (7, 1, 64, 130, (128, 3)),
            (4, 4, 80, 70, (33, -1, 0)),
            (6, 2, 96, 70, (31, 69)),
            (2, 1, 256, 40, (36,)),
            (3, 1, 40, 50, (49, 17)),
            (8, 1, 32, 600, (599, 64, 63, -1)),
            (4, 2, 64, 96, (*range(20, 41), -1, -1)),
            (8, 1, 128, 48, tuple(range(17))),
        )
        for seed, (n_head, n_head_kv, hd, n_ctx, pos) in enumerate(shapes, 1):
            for y in ("F32", "Q8_1"):
                if y == "F32" or hd % 32 == 0:
                    yield self.case(n_head, n_head_kv, hd, n_ctx, pos, y, seed=seed)
        yield self.case(8, 2, 64, 300, (299, 40), "F32", seed=20, sinks=True)
        yield self.case(8, 2, 64, 300, (299, 40, 127, 128), "F32", seed=21, window=128)
        yield self.case(8, 2, 64, 80, tuple(range(40, 60)), "Q8_1", seed=22, window=16, sinks=True)

    def case(
        self, n_head: int, n_head_kv: int, hd: int, n_ctx: int, pos: Sequence[int], y: str, *, seed: int, window: int = 0,
        sinks: bool = False, garbage: bool = True,
    ) -> Case:
        """A case whose cache holds NaN in every row that no token sees (garbage False: zeros everywhere, made quickly)."""

        def make(rng: np.random.Generator) -> Problem:
            n = len(pos)
            q = Tensor("q", "F32", (n, n_head, hd), "input")
            cache_k, cache_v = (Tensor(name, "F16", (n_head_kv, n_ctx, hd), "state") for name in ("cache_k", "cache_v"))
            inputs = [q, cache_k, cache_v, Tensor("pos", "I32", (n,), "input")]
            values: dict[str, Array] = {
                "q": rng.standard_normal(q.shape, np.float32),
                "pos": np.array(pos, np.int32),
                **{c.name: random_cache(rng, c.shape, pos if garbage else None, window) for c in (cache_k, cache_v)},
            }
            if sinks:
                inputs.append(Tensor("sinks", "F32", (n_head,), "weight"))
                values["sinks"] = rng.uniform(-3, 6, n_head).astype(np.float32)
            params = {"scale": 1 / math.sqrt(hd)} | ({"window": window} if window else {})
            return Problem(Node("FLASH_ATTN_EXT", tuple(inputs), (Tensor("kqv_out", y, (n, n_head * hd)),), params), values)

        shown = {
            "n_head": n_head, "n_head_kv": n_head_kv, "hd": hd, "n_ctx": n_ctx, "pos": pos, "y": y, "window": window, "sinks": sinks,
            "seed": seed,
        }  # fmt: skip
        return Case(self.name, shown, make, seed)


def random_cache(rng: np.random.Generator, shape: tuple[int, ...], pos: Sequence[int] | None, window: int = 0) -> Array:
    """F16 cache with normal values in the rows that tokens at these positions see and NaN in all others; None: zeros everywhere."""
    if pos is None:
        return np.zeros(shape, np.float16)
    cache = np.full(shape, np.nan, np.float16)
    for p in pos:
        first = max(0, p + 1 - window) if window else 0
        cache[:, first : p + 1] = 0.0
    seen = np.isfinite(cache)
    cache[seen] = rng.standard_normal(int(seen.sum())).astype(np.float16)
    return cache


@register
class AttnDecode(Op):
    """Norm, RoPE, cache store and attention of one token; see the module's text. Its twin is the chain of those ops."""

    name = "ATTN_DECODE"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        qkv, pos, cache_k, cache_v, angles, *rest = inputs
        hd, heads, kv = params["head_dim"], params["n_head"], params["n_head_kv"]
        q, k, v = np.split(np.asarray(qkv, np.float64).reshape(1, heads + 2 * kv, hd), (heads, heads + kv), axis=1)
        if params.get("has_norm"):
            (q,), (k,) = (REFERENCES["RMS_NORM"]([x], params) for x in (q, k))
            q, k = q * np.asarray(rest.pop(0), np.float64), k * np.asarray(rest.pop(0), np.float64)
        cos, sin = np.moveaxis(np.asarray(angles, np.float64), -1, 0)
        q, k = (turn_pairs(x, cos, sin, params["mode"]) for x in (q, k))
        (cache_k,), (cache_v,) = (REFERENCES["SET_ROWS"]([x, pos, c], params) for x, c in ((k, cache_k), (v, cache_v)))
        out = OPS["FLASH_ATTN_EXT"].reference([q, cache_k, cache_v, pos, *rest], params)
        return [*out, cache_k, cache_v]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        qkv, pos, cache_k, cache_v, *rest = node.inputs
        params = node.params
        n_dims, has_norm = int(params["n_dims"]), bool(params.get("has_norm"))
        if pos.shape != (1,):
            raise PlanError(f"[attention] {node.name}: ATTN_DECODE takes one token, got {pos}")
        if n_dims % 4:
            raise PlanError(f"[attention] {node.name}: ATTN_DECODE turns pairs two by two, n_dims = {n_dims} is no multiple of 4")
        roles = ["angles", *(["q_norm", "k_norm"] if has_norm else [])]
        roles += ["sinks"] * (len(rest) - len(roles))
        fused: Defines = {"HAS_NORM": int(has_norm), "ROPE_PAIRS": n_dims // 2, "ROPE_NEOX": rope_angles.MODES[params["mode"]]}
        extra = list(zip(roles, rest, strict=True))
        return [_lower(node, ctx, qkv, cache_k, cache_v, pos, 1, params["n_head"], extra, fused)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        plain = _tolerance(node)
        if plain.nmse >= 1e-6:
            return plain
        return Tolerance(1e-6, 5e-3, "the key is rounded to F16 after norm and RoPE in f32: one on the edge may go the other way (2^-11)")

    def cases(self) -> Iterator[Case]:
        for seed, (heads, kv, hd, n_ctx, pos, mode, norm, ff, y) in enumerate(
            (
                (4, 1, 128, 64, 0, "normal", False, False, "F32"),
                (8, 2, 128, 300, 299, "normal", False, True, "Q8_1"),
                (8, 2, 64, 300, 130, "neox", True, False, "Q8_1"),
                (7, 1, 64, 200, 64, "neox", False, False, "F32"),
                (4, 4, 80, 70, 33, "neox", True, False, "F32"),
                (4, 2, 96, 5000, 4095, "normal", False, False, "Q8_1"),
                (2, 1, 256, 40, 36, "normal", True, True, "F32"),
                (4, 2, 64, 40, -1, "normal", False, False, "Q8_1"),
            ),
            1,
        ):
            yield self.case(heads, kv, hd, n_ctx, pos, mode, norm, ff, y, seed=seed)
        yield self.case(4, 2, 64, 300, 200, "neox", False, False, "F32", seed=20, n_dims=32, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=64)
        yield self.case(8, 1, 64, 300, 200, "neox", False, False, "Q8_1", seed=21, sinks=True, window=128)
        # gpt-oss: sinks and YaRN, every other layer with a window; one that is not yet full, one that is, and rows that take several splits
        yarn: dict[str, Any] = {"freq_base": 150000.0, "freq_scale": 1 / 32, "ext_factor": 1.0, "n_ctx_orig": 4096}
        yield self.case(16, 2, 64, 600, 50, "neox", False, False, "Q8_1", seed=22, sinks=True, window=128, **yarn)
        yield self.case(16, 2, 64, 600, 599, "neox", False, False, "Q8_1", seed=23, sinks=True, window=128, **yarn)
        yield self.case(16, 2, 64, 2000, 1500, "neox", False, False, "F32", seed=24, sinks=True, **yarn)

    def case(
        self, n_head: int, n_head_kv: int, hd: int, n_ctx: int, pos: int, mode: str, norm: bool, ff: bool, y: str, *, seed: int,
        n_dims: int = 0, window: int = 0, sinks: bool = False, garbage: bool = True, **rope: float,
    ) -> Case:
        """A case whose cache holds NaN in row pos and beyond (garbage False: zeros everywhere, made quickly)."""

        def make(rng: np.random.Generator) -> Problem:
            qkv = Tensor("qkv", "F32", (1, (n_head + 2 * n_head_kv) * hd))
            caches = tuple(Tensor(name, "F16", (n_head_kv, n_ctx, hd), "state") for name in ("cache_k", "cache_v"))
            turned = n_dims or hd
            weights = [*([("q_norm", hd), ("k_norm", hd)] if norm else []), *([("sinks", n_head)] if sinks else [])]
            position, angles = Tensor("pos", "I32", (1,), "input"), Tensor("angles", "F32", (1, turned // 2, 2), "input")
            inputs = (qkv, position, *caches, angles, *(Tensor(name, "F32", (size,), "weight") for name, size in weights))
            values: dict[str, Array] = {
                "qkv": rng.standard_normal(qkv.shape, np.float32),
                "pos": np.array([pos], np.int32),
                **{c.name: random_cache(rng, c.shape, (pos - 1,) if garbage else None, max(window - 1, 0)) for c in caches},
                **{name: rng.uniform(0.5, 1.5, size).astype(np.float32) for name, size in weights},
            }
            factors = (rng.uniform(0.5, 1.5, turned // 2).astype(np.float32),) if ff else ()
            params = {
                **rope_angles.DEFAULTS, **rope, "mode": mode, "n_dims": turned, "n_head": n_head, "n_head_kv": n_head_kv, "head_dim": hd,
                "scale": 1 / math.sqrt(hd), "has_norm": norm, "has_ff": ff, "window": window,
            }  # fmt: skip
            if norm:
                params["eps"] = 1e-6
            made = OPS["ROPE_ANGLES"].reference([values["pos"], *factors], params)
            values["angles"] = made[0].astype(np.float32)
            out = Tensor("kqv_out", y, (1, n_head * hd))
            return Problem(Node("ATTN_DECODE", inputs, (out, *caches), params), values)

        shown = {
            "n_head": n_head, "n_head_kv": n_head_kv, "hd": hd, "n_ctx": n_ctx, "pos": pos, "mode": mode, "norm": norm, "ff": ff,
            "y": y, "n_dims": n_dims or hd, "window": window, "sinks": sinks, **rope, "seed": seed,
        }  # fmt: skip
        return Case(self.name, shown, make, seed)
