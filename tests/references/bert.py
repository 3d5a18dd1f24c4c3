"""`bert` by BertForSequenceClassification, whose encoder is BertModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from references.common import Checkpoint, State, Vectors, encoder_config, fill, vectors_of


def vectors(path: Path, tokens: list[int], segments: list[int]) -> Vectors:
    """Of one text: what each token comes out as, and the vector or scores of the text as the file pools it."""
    f = Checkpoint(path)
    state = encoder(f)
    state["embeddings.position_embeddings.weight"] = f["position_embd.weight"]
    for il in range(f.get("block_count")):
        ours, theirs = f"blk.{il}", f"encoder.layer.{il}"
        for which, name in (("q", "query"), ("k", "key"), ("v", "value")):
            f.linear(state, f"{theirs}.attention.self.{name}", f"{ours}.attn_{which}")
        f.linear(state, f"{theirs}.attention.output.dense", f"{ours}.attn_output")
        f.linear(state, f"{theirs}.attention.output.LayerNorm", f"{ours}.attn_output_norm")
        f.linear(state, f"{theirs}.intermediate.dense", f"{ours}.ffn_up")
        f.linear(state, f"{theirs}.output.dense", f"{ours}.ffn_down")
        f.linear(state, f"{theirs}.output.LayerNorm", f"{ours}.layer_output_norm")
    given = encoder_config(f) | {"layer_norm_eps": f.get("attention.layer_norm_epsilon"), "hidden_act": "gelu"}
    model: Any
    if "cls.weight" not in f:
        model = fill(BertModel(BertConfig(**given), add_pooling_layer=False), f, state)
        return vectors_of(f, model, tokens, segments)
    whole = {f"bert.{name}": t for name, t in state.items()}
    f.linear(whole, "bert.pooler.dense", "cls")
    f.linear(whole, "classifier", "cls.output")
    model = fill(BertForSequenceClassification(BertConfig(**given, num_labels=1)), f, whole)
    hidden, _ = vectors_of(f, model.bert, tokens, segments)
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([tokens]), token_type_ids=torch.tensor([segments])).logits[0]
    return hidden, scores.numpy()


def encoder(f: Checkpoint) -> State:
    """What is outside the layers, but positions."""
    state: State = {
        "embeddings.word_embeddings.weight": f["token_embd.weight"],
        "embeddings.token_type_embeddings.weight": f["token_types.weight"],
    }
    f.linear(state, "embeddings.LayerNorm", "token_embd_norm")
    return state
