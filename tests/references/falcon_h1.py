"""`falcon-h1` by FalconH1ForCausalLM, whose multipliers are 1: those of a model are in the weights of its file."""

from __future__ import annotations

from pathlib import Path

from transformers import FalconH1Config, FalconH1ForCausalLM

from references.common import Checkpoint, Logits, attention, config, fill, mamba, mamba_config, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    normed = "blk.0.ssm_norm.weight" in f
    given = config(f, **mamba_config(f), mamba_d_ssm=f.get("ssm.inner_size"), mamba_rms_norm=normed, mamba_norm_before_gate=False)
    state = outer(f)
    state["model.final_layernorm.weight"] = state.pop("model.norm.weight")
    for il in range(f.get("block_count")):
        attention(f, state, il)
        mamba(f, state, il, f"model.layers.{il}.mamba")
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.pre_ff_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.feed_forward.{which}_proj", f"{ours}.ffn_{which}")
    return run(fill(FalconH1ForCausalLM(FalconH1Config(**given)), f, state), tokens)
