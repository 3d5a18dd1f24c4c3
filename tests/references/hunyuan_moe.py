"""`hunyuan-moe` by HunYuanMoEV1ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM

from references.common import Checkpoint, Logits, attention, config, experts, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(
        f,
        intermediate_size=f.get("expert_shared_feed_forward_length"),
        num_experts=f.get("expert_count"),
        moe_topk=f.get("expert_used_count"),
    )
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        experts(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.self_attn.query_layernorm.weight"] = f[f"{ours}.attn_q_norm.weight"]
        state[f"{theirs}.self_attn.key_layernorm.weight"] = f[f"{ours}.attn_k_norm.weight"]
        state[f"{theirs}.mlp.gate.wg.weight"] = state.pop(f"{theirs}.mlp.gate.weight")
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.mlp.shared_mlp.{which}_proj", f"{ours}.ffn_{which}_shexp")
    return run(fill(HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**given)), f, state), tokens)
