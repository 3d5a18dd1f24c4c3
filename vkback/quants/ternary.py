"""Ternary formats: weights d * (-1, 0 or 1) in super-blocks of 256.

TQ2_0  qs 64: byte 32h + l, bits 2s hold value 128h + 32s + l | d f16
TQ1_0  five weights a byte, in base 3 | d f16. A byte is the fraction of its five digits, first digit first, in 256ths, rounded up.
       Bytes 0..31: digit m of byte l is value 32m + l.   Bytes 32..47: digit m of byte 32 + l is value 160 + 16m + l.
       Bytes 48..51: digit m (of four) of byte 48 + l is value 240 + 4m + l.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkback.quants import search
from vkback.quants.bits import CRUMBS, Rearrange
from vkback.quants.codec import F32, U8, Codec, Weights, half, packed, put_half, random_half
from vkback.quants.k_quants import SUPER, crumbs, put_crumbs
from vkback.quants.legacy import round_half_away
from vkback.quants.quant_type import Plane, QuantType

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def _digits(field: U8, count: int) -> U8:
    """[n, m] -> [n, count * m], the first digit of all bytes, then the second...: shifting a digit out is multiplying by 3 mod 256."""
    rest: U8 = field[:, None, :] * _POWERS[:count, None]
    digits: U8 = (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return digits.reshape(len(field), -1)


def _ternary(x: F32) -> tuple[F32, U8]:
    """The largest magnitude of each block, and its values as digits 0, 1 or 2. Importances do not enter."""
    d = np.abs(x).max(axis=1)
    digits: U8 = (round_half_away(x * search.reciprocal(d)[:, None]) + np.float32(1)).astype(np.uint8)
    return d, digits


def _put_digits(field: U8, digits: U8, count: int) -> None:
    """Inverse of `_digits`."""
    total = np.zeros(field.shape, np.uint16)
    for m in range(5):
        total *= np.uint16(3)
        if m < count:
            total += digits.reshape(len(field), count, -1)[:, m]
    field[...] = (total * np.uint16(256) + np.uint16(242)) // np.uint16(243)


class _TQ10(Codec):
    block = packed(("qs0", 16), ("qs1", 16), ("qs2", 16), ("qh", 4), ("d", 2))
    type = QuantType(
        "TQ1_0",
        34,
        SUPER,
        block.itemsize,
        (Plane("qs0", 16, SUPER), Plane("qs1", 16, SUPER), Plane("qs2", 16, SUPER), Plane("qh", 4, SUPER), Plane("d", 2, SUPER)),
        "ternary",
        rare=True,
    )

    def decode(self, blocks: U8) -> F32:
        q = np.concatenate([_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)], axis=1)
        return half(blocks[:, 52:]) * (q.astype(np.int8) - np.int8(1)).astype(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        d, q = _ternary(x)
        for field, first, last, count in ((slice(0, 32), 0, 160, 5), (slice(32, 48), 160, 240, 5), (slice(48, 52), 240, 256, 4)):
            _put_digits(blocks[:, field], q[:, first:last], count)
        put_half(blocks[:, 52:], d)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale)


class _TQ20(Codec):
    block = packed(("qs", 64), ("d", 2))
    type = QuantType("TQ2_0", 35, SUPER, block.itemsize, (Plane("qs", 8), Plane("d", 2, SUPER)), "ternary", rare=True)
    moves: Mapping[str, Rearrange] = {"qs": CRUMBS}

    def decode(self, blocks: U8) -> F32:
        return half(blocks[:, 64:]) * (crumbs(blocks[:, :64]).astype(np.int8) - np.int8(1)).astype(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        d, q = _ternary(x)
        put_crumbs(blocks[:, :64], q)
        put_half(blocks[:, 64:], d)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        # 3 would decode to 2 d, which no quantizer writes: it becomes 1, and the codes 0, 1, 2 stay.
        b = self.fields(blocks)
        qs = b["qs"]
        qs &= ~(qs >> np.uint8(1) & np.uint8(0x55) & qs) << np.uint8(1) | np.uint8(0x55)
        random_half(b["d"], scale)


CODECS: tuple[Codec, ...] = (_TQ10(), _TQ20())
