"""`seed_oss` by SeedOssForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import SeedOssConfig, SeedOssForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        feed_forward(f, state, il, norm="post_attention_norm")
    given = config(f, attention_bias=True, attention_out_bias=False, attention_dropout=0.0, residual_dropout=0.0)
    return run(fill(SeedOssForCausalLM(SeedOssConfig(**given)), f, state), tokens)
