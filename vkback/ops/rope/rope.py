"""ROPE, its angles alone (ROPE_ANGLES), and the step between the QKV product and attention as one kernel: QKV_ROPE_SET_ROWS
(shaders/rope)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.cache import cache_kinds, cache_params, stored_cache
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.copies.rows import cache_tolerance, staged_rows, store_staged_rows, stored_rows, stores_of
from vkback.ops.cost import Cost
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, SpinWaits, ceil_div, pack_push, spread
from vkback.ops.family import declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, Tape, register
from vkback.ops.rope import angles as rope_angles
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant

declare(
    "rope",
    match={"n": "number", "heads": "number", "head_dim": "number"},
    params={"wg_size": (8, 16, 32, 64, 128, 256), "heads_per_group": "positive"},
)


ANGLES = "rope/angles.comp"

FREQUENCY = tuple(name for name in rope_angles.DEFAULTS if name != "mode")
"""Params of the frequencies that a case may give in place of the defaults."""

YARN: tuple[dict[str, Any], ...] = (
    {},
    {"freq_base": 1e6},
    {"freq_scale": 1.4245},
    {"attn_factor": 1.4245},
    {"freq_scale": 1.4245, "attn_factor": 1.4245},
    {"ext_factor": 0.7465, "freq_scale": 1.4245},
    {"ext_factor": 0.7465, "freq_scale": 1.4245, "attn_factor": 1.4245},
    {"freq_base": 150000.0, "freq_scale": 0.03125, "ext_factor": 1.0},
)
"""Of the full set."""


def reference_angles(pos: Array, factors: Array | None, params: Mapping[str, Any]) -> tuple[Array, float]:
    """Angles [n, n_dims/2] of every position and pair, and the magnitude of cosine and sine. With YaRN, fast pairs keep their frequency,
    slow ones are scaled by freq_scale, and a ramp leads from one to the other. Written apart from `rope_angles`, which it judges."""
    n_dims, base, scale, ext = params["n_dims"], params["freq_base"], params["freq_scale"], params["ext_factor"]
    freq = np.array([base ** (-2.0 * i / n_dims) for i in range(n_dims // 2)])
    if factors is not None:
        freq = freq / np.asarray(factors, np.float64)
    scaled = freq * scale
    magnitude = float(params["attn_factor"])
    if ext != 0.0:
        first, last = (_yarn_pair(turns, params) for turns in (params["beta_fast"], params["beta_slow"]))
        first, last = max(0.0, math.floor(first)), min(n_dims - 1.0, math.ceil(last))
        ramp = np.array([1.0 - min(1.0, max(0.0, (i - first) / max(0.001, last - first))) for i in range(n_dims // 2)])
        scaled = scaled * (1.0 - ramp * ext) + freq * ramp * ext
        magnitude *= 1.0 + 0.1 * math.log(1.0 / scale)
    return np.asarray(pos, np.float64)[:, None] * scaled, magnitude


def _yarn_pair(turns: float, params: Mapping[str, Any]) -> float:
    """The pair, as a real number, that makes `turns` full turns within the original context."""
    wavelength = params["n_ctx_orig"] / (turns * 2 * math.pi)
    return float(params["n_dims"] * math.log(wavelength) / (2 * math.log(params["freq_base"])))


def rotate_pairs(x: Array, cos: Array, sin: Array, mode: str) -> Array:
    """x [n, heads, head_dim] with its first pairs, paired as `mode` says, rotated by cos and sin [n, pairs]: "normal" pairs values 2i and
    2i + 1, "neox" i and i + n_dims/2."""
    pairs = cos.shape[-1]
    a, b = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if mode == "normal" else (slice(0, pairs), slice(pairs, 2 * pairs))
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


@dataclass(frozen=True)
class _Heads:
    """What one launch of the kernel covers. kv = 0: q alone."""

    n: int
    q: int
    kv: int
    dim: int


def angles_dispatch(
    node: Node, ctx: LowerContext, pos: Tensor, factors: Sequence[Tensor], out: Tensor, *, previous: bool = False
) -> Dispatch:
    """Makes the angles `out`, F32 [n, n_dims / 2, 2], for the rotation of a node. previous: of PREVIOUS of the positions."""
    for t in factors:
        if t.elements < node.params["n_dims"] // 2:
            raise PlanError(f"[{node.op}] {node.name}: frequency factors {t}: expected n_dims / 2 = {node.params['n_dims'] // 2} values")
    count = out.elements // 2
    wg = workgroup_size(ctx.caps, 32)
    table = rope_angles.fixed_point(node.params)
    defines: dict[str, str | int] = {"WG_SIZE": wg, "FACTORS": len(factors), **rope_angles.table_defines(table)}
    defines |= {"PREVIOUS": 1} if previous else {}
    return Dispatch(
        Variant.of(ANGLES, defines),
        (Arg(pos), Arg(out, "w"), *map(Arg, factors)),
        pack_push(count, float(rope_angles.mscale(node.params))),
        spread(ceil_div(count, wg)),
        "ROPE_ANGLES",
        out.name,
        f"{wg} threads: a pair each, nothing to choose",
        nbytes=4 * out.elements,
        flops=30 * count,
    )


def angles_of(pos: Tensor, factors: Sequence[Tensor], params: Mapping[str, Any]) -> Tensor:
    """The angles of a rotation: F32 [n, n_dims / 2, 2]. Rotations alike have one name for them, so that a plan makes them once."""
    alike = repr((pos.name, [t.name for t in factors], [params[key] for key in rope_angles.PARAMS if key != "mode"]))
    name = f"rope_angles.{hashlib.sha256(alike.encode()).hexdigest()[:6]}"
    return Tensor(name, "F32", (pos.elements, int(params["n_dims"]) // 2, 2))


def own_angles(node: Node, ctx: LowerContext, pos: Tensor, factors: Sequence[Tensor]) -> Dispatch:
    """Makes the angles of a node that is given none. Its param previous_of: what its positions are PREVIOUS of."""
    source = node.params.get("previous_of")
    return angles_dispatch(node, ctx, source or pos, factors, angles_of(pos, factors, node.params), previous=source is not None)


def _dispatch(
    node: Node, ctx: LowerContext, heads: _Heads, args: Sequence[Arg], defines: Mapping[str, int], n_ctx: int, rotated: bool
) -> Dispatch:
    n_dims = node.params["n_dims"]
    if heads.dim % 4 or n_dims % 4 or not 0 <= n_dims <= heads.dim:
        raise PlanError(
            f"[{node.op}] {node.name}: head size {heads.dim} with n_dims {n_dims}: both must be multiples of 4, "
            "and 0 <= n_dims <= head size"
        )
    total = heads.q + 2 * heads.kv
    choice = ctx.tuning.pick("rope", n=heads.n, heads=total, head_dim=heads.dim)
    per_group = min(choice["heads_per_group"], total)
    wg = workgroup_size(ctx.caps, choice["wg_size"], heads.dim // 4)
    values, subgroup = reduction(ctx.caps, wg)
    neox = rotated and rope_angles.MODES[node.params["mode"]]
    values |= {**defines, "ROUNDS": ceil_div(heads.dim // 4, wg), "ROPE": int(rotated), "ROPE_NEOX": int(neox)}
    gz = ceil_div(heads.n, MAX_GROUPS_X)
    rows = heads.n * total * heads.dim
    groups = (ceil_div(total, per_group), ceil_div(heads.n, gz), gz)
    return Dispatch(
        Variant.of("rope/rope.comp", values, subgroup_size=subgroup),
        tuple(args),
        pack_push(heads.n, n_ctx, float(node.params.get("eps", 0.0)), heads.dim, heads.q, heads.kv, per_group, n_dims // 2),
        groups,
        node.op,
        node.name,
        f"{wg} threads, {per_group} heads a group: {choice.source}",
        nbytes=4 * rows + 4 * heads.n * heads.q * heads.dim + 4 * heads.n * heads.kv * heads.dim,
        flops=6 * rows,
        waits=SpinWaits(shares=tuple(a.tensor.name for a in args[: 1 if heads.kv == 0 or defines["PACKED"] else 3]), arrives=prod(groups)),
    )


@register
class Rope(Op):
    """ROPE(x [n, heads, head_dim], pos I32 [n] [, factors F32 [n_dims / 2]]) -> x with the first n_dims values of each head rotated.

    params  mode "normal" | "neox", n_dims, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow, n_ctx_orig
    The factors divide the frequencies. n_dims 0 rotates nothing.
    """

    name = "ROPE"
    formula = "rope(x)"
    extra_keys = FREQUENCY

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value that is rotated two products, half of the two that give its pair's angle, and one of the pair's sine and cosine; of a
        pair the division by its frequency factor, where there are any. Angles are counted for every head anew; YaRN's blend is not."""
        x, _, *factors = node.inputs
        rotated = x.elements // x.shape[-1] * int(node.params["n_dims"])
        return {"fmul": 3 * rotated, "fsin": rotated} | ({"fdiv": rotated // 2} if factors else {})

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """Rotated back."""
        x, *others = node.inputs
        return [tape.emit("ROPE_BACK", x, (dy, *others), **node.params), *(None for _ in others)]

    def case(self, params: Mapping[str, Any]) -> Case:
        """A line of test-backend-ops, which has sizes `ne_a` and a mode by number, is one of ROPE_EXT."""
        return OPS["ROPE_EXT"].case(params) if "ne_a" in params else super().case(params)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, pos, *factors = inputs
        angles, magnitude = reference_angles(pos, factors[0] if factors else None, params)
        return [rotate_pairs(np.asarray(x, np.float64), np.cos(angles) * magnitude, np.sin(angles) * magnitude, params["mode"])]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, pos, *factors = node.inputs
        n, heads, dim = x.shape
        angles = [own_angles(node, ctx, pos, factors)] if node.params["n_dims"] else []
        args = (Arg(x), *(Arg(d.args[1].tensor) for d in angles), Arg(node.outputs[0], "w"))
        defines = {"STORE": 0, "STORE_F32": 0, "PACKED": 0, "NORM": 0}
        return [*angles, _dispatch(node, ctx, _Heads(n, heads, 0, dim), args, defines, 0, bool(angles))]

    def cases(self) -> Iterator[Case]:
        for mode in ("normal", "neox"):
            yield self.build_case(mode, (3, 4, 128))
            yield self.build_case(mode, (2, 3, 80), 20)
            yield self.build_case(mode, (1, 7, 64), 32, ff=1.0)
            yield self.build_case(mode, (2, 1, 256), freq_base=1e6)
            yield self.build_case(mode, (2, 2, 40), freq_scale=1.4245, attn_factor=1.4245)
            yield self.build_case(mode, (3, 2, 128), ff=1.0, freq_scale=1.4245, ext_factor=0.7465, attn_factor=1.4245)
            yield self.build_case(mode, (3, 2, 64), freq_base=150000.0, freq_scale=1 / 32, ext_factor=1.0)
            yield self.build_case(mode, (3, 2, 128), pos=99_998)
            yield self.build_case(mode, (3, 2, 128), pos=131_069, freq_base=500000.0)
            yield self.build_case(mode, (3, 2, 128), pos=131_069, ff=1.0)
            for fast in (1.08, 0.7, 1e30):
                yield self.build_case(mode, (3, 2, 128), pos=131_069, ff=fast)
            yield self.build_case(mode, (2, 2, 128), pos=-1)

    def full_cases(self) -> Iterator[Case]:
        dims = ((64, 64), (64, 32), (80, 80), (80, 20), (96, 96), (128, 128), (128, 64), (256, 256), (256, 64))
        for mode in ("normal", "neox"):
            for (dim, n_dims), heads, n in product(dims, (1, 8, 32), (1, 3)):
                yield self.build_case(mode, (n, heads, dim), n_dims)
            for yarn, fast, pos in product(YARN, (0.0, 1.0, 1.08), (0, 511, 131069)):
                yield self.build_case(mode, (2, 4, 128), 128, pos, fast, **yarn)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case("normal", (n, 32, 128))

    def build_case(
        self, mode: str, ne: tuple[int, int, int], n_dims: int = 0, pos: int = 30, ff: float = 0.0, seed: int = 13, **given: Any
    ) -> Case:
        """Tokens at positions pos, pos + 1, ...; ff: frequency factors, this one for the fast half of the pairs, up to 8 for the slow half;
        0: none. given: of FREQUENCY."""
        n_dims = n_dims or ne[2]
        params = {**rope_angles.DEFAULTS, "mode": rope_angles.checked_mode(mode), "n_dims": n_dims, **given}

        def make(rng: np.random.Generator) -> Problem:
            inputs = [Tensor("x", "F32", ne, "input"), Tensor("pos", "I32", (ne[0],), "input")]
            values: dict[str, Array] = {"x": rng.uniform(-1, 1, ne).astype(np.float32), "pos": np.arange(pos, pos + ne[0], dtype=np.int32)}
            if ff:
                inputs.append(Tensor("factors", "F32", (n_dims // 2,), "weight"))
                values["factors"] = frequency_factors(n_dims, ff)
            return Problem(Node("ROPE", tuple(inputs), (Tensor("y", "F32", ne),), params), values)

        shown = {"mode": mode, "ne": ne, "n_dims": n_dims, "pos": pos, "ff": ff or 0}
        return Case("ROPE", {**shown, **given, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return rotation_tolerance(factors=len(node.inputs) > 2)


def rotation_tolerance(*, factors: bool) -> Tolerance:
    if factors:
        return Tolerance(1e-10, 1e-4, "factors divide slow pairs in f32: 5e-5 radians at position 131072; else as without")
    return Tolerance(1e-12, 1e-5, "angles to 2^-32 of a turn at any position; polynomials and products in f32, each rounding 2^-24")


@register
class RopeAngles(Op):
    """ROPE_ANGLES(pos I32 [n] [, factors F32 [n_dims / 2]]) -> F32 [n, n_dims / 2, 2]: cosine and sine by which ROPE with the same params
    rotates each pair of dimensions, times its magnitude. params: those of ROPE; previous: of PREVIOUS of the positions."""

    name = "ROPE_ANGLES"
    extra_keys = FREQUENCY

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Two products, a sine and a cosine for each pair, and the division by its frequency factor."""
        pairs = node.outputs[0].elements // 2
        return {"fmul": 2 * pairs, "fsin": 2 * pairs} | ({"fdiv": pairs} if len(node.inputs) > 1 else {})

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        pos, *factors = inputs
        pos = OPS["PREVIOUS"].reference([pos], {})[0] if params.get("previous") else pos
        rotated, magnitude = reference_angles(pos, factors[0] if factors else None, params)
        return [magnitude * np.stack([np.cos(rotated), np.sin(rotated)], -1)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        pos, *factors = node.inputs
        return [angles_dispatch(node, ctx, pos, factors, node.outputs[0], previous=bool(node.params.get("previous")))]

    def cases(self) -> Iterator[Case]:
        yarn: dict[str, Any] = {"freq_base": 150000.0, "freq_scale": 1 / 32, "ext_factor": 1.0}
        yield self.build_case((0, 1, 4095), 128)
        yield self.build_case((131072,), 64, ff=True)
        yield self.build_case((7, -1), 96, **yarn)
        yield self.build_case((7, 0, -1), 64, previous=True)

    def full_cases(self) -> Iterator[Case]:
        positions: tuple[Shape, ...] = ((0,), (4095,), (131072, 3, -1))
        for pos, n_dims, fast, yarn in product(positions, (32, 64, 128, 256), (False, True), YARN):
            yield self.build_case(pos, n_dims, fast, **yarn)

    def build_case(self, pos: Shape, n_dims: int, ff: bool = False, previous: bool = False, seed: int = 5, **given: Any) -> Case:
        """ff: with frequency factors; previous: of the positions before; given: of FREQUENCY."""
        less: dict[str, Any] = {"previous": True} if previous else {}
        params = {**rope_angles.DEFAULTS, "n_dims": n_dims, **given, **less}

        def make(rng: np.random.Generator) -> Problem:
            inputs = [Tensor("pos", "I32", (len(pos),), "input")]
            values: dict[str, Array] = {"pos": np.array(pos, np.int32)}
            if ff:
                inputs.append(Tensor("factors", "F32", (n_dims // 2,), "weight"))
                values["factors"] = frequency_factors(n_dims, 1.0)
            out = Tensor("angles", "F32", (len(pos), n_dims // 2, 2))
            return Problem(Node(self.name, tuple(inputs), (out,), params), values)

        return Case(self.name, {"pos": pos, "n_dims": n_dims, "ff": ff, **less, **given, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return rotation_tolerance(factors=len(node.inputs) > 1)


def frequency_factors(n_dims: int, fast: float) -> Array:
    """Frequency factors as Llama 3 (fast = 1) or long-rope models have them: `fast` for the faster half of the pairs, rising to 8."""
    half = n_dims // 2
    return np.concatenate([np.full(half - half // 2, fast), np.linspace(1.5, 8.0, half // 2)]).astype(np.float32)


@register
class QkvRopeSetRows(Op):
    """QKV_ROPE_SET_ROWS(q [n, heads, d], k, v [n, kv_heads, d], pos, cache_k, cache_v [, q_norm, k_norm F32 [d]] [, factors]
    [, rows I32 [n]]) -> (q rotated F32 [n, heads, d], cache_k, cache_v).

    params  those of ROPE (n_dims 0: q and k are not rotated); has_norm, eps: heads of q and k are RMS-normed and multiplied first; has_ff;
            type_k, type_v: of caches that are not F16;
            packed: q, k, v are one tensor [n, (heads + 2 kv_heads) d], with n_head, n_head_kv, head_dim;
            has_rows: rows of the caches that tokens are stored in, instead of pos
    """

    name = "QKV_ROPE_SET_ROWS"
    extra_keys = FREQUENCY

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        if params["packed"]:
            h, kv, d = params["n_head"], params["n_head_kv"], params["head_dim"]
            heads = np.asarray(inputs[0]).reshape(-1, h + 2 * kv, d)
            q, k, v = heads[:, :h], heads[:, h : h + kv], heads[:, h + kv :]
            rest = list(inputs[1:])
        else:
            q, k, v = inputs[:3]
            rest = list(inputs[3:])
        pos, cache_k, cache_v, *extra = rest
        rows = extra.pop() if params.get("has_rows") else pos
        if params["has_norm"]:
            q, k = (OPS["RMS_NORM_MUL"].reference([x, w], params)[0] for x, w in zip((q, k), extra[:2], strict=True))
            extra = extra[2:]
        q, k = (OPS["ROPE"].reference([x, pos, *extra], params)[0] for x in (q, k))
        return [q, *stored_rows(params, rows, (k, v), (cache_k, cache_v))]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        params = node.params
        packed = bool(params["packed"])
        sources = node.inputs[: 1 if packed else 3]
        pos, cache_k, cache_v, *extra = node.inputs[len(sources) :]
        rows = extra.pop() if params.get("has_rows") else None
        kv_heads, n_ctx, dim = cache_k.shape
        q_out = node.outputs[0]
        heads = _Heads(q_out.shape[0], q_out.elements // (q_out.shape[0] * dim), kv_heads, dim)
        given = sum(t.elements for t in sources)
        if given != heads.n * (heads.q + 2 * heads.kv) * dim:
            raise PlanError(
                f"[{self.name}] {node.name}: {', '.join(map(str, sources))} hold {given} values, expected {heads.n} tokens of "
                f"{heads.q} + 2 x {heads.kv} heads of {dim}"
            )
        norm = 2 if params["has_norm"] else 0
        if len(extra) != norm + bool(params["has_ff"]):
            announced = norm + bool(params["has_ff"])
            raise PlanError(f"[{self.name}] {node.name}: {len(extra)} inputs after the caches, has_norm and has_ff announce {announced}")
        caches = (cache_k, cache_v)
        kv = staged_rows(f"{q_out.name}.stored", heads.n, caches)
        stored_in = [Arg(rows or pos)] if kv is caches else []
        angles = [own_angles(node, ctx, pos, extra[norm:])] if params["n_dims"] else []
        given_angles = [Arg(d.args[1].tensor) for d in angles]
        args = [*map(Arg, sources), *stored_in, *map(Arg, extra[:norm]), *given_angles, Arg(q_out, "w"), *(Arg(t, "w") for t in kv)]
        defines = {"STORE": 1, "STORE_F32": int(kv is not caches), "PACKED": int(packed), "NORM": norm // 2}
        rotate = _dispatch(node, ctx, heads, args, defines, n_ctx, bool(angles))
        return [*angles, rotate, *store_staged_rows(kv, rows or pos, caches, ctx)]

    def cases(self) -> Iterator[Case]:
        for mode in ("normal", "neox"):
            for packed in (False, True):
                yield self.build_case(mode, 1, 4, 2, 64, packed)
                yield self.build_case(mode, 3, 6, 2, 128, packed, norm=True)
                yield self.build_case(mode, 2, 3, 1, 80, packed, ff=True, n_dims=32)
                yield self.build_case(mode, 3, 4, 2, 64, packed, norm=packed, n_dims=-1)
            yield self.build_case(mode, 5, 2, 2, 256, True, norm=True, ff=True)
        yield self.build_case("neox", 3, 4, 2, 64, True, type_k="q8_0", type_v="q4_0")
        yield self.build_case("normal", 2, 3, 1, 96, False, norm=True, type_k="q4_0", type_v="f16")
        yield self.build_case("normal", 2, 3, 1, 80, False, norm=True, type_k="f32", type_v="f16")
        yield self.build_case("neox", 4, 4, 2, 64, True, norm=True, ff=True, rows=True)
        yield self.build_case("normal", 3, 3, 1, 96, False, type_k="q8_0", type_v="f16", rows=True)

    def full_cases(self) -> Iterator[Case]:
        sizes = ((4, 2, 64), (7, 1, 64), (8, 8, 80), (12, 2, 96), (32, 8, 128), (4, 1, 256))
        both = (False, True)
        for mode, n, packed, norm, ff, (heads, kv, dim) in product(("normal", "neox"), (1, 3), both, both, both, sizes):
            if dim in (64, 128) or norm == ff:
                yield self.build_case(mode, n, heads, kv, dim, packed, norm, ff)

    def build_case(
        self,
        mode: str,
        n: int,
        n_head: int,
        n_head_kv: int,
        head_dim: int,
        packed: bool,
        norm: bool = False,
        ff: bool = False,
        n_dims: int = 0,
        seed: int = 17,
        type_k: str = "f16",
        type_v: str = "f16",
        rows: bool = False,
        **given: Any,
    ) -> Case:
        """Caches of 16 positions holding values already; tokens from position 3 on, the last of several being padding. n_dims: 0: the head
        size, -1: nothing is rotated. rows: tokens are stored in other rows than their positions. given: of FREQUENCY."""
        rope_angles.checked_mode(mode)
        given = {**({"n_dims": n_dims} if n_dims else {}), **given}
        heads, kv_heads, dim = n_head, n_head_kv, head_dim
        params = {
            **rope_angles.DEFAULTS,
            "mode": mode,
            "n_dims": dim,
            "has_norm": norm,
            "has_ff": ff,
            "packed": packed,
            "eps": 1e-6,
            **given,
        }
        params["n_dims"] = max(params["n_dims"], 0)
        if packed:
            params |= {"n_head": heads, "n_head_kv": kv_heads, "head_dim": dim}
        kinds = cache_kinds(type_k, type_v, dim)
        params |= cache_params(kinds) | ({"has_rows": True} if rows else {})

        def make(rng: np.random.Generator) -> Problem:
            kv = (n, kv_heads, dim)
            if packed:
                sources = [Tensor("qkv", "F32", (n, (heads + 2 * kv_heads) * dim), "input")]
            else:
                sources = [Tensor("q", "F32", (n, heads, dim), "input"), Tensor("k", "F32", kv, "input"), Tensor("v", "F32", kv, "input")]
            caches = [Tensor(f"cache_{c}", kind, (kv_heads, 16, dim), "state") for c, kind in zip("kv", kinds, strict=True)]
            inputs = [*sources, Tensor("pos", "I32", (n,), "input"), *caches]
            values: dict[str, Array] = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in sources}
            values |= {t.name: stored_cache(t.type, rng.uniform(-1, 1, t.shape).astype(np.float16)) for t in caches}
            values["pos"] = np.arange(3, 3 + n, dtype=np.int32)
            if n > 1:
                values["pos"][-1] = -1
            if norm:
                inputs += [Tensor("q_norm", "F32", (dim,), "weight"), Tensor("k_norm", "F32", (dim,), "weight")]
                values |= {w: rng.uniform(0.5, 1.5, dim).astype(np.float32) for w in ("q_norm", "k_norm")}
            if ff:
                inputs.append(Tensor("factors", "F32", (params["n_dims"] // 2,), "weight"))
                values["factors"] = frequency_factors(params["n_dims"], 1.0)
            if rows:
                inputs.append(Tensor("rows", "I32", (n,), "input"))
                values["rows"] = np.where(values["pos"] < 0, -1, 15 - 2 * np.arange(n)).astype(np.int32)
            outputs = (Tensor("q_out", "F32", (n, heads, dim)), *caches)
            return Problem(Node(self.name, tuple(inputs), outputs, params), values)

        shown = {"mode": mode, "n": n, "n_head": heads, "n_head_kv": kv_heads, "head_dim": dim, "packed": packed, "norm": norm}
        shown |= {"type_k": type_k, "type_v": type_v} if (type_k, type_v) != ("f16", "f16") else {}
        shown |= {"rows": True} if rows else {}
        return Case(self.name, {**shown, "ff": ff, **given, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return cache_tolerance(node)

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """That of the chain, also where q, k and v come as one tensor."""
        if not node.params["packed"]:
            return super().arithmetic(node, n_kv)
        _, pos, cache_k, cache_v, *extra = node.inputs
        q = node.outputs[0]
        k, v = (Tensor(t.name, "F32", (q.shape[0], t.shape[0], t.shape[2])) for t in (cache_k, cache_v))
        separate = Node(node.op, (q, k, v, pos, cache_k, cache_v, *extra), node.outputs, {**node.params, "packed": False})
        return super().arithmetic(separate, n_kv)

    def unfused(self, node: Node) -> list[Node]:
        """None where q, k and v come as one tensor: no plain op takes a slice."""
        if node.params["packed"]:
            return []
        q, k, v, pos, cache_k, cache_v, *extra = node.inputs
        rows = extra.pop() if node.params.get("has_rows") else pos
        out = node.outputs[0]
        chain: list[Node] = []
        if node.params["has_norm"]:
            normed = [Tensor(f"{t.name}.normed", "F32", t.shape) for t in (q, k)]
            eps = {"eps": node.params["eps"]}
            chain += [Node("RMS_NORM_MUL", (t, w), (y,), eps) for t, w, y in zip((q, k), extra[:2], normed, strict=True)]
            (q, k), extra = normed, extra[2:]
        params = {key: node.params[key] for key in rope_angles.PARAMS}
        rotated = Tensor(f"{k.name}.rotated", "F32", k.shape)
        chain += [Node("ROPE", (q, pos, *extra), (out,), params), Node("ROPE", (k, pos, *extra), (rotated,), params)]
        return [*chain, *stores_of((rotated, v), rows, (cache_k, cache_v))]
