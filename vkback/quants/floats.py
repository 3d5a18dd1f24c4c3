"""Plain floats: F32, F16 and BF16 (the upper half of an F32). A block is one value.

On the device a unit of 32 values lies in parts of 16 bytes.
"""

from __future__ import annotations

import numpy as np

from vkback.quants.codec import EXPONENT_OF_HALF, F32, LARGEST_HALF, U8, Codec, Limit, Weights, packed
from vkback.quants.quant_type import UNIT, Plane, QuantType

BITS_OF_65536 = 0x4780
"""As BF16, whose next number below it is within the range of f16."""


class _Floats(Codec):
    def __init__(self, name: str, ggml_id: int, nbytes: int) -> None:
        parts = tuple((f"v{p}", 16) for p in range(UNIT * nbytes // 16))
        self.block = packed(*parts)
        self.type = QuantType(name, ggml_id, 1, nbytes, tuple(Plane(*part) for part in parts), "float", int_dot=False)

    def beyond_f16(self, blocks: U8) -> bool:
        return any(bool(limit.reached(blocks).any()) for limit in self.large_limits())


class _F32(_Floats):
    def unsound_limits(self) -> tuple[Limit, ...]:
        return (Limit(0, 4, 0x7F800000, 0x7F800000),)

    def large_limits(self) -> tuple[Limit, ...]:
        return (Limit(0, 4, 0x7FFFFFFF, int(LARGEST_HALF.view(np.uint32)) + 1),)

    def decode(self, blocks: U8) -> F32:
        return np.ascontiguousarray(blocks).view(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        return np.ascontiguousarray(x).view(np.uint8)

    def randomize(self, blocks: U8, scale: float) -> None:
        # Random fraction bits under the exponent of 1 are uniform in [1, 2).
        bits = blocks.view(np.uint32)
        bits &= np.uint32(0x007FFFFF)
        bits |= np.uint32(0x3F800000)
        values = blocks.view(np.float32)
        values -= np.float32(1.5)
        values *= np.float32(2 * scale)


class _F16(_Floats):
    def unsound_limits(self) -> tuple[Limit, ...]:
        return (Limit(0, 2, EXPONENT_OF_HALF, EXPONENT_OF_HALF),)

    def large_limits(self) -> tuple[Limit, ...]:
        return ()

    def decode(self, blocks: U8) -> F32:
        return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        return x.astype(np.float16).view(np.uint8)

    def randomize(self, blocks: U8, scale: float) -> None:
        values = blocks.view(np.int16).astype(np.float32)
        values *= np.float32(scale / 32768)
        blocks.view(np.float16)[...] = values


class _BF16(_Floats):
    def unsound_limits(self) -> tuple[Limit, ...]:
        return (Limit(0, 2, 0x7F80, 0x7F80),)

    def large_limits(self) -> tuple[Limit, ...]:
        return (Limit(0, 2, 0x7FFF, BITS_OF_65536),)

    def decode(self, blocks: U8) -> F32:
        bits = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        bits = np.ascontiguousarray(x).view(np.uint32)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        # To nearest even. Of a NaN, the upper half made quiet, so that it does not round to infinity.
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        upper = np.where(nan, bits | np.uint32(0x00400000), rounded) >> np.uint32(16)
        return upper.astype(np.uint16).view(np.uint8)

    def randomize(self, blocks: U8, scale: float) -> None:
        values = blocks.view(np.int16).astype(np.float32)
        values *= np.float32(scale / 32768)
        blocks.view(np.uint16)[...] = values.view(np.uint32) >> np.uint32(16)


CODECS: tuple[Codec, ...] = (_F32("F32", 0, 4), _F16("F16", 1, 2), _BF16("BF16", 30, 2))
