"""FLASH_ATTN_EXT as the chain of nodes that ggml builds without flash attention: what listings and costs take it for.

Of a layer with n_kv rows of its caches in use:

    v-0                  the cached values as a view [n_head_kv, vd, n_kv]: rows of it are what the second product multiplies
    k-0                  the cached keys as a view [n_head_kv, n_kv, hd]
    q-0                  queries by head [n_head, n, hd]
    kq-0                 k times q: [n_head, n, n_kv]
    kq_scaled-0, kq_tanh-0, kq_capped-0   with a softcap, which then has the scale of the scores in it
    kq_soft_max_ext-0    softmax under KQ_mask [n rounded up to 32, n_kv], which is 0 for rows that a token sees, else -inf
    kqv-0                v times that: [n_head, n, vd]
    kqv_merged-0, kqv_out-0   back by token, and contiguous [n, n_head * vd]

Rows in use are rounded up to 32, as ggml pads them; of a sliding window no more are read than the tokens' windows span.
"""

from __future__ import annotations

import dataclasses

from vkback.graph import Node, Tensor
from vkback.ops.view import View

PADDING = 32
"""Rows of a cache and tokens of a mask come in so many, as in ggml."""


def padded(n: int) -> int:
    return -(-n // PADDING) * PADDING


def seen(node: Node, n_kv: int) -> int:
    """Rows of its caches that an attention node reads, of n_kv in use."""
    window = int(node.params.get("window", 0))
    tokens = node.inputs[0].shape[0]
    return min(n_kv, node.inputs[1].shape[1], padded(window + tokens - 1) if window else n_kv)


def whole_query(node: Node) -> Tensor:
    """The queries with all values of a head, of which param split_q has the last in a tensor of their own."""
    q = node.inputs[0]
    return dataclasses.replace(q, shape=(*q.shape[:2], node.inputs[1].shape[-1]))


def without_flash(node: Node, n_kv: int) -> list[Node]:
    """The chain of a node with inputs q, cache_k, cache_v and pos. A window's rows are taken from the cache's beginning: which these are
    depends on the position."""
    q, cache_k, cache_v = node.inputs[:3]
    rows = seen(node, n_kv)
    n, n_head, hd = q.shape
    heads, n_ctx, _ = cache_k.shape
    width = cache_v.shape[-1]
    vd = int(node.params.get("v_dim", width))
    out = node.outputs[0]
    layer = out.name.removeprefix("kqv_out")

    def tensor(name: str, type: str, *shape: int) -> Tensor:
        return Tensor(f"{name}{layer}", type, shape)

    v, k = tensor("v", "F16", heads, vd, rows), tensor("k", "F16", heads, rows, hd)
    by_head = tensor("q", "F32", n_head, n, hd)
    scores, weights = (tensor(name, "F32", n_head, n, rows) for name in ("kq", "kq_soft_max_ext"))
    mixed, merged = tensor("kqv", "F32", n_head, n, vd), tensor("kqv_merged", "F32", n, n_head, vd)
    mask = Tensor("KQ_mask" if rows == min(n_kv, n_ctx) else "KQ_mask_swa", "F32", (padded(n), rows), "input")
    scale, cap = node.params["scale"], float(node.params.get("softcap", 0.0))
    capping: list[Node] = []
    soft = scores
    if cap:
        steps: tuple[tuple[str, str, dict[str, float]], ...] = (
            ("kq_scaled", "SCALE", {"scale": scale / cap, "bias": 0.0}),
            ("kq_tanh", "TANH", {}),
            ("kq_capped", "SCALE", {"scale": cap, "bias": 0.0}),
        )
        for name, op, params in steps:
            before, soft = soft, tensor(name, "F32", n_head, n, rows)
            capping.append(Node(op, (before,), (soft,), params))
    return [
        Node("VIEW", (cache_v,), (v,), {"view": View(0, v.shape, (n_ctx * width, 1, width))}),
        Node("VIEW", (cache_k,), (k,), {"view": View(0, k.shape, (n_ctx * hd, hd, 1))}),
        Node("PERMUTE", (q,), (by_head,), {"axes": (1, 0, 2)}),
        Node("MUL_MAT", (k, by_head), (scores,)),
        *capping,
        Node("SOFT_MAX", (soft, mask), (weights,), {"scale": 1.0 if cap else scale}),
        Node("MUL_MAT", (v, weights), (mixed,)),
        Node("PERMUTE", (mixed,), (merged,), {"axes": (1, 0, 2)}),
        Node("CONT", (merged,), (out,)),
    ]
