"""`gemma3` by Gemma3ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from references.common import Checkpoint, Logits, attention, config, fill, gemma_norms, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Norm weights of transformers are those of a file less 1."""
    f = Checkpoint(path)
    n_layer, period = f.get("block_count"), f.get("attention.sliding_window_pattern", 6)
    scale = f.get("attention.scale", f.get("attention.key_length") ** -0.5)
    whole = {"rope_type": "default", "rope_theta": f.get("rope.freq_base")}
    if f.get("rope.scaling.type", "none") == "linear":
        whole |= {"rope_type": "linear", "factor": f.get("rope.scaling.factor")}
    given = config(
        f,
        sliding_window=f.get("attention.sliding_window"),
        layer_types=["full_attention" if il % period == period - 1 else "sliding_attention" for il in range(n_layer)],
        query_pre_attn_scalar=round(scale**-2),
        rope_parameters={
            "full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base_swa", 10000.0)},
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
    return run(fill(Gemma3ForCausalLM(Gemma3TextConfig(**given)), f, state), tokens)
