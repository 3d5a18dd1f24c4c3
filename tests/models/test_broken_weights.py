"""Weights that are NaN or infinite are named when a file is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_gguf import dense_metadata, llama_tensors, write_gguf

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.models import GgufError


def phi3_tensors() -> dict[str, tuple[str, np.ndarray]]:
    tensors = llama_tensors()
    for il in range(2):
        parts = [tensors.pop(f"blk.{il}.attn_{x}.weight")[1] for x in "qkv"]
        tensors[f"blk.{il}.attn_qkv.weight"] = ("F32", np.concatenate(parts))
        gate, up = (tensors.pop(f"blk.{il}.ffn_{x}.weight")[1] for x in ("gate", "up"))
        tensors[f"blk.{il}.ffn_up.weight"] = ("F32", np.concatenate([gate, up]))
    return tensors


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("tensor", "index", "value", "where"),
    [
        ("blk.1.ffn_gate.weight", (5, 3), np.nan, "row 5"),
        ("blk.0.attn_v.weight", (31, 63), np.inf, "row 31"),
        ("token_embd.weight", (7, 0), -np.inf, "row 7"),
        ("blk.1.attn_norm.weight", (9,), np.nan, "it"),
    ],
)
def test_weights_that_are_not_numbers_are_named_at_the_load(
    tensor: str, index: tuple[int, ...], value: float, where: str, tmp_path: Path, device: Device
) -> None:
    tensors = llama_tensors()
    tensors[tensor][1][index] = value
    path = write_gguf(tmp_path / "m.gguf", "llama", dense_metadata("llama"), tensors)
    with pytest.raises(GgufError, match=rf"m\.gguf: tensor {tensor} \(F32 \[.*\]\): {where} holds weights that are NaN or infinite"):
        Engine.load(path, device, progress=False)


@pytest.mark.vulkan
def test_a_part_of_a_cut_tensor_is_named_as_in_the_file(tmp_path: Path, device: Device) -> None:
    tensors = phi3_tensors()
    tensors["blk.1.ffn_up.weight"][1][100, 1] = np.nan
    path = write_gguf(tmp_path / "m.gguf", "phi3", dense_metadata("phi3"), tensors)
    with pytest.raises(GgufError, match=r"tensor blk\.1\.ffn_up\.weight \(F32 \[96, 64\]\): row 100 holds"):
        Engine.load(path, device, progress=False)
