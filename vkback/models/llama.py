"""The `llama` architecture: Llama 1 to 3, Mistral, Mixtral, SmolLM and everything converted to their shape.

Per layer: RMS norm, attention with grouped K and V heads and RoPE over neighbouring pairs, residual, RMS norm, SwiGLU or (Mixtral) a
mixture of SwiGLU experts, residual. Output tied to the embedding, biases and RoPE frequency factors as the file has them.
"""

from __future__ import annotations

from vkback.graph import Graph
from vkback.models.builder import GraphBuilder, Head
from vkback.models.hparams import HParams, RopeMode

ROPE_MODE: RopeMode = "normal"


def build_graph(hp: HParams, n_tokens: int, n_ctx: int, *, head: Head) -> Graph:
    """The graph of n_tokens tokens at once, over caches of n_ctx rows. Raises GgufError naming a weight that is missing or misshaped."""
    b = GraphBuilder(hp, n_tokens, n_ctx, head)
    x = b.embed()
    for il in range(hp.n_layer):
        x = b.attention_half(x, il)
        x = b.feed_forward_half(x, il)
    return b.finish(x)
