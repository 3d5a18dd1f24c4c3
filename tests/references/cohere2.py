"""`cohere2` by Cohere2ForCausalLM, which rotates pairs of neighbours."""

from __future__ import annotations

from pathlib import Path

from transformers import Cohere2Config, Cohere2ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, layer_norm_config, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    n_layer = f.get("block_count")
    given = config(
        f,
        **layer_norm_config(f, "layer_norm_eps"),
        logit_scale=f.get("logit_scale"),
        sliding_window=f.get("attention.sliding_window"),
        layer_types=["full_attention" if il % 4 == 3 else "sliding_attention" for il in range(n_layer)],
    )
    state = outer(f)
    for il in range(n_layer):
        attention(f, state, il)
        feed_forward(f, state, il, norm="")
    return run(fill(Cohere2ForCausalLM(Cohere2Config(**given)), f, state), tokens)
