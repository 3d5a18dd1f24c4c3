"""Attention as nodes of its own (`-fa 0`; shaders/attention/unfused): what ggml builds without flash attention, over a KV cache as it is.

    MUL_MAT_KQ   q F32 [n, n_head, hd], cache_k [n_head_kv, n_ctx, hd], pos I32 [n] or [n, 2] [, slots, pages] -> kq F32 [n_head, n, rows]
    SOFT_MAX_KQ  kq, pos [, sinks F32 [n_head]] -> F32 [n_head, n, rows]; params: scale [, softcap]
    MUL_MAT_KQV  kq_soft_max, cache_v, pos [, slots, pages] -> kqv F32 [n_head, n, vd]; params: [v_dim]

Positions, windows, chunks, softcap, sinks, pages and types of caches are those of FLASH_ATTN_EXT (flash.py), and so are the params window,
chunked and page; `rows` are those that a sequence may have. Of a row that a token does not see, score and weight are 0, and neither it nor
they are read. All arithmetic is F32, and no value depends on the other tokens. It is for looking into attention, not for speed: a score for
every head, token and row goes through memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.attention.cases import first_row
from vkback.ops.attention.choice import check, softcap_of, v_dim, window_of
from vkback.ops.attention.paged import page_of, paged_inputs, physical_rows, rows_of
from vkback.ops.cache import CACHE_TYPES, cached_bytes
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.cost import Cost, times
from vkback.ops.cost import total as total_of
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, register
from vkback.ops.soft_max import softmax_tolerance, threads_of_a_row
from vkback.ops.storage import nbytes
from vkback.ops.view import View
from vkback.ops.workgroup import Defines, power_of_two, workgroup_size
from vkback.shader import Variant

QUERY_BYTES = 8192
"""Of shared memory, at most, that the queries of a workgroup take: half of what every device has."""

KQ_QUERIES, KQV_QUERIES = 8, 4
"""(Head, token) pairs that share the reads of a workgroup, at most: a thread has a sum of each, of values eight."""

THREADS = 64


def without_flash(node: Node) -> list[Node]:
    """The nodes that make what a FLASH_ATTN_EXT of a graph makes. Raises PlanError for one that a fusion has changed."""
    q, cache_k, cache_v, pos, *rest = node.inputs
    out = node.outputs[0]
    if node.params.get("split_q") or out.type != "F32":
        raise PlanError(f"[attention] {node.name}: {out}, queries in parts: expected the node as the graph has it")
    paged = [t for _, t in paged_inputs(node)]
    sinks = rest[: len(rest) - len(paged)]
    n, n_head = q.shape[:2]
    vd = v_dim(node, cache_v)
    layer = out.name.removeprefix("kqv_out") if out.name.startswith("kqv_out") else f"-{out.name}"
    shape = (n_head, n, rows_of(node))
    scores, weights = (Tensor(f"{name}{layer}", "F32", shape) for name in ("kq", "kq_soft_max"))
    mixed = Tensor(f"kqv{layer}", "F32", (n_head, n, vd))
    seen = {key: node.params[key] for key in ("window", "chunked") if key in node.params}
    read = seen | ({"page": page_of(node)} if paged else {})
    soft = seen | {key: node.params[key] for key in ("scale", "softcap") if key in node.params}
    return [
        Node("MUL_MAT_KQ", (q, cache_k, pos, *paged), (scores,), read),
        Node("SOFT_MAX_KQ", (scores, pos, *sinks), (weights,), soft),
        Node("MUL_MAT_KQV", (weights, cache_v, pos, *paged), (mixed,), read | ({"v_dim": vd} if vd != cache_v.shape[2] else {})),
        Node("CONT", (mixed,), (out,), {"view": View(0, (n, n_head, vd), (vd, n * vd, 1))}),
    ]


def rows_seen(pos: Array, params: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Of each token the first row that it sees and the one behind the last; equal where it sees none."""
    if np.ndim(pos) == 2:
        return [(min(int(first), int(last) + 1), int(last) + 1) for first, last in pos]
    window, chunked = int(params.get("window", 0)), bool(params.get("chunked", False))
    return [(first_row(int(p), window, chunked), int(p) + 1) if p >= 0 else (0, 0) for p in pos]


def _of_cache(cache: Array, token: int, rows: tuple[int, int], paged: Sequence[Array], page: int) -> Array:
    """Those rows of the token's sequence, float64 [n_head_kv, rows, width]."""
    first, end = rows
    if not page:
        return np.asarray(cache[:, first:end], np.float64)
    slots, pages = paged
    return np.asarray(cache[:, physical_rows(pages, int(slots[token]), end, page)[first:]], np.float64)


def _tile(node: Node, cache: Tensor, n_head: int, n: int, most: int) -> tuple[int, int]:
    """(heads, tokens) of a workgroup: heads that share one of the cache, and tokens that share its rows."""
    group = n_head // cache.shape[0]
    heads = max(d for d in range(1, min(group, most) + 1) if group % d == 0)
    return heads, 1 if page_of(node) else max(1, min(n, most // heads))


def _checked(node: Node, ctx: LowerContext, cache: Tensor, n_head: int, vd: int) -> None:
    """Raises PlanError as attention does."""
    plain = Node(node.op, node.inputs, node.outputs, {"v_dim": vd})
    check(plain, ctx, cache, cache, n_head)
    for t in (node.inputs[0], node.outputs[0]):
        if nbytes(t) > ctx.caps.max_storage_buffer_range:
            raise PlanError(
                f"[attention] {t}: {nbytes(t)} bytes, {ctx.caps.name} binds at most {ctx.caps.max_storage_buffer_range} at once. "
                "Without flash attention (-fa 0) a score of every head, token and row is kept: take fewer tokens at once (-ub), or a "
                "smaller context (-c)"
            )


def _over_cache(node: Node, ctx: LowerContext, shader: str, cache: Tensor, n_head: int, wg: int, most: int, flops: int) -> Dispatch:
    """The dispatch of a product with a cache: bindings x, cache, pos, y, and those of pages; its last groups count tokens."""
    x, _, pos, *_ = node.inputs
    y = node.outputs[0]
    n, rows = pos.shape[0], rows_of(node)
    heads, tokens = _tile(node, cache, n_head, n, most)
    paged = paged_inputs(node)
    defines: Defines = {
        "CACHE_TYPE": CACHE_TYPES[cache.type],
        "PITCH": cache.shape[2] // 8,
        "HEADS": heads,
        "TOKENS": tokens,
        "WG_SIZE": wg,
        "SPANS": int(len(pos.shape) == 2),
    }
    push = [n, n_head, cache.shape[0], cache.shape[1], rows, window_of(node)[1]]
    if paged:
        defines |= {f"BIND_{role.upper()}": 4 + i for i, (role, _) in enumerate(paged)}
        defines["PAGE"] = page_of(node)
        push.append(paged[1][1].shape[1])
    if shader == "kq":
        defines["HD"] = cache.shape[2]
        groups = (n_head // heads, ceil_div(rows, wg), ceil_div(n, tokens))
    else:
        defines["VD"] = y.shape[-1]
        groups = (n_head // heads, ceil_div(n, tokens), 1)
    return Dispatch(
        Variant.of(f"attention/unfused/{shader}.comp", defines),
        (Arg(x), Arg(cache), Arg(pos), Arg(y, "w"), *(Arg(t) for _, t in paged)),
        pack_push(*push),
        groups,
        node.op,
        node.name,
        f"{wg} threads, {heads} heads and {tokens} tokens a workgroup: nothing to choose",
        nbytes=nbytes(x) + nbytes(y) + cache.shape[0] * rows * _row_bytes(node, cache),
        flops=flops,
    )


class _Part(Op):
    """A node of the chain of `without_flash`, with the cases that they share."""

    ggml_nmse = 5e-4

    def cases(self) -> Iterator[Case]:
        yield self.build_case(8, 2, 64, 300, (299,), seed=1)
        yield self.build_case(7, 1, 64, 130, (128, 3, -1), seed=2)
        yield self.build_case(4, 4, 80, 70, (33, -1, 0), seed=3, window=20, sinks=True)
        yield self.build_case(4, 2, 96, kv=67, nb=37, seed=4, window=16, softcap=2.0)
        yield self.build_case(6, 2, 64, kv=70, nb=37, seed=5, window=32, chunked=True, type_k="q8_0", type_v="q4_0")
        yield self.build_case(4, 1, 40, 50, (49, 17), seed=6, type_k="f32", type_v="f32")
        yield self.build_case(16, 1, 576, 100, (99, 40), seed=7, vd=512, v_view=True)
        yield self.build_case(3, 3, 192, 90, (89, 3), seed=8, vd=128, type_k="q4_0", type_v="q8_0")
        yield self.build_case(8, 2, 32, 96, (70, 71, -1, 5), seed=9, page=32, slots=(1, 1, 0, 2), sinks=True)
        yield self.build_case(4, 2, 64, 96, (70, 40, 7, 5), seed=10, first=(3, 40, 0, 1))
        yield self.build_case(4, 1, 256, kv=40, nb=19, seed=11)
        yield self.build_case(4, 2, 128, kv=40, nb=17, seed=12)

    def full_cases(self) -> Iterator[Case]:
        for hd in (32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512):
            for ratio, nb, kv in ((1, 1, 513), (4, 35, 113), (7, 3, 300), (12, 2, 64)):
                yield self.build_case(2 * ratio, 2, hd, kv=kv, nb=nb, window=50 * (nb == 3), sinks=nb == 2, softcap=3.0 * (nb == 35))
        for type_k, type_v in (("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f32", "f16")):
            for nb in (1, 33):
                yield self.build_case(8, 2, 128, kv=300, nb=nb, type_k=type_k, type_v=type_v)

    def build_case(
        self,
        n_head: int,
        n_head_kv: int,
        hd: int,
        n_ctx: int = 0,
        pos: Shape = (),
        window: int = 0,
        sinks: bool = False,
        kv: int = 0,
        nb: int = 0,
        seed: int = 1,
        vd: int = 0,
        v_view: bool = False,
        type_k: str = "f16",
        type_v: str = "f16",
        page: int = 0,
        slots: Shape = (),
        softcap: float = 0.0,
        first: Shape = (),
        chunked: bool = False,
    ) -> Case:
        """The node of a FLASH_ATTN_EXT of these parameters, on what the nodes before it make, with NaN where nothing may be read."""
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        whole = OPS["FLASH_ATTN_EXT"].build_case(**given)

        def make(rng: np.random.Generator) -> Problem:
            problem = whole.make(rng)
            node = next(n for n in without_flash(problem.node) if n.op == self.name)
            values = {t.name: problem.values[t.name] for t in node.inputs if t.name in problem.values}
            scores = node.inputs[0]
            if scores.name not in values:
                z = rng.standard_normal(scores.shape, np.float32)
                seen = _seen(values["pos"], scores.shape, node.params)
                if self.name == "SOFT_MAX_KQ":
                    z *= 3 * np.float32(hd**0.5)
                else:
                    z = np.where(seen, np.exp(z), 0)
                    z /= np.maximum(z.sum(axis=-1, keepdims=True), np.float32(1e-6))
                values[scores.name] = np.where(seen, z, np.float32("nan"))
            return Problem(node, values)

        return Case(self.name, {key: value for key, value in whole.params.items() if key != "y"}, make, seed)


class _Product(_Part):
    """One with a cache."""

    formula = "X*Y"

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the cache the rows in use."""
        if tensor.kind != "state":
            return nbytes(tensor)
        return tensor.shape[0] * min(n_kv, tensor.shape[1]) * _row_bytes(node, tensor)


def _row_bytes(node: Node, cache: Tensor) -> int:
    """What is read of a row: all of K's, of V's as much as the output has."""
    return cached_bytes(cache.type, node.outputs[0].shape[-1] if node.op == "MUL_MAT_KQV" else cache.shape[2])


def _seen(pos: Array, shape: Shape, params: Mapping[str, Any]) -> Array:
    """Whether a token sees a row: [1, n, rows]."""
    rows = np.arange(shape[-1])
    return np.array([(rows >= first) & (rows < end) for first, end in rows_seen(pos, params)])[None]


@register
class MulMatKq(_Product):
    """Scores of attention; see the module's text."""

    name = "MUL_MAT_KQ"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        q, cache, pos, *paged = inputs
        page = int(params.get("page", 0))
        n, n_head, hd = q.shape
        kv = cache.shape[0]
        out = np.zeros((n_head, n, paged[1].shape[1] * page if page else cache.shape[1]))
        for t, (first, end) in enumerate(rows_seen(pos, params)):
            if end > first:
                k = _of_cache(cache, t, (first, end), paged, page)
                by_kv = np.asarray(q[t], np.float64).reshape(kv, n_head // kv, hd)
                out[:, t, first:end] = (by_kv @ k.transpose(0, 2, 1)).reshape(n_head, end - first)
        return [out]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        q = node.inputs[0]
        return {"fmul": q.elements * min(n_kv, node.outputs[0].shape[-1])}

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, cache, *_ = node.inputs
        _, n_head, hd = q.shape
        _checked(node, ctx, cache, n_head, hd)
        most = max(1, min(KQ_QUERIES, QUERY_BYTES // (4 * hd)))
        wg = workgroup_size(ctx.caps, THREADS)
        return [_over_cache(node, ctx, "kq", cache, n_head, wg, most, 2 * q.elements * node.outputs[0].shape[-1])]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of exact products, relative error about sqrt(hd) * 2^-24")


@register
class SoftMaxKq(_Part):
    """Weights of attention; see the module's text."""

    name = "SOFT_MAX_KQ"
    formula = "soft_max(x)"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [self._logits_and_softmax(inputs, params)[-1]]

    @np.errstate(invalid="ignore", over="ignore")
    def _logits_and_softmax(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> tuple[Array, Array, Array]:
        """Logits, -inf where a row is not seen; the sizes of what they are rounded from; their softmax."""
        kq, pos, *sinks = inputs
        z = np.asarray(kq, np.float64) * params["scale"]
        z = np.where(np.isinf(z), np.nan, z)
        sizes = np.abs(z)
        if cap := float(params.get("softcap", 0.0)):
            z = cap * np.tanh(z / cap)
            sizes = sizes + 8 * np.abs(z)  # tanh is off by some ulp of its own
        seen = _seen(pos, z.shape, params)
        z = np.where(seen, z, -np.inf)
        sink = np.asarray(sinks[0], np.float64)[:, None, None] if sinks else np.full((1, 1, 1), -np.inf)
        top = np.maximum(z.max(axis=-1, keepdims=True), sink)
        top = np.where(np.isneginf(top), 0.0, top)
        e = np.exp(z - top)
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        return z, np.where(seen, sizes, 0.0), np.where(seen, e / np.where(total == 0, 1.0, total), 0.0)

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value: its scale and the sum's inverse, subtraction of the maximum and the sum, an exponential; a sink adds an exponential
        and a sum for each row."""
        n_head, n, rows = node.outputs[0].shape
        sinks = times({"fadd": 1, "fexp": 1}, n_head * n) if len(node.inputs) > 2 else {}
        return total_of((times({"fmul": 2, "fadd": 2, "fexp": 1}, n_head * n * min(rows, n_kv)), sinks))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        kq, pos, *sinks = node.inputs
        n_head, n, rows = kq.shape
        if pos.shape[0] != n or (sinks and sinks[0].elements != n_head):
            raise PlanError(f"[{self.name}] {node.name}: {', '.join(map(str, node.inputs[1:]))} do not fit {kq}")
        wg, choice = threads_of_a_row(kq, ctx)
        cap = softcap_of(node)
        return [
            by_rows(
                node,
                ctx,
                "attention/unfused/soft_max.comp",
                (Arg(kq), Arg(pos), Arg(node.outputs[0], "w"), *map(Arg, sinks)),
                (n, n_head, rows, window_of(node)[1], float(node.params["scale"]), cap),
                n_head * n,
                wg,
                choice,
                {"HAS_SINKS": len(sinks), "HAS_SOFTCAP": int(cap > 0.0), "SPANS": int(len(pos.shape) == 2)},
                flops=8 * kq.elements,
            )
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-3, "f32; exp(z - max) with |z| up to 20 has 3 + 2|z| ulp by Vulkan's rules")

    def tolerance_at(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Tolerance:
        return softmax_tolerance(*self._logits_and_softmax(inputs, node.params), threads_of_a_row(node.inputs[0], ctx)[0])


@register
class MulMatKqv(_Product):
    """Attention's sum of values; see the module's text."""

    name = "MUL_MAT_KQV"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, cache, pos, *paged = inputs
        n_head, n, _ = w.shape
        kv = cache.shape[0]
        vd = int(params.get("v_dim", cache.shape[2]))
        out = np.zeros((n_head, n, vd))
        for t, (first, end) in enumerate(rows_seen(pos, params)):
            if end > first:
                v = _of_cache(cache, t, (first, end), paged, int(params.get("page", 0)))[..., :vd]
                by_kv = np.asarray(w[:, t, first:end], np.float64).reshape(kv, n_head // kv, end - first)
                out[:, t] = (by_kv @ v).reshape(n_head, vd)
        return [out]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fmul": node.outputs[0].elements * min(n_kv, node.inputs[0].shape[-1])}

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        w, cache, *_ = node.inputs
        y = node.outputs[0]
        _checked(node, ctx, cache, w.shape[0], y.shape[-1])
        wg = max(workgroup_size(ctx.caps, THREADS), power_of_two(y.shape[-1] // 8))
        return [_over_cache(node, ctx, "kqv", cache, w.shape[0], wg, KQV_QUERIES, 2 * w.elements * y.shape[-1])]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of exact weights times exact values, relative error about sqrt(rows) * 2^-24")
