"""`deepseek2` by DeepseekV2ForCausalLM, with a sigmoid router by DeepseekV3ForCausalLM.

Rotated pairs lie side by side in files and in these classes. Absorbed files hold kv_b_proj in two tensors: attn_k_b, a head's rows for K
transposed, and attn_v_b.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from references.common import Checkpoint, Logits, State, config, experts, feed_forward, fill, outer, run


def latent_config(f: Checkpoint) -> dict[str, Any]:
    """Arguments of a configuration with MLA, YaRN and experts."""
    absorbed = "blk.0.attn_k_b.weight" in f
    rot = int(f.get("rope.dimension_count"))
    mscale = f.get("rope.scaling.yarn_log_multiplier") / 0.1
    groups = int(f.get("expert_group_count", 1))
    dim_k = int(f.get("attention.key_length_mla" if absorbed else "attention.key_length"))
    given = config(
        f,
        head_dim=rot,
        num_key_value_heads=f.get("attention.head_count"),
        q_lora_rank=f.get("attention.q_lora_rank", 0) or None,
        kv_lora_rank=f.get("attention.kv_lora_rank"),
        qk_rope_head_dim=rot,
        qk_nope_head_dim=dim_k - rot,
        v_head_dim=f.get("attention.value_length_mla" if absorbed else "attention.value_length"),
        first_k_dense_replace=f.get("leading_dense_block_count"),
        n_routed_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        moe_intermediate_size=f.get("expert_feed_forward_length"),
        n_shared_experts=f.get("expert_shared_count"),
        routed_scaling_factor=float(f.get("expert_weights_scale")),
        norm_topk_prob=bool(f.get("expert_weights_norm")),
        n_group=groups,
        topk_group=f.get("expert_group_used_count", 1),
    )
    given["rope_parameters"] |= {
        "rope_type": f.get("rope.scaling.type"),
        "factor": float(f.get("rope.scaling.factor")),
        "original_max_position_embeddings": f.get("rope.scaling.original_context_length"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    return given


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    sigmoid, groups = f.get("expert_gating_func") == 2, int(f.get("expert_group_count", 1))
    given = latent_config(f) | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    state = outer(f)
    for il in range(f.get("block_count")):
        latent_attention(f, state, il)
        if il < f.get("leading_dense_block_count"):
            feed_forward(f, state, il)
            continue
        experts(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}.mlp"
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.shared_experts.{which}_proj", f"{ours}.ffn_{which}_shexp")
        if sigmoid:
            state[f"{theirs}.gate.e_score_correction_bias"] = f[f"{ours}.exp_probs_b.bias"]
    model: Any
    if sigmoid:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**given, rope_interleave=True))
    else:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**given))
    return run(fill(model, f, state), tokens)


def latent_attention(f: Checkpoint, state: State, il: int) -> None:
    """Norm, products and norms of MLA of a layer."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}.self_attn"
    state[f"model.layers.{il}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
    state[f"{theirs}.kv_a_layernorm.weight"] = f[f"{ours}.attn_kv_a_norm.weight"]
    f.linear(state, f"{theirs}.kv_a_proj_with_mqa", f"{ours}.attn_kv_a_mqa")
    f.linear(state, f"{theirs}.o_proj", f"{ours}.attn_output")
    if f"{ours}.attn_q_a.weight" in f:
        state[f"{theirs}.q_a_layernorm.weight"] = f[f"{ours}.attn_q_a_norm.weight"]
        f.linear(state, f"{theirs}.q_a_proj", f"{ours}.attn_q_a")
        f.linear(state, f"{theirs}.q_b_proj", f"{ours}.attn_q_b")
    else:
        f.linear(state, f"{theirs}.q_proj", f"{ours}.attn_q")
    if f"{ours}.attn_k_b.weight" in f:
        k_b, v_b = f[f"{ours}.attn_k_b.weight"], f[f"{ours}.attn_v_b.weight"]
        state[f"{theirs}.kv_b_proj.weight"] = torch.cat([k_b.transpose(1, 2), v_b], dim=1).flatten(0, 1)
    else:
        f.linear(state, f"{theirs}.kv_b_proj", f"{ours}.attn_kv_b")
