"""`gemma2` by Gemma2ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Gemma2Config, Gemma2ForCausalLM

from references.common import Checkpoint, Logits, attention, config, fill, gemma_norms, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Norm weights of transformers are those of a file less 1."""
    f = Checkpoint(path)
    n_layer = f.get("block_count")
    scale = f.get("attention.scale", f.get("attention.key_length") ** -0.5)
    given = config(
        f,
        sliding_window=f.get("attention.sliding_window"),
        layer_types=["full_attention" if il % 2 else "sliding_attention" for il in range(n_layer)],
        query_pre_attn_scalar=round(scale**-2),
        attn_logit_softcapping=f.get("attn_logit_softcapping"),
        final_logit_softcapping=f.get("final_logit_softcapping"),
        hidden_activation="gelu_pytorch_tanh",
    )
    state = outer(f)
    for il in range(n_layer):
        attention(f, state, il)
        gemma_norms(f, state, il)
        for which in ("gate", "up", "down"):
            f.linear(state, f"model.layers.{il}.mlp.{which}_proj", f"blk.{il}.ffn_{which}")
    state |= {name: t - 1 for name, t in state.items() if "norm" in name}
    return run(fill(Gemma2ForCausalLM(Gemma2Config(**given)), f, state), tokens)
