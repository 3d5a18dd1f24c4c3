"""`qwen2` by Qwen2ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        feed_forward(f, state, il)
    return run(fill(Qwen2ForCausalLM(Qwen2Config(**config(f))), f, state), tokens)
