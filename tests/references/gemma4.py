"""`gemma4` by Gemma4ForCausalLM."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from references.common import Checkpoint, Logits, config, fill, gemma_norms, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Sines and cosines, and the router's softmax, are float32."""
    f = Checkpoint(path)
    n_layer, shared, n_embd = f.get("block_count"), f.get("attention.shared_kv_layers", 0), f.get("embedding_length")
    windowed = [bool(w) for w in f.get("attention.sliding_window_pattern")]
    n_ff = f.get("feed_forward_length")
    widths = list(n_ff) if isinstance(n_ff, list) else [n_ff] * n_layer
    kv = f.get("attention.head_count_kv")
    n_kv = list(kv) if isinstance(kv, list) else [kv] * n_layer
    full, per_layer = windowed.index(False), f.get("embedding_length_per_layer_input", 0)
    same_v = f"blk.{full}.attn_v.weight" not in f
    f.replaced |= {"feed_forward_length": widths[0], "attention.head_count_kv": n_kv[0]}
    turned = int((f["rope_freqs.weight"] == 1.0).sum())
    whole = {"rope_type": "proportional", "rope_theta": f.get("rope.freq_base")}
    whole["partial_rotary_factor"] = 2 * turned / f.get("attention.key_length")
    experts = "expert_count" in f.metadata_keys
    given = config(
        f,
        head_dim=f.get("attention.key_length_swa"),
        global_head_dim=f.get("attention.key_length"),
        num_global_key_value_heads=n_kv[full] if same_v else None,
        attention_k_eq_v=same_v,
        sliding_window=f.get("attention.sliding_window"),
        layer_types=["sliding_attention" if w else "full_attention" for w in windowed],
        rope_parameters={"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base_swa")}},
        final_logit_softcapping=f.get("final_logit_softcapping"),
        hidden_activation="gelu_pytorch_tanh",
        num_kv_shared_layers=shared,
        use_double_wide_mlp=widths[-1] == 2 * widths[0],
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=f.get("vocab_size"),
        enable_moe_block=experts,
    )
    if experts:
        given |= {
            "num_experts": f.get("expert_count"),
            "top_k_experts": f.get("expert_used_count"),
            "moe_intermediate_size": f.get("expert_feed_forward_length"),
        }
    state = outer(f)
    if per_layer:
        state["model.embed_tokens_per_layer.weight"] = f["per_layer_token_embd.weight"]
        state["model.per_layer_model_projection.weight"] = f["per_layer_model_proj.weight"]
        state["model.per_layer_projection_norm.weight"] = f["per_layer_proj_norm.weight"]
    for il in range(n_layer):
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        state[f"{theirs}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
        for part, mine in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            f.linear(state, f"{theirs}.self_attn.{part}_proj", f"{ours}.{mine}")
        if il < n_layer - shared:
            qk_norms(f, state, il)
        else:
            state[f"{theirs}.self_attn.q_norm.weight"] = f[f"{ours}.attn_q_norm.weight"]
        gemma_norms(f, state, il)
        for which in ("gate", "up", "down"):
            f.linear(state, f"{theirs}.mlp.{which}_proj", f"{ours}.ffn_{which}")
        state[f"{theirs}.layer_scalar"] = f[f"{ours}.layer_output_scale.weight"]
        if per_layer:
            f.linear(state, f"{theirs}.per_layer_input_gate", f"{ours}.inp_gate")
            f.linear(state, f"{theirs}.per_layer_projection", f"{ours}.proj")
            f.linear(state, f"{theirs}.post_per_layer_input_norm", f"{ours}.post_norm")
        if experts:
            state |= {
                f"{theirs}.router.proj.weight": f[f"{ours}.ffn_gate_inp.weight"],
                f"{theirs}.router.scale": f[f"{ours}.ffn_gate_inp.scale"],
                f"{theirs}.router.per_expert_scale": f[f"{ours}.ffn_down_exps.scale"],
                f"{theirs}.experts.gate_up_proj": f[f"{ours}.ffn_gate_up_exps.weight"],
                f"{theirs}.experts.down_proj": f[f"{ours}.ffn_down_exps.weight"],
                f"{theirs}.post_feedforward_layernorm_1.weight": f[f"{ours}.post_ffw_norm_1.weight"],
                f"{theirs}.post_feedforward_layernorm_2.weight": f[f"{ours}.post_ffw_norm_2.weight"],
                f"{theirs}.pre_feedforward_layernorm_2.weight": f[f"{ours}.pre_ffw_norm_2.weight"],
            }
    model = Gemma4ForCausalLM(Gemma4TextConfig(**given))
    for layer in model.model.layers:
        layer.self_attn.scaling = f.get("attention.scale", 1.0)
    # Its scale is rounded to float32, the file's square root is not.
    model.model.embed_tokens.embed_scale = torch.tensor(n_embd**0.5, dtype=torch.float64)
    return run(fill(model, f, state), tokens)
