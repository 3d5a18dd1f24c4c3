"""Views: part of a tensor's values, in another order, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from vkback.graph import Tensor
from vkback.ops.case import Array
from vkback.ops.lowering import PlanError

ORDERS = ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3))
"""Of four axes, rows and batches exchanged; the values of a row stay together."""
TRANSPOSED = ((0, 1, 3, 2), (3, 2, 1, 0))
"""Here they do not."""


@dataclass(frozen=True)
class View:
    """Value [i, j, ...] lies at offset + i * strides[0] + j * strides[1] + ... of the tensor's values; all counted in values."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> View:
        """All values of a tensor as they lie."""
        return cls(0, shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def four(self) -> View:
        """The same with four axes, those in front of length 1."""
        missing = 4 - len(self.shape)
        return View(self.offset, (1,) * missing + self.shape, (0,) * missing + self.strides)

    def of(self, values: Array) -> Array:
        """The view of an array, whatever its shape; writing to it writes to the array where that is contiguous."""
        flat = values.reshape(-1)[self.offset :]
        return np.lib.stride_tricks.as_strided(flat, self.shape, [s * flat.itemsize for s in self.strides])

    def check(self, tensor: Tensor, op: str) -> None:
        """Raises PlanError where the view leaves its tensor or has more than four axes."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if len(self.shape) > 4 or len(self.shape) != len(self.strides) or self.offset < 0 or min(self.strides, default=0) < 0:
            raise PlanError(f"[{op}] {tensor}: {self}: expected at most four axes, and no negative offset or stride")
        if last >= tensor.elements:
            raise PlanError(f"[{op}] {tensor}: {self} ends at value {last}, the tensor has {tensor.elements}")


def laid_out(shape: tuple[int, ...], order: tuple[int, ...] = (), *, gap: int = 0) -> tuple[tuple[int, ...], View]:
    """A tensor that holds values of this shape in another order, and the view that finds them there.

    order  axes from the slowest to the one whose neighbours lie together, default as they are
    gap    values that no reader needs, half of them in front of each row of that last axis and half behind it
    """
    order = order or tuple(range(len(shape)))
    inner = (*(shape[axis] for axis in order[:-1]), shape[order[-1]] + gap)
    steps = View.whole(inner).strides
    return inner, View(gap // 2, shape, tuple(steps[order.index(axis)] for axis in range(len(shape))))
