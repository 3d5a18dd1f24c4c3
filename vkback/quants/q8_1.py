"""Activations in eight bits, in the device's layout.

A row of k values, k rounded up to 32 with zeros: for every unit 16 bytes (int8 of values 0..15); then for every unit 16 bytes (values
16..31); then for every unit 8 bytes: d f32 and two int16, the sums of the int8 of each half.
Rows start on 16 bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vkback.quants.quant_type import UNIT, QuantShapeError

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

SMALLEST_STEP = np.float32(2.0**-126)
"""Below it 1/d is not a number every shader can hold, and devices may flush it: such a unit becomes zeros."""


def q8_1_stride(k: int) -> int:
    """Bytes from one row of k values to the next."""
    units = -(-k // UNIT)
    return (units * 40 + 15) // 16 * 16


def _planes(rows: U8, units: int) -> tuple[U8, U8, U8]:
    """Views [n, units, 16], [n, units, 16], [n, units, 8] of the rows."""
    n = len(rows)
    a, b, c = 16 * units, 32 * units, 40 * units
    return rows[:, :a].reshape(n, units, 16), rows[:, a:b].reshape(n, units, 16), rows[:, b:c].reshape(n, units, 8)


def q8_1_quantize(x: npt.NDArray[np.float32]) -> U8:
    """[n, k] float32 -> [n, q8_1_stride(k)] bytes; every step in float32, as a shader does it.

    d = max|x| / 127 of the unit, q = roundEven(x * (1 / d)) in -127..127. A unit with an infinity or NaN decodes to NaN.
    """
    if x.ndim != 2 or x.dtype != np.float32:
        raise QuantShapeError(f"[q8_1] expected float32 [n, k], got {x.dtype} {list(x.shape)}")
    n, k = x.shape
    units = -(-k // UNIT)
    padded = np.zeros((n, units * UNIT), np.float32)
    padded[:, :k] = x
    v = padded.reshape(n, units, UNIT)
    d = np.abs(v).max(axis=2) / np.float32(127)
    d[d < SMALLEST_STEP] = 0
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    with np.errstate(invalid="ignore"):
        q = np.nan_to_num(np.clip(np.rint(v * inverse[:, :, None]), -127, 127)).astype(np.int8)
    rows = np.zeros((n, q8_1_stride(k)), np.uint8)
    first, second, tail = _planes(rows, units)
    first[...] = q[:, :, :16].view(np.uint8)
    second[...] = q[:, :, 16:].view(np.uint8)
    tail[:, :, :4] = d[:, :, None].view(np.uint8)
    sums = q.reshape(n, units, 2, 16).sum(axis=3, dtype=np.int32)
    tail[:, :, 4:] = sums.astype(np.int16).view(np.uint8)
    return rows


def q8_1_wrong_sums(rows: U8, k: int) -> npt.NDArray[np.int64]:
    """[row, unit] of each unit whose stored sums are not those of its int8; units whose step is no number do not count."""
    units = -(-k // UNIT)
    first, second, tail = _planes(rows, units)
    d = np.ascontiguousarray(tail[:, :, :4]).view(np.float32)[:, :, 0]
    stored = np.ascontiguousarray(tail[:, :, 4:]).view(np.int16)
    sums = np.stack([half.view(np.int8).sum(axis=2, dtype=np.int32) for half in (first, second)], axis=2)
    return np.argwhere((stored != sums).any(axis=2) & np.isfinite(d))


def q8_1_dequantize(rows: U8, k: int) -> F32:
    """[n, q8_1_stride(k)] bytes -> [n, k] float32."""
    if rows.ndim != 2 or rows.shape[1] != q8_1_stride(k):
        raise QuantShapeError(f"[q8_1] rows of {k} values take {q8_1_stride(k)} bytes, got an array {list(rows.shape)}")
    units = -(-k // UNIT)
    first, second, tail = _planes(rows, units)
    d = np.ascontiguousarray(tail[:, :, :4]).view(np.float32)
    q = np.concatenate([first, second], axis=2).view(np.int8)
    with np.errstate(invalid="ignore"):
        values: F32 = d * q.astype(np.float32)
    return values.reshape(len(rows), units * UNIT)[:, :k]
