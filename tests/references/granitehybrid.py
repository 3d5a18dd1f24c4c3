"""`granitehybrid` by GraniteMoeHybridForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from references.common import Checkpoint, Logits, State, attention, config, fill, mamba, mamba_config, outer, run


class _Hybrid(Checkpoint):
    """A file in which a number may be an array, one for each layer; `get` gives the largest."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return max(value) if isinstance(value, list) else value


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = _Hybrid(path)
    kv = [int(n) for n in Checkpoint.get(f, "attention.head_count_kv")]
    n_expert, rope = f.get("expert_count", 0), f.get("rope.scaling.finetuned")
    given = config(f, **mamba_config(f)) | {
        "embedding_multiplier": f.get("embedding_scale"),
        "residual_multiplier": f.get("residual_scale"),
        "attention_multiplier": f.get("attention.scale"),
        "logits_scaling": f.get("logit_scale"),
        "layer_types": ["attention" if n else "mamba" for n in kv],
        "position_embedding_type": "rope" if rope else None,
        "num_local_experts": n_expert,
        "num_experts_per_tok": f.get("expert_used_count", 0),
        "shared_intermediate_size": f.get("expert_shared_feed_forward_length", f.get("feed_forward_length")),
        "mamba_expand": f.get("ssm.inner_size") // f.get("embedding_length"),
    }
    state = outer(f)
    for il, n_kv in enumerate(kv):
        if n_kv:
            attention(f, state, il, permuted=bool(rope))
        else:
            mamba(f, state, il, f"model.layers.{il}.mamba")
            state[f"model.layers.{il}.input_layernorm.weight"] = f[f"blk.{il}.attn_norm.weight"]
        _feed_forward(f, state, il, n_expert)
    return run(fill(GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**given)), f, state), tokens)


def _feed_forward(f: Checkpoint, state: State, il: int, n_expert: int) -> None:
    """Norm, router and experts where there are any, and the shared expert, which is the whole of it where there are none; gate and up are
    one matrix, gate first."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
    shared = "_shexp" if n_expert else ""
    gate_up = [f[f"{ours}.ffn_{which}{shared}.weight"] for which in ("gate", "up")]
    state[f"{theirs}.shared_mlp.input_linear.weight"] = torch.cat(gate_up)
    state[f"{theirs}.shared_mlp.output_linear.weight"] = f[f"{ours}.ffn_down{shared}.weight"]
    if n_expert:
        gate_up = [f[f"{ours}.ffn_{which}_exps.weight"] for which in ("gate", "up")]
        moe = f"{theirs}.block_sparse_moe"
        state[f"{moe}.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
        state[f"{moe}.experts.down_proj"] = f[f"{ours}.ffn_down_exps.weight"]
        state[f"{moe}.router.weight"] = f[f"{ours}.ffn_gate_inp.weight"]
