"""`gemma3n` by Gemma3nForCausalLM."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from references.common import Checkpoint, Logits, config, feed_forward, fill, gemma_norms, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]. Sines and cosines are float32."""
    f = Checkpoint(path)
    n_layer, n_embd, per_layer = f.get("block_count"), f.get("embedding_length"), f.get("embedding_length_per_layer_input")
    shared, streams = f.get("attention.shared_kv_layers"), f.get("altup.num_inputs")
    windowed = [bool(w) for w in f.get("attention.sliding_window_pattern")]
    cutoffs = f.get("activation_sparsity_scale")
    normal = torch.distributions.Normal(0, 1)
    state = outer(f)
    state["model.embed_tokens_per_layer.weight"] = f["per_layer_token_embd.weight"]
    state["model.per_layer_model_projection.weight"] = f["per_layer_model_proj.weight"]
    state["model.per_layer_projection_norm.weight"] = f["per_layer_proj_norm.weight"]
    for theirs, ours in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        for i, w in enumerate(f[f"{ours}.weight"]):
            state[f"model.{theirs}.{i}.weight"] = w
    for il in range(n_layer):
        ours, theirs = f"blk.{il}", f"model.layers.{il}"
        f.linear(state, f"{theirs}.input_layernorm", f"{ours}.attn_norm")
        for part, mine in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            if il < n_layer - shared or part in "qo":
                f.linear(state, f"{theirs}.self_attn.{part}_proj", f"{ours}.{mine}")
        if il < n_layer - shared:
            qk_norms(f, state, il)
        else:
            state[f"{theirs}.self_attn.q_norm.weight"] = f[f"{ours}.attn_q_norm.weight"]
            f.unread -= {f"{ours}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")}
        gemma_norms(f, state, il)
        feed_forward(f, state, il, norm="")
        for name, mine in (
            ("per_layer_input_gate", "inp_gate"),
            ("per_layer_projection", "proj"),
            ("post_per_layer_input_norm", "post_norm"),
            ("laurel.linear_left", "laurel_l"),
            ("laurel.linear_right", "laurel_r"),
            ("laurel.post_laurel_norm", "laurel_post_norm"),
            ("altup.correction_coefs", "altup_correct_coef"),
            ("altup.prediction_coefs", "altup_predict_coef"),
            ("altup.modality_router", "altup_router"),
            ("altup.router_norm", "altup_router_norm"),
        ):
            f.linear(state, f"{theirs}.{name}", f"{ours}.{mine}")
        state[f"{theirs}.altup.correct_output_scale"] = f[f"{ours}.altup_correct_scale.weight"]
    given = config(
        f,
        sliding_window=f.get("attention.sliding_window"),
        layer_types=["sliding_attention" if w else "full_attention" for w in windowed],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": f.get("rope.freq_base_swa")},
        },
        final_logit_softcapping=f.get("final_logit_softcapping"),
        hidden_activation="gelu_pytorch_tanh",
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=f.get("vocab_size"),
        altup_num_inputs=streams,
        laurel_rank=f["blk.0.laurel_l.weight"].shape[0],
        activation_sparsity_pattern=[0.0 if math.isinf(c) else float(normal.cdf(torch.tensor(c, dtype=torch.float64))) for c in cutoffs],
    )
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**given))
    for layer in model.model.layers:
        layer.self_attn.scaling = f.get("attention.scale", 1.0)
        layer.altup.router_input_scale = torch.tensor(1.0 / n_embd, dtype=torch.float64)
    # Scales are rounded to float32, the file's square roots are not.
    for name, value in (
        ("embed_tokens.embed_scale", n_embd**0.5),
        ("embed_tokens_per_layer.embed_scale", per_layer**0.5),
        ("per_layer_projection_scale", n_embd**-0.5),
        ("per_layer_input_scale", 0.5**0.5),
    ):
        owner, _, last = name.rpartition(".")
        setattr(model.model.get_submodule(owner), last, torch.tensor(value, dtype=torch.float64))
    return run(fill(model, f, state), tokens)
