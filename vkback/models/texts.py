"""Whole texts side by side: what their graph has beside one that makes text.

Several texts go through a graph side by side, one after another. Keys and values have as many rows as the graph has tokens. A token sees
those of its own text: those before it alone, or in an encoder those after it as well. `spans` says which rows these are, so attention is
the one op it always is. What the last layer gives is pooled, a vector for each text, by a product with a matrix that the host makes
(`pool_weights`); a classifier, or matrices that change its width, follow on the device. Where logits are wanted instead, `out_ids` says of
which tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vkback.gguf.hparams import HParams

Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""A vector for each token; the mean of those of a text; that of its first token, of its last one; scores of a classifier."""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
"""By their number in a file (`pooling_type`)."""

CLASSIFIER = ("cls.weight", "cls.output.weight")
"""Weights of which a file that ranks has at least one."""

DENSE = ("dense_2", "dense_3")
"""Matrices behind pooling, one after the other, where a file has them."""

SPANS = "spans"
"""Input of attention without a window: I32 [n, 2], the first and the last row that each token sees. With one, `spans_in_N`, or
`spans_in_chunks_of_N` where a token sees its own chunk of N rows."""

DISTANCES = "distances"
"""Input of attention with ALiBi, which has no spans: F16 [1, 1, n, n], the negative distance of tokens of a text, -inf between texts."""

CHUNKS = "chunks_of_"


@dataclass(frozen=True)
class Texts:
    """n texts at most, pooled so. segments: of tokens may differ (`segments` I32 [n], the row of the table of token types). logits: of so
    many tokens instead of vectors, 0: of none."""

    n: int
    pooling: Pooling
    logits: int = 0


def spans_of(window: int, chunked: bool = False) -> str:
    """Name of the spans of layers with a window, 0 without."""
    return f"{SPANS}_in_{CHUNKS if chunked else ''}{window}" if window else SPANS


def window_of(name: str) -> tuple[int, bool]:
    """The opposite of `spans_of`."""
    window = name.removeprefix(f"{SPANS}_in_")
    return (int(window.removeprefix(CHUNKS)), window.startswith(CHUNKS)) if name != SPANS else (0, False)


def spans(lengths: Sequence[int], n: int, *, window: int, causal: bool, chunked: bool = False) -> npt.NDArray[np.int32]:
    """First and last row that each of n tokens sees, of texts one after another; what follows them is padding. int32 [n, 2].

    window  rows that a causal token sees, itself included; else it sees half as many on either side. 0: all of its text
    chunked a causal token sees those of its chunk of so many rows
    """
    out = np.zeros((n, 2), np.int32)
    out[:, 1] = -1
    at = 0
    for length in lengths:
        place = np.arange(length)
        if causal:
            behind = place % window + 1 if chunked else window
            first, last = (np.maximum(place - behind + 1, 0) if window else np.zeros_like(place)), place
        elif window:
            first, last = np.maximum(place - window // 2, 0), np.minimum(place + window // 2, length - 1)
        else:
            first, last = np.zeros_like(place), np.full_like(place, length - 1)
        out[at : at + length, 0] = at + first
        out[at : at + length, 1] = at + last
        at += length
    return out


def distances(lengths: Sequence[int], n: int) -> npt.NDArray[np.float16]:
    """What DISTANCES is of n tokens of texts one after another; what follows them is padding, which sees nothing."""
    out = np.full((1, 1, n, n), -np.inf, np.float16)
    at = 0
    for length in lengths:
        place = np.arange(length)
        out[0, 0, at : at + length, at : at + length] = -np.abs(place[:, None] - place)
        at += length
    return out


def pool_weights(lengths: Sequence[int], n: int, texts: int, pooling: Pooling) -> npt.NDArray[np.float32]:
    """What each of n tokens counts in the vector of each text: float32 [n, texts]."""
    out = np.zeros((n, texts), np.float32)
    at = 0
    for text, length in enumerate(lengths):
        if pooling == "mean":
            out[at : at + length, text] = 1.0 / length
        else:
            out[at if pooling == "cls" else at + length - 1, text] = 1.0
        at += length
    return out


def ranks(hp: HParams) -> bool:
    """Whether a file has a classifier."""
    return any(map(hp.has_weight, CLASSIFIER))


def rows_of(hp: HParams, stem: str) -> int:
    """Rows of a classifier's matrix, which only the file says; 0 without one. Raises GgufError for a bias alone."""
    if (found := hp.weights.get(f"{stem}.weight")) is not None:
        return found.shape[0]
    if hp.has_weight(f"{stem}.bias"):
        raise hp.missing(f"{stem}.weight")
    return 0


def stated_pooling(value: Any) -> Pooling | None:
    """What a file's `pooling_type` says; None where it says nothing that is known."""
    return POOLINGS[value] if isinstance(value, int) and 0 <= value < len(POOLINGS) else None
