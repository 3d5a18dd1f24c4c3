"""Sizes of a Mamba-2 recurrence, and the family of its tuning rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkback.graph import Tensor
from vkback.ops.family import declare

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


@dataclass(frozen=True)
class Heads:
    """Sizes of a recurrence, from its state and its number of groups."""

    n: int
    dim: int
    d_state: int
    n_group: int

    @classmethod
    def of(cls, state: Tensor, params: Mapping[str, Any]) -> Heads:
        *_, n, dim, d_state = state.shape
        return cls(n, dim, d_state, int(params["n_group"]))

    @property
    def inner(self) -> int:
        return self.n * self.dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.n_group * self.d_state

    @property
    def width(self) -> int:
        """Of a row of zx."""
        return self.inner + self.channels + self.n

    @property
    def state_bytes(self) -> int:
        """Of one slot."""
        return 4 * self.inner * self.d_state
