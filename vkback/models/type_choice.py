"""Which type llama-quantize gives each tensor of a model: rules by file type, name, layer and counts, and whether importances are known.

Most tensors get the type that the file is named for. Matrices that harm most when they lose digits get more: the output, V, and what ends a
feed-forward, in all layers or in those that `use_more_bits` picks. A matrix whose rows are no whole blocks of a type falls back to another.
tests/unit/test_type_choice.py compares them with what llama-quantize itself chose (type_mixes.json, and digests of its dry runs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkback import quants

BASE: Mapping[str, str] = {
    "Q2_K": "Q2_K",
    "Q2_K_S": "Q2_K",
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
    "Q4_1": "Q4_1",
    "Q5_0": "Q5_0",
    "Q5_1": "Q5_1",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "IQ3_M": "IQ3_S",
    "IQ3_S": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ2_M": "IQ2_S",
    "IQ2_S": "IQ2_XS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_XXS": "IQ2_XXS",
    "IQ1_M": "IQ1_M",
    "IQ1_S": "IQ1_S",
    "TQ2_0": "TQ2_0",
    "TQ1_0": "TQ1_0",
    "Q2_0": "Q2_0",
    "Q1_0": "Q1_0",
    "MXFP4_MOE": "MXFP4",
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
}
"""By file type the type of most tensors."""

SYNTHETIC = (
    "Q2_K",
    "Q3_K_S",
    "Q3_K_M",
    "Q3_K_L",
    "Q4_K_S",
    "Q4_K_M",
    "Q5_K_S",
    "Q5_K_M",
    "Q6_K",
    "Q8_0",
    "Q4_0",
    "Q5_0",
    "IQ4_NL",
    "IQ4_XS",
)
"""Those that `vkback synth` writes."""

FALLBACK: Mapping[str, str] = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    **dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"), "IQ4_NL"),
}
"""Where rows are no whole blocks of 256."""

TABLES = ("token_embd", "per_layer_token_embd")
"""Embeddings of tokens."""

WITH_V = ("attn_v", "attn_qkv", "attn_kv_b")
"""Matrices that V comes from."""

LOW = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M")
"""File types of about two bits, of which the more important matrices have other rules; `LOW_WIDER` are the wider ones."""

LOW_WIDER = ("IQ2_S", "IQ2_M")

NEEDS_IMPORTANCES = (*(file for file in LOW if file != "IQ2_M"), "Q2_K_S")
"""File types that llama-quantize makes with an importance matrix only."""

NEVER = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "position_embd.weight",
    "pos_embd.weight",
    "token_types.weight",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
)
"""Parts of the names of matrices that keep their type: routers, positions, convolutions, small ones of recurrences."""


@dataclass(frozen=True)
class Counts:
    """Of a model.

    n_layer, n_expert  layers, experts
    n_gqa       heads of Q for one of K
    n_v, n_down tensors with V in them, tensors that end a feed-forward
    n_gate, n_up  that begin one
    has_output  it has an output of its own
    is_70b      llama.cpp takes it for a 70B
    falcon      it is a Falcon, of which some rules differ
    importances  an importance matrix is given
    """

    n_layer: int
    n_expert: int
    n_gqa: int
    n_v: int
    n_down: int
    has_output: bool
    is_70b: bool
    n_gate: int = 0
    n_up: int = 0
    falcon: bool = False
    importances: bool = False

    @classmethod
    def of(
        cls,
        tensors: Sequence[tuple[str, tuple[int, ...]]],
        n_layer: int,
        n_expert: int,
        n_gqa: int,
        is_70b: bool,
        *,
        falcon: bool = False,
        importances: bool = False,
    ) -> Counts:
        stems = [name.removesuffix(".weight").rpartition(".")[2] for name, _ in tensors if name.endswith(".weight")]
        n_v, n_down = sum(stem in WITH_V for stem in stems), sum(stem == "ffn_down" for stem in stems)
        n_gate, n_up = stems.count("ffn_gate"), stems.count("ffn_up")
        return cls(n_layer, n_expert, n_gqa, n_v, n_down, "output" in stems, is_70b, n_gate, n_up, falcon, importances)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether llama-quantize changes a tensor's type: weights of two axes or more, but for those of `NEVER`."""
    return name.endswith("weight") and len(shape) > 1 and not any(part in name for part in NEVER)


def file_order(name: str) -> tuple[int, str]:
    """A key that brings tensors into the order of files that llama-quantize writes: by layer, those of none first, then by name."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1, name


def use_more_bits(i: int, n: int) -> bool:
    """The first and last eighths of n, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def of_output(file: str, columns: int, falcon: bool) -> str:
    """Of the output, and of the token embeddings where they serve as one."""
    base = BASE[file]
    if base == "Q8_0" or file == "MXFP4_MOE" or falcon or columns % 256:
        return "Q8_0"
    return "Q5_K" if file in (*LOW, "IQ3_XXS") else "Q6_K"


def of_embeddings(file: str) -> str:
    if file in ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"):
        return "Q2_K"
    if file in (*LOW_WIDER, "IQ3_XXS"):
        return "IQ3_S"
    return "Q4_K" if file in ("TQ1_0", "TQ2_0", "Q2_0") else BASE[file]


def of_low(file: str, stem: str, i_down: int, c: Counts) -> str:
    """Of the matrices of files of about two bits. i_down: how many came before that end a feed-forward."""
    wider = "IQ3_S" if file in LOW_WIDER else "Q2_K"
    if stem in WITH_V:
        return "Q4_K" if c.n_gqa >= 4 or c.n_expert >= 4 else wider
    if stem == "attn_k" and c.n_expert == 8:
        return "Q4_K"
    if stem.startswith("ffn_down") and i_down < c.n_layer // 8:
        return wider
    if stem == "attn_output":
        if c.n_expert == 8:
            return "Q5_K"
        return "IQ2_XXS" if file in ("IQ1_S", "IQ1_M") else "IQ3_S" if file in LOW_WIDER else BASE[file]
    return BASE[file]


def of_v(file: str, i: int, c: Counts) -> str:
    """Of the i-th V."""
    found, many = BASE[file], c.n_gqa >= 4
    if file == "Q2_K":
        found = "Q4_K" if many else "Q3_K"
    elif file == "Q3_K_M":
        found = "Q5_K" if i < 2 else "Q4_K"
    elif file == "IQ3_XXS":
        found = "Q4_K" if many else found if c.importances else "IQ3_S"
    elif file == "IQ3_M" or (file in ("Q2_K_S", "IQ3_XS", "IQ3_S") and many):
        found = "Q4_K"
    elif file == "Q3_K_L" or (file in ("IQ4_NL", "IQ4_XS") and many) or (file == "Q4_K_S" and i < 4):
        found = "Q5_K"
    elif file in ("Q4_K_M", "Q5_K_M") and use_more_bits(i, c.n_v):
        found = "Q6_K"
    if c.is_70b and found in ("Q3_K", "Q4_K"):  # eight heads of Q share V, which then is small
        found = "Q5_K"
    return "Q8_0" if c.n_expert == 8 else found


def of_down(file: str, i: int, n: int, c: Counts) -> str:
    """Of what ends the i-th of n feed-forwards."""
    early, known = i < n // 8, c.importances
    if file == "Q2_K":
        return "Q3_K"
    if file == "Q2_K_S":
        return "Q4_K" if early else BASE[file]
    if file == "IQ3_XXS" and not known:
        return "Q4_K" if early else "Q3_K"
    if file == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K" if not c.falcon or use_more_bits(i, n) else "Q3_K"
    if file == "IQ3_M":
        return "Q4_K" if early or (c.n_expert == 8 and use_more_bits(i, n)) else BASE[file]
    if file == "Q3_K_L":
        return "Q4_K" if c.falcon else "Q5_K"
    if file == "Q4_K_M" and c.falcon:
        return "Q6_K" if i < n // 16 else "Q5_K" if use_more_bits(i, n) else "Q4_K"
    if early and ((file == "Q4_K_S" and not c.falcon) or (file in ("IQ4_NL", "IQ4_XS") and not known)):
        return "Q5_K"
    if early and known and file in ("Q4_0", "Q5_0"):
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[file]
    return "Q6_K" if file in ("Q4_K_M", "Q5_K_M") and use_more_bits(i, n) else BASE[file]


MORE_WITH_8_EXPERTS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS")


def of_attention_output(file: str, c: Counts) -> str:
    if c.falcon:
        return "Q4_K" if file == "Q3_K_L" else BASE[file]
    if c.n_expert == 8:
        return "Q5_K" if file in MORE_WITH_8_EXPERTS else BASE[file]
    return {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}.get(file, BASE[file])


def of_q_k(file: str, stem: str, c: Counts) -> str:
    if stem == "attn_k" and c.n_expert == 8:
        return "Q8_0"
    return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(file, BASE[file])


def choose_types(file: str, tensors: Sequence[tuple[str, tuple[int, ...]]], counts: Counts) -> dict[str, str]:
    """Types by name of the matrices among `tensors`, which are in the order of a file. Raises KeyError for an unknown file type."""
    base, n_v = BASE[file], 0
    seen = dict.fromkeys(("ffn_down", "ffn_gate", "ffn_up"), 0)
    of_kind = {"ffn_down": counts.n_down, "ffn_gate": counts.n_gate, "ffn_up": counts.n_up}
    found: dict[str, str] = {}
    for name, shape in tensors:
        block, _, stem = name.removesuffix(".weight").rpartition(".")
        kind = next((kind for kind in seen if stem.startswith(kind)), "")
        i = n = 0
        if kind:
            i, n = (int(block.split(".")[1]), counts.n_layer) if counts.n_expert > 1 else (seen[kind], of_kind[kind])
            seen[kind] += 1
        type = base
        if base in ("F32", "F16", "BF16"):
            pass
        elif stem == "output" or (stem in TABLES and not counts.has_output):
            type = of_output(file, shape[-1], counts.falcon)
        elif file == "MXFP4_MOE":
            type = base if len(shape) > 2 and shape[-3] > 1 else "Q8_0"
        elif stem in TABLES:
            type = of_embeddings(file)
        elif file in LOW:
            type = of_low(file, stem, seen[kind] - 1 if kind else 0, counts)
        elif stem in WITH_V:
            type, n_v = of_v(file, n_v, counts), n_v + 1
        elif stem in ("attn_q", "attn_k"):
            type = of_q_k(file, stem, counts)
        elif stem == "attn_output":
            type = of_attention_output(file, counts)
        elif kind == "ffn_down":
            type = of_down(file, i, n, counts)
        elif kind and file == "IQ3_XS" and n // 8 <= i < 7 * n // 8:
            type = "IQ3_XXS"
        found[name] = fitting(type, shape[-1])
    return found


def fitting(type: str, columns: int) -> str:
    """The type, or what takes its place where rows of so many columns are no whole blocks of it."""
    while columns % quants.quant(type).block_values:
        type = FALLBACK.get(type, "F16")
    return type
