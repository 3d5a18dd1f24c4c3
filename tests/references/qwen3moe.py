"""`qwen3moe` by Qwen3MoeForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from references.common import Checkpoint, Logits, attention, config, experts, fill, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(
        f,
        num_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        moe_intermediate_size=f.get("expert_feed_forward_length"),
        norm_topk_prob=True,
    )
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        qk_norms(f, state, il)
        experts(f, state, il)
    return run(fill(Qwen3MoeForCausalLM(Qwen3MoeConfig(**given)), f, state), tokens)
