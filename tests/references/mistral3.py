"""`mistral3` by Ministral3ForCausalLM, with experts by MixtralForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Ministral3Config, Ministral3ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, run
from references.llama import logits as llama_logits


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    if f.get("expert_count", 0):
        return llama_logits(path, tokens)
    given = config(f, sliding_window=None)
    multiplier = f.get("rope.scaling.yarn_log_multiplier")
    given["rope_parameters"] |= {
        "rope_type": f.get("rope.scaling.type"),
        "factor": float(f.get("rope.scaling.factor")),
        "original_max_position_embeddings": f.get("rope.scaling.original_context_length"),
        "max_position_embeddings": f.get("rope.scaling.original_context_length"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": multiplier,
        "llama_4_scaling_beta": f.get("attention.temperature_scale"),
    }
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il, permuted=True)
        feed_forward(f, state, il)
    return run(fill(Ministral3ForCausalLM(Ministral3Config(**given)), f, state), tokens)
