"""`modern-bert` by ModernBertModel."""

from __future__ import annotations

from pathlib import Path

from transformers import ModernBertConfig, ModernBertModel

from references.common import Checkpoint, Vectors, encoder_config, fill, vectors_of


def vectors(path: Path, tokens: list[int], segments: list[int]) -> Vectors:
    """Of one text: what each token comes out as, and the vector of the text as the file pools it."""
    f = Checkpoint(path)
    state = {"embeddings.tok_embeddings.weight": f["token_embd.weight"]}
    f.linear(state, "embeddings.norm", "token_embd_norm")
    f.linear(state, "final_norm", "output_norm")
    for il in range(f.get("block_count")):
        ours, theirs = f"blk.{il}", f"layers.{il}"
        f.linear(state, f"{theirs}.attn_norm", f"{ours}.attn_norm")
        f.linear(state, f"{theirs}.attn.Wqkv", f"{ours}.attn_qkv")
        f.linear(state, f"{theirs}.attn.Wo", f"{ours}.attn_output")
        f.linear(state, f"{theirs}.mlp_norm", f"{ours}.ffn_norm")
        f.linear(state, f"{theirs}.mlp.Wi", f"{ours}.ffn_up")
        f.linear(state, f"{theirs}.mlp.Wo", f"{ours}.ffn_down")
    given = encoder_config(f) | {
        "norm_eps": f.get("attention.layer_norm_epsilon"),
        "local_attention": f.get("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base_swa", 10000.0)},
        },
        "cls_token_id": None,
        "sep_token_id": None,
    }
    return vectors_of(f, fill(ModernBertModel(ModernBertConfig(**given)), f, state), tokens, None)
