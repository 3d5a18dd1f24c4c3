"""`minimax-m2` by MiniMaxM2ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from references.common import Checkpoint, Logits, attention, config, experts, fill, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(
        f,
        intermediate_size=f.get("expert_feed_forward_length"),
        num_local_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
    )
    given["rope_parameters"]["partial_rotary_factor"] = f.get("rope.dimension_count") / given["head_dim"]
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        qk_norms(f, state, il)
        experts(f, state, il)
        state[f"model.layers.{il}.mlp.e_score_correction_bias"] = f[f"blk.{il}.exp_probs_b.bias"]
    return run(fill(MiniMaxM2ForCausalLM(MiniMaxM2Config(**given)), f, state), tokens)
