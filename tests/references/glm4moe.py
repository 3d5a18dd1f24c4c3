"""`glm4moe` by Glm4MoeForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from references.common import Checkpoint, Logits, attention, config, experts, feed_forward, fill, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    normed = "blk.0.attn_q_norm.weight" in f
    given = config(
        f,
        attention_bias=True,
        use_qk_norm=normed,
        first_k_dense_replace=f.get("leading_dense_block_count"),
        n_routed_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        moe_intermediate_size=f.get("expert_feed_forward_length"),
        n_shared_experts=f.get("expert_shared_count"),
        routed_scaling_factor=float(f.get("expert_weights_scale")),
        norm_topk_prob=bool(f.get("expert_weights_norm")),
        n_group=1,
        topk_group=1,
    )
    given["rope_parameters"]["partial_rotary_factor"] = f.get("rope.dimension_count") / given["head_dim"]
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        if normed:
            qk_norms(f, state, il)
        if il < f.get("leading_dense_block_count"):
            feed_forward(f, state, il, norm="post_attention_norm")
            continue
        experts(f, state, il, norm="post_attention_norm")
        ours, theirs = f"blk.{il}", f"model.layers.{il}.mlp"
        state[f"{theirs}.gate.e_score_correction_bias"] = f[f"{ours}.exp_probs_b.bias"]
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.shared_experts.{which}_proj", f"{ours}.ffn_{which}_shexp")
    return run(fill(Glm4MoeForCausalLM(Glm4MoeConfig(**given)), f, state), tokens)
