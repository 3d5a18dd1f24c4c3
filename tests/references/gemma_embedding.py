"""`gemma-embedding` by Gemma3TextModel with attention in both directions, and the matrices behind pooling in numpy."""

from __future__ import annotations

from pathlib import Path

from transformers import Gemma3TextConfig, Gemma3TextModel

from references.common import Checkpoint, Vectors, attention, config, fill, gemma_norms, outer, qk_norms, vectors_of


def vectors(path: Path, tokens: list[int], segments: list[int]) -> Vectors:
    """Of one text: what each token comes out as, and the vector of the text as the file pools it. A window of a file counts rows on both
    sides."""
    f = Checkpoint(path)
    n_layer = f.get("block_count")
    given = config(
        f,
        use_bidirectional_attention=True,
        sliding_window=f.get("attention.sliding_window"),
        layer_types=["full_attention" if il % 6 == 5 else "sliding_attention" for il in range(n_layer)],
        query_pre_attn_scalar=f.get("attention.key_length"),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        hidden_activation="gelu_pytorch_tanh",
    )
    state = outer(f)
    for il in range(n_layer):
        attention(f, state, il)
        qk_norms(f, state, il)
        gemma_norms(f, state, il)
        for which in ("gate", "up", "down"):
            f.linear(state, f"model.layers.{il}.mlp.{which}_proj", f"blk.{il}.ffn_{which}")
    state |= {name: t - 1 for name, t in state.items() if "norm" in name}
    state = {name.removeprefix("model."): t for name, t in state.items() if not name.startswith("lm_head")}
    dense = [f[f"{stem}.weight"].numpy() for stem in ("dense_2", "dense_3") if f"{stem}.weight" in f]
    hidden, vector = vectors_of(f, fill(Gemma3TextModel(Gemma3TextConfig(**given)), f, state), tokens, None)
    for matrix in dense:
        vector = matrix @ vector
    return hidden, vector
