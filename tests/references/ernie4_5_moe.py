"""`ernie4_5-moe` by Ernie4_5_MoeForCausalLM, which rotates pairs of neighbours."""

from __future__ import annotations

from pathlib import Path

from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from references.common import Checkpoint, Logits, attention, config, experts, feed_forward, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. The router works in float32."""
    f = Checkpoint(path)
    n_layer, step, dense = f.get("block_count"), f.get("interleave_moe_layer_step"), f.get("leading_dense_block_count")
    given = config(
        f,
        moe_num_experts=f.get("expert_count"),
        moe_k=f.get("expert_used_count"),
        moe_intermediate_size=f.get("expert_feed_forward_length"),
        moe_num_shared_experts=f.get("expert_shared_count"),
        moe_layer_start_index=dense,
        moe_layer_interval=step,
    )
    state = outer(f)
    for il in range(n_layer):
        attention(f, state, il)
        if il < dense or (il + 1) % step:
            feed_forward(f, state, il)
            continue
        experts(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}.mlp"
        state[f"{theirs}.gate.moe_statics.e_score_correction_bias"] = f[f"{ours}.exp_probs_b.bias"][None]
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.shared_experts.{which}_proj", f"{ours}.ffn_{which}_shexp")
    return run(fill(Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**given)), f, state), tokens)
