"""`mistral4` by Mistral4ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Mistral4Config, Mistral4ForCausalLM

from references.common import Checkpoint, Logits, feed_forward, fill, outer, run
from references.deepseek2 import latent_attention, latent_config


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = latent_config(f)
    given["rope_parameters"]["llama_4_scaling_beta"] = f.get("attention.temperature_scale")
    # Of a head of this class, not of its rotated part.
    given["head_dim"] = f.get("attention.key_length_mla")
    given["rope_parameters"]["partial_rotary_factor"] = f.get("rope.dimension_count") / given["head_dim"]
    state = outer(f)
    for il in range(f.get("block_count")):
        latent_attention(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        if il < f.get("leading_dense_block_count"):
            feed_forward(f, state, il)
            continue
        state |= {
            f"{theirs}.post_attention_layernorm.weight": f[f"{ours}.ffn_norm.weight"],
            f"{theirs}.mlp.gate.weight": f[f"{ours}.ffn_gate_inp.weight"],
            f"{theirs}.mlp.experts.gate_up_proj": f[f"{ours}.ffn_gate_up_exps.weight"],
            f"{theirs}.mlp.experts.down_proj": f[f"{ours}.ffn_down_exps.weight"],
        }
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.mlp.shared_experts.{which}_proj", f"{ours}.ffn_{which}_shexp")
    return run(fill(Mistral4ForCausalLM(Mistral4Config(**given)), f, state), tokens)
