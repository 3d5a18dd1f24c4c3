"""`glm4` by Glm4ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Glm4Config, Glm4ForCausalLM

from references.common import Checkpoint, Logits, attention, config, fill, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(f, attention_bias="blk.0.attn_q.bias" in f)
    given["rope_parameters"]["partial_rotary_factor"] = f.get("rope.dimension_count") / given["head_dim"]
    state = outer(f)
    for il in range(f.get("block_count")):
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        attention(f, state, il)
        for target, source in (
            ("post_self_attn_layernorm", "post_attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("post_mlp_layernorm", "post_ffw_norm"),
        ):
            f.linear(state, f"{theirs}.{target}", f"{ours}.{source}")
    return run(fill(Glm4ForCausalLM(Glm4Config(**given)), f, state), tokens)
