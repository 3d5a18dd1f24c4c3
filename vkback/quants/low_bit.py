"""One and two bits a weight under one scale.

Q1_0  d f16 | bits 16: bit j of the 128                    weight = d or -d                blocks of 128
Q2_0  d f16 | qs 16, 2 bits, value j at bits 2j            weight = d (q - 1)              blocks of 64
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkback.quants import search
from vkback.quants.bits import HIGH_BITS, TWO_BITS, Rearrange
from vkback.quants.codec import F32, U8, Codec, Weights, half, packed, put_half, random_half
from vkback.quants.legacy import round_half_away
from vkback.quants.quant_type import Plane, QuantType


class _Q10(Codec):
    block = packed(("d", 2), ("qs", 16))
    type = QuantType("Q1_0", 41, 128, block.itemsize, (Plane("qs", 4), Plane("d", 2, 128)), rare=True)
    moves: Mapping[str, Rearrange] = {"qs": HIGH_BITS}

    def decode(self, blocks: U8) -> F32:
        d = half(blocks[:, :2])
        plus = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=1, bitorder="little") != 0
        weight: F32 = np.where(plus, d, -d)
        return weight

    def encode(self, x: F32, weights: Weights) -> U8:
        """The mean magnitude, which has the least squared error; importances weigh it."""
        size = np.abs(x)
        if weights is None:
            # One value after another, as the reference adds them: numpy's own sum rounds otherwise.
            d = np.cumsum(size, axis=1, dtype=np.float32)[:, -1] / np.float32(size.shape[1])
        else:
            d = (size * weights).sum(axis=1) / weights.sum(axis=1)
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        put_half(blocks[:, :2], d)
        blocks[:, 2:] = np.packbits(x >= 0, axis=1, bitorder="little")
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale)


class _Q20(Codec):
    block = packed(("d", 2), ("qs", 16))
    type = QuantType("Q2_0", 42, 64, block.itemsize, (Plane("qs", 8), Plane("d", 2, 64)), rare=True)
    moves: Mapping[str, Rearrange] = {"qs": TWO_BITS}

    def decode(self, blocks: U8) -> F32:
        q = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
        weight: F32 = half(blocks[:, :2]) * (q.reshape(len(blocks), 64).astype(np.int8) - np.int8(1)).astype(np.float32)
        return weight

    def encode(self, x: F32, weights: Weights) -> U8:
        """The largest magnitude is a step, as in TQ2_0; importances do not enter."""
        d = np.abs(x).max(axis=1)
        q = np.clip(round_half_away(x * search.reciprocal(d)[:, None]) + np.float32(1), 0, 3).astype(np.uint8).reshape(len(x), 16, 4)
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        put_half(blocks[:, :2], d)
        blocks[:, 2:] = q[..., 0] | q[..., 1] << np.uint8(2) | q[..., 2] << np.uint8(4) | q[..., 3] << np.uint8(6)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        # 3 decodes to 2 d, which the encoder does not write: it becomes 1, and the mean of the codes stays at 0.
        b = self.fields(blocks)
        qs = b["qs"]
        qs &= ~(qs >> np.uint8(1) & np.uint8(0x55) & qs) << np.uint8(1) | np.uint8(0x55)
        random_half(b["d"], scale)


CODECS: tuple[Codec, ...] = (_Q10(), _Q20())
