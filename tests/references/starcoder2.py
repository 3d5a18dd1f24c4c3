"""`starcoder2` by Starcoder2ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Starcoder2Config, Starcoder2ForCausalLM

from references.common import Checkpoint, Logits, attention, config, fill, layer_norm_config, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(f, **layer_norm_config(f, "norm_epsilon"), hidden_act="gelu_pytorch_tanh", use_bias=True, sliding_window=None)
    given |= {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    state = outer(f)
    f.linear(state, "model.norm", "output_norm")
    for il in range(f.get("block_count")):
        attention(f, state, il)
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        f.linear(state, f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")
        f.linear(state, f"{theirs}.mlp.c_fc", f"{ours}.ffn_up")
        f.linear(state, f"{theirs}.mlp.c_proj", f"{ours}.ffn_down")
    return run(fill(Starcoder2ForCausalLM(Starcoder2Config(**given)), f, state), tokens)
