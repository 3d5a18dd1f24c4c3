"""Attention over caches that hold the rows of several sequences in pages (shaders/attention/pages.glsl).

The caches are [n_head_kv, n_pages * page, head_dim]. Two more inputs come last: slots I32 [n], the sequence of each token, and pages
I32 [n_slots, max_pages], the page table: row r of a sequence is row r % page of page pages[slot, r // page]. `pos` counts rows of a token's
sequence. Entries behind a sequence's last row are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array

Reference = Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]


def page_of(node: Node) -> int:
    """Rows of a page; 0: the caches hold one sequence, row by row."""
    return int(node.params.get("page", 0))


def paged_inputs(node: Node) -> list[tuple[str, Tensor]]:
    """Slots and pages by role; none of a node whose caches hold one sequence."""
    return list(zip(("slots", "pages"), node.inputs[-2:], strict=True)) if page_of(node) else []


def rows_of(node: Node) -> int:
    """Rows that one sequence may have."""
    if page := page_of(node):
        return int(node.inputs[-1].shape[1]) * page
    cache = next(t for t in node.inputs if t.kind == "state")
    return int(cache.shape[1])


def physical_rows(pages: Array, slot: int, rows: int, page: int) -> Array:
    """Where the first rows of a sequence lie."""
    r = np.arange(rows)
    return np.asarray(pages[slot], np.int64)[r // page] * page + r % page


def by_sequence(reference: Reference, inputs: Sequence[Array], params: Mapping[str, Any]) -> Array:
    """FLASH_ATTN_EXT token by token, each over the rows of its own sequence: [n, n_head * vd]."""
    q, cache_k, cache_v, pos, *rest = inputs[:-2]
    slots, pages = inputs[-2:]
    plain = {key: value for key, value in params.items() if key != "page"}
    per_token = [rest[:-1], rest[-1:]] if params.get("split_q") else [rest, []]
    out = []
    for t in range(len(q)):
        rows = physical_rows(pages, int(slots[t]), max(int(pos[t]) + 1, 1), params["page"])
        own = [x[t : t + 1] for x in per_token[1]]
        out.append(reference([q[t : t + 1], cache_k[:, rows], cache_v[:, rows], pos[t : t + 1], *per_token[0], *own], plain)[0])
    return np.concatenate(out)


def token_by_sequence(reference: Reference, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    """ATTN_DECODE over the rows of the token's own sequence; the new row goes back into its page, unless it was there before."""
    qkv, pos, cache_k, cache_v, *rest = inputs[:-2]
    slots, pages = inputs[-2:]
    plain = {key: value for key, value in params.items() if key != "page"}
    rows = physical_rows(pages, int(slots[0]), max(int(pos[0]) + 1, 1), params["page"])
    out, *new = reference([qkv, pos, cache_k[:, rows], cache_v[:, rows], *rest], plain)
    if not new:
        return [out]
    caches = [np.array(cache_k), np.array(cache_v)]
    if pos[0] >= 0:
        for cache, written in zip(caches, new, strict=True):
            cache[:, rows[-1]] = written[:, -1]
    return [out, *caches]
