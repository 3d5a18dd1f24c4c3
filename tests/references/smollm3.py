"""`smollm3` by SmolLM3ForCausalLM, whose configuration says by itself which layers have no RoPE."""

from __future__ import annotations

from pathlib import Path

from transformers import SmolLM3Config, SmolLM3ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il, permuted=True)
        feed_forward(f, state, il)
    return run(fill(SmolLM3ForCausalLM(SmolLM3Config(**config(f), use_sliding_window=False)), f, state), tokens)
