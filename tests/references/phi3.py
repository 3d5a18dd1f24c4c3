"""`phi3` by Phi3ForCausalLM, which chooses the long or the short factors by the number of tokens."""

from __future__ import annotations

from pathlib import Path

from transformers import Phi3Config, Phi3ForCausalLM

from references.common import Checkpoint, Logits, config, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    original = f.get("rope.scaling.original_context_length")
    given = config(f, sliding_window=f.get("attention.sliding_window", 0) or None, original_max_position_embeddings=original)
    given["rope_parameters"] |= {
        "rope_type": "longrope",
        "partial_rotary_factor": f.get("rope.dimension_count") / given["head_dim"],
        "long_factor": f["rope_factors_long.weight"].tolist(),
        "short_factor": f["rope_factors_short.weight"].tolist(),
        "original_max_position_embeddings": original,
    }
    state = outer(f)
    for il in range(f.get("block_count")):
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
        state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
        f.linear(state, f"{theirs}.self_attn.qkv_proj", f"{ours}.attn_qkv")
        f.linear(state, f"{theirs}.self_attn.o_proj", f"{ours}.attn_output")
        f.linear(state, f"{theirs}.mlp.gate_up_proj", f"{ours}.ffn_up")
        f.linear(state, f"{theirs}.mlp.down_proj", f"{ours}.ffn_down")
    return run(fill(Phi3ForCausalLM(Phi3Config(**given)), f, state), tokens)
