"""Small GGUF files for tests, whole or broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter


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
