"""Finding entries of a vector codebook, and the steps under which they fit values with the least squared error.

The error of a vector x under a step t and an entry g is sum(w (x - t g)^2), w = 1 unless the caller gives importances: w x^2 aside,
which no choice changes, t^2 (w . g^2) - 2 t (w x . g). Both products are made once for all entries, so that trying a step costs one look
over them. Every step of a fan is tried, the step that is best for the entries met is solved for, and the best is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.quants.codec import F32, U8, Weights, as_half
from vkback.quants.search import reciprocal

Indices = npt.NDArray[np.intp]


NOTABLY = np.float32(1.00001)
"""By how much a fit must be better to replace another: several steps fit a constant group, and all groups shall take the same one."""


class Products:
    """Of vectors x [groups, vectors, n] (weights alike) with all entries [entries, n] of a codebook."""

    def __init__(self, x: F32, weights: Weights, book: F32) -> None:
        squares: F32 = np.square(book)
        self.widest: F32 = np.abs(x).max(axis=(1, 2))
        weighted: F32 = x if weights is None else x * weights
        self.linear: F32 = weighted @ book.T
        self.square: F32
        self.square = np.broadcast_to(squares.sum(axis=1), self.linear.shape) if weights is None else weights @ squares.T

    def nearest(self, steps: F32) -> Indices:
        """[groups] -> the best entries [groups, vectors]."""
        cost = self.square * steps[:, None, None]
        cost -= 2 * self.linear
        found: Indices = cost.argmin(axis=2)
        return found

    def fit(self, targets: Sequence[float]) -> tuple[F32, F32]:
        """Steps [groups], and the squared error that they save. targets: what the largest value of a group may be, in steps."""
        best, gain = np.zeros_like(self.widest), np.zeros_like(self.widest)
        for target in (*targets, None, None):
            steps = best if target is None else self.widest / np.float32(target)
            index = self.nearest(steps)[:, :, None]
            linear = np.take_along_axis(self.linear, index, 2).sum(axis=(1, 2))
            square = np.take_along_axis(self.square, index, 2).sum(axis=(1, 2))
            fitted = linear * reciprocal(square)
            better = (linear * fitted > NOTABLY * gain) & (fitted > 0)
            best, gain = np.where(better, fitted, best), np.where(better, linear * fitted, gain)
        return best, gain


def two_levels(steps: F32, least: float, each: float, top: int) -> tuple[F32, U8, F32]:
    """d [n] and s [n, groups], 0..top, for which d (least + each s) are about the steps [n, groups]; and what they are then."""
    d = as_half(steps.max(axis=1) / np.float32(least + each * top))
    s = np.clip(np.rint((steps * reciprocal(d)[:, None] - np.float32(least)) / np.float32(each)), 0, top)
    made: F32 = d[:, None] * (np.float32(least) + np.float32(each) * s)
    return d, s.astype(np.uint8), made


def magnitudes(x: F32, weights: Weights, even: bool) -> tuple[F32, U8]:
    """[n, values] -> what is left when signs are taken away, and signs [n, values / 8], a bit each. even: of eight an even number is
    negative; where it is not, the value whose sign costs least keeps a wrong one, and is below 0."""
    negative = np.signbit(x)
    size = np.abs(x)
    if even:
        eights = negative.reshape(-1, 8)
        cost = np.square(x) if weights is None else np.square(x) * weights
        odd = np.flatnonzero(eights.sum(axis=1) & 1)
        at = cost.reshape(-1, 8)[odd].argmin(axis=1)
        eights[odd, at] ^= True
        size.reshape(-1, 8)[odd, at] *= -1
    return size, np.packbits(negative, axis=1, bitorder="little")


def bits_together(values: npt.NDArray[Any], shifts: Sequence[int], dtype: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    """[n, m * len(shifts)] -> [n, m]: value i of each run at bit shifts[i]."""
    runs = values.astype(dtype).reshape(len(values), -1, len(shifts))
    together: npt.NDArray[Any] = np.bitwise_or.reduce(runs << np.array(shifts, dtype), axis=2)
    return together
