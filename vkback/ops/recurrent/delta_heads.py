"""Sizes of a gated delta net, and the family of its tuning rows."""

from __future__ import annotations

from vkback.ops.family import declare
from vkback.ops.recurrent.state_heads import StateHeads

declare(
    "delta_net",
    match={"n": "number", "n_head": "number", "dim": "number", "key": "number"},
    params={
        "kernel": ("scan", "chunks"),  # token by token; chunks of tokens by products of matrices
        "lanes": (1, 2, 4, 8, 16, 32),  # scan: threads that share a row of the state
        "rows": (1, 2, 4, 8, 16, 32, 64, 128),  # rows of a head in a workgroup; with the convolution all of them
        "per_thread": (1, 2, 4, 8),  # scan: rows of a thread
        "chunk": (16, 32, 64),  # chunks: tokens of a chunk
        "tokens": (1, 2, 4),  # chunks: tokens of a thread
    },
)

LENGTH_EPS = 1e-6
"""Added to the square of a length of q or k."""


class Heads(StateHeads):
    """Sizes of a delta net, from its state and its number of groups."""

    @property
    def key(self) -> int:
        """Values of a key, and so of a row of the state."""
        return self.columns

    @property
    def width(self) -> int:
        """Of a row of qkv, z, alpha and beta."""
        return self.channels + self.inner + 2 * self.n
