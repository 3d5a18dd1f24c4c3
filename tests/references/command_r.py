"""`command-r` by CohereForCausalLM, which rotates pairs of neighbours."""

from __future__ import annotations

from pathlib import Path

from transformers import CohereConfig, CohereForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, layer_norm_config, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    normed = "blk.0.attn_q_norm.weight" in f
    given = config(f, **layer_norm_config(f, "layer_norm_eps"), logit_scale=f.get("logit_scale"), use_qk_norm=normed)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        feed_forward(f, state, il, norm="")
        if normed:
            qk_norms(f, state, il)
    return run(fill(CohereForCausalLM(CohereConfig(**given)), f, state), tokens)
