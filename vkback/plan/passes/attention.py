"""Fusion of what stands before attention: norms and RoPE of Q and K, cache stores, and the GEMVs of Q, K and V."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vkback.graph import Node, Tensor
from vkback.ops.attention import unfused
from vkback.ops.attention.paged import paged_inputs
from vkback.ops.matmul.linear_heads import heads_problem
from vkback.ops.rope import angles as rope_angles
from vkback.ops.rope.rope import angles_of
from vkback.ops.view import View
from vkback.plan.nodes import Index, Nodes, replace, rewrite, tokens_of
from vkback.plan.passes.linear import combine


def without_flash(nodes: Nodes) -> Nodes:
    """Attention as nodes of its own: kq, kq_soft_max, kqv."""
    return [part for node in nodes for part in (unfused.without_flash(node) if node.op == "FLASH_ATTN_EXT" else [node])]


def fuse_attention(nodes: Nodes, outputs: Iterable[str], *, bindings: int) -> Nodes:
    """Q and K norms, ROPE of both or of neither, both cache stores -> QKV_ROPE_SET_ROWS, ahead of its FLASH_ATTN_EXT.

    bindings  buffers that the device binds: norms stay nodes of their own where the fused op would need more
    """
    index = Index(nodes, outputs)
    for attention in [n for n in nodes if n.op == "FLASH_ATTN_EXT"]:
        q_in, cache_k, cache_v = attention.inputs[:3]
        stores = {n.outputs[0].name: n for n in nodes if n.op == "SET_ROWS" and n.outputs[0].name in (cache_k.name, cache_v.name)}
        # One kernel stores K and V: both must be stored here, in caches alike, and not for a layer before.
        first = next(n for n in nodes if n.op == "FLASH_ATTN_EXT" and n.inputs[1].name == cache_k.name)
        if len(stores) != 2 or cache_k.shape != cache_v.shape or first is not attention:
            continue
        store_k, store_v = stores[cache_k.name], stores[cache_v.name]
        k_in = store_k.inputs[0]
        ropes = [rope for rope in (index.one_use_producer(q_in, "ROPE"), index.one_use_producer(k_in, "ROPE")) if rope is not None]
        gone = [*ropes, store_k, store_v]
        if store_k.inputs[1].name != store_v.inputs[1].name:
            continue
        params: dict[str, Any]
        factors: tuple[Tensor, ...] = ()
        # Without ROPE nothing made a Q for attention alone: the copy that the kernel stores needs a name of its own.
        if not ropes and index.read_once(q_in) and index.read_once(k_in):
            params = {**rope_angles.DEFAULTS, "n_dims": 0}
            place = attention.inputs[3]
            pos = place if len(place.shape) == 1 else store_k.inputs[1]  # where a token's rows are said, those of the cache are its places
            q, k, q_out = q_in, k_in, dataclasses.replace(q_in, name=f"{q_in.name}.heads")
        elif len(ropes) == 2 and ropes[0].params == ropes[1].params:
            params = dict(ropes[0].params)
            (q, pos, *rest), k, q_out = ropes[0].inputs, ropes[1].inputs[0], q_in
            factors = tuple(rest)
        else:
            continue
        v = store_v.inputs[0]
        stored_in = store_k.inputs[1]
        rows = (stored_in,) if stored_in.name != pos.name else ()
        norms = index.one_use_producer(q, "RMS_NORM_MUL"), index.one_use_producer(k, "RMS_NORM_MUL")
        extra: tuple[Tensor, ...] = ()
        # The kernel norms Q and K or neither.
        if norms[0] is not None and norms[1] is not None and _fits(norms[0], norms[1], v, q_in.shape[-1], bool(ropes), index, bindings):
            gone += [norms[0], norms[1]]
            q, k = norms[0].inputs[0], norms[1].inputs[0]
            extra = (norms[0].inputs[1], norms[1].inputs[1])
            params["eps"] = norms[0].params["eps"]
        params |= {"has_norm": bool(extra), "has_ff": bool(factors), "packed": False}
        params |= {"has_rows": True} if rows else {}
        params |= {key: c.type for key, c in (("type_k", cache_k), ("type_v", cache_v)) if c.type != "F16"}
        q, k, v = (dataclasses.replace(t, shape=shape) for t, shape in ((q, q_in.shape), (k, k_in.shape), (v, k_in.shape)))
        fused = Node("QKV_ROPE_SET_ROWS", (q, k, v, pos, cache_k, cache_v, *extra, *factors, *rows), (q_out, cache_k, cache_v), params)
        nodes = replace(nodes, gone, [fused])
        if q_out is not q_in:
            reads = dataclasses.replace(attention, inputs=(q_out, *attention.inputs[1:]))
            nodes = [reads if n is attention else n for n in nodes]
        index.update(nodes)
    return nodes


def _fits(norm_q: Node, norm_k: Node, v: Tensor, head_dim: int, rotated: bool, index: Index, bindings: int) -> bool:
    """Whether QKV_ROPE_SET_ROWS can take norms in: those of each head, whose weights are a head wide, where it has bindings for them. Q, K
    and V right from products become one tensor (`pack_qkv`)."""
    if not norm_q.inputs[1].shape == norm_k.inputs[1].shape == (head_dim,):
        return False

    def from_product(t: Tensor) -> bool:
        added = index.one_use_producer(t, "ADD")
        return index.one_use_producer(added.inputs[0] if added is not None else t, "LINEAR") is not None

    packed = all(map(from_product, (norm_q.inputs[0], norm_k.inputs[0], v)))
    return packed or 9 + rotated <= bindings  # q, k, v, rows, two caches, two norms, the Q that comes out, and angles


def fuse_latent(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """MLA: what is between the products and FLASH_ATTN_EXT -> MLA_ROPE_SET_ROWS, with Q in two parts; the products by heads (MUL_MAT of a
    view, PERMUTE) -> LINEAR_HEADS; for one token the latent's part of its row is read where it is."""
    index = Index(nodes, outputs)
    for attention in [n for n in nodes if n.op == "FLASH_ATTN_EXT"]:
        found = _latent(attention, index, nodes)
        if found is not None:
            gone, new = found
            nodes = replace(nodes, [*gone, attention], new)
            index.update(nodes)
    for permute in [n for n in nodes if n.op == "PERMUTE" and n.params["axes"] == (1, 0, 2)]:
        product = index.one_use_producer(permute.inputs[0], "MUL_MAT")
        if product is None or "w_view" in product.params or len(product.inputs[0].shape) != 3:
            continue
        w, x = product.inputs
        (heads, m, k), n = w.shape, permute.outputs[0].shape[0]
        width = x.elements // (n * heads)
        flat = dataclasses.replace(x, shape=(n, heads * width))
        if product.params.get("x_view") != View(0, (heads, n, k), (width, heads * width, 1)) or heads_problem(w, flat):
            continue
        y = dataclasses.replace(permute.outputs[0], shape=(n, heads * m))
        nodes = replace(nodes, [product, permute], [Node("LINEAR_HEADS", (w, flat), (y,))])
    if tokens_of(nodes) > 1:
        return nodes
    for part in [n for n in nodes if n.op == "CONT" and "view" in n.params]:
        x, y, view = part.inputs[0], part.outputs[0], part.params["view"]
        if part.name in outputs or view != View(0, (1, y.elements), (x.elements, 1)):
            continue
        prefix = dataclasses.replace(x, shape=y.shape)
        nodes = [dataclasses.replace(n, inputs=tuple(prefix if t.name == y.name else t for t in n.inputs)) for n in nodes if n is not part]
    return nodes


def _latent(attention: Node, index: Index, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]] | None:
    """The nodes that MLA_ROPE_SET_ROWS takes the place of, and it with its attention."""
    query, cache_k, cache_v, seen = attention.inputs[:4]
    paged = [t for _, t in paged_inputs(attention)]
    # The fused op knows no sinks and no window.
    if len(attention.inputs) - len(paged) > 4 or "window" in attention.params:
        return None
    n, heads, _ = query.shape
    stores = [next((s for s in nodes if s.op == "SET_ROWS" and s.outputs[0].name == c.name), None) for c in (cache_k, cache_v)]
    joined = index.one_use_producer(query, "CONCAT")
    stored = index.one_use_producer(stores[0].inputs[0], "CONCAT") if stores[0] is not None else None
    if joined is None or stored is None or stores[0] is None or stores[1] is None or len(joined.inputs) != 2 or len(stored.inputs) != 2:
        return None
    # Legacy: two caches, K and V of each head; else one latent row that both are read from.
    legacy = cache_k.name != cache_v.name
    rope_q = index.one_use_producer(joined.inputs[1], "ROPE")
    repeat = index.one_use_producer(stored.inputs[1], "REPEAT") if legacy else None
    rope_k = index.one_use_producer(repeat.inputs[0] if repeat is not None else stored.inputs[1], "ROPE")
    parts = [index.one_use_producer(rope.inputs[0], "CONT") if rope is not None else None for rope in (rope_q, rope_k)]
    if rope_q is None or rope_k is None or parts[0] is None or parts[1] is None or rope_q.params != rope_k.params:
        return None
    q, kv = parts[0].inputs[0], parts[1].inputs[0]
    dim_k, rot, row = q.elements // (n * heads), rope_q.inputs[0].shape[2], kv.elements // n
    views = [
        (parts[0], View(dim_k - rot, (n, heads, rot), (heads * dim_k, dim_k, 1))),
        (parts[1], View(row - rot, (n, 1, rot), (row, row, 1))),
    ]
    # All of these nodes become one, if every pattern below matches.
    gone = [joined, stored, rope_q, rope_k, parts[0], parts[1], stores[0]]
    if legacy:
        own, value, q_own = (index.one_use_producer(t, "CONT") for t in (stored.inputs[0], stores[1].inputs[0], joined.inputs[0]))
        if repeat is None or own is None or value is None or q_own is None or own.inputs[0].name != value.inputs[0].name:
            return None
        third, first = own.inputs[0], dataclasses.replace(q, shape=(n, heads, dim_k))
        both, nope = third.elements // (n * heads), dim_k - rot
        views += [
            (own, View(0, (n, heads, nope), (heads * both, both, 1))),
            (value, View(nope, (n, heads, both - nope), (heads * both, both, 1))),
            (q_own, View(0, (n, heads, nope), (heads * dim_k, dim_k, 1))),
        ]
        gone += [stores[1], repeat, own, value, q_own]
        params: dict[str, Any] = {"legacy": True}
        if q_own.inputs[0].name != q.name:
            return None
    else:
        norm = index.one_use_producer(stored.inputs[0], "RMS_NORM_MUL")
        latent = index.one_use_producer(norm.inputs[0], "CONT") if norm is not None else None
        if norm is None or latent is None or latent.inputs[0].name != kv.name:
            return None
        third, first = norm.inputs[1], joined.inputs[0]
        views.append((latent, View(0, (n, row - rot), (row, 1))))
        gone += [norm, latent]
        params = {"legacy": False, "eps": norm.params["eps"]}
    # A view at any other offset means another layout: leave the nodes alone.
    if any(part.params.get("view") != view for part, view in views) or rope_q.params["mode"] != "normal":
        return None
    pos, *factors = rope_q.inputs[1:]
    caches = (cache_k, cache_v) if legacy else (cache_k,)
    params |= {key: c.type for key, c in zip(("type_k", "type_v"), caches, strict=False) if c.type != "F16"}
    rows = [store.inputs[1] for store in stores[:1] if store is not None and store.inputs[1].name != pos.name]
    params |= {"has_rows": True} if rows else {}
    heads_of_q, latents = dataclasses.replace(q, shape=(n, heads, dim_k)), dataclasses.replace(kv, shape=(n, row))
    inputs = (heads_of_q, latents, third, pos, *caches, *factors, *rows)
    q_pe = rope_q.outputs[0]
    store = Node("MLA_ROPE_SET_ROWS", inputs, (q_pe, *caches), {**rope_q.params, **params, "has_ff": bool(factors)})
    reads = dataclasses.replace(
        attention, inputs=(first, cache_k, cache_v, seen, q_pe, *paged), params={**attention.params, "split_q": True}
    )
    return gone, [store, reads]


def pack_qkv(nodes: Nodes, into_attention: bool) -> Nodes:
    """The three GEMVs of attention write one packed tensor [n, q + k + v rows]; neighbours of one type become one GEMV.

    into_attention  rope and cache store move into the attention kernel (ATTN_DECODE, one token)
    """
    index = Index(nodes)
    for fused in [n for n in nodes if n.op == "QKV_ROPE_SET_ROWS"]:
        index.update(nodes)
        taken = norms_of_decode(fused, index) if into_attention else DecodeNorms(fused.inputs[:3])
        products = may_pack([index.producer.get(t.name) for t in taken.heads], index)
        if not products:
            continue
        n, heads, head_dim = fused.inputs[0].shape
        kv_heads = fused.inputs[1].shape[1]
        rows = [p.inputs[0].shape[0] for p in products]
        packed = Tensor(f"{fused.outputs[0].name}.qkv", "F32", (n, sum(rows)))
        # Plans of more tokens, which do not take these norms in, read the weights one by one.
        parts = packing(products, packed, apart=bool(taken.nodes))
        params = {**fused.params, "packed": True, "n_head": heads, "n_head_kv": kv_heads, "head_dim": head_dim}
        attention = next(a for a in index.consumers[fused.outputs[0].name] if a.op == "FLASH_ATTN_EXT")
        tail: list[Node]
        if into_attention:
            params.pop("packed")
            outputs = (attention.outputs[0], *fused.outputs[1:])
            pos, cache_k, cache_v, *extra = fused.inputs[3:]
            if params.pop("has_rows", False):
                extra.pop()  # the kernel finds the row by the page table
            norms, factors = extra[: 2 * params["has_norm"]], extra[2 * params["has_norm"] :]
            norms, params = [*norms, *taken.weights], {**params, **taken.params}
            angles = [angles_node(nodes, pos, factors, params)] if params["n_dims"] else []
            inputs = (packed, pos, cache_k, cache_v, *(a.outputs[0] for a in angles), *norms, *attention.inputs[4:])
            tail = [*angles, Node("ATTN_DECODE", inputs, outputs, {**params, **attention.params})]
            tail = [n for n in tail if not any(n is there for there in nodes)]
            nodes = replace(nodes, [*products, *taken.nodes, fused, attention], [*parts, *tail])
        else:
            nodes = replace(nodes, [*products, fused], [*parts, Node(fused.op, (packed, *fused.inputs[3:]), fused.outputs, params)])
    return nodes


def queries_into_attention(nodes: Nodes, outputs: Iterable[str], *, bindings: int) -> Nodes:
    """RMS_NORM_MUL and ROPE of one token's Q -> its FLASH_ATTN_EXT, which becomes an ATTN_DECODE, where a layer before stored this token's
    K and V (shared KV layers) and the device binds as many buffers."""
    index = Index(nodes, outputs)
    for attention in [n for n in nodes if n.op == "FLASH_ATTN_EXT" and "split_q" not in n.params]:
        q, cache_k, cache_v, pos, *more = attention.inputs
        rope = index.one_use_producer(q, "ROPE")
        stored = {t.name for n in nodes for t in n.outputs}
        if rope is None or rope.inputs[1].name != pos.name or pos.shape != (1,) or rope.params["n_dims"] % 4:
            continue
        if cache_k.name == cache_v.name or cache_k.shape != cache_v.shape or not {cache_k.name, cache_v.name} <= stored:
            continue
        heads, dim = rope.inputs[0].shape[1:]
        norm = index.one_use_producer(rope.inputs[0], "RMS_NORM_MUL")
        norm = norm if norm is not None and norm.inputs[1].shape == (dim,) == norm.inputs[0].shape[-1:] else None
        source = norm.inputs[0] if norm is not None else rope.inputs[0]
        factors = rope.inputs[2:]
        params = {**rope.params, "has_norm": norm is not None, "has_ff": bool(factors), "shared_kv": True}
        params |= {"eps": norm.params["eps"]} if norm is not None else {}
        params |= {"n_head": heads, "n_head_kv": cache_k.shape[0], "head_dim": dim}
        params |= {key: c.type for key, c in (("type_k", cache_k), ("type_v", cache_v)) if c.type != "F16"}
        angles = angles_node(nodes, pos, factors, params)
        weights = norm.inputs[1:] if norm is not None else ()
        inputs = (dataclasses.replace(source, shape=(1, heads * dim)), pos, cache_k, cache_v, angles.outputs[0], *weights, *more)
        if len(inputs) + 1 > bindings:
            continue
        fused = Node("ATTN_DECODE", inputs, attention.outputs, {**params, **attention.params})
        gone = [n for n in (norm, rope, attention) if n is not None]
        nodes = replace(nodes, gone, [*([] if any(n is angles for n in nodes) else [angles]), fused])
        index.update(nodes)
    return nodes


def gates_into_attention(nodes: Nodes, outputs: Iterable[str], *, bindings: int) -> Nodes:
    """ATTN_DECODE, SIGMOID_GLU of a gate and of it alone -> ATTN_DECODE with the gate, where the device binds as many buffers."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "SIGMOID_GLU" or len(node.inputs) != 2 or node.inputs[0].elements != node.inputs[1].elements:
            return None
        gate, attention = node.inputs[0], index.one_use_producer(node.inputs[1], "ATTN_DECODE")
        if attention is None or attention.params.get("gated") or attention.name != node.inputs[1].name:
            return None
        paged = len(attention.inputs) - len(paged_inputs(attention))
        inputs = (*attention.inputs[:paged], dataclasses.replace(gate, shape=attention.outputs[0].shape), *attention.inputs[paged:])
        if len(inputs) + 3 + 1 > bindings:  # the result, the splits' scratch and tickets, and the state of spin-waits
            return None
        made = (dataclasses.replace(attention.outputs[0], name=node.name), *attention.outputs[1:])
        return [attention, node], dataclasses.replace(attention, inputs=inputs, outputs=made, params={**attention.params, "gated": True})

    return rewrite(nodes, outputs, match)


@dataclass(frozen=True)
class DecodeNorms:
    """Norms before a QKV_ROPE_SET_ROWS of one token that its attention takes in, beside those of heads of Q and K.

    heads    Q, K and V before them
    nodes    that are gone then
    weights  of ATTN_DECODE; params: the same
    """

    heads: tuple[Tensor, ...]
    nodes: tuple[Node, ...] = ()
    weights: tuple[Tensor, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


def norms_of_decode(fused: Node, index: Index) -> DecodeNorms:
    """Those of V without a weight, and of all heads of Q and of K; all of one epsilon."""
    q, k, v = fused.inputs[:3]
    found = DecodeNorms((q, k, v))
    eps = fused.params["eps"] if fused.params["has_norm"] else None
    norm_q, norm_k = (index.one_use_producer(t, "RMS_NORM_MUL") for t in (q, k))
    if eps is None and norm_q is not None and norm_k is not None and norm_q.params == norm_k.params:
        (all_q, w_q), (all_k, w_k) = norm_q.inputs, norm_k.inputs
        if w_q.elements == all_q.shape[-1] == q.elements and w_k.elements == all_k.shape[-1] == k.elements:
            eps = norm_q.params["eps"]
            found = DecodeNorms((all_q, all_k, v), (norm_q, norm_k), (w_q, w_k), {"has_norm": True, "norm_all": True, "eps": eps})
    norm_v = index.one_use_producer(v, "RMS_NORM")
    if norm_v is not None and norm_v.inputs[0].shape[-1] == v.shape[-1] and eps in (None, norm_v.params["eps"]):
        params = {**found.params, "norm_v": True, "eps": norm_v.params["eps"]}
        found = DecodeNorms((*found.heads[:2], norm_v.inputs[0]), (*found.nodes, norm_v), found.weights, params)
    return found


def packing(products: Sequence[Node], packed: Tensor, *, apart: bool = False) -> list[Node]:
    """Products of one x that write their rows one after the other into `packed`; neighbours of one type are one product, unless they are to
    stay apart."""
    rows = [p.inputs[0].shape[0] for p in products]
    parts: list[Node] = []
    for run in [[p] for p in products] if apart else _runs(products):
        weights = [p.inputs[0] for p in run]
        biases = [p.inputs[2] for p in run if len(p.inputs) > 2]
        row0 = sum(rows[: products.index(run[0])])
        inputs = (combine("concat", weights), run[0].inputs[1], *((combine("concat", biases),) if biases else ()))
        roles = ("w", "x", *(("bias",) if biases else ()))
        parts.append(Node("LINEAR", inputs, (packed,), {"roles": roles, "row0": row0, "rows_total": sum(rows)}))
    return parts


def may_pack(products: Sequence[Node | None], index: Index) -> list[Node]:
    """The products, where `packing` can write them into one tensor: each is read by one node, all have one x, and nothing but a bias is
    fused into them; else none."""
    found = [p for p in products if p is not None and p.op == "LINEAR" and len(index.consumers[p.name]) == 1]
    if len(found) < len(products) or len({p.inputs[1].name for p in found}) != 1:
        return []
    # Also where adapters are added to a product.
    return found if all({"w", "x", "bias"} >= set(p.params["roles"]) for p in found) else []


def angles_node(nodes: Sequence[Node], pos: Tensor, factors: Sequence[Tensor], params: Mapping[str, Any]) -> Node:
    """The node that makes the angles of a rotation: the one there is, else a new one."""
    out = angles_of(pos, factors, params)
    present = next((n for n in nodes if n.op == "ROPE_ANGLES" and n.name == out.name), None)
    return present or Node("ROPE_ANGLES", (pos, *factors), (out,), {key: params[key] for key in rope_angles.PARAMS})


def _runs(gemvs: Sequence[Node]) -> list[list[Node]]:
    """Neighbours whose weights have one type and which agree on having a bias."""
    runs: list[list[Node]] = []
    for p in gemvs:
        if runs and runs[-1][0].inputs[0].type == p.inputs[0].type and len(runs[-1][0].inputs) == len(p.inputs):
            runs[-1].append(p)
        else:
            runs.append([p])
    return runs
