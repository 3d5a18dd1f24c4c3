"""Sizes that recurrences have in common whose state is a matrix for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vkback.graph import Tensor


@dataclass(frozen=True)
class StateHeads:
    """Heads of a recurrence.

    n        heads
    dim      rows of a head's state, and values that it gives a token
    columns  values of a row of the state
    n_group  groups, whose heads share what is as long as a row: k and q of a delta net, B and C of Mamba-2
    """

    n: int
    dim: int
    columns: int
    n_group: int

    @classmethod
    def of(cls, state: Tensor, params: Mapping[str, Any]) -> Self:
        """state: [..., n, dim, columns]; params: have n_group."""
        *_, n, dim, columns = state.shape
        return cls(n, dim, columns, int(params["n_group"]))

    @property
    def inner(self) -> int:
        """Values of a token, of all heads."""
        return self.n * self.dim

    @property
    def channels(self) -> int:
        """Values of a token that go through the convolution."""
        return self.inner + 2 * self.n_group * self.columns

    @property
    def state_bytes(self) -> int:
        """Of one slot."""
        return 4 * self.inner * self.columns
