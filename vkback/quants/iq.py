"""Formats with levels from a table. Fields in file order:

    IQ4_NL  d f16 | qs 16 bytes: value j low, j + 16 high                              weight = d level(q)
    IQ4_XS  d f16 | scales_h u16 | scales_l 4 | qs 128: like IQ4_NL for each group     weight = d (s - 32) level(q)   groups of 32

On the device codes lie as bit planes (shaders/quant/iq4_levels.glsl), or in pairs for kernels that look levels up in a table of pairs
(iq4_pairs.glsl): the same planes of the same sizes, with the bits of `qs` in another order.

IQ4_XS: scale j has its low nibble in nibble j of scales_l and its top two bits in bits 2j of scales_h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from vkback.quants import search
from vkback.quants.bits import Rearrange, bit_planes, pairs_two_apart, renamed_nibbles
from vkback.quants.codec import F32, U8, Codec, Weights, half, packed, put_half, random_half
from vkback.quants.k_quants import SUPER, value_major
from vkback.quants.legacy import nibbles, put_nibbles
from vkback.quants.quant_type import Plane, QuantType

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Denser near zero, for weights that are about normally distributed."""

IQ4_ORDER = (1, 3, 11, 10, 15, 14, 5, 7, 0, 9, 2, 13, 12, 4, 6, 8)
"""The device's code for each of the file; shaders/quant/iq4_levels.glsl has the formulas that this order makes true."""

_LEVELS = np.array(IQ4_LEVELS, np.float32)
_NEAREST = search.Table.of(IQ4_LEVELS)
_TARGETS = [*np.linspace(-140, -95, 16), *np.linspace(100, 130, 11)]


class _IQ4NL(Codec):
    block = packed(("d", 2), ("qs", 16))
    type = QuantType("IQ4_NL", 20, 32, block.itemsize, (Plane("qs", 16), Plane("d", 2)), "levels", step_factor=1)
    moves: Mapping[str, Rearrange] = {"qs": bit_planes(renamed_nibbles(IQ4_ORDER))}

    def decode(self, blocks: U8) -> F32:
        return half(blocks[:, :2]) * _LEVELS[nibbles(blocks[:, 2:])]

    def encode(self, x: F32, weights: Weights) -> U8:
        xv = np.ascontiguousarray(x.T)
        d = search.scale(xv, None if weights is None else np.ascontiguousarray(weights.T), _NEAREST, _TARGETS)
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        put_half(blocks[:, :2], d)
        rounded = half(blocks[:, :2])
        put_nibbles(blocks[:, 2:], _NEAREST.index(x * search.reciprocal(rounded)))
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 128, signed=True)


class _IQ4XS(Codec):
    block = packed(("head", 8), ("qs", 128))
    type = QuantType("IQ4_XS", 23, SUPER, block.itemsize, (Plane("qs", 16), Plane("head", 8, SUPER)), "levels", step_factor=32)
    moves: Mapping[str, Rearrange] = {"qs": bit_planes(renamed_nibbles(IQ4_ORDER))}

    def halves(self) -> tuple[int, ...]:
        return (0,)

    def decode(self, blocks: U8) -> F32:
        n = len(blocks)
        b = self.fields(blocks)
        high = np.ascontiguousarray(b["head"][:, 2:4]).view(np.uint16)
        low = b["head"][:, 4:8]
        s = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=2).reshape(n, 8)
        s |= ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)).astype(np.uint8) << np.uint8(4)
        scales = half(b["head"][:, :2]) * (s.astype(np.int8) - np.int8(32)).astype(np.float32)
        levels = _LEVELS[nibbles(b["qs"].reshape(n * 8, 16))]
        weight: F32 = scales.reshape(n * 8, 1) * levels
        return weight.reshape(n, SUPER)

    def encode(self, x: F32, weights: Weights) -> U8:
        n = len(x)
        xv = value_major(x, 32)
        d, s = search.two_level_scale(xv, value_major(weights, 32), _NEAREST, _TARGETS, (-32, 31))
        blocks = np.empty((n, self.type.block_bytes), np.uint8)
        b = self.fields(blocks)
        put_half(b["head"][:, :2], d)
        stored = (s.T + 32).astype(np.uint16)
        high = np.bitwise_or.reduce(stored >> np.uint16(4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
        b["head"][:, 2:4] = high[:, None].view(np.uint8)
        low = (stored & np.uint16(15)).astype(np.uint8)
        b["head"][:, 4:8] = low[:, 0::2] | (low[:, 1::2] << np.uint8(4))
        steps = (d * s).T.reshape(n * 8, 1)
        qs = np.empty((n * 8, 16), np.uint8)
        put_nibbles(qs, _NEAREST.index(x.reshape(n * 8, 32) * search.reciprocal(steps)))
        b["qs"] = qs.reshape(n, 128)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["head"][:, :2], scale / 2048, signed=True)


class _IQ4NLPairs(_IQ4NL):
    type = replace(_IQ4NL.type, name="IQ4_NL_PAIRS")
    moves: Mapping[str, Rearrange] = {"qs": pairs_two_apart(renamed_nibbles(IQ4_ORDER))}


class _IQ4XSPairs(_IQ4XS):
    type = replace(_IQ4XS.type, name="IQ4_XS_PAIRS")
    moves: Mapping[str, Rearrange] = {"qs": pairs_two_apart(renamed_nibbles(IQ4_ORDER))}


CODECS: tuple[Codec, ...] = (_IQ4NL(), _IQ4XS())
OTHER_LAYOUTS: Mapping[str, Codec] = {"IQ4_NL": _IQ4NLPairs(), "IQ4_XS": _IQ4XSPairs()}
