"""`llama` by LlamaForCausalLM, with experts by MixtralForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from references.common import Checkpoint, Logits, attention, config, experts, feed_forward, fill, llama3_rope, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(f)
    given["rope_parameters"] |= llama3_rope(f)
    state = outer(f)
    n_expert = f.get("expert_count", 0)
    for il in range(f.get("block_count")):
        attention(f, state, il, permuted=True)
        (experts if n_expert else feed_forward)(f, state, il)
    if n_expert:
        mixtral = MixtralConfig(**given, num_local_experts=n_expert, num_experts_per_tok=f.get("expert_used_count"), sliding_window=None)
        return run(fill(MixtralForCausalLM(mixtral), f, state), tokens)
    return run(fill(LlamaForCausalLM(LlamaConfig(**given)), f, state), tokens)
