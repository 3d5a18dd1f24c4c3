"""`nomic-bert` by NomicBertModel."""

from __future__ import annotations

from pathlib import Path

from transformers import NomicBertConfig, NomicBertModel

from references.bert import encoder
from references.common import Checkpoint, Vectors, encoder_config, fill, vectors_of


def vectors(path: Path, tokens: list[int], segments: list[int]) -> Vectors:
    """Of one text: what each token comes out as, and the vector of the text as the file pools it."""
    f = Checkpoint(path)
    state = encoder(f)
    for il in range(f.get("block_count")):
        ours, theirs = f"blk.{il}", f"layers.{il}"
        for which in ("q", "k", "v"):
            f.linear(state, f"{theirs}.self_attn.{which}_proj", f"{ours}.attn_{which}")
        f.linear(state, f"{theirs}.self_attn.o_proj", f"{ours}.attn_output")
        f.linear(state, f"{theirs}.post_attention_layernorm", f"{ours}.attn_output_norm")
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.mlp.{which}_proj", f"{ours}.ffn_{which}")
        f.linear(state, f"{theirs}.post_mlp_layernorm", f"{ours}.layer_output_norm")
    given = encoder_config(f) | {"layer_norm_eps": f.get("attention.layer_norm_epsilon"), "hidden_act": "silu"}
    model = NomicBertModel(NomicBertConfig(**given), add_pooling_layer=False)
    return vectors_of(f, fill(model, f, state), tokens, segments)
