"""Small GGUF files for tests, whole or broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from vkback import quants


def write_gguf(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]]) -> Path:
    """Write a file.

    metadata  key -> str, bool, int (u32), float (f32) or list
    tensors   name -> (type, array); a quantized one as uint8 rows
    """
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (kind, array) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a llama with 2 layers, 64 wide, 4 heads over 2, vocabulary 32. `changes` replaces keys; None removes one."""
    base: dict[str, Any] = {
        "context_length": 32,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 32,
    }
    base |= {key.replace("__", "."): value for key, value in changes.items()}
    return {f"llama.{key}": value for key, value in base.items() if value is not None}


def llama_tensors(
    *, seed: int = 0, tied: bool = True, experts: int = 0, biases: bool = False, layers: int = 2
) -> dict[str, tuple[str, np.ndarray]]:
    """F32 tensors for `llama_metadata`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> tuple[str, np.ndarray]:
        return "F32", (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    out = {"token_embd.weight": normal(32, 64), "output_norm.weight": ("F32", np.ones(64, np.float32))}
    if not tied:
        out["output.weight"] = normal(32, 64)
    for il in range(layers):
        b = f"blk.{il}."
        out |= {b + "attn_norm.weight": ("F32", np.ones(64, np.float32)), b + "ffn_norm.weight": ("F32", np.ones(64, np.float32))}
        linear = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        if experts:
            linear["ffn_gate_inp"] = (experts, 64)
            out |= {b + "ffn_gate_exps.weight": normal(experts, 96, 64), b + "ffn_up_exps.weight": normal(experts, 96, 64)}
            out |= {b + "ffn_down_exps.weight": normal(experts, 64, 96)}
        else:
            linear |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        for stem, shape in linear.items():
            out[f"{b}{stem}.weight"] = normal(*shape)
            if biases and not stem.startswith("ffn_gate_inp"):
                out[f"{b}{stem}.bias"] = normal(shape[0])
    return out


def dense_metadata(arch: str) -> dict[str, Any]:
    """`llama_metadata` under the keys of another architecture, without a vocabulary."""
    return {key.replace("llama.", f"{arch}."): value for key, value in llama_metadata().items()} | {"tokenizer.ggml.model": "no_vocab"}


def gpt_oss_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a gpt-oss with 2 layers, 96 wide, 8 heads of 64 over 2, 4 of 8 experts, a window of 8, vocabulary 160; a context of 64,
    stretched from 16. `changes` replaces keys; None removes one."""
    base: dict[str, Any] = {
        "context_length": 64,
        "embedding_length": 96,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 8,
        "expert_count": 8,
        "expert_used_count": 4,
        "expert_feed_forward_length": 96,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "vocab_size": 160,
    }
    base |= {key.replace("__", "."): value for key, value in changes.items()}
    return {"tokenizer.ggml.model": "no_vocab"} | {f"gpt-oss.{key}": value for key, value in base.items() if value is not None}


def gpt_oss_tensors(*, seed: int = 0, layers: int = 2) -> dict[str, tuple[str, np.ndarray]]:
    """Tensors for `gpt_oss_metadata`, of the types that gpt-oss files have. Gate and up pass the limit of 7 now and then, sinks take a
    share of the attention that shows."""
    rng = np.random.default_rng(seed)

    def quantized(kind: str, *shape: int, gain: float = 1.0) -> tuple[str, np.ndarray]:
        rows, k = math.prod(shape[:-1]), shape[-1]
        blocks = quants.random_blocks(kind, rows, k, rng, std=gain / math.sqrt(k))
        return kind, blocks.reshape(*shape[:-1], -1)

    def floats(*shape: int, mean: float = 0.0, std: float = 1.0) -> tuple[str, np.ndarray]:
        return "F32", (mean + std * rng.standard_normal(shape)).astype(np.float32)

    out = {"token_embd.weight": quantized("Q8_0", 160, 96, gain=30.0), "output_norm.weight": floats(96, mean=1.0, std=0.1)}
    out["output.weight"] = quantized("Q8_0", 160, 96)
    for il in range(layers):
        b = f"blk.{il}."
        out |= {b + f"{norm}.weight": floats(96, mean=1.0, std=0.1) for norm in ("attn_norm", "post_attention_norm")}
        out[b + "attn_sinks.weight"] = floats(8, mean=1.0)
        for stem, rows, cols in (("attn_q", 512, 96), ("attn_k", 128, 96), ("attn_v", 128, 96), ("attn_output", 96, 512)):
            out |= {f"{b}{stem}.weight": quantized("Q8_0", rows, cols), f"{b}{stem}.bias": floats(rows, std=0.3)}
        out |= {b + "ffn_gate_inp.weight": floats(8, 96, std=0.2), b + "ffn_gate_inp.bias": floats(8, std=0.3)}
        for stem, gain in (("ffn_gate_exps", 3.0), ("ffn_up_exps", 3.0), ("ffn_down_exps", 0.1)):
            out |= {f"{b}{stem}.weight": quantized("MXFP4", 8, 96, 96, gain=gain), f"{b}{stem}.bias": floats(8, 96, std=0.3)}
    return out
