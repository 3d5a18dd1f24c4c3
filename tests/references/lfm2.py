"""`lfm2` by Lfm2ForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Lfm2Config, Lfm2ForCausalLM

from references.common import Checkpoint, Logits, State, attention, config, fill, qk_norms, run


class Hybrid(Checkpoint):
    """A file in which a number may be an array, one for each layer; `get` gives the largest."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return max(value) if isinstance(value, list) else value


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Hybrid(path)
    given = mixed_config(f) | {"block_auto_adjust_ff_dim": False}
    return run(fill(Lfm2ForCausalLM(Lfm2Config(**given)), f, renamed(layers(f))), tokens)


def mixed_config(f: Checkpoint) -> dict[str, Any]:
    """Sizes, and which layers are convolutions."""
    kv = [int(n) for n in Checkpoint.get(f, "attention.head_count_kv")]
    return config(f) | {
        "norm_eps": f.get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": f.get("shortconv.l_cache"),
        "layer_types": ["full_attention" if n else "conv" for n in kv],
    }


def layers(f: Checkpoint) -> State:
    """All but the feed-forwards of experts."""
    state = outer_of(f)
    for il, n_kv in enumerate(Checkpoint.get(f, "attention.head_count_kv")):
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        if n_kv:
            attention(f, state, il)
            qk_norms(f, state, il)
        else:
            state[f"{theirs}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
            for name in ("in_proj", "out_proj"):
                f.linear(state, f"{theirs}.conv.{name}", f"{ours}.shortconv.{name}")
            state[f"{theirs}.conv.conv.weight"] = f[f"{ours}.shortconv.conv.weight"].unsqueeze(1)
        state[f"{theirs}.ffn_norm.weight"] = f[f"{ours}.ffn_norm.weight"]
        for which, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            if f"{ours}.ffn_{which}.weight" in f:
                f.linear(state, f"{theirs}.feed_forward.{name}", f"{ours}.ffn_{which}")
    return state


def outer_of(f: Checkpoint) -> State:
    """Embedding and output; the last norm has another name in the file."""
    return {
        "model.embed_tokens.weight": f["token_embd.weight"],
        "model.embedding_norm.weight": f["token_embd_norm.weight"],
        "lm_head.weight": f["output.weight" if "output.weight" in f else "token_embd.weight"],
    }


def renamed(state: State) -> State:
    """Names as this class has them."""
    for ours, theirs in (
        (".input_layernorm.", ".operator_norm."),
        (".q_norm.", ".q_layernorm."),
        (".k_norm.", ".k_layernorm."),
        (".o_proj.", ".out_proj."),
    ):
        state = {name.replace(ours, theirs): t for name, t in state.items()}
    return state
