"""`qwen3` by Qwen3ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        qk_norms(f, state, il)
        feed_forward(f, state, il)
    return run(fill(Qwen3ForCausalLM(Qwen3Config(**config(f))), f, state), tokens)
