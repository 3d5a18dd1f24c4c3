"""FLASH_ATTN_LSE and FLASH_ATTN_BACK (shaders/attention/train/): attention of whole sequences in f32, forward and backward.

    FLASH_ATTN_LSE   q [n, n_head, hd], k [n, n_head_kv, hd], v [n, n_head_kv, vd] -> y [n, n_head, vd], lse [n, n_head]
    FLASH_ATTN_BACK  dy, q, k, v, y, lse -> dq, dk, dv
                     params: scale [, causal (True), window (0), sequences (1), softcap (0)]

The n tokens are `sequences` sequences of the same length, one after the other. The token at position i of a sequence sees places
max(0, i + 1 - window) .. i of it, all up to i without a window, and the whole sequence where causal is False.
lse is the logarithm of the sum of exp(score) of a row.

With act "f16" both go by cooperative matrices (shaders/attention/train/train_matrix.comp) where the device has suitable ones. Operands are
packed as f16 first, every head of a sequence times a power of two of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cooperative_matrix import matrix_shapes, matrix_spec
from vkback.ops.cost import Cost
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.family import Choice, declare
from vkback.ops.ggml_words import sized
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, Tape, register
from vkback.ops.storage import nbytes
from vkback.ops.training.column_sums import column_sums
from vkback.ops.training.gradients import Gradient, Scalar, against
from vkback.ops.workgroup import lanes_for, reduction, required_subgroup, workgroup_size
from vkback.shader import Variant

TILE = 32
"""Queries, keys and columns of a tile."""

declare(
    "attention_train",
    match={"head_dim": "number", "n": "number"},
    params={
        "rows": "positive",
        "warps": (1, 2, 4, 8),
        "tiles": ("shared", "lanes"),  # in f32: tiles in shared memory, or a token a lane, whose values go from lane to lane
        "f16": ("matrices", "f32"),  # what act "f16" means
    },
)

KINDS = ("forward", "dq", "dk", "dv")
"""Of shaders/attention/train/train_matrix.comp."""

PACK_THREADS = 1024
"""Of a workgroup that packs a head of a sequence, where the device has as many: 32 heads are 32 workgroups."""

F16_ATTENTION = Tolerance(
    1e-5,
    0.03,
    "operands, weights and derivatives of scores in f16, 2^-12 each in the mean square; scores up to 10 are off by as much of "
    "themselves, and so weights by up to ten times that: NMSE 6e-6",
)

MAX_CHUNKS = 4
"""Tiles of columns that a workgroup has in registers."""


class Sizes(NamedTuple):
    """Of an attention: tokens of a sequence, sequences, heads, kv heads, head sizes of K and V."""

    n: int
    sequences: int
    heads: int
    kv_heads: int
    hd: int
    vd: int


def sizes_of(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """Raises PlanError where operands do not fit each other or the params."""
    sequences = int(node.params.get("sequences", 1))
    fits = all(len(t.shape) == 3 and t.shape[0] == q.shape[0] and t.type == "F32" for t in (q, k, v))
    if not fits or k.shape[2] != q.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[0] % sequences:
        raise PlanError(
            f"[{node.op}] {node.name}: {q}, {k}, {v}, {sequences} sequences: expected F32 q [n, n_head, hd], k [n, n_head_kv, hd], "
            "v [n, n_head_kv, vd], heads a multiple of kv heads, n of the sequences"
        )
    return Sizes(q.shape[0] // sequences, sequences, q.shape[1], k.shape[1], q.shape[2], v.shape[2])


def visible(n: int, params: Mapping[str, Any]) -> Array:
    """[n, n]: whether the token of a row sees that of a column."""
    if not params.get("causal", True):
        return np.ones((n, n), bool)
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    window = int(params.get("window", 0))
    return np.asarray((j <= i) & ((window == 0) | (j + window > i)))


def scores_of(q: Array, k: Array, params: Mapping[str, Any]) -> Array:
    """[n, n] of one head, -inf where nothing is seen."""
    s = q @ k.T * params["scale"]
    cap = params.get("softcap", 0.0)
    if cap:
        s = cap * np.tanh(s / cap)
    return np.where(visible(len(q), params), s, -np.inf)


def attention(q: Array, k: Array, v: Array, params: Mapping[str, Any]) -> tuple[Array, Array]:
    """y and lse, in the precision of the operands."""
    sequences = params.get("sequences", 1)
    n, group = len(q) // sequences, q.shape[1] // k.shape[1]
    y, lse = np.zeros((len(q), q.shape[1], v.shape[2])), np.zeros(q.shape[:2])
    for sequence, head in np.ndindex(sequences, q.shape[1]):
        rows = slice(sequence * n, (sequence + 1) * n)
        s = scores_of(q[rows, head], k[rows, head // group], params)
        top = s.max(axis=-1, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(axis=-1, keepdims=True)
        y[rows, head] = e / total @ v[rows, head // group]
        lse[rows, head] = (top + np.log(total))[:, 0]
    return y, lse


def attention_back(dy: Array, q: Array, k: Array, v: Array, params: Mapping[str, Any]) -> list[Array]:
    """dq, dk, dv."""
    sequences = params.get("sequences", 1)
    n, group = len(q) // sequences, q.shape[1] // k.shape[1]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    cap = params.get("softcap", 0.0)
    for sequence, head in np.ndindex(sequences, q.shape[1]):
        rows, kv = slice(sequence * n, (sequence + 1) * n), head // group
        s = scores_of(q[rows, head], k[rows, kv], params)
        weights = np.exp(s - s.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        d_weights = dy[rows, head] @ v[rows, kv].T
        d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True))
        if cap:
            d_scores = d_scores * (1.0 - np.square(np.where(np.isfinite(s), s, 0.0) / cap))
        d_scores = d_scores * params["scale"]
        dq[rows, head] = d_scores @ k[rows, kv]
        dk[rows, kv] += d_scores.T @ q[rows, head]
        dv[rows, kv] += weights.T @ dy[rows, head]
    return [dq, dk, dv]


def _choice(sizes: Sizes, ctx: LowerContext) -> Choice:
    return ctx.tuning.pick("attention_train", head_dim=max(sizes.hd, sizes.vd), n=sizes.n)


def _launch(node: Node, ctx: LowerContext, shader: str, args: Sequence[Arg], sizes: Sizes, columns: int, flops: int = 0) -> Dispatch:
    """A workgroup for 32 tokens of a head of Q, and for as many of the columns as it may have; or for a token a lane, where the table of
    tuning says so."""
    params = node.params
    chunks = min(MAX_CHUNKS, ceil_div(columns, TILE))
    parts = ceil_div(columns, TILE * chunks)
    choice = _choice(sizes, ctx)
    lanes, required, use_shuffles = lanes_for(ctx.caps)
    variant = Variant.of(f"attention/train/{shader}.comp", {"CHUNKS": chunks})
    tokens, how = TILE, f"64 threads, tiles of {TILE}, {chunks} of them along the columns"
    if choice["tiles"] == "lanes" and use_shuffles:
        variant = Variant.of(
            f"attention/train/{shader}_lanes.comp", {"HD": sizes.hd, "LANES": lanes, "VD": sizes.vd}, subgroup_size=required
        )
        tokens, how, parts = lanes, f"{lanes} threads, a token each", 1
    groups = (ceil_div(sizes.n, tokens), sizes.heads, sizes.sequences * parts)
    if max(groups) > MAX_GROUPS_X:
        raise PlanError(f"[{node.op}] {node.name}: {groups} workgroups; at most {MAX_GROUPS_X} along an axis")
    push = pack_push(
        sizes.n,
        sizes.heads,
        sizes.kv_heads,
        sizes.hd,
        sizes.vd,
        int(params.get("causal", True)),
        int(params.get("window", 0)),
        parts,
        float(params["scale"]),
        float(params.get("softcap", 0.0)),
    )
    return Dispatch(
        variant,
        tuple(args),
        push,
        groups,
        node.op,
        node.name,
        f"{how}: {choice.source}",
        nbytes=sum(nbytes(a.tensor) for a in args),
        flops=flops,
    )


def _products(sizes: Sizes, params: Mapping[str, Any]) -> int:
    """Pairs of a query and a key that it sees, of all heads."""
    window = int(params.get("window", 0)) or sizes.n
    seen = sum(min(i + 1, window) for i in range(sizes.n)) if params.get("causal", True) else sizes.n**2
    return seen * sizes.heads * sizes.sequences


MATRIX_DIM = 128
"""Largest head size by matrices: a subgroup has all sums of its rows in registers."""


def _matrix_shape(sizes: Sizes, ctx: LowerContext) -> tuple[int, int, int] | None:
    """The matrices to take with act "f16"; None: f32. Weights that come as sums become matrices A, and lanes share rows evenly."""
    caps = ctx.caps
    if ctx.act != "f16" or max(sizes.hd, sizes.vd) > MATRIX_DIM or not caps.has_subgroup_ops("basic"):
        return None
    if _choice(sizes, ctx)["f16"] == "f32":
        return None
    for rows, columns, depth in matrix_shapes(caps):
        whole = not any(size % columns or size % depth for size in (sizes.hd, sizes.vd))
        if columns == depth and caps.subgroup_size % rows == 0 and rows * columns % caps.subgroup_size == 0 and whole:
            return rows, columns, depth
    return None


class _Matrices:
    """The dispatches of an attention by matrices."""

    def __init__(self, node: Node, ctx: LowerContext, sizes: Sizes, matrix: tuple[int, int, int]) -> None:
        self.node, self.ctx, self.sizes, self.matrix = node, ctx, sizes, matrix
        self.rows = ceil_div(sizes.n, max(matrix)) * max(matrix)
        choice = _choice(sizes, ctx)
        self.warps: int = choice["warps"]
        self.walked: int = max(choice["rows"], matrix[1]) // matrix[1] * matrix[1]
        self.source = choice.source
        if ctx.caps.software:  # there subgroups' barriers may be the workgroup's
            self.warps = 1
        while self.warps > 1 and self.warps * ctx.caps.subgroup_size > ctx.caps.max_workgroup_invocations:
            self.warps //= 2
        while self.walked > matrix[1] and self.shared_bytes > ctx.caps.max_shared_memory:
            self.walked = max(matrix[1], self.walked // 2 // matrix[1] * matrix[1])
        self.dispatches: list[Dispatch] = []

    @property
    def shared_bytes(self) -> int:
        """Shared memory of shaders/attention/train/train_matrix.comp."""
        rows, columns, _ = self.matrix
        walked = self.walked * (16 * (self.sizes.hd // 8 + self.sizes.vd // 8 + 2) + 8)
        return walked + self.warps * rows * (16 * (columns // 8 + 1) + 4 * columns + 4)

    def packed(self, x: Tensor, heads: int, dim: int) -> Arg:
        """Packs x [tokens, heads, dim]."""
        sizes, caps = self.sizes, self.ctx.caps
        count = sizes.sequences * heads
        y = Tensor(f"{self.node.name}.{x.name}.f16", "F16", (count * (self.rows * dim + 2),))
        if sizes.sequences > MAX_GROUPS_X:
            raise PlanError(f"[{self.node.op}] {self.node.name}: {sizes.sequences} sequences; at most {MAX_GROUPS_X}")
        wg = workgroup_size(caps, PACK_THREADS, sizes.n * dim // 4)
        defines, pinned = reduction(caps, wg)
        self.dispatches.append(
            Dispatch(
                Variant.of("attention/train/train_pack.comp", defines, subgroup_size=pinned),
                (Arg(x), Arg(y, "w"), Arg(overflow_word(y), "rw")),
                pack_push(sizes.n, self.rows, dim // 4),
                (heads, sizes.sequences, 1),
                self.node.op,
                self.node.name,
                f"f16 by heads, {wg} threads",
                nbytes=nbytes(x) + nbytes(y),
            )
        )
        return Arg(y)

    def launch(self, kind: Literal["forward", "dq", "dk", "dv"], args: Sequence[Arg], flops: int) -> None:
        """A subgroup for each tile of rows of a head. args: in the kernel's order."""
        sizes, params, caps = self.sizes, self.node.params, self.ctx.caps
        push = pack_push(
            sizes.n,
            self.rows,
            sizes.heads,
            sizes.kv_heads,
            sizes.sequences,
            int(params.get("causal", True)),
            int(params.get("window", 0)),
            float(params["scale"]),
            float(params.get("softcap", 0.0)),
        )
        constants = {"HD": sizes.hd, "VD": sizes.vd, "ROWS": self.walked, "KIND": KINDS.index(kind)}
        spec = matrix_spec(self.warps, self.matrix, caps) | constants
        groups = (ceil_div(sizes.n, self.matrix[0] * self.warps), sizes.heads, sizes.sequences)
        self.dispatches.append(
            Dispatch(
                Variant.of("attention/train/train_matrix.comp", spec=spec, subgroup_size=required_subgroup(caps)),
                tuple(args),
                push,
                groups,
                self.node.op,
                self.node.name,
                f"{kind}, matrices {'x'.join(map(str, self.matrix))}, {self.warps} subgroups, {self.walked} rows at a time: {self.source}",
                nbytes=sum(nbytes(a.tensor) for a in args),
                flops=flops,
            )
        )


def prebuilt_variants() -> list[Variant]:
    """The modules that need a compiler with cooperative matrices."""
    return [Variant("attention/train/train_matrix.comp")]


class _Training:
    """Cases of both ops: of the same attention, forward and back."""

    name: ClassVar[str]
    back: ClassVar[bool]

    def build_case(
        self,
        hsk: int = 64,
        hsv: int = 64,
        nh: int = 3,
        nr: int = 3,
        n: int = 40,
        sequences: int = 1,
        causal: bool = True,
        window: int = 0,
        logit_softcap: float = 0.0,
        act: str = "auto",
        seed: int = 67,
    ) -> Case:
        """hsk, hsv: head sizes, nh: kv heads, nr: heads of each, n: tokens of each of the sequences."""
        if act not in ("auto", "f32", "f16"):
            raise CaseLineError(f"{self.name}: act={act}: expected one of auto, f32, f16")
        if min(hsk, hsv, nh, nr, n, sequences) < 1 or window < 0 or logit_softcap < 0:
            raise CaseLineError(f"{self.name}: expected hsk, hsv, nh, nr, n and sequences above 0, window and logit_softcap from 0")
        tokens, heads = n * sequences, nh * nr
        shapes = {"q": (tokens, heads, hsk), "k": (tokens, nh, hsk), "v": (tokens, nh, hsv)}
        for shape in (*shapes.values(), (n, n)):
            sized(shape)
        params = {"scale": 1.0 / math.sqrt(hsk), "causal": causal, "window": window, "sequences": sequences, "softcap": logit_softcap}

        def make(rng: np.random.Generator) -> Problem:
            inputs = [Tensor(name, "F32", shape, "input") for name, shape in shapes.items()]
            values = {t.name: rng.uniform(-2, 2, t.shape).astype(np.float32) for t in inputs}
            y, lse = Tensor("y", "F32", (tokens, heads, hsv), "input"), Tensor("lse", "F32", (tokens, heads), "input")
            if not self.back:
                outputs = tuple(Tensor(t.name, "F32", t.shape) for t in (y, lse))
                return Problem(Node(self.name, tuple(inputs), outputs, params), values)
            q, k, v = (values[name].astype(np.float64) for name in shapes)
            forward = attention(q, k, v, params)
            values |= {name: value.astype(np.float32) for name, value in zip(("y", "lse"), forward, strict=True)}
            values["dy"] = rng.uniform(-1, 1, y.shape).astype(np.float32)
            outputs = tuple(Tensor(f"d{t.name}", "F32", t.shape) for t in inputs)
            return Problem(Node(self.name, (Tensor("dy", "F32", y.shape, "input"), *inputs, y, lse), outputs, params), values)

        shown = {
            "hsk": hsk,
            "hsv": hsv,
            "nh": nh,
            "nr": nr,
            "n": n,
            "sequences": sequences,
            "causal": int(causal),
            "window": window,
            "logit_softcap": logit_softcap,
            **({"act": act} if act != "auto" else {}),
            "seed": seed,
        }
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(64, 64, 2, 3, 67)
        yield self.build_case(40, 36, 1, 2, 35, sequences=3, window=9, logit_softcap=5.0)
        yield self.build_case(64, 64, 1, 2, 2, causal=False)
        yield self.build_case(64, 48, 2, 2, 45, sequences=2, window=19, logit_softcap=8.0, act="f16")
        yield self.build_case(136, 40, 2, 2, 35, sequences=2, window=9, logit_softcap=5.0)  # wider than CPU drivers have a row a lane

    def full_cases(self) -> Iterator[Case]:
        for hd, n in ((128, 100), (256, 33), (8, 70)):
            for window in (0, 5, 33):
                yield self.build_case(hd, hd, 2, 2, n, window=window)
                yield self.build_case(hd, hd, 2, 2, n, window=window, act="f16")
        yield self.build_case(32, 32, 1, 1, 50, causal=False, act="f16")

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(64, 64, 3, 3, 512)
        yield self.build_case(128, 128, 8, 4, 512)
        for rows, warps in ((32, 4), (16, 4), (32, 8), (32, 2), (64, 4)):
            yield self.build_case(128, 128, 8, 4, 512, act="f16").where(rows=rows, warps=warps)


@register
class FlashAttnLse(_Training, Op):
    """Attention that keeps its log-sum-exp; see the module's text."""

    name = "FLASH_ATTN_LSE"
    back = False

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        sizes = sizes_of(node, *node.inputs)
        pairs = _products(sizes, node.params)
        return {"fmul": pairs * (sizes.hd + sizes.vd + 1), "fexp": pairs}

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """The weights are made again from the log-sum-exp."""
        grads = [tape.like(t) for t in node.inputs]
        tape.add("FLASH_ATTN_BACK", (dy, *node.inputs, *node.outputs), tuple(grads), **node.params)
        return grads

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        q, k, v = (np.asarray(i, np.float64) for i in inputs)
        return list(attention(q, k, v, params))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, k, v = node.inputs
        y, lse = node.outputs
        sizes = sizes_of(node, q, k, v)
        rows = q.shape[0] * sizes.heads
        if y.elements != rows * sizes.vd or lse.elements != rows:
            raise PlanError(f"[{self.name}] {node.name}: outputs {y}, {lse}: expected {rows} rows of {sizes.vd} values, and {rows} sums")
        flops = 2 * _products(sizes, node.params) * (sizes.hd + sizes.vd)
        if (matrix := _matrix_shape(sizes, ctx)) is not None:
            by = _Matrices(node, ctx, sizes, matrix)
            own = by.packed(q, sizes.heads, sizes.hd)
            walked = (by.packed(k, sizes.kv_heads, sizes.hd), by.packed(v, sizes.kv_heads, sizes.vd))
            by.launch("forward", (own, own, *walked, Arg(lse, "w"), own, Arg(y, "w")), flops)
            return by.dispatches
        args = (Arg(q), Arg(k), Arg(v), Arg(y, "w"), Arg(lse, "w"))
        return [_launch(node, ctx, "train_forward", args, sizes, sizes.vd, flops=flops)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if _matrix_shape(sizes_of(node, *node.inputs), ctx) is not None:
            return F16_ATTENTION
        return Tolerance(1e-11, 3e-5, "f32 sums; scores up to 10 are off by 2^-20, and so are their exponentials relative to themselves")


@register
class FlashAttnBack(_Training, Gradient):
    """Gradients of attention by q, k and v; see the module's text."""

    name = "FLASH_ATTN_BACK"
    back = True

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        sizes = sizes_of(node, *node.inputs[1:4])
        pairs = _products(sizes, node.params)
        return {"fmul": pairs * (5 * sizes.hd + 4 * sizes.vd + 4), "fexp": 2 * pairs}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        """y and lse follow from the others."""
        dy, q, k, v = (np.asarray(i, np.float64) for i in inputs[:4])
        return attention_back(dy.reshape(*q.shape[:2], -1), q, k, v, params)

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        return against(inputs[0], lambda q, k, v: attention(q, k, v, params)[0], *inputs[1:4])

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        dy, q, k, v, y, lse = node.inputs
        dq, dk, dv = node.outputs
        sizes = sizes_of(node, q, k, v)
        rows = q.shape[0] * sizes.heads
        sums = [(dy, rows * sizes.vd), (y, rows * sizes.vd), (lse, rows), (dq, q.elements), (dk, k.elements), (dv, v.elements)]
        for t, count in sums:
            if t.elements != count:
                raise PlanError(f"[{self.name}] {node.name}: {t}: expected {count} values")
        delta = Tensor(f"{node.name}.delta", "F32", (rows,))
        group = sizes.heads // sizes.kv_heads
        matrix = _matrix_shape(sizes, ctx)
        made_k, made_v = dk, dv
        if group > 1:  # a head of queries at a time, added up below
            made_k, made_v = (Tensor(f"{t.name}.heads", "F32", (q.shape[0], sizes.heads, t.shape[-1])) for t in (dk, dv))
        given = (Arg(q), Arg(k), Arg(v), Arg(dy), Arg(lse), Arg(delta))
        pairs = _products(sizes, node.params)
        flops_q, flops_kv = 2 * pairs * (2 * sizes.hd + sizes.vd), 4 * pairs * (sizes.hd + sizes.vd)
        dispatches = [
            by_threads(
                node,
                ctx,
                "attention/train/train_delta.comp",
                (Arg(dy), Arg(y), Arg(delta, "w")),
                (rows, sizes.vd),
                rows,
                flops=2 * y.elements,
            )
        ]
        if matrix is not None:
            by = _Matrices(node, ctx, sizes, matrix)
            queries = (by.packed(q, sizes.heads, sizes.hd), by.packed(dy, sizes.heads, sizes.vd))
            keys = (by.packed(k, sizes.kv_heads, sizes.hd), by.packed(v, sizes.kv_heads, sizes.vd))
            by.launch("dq", (*queries, *keys, *given[4:], Arg(dq, "w")), flops_q)
            by.launch("dk", (*keys, *queries, *given[4:], Arg(made_k, "w")), flops_kv // 2)
            by.launch("dv", (*keys, *queries, *given[4:], Arg(made_v, "w")), flops_kv // 2)
            dispatches += by.dispatches
        else:
            dispatches += [
                _launch(node, ctx, "train_back_q", (*given, Arg(dq, "w")), sizes, sizes.hd, flops=flops_q),
                _launch(
                    node, ctx, "train_back_kv", (*given, Arg(made_k, "w"), Arg(made_v, "w")), sizes, max(sizes.hd, sizes.vd), flops=flops_kv
                ),
            ]
        if group > 1:
            for part, whole in ((made_k, dk), (made_v, dv)):
                dispatches += column_sums(node, ctx, part, whole, group, part.shape[-1], q.shape[0] * sizes.kv_heads)
        return dispatches

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if _matrix_shape(sizes_of(node, *node.inputs[1:4]), ctx) is not None:
            return F16_ATTENTION
        return Tolerance(1e-10, 1e-4, "f32 sums; weights are off by 2^-20 of themselves, and dy v and delta cancel")
