"""Attention temperatures: with `attention.temperature_scale` s and a length l, Q of the token at position p is multiplied by
1 + s ln(1 + floor((p + offset) / l)), from a table that is made when the file is opened. offset is 0 or, of Llama 4, 1."""

from __future__ import annotations

import numpy as np

from vkback.gguf.file import GgufError, GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.builder import GraphBuilder

TEMPERATURE_SCALE, TEMPERATURE_LENGTH = "attention.temperature_scale", "attention.temperature_length"

TEMPERATURES = "attn_temperatures"
"""The table's name: F32 [context_length, 1]."""

TEMPERATURE = "attn_temperature"
"""What is read from it for the tokens of a graph."""

MAX_TEMPERATURES = 1 << 24
"""Rows of the table: 64 MiB."""


def steps_of(m: Metadata) -> int:
    """l above by its key, or else the context before YaRN stretched it; 0 where the file has neither."""
    return m.count(TEMPERATURE_LENGTH, 0, least=0) or m.count("rope.scaling.original_context_length", 0, least=0)


def with_temperatures(f: GgufFile, m: Metadata, length: int, *, default: float = 0.0, offset: int = 0) -> GgufFile:
    """The file with the table, where it has temperatures other than 1 in its trained context. length: l above; default: s of a file without
    its key. Raises GgufError."""
    scale = m.positive_or(TEMPERATURE_SCALE, default)
    if scale and not length:
        raise m.fail(TEMPERATURE_LENGTH, length, f"at least 1, since {TEMPERATURE_SCALE} is {scale:g}")
    rows = m.count("context_length")
    if not scale or length >= rows + offset:
        return f
    if rows > MAX_TEMPERATURES:
        raise m.fail("context_length", rows, f"at most {MAX_TEMPERATURES} with {TEMPERATURE_SCALE}")
    steps = (np.arange(rows, dtype=np.float64)[:, None] + offset) // length
    return f.with_made(TEMPERATURES, (1.0 + scale * np.log1p(steps)).astype(np.float32))


def tempered(b: GraphBuilder, q: Tensor, il: int, length: int, *, offset: int = 0) -> Tensor:
    """Q of layer `il`, [n, n_head * dim_k], times the temperatures of the tokens' positions, where the cache has rows whose temperature is
    not 1. length, offset: as of `with_temperatures`."""
    if not b.hp.has_weight(TEMPERATURES) or b.n_ctx + offset <= length:
        return q
    if b.n_ctx > b.hp.n_ctx_train:
        raise GgufError(
            f"[gguf] {b.hp.path}: a context of {b.n_ctx} tokens, but {TEMPERATURE_SCALE} is defined up to the trained context of "
            f"{b.hp.n_ctx_train}; ask for at most that many (--ctx {b.hp.n_ctx_train})"
        )
    table = b.hp.weight(TEMPERATURES, (b.hp.n_ctx_train, 1))
    found = next((node.outputs[0] for node in b.graph.nodes if node.name == TEMPERATURE), None)
    temperature = found or b.graph.emit("GET_ROWS", TEMPERATURE, "F32", (b.n, 1), (table, b.pos))
    return b.graph.emit("MUL", f"q_tempered-{il}", "F32", q.shape, (q, temperature))
