"""`qwen35` by Qwen3_5ForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from references.common import Checkpoint, Logits, State, attention, config, feed_forward, fill, outer, qk_norms, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    state = zero_centered(outer(f))
    for il, recurs in enumerate(delta_net_layers(f)):
        layer: State = {}
        mixer(f, layer, il, recurs)
        feed_forward(f, layer, il, norm="post_attention_norm")
        state |= zero_centered(layer)
    return run(fill(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**delta_net_config(f))), f, state), tokens)


def delta_net_layers(f: Checkpoint) -> list[bool]:
    """Which layers are delta nets."""
    return [(il + 1) % f.get("full_attention_interval") != 0 for il in range(f.get("block_count"))]


def delta_net_config(f: Checkpoint, **more: Any) -> dict[str, Any]:
    """Sizes of the delta net, RoPE of a part of a head, and which layers have what."""
    given = config(f, **more)
    recurs = delta_net_layers(f)
    rope = given["rope_parameters"] | {"partial_rotary_factor": f.get("rope.dimension_count") / given["head_dim"]}
    sections = f.get("rope.dimension_sections", None) if f.arch != "qwen3next" else None
    if sections is not None:
        rope |= {"mrope_section": [int(n) for n in sections[:3]], "mrope_interleaved": True}
    return given | {
        "num_hidden_layers": len(recurs),
        "rope_parameters": rope,
        "layer_types": ["linear_attention" if is_one else "full_attention" for is_one in recurs],
        "linear_conv_kernel_dim": f.get("ssm.conv_kernel"),
        "linear_key_head_dim": f.get("ssm.state_size"),
        "linear_num_key_heads": f.get("ssm.group_count"),
        "linear_num_value_heads": f.get("ssm.time_step_rank"),
        "linear_value_head_dim": f.get("ssm.inner_size") // f.get("ssm.time_step_rank"),
    }


def zero_centered(state: State) -> State:
    """With norm weights as the makers have them: a file has the 1 that is added to them. Those of delta nets have none."""
    return {
        name: t - 1.0 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else t for name, t in state.items()
    }


def mixer(f: Checkpoint, state: State, il: int, recurs: bool) -> None:
    """Norm, and attention or delta net, of a layer."""
    if not recurs:
        attention(f, state, il)
        qk_norms(f, state, il)
        return
    ours, theirs = f"blk.{il}", f"model.layers.{il}.linear_attn"
    state[f"model.layers.{il}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
    q_and_k = 2 * f.get("ssm.group_count") * f.get("ssm.state_size")
    qkv, conv = f[f"{ours}.attn_qkv.weight"], f[f"{ours}.ssm_conv1d.weight"].unsqueeze(1)
    state |= {
        f"{theirs}.in_proj_qkv.weight": torch.cat([qkv[:q_and_k], by_group(f, qkv[q_and_k:])]),
        f"{theirs}.conv1d.weight": torch.cat([conv[:q_and_k], by_group(f, conv[q_and_k:])]),
        f"{theirs}.in_proj_z.weight": by_group(f, f[f"{ours}.attn_gate.weight"]),
        f"{theirs}.in_proj_b.weight": by_group(f, f[f"{ours}.ssm_beta.weight"]),
        f"{theirs}.in_proj_a.weight": by_group(f, f[f"{ours}.ssm_alpha.weight"]),
        f"{theirs}.A_log": torch.log(-by_group(f, f[f"{ours}.ssm_a"])),
        f"{theirs}.dt_bias": by_group(f, f[f"{ours}.ssm_dt.bias"]),
        f"{theirs}.norm.weight": f[f"{ours}.ssm_norm.weight"],
        f"{theirs}.out_proj.weight": by_group(f, f[f"{ours}.ssm_out.weight"].T).T,
    }


def by_group(f: Checkpoint, t: Any) -> Any:
    """Rows by heads of v in the order of transformers, where those of one head of k are neighbours; in a file they are n_group apart."""
    groups, heads = f.get("ssm.group_count"), f.get("ssm.time_step_rank")
    return t.reshape(heads // groups, groups, t.shape[0] // heads, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
