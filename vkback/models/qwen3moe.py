"""The `qwen3moe` architecture: Qwen3 30B-A3B, 235B-A22B.

As llama, but every head of Q and K is RMS-normed before RoPE, RoPE pairs value i with value i + n_dims/2, and every feed-forward layer is
a mixture of experts.
"""

from __future__ import annotations

from vkback.graph import Graph
from vkback.models.builder import GraphBuilder, Head
from vkback.models.gguf_file import GgufError
from vkback.models.hparams import HParams, RopeMode

ROPE_MODE: RopeMode = "neox"


def build_graph(hp: HParams, n_tokens: int, n_ctx: int, *, head: Head) -> Graph:
    """The graph of n_tokens tokens at once, over caches of n_ctx rows. Raises GgufError naming a weight that is missing or misshaped."""
    if hp.n_expert == 0:
        raise GgufError(f"[gguf] {hp.path}: metadata key qwen3moe.expert_count is 0 or missing, expected at least 1")
    b = GraphBuilder(hp, n_tokens, n_ctx, head, qk_norm=True)
    x = b.embed()
    for il in range(hp.n_layer):
        x = b.attention_half(x, il)
        x = b.feed_forward_half(x, il)
    return b.finish(x)
