"""Activations in eight bits: the device's layout, unit by unit, and the rounding."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from vkback import quants
from vkback.quants import QuantShapeError


def unit_of(row: bytes, k: int, u: int) -> tuple[float, list[int], list[int]]:
    """d, the 32 integers and the two sums of unit u, read as docs/weight_layout.md tells it."""
    units = -(-k // 32)
    first = struct.unpack_from("16b", row, 16 * u)
    second = struct.unpack_from("16b", row, 16 * (units + u))
    d, low, high = struct.unpack_from("<fhh", row, 32 * units + 8 * u)
    return d, [*first, *second], [low, high]


@pytest.mark.parametrize(("k", "stride"), [(32, 48), (64, 80), (96, 128), (33, 80), (4096, 5120)])
def test_stride(k: int, stride: int) -> None:
    assert quants.q8_1_stride(k) == stride


@pytest.mark.parametrize("k", [32, 96, 70])
def test_layout_rounding_and_sums(k: int) -> None:
    x = np.random.default_rng(k).standard_normal((3, k)).astype(np.float32)
    rows = quants.q8_1_quantize(x)
    assert rows.shape == (3, quants.q8_1_stride(k))
    padded = np.zeros((3, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    for n in range(3):
        for u in range(padded.shape[1] // 32):
            d, q, sums = unit_of(rows[n].tobytes(), k, u)
            v = padded[n, 32 * u : 32 * u + 32]
            assert np.float32(d) == np.abs(v).max() / np.float32(127)
            assert q == np.rint(v * (np.float32(1) / np.float32(d))).astype(int).tolist()
            assert sums == [sum(q[:16]), sum(q[16:])]
    assert not rows[:, -(-k // 32) * 40 :].any()


def test_dequantize_is_within_half_a_step() -> None:
    x = np.random.default_rng(4).standard_normal((5, 256)).astype(np.float32)
    got = quants.q8_1_dequantize(quants.q8_1_quantize(x), 256)
    step = np.abs(x.reshape(5, 8, 32)).max(axis=2) / 127
    # Half a step of rounding, and a few float32 roundings of values up to 127 steps.
    assert (np.abs(got - x).reshape(5, 8, 32) <= step[:, :, None] * (0.5 + 127 * 2**-22)).all()


def test_halves_round_to_even_and_the_ends_are_127() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, -2.5, -127, 126.5]
    _, q, _ = unit_of(quants.q8_1_quantize(x)[0].tobytes(), 32, 0)
    assert q[:6] == [127, 0, 2, -2, -127, 126]


def test_largest_sums_are_exact() -> None:
    rows = quants.q8_1_quantize(np.full((1, 32), -0.3, np.float32))
    assert unit_of(rows[0].tobytes(), 32, 0)[2] == [-2032, -2032]


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-37])
def test_zero_and_vanishing_units_become_zeros(value: float) -> None:
    x = np.full((1, 32), value, np.float32)
    assert not quants.q8_1_quantize(x).any()


def test_infinity_shows_as_nan() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 3] = np.inf
    got = quants.q8_1_dequantize(quants.q8_1_quantize(x), 64)
    assert np.isnan(got[0, :32]).all()
    assert not got[0, 32:].any()


def test_wrong_arrays_say_what_was_expected() -> None:
    with pytest.raises(QuantShapeError, match=r"expected float32 \[n, k\], got float32 \[32\]"):
        quants.q8_1_quantize(np.zeros(32, np.float32))
    with pytest.raises(QuantShapeError, match=r"rows of 64 values take 80 bytes, got an array \[1, 48\]"):
        quants.q8_1_dequantize(np.zeros((1, 48), np.uint8), 64)
