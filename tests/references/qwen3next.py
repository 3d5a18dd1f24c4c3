"""`qwen3next` by Qwen3NextForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from references.common import Checkpoint, Logits, State, attention, fill, outer, qk_norms, run
from references.qwen35 import delta_net_layers, zero_centered
from references.qwen35moe import experts_and_shared, experts_config


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = zero_centered(outer(f))
    for il, recurs in enumerate(delta_net_layers(f)):
        layer: State = {}
        if recurs:
            _delta_net(f, layer, il)
        else:
            attention(f, layer, il)
            qk_norms(f, layer, il)
        experts_and_shared(f, layer, il)
        state |= zero_centered(layer)
    return run(fill(Qwen3NextForCausalLM(Qwen3NextConfig(**experts_config(f), norm_topk_prob=True)), f, state), tokens)


def _delta_net(f: Checkpoint, state: State, il: int) -> None:
    """transformers has q, k, v and z of each group of heads together in one matrix."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}.linear_attn"
    state[f"model.layers.{il}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
    groups, wide = f.get("ssm.group_count"), f.get("ssm.group_count") * f.get("ssm.state_size")
    qkv, z = f[f"{ours}.attn_qkv.weight"], f[f"{ours}.attn_gate.weight"]
    parts = [t.reshape(groups, -1, qkv.shape[1]) for t in (qkv[:wide], qkv[wide : 2 * wide], qkv[2 * wide :], z)]
    state |= {
        f"{theirs}.in_proj_qkvz.weight": torch.cat(parts, dim=1).reshape(-1, qkv.shape[1]),
        f"{theirs}.in_proj_ba.weight": f[f"{ours}.ssm_ba.weight"],
        f"{theirs}.conv1d.weight": f[f"{ours}.ssm_conv1d.weight"].unsqueeze(1),
        f"{theirs}.A_log": torch.log(-f[f"{ours}.ssm_a"]),
        f"{theirs}.dt_bias": f[f"{ours}.ssm_dt.bias"],
        f"{theirs}.norm.weight": f[f"{ours}.ssm_norm.weight"],
        f"{theirs}.out_proj.weight": f[f"{ours}.ssm_out.weight"],
    }
