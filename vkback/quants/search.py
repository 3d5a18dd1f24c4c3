"""Finding scales: which step (and offset) makes the levels of a type fit a group of weights with the least squared error.

The error is sum(w * (x - x')^2) with w = 1 unless the caller gives importances. Arrays are value-major: x is [values, groups], so that sums
run along contiguous memory; results are [groups]. Every search tries a fan of steps, solves least squares for each rounding it
meets (once the levels are fixed, the best step and offset are a linear problem), keeps the best, and ends with a few rounds of rounding and
solving in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vkback.quants.codec import F32, Weights, as_half

ROUNDS, LEVEL_ROUNDS = 2, 3
"""Rounds of rounding and solving at the end of a search for one step, and for scales that are integers of a super-block's."""

Rounding = Callable[[F32], F32]
"""Values in steps -> the nearest level, in steps. May overwrite its argument."""


def integers(low: int, high: int) -> Rounding:
    """Levels low..high."""

    def nearest(v: F32) -> F32:
        np.rint(v, out=v)
        return np.clip(v, low, high, out=v)

    return nearest


@dataclass(frozen=True)
class Table:
    """Integer levels in rising order that are not evenly spaced. Calling it rounds to the nearest, `index` says which one that is."""

    to_index: npt.NDArray[np.uint8]
    to_level: F32

    @classmethod
    def of(cls, levels: Sequence[int]) -> Table:
        rising = np.array(levels)
        # Middles between integers are multiples of a half, so floor(2v) decides exactly.
        middles = rising[1:] + rising[:-1]
        index = np.searchsorted(middles, np.arange(-256, 256), side="right")
        return cls(index.astype(np.uint8), rising[index].astype(np.float32))

    @staticmethod
    def _slot(v: F32) -> npt.NDArray[np.int32]:
        np.multiply(v, np.float32(2), out=v)
        np.clip(v, -256, 255, out=v)
        return np.floor(v, out=v).astype(np.int32) + 256

    def __call__(self, v: F32) -> F32:
        return self.to_level[self._slot(v)]

    def index(self, v: F32) -> npt.NDArray[np.uint8]:
        return self.to_index[self._slot(v)]


def reciprocal(v: F32) -> F32:
    """1/v, and 0 where v is 0 or so small that 1/v is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        r = np.float32(1) / v
    r[~np.isfinite(r)] = 0
    return r


def _dot(a: F32, b: F32, weights: Weights) -> F32:
    product = a * b
    if weights is not None:
        product *= weights
    total: F32 = product.sum(axis=0)
    return total


def _inverse_determinant(a: F32, b: F32, c: F32) -> F32:
    """1 / (a b - c c), and 0 where the difference is rounding noise: the two unknowns cannot be separated."""
    product = a * b
    determinant = product - c * c
    determinant[determinant <= np.float32(4e-6) * product] = 0
    return reciprocal(determinant)


def extreme(x: F32) -> F32:
    """The element of largest magnitude of each group, with its sign."""
    top, bottom = x.max(axis=0), x.min(axis=0)
    chosen: F32 = np.where(top > -bottom, top, bottom)
    return chosen


def scale(x: F32, weights: Weights, nearest: Rounding, targets: Sequence[float]) -> F32:
    """Step d of each group for x = d * level. `targets` are the level positions tried for the group's extreme element."""
    inverse = reciprocal(extreme(x))
    best_gain = np.zeros_like(inverse)
    best = np.zeros_like(inverse)

    def consider(inverse_step: F32) -> None:
        level = nearest(x * inverse_step)
        xl, ll = _dot(x, level, weights), _dot(level, level, weights)
        step = xl * reciprocal(ll)
        gain = xl * step
        np.copyto(best, step, where=gain > best_gain)
        np.maximum(best_gain, gain, out=best_gain)

    for target in targets:
        consider(inverse * np.float32(target))
    for _ in range(ROUNDS):
        consider(reciprocal(best))
    return best


def affine(x: F32, weights: Weights, top: int, spread: Sequence[float], free_offset: bool) -> tuple[F32, F32]:
    """Step d and offset o of each group for x = d * q + o, q in 0..top; o <= 0 unless `free_offset`.

    `spread` are the amounts added to `top` for the steps tried: (max - min) / (top + s).
    """
    nearest = integers(0, top)
    one = np.ones_like(x) if weights is None else weights
    sw = one.sum(axis=0)
    sx = _dot(x, one, None)
    high, low = x.max(axis=0), x.min(axis=0)
    if not free_offset:
        low = np.minimum(low, np.float32(0))
    best_step = np.zeros_like(sw)
    best_offset = sx / sw if free_offset else np.minimum(sx / sw, np.float32(0))
    best_error = _dot(x - best_offset, x - best_offset, weights)

    def consider(inverse_step: F32, offset: F32) -> None:
        q = nearest((x - offset) * inverse_step)
        sq, sqq, sxq = _dot(q, one, None), _dot(q, q, weights), _dot(x, q, weights)
        inverse_det = _inverse_determinant(sw, sqq, sq)
        step = (sw * sxq - sx * sq) * inverse_det
        new_offset = (sqq * sx - sq * sxq) * inverse_det
        if not free_offset:
            # The best offset is not allowed: fit the step alone, through zero.
            clamped = new_offset > 0
            np.copyto(step, sxq * reciprocal(sqq), where=clamped)
            np.copyto(new_offset, np.float32(0), where=clamped)
        # All codes equal: the two cannot be told apart, so the offset stays.
        singular = inverse_det == 0
        np.copyto(step, (sxq - offset * sq) * reciprocal(sqq), where=singular)
        np.copyto(new_offset, offset, where=singular)
        q *= step
        q += new_offset
        q -= x
        error = _dot(q, q, weights)
        better = (error < best_error) & (step > 0)
        np.copyto(best_step, step, where=better)
        np.copyto(best_offset, new_offset, where=better)
        np.copyto(best_error, error, where=better)

    inverse_range = reciprocal(high - low)
    for s in spread:
        consider(inverse_range * np.float32(top + s), low)
    for _ in range(ROUNDS):
        inverse_step, offset = reciprocal(best_step), best_offset.copy()
        for stretch in (1.0, 0.97, 1.03, 0.94, 1.06):
            consider(inverse_step * np.float32(stretch), offset)
    return best_step, best_offset


def two_level_scale(x: F32, weights: Weights, nearest: Rounding, targets: Sequence[float], scale_range: tuple[int, int]) -> tuple[F32, F32]:
    """Super-blocks x = d * s * level: d an f16 per super-block, s an integer in `scale_range` per group.

    x and weights are [values, groups, n]; returns d [n] and s [groups, n].
    """
    low, high = scale_range
    steps = scale(x, weights, nearest, targets)
    best_d = np.zeros(x.shape[2], np.float32)
    best_s = np.zeros(x.shape[1:], np.float32)
    best_error = np.full(x.shape[2], np.inf, np.float32)
    widest = extreme(steps)
    for position in (low, low + 1, high):
        d = as_half(widest / np.float32(position))
        s = np.clip(np.rint(steps * reciprocal(d)), low, high)
        for _ in range(LEVEL_ROUNDS):
            error = np.full(s.shape, np.inf, np.float32)
            chosen, xl, ll = np.zeros_like(s), np.zeros_like(s), np.zeros_like(s)
            for shift in (0, -1, 1):
                tried = np.clip(s + np.float32(shift), low, high)
                step = d * tried
                level = nearest(x * reciprocal(step))
                off = level * step
                off -= x
                e = _dot(off, off, weights)
                better = e < error
                for kept, new in ((error, e), (chosen, tried), (xl, _dot(x, level, weights)), (ll, _dot(level, level, weights))):
                    np.copyto(kept, new, where=better)
            s = chosen
            total = error.sum(axis=0)
            better = total < best_error
            for kept, new in ((best_error, total), (best_d, d), (best_s, s)):
                np.copyto(kept, new, where=better)
            d = as_half((s * xl).sum(axis=0) * reciprocal((s * s * ll).sum(axis=0)))
    return best_d, best_s


def two_level_affine(x: F32, weights: Weights, top: int, spread: Sequence[float], scale_top: int) -> tuple[F32, F32, F32, F32]:
    """Super-blocks x = d * s * q - dmin * m: d and dmin f16 per super-block, s and m integers in 0..scale_top per group, q in 0..top.

    x and weights are [values, groups, n]; returns d [n], dmin [n], s [groups, n], m [groups, n].
    """
    nearest = integers(0, top)
    one = np.ones_like(x) if weights is None else weights
    sw = one.sum(axis=0)
    sx = _dot(x, one, None)
    steps, offsets = affine(x, weights, top, spread, free_offset=False)
    groups, n = steps.shape
    best = [np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros((groups, n), np.float32), np.zeros((groups, n), np.float32)]
    best_error = np.full(n, np.inf, np.float32)
    d = as_half(steps.max(axis=0) / np.float32(scale_top))
    dmin = as_half(-offsets.min(axis=0) / np.float32(scale_top))
    s = np.clip(np.rint(steps * reciprocal(d)), 0, scale_top)
    m = np.clip(np.rint(-offsets * reciprocal(dmin)), 0, scale_top)
    for _ in range(LEVEL_ROUNDS):
        error = np.full((groups, n), np.inf, np.float32)
        chosen = [np.zeros_like(s) for _ in range(5)]
        for m_shift in (0, -1, 1):
            tried_m = np.clip(m + np.float32(m_shift), 0, scale_top)
            lifted = x + dmin * tried_m
            for s_shift in (0, -1, 1):
                tried_s = np.clip(s + np.float32(s_shift), 0, scale_top)
                step = d * tried_s
                q = nearest(lifted * reciprocal(step))
                off = q * step
                off -= lifted
                e = _dot(off, off, weights)
                better = e < error
                np.copyto(error, e, where=better)
                sums = (tried_s, tried_m, _dot(x, q, weights), _dot(q, q, weights), _dot(q, one, None))
                for kept, new in zip(chosen, sums, strict=True):
                    np.copyto(kept, new, where=better)
        s, m, sxq, sqq, sq = chosen
        total = error.sum(axis=0)
        better = total < best_error
        np.copyto(best_error, total, where=better)
        for kept, new in zip(best, (d, dmin, s, m), strict=True):
            np.copyto(kept, new, where=better)
        # Least squares for (d, dmin) of the super-block with everything else fixed.
        aa, ab, bb = (s * s * sqq).sum(axis=0), (s * m * sq).sum(axis=0), (m * m * sw).sum(axis=0)
        ax, bx = (s * sxq).sum(axis=0), (m * sx).sum(axis=0)
        inverse_det = _inverse_determinant(aa, bb, ab)
        solvable = inverse_det > 0
        d = as_half(np.where(solvable, np.maximum((bb * ax - ab * bx) * inverse_det, 0), (ax + dmin * ab) * reciprocal(aa)))
        dmin = as_half(np.where(solvable, np.maximum((ab * ax - aa * bx) * inverse_det, 0), dmin))
    return best[0], best[1], best[2], best[3]
