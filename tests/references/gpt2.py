"""`gpt2` by GPT2LMHeadModel."""

from __future__ import annotations

from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel

from references.common import Checkpoint, Logits, fill, run

MATRICES = {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Matrices of transformers have their inputs first."""
    f = Checkpoint(path)
    given = GPT2Config(
        vocab_size=f.get("vocab_size"),
        n_positions=f.get("context_length"),
        n_embd=f.get("embedding_length"),
        n_layer=f.get("block_count"),
        n_head=f.get("attention.head_count"),
        n_inner=f.get("feed_forward_length"),
        layer_norm_epsilon=f.get("attention.layer_norm_epsilon"),
        activation_function="gelu_new",
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    table = f["token_embd.weight"]
    state = {"transformer.wte.weight": table, "lm_head.weight": table, "transformer.wpe.weight": f["position_embd.weight"]}
    f.linear(state, "transformer.ln_f", "output_norm")
    for il in range(f.get("block_count")):
        ours, theirs = f"blk.{il}", f"transformer.h.{il}"
        f.linear(state, f"{theirs}.ln_1", f"{ours}.attn_norm")
        f.linear(state, f"{theirs}.ln_2", f"{ours}.ffn_norm")
        for target, source in MATRICES.items():
            f.linear(state, f"{theirs}.{target}", f"{ours}.{source}")
            state[f"{theirs}.{target}.weight"] = state[f"{theirs}.{target}.weight"].T
    return run(fill(GPT2LMHeadModel(given), f, state), tokens)
