"""`gpt-oss` by GptOssForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from references.common import Checkpoint, Logits, State, attention, config, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(
        f,
        num_local_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        intermediate_size=f.get("expert_feed_forward_length"),
        sliding_window=f.get("attention.sliding_window"),
    )
    given["rope_parameters"] |= {
        "rope_type": f.get("rope.scaling.type"),
        "factor": float(f.get("rope.scaling.factor")),
        "original_max_position_embeddings": f.get("rope.scaling.original_context_length"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.self_attn.sinks"] = f[f"{ours}.attn_sinks.weight"]
        state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.post_attention_norm.weight"]
        f.linear(state, f"{theirs}.mlp.router", f"{ours}.ffn_gate_inp")
        _experts(f, state, ours, f"{theirs}.mlp.experts")
    return run(fill(GptOssForCausalLM(GptOssConfig(**given)), f, state), tokens)


def _experts(f: Checkpoint, state: State, ours: str, theirs: str) -> None:
    """Matrices with inputs first, and row i of gate before row i of up."""
    for kind, name in (("weight", ""), ("bias", "_bias")):
        gate, up = (f[f"{ours}.ffn_{which}_exps.{kind}"] for which in ("gate", "up"))
        gate_up = torch.stack([gate, up], dim=2).flatten(1, 2)
        down = f[f"{ours}.ffn_down_exps.{kind}"]
        state[f"{theirs}.gate_up_proj{name}"] = gate_up.transpose(1, 2) if kind == "weight" else gate_up
        state[f"{theirs}.down_proj{name}"] = down.transpose(1, 2) if kind == "weight" else down
