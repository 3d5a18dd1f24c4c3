"""The `gpt-oss` architecture: OpenAI's gpt-oss 20B and 120B.

As llama, but RoPE pairs value i with value i + n_dims/2, every head has an attention sink, every other layer (the first, the third, ...)
sees a sliding window alone, and every feed-forward layer is a mixture of experts, whose router weighs the chosen ones by a softmax over
them. Products have biases, the router's and the experts' too. The experts' gated unit is a clamped one (SWIGLU_OAI).
"""

from __future__ import annotations

from vkback.graph import Graph
from vkback.models.builder import GraphBuilder, Head
from vkback.models.gguf_file import GgufError
from vkback.models.hparams import HParams, RopeMode
from vkback.ops.glu import SWIGLU_OAI

ROPE_MODE: RopeMode = "neox"


def build_graph(hp: HParams, n_tokens: int, n_ctx: int, *, head: Head) -> Graph:
    """The graph of n_tokens tokens at once, over caches of n_ctx rows. Raises GgufError naming a key or weight that is missing or
    misshaped."""
    for key, value in (("expert_count", hp.n_expert), ("attention.sliding_window", hp.window)):
        if value == 0:
            raise GgufError(f"[gguf] {hp.path}: metadata key gpt-oss.{key} is 0 or missing, expected at least 1")
    b = GraphBuilder(
        hp, n_tokens, n_ctx, head, sinks=True, ffn_norm=("post_attention_norm", "attn_post_norm"), gating="softmax_weight",
        glu=("SWIGLU_OAI", SWIGLU_OAI),
    )  # fmt: skip
    x = b.embed()
    for il in range(hp.n_layer):
        x = b.attention_half(x, il, window=hp.window if il % 2 == 0 else 0)
        x = b.feed_forward_half(x, il)
    return b.finish(x)
