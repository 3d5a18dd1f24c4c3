"""Vectors of texts and scores of rerankers, from token ids: what `LoadedModel.embed` and `rank`, the server and the command line share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vkback.api.errors import ModelError
from vkback.engine.engine import Engine
from vkback.gguf.file import GgufError
from vkback.gguf.tokenizer import Tokenizer
from vkback.models.registry import Model
from vkback.models.texts import DENSE, POOLINGS, Pooling

Vectors = npt.NDArray[np.float32]
Pair = tuple[list[int], list[int]]
"""Token ids of a query and a document, and the segment of each."""

EMBEDS: tuple[Pooling, ...] = ("mean", "cls", "last")
"""Poolings that give a vector for each text."""

QUERY, DOCUMENT = "{query}", "{document}"
PLACES = re.compile(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})")
"""Places of a file's template for pairs (`tokenizer.chat_template.rerank`)."""


def width(model: Model) -> int:
    """Values of a vector."""
    found = [model.hp.weights[f"{stem}.weight"].shape[0] for stem in DENSE if model.hp.has_weight(f"{stem}.weight")]
    return found[-1] if found else model.hp.n_embd


def pooling_of(model: Model, asked: Pooling | None) -> Pooling:
    """How a vector is made of a text: as asked, else as the file says. Raises ModelError where neither says it."""
    if asked is not None:
        if asked not in POOLINGS:
            raise ModelError(f"[model] pooling: {asked!r}; expected {', '.join(EMBEDS)}, or None for what the file says")
        return asked
    known = model.architecture
    if known.pooling in EMBEDS:
        return known.pooling
    if known.pooling == "rank":
        raise ModelError(
            f"[model] {model.file.path.name} is a reranker (pooling_type rank); expected a use of its scores: model.rank(query, documents) "
            f"or /v1/rerank; or say how to pool: {', '.join(EMBEDS)}"
        )
    if known.causal:
        raise ModelError(
            f"[model] {model.file.path.name} does not say how a text becomes a vector (pooling_type): it was not made for that; expected "
            f"{', '.join(EMBEDS)}: pooling= in Python, --pooling of vkback embed and serve"
        )
    return "mean"


def vectors(engine: Engine, texts: Sequence[Sequence[int]], pooling: Pooling | None, normalize: bool) -> Iterator[Vectors]:
    """The vector of each text, float32 [width], of length 1 where `normalize`; with the pooling "none" [tokens, n_embd]. Raises
    ModelError."""
    try:
        for found in engine.vectors(texts, pooling_of(engine.model, pooling)):
            yield normalized(found) if normalize else found
    except GgufError as e:
        raise ModelError(str(e)) from e


def normalized(rows: Vectors) -> Vectors:
    """Rows of length 1; one of zeros stays so."""
    length = np.sqrt(np.sum(np.square(rows, dtype=np.float64), axis=-1, keepdims=True))
    return np.asarray(rows / np.where(length == 0.0, 1.0, length), np.float32)


def ranked(engine: Engine, pairs: Sequence[Pair]) -> Vectors:
    """The score of each pair: the first of the classifier's labels, or its probability. Raises ModelError."""
    try:
        found = list(engine.vectors([ids for ids, _ in pairs], "rank", [segments for _, segments in pairs]))
    except GgufError as e:
        raise ModelError(str(e)) from e
    if not found:
        return np.zeros(0, np.float32)
    scores = np.stack(found).astype(np.float64)
    if engine.model.architecture.rank_softmax and scores.shape[1] > 1:
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    return scores[:, 0].astype(np.float32)


def pair_of(tokenizer: Tokenizer, query: str, document: str, *, template: str | None, two_ends: bool) -> Pair:
    """Two texts as one: by the file's template; else each with what a text ends with, the document being the second segment, as
    `transformers` joins a pair for BERT ([CLS] query [SEP] document [SEP]). two_ends: between the two, as RoBERTa and its kind have it."""
    if template is not None:
        text = "".join({QUERY: query, DOCUMENT: document}.get(part, part) for part in PLACES.split(template))
        ids = tokenizer.encode(text, parse_special=True)
        return ids, [0] * len(ids)
    first = tokenizer.encode(query)
    second = tokenizer.encode(document, add_bos=False, add_end=True)
    if two_ends and tokenizer.end is not None:
        second = [tokenizer.end, *second]
    return first + second, [0] * len(first) + [1] * len(second)
