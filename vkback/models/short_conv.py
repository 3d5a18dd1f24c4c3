"""The gated short convolution of LFM2: one matrix makes B, C and x of a token; a causal convolution of B x over a few tokens, times C, and
a matrix back. Layers with it and layers with attention take turns."""

from __future__ import annotations

from dataclasses import replace

from vkback.graph import Tensor
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors

TAPS = "shortconv.l_cache"
"""Tokens that the convolution sees, itself included."""


def short_conv(b: GraphBuilder, x: Tensor, il: int, taps: int) -> Tensor:
    """The short convolution of layer `il` over the normed input x [n, n_embd] -> [n, n_embd]."""
    n_embd, stem = b.hp.n_embd, f"blk.{il}.shortconv"
    bcx = b.linear(x, f"{stem}.in_proj", 3 * n_embd, f"bcx-{il}")
    w = replace(b.hp.weight(f"{stem}.conv.weight", (n_embd, taps)), shape=(n_embd * taps,))
    sequences, has = b.sequences if b.paging else ((), {})
    state = b.convolution_state(il, taps, n_embd)
    y = Tensor(f"conv_gated-{il}", "F32", (b.n, n_embd))
    b.graph.add("SHORT_CONV", (bcx, w, b.pos, state, *sequences), (y, state), **has)
    return b.linear(y, f"{stem}.out_proj", n_embd, f"conv_out-{il}")


def short_conv_tensors(s: ModelShape) -> Tensors:
    """A short convolution and the norm before it."""
    yield "attn_norm.weight", (s.n_embd,)
    yield "shortconv.conv.weight", (s.n_embd, int(s.metadata[TAPS]))
    yield "shortconv.in_proj.weight", (3 * s.n_embd, s.n_embd)
    yield "shortconv.out_proj.weight", (s.n_embd, s.n_embd)
