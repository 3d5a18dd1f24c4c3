"""Multi-token prediction (MTP): a block behind the last layer of some files that predicts the token after the next one.

Its entry for the token at position p reads that token's embedding, and the hidden row of the token before it: what the output layer
reads of that one.

    x = eh_proj [enorm(embedding), hnorm(hidden row p - 1)]

Then come a layer of its own, whose attention sees entries so far, a norm, and the output layer: logits of the token at p + 1. What the norm
gives stands for hidden row p while the model itself has made none, so the block predicts several tokens, one after the other.

The model keeps two things for it: hidden rows of its tokens, and the block's KV cache. Both are rows by position, as of any cache: what
belongs to dropped tokens is written over. An entry is row p - 1 of the cache; the first token of a text has none.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from vkback.graph import Graph, Tensor
from vkback.models.blocks import rms_norm
from vkback.models.builder import GraphBuilder

HIDDEN = "cache_hidden"

ROOM = 32
"""Rows that the block's caches have beside the context: drafts may lie behind its end."""

Layer = Callable[[GraphBuilder, Tensor, int], Tensor]


def first_tensor(il: int) -> str:
    """The tensor without which block `il` predicts nothing."""
    return f"blk.{il}.nextn.eh_proj.weight"


def hidden_rows(b: GraphBuilder, width: int) -> Tensor:
    """The cache of hidden rows of so many values."""
    return Tensor(HIDDEN, "F32", (1, b.n_ctx + ROOM, width), "state")


def keep(b: GraphBuilder, hidden: Tensor) -> None:
    """Store hidden rows of the tokens [n, width]."""
    width = hidden.shape[-1]
    rows = hidden_rows(b, width)
    b.graph.add("SET_ROWS", (b.view(hidden, (b.n, 1, width)), b.pos, rows), (rows,), type="F32")


def _entries(b: GraphBuilder, il: int, embedded: Tensor | None, layer: Layer) -> Tensor:
    """What block `il` makes of the tokens [n, n_embd]. embedded: their embeddings, where there are such."""
    hp, block = b.hp, f"blk.{il}.nextn"
    m = copy(b)
    m.pos = m.rows = b.graph.emit("PREVIOUS", "mtp_pos", "I32", (b.n,), (b.pos,))
    m.head, m.cache_rows = "all", b.n_ctx + ROOM
    own = f"{block}.embed_tokens.weight"
    if hp.has_weight(own):
        table = hp.weight(own, (hp.n_vocab, hp.n_embd))
        embedded = b.graph.emit("GET_ROWS", "mtp_embd", "F32", (b.n, hp.n_embd), (table, b.tokens))
    elif embedded is None:
        embedded = b.embed()
    before = b.graph.emit("GET_ROWS", "mtp_hidden", "F32", (b.n, hp.n_embd), (hidden_rows(b, hp.n_embd), m.pos))
    token = rms_norm(b, embedded, f"{block}.enorm", "mtp_enorm", plain="mtp_enorm_rms")
    text = rms_norm(b, before, f"{block}.hnorm", "mtp_hnorm", plain="mtp_hnorm_rms")
    both = b.graph.emit("CONCAT", "mtp_concat", "F32", (b.n, 2 * hp.n_embd), (token, text), axis=1)
    return layer(m, b.linear(both, f"{block}.eh_proj", hp.n_embd, "mtp_eh_proj"), il)


def add_entries(b: GraphBuilder, il: int, embedded: Tensor, hidden: Tensor, layer: Layer) -> None:
    """Behind a model's own nodes: store hidden rows of its tokens [n, n_embd], and block `il` of them, whose caches alone are wanted."""
    keep(b, hidden)
    _entries(b, il, embedded, layer)


def block_graph(b: GraphBuilder, il: int, layer: Layer) -> Graph:
    """The graph of block `il` alone, for a token: logits of the one after it."""
    hp, block = b.hp, f"blk.{il}.nextn"
    x = _entries(b, il, None, layer)
    own = hp.has_weight(f"{block}.shared_head_norm.weight")
    x = rms_norm(b, x, f"{block}.shared_head_norm" if own else "output_norm", "mtp_norm", plain="mtp_rms")
    keep(b, x)
    name = f"{block}.shared_head_head.weight"
    if not hp.has_weight(name):
        return b.finish(b.logits(x))
    w = hp.weight(name, (hp.n_vocab, hp.n_embd))
    return b.finish(b.graph.emit("MUL_MAT", "result_output", "F32", (b.n, hp.n_vocab), (w, x)))
