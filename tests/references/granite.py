"""`granite` by GraniteForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GraniteConfig, GraniteForCausalLM

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, run


def scales(f: Checkpoint) -> dict[str, Any]:
    """Arguments of the four scales."""
    return {
        "embedding_multiplier": f.get("embedding_scale"),
        "residual_multiplier": f.get("residual_scale"),
        "attention_multiplier": f.get("attention.scale"),
        "logits_scaling": f.get("logit_scale"),
    }


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il, permuted=True)
        feed_forward(f, state, il)
    return run(fill(GraniteForCausalLM(GraniteConfig(**config(f, **scales(f)))), f, state), tokens)
