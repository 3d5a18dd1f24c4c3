"""Sizes of a Mamba-2 recurrence, and the family of its tuning rows."""

from __future__ import annotations

from vkback.ops.family import declare
from vkback.ops.recurrent.state_heads import StateHeads

declare(
    "ssm_scan",
    match={"n": "number", "n_head": "number", "head_dim": "number", "d_state": "number"},
    params={
        "kernel": ("scan", "chunks"),  # token by token; chunks of tokens by products of matrices
        "lanes": (1, 2, 4, 8, 16, 32),  # scan: threads that share a row of the state
        "rows": (1, 2, 4, 8, 16, 32, 64),  # rows of a head in a workgroup
        "chunk": (16, 32, 64),  # chunks: tokens of a chunk
        "tokens": (1, 2, 4, 8),  # chunks: tokens of a thread
        "columns": (16, 32, 64, 128),  # chunks: values of a row of the state in a workgroup
    },
)


class Heads(StateHeads):
    """Sizes of a Mamba-2 recurrence, from its state and its number of groups."""

    @property
    def d_state(self) -> int:
        """Values of a row of the state."""
        return self.columns

    @property
    def width(self) -> int:
        """Of a row of zx."""
        return self.inner + self.channels + self.n
