"""Architectures that the format knows by name and vkback does not run, with what its models do not have yet."""

from __future__ import annotations

from collections.abc import Iterable

DIFFUSION = "texts that are made in any order"
RWKV = "a WKV recurrence"
ALIBI = "attention biases by distance (ALiBi)"
INDEXER = "an indexer that chooses the rows which attention reads"

LACKS: dict[str, str] = {
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), DIFFUSION),
    **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), RWKV),
    **dict.fromkeys(("bloom", "jais", "mpt", "refact"), ALIBI),
    **dict.fromkeys(("deepseek32", "glm-dsa"), INDEXER),
    **dict.fromkeys(("t5", "t5encoder"), "an encoder with attention biases by distance in buckets"),
    "deepseek4": "hyper-connections and attention to compressed rows",
    "gemma4-assistant": "layers that read another model's cache",
    "grok": "the scales and norms of Grok's experts",
    "clip": "pictures for an input",
    "grovemoe": "experts that a group of experts shares",
    "jamba": "the scan of Mamba-1",
    "kimi-linear": "a delta net whose decay differs by channel (KDA)",
    "mimo2": "a scale of V and numbers of heads that differ by layer",
    "mamba": "the scan of Mamba-1",
    "nemotron": "a feed-forward with squared ReLU",
    "plamo2": "the scan of Mamba-1",
    "nomic-bert-moe": "experts without a gate",
    "qwen4exp": "hyper-connections, embeddings of n-grams and an indexer",
    "smallthinker": "a router that reads what comes before attention",
    "step35": "a gate for each head, and heads and clamps that differ by layer",
    "wavtokenizer-dec": "audio for an output",
}
"""By `general.architecture`. What has no entry needs a file of vkback/models/architectures, and no more that is known of."""


def refusal(arch: str, quoted: str, supported: Iterable[str]) -> str:
    """Why a file of an architecture that is not supported is refused, in one line. quoted: its name as it may be shown."""
    if arch == "eagle3":
        return (
            f"architecture {quoted} is an EAGLE-3 head, no model of its own; give it beside the model that it was made for: -m MODEL "
            "-md HEAD --spec-type draft-eagle3"
        )
    known = ", ".join(sorted(supported))
    if arch in LACKS:
        return f"architecture {quoted} is not supported: vkback has no models with {LACKS[arch]} yet; supported are {known}"
    from gguf.constants import MODEL_ARCH_NAMES  # 29 modules, which files that are supported do without

    if arch in MODEL_ARCH_NAMES.values():
        return (
            f"architecture {quoted} is not supported: vkback has no graph of it yet (docs/adding_an_architecture.md); supported are {known}"
        )
    return f"architecture {quoted} is not known; supported are {known}"
