"""`ernie4_5` by Ernie4_5ForCausalLM, which rotates pairs of neighbours."""

from __future__ import annotations

from pathlib import Path

from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        feed_forward(f, state, il)
    return run(fill(Ernie4_5ForCausalLM(Ernie4_5Config(**config(f, use_bias=False))), f, state), tokens)
