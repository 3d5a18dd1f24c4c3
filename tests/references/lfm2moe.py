"""`lfm2moe` by Lfm2MoeForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from references.common import Logits, fill, run
from references.lfm2 import Hybrid, layers, mixed_config, renamed


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Hybrid(path)
    given = mixed_config(f) | {
        "num_dense_layers": f.get("leading_dense_block_count"),
        "num_experts": f.get("expert_count"),
        "num_experts_per_tok": f.get("expert_used_count"),
        "moe_intermediate_size": f.get("expert_feed_forward_length"),
    }
    state = layers(f)
    for il in range(f.get("leading_dense_block_count"), f.get("block_count")):
        ours, theirs = f"blk.{il}", f"model.layers.{il}.feed_forward"
        state[f"{theirs}.gate.weight"] = f[f"{ours}.ffn_gate_inp.weight"]
        state[f"{theirs}.expert_bias"] = f[f"{ours}.exp_probs_b.bias"]
        gate_up = [f[f"{ours}.ffn_{which}_exps.weight"] for which in ("gate", "up")]
        state[f"{theirs}.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
        state[f"{theirs}.experts.down_proj"] = f[f"{ours}.ffn_down_exps.weight"]
    return run(fill(Lfm2MoeForCausalLM(Lfm2MoeConfig(**given)), f, renamed(state)), tokens)
