"""`exaone4` by Exaone4ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Exaone4Config, Exaone4ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, llama3_rope, outer, post_norms, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    n_layer, window = f.get("block_count"), f.get("attention.sliding_window", 0)
    given = config(
        f,
        sliding_window=window or None,
        sliding_window_pattern=4,
        layer_types=["sliding_attention" if window and il % 4 != 3 else "full_attention" for il in range(n_layer)],
    )
    given["rope_parameters"] |= llama3_rope(f)
    state = outer(f)
    for il in range(n_layer):
        attention(f, state, il, norm="")
        qk_norms(f, state, il)
        feed_forward(f, state, il, norm="")
        post_norms(f, state, il)
    return run(fill(Exaone4ForCausalLM(Exaone4Config(**given)), f, state), tokens)
