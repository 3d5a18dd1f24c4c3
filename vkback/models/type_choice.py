"""Which type llama-quantize gives each tensor of a model, without an importance matrix: rules by file type, name, layer and counts.

Most tensors get the type that the file is named for. Matrices that harm most when they lose digits get more: the output, V, and what ends a
feed-forward, in all layers or in those that `use_more_bits` picks. A matrix whose rows are no whole blocks of a type falls back to another.
tests/unit/test_type_choice.py compares them with what llama-quantize itself chose (type_mixes.json).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkback import quants

BASE: Mapping[str, str] = {
    "Q2_K": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
    "Q4_0": "Q4_0",
    "Q5_0": "Q5_0",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
}
"""By file type the type of most tensors."""

FALLBACK: Mapping[str, str] = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Where rows are no whole blocks of 256."""

WITH_V = ("attn_v", "attn_qkv", "attn_kv_b")
"""Matrices that V comes from."""


@dataclass(frozen=True)
class Counts:
    """Of a model.

    n_layer, n_expert  layers, experts
    n_gqa       heads of Q for one of K
    n_v, n_down tensors with V in them, tensors that end a feed-forward
    has_output  it has an output of its own
    is_70b      llama.cpp takes it for a 70B
    """

    n_layer: int
    n_expert: int
    n_gqa: int
    n_v: int
    n_down: int
    has_output: bool
    is_70b: bool

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, tuple[int, ...]]], n_layer: int, n_expert: int, n_gqa: int, is_70b: bool) -> Counts:
        stems = [name.removesuffix(".weight").rpartition(".")[2] for name, _ in tensors if name.endswith(".weight")]
        n_v, n_down = sum(stem in WITH_V for stem in stems), sum(stem == "ffn_down" for stem in stems)
        return cls(n_layer, n_expert, n_gqa, n_v, n_down, "output" in stems, is_70b)


def use_more_bits(i: int, n: int) -> bool:
    """The first and last eighths of n, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def of_v(file: str, i: int, c: Counts) -> str:
    """Of the i-th V."""
    found = BASE[file]
    if file == "Q2_K":
        found = "Q4_K" if c.n_gqa >= 4 else "Q3_K"
    elif file == "Q3_K_M":
        found = "Q5_K" if i < 2 else "Q4_K"
    elif file == "Q3_K_L" or (file in ("IQ4_NL", "IQ4_XS") and c.n_gqa >= 4) or (file == "Q4_K_S" and i < 4):
        found = "Q5_K"
    elif file in ("Q4_K_M", "Q5_K_M") and use_more_bits(i, c.n_v):
        found = "Q6_K"
    if c.is_70b and found in ("Q3_K", "Q4_K"):  # eight heads of Q share V, which then is small
        found = "Q5_K"
    return "Q8_0" if c.n_expert == 8 else found


def of_down(file: str, i: int, n: int) -> str:
    """Of what ends the i-th of n feed-forwards."""
    early = i < n // 8
    if file == "Q2_K":
        return "Q3_K"
    if file == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K"
    if file == "Q3_K_L" or (file in ("Q4_K_S", "IQ4_NL", "IQ4_XS") and early):
        return "Q5_K"
    return "Q6_K" if file in ("Q4_K_M", "Q5_K_M") and use_more_bits(i, n) else BASE[file]


def of_attention_output(file: str, n_expert: int) -> str:
    if n_expert == 8 and file in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS"):
        return "Q5_K"
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(file, BASE[file])


def choose_types(file: str, tensors: Sequence[tuple[str, tuple[int, ...]]], counts: Counts) -> dict[str, str]:
    """Types by name of the matrices among `tensors`, which are in the order of a file. Raises KeyError for an unknown file type."""
    base, n_v, n_down = BASE[file], 0, 0
    found: dict[str, str] = {}
    for name, shape in tensors:
        block, _, stem = name.removesuffix(".weight").rpartition(".")
        type = base
        if stem == "output" or (stem == "token_embd" and not counts.has_output):
            type = base if base == "Q8_0" else "Q8_0" if shape[-1] % 256 else "Q6_K"
        elif stem in WITH_V:
            type, n_v = of_v(file, n_v, counts), n_v + 1
        elif stem == "attn_k" and counts.n_expert == 8:
            type = "Q8_0"
        elif stem == "attn_output":
            type = of_attention_output(file, counts.n_expert)
        elif stem.startswith("ffn_down"):
            i = int(block.split(".")[1]) if counts.n_expert > 1 else n_down
            type, n_down = of_down(file, i, counts.n_layer if counts.n_expert > 1 else counts.n_down), n_down + 1
        found[name] = fitting(type, shape[-1])
    return found


def fitting(type: str, columns: int) -> str:
    """The type, or what takes its place where rows of so many columns are no whole blocks of it."""
    while columns % quants.quant(type).block_values:
        type = FALLBACK.get(type, "F16")
    return type
