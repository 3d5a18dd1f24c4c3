"""A tiny model as its makers publish one: config.json, safetensors in transformers' names and order, and a tokenizer.json.

Names and orders are those under which tests/references give the same weights to transformers' classes, which then made the stored logits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from vkback import quants
from vkback.gguf.file import GgufFile
from vkback.gguf.pre_tokenizers import PRE_TOKENIZERS

Floats = npt.NDArray[np.float32]

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
PERMUTED = ("llama", "mixtral", "smollm3", "granite")
NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
LUT = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of MXFP4 by their four bits, as transformers has them."""


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, npt.NDArray[Any]]]) -> None:
    """name -> (dtype, array whose bytes are written)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(np.ascontiguousarray(a).tobytes() for _, a in tensors.values()))


def state_of(name: str, f: GgufFile) -> dict[str, Floats]:
    """The weights of a tiny model in transformers' names. name: a key of CLASSES."""
    state: dict[str, Floats] = {}
    gemma = name.startswith("gemma")
    for t in f.tensors.values():
        x = quants.decode(t.type, np.asarray(t.data)).reshape(t.shape).copy()
        stem, _, kind = t.name.rpartition(".")
        layer, _, stem = stem.rpartition(".")
        if gemma and "norm" in stem:
            x -= np.float32(1)
        if not layer:
            outer = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}.get(stem)
            if outer:
                state[f"{outer}.weight"] = x
            continue
        at = f"model.layers.{layer.removeprefix('blk.')}"
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(stem)
        if name in PERMUTED and heads:
            n = f.get(f"{f.arch}.attention.{heads}", int)
            x = x.reshape(n, x.shape[0] // n // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if name == "gpt-oss" and stem == "attn_sinks":
            state[f"{at}.self_attn.sinks"] = x
            continue
        if name == "gpt-oss" and stem.endswith("_exps"):
            end, x = ("_bias", x) if kind == "bias" else ("", x.swapaxes(1, 2))
            if stem == "ffn_down_exps":
                state[f"{at}.mlp.experts.down_proj{end}"] = x
            else:
                both = state.setdefault(f"{at}.mlp.experts.gate_up_proj{end}", np.zeros((*x.shape[:-1], 2 * x.shape[-1]), np.float32))
                both[..., stem == "ffn_up_exps" :: 2] = x
            continue
        if stem.endswith("_exps"):
            which = {"ffn_gate_exps": ("gate_proj", "w1"), "ffn_up_exps": ("up_proj", "w3"), "ffn_down_exps": ("down_proj", "w2")}[stem]
            for i, expert in enumerate(x):
                inner = f"block_sparse_moe.experts.{i}.{which[1]}" if name == "mixtral" else f"mlp.experts.{i}.{which[0]}"
                state[f"{at}.{inner}.weight"] = expert
            continue
        theirs = NORMS.get(stem) or LINEAR[stem]
        if gemma and stem == "ffn_norm":
            theirs = "pre_feedforward_layernorm"
        if name == "mixtral" and stem == "ffn_gate_inp":
            theirs = "block_sparse_moe.gate"
        if name == "gpt-oss" and stem == "ffn_gate_inp":
            theirs = "mlp.router"
        if name == "phi3" and stem == "ffn_up":
            theirs = "mlp.gate_up_proj"
        state[f"{at}.{theirs}.{kind}"] = x
    return state


def config_of(name: str, f: GgufFile, state: Mapping[str, Floats]) -> dict[str, Any]:
    """config.json of a tiny model."""

    def get(key: str, default: Any = None) -> Any:
        return f.metadata.get(f"{f.arch}.{key}", default)

    heads, head_dim = get("attention.head_count"), get("attention.key_length")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base")}
    config: dict[str, Any] = {
        "architectures": [CLASSES[name]],
        "vocab_size": state["model.embed_tokens.weight"].shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in f.tensors,
        "rope_parameters": rope,
    }
    if "rope_freqs.weight" in f.tensors:
        factor = float(np.asarray(f.tensors["rope_freqs.weight"].data).view(np.float32).max())
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    if name in ("gemma2", "gemma3"):
        scale = get("attention.scale", head_dim**-0.5)
        config |= {"sliding_window": get("attention.sliding_window"), "query_pre_attn_scalar": round(scale**-2)}
        config |= {key: get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    if name == "gemma3":
        n, period = get("block_count"), get("attention.sliding_window_pattern", 6)
        if get("rope.scaling.type", "none") == "linear":
            rope |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
        config["layer_types"] = ["full_attention" if il % period == period - 1 else "sliding_attention" for il in range(n)]
        local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if name == "phi3":
        original = get("rope.scaling.original_context_length")
        rope |= {"rope_type": "longrope", "partial_rotary_factor": get("rope.dimension_count") / head_dim}
        rope |= {
            f"{w}_factor": np.asarray(f.tensors[f"rope_factors_{w}.weight"].data).view(np.float32).ravel().tolist()
            for w in ("long", "short")
        }
        config |= {"original_max_position_embeddings": original, "sliding_window": get("attention.sliding_window", 0) or None}
    if name == "granite":
        config |= {"embedding_multiplier": get("embedding_scale"), "residual_multiplier": get("residual_scale")}
        config |= {"attention_multiplier": get("attention.scale"), "logits_scaling": get("logit_scale")}
    if name in ("gpt-oss", "olmo3"):
        n, period = get("block_count"), {"gpt-oss": 2, "olmo3": 4}[name]
        config |= {"sliding_window": get("attention.sliding_window")}
        config["layer_types"] = ["full_attention" if il % period == period - 1 else "sliding_attention" for il in range(n)]
        yarn = {"rope_type": "yarn", "factor": get("rope.scaling.factor"), "beta_fast": 32.0, "beta_slow": 1.0}
        yarn |= {"original_max_position_embeddings": get("rope.scaling.original_context_length")}
        if name == "gpt-oss":
            rope |= yarn | {"truncate": False}
            config |= {"num_local_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count"), "swiglu_limit": 7.0}
            config["intermediate_size"] = get("expert_feed_forward_length")
        else:
            yarn["attention_factor"] = get("rope.scaling.attn_factor")
            config["rope_parameters"] = {"full_attention": rope | yarn, "sliding_attention": rope}
    elif get("expert_count"):
        config |= {"num_experts_per_tok": get("expert_used_count"), "norm_topk_prob": True}
        config |= {"num_local_experts" if name == "mixtral" else "num_experts": get("expert_count")}
        config |= {"moe_intermediate_size": get("expert_feed_forward_length")} if name != "mixtral" else {}
    return config


def in_blocks(state: Mapping[str, Floats], f: GgufFile) -> dict[str, tuple[str, npt.NDArray[Any]]]:
    """The weights of gpt-oss as they were published, with dtypes: experts in MXFP4, whose bytes come from the tensors of the file."""

    def pairs(name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        t = f.tensors[name]
        raw = np.asarray(t.data).view(np.uint8).reshape(*t.shape[:2], t.shape[2] // 32, 17)
        values = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], axis=-1)  # value j of a block, and value j + 16
        return values[..., 0::2] | values[..., 1::2] << 4, raw[..., 0]

    out: dict[str, tuple[str, npt.NDArray[Any]]] = {n: ("F32", x) for n, x in state.items() if not n.endswith(("up_proj", "down_proj"))}
    for il in range(f.get("gpt-oss.block_count", int)):
        at = f"model.layers.{il}.mlp.experts"
        (gate, gate_e), (up, up_e), (down, down_e) = (pairs(f"blk.{il}.ffn_{which}_exps.weight") for which in ("gate", "up", "down"))
        experts, rows, *rest = gate.shape
        out[f"{at}.gate_up_proj_blocks"] = "U8", np.stack([gate, up], axis=2).reshape(experts, 2 * rows, *rest)
        out[f"{at}.gate_up_proj_scales"] = "U8", np.stack([gate_e, up_e], axis=2).reshape(experts, 2 * rows, -1)
        out[f"{at}.down_proj_blocks"], out[f"{at}.down_proj_scales"] = ("U8", down), ("U8", down_e)
    return out


def write_folder(name: str, source: Path, folder: Path, *, parts: int = 1, blocks: bool = False) -> GgufFile:
    """Write the folder of a tiny model; parts: files, with an index where there are several; blocks: `in_blocks`. Returns the open
    source."""
    f = GgufFile.open(source)
    state = state_of(name, f)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(name, f, state)), encoding="utf-8")
    names = list(state)
    if blocks:
        write_safetensors(folder / "model.safetensors", in_blocks(state, f))
        return f
    if parts == 1:
        write_safetensors(folder / "model.safetensors", {n: ("F32", state[n]) for n in names})
        return f
    weight_map = {n: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, n in enumerate(names)}
    for part in set(weight_map.values()):
        write_safetensors(folder / part, {n: ("F32", state[n]) for n in names if weight_map[n] == part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return f


def trained_tokenizer(folder: Path, n_vocab: int) -> Tokenizer:
    """Byte-level BPE that cuts text as Llama 3 does, with its settings, three tokens short of `n_vocab`."""
    (pattern,) = PRE_TOKENIZERS["llama-bpe"].steps
    made = Tokenizer(models.BPE(ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(str(pattern)), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    text = (Path(__file__).parent / "data" / "war_of_the_worlds.txt").read_text(encoding="utf-8")[:4000]
    special = ["<|begin_of_text|>", "<|eot_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=n_vocab - 3, special_tokens=special, initial_alphabet=alphabet))
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return made
