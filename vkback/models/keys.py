"""Which metadata keys an architecture knows, and what becomes of those it does not.

A file says by its keys how it is calculated. Were a key left out that changes the mathematics, the text would be wrong and nobody told. So
a key under the architecture's prefix that it does not read is refused, unless its value changes nothing or the key has no part in logits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vkback.gguf.file import MAX_QUOTED, GgufError, GgufFile, quoted

COMMON: frozenset[str] = frozenset(
    {
        "attention.causal",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.scale",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "final_logit_softcapping",
        "pooling_type",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "vocab_size",
    }
)
"""Keys that every architecture reads (`Metadata.hparams`), beside the epsilon of its norms."""

EXPERTS: frozenset[str] = frozenset(
    {"expert_count", "expert_feed_forward_length", "expert_used_count", "expert_weights_norm", "expert_weights_scale"}
)
"""Keys that architectures with experts read as well."""

POOLING = "pooling_type"
"""How a file's makers make a vector of a text (POOLINGS of vkback/models/texts.py)."""

SECTIONS = "rope.dimension_sections"
"""Pairs of RoPE that turn by a picture's time, height and width; the same position in a text."""

MTP = "nextn_predict_layers"
"""Blocks at the end of a file that predict tokens beyond the next one."""

ABOUT_FILES: frozenset[str] = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
"""Keys that say how a file came about. Many files have them, and nobody needs to hear of it."""

NO_PART: frozenset[str] = frozenset(
    {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "classifier.output_labels", "decoder_start_token_id"}
)
"""Keys without a part in the logits of a text model, such as the epsilon of a kind of norm that it does not have. They are named."""

ONE_IS_NOTHING: frozenset[str] = frozenset(
    {
        "attention.output_scale",
        "embedding_scale",
        "expert_group_count",
        "expert_group_scale",
        "expert_group_used_count",
        "full_attention_interval",
        "interleave_moe_layer_step",
        "logit_scale",
        "moe_every_n_layers",
        "residual_scale",
        "rope.scaling.alpha",
    }
)
"""Keys whose value 1 changes nothing, as 0 does with every key."""

FEW = 4
"""Keys that an error names."""

SAME_AS: Mapping[str, str] = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "embedding_length_out": "embedding_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
"""Keys that change nothing where they say what another key says."""


def unread_keys(f: GgufFile, known: Collection[str], settled: Mapping[str, int]) -> tuple[str, ...]:
    """Keys of a file that its architecture does not read and that have no part in the logits, though they have a value.

    known    keys that it reads, without its prefix
    settled  keys that it does not read, with the only value it has for them
    Raises GgufError naming those that may have a part.
    """
    prefix = f"{f.arch}."
    refused: list[str] = []
    unused: list[str] = []
    for key, value in f.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in known or name in ABOUT_FILES or _changes_nothing(f, name, value, settled):
            continue
        (unused if name in NO_PART else refused).append(key)
    if refused:
        told = ", ".join(f"{_named(key)} ({_shown(f.metadata[key])})" for key in refused[:FEW])
        told += f", {len(refused) - FEW} more" if len(refused) > FEW else ""
        raise GgufError(
            f"[gguf] {f.path}: metadata that {f.arch} does not know, without which results would be wrong: {told}; expected 0 or no "
            "such key. Where it has no part in the results, take it out: gguf-new-metadata --remove-metadata KEY IN OUT (pip install gguf)"
        )
    return tuple(map(_named, unused))


def _changes_nothing(f: GgufFile, name: str, value: Any, settled: Mapping[str, int]) -> bool:
    if isinstance(value, np.ndarray):
        return not value.any()
    if isinstance(value, list | str):
        return not value
    if value == 0 or (value == 1 and name in ONE_IS_NOTHING) or (name in settled and value == settled[name]):
        return True
    other = SAME_AS.get(name)
    return other is not None and f.metadata.get(f"{f.arch}.{other}") == value


def _named(key: str) -> str:
    return key if key.isprintable() and len(key) <= MAX_QUOTED else quoted(key)


def _shown(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, np.ndarray | list) else quoted(value)
