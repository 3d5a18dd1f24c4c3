"""Names and sizes of models in llama-bench's spelling, so that tables can be put side by side."""

from __future__ import annotations

from collections import Counter

from vkback.models.gguf_file import GgufFile

FILE_TYPES = {
    0: "all F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K - Medium", 11: "Q3_K - Small",
    12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium", 16: "Q5_K - Small", 17: "Q5_K - Medium",
    18: "Q6_K", 19: "IQ2_XXS - 2.0625 bpw", 20: "IQ2_XS - 2.3125 bpw", 21: "Q2_K - Small", 22: "IQ3_XS - 3.3 bpw",
    23: "IQ3_XXS - 3.0625 bpw", 24: "IQ1_S - 1.5625 bpw", 25: "IQ4_NL - 4.5 bpw", 26: "IQ3_S - 3.4375 bpw", 27: "IQ3_S mix - 3.66 bpw",
    28: "IQ2_S - 2.5 bpw", 29: "IQ2_M - 2.7 bpw", 30: "IQ4_XS - 4.25 bpw", 31: "IQ1_M - 1.75 bpw", 32: "BF16",
    36: "TQ1_0 - 1.69 bpw ternary", 37: "TQ2_0 - 2.06 bpw ternary", 38: "MXFP4 MoE", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
"""`general.file_type` to its name."""

_GUESSED = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17,
    "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ3_XXS": 23, "IQ1_S": 24, "IQ1_M": 31, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_S": 26,
    "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39, "Q1_0": 40,
}  # fmt: skip
"""The file type that a file without `general.file_type` gets from its most frequent tensor type."""

_LLAMA_BY_LAYERS = {
    16: "1B", 22: "1B", 26: "3B", 28: "3B", 30: "256M", 36: "8B", 40: "13B", 48: "34B", 60: "30B",
}  # fmt: skip
_MIXTRAL_BY_LAYERS = {32: "8x7B", 56: "8x22B"}
_BY_LAYERS = {"gpt-oss": {24: "20B", 36: "120B"}, "qwen3moe": {48: "30B.A3B", 94: "235B.A22B"}}
UNKNOWN_TYPE = "?B"


def model_description(f: GgufFile) -> str:
    """Architecture, size class and file type: `llama 8B Q4_K - Medium`. The size class follows layers, not parameters, oddities included
    (40 layers are `13B` whatever their width)."""
    return f"{f.arch} {_size_class(f)} {file_type_name(f)}"


def file_type_name(f: GgufFile) -> str:
    """`Q4_K - Medium`; `(guessed) ...` from the tensors when the file does not say."""
    stated = f.metadata.get("general.file_type")
    if isinstance(stated, int):
        return FILE_TYPES.get(stated, "unknown, may not work")
    types = Counter(t.type for t in f.tensors.values())
    guess = _GUESSED.get(types.most_common(1)[0][0]) if types else None
    return "unknown, may not work" if guess is None else f"(guessed) {FILE_TYPES[guess]}"


def _size_class(f: GgufFile) -> str:
    layers = _number(f, "block_count")
    if f.arch == "llama":
        return _llama_class(f, layers)
    return _BY_LAYERS.get(f.arch, {}).get(layers, UNKNOWN_TYPE)


def _llama_class(f: GgufFile, layers: int) -> str:
    if _number(f, "expert_count") == 8:
        return _MIXTRAL_BY_LAYERS.get(layers, UNKNOWN_TYPE)
    if layers == 32:
        vocab = _vocabulary(f)
        return "3B" if vocab == 49152 else "7B" if vocab < 40000 else "8B"
    if layers == 80:
        heads = _number(f, "attention.head_count")
        return "65B" if _number(f, "attention.head_count_kv", heads) == heads else "70B"
    return _LLAMA_BY_LAYERS.get(layers, UNKNOWN_TYPE)


def _number(f: GgufFile, name: str, default: int = 0) -> int:
    value = f.metadata.get(f"{f.arch}.{name}", default)
    return value if isinstance(value, int) else default


def _vocabulary(f: GgufFile) -> int:
    tokens = f.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else _number(f, "vocab_size")


def size_string(nbytes: int) -> str:
    """`546.50 MiB`, `4.58 GiB`."""
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.2f} MiB"
    return f"{nbytes / (1 << 30):.2f} GiB"


def params_string(n: int) -> str:
    """`134.52 M`, `8.03 B`."""
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"
