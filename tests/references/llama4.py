"""`llama4` by Llama4ForCausalLM, which rotates pairs of neighbours."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from references.common import Checkpoint, Logits, attention, config, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Matrices of experts lie transposed; temperatures are float32."""
    f = Checkpoint(path)
    n_layer, step = f.get("block_count"), f.get("interleave_moe_layer_step")
    given = config(
        f,
        intermediate_size=f.get("expert_feed_forward_length"),
        intermediate_size_mlp=f.get("feed_forward_length"),
        num_local_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        interleave_moe_layer_step=step,
        attention_chunk_size=f.get("attention.sliding_window"),
        floor_scale=f.get("attention.temperature_length"),
        attn_scale=f.get("attention.temperature_scale"),
        use_qk_norm=True,
    )
    state = outer(f)
    for il in range(n_layer):
        attention(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
        if (il + 1) % step:
            for which in ("gate", "up", "down"):
                f.linear(state, f"{theirs}.feed_forward.{which}_proj", f"{ours}.ffn_{which}")
            continue
        gate_up = torch.cat([f[f"{ours}.ffn_{which}_exps.weight"] for which in ("gate", "up")], dim=1)
        state |= {
            f"{theirs}.feed_forward.router.weight": f[f"{ours}.ffn_gate_inp.weight"],
            f"{theirs}.feed_forward.experts.gate_up_proj": gate_up.transpose(1, 2),
            f"{theirs}.feed_forward.experts.down_proj": f[f"{ours}.ffn_down_exps.weight"].transpose(1, 2),
        }
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.feed_forward.shared_expert.{which}_proj", f"{ours}.ffn_{which}_shexp")
    return run(fill(Llama4ForCausalLM(Llama4TextConfig(**given)), f, state), tokens)
