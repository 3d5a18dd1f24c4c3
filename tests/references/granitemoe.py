"""`granitemoe` by GraniteMoeSharedForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM

from references.common import Checkpoint, Logits, attention, config, fill, outer, run
from references.granite import scales


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Gate and up are one matrix, gate first."""
    f = Checkpoint(path)
    given = config(
        f,
        **scales(f),
        intermediate_size=f.get("expert_feed_forward_length"),
        num_local_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        shared_intermediate_size=f.get("expert_shared_feed_forward_length"),
    )
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il, permuted=True)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
        moe, shared = f"{theirs}.block_sparse_moe", f"{theirs}.shared_mlp"
        for kind, joined, down in (
            ("shexp", f"{shared}.input_linear.weight", f"{shared}.output_linear.weight"),
            ("exps", f"{moe}.experts.gate_up_proj", f"{moe}.experts.down_proj"),
        ):
            state[joined] = torch.cat([f[f"{ours}.ffn_{which}_{kind}.weight"] for which in ("gate", "up")], dim=-2)
            state[down] = f[f"{ours}.ffn_down_{kind}.weight"]
        state[f"{moe}.router.weight"] = f[f"{ours}.ffn_gate_inp.weight"]
    return run(fill(GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**given)), f, state), tokens)
