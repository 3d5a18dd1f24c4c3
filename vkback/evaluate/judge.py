"""The verdict on one output: shape, finiteness, NMSE over the reference's energy, worst element over the reference's rms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.ops.case import Tolerance
from vkback.ops.op import OPS

Array = npt.NDArray[Any]


def ggml_limit(op: str) -> float:
    """NMSE that llama.cpp's test-backend-ops allows an op."""
    return OPS[op].ggml_nmse


@dataclass(frozen=True)
class Verdict:
    """ok, the two figures, and a text that says what was wrong and where."""

    ok: bool
    nmse: float
    worst: float
    text: str


def nmse(got: Array, want: Array) -> float:
    """Sum of squared errors over the reference's energy; 0/0 is 0, x/0 is infinite."""
    error = float(np.sum(np.square(got.astype(np.float64) - want.astype(np.float64))))
    energy = float(np.sum(np.square(want.astype(np.float64))))
    if energy == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / energy


def steps_of(values: Array) -> Array:
    """The step of Q8_1 at each value, [..., k]: the largest of its unit of 32, over 127."""
    k = values.shape[-1]
    units = np.zeros((*values.shape[:-1], -(-k // 32) * 32))
    units[..., :k] = np.abs(values)
    steps = units.reshape(*values.shape[:-1], -1, 32).max(axis=-1, keepdims=True) / 127
    return np.asarray(np.broadcast_to(steps, (*steps.shape[:-1], 32)).reshape(units.shape)[..., :k])


HALF_A_STEP = 0.501
"""Rounding to nearest is off by half a step at most, the quotient that is rounded by 127 times a few 2^-23, a thousandth of a step."""


def judge(got: Array, want: Array, tolerance: Tolerance, steps: Array | None = None) -> Verdict:
    """Compare a device output with its reference. steps: the output is stored in such steps, half of one is not counted as an error.

    Integers must be equal. Floats: same shape, finite exactly where the reference is finite, an all-zero reference needs an all-zero
    answer, NMSE and worst element within tolerance. One zeroed row in 4096 adds only about 2e-4 to NMSE, hence the second gate.
    """
    if got.shape != want.shape:
        return _failed(f"shape {got.shape}, expected {want.shape}")
    if np.issubdtype(want.dtype, np.integer):
        wrong = np.flatnonzero(got.ravel() != want.ravel())
        if wrong.size:
            i = int(wrong[0])
            return _failed(f"{wrong.size} of {want.size} differ, first at {_at(i, want)}: {got.ravel()[i]}, expected {want.ravel()[i]}")
        return Verdict(True, 0.0, 0.0, "equal")
    finite = np.isfinite(want)
    odd = np.flatnonzero(np.isfinite(got).ravel() != finite.ravel())
    if odd.size:
        i = int(odd[0])
        return _failed(
            f"{odd.size} of {want.size} not finite where they should be (or the reverse), first at {_at(i, want)}: {got.ravel()[i]}, "
            f"expected {want.ravel()[i]}"
        )
    # Where the reference is not finite, which non-finite value it is stays free.
    got = np.where(finite, got, 0.0)
    want = np.where(finite, want, 0.0)
    if steps is not None:
        off = got.astype(np.float64) - want
        got = want + np.sign(off) * np.maximum(np.abs(off) - HALF_A_STEP * steps, 0.0)
    error = nmse(got, want)
    rms = float(np.sqrt(np.mean(np.square(want.astype(np.float64))))) if want.size else 0.0
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).ravel()
    index = int(np.argmax(difference)) if difference.size else 0
    worst = (float(difference[index]) / rms if rms else float(np.inf if difference.any() else 0.0)) if difference.size else 0.0
    ok = error <= tolerance.nmse and worst <= tolerance.worst
    text = (
        f"NMSE {error:.1e} {'<=' if error <= tolerance.nmse else '>'} {tolerance.nmse:.0e}, "
        f"worst {worst:.1e} {'<=' if worst <= tolerance.worst else '>'} {tolerance.worst:.0e}"
    )
    if not ok:
        text += f" at {_at(index, want)}: {got.ravel()[index]:.6g}, expected {want.ravel()[index]:.6g}; "
        text += _bad_rows(got, want, rms * tolerance.worst)
    return Verdict(ok, error, worst, text)


def fault(got: Array, compared: Array, want: Array, tolerance: Tolerance) -> str:
    """What is wrong with an output of which a part is compared with the reference, all of which must be finite; "" when it is right."""
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} of {got.size} values are not finite"
    verdict = judge(compared, want, tolerance)
    return "" if verdict.ok else verdict.text


def _failed(text: str) -> Verdict:
    return Verdict(False, float("inf"), float("inf"), text)


def _at(flat: int, array: Array) -> str:
    return str([int(i) for i in np.unravel_index(flat, array.shape)])


def _bad_rows(got: Array, want: Array, limit: float) -> str:
    rows = np.flatnonzero((np.abs(got - want) > limit).reshape(-1, want.shape[-1] if want.ndim else 1).any(axis=1))
    shown = ", ".join(map(str, rows[:8])) + (", ..." if rows.size > 8 else "")
    return f"rows with errors: {shown or 'none beyond the limit'} ({rows.size} in all)"
