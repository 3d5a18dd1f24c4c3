"""`phi2` by PhiForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import PhiConfig, PhiForCausalLM

from references.common import Checkpoint, Logits, attention, config, fill, layer_norm_config, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(f, **layer_norm_config(f, "layer_norm_eps"), hidden_act="gelu_new")
    given["rope_parameters"]["partial_rotary_factor"] = f.get("rope.dimension_count") / given["head_dim"]
    given["partial_rotary_factor"] = given["rope_parameters"]["partial_rotary_factor"]
    state = {"model.embed_tokens.weight": f["token_embd.weight"]}
    f.linear(state, "model.final_layernorm", "output_norm")
    f.linear(state, "lm_head", "output")
    for il in range(f.get("block_count")):
        attention(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        f.linear(state, f"{theirs}.mlp.fc1", f"{ours}.ffn_up")
        f.linear(state, f"{theirs}.mlp.fc2", f"{ours}.ffn_down")
        for kind in ("weight", "bias"):
            state[f"{theirs}.self_attn.dense.{kind}"] = state.pop(f"{theirs}.self_attn.o_proj.{kind}")
    return run(fill(PhiForCausalLM(PhiConfig(**given)), f, state), tokens)
