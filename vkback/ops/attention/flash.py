"""FLASH_ATTN_EXT and ATTN_DECODE: attention over a KV cache (shaders/attention).

    FLASH_ATTN_EXT  q F32 [n, n_head, hd], cache_k F16 [n_head_kv, n_ctx, hd], cache_v F16 [n_head_kv, n_ctx, vd], pos I32 [n] or [n, 2]
                    [, sinks F32 [n_head]] -> F32 or Q8_1 [n, n_head * vd], or of a prompt F16 as gemm_pack.packed has it
                    [, slots I32 [n], pages I32 [n_slots, max_pages]]
                    params: scale [, window, chunked, softcap, v_dim, split_q, page] [, fragments: the order of an F16 output; units:
                    GemmShape of the product that reads it in unit order, gemm_reg.packed_units]; with v_dim V is the first v_dim values
                    of each row of cache_v, which may be K's (MLA); with split_q the last input is q_pe F32 [n, n_head, rot], the
                    last rot values of each head of Q: of q count the first hd - rot values of a row.
                    With page the caches hold rows of several sequences in pages of so many: row r of token t's sequence is row r % page of
                    page pages[slots[t], r // page] (vkback/ops/attention/paged.py)
    ATTN_DECODE     qkv F32 [1, (n_head + 2 n_head_kv) * hd], pos I32 [1], cache_k, cache_v [, angles F32 [1, n_dims / 2, 2] (ROPE_ANGLES)]
                    [, q_norm, k_norm F32 [hd], with norm_all [heads * hd]] [, sinks F32 [n_head]] [, gate F32 [1, n_head * hd]]
                    [, slots, pages]
                    -> the same, cache_k, cache_v
                    params: those of ROPE (n_dims 0: no RoPE and no angles), n_head, n_head_kv, head_dim, scale [, window, chunked, softcap,
                    eps], has_norm [, norm_all: over all heads of Q or K at once; norm_v: V is normed, too, without a weight],
                    has_ff (angles hold factors) [, type_k, type_v: of caches that are not F16] [, gated: the attention is multiplied by the
                    sigmoid of gate] [, page]
                    Norm and RoPE of queries and key, store of key and value at row pos, attention: one token, one dispatch.
                    With shared_kv row pos is there already, of a layer before: qkv F32 [1, n_head * hd] holds queries alone, there is no
                    k_norm, and the attention is the only output.

A token at position p sees rows max(0, p + 1 - window) .. p (0 .. p where window is 0 or absent), chunked those from p // window * window
on; other rows are not read. A pos [n, 2] says
of each token the first and the last row that it sees, -1 as the last for none: texts side by side, tokens that see what comes after. With
softcap c a score s is c tanh(s / c) before the softmax. hd and vd are multiples of 8, vd of 32 where the output is Q8_1. A cache may be
F32, or Q8_0 or Q4_0, laid out as weights are; its rows are then whole units of 32 values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from vkback.constants import LOG2_E
from vkback.graph import Node, Tensor
from vkback.ops.attention import chain as attention_chain
from vkback.ops.attention import decode_matrix
from vkback.ops.attention import prompt as attention_prompt
from vkback.ops.attention.cases import DecodeCases, FlashCases, first_row
from vkback.ops.attention.choice import AttentionChoice, check, choice_of, choose, softcap_of, v_dim, window_of
from vkback.ops.attention.paged import by_sequence, page_of, paged_inputs, rows_of, token_by_sequence
from vkback.ops.cache import CACHE_TYPES, QUANTIZED, cached_bytes, stored_tolerance
from vkback.ops.case import Array, Case, Tolerance, f16_values
from vkback.ops.copies.rows import stored_rows
from vkback.ops.cost import Cost, total
from vkback.ops.dispatch import Access, Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.matmul.gemm_reg import units_stride
from vkback.ops.op import OPS, cost_rule, register
from vkback.ops.rope import angles as rope_angles
from vkback.ops.rope.rope import FREQUENCY, rotate_pairs
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant

DECODE_TOKENS = 16
"""Up to this many tokens the rows of a long context are split among workgroups, and a workgroup takes as many tokens as the tables say;
beyond, as many as it can, and nothing is split."""

MAX_LOADS = 8
"""16-byte loads of K, and as many of V, that a thread holds: 64 registers; eight values of F32 take two. More spill, and take a CPU driver
a minute to compile."""


@dataclass(frozen=True)
class Shape:
    """What a kernel is built for; see shaders/attention/decode/attention.comp."""

    wg: int
    lanes: int
    use_shuffles: bool
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
    choice: Choice,
    n: int,
    n_head: int,
    n_head_kv: int,
    hd: int,
    n_ctx: int,
    window: int,
    fused: bool,
    quantizes: bool,
    ctx: LowerContext,
    vd: int = 0,
    types: Collection[str] = ("F16",),
    paged: bool = False,
) -> Shape:
    """The tables' choice adjusted to what head size, heads and device allow: where shared memory is short, the streams meet in more
    rounds, then there are fewer threads. vd: width of V, 0: as K; types: of the caches; paged: tokens are of several sequences."""
    vd = vd or hd
    # Eight values of F32 are two 16-byte loads, so a thread holds half as many.
    loads = MAX_LOADS // 2 if "F32" in types else MAX_LOADS
    cols, k_cols = vd // 8, hd // 8
    heads = _largest_divisor(n_head // n_head_kv, choice["queries"])
    most = min(n, choice.params.get("tokens", 1)) if n <= DECODE_TOKENS else n
    # In exact mode a token has a workgroup of its own, so that its sums do not depend on the others; and tokens of several sequences share
    # no rows.
    tokens = 1 if ctx.exact or paged else max(1, min(most, choice["queries"] // heads))
    rows = min(n_ctx, window) if window else n_ctx
    # As many splits as fill the device, but none with fewer rows than pay for the merge.
    splits = min(ceil_div(choice["groups"], n_head // heads), ceil_div(rows, choice["rows_per_split"]))
    # Many tokens fill the device without splits.
    if tokens > 1 and n > DECODE_TOKENS:
        splits = 1
    queries = heads * tokens
    # A workgroup has at least one thread for each 8 values of V; reductions need a power of two.
    least = 1 << (cols - 1).bit_length()
    wg = max(workgroup_size(ctx.caps, choice["wg_size"]), least)
    while True:
        fits = [i for i in (1, 2, 4, 8, 16, 32) if i <= wg and k_cols % i == 0]
        lanes = max((i for i in fits if i <= choice["lanes"]), default=1)
        # More lanes where one would have to load more of a row than its registers hold.
        lanes = next((i for i in fits if i >= lanes and k_cols // i <= loads), fits[-1])
        steps = min(choice["steps"], max(1, loads * lanes // k_cols))
        reduce, subgroup = reduction(ctx.caps, wg, lanes=max(lanes, 8 if quantizes else 1))
        use_shuffles = bool(reduce["REDUCE_SUBGROUP"]) and lanes == cols == k_cols and queries in (1, 2, 4, 8, 16) and queries <= cols
        known = int(reduce["SUBGROUP_SIZE"])
        # Threads that hold a whole V row's sums are one stream; streams in one subgroup add up by shuffles, the others in shared memory.
        bundles = wg // cols // (known // cols if known > cols and cols & (cols - 1) == 0 else 1)
        scores = 0 if use_shuffles else 2 * steps * (wg // lanes)
        shared = 4 * queries * (max(hd, vd) + scores + 2 * bundles) + 8 * wg + 256
        if fused:  # the new key and value as they are stored, and as floats
            shared += (8 if "F32" in types else 4) * hd + (8 * hd if set(QUANTIZED) & set(types) else 0)
        # Merging in more rounds needs less shared memory: take the fewest rounds that fit.
        for parts in (i for i in range(1, queries + 1) if queries % i == 0):
            if shared + 4 * bundles * (queries // parts) * vd <= ctx.caps.max_shared_memory:
                rounds = queries // parts
                readers = max(1, min(splits, wg * 4 // (queries * vd), bundles * rounds // queries))
                return Shape(
                    wg, lanes, use_shuffles, steps, heads, tokens, splits, readers, rounds, choice["rows_per_split"], reduce, subgroup
                )
        if wg == least:
            raise PlanError(
                f"[attention] {choice.source}: {queries} queries of head size {hd} need {shared + 4 * bundles * vd} bytes of shared "
                f"memory, {ctx.caps.name} has {ctx.caps.max_shared_memory}; lower queries"
            )
        # No number of rounds fits: fewer threads hold fewer streams.
        wg //= 2


def optional_inputs(node: Node) -> list[tuple[str, Tensor]]:
    """Optional inputs of a FLASH_ATTN_EXT by role: sinks, q_pe. Raises PlanError where a Q in two parts is no head of K."""
    rest = list(node.inputs[4 : len(node.inputs) - len(paged_inputs(node))])
    q_pe = rest.pop() if node.params.get("split_q") else None
    extra = [("sinks", t) for t in rest]
    if q_pe is None:
        return [*extra, *paged_inputs(node)]
    q, hd, rot = node.inputs[0], node.inputs[1].shape[2], q_pe.shape[-1]
    if q_pe.shape[:2] != q.shape[:2] or rot % 4 or not 0 < hd - rot <= q.shape[2] or q.shape[2] % 4:
        raise PlanError(f"[attention] {node.name}: {q} and {q_pe} are no heads of {hd}; expected parts of whole fours, {hd} together")
    return [*extra, ("q_pe", q_pe), *paged_inputs(node)]


def _lower(
    node: Node,
    ctx: LowerContext,
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pos: Tensor,
    n: int,
    n_head: int,
    extra: Sequence[tuple[str, Tensor]],
    fused: Defines,
) -> Dispatch:
    """The one dispatch of either op. extra: (role, tensor) bound after the rest as BIND_<ROLE>; fused: defines of ATTN_DECODE."""
    (n_head_kv, n_ctx, hd), vd = cache_k.shape, v_dim(node, cache_v)
    out = node.outputs[0]
    window, pushed = window_of(node)
    check(node, ctx, cache_k, cache_v, n_head)
    choice = choice_of(node, ctx).params
    types = {cache_k.type, cache_v.type}
    page, rows_in_use = page_of(node), rows_of(node)
    s = shape_for(choice, n, n_head, n_head_kv, hd, rows_in_use, window, bool(fused), out.type == "Q8_1", ctx, vd, types, bool(page))
    if s.splits > 1 and 7 + len(extra) > ctx.caps.max_storage_bindings:
        s = replace(s, splits=1)  # a Raspberry Pi binds 8 buffers; scratch and counters would be two too many
    # A head's slots of four values (shaders/attention/decode/fused.glsl) go to as many threads, as far as they can add up by shuffles.
    head_lanes = min(32, s.wg, ctx.caps.subgroup_min, 1 << ((hd // 4).bit_length() - 1)) if fused else 1
    groups = (n_head // s.heads, s.splits, ceil_div(n, s.tokens))
    # Fused, the kernel also stores the new key and value, unless a layer before did.
    cached: Access = "rw" if fused.get("STORES_ROW", bool(fused)) else "r"
    args = [Arg(q), Arg(cache_k, cached), Arg(cache_v, cached), Arg(pos), Arg(out, "w")]
    splits = [f"{out.name}.splits"] if s.splits > 1 else []
    # Splits meet in scratch memory; the last one to arrive, found by a counter, merges them.
    if splits:
        tiles = groups[0] * groups[2]
        part = s.queries * vd + 4 * ceil_div(s.queries, 2)
        args.append(Arg(Tensor(splits[0], "F32", (tiles, s.splits, part)), "rw"))
        args.append(Arg(Tensor(f"{out.name}.tickets", "I32", (tiles,), "counter"), "rw"))
    defines: Defines = {
        **s.reduce,
        **fused,
        "HD": hd,
        "VD": vd,
        "V_PITCH": cache_v.shape[2] // 8,
        "K_TYPE": CACHE_TYPES[cache_k.type],
        "V_TYPE": CACHE_TYPES[cache_v.type],
        **attention_prompt.split_q(q, dict(extra).get("q_pe"), hd),
        "HEADS": s.heads,
        "TOKENS": s.tokens,
        "STEPS": s.steps,
        "LANES": s.lanes,
        "USE_SHUFFLES": int(s.use_shuffles),
        "SPLITS": s.splits,
        "READERS": s.readers,
        "MERGE_QUERIES": s.round,
        "OUT_Q8_1": int(out.type == "Q8_1"),
        **_unit_order(node, out, ctx),
        "FUSED": int(bool(fused)),
        "HAS_SINKS": int(any(role == "sinks" for role, _ in extra)),
        "HAS_SOFTCAP": int(softcap_of(node) > 0.0),
        "SPANS": int(len(pos.shape) == 2),
    }
    if fused:
        defines["HEAD_LANES"] = head_lanes
        if types & set(QUANTIZED):
            defines["SCALE_WORDS"] = int(not ctx.caps.storage_16bit)
    # Optional inputs are bound last, so that the bindings before them stay constant.
    for binding, (role, _) in enumerate(extra, len(args)):
        defines[f"BIND_{role.upper()}"] = binding
    args += [Arg(t) for _, t in extra]
    rows = min(rows_in_use, window) if window else rows_in_use
    push: list[int | float] = [n, n_head, n_head_kv, n_ctx, pushed, s.rows_per_split, float(node.params["scale"]) * LOG2_E]
    push += [float(node.params.get("eps", 0.0)), softcap_of(node) * LOG2_E]
    if page:
        defines["PAGE"] = page
        push.append(dict(extra)["pages"].shape[1])
    return Dispatch(
        kernel=Variant.of("attention/decode/attention.comp", defines, subgroup_size=s.subgroup),
        args=tuple(args),
        push=pack_push(*push),
        groups=groups,
        op=node.op,
        label=node.name,
        reason=choice.source,
        nbytes=nbytes(q) + nbytes(out) + (n if page else 1) * attention_prompt.read_bytes(cache_k, cache_v, rows, vd),
        flops=2 * n * n_head * rows * (hd + vd),
        waits=_waits(
            q,
            cache_k,
            cache_v,
            splits,
            groups[0] * groups[2],
            bool(fused),
            whole=bool(node.params.get("norm_all")),
            gate=tuple(t.name for role, t in extra if role == "gate"),
        ),
    )


def _unit_order(node: Node, out: Tensor, ctx: LowerContext) -> Defines:
    """Defines of an output in unit order, none of others."""
    if out.type != "F16":
        return {"OUT_UNITS": 0}
    shape: GemmShape = node.params["units"]
    _, columns, depth = shape.matrix
    stride = units_stride(out.shape[-1], shape, ctx.caps)
    order: Defines = {"SG": ctx.caps.subgroup_size, "FN": columns, "FK": depth, "ROW_LANES": shape.row_lanes}
    return {"OUT_UNITS": 1, "Y_STRIDE": stride, **order}


def _waits(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, splits: Sequence[str], tiles: int, fused: bool, *, whole: bool, gate: tuple[str, ...]
) -> SpinWaits:
    """What the kernel of `_lower` waits for. Fused, for the heads of one token (whole: for all of Q and K), which is never padding, and for
    its part of a gate; else until what makes q has arrived, which stores the rows of the caches, too."""
    if fused:
        own = tuple(splits)
        return SpinWaits(whole=(q.name,), part=gate, own=own) if whole else SpinWaits(part=(q.name, *gate), own=own)
    return SpinWaits(counted=(q.name, cache_k.name, cache_v.name), arrives=tiles)


def prompt_problem(node: Node) -> attention_prompt.PromptProblem:
    q, cache_k, cache_v, pos, *_ = node.inputs
    extra = dict(optional_inputs(node))
    window, pushed = window_of(node)
    return attention_prompt.PromptProblem(
        q,
        cache_k,
        cache_v,
        pos,
        node.outputs[0],
        float(node.params["scale"]),
        window,
        extra.get("sinks"),
        node.name,
        fragments=bool(node.params.get("fragments")),
        v_dim=v_dim(node, cache_v),
        q_pe=extra.get("q_pe"),
        softcap=softcap_of(node),
        chunked=pushed != window,
    )


def decode_problem(node: Node) -> decode_matrix.DecodeProblem:
    """What the kernel for few tokens by matrices computes."""
    q, cache_k, cache_v, pos, *_ = node.inputs
    extra = dict(optional_inputs(node))
    window, pushed = window_of(node)
    return decode_matrix.DecodeProblem(
        q,
        cache_k,
        cache_v,
        pos,
        node.outputs[0],
        float(node.params["scale"]),
        pushed,
        window,
        softcap_of(node),
        extra.get("sinks"),
        page_of(node),
        [t for _, t in paged_inputs(node)],
        node.params["units"] if node.outputs[0].type == "F16" else None,
        node.name,
    )


def _tolerance(node: Node) -> Tolerance:
    if node.outputs[0].type == "Q8_1":
        return Tolerance(1e-4, 0.1, "outputs are rounded to 8 bits: 1/254 of the largest of 32, which is up to ten times their rms")
    return Tolerance(1e-10, 1e-4, "f32 sums of exact F16 products; exp2 of logits up to 20 is off by 5e-6, the worst by a few times that")


def _attention_in_window(inputs: Sequence[Array], token: int, params: Mapping[str, Any]) -> Array:
    """The reference's output for one token [1, n_head * hd], from the rows in its window alone."""
    q, cache_k, cache_v, pos = inputs[:4]
    seen = slice(first_row(int(pos[token]), params["window"], params.get("chunked", False)), int(pos[token]) + 1)
    last = np.array([seen.stop - seen.start - 1])
    k, v = cache_k[:, seen], cache_v[:, seen]
    rest = {key: value for key, value in params.items() if key not in ("window", "chunked")}
    return OPS["FLASH_ATTN_EXT"].reference([q[token : token + 1], k, v, last, *inputs[4:]], rest)[0]


@register
class FlashAttnExt(FlashCases):
    """Attention of n tokens over the cache; see the module's text."""

    name = "FLASH_ATTN_EXT"
    ggml_nmse = 5e-4

    def elementary(self, node: Node, n_kv: int) -> list[Node]:
        """Products with views of the cached rows, and a softmax under a mask between them (attention_chain.py); none with sinks, or where
        the queries come in two parts."""
        plain = len(node.inputs) == 4 and len(node.inputs[3].shape) == 1 and not page_of(node)
        return attention_chain.without_flash(node, n_kv) if plain else []

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """That of the chain; a sink adds an exponential and a sum for each row of the softmax."""
        whole = dataclasses.replace(node, inputs=(attention_chain.whole_query(node), *node.inputs[1:4]))
        rows = prod(whole.inputs[0].shape[:-1])
        sinks = {"fadd": rows, "fexp": rows} if any(role == "sinks" for role, _ in optional_inputs(node)) else {}
        return total((sinks, *(cost_rule(n).arithmetic(n, n_kv) for n in attention_chain.without_flash(whole, n_kv))))

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the caches the rows in use; keys that are values as well (MLA) twice, as two products read them."""
        cache_k, cache_v = node.inputs[1:3]
        if tensor.kind != "state":
            return nbytes(tensor)
        rows = attention_chain.seen(node, n_kv)
        v_dim = int(node.params.get("v_dim", cache_v.shape[-1]))
        widths = (cache_k.shape[-1] * (tensor.name == cache_k.name), v_dim * (tensor.name == cache_v.name))
        return tensor.shape[0] * rows * cached_bytes(tensor.type, sum(widths))

    def case(self, params: Mapping[str, Any]) -> Case:
        """A line of test-backend-ops, which has head sizes `hsk` and `hsv`, is one of ATTENTION."""
        return OPS["ATTENTION"].case(params) if "hsk" in params else super().case(params)

    @np.errstate(invalid="ignore")
    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        """Padding (pos -1) sees nothing and gives zeros. An infinite score is no number, so that keys beyond a cache's range show. A sink
        is a logit without a value: it takes its part of a head's softmax away from the rows."""
        if params.get("page"):
            return [by_sequence(self.reference, inputs, params)]
        if np.ndim(inputs[3]) == 2:
            return [self._of_spans(inputs, params)]
        if params.get("window") and not params.get("split_q"):
            return [np.concatenate([_attention_in_window(inputs, t, params) for t in range(len(inputs[0]))])]
        if params.get("split_q"):
            nope = inputs[1].shape[-1] - inputs[-1].shape[-1]
            whole = np.concatenate([inputs[0][:, :, :nope], inputs[-1]], axis=-1)
            return self.reference([whole, *inputs[1:-1]], {**params, "split_q": False})
        q, (cache_k, cache_v, pos) = np.asarray(inputs[0], np.float64), inputs[1:4]
        cache_v = cache_v[..., : params.get("v_dim", cache_v.shape[-1])]
        sinks = np.asarray(inputs[4], np.float64) if len(inputs) > 4 else None
        softcap = float(params.get("softcap", 0.0))
        n, n_head, _ = q.shape
        n_head_kv = cache_k.shape[0]
        out = np.zeros((n, n_head, cache_v.shape[-1]))
        rows = max(0, int(pos.max()) + 1)
        real = np.flatnonzero(pos >= 0)
        if not real.size:
            return [out.reshape(n, -1)]
        hidden = np.arange(rows)[None, :] > pos[real][:, None]
        for head in range(n_head):
            kv = head * n_head_kv // n_head
            scores = q[real, head] @ np.asarray(cache_k[kv, :rows], np.float64).T * params["scale"]
            scores[np.isinf(scores)] = np.nan
            scores = scores if not softcap else softcap * np.tanh(scores / softcap)
            scores[hidden] = -np.inf
            top = scores.max(axis=-1, keepdims=True) if sinks is None else np.maximum(scores.max(axis=-1, keepdims=True), sinks[head])
            p = np.exp(scores - top)
            total = p.sum(axis=-1, keepdims=True) + (0.0 if sinks is None else np.exp(sinks[head] - top))
            out[real, head] = p / total @ np.asarray(cache_v[kv, :rows], np.float64)
        return [out.reshape(n, -1)]

    def _of_spans(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Array:
        """Token by token, each over the rows that it sees: [n, n_head * vd]."""
        q, cache_k, cache_v, spans, *rest = inputs
        per_token = rest[-1:] if params.get("split_q") else []
        shared = rest[: len(rest) - len(per_token)]
        out = []
        for t, (first, last) in enumerate(spans):
            seen, own = slice(int(first), int(last) + 1), [x[t : t + 1] for x in (q, *per_token)]
            pos = np.array([last - first if last >= 0 else -1])
            out.append(self.reference([own[0], cache_k[:, seen], cache_v[:, seen], pos, *shared, *own[1:]], params)[0])
        return np.concatenate(out)

    def choose(self, node: Node, ctx: LowerContext) -> AttentionChoice:
        return choose(node, ctx)

    def as_f16(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> list[Array] | None:
        if choice_of(node, ctx).rounds != "F16":
            return None
        return self.reference([f16_values(inputs[0]), *inputs[1:]], node.params)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, cache_k, cache_v, pos = node.inputs[:4]
        n, n_head = q.shape[:2]
        extra = optional_inputs(node)
        choice = choice_of(node, ctx)
        if choice.shape is not None:
            return [attention_prompt.lower(prompt_problem(node), choice.shape, ctx.caps, choice.source)]
        if choice.few is not None:
            check(node, ctx, cache_k, cache_v, n_head)
            return [decode_matrix.lower(decode_problem(node), choice.few, ctx.caps, choice.source)]
        return [_lower(node, ctx, q, cache_k, cache_v, pos, n, n_head, extra, {})]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        choice = choice_of(node, ctx)
        if choice.few is not None:
            return max(attention_prompt.MATRIX_TOLERANCE, _tolerance(node), key=lambda t: t.nmse)
        return _tolerance(node) if choice.shape is None else attention_prompt.tolerance(choice.shape, node.outputs[0])


OF_NORMS = frozenset({"norm_all", "norm_v"})
"""Params of ATTN_DECODE that QKV_ROPE_SET_ROWS has not."""


@register
class AttnDecode(DecodeCases):
    """Norm, RoPE, cache store and attention of one token; see the module's text."""

    name = "ATTN_DECODE"
    ggml_nmse = 5e-4
    extra_keys = FREQUENCY

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        qkv, pos, cache_k, cache_v, *rest = inputs
        if params.get("page"):
            return token_by_sequence(self.reference, inputs, params)
        if params.get("gated"):
            attended, *stored = self.reference(inputs[:-1], {**params, "gated": False})
            return [*OPS["SIGMOID_GLU"].reference([inputs[-1], attended], {}), *stored]
        angles = rest.pop(0) if params["n_dims"] else np.zeros((1, 0, 2))
        hd, heads, kv = params["head_dim"], params["n_head"], params["n_head_kv"]
        cos, sin = np.moveaxis(np.asarray(angles, np.float64), -1, 0)
        if params.get("shared_kv"):
            q = np.asarray(qkv, np.float64).reshape(1, heads, hd)
            if params.get("has_norm"):
                q = OPS["RMS_NORM"].reference([q], params)[0] * np.asarray(rest.pop(0), np.float64)
            q = rotate_pairs(q, cos, sin, params["mode"])
            return OPS["FLASH_ATTN_EXT"].reference([q, cache_k, cache_v, pos, *rest], params)
        q, k, v = np.split(np.asarray(qkv, np.float64).reshape(1, heads + 2 * kv, hd), (heads, heads + kv), axis=1)
        if params.get("has_norm"):
            flat = params.get("norm_all")
            (q,), (k,) = (OPS["RMS_NORM"].reference([x.reshape(1, 1, -1) if flat else x], params) for x in (q, k))
            q, k = q * np.asarray(rest.pop(0), np.float64), k * np.asarray(rest.pop(0), np.float64)
            q, k = q.reshape(1, heads, hd), k.reshape(1, kv, hd)
        if params.get("norm_v"):
            (v,) = OPS["RMS_NORM"].reference([v], params)
        q, k = (rotate_pairs(x, cos, sin, params["mode"]) for x in (q, k))
        cache_k, cache_v = stored_rows(params, pos, (k, v), (cache_k, cache_v))
        out = OPS["FLASH_ATTN_EXT"].reference([q, cache_k, cache_v, pos, *rest], params)
        return [*out, cache_k, cache_v]

    def choose(self, node: Node, ctx: LowerContext) -> AttentionChoice:
        return choose(node, ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        qkv, pos, cache_k, cache_v, *rest = node.inputs
        params = node.params
        n_dims, has_norm, shared = int(params["n_dims"]), bool(params.get("has_norm")), bool(params.get("shared_kv"))
        if pos.shape != (1,):
            raise PlanError(f"[attention] {node.name}: ATTN_DECODE takes one token, got {pos}")
        if n_dims % 4:
            raise PlanError(f"[attention] {node.name}: ATTN_DECODE rotates pairs two by two, n_dims = {n_dims} is no multiple of 4")
        roles = [*(["angles"] if n_dims else []), *(["q_norm", *([] if shared else ["k_norm"])] if has_norm else [])]
        paged = paged_inputs(node)
        rest = rest[: len(rest) - len(paged)]
        gate = [("gate", rest.pop())] if params.get("gated") else []
        roles += ["sinks"] * (len(rest) - len(roles))
        norms = {"HAS_NORM": int(has_norm), "NORM_ALL": int(bool(params.get("norm_all"))), "NORM_V": int(bool(params.get("norm_v")))}
        fused: Defines = {**norms, "ROPE_PAIRS": n_dims // 2, "ROPE_NEOX": rope_angles.MODES[params["mode"]]}
        fused |= {"STORES_ROW": 0} if shared else {}
        extra = [*zip(roles, rest, strict=True), *gate, *paged]
        return [_lower(node, ctx, qkv, cache_k, cache_v, pos, 1, params["n_head"], extra, fused)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        plain = _tolerance(node)
        kinds = [t.type for t in node.outputs[1:] if t.type in QUANTIZED]
        if kinds:
            return max((plain, *map(stored_tolerance, kinds)), key=lambda t: t.nmse)
        if plain.nmse >= 1e-6:
            return plain
        return Tolerance(1e-6, 5e-3, "the key is rounded to F16 after norm and RoPE in f32: one on the edge may go the other way (2^-11)")

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """As of the plain chain, which makes its own angles."""
        inputs = tuple(dataclasses.replace(t, type="F16") if t.kind == "state" else t for t in node.inputs)
        params = {key: value for key, value in node.params.items() if key not in OF_NORMS}
        plain = dataclasses.replace(node, inputs=inputs, params={**params, "has_ff": False})
        return total(cost_rule(n).arithmetic(n, n_kv) for n in self.unfused(plain))

    def unfused(self, node: Node) -> list[Node]:
        """None with frequency factors: they are in the angles already, and the plain op has no such input. Nor with quantized caches, into
        which no plain op stores a part of a tensor. Nor with pages: the plain op stores a token in row pos; and norms of OF_NORMS it has
        not."""
        params = node.params
        qkv, pos, cache_k, cache_v, *extra = node.inputs
        extra = extra[1:] if params["n_dims"] else extra
        if params.get("gated"):
            gate = len(node.inputs) - 1 - len(paged_inputs(node))
            inputs = (*node.inputs[:gate], *node.inputs[gate + 1 :])
            made = dataclasses.replace(node.outputs[0], name=f"{node.name}.whole", type="F32")
            plain = Node(node.op, inputs, (made, *node.outputs[1:]), {**params, "gated": False})
            return [plain, Node("SIGMOID_GLU", (node.inputs[gate], made), node.outputs[:1])]
        if params.get("shared_kv"):
            return self._unfused_queries(node)
        if params.keys() & OF_NORMS or params.get("has_ff") or {cache_k.type, cache_v.type} != {"F16"} or params.get("page"):
            return []
        norms = 2 * bool(params.get("has_norm"))
        q = Tensor(f"{node.name}.q", "F32", (1, params["n_head"], params["head_dim"]))
        stored = Node("QKV_ROPE_SET_ROWS", (qkv, pos, cache_k, cache_v, *extra[:norms]), (q, cache_k, cache_v), {**params, "packed": True})
        return [stored, Node("FLASH_ATTN_EXT", (q, cache_k, cache_v, pos, *extra[norms:]), node.outputs[:1], params)]

    def _unfused_queries(self, node: Node) -> list[Node]:
        """Norm, RoPE and attention of one token whose row the caches hold. None with frequency factors, which are in the angles already."""
        params = node.params
        qkv, pos, cache_k, cache_v, *extra = node.inputs
        if params.get("has_ff"):
            return []
        extra = extra[1:] if params["n_dims"] else extra
        q, made = dataclasses.replace(qkv, shape=(1, params["n_head"], params["head_dim"])), list[Node]()
        if params.get("has_norm"):
            normed = Tensor(f"{node.name}.normed", "F32", q.shape)
            made.append(Node("RMS_NORM_MUL", (q, extra.pop(0)), (normed,), {"eps": params["eps"]}))
            q = normed
        if params["n_dims"]:
            rotated = Tensor(f"{node.name}.q", "F32", q.shape)
            made.append(Node("ROPE", (q, pos), (rotated,), {key: params[key] for key in rope_angles.PARAMS}))
            q = rotated
        return [*made, Node("FLASH_ATTN_EXT", (q, cache_k, cache_v, pos, *extra), node.outputs, params)]
