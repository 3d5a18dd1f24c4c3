"""Per-layer embeddings (PLE; Gemma 3n, Gemma 4): each token has a vector for every layer, from a table and from its embedding.

A layer takes GELU of a product of the stream, times that vector, back to the stream's width, normed.
"""

from __future__ import annotations

import math

from vkback.graph import Tensor
from vkback.models.blocks import rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors
from vkback.ops.view import View

PER_LAYER = "embedding_length_per_layer_input"
"""Values of such a vector."""
PER_LAYER_SCALES = {"per_layer_proj_norm.weight": math.sqrt(0.5)}
"""For `HParams.with_scaled`: the published 1 / sqrt(2) of the sum of both parts is in each of them."""
PLE = "inp_per_layer"
"""The vectors of all layers, F32 [n, n_layer, width]."""


def per_layer_vectors(b: GraphBuilder, x: Tensor, width: int) -> None:
    """Make PLE from tokens and their embedding x, not yet scaled: the published scale of the product is the inverse of the embedding's."""
    hp = b.hp
    shape = (b.n, hp.n_layer, width)
    table = hp.weight("per_layer_token_embd.weight", (hp.n_vocab, hp.n_layer * width))
    own = b.graph.emit("GET_ROWS", "inp_per_layer_token", "F32", (b.n, hp.n_layer * width), (table, b.tokens))
    own = b.graph.emit("SCALE", "inp_per_layer_selected", "F32", own.shape, (own,), scale=math.sqrt(width / 2), bias=0.0)
    made = b.view(b.linear(x, "per_layer_model_proj", hp.n_layer * width, "per_layer_model"), shape)
    made = rms_norm(b, made, "per_layer_proj_norm", "per_layer_proj", plain="per_layer_rms")
    b.graph.emit("ADD", PLE, "F32", shape, (made, b.view(own, shape)))


def per_layer_part(b: GraphBuilder, x: Tensor, il: int, width: int, scale: float = 1.0) -> Tensor:
    """What the tokens' vectors of layer `il` add to the stream x. scale: what the published stream is of x."""
    hp = b.hp
    whole = Tensor(PLE, "F32", (b.n, hp.n_layer, width))
    view = View(il * width, (b.n, width), (hp.n_layer * width, 1))
    own = b.graph.emit("CONT", f"inp_per_layer-{il}", "F32", (b.n, width), (whole,), view=view)
    own = b.last_token(own, il, "inp_per_layer_last")
    gate = b.linear(x, f"blk.{il}.inp_gate", width, f"per_layer_gate-{il}")
    if scale != 1.0:
        gate = b.graph.emit("SCALE", f"per_layer_gate_scaled-{il}", "F32", gate.shape, (gate,), scale=scale, bias=0.0)
    y = b.graph.emit("GEGLU", f"per_layer_geglu-{il}", "F32", gate.shape, (gate, own))
    y = b.linear(y, f"blk.{il}.proj", hp.n_embd, f"per_layer_out-{il}")
    return rms_norm(b, y, f"blk.{il}.post_norm", f"per_layer_embd_out-{il}", plain=f"per_layer_out_rms-{il}")


def outer_per_layer_tensors(s: ModelShape, width: int) -> Tensors:
    """The table, and what makes vectors of embeddings."""
    yield "per_layer_token_embd.weight", (s.n_vocab, s.n_layer * width)
    yield "per_layer_model_proj.weight", (s.n_layer * width, s.n_embd)
    yield "per_layer_proj_norm.weight", (width,)


def per_layer_tensors(s: ModelShape, width: int) -> Tensors:
    """Those of a layer."""
    yield "inp_gate.weight", (width, s.n_embd)
    yield "proj.weight", (s.n_embd, width)
    yield "post_norm.weight", (s.n_embd,)
