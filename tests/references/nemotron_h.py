"""`nemotron_h` and `nemotron_h_moe` by NemotronHForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import NemotronHConfig, NemotronHForCausalLM

from references.common import Checkpoint, Logits, config, fill, mamba, outer, run


class _Hybrid(Checkpoint):
    """A file in which a number may be an array, one for each layer; `get` gives the largest."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return max(value) if isinstance(value, list) else value


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = _Hybrid(path)
    kinds = [kind_of(f, il) for il in range(f.get("block_count"))]
    given = config(f) | {
        "layer_types": kinds,
        "num_hidden_layers": None,
        "layer_norm_epsilon": f.get("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": f.get("ssm.time_step_rank"),
        "mamba_head_dim": f.get("ssm.inner_size") // f.get("ssm.time_step_rank"),
        "n_groups": f.get("ssm.group_count"),
        "ssm_state_size": f.get("ssm.state_size"),
        "conv_kernel": f.get("ssm.conv_kernel"),
        "chunk_size": 8,
        "time_step_min": 1e-30,  # the makers' own code clamps no step
        "mlp_hidden_act": "relu2",
    }
    if (n_expert := f.get("expert_count", 0)) > 0:
        given |= {
            "n_routed_experts": n_expert,
            "num_experts_per_tok": f.get("expert_used_count"),
            "moe_intermediate_size": f.get("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": f.get("expert_shared_feed_forward_length"),
            "moe_latent_size": f.get("moe_latent_size", 0) or None,
            "routed_scaling_factor": f.get("expert_weights_scale"),
            "norm_topk_prob": f.get("expert_weights_norm"),
        }
    state = outer(f)
    state["model.norm_f.weight"] = state.pop("model.norm.weight")
    state["model.embeddings.weight"] = state.pop("model.embed_tokens.weight")
    for il, kind in enumerate(kinds):
        ours, theirs = f"blk.{il}", f"model.layers.{il}.mixer"
        state[f"model.layers.{il}.norm.weight"] = f[f"{ours}.attn_norm.weight"]
        if kind == "linear_attention":
            mamba(f, state, il, theirs)
        elif kind == "full_attention":
            for which, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
                f.linear(state, f"{theirs}.{name}", f"{ours}.attn_{which}")
        elif kind == "mlp":
            for which in ("up", "down"):
                f.linear(state, f"{theirs}.{which}_proj", f"{ours}.ffn_{which}")
        else:
            f.linear(state, f"{theirs}.gate", f"{ours}.ffn_gate_inp")
            state[f"{theirs}.gate.e_score_correction_bias"] = f[f"{ours}.exp_probs_b.bias"]
            for which in ("up", "down"):
                state[f"{theirs}.experts.{which}_proj"] = f[f"{ours}.ffn_{which}_exps.weight"]
                f.linear(state, f"{theirs}.shared_experts.{which}_proj", f"{ours}.ffn_{which}_shexp")
            for which, name in (("down", "fc1_latent_proj"), ("up", "fc2_latent_proj")):
                f.linear(state, f"{theirs}.{name}", f"{ours}.ffn_latent_{which}")
    return run(fill(NemotronHForCausalLM(NemotronHConfig(**given)), f, state), tokens)


def kind_of(f: Checkpoint, il: int) -> str:
    """What the one part of a layer is, by its tensors."""
    for stem, kind in (("ssm_in", "linear_attention"), ("attn_q", "full_attention"), ("ffn_gate_inp", "moe"), ("ffn_up", "mlp")):
        if f"blk.{il}.{stem}.weight" in f:
            return kind
    raise KeyError(f"blk.{il}")
