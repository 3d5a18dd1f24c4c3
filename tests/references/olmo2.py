"""`olmo2` by Olmo2ForCausalLM, with a sliding window by Olmo3ForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, post_norms, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state, n_layer = outer(f), f.get("block_count")
    for il in range(n_layer):
        attention(f, state, il, norm="")
        qk_norms(f, state, il)
        feed_forward(f, state, il, norm="")
        post_norms(f, state, il)
    model: Any
    if not (window := f.get("attention.sliding_window", 0)):
        model = Olmo2ForCausalLM(Olmo2Config(**config(f)))
    else:
        given = config(
            f, sliding_window=window, layer_types=["full_attention" if il % 4 == 3 else "sliding_attention" for il in range(n_layer)]
        )
        base = given["rope_parameters"]
        yarn = {
            "rope_type": "yarn",
            "factor": float(f.get("rope.scaling.factor")),
            "original_max_position_embeddings": f.get("rope.scaling.original_context_length"),
            "attention_factor": f.get("rope.scaling.attn_factor"),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
        given["rope_parameters"] = {"full_attention": base | yarn, "sliding_attention": base}
        model = Olmo3ForCausalLM(Olmo3Config(**given))
    return run(fill(model, f, state), tokens)
