"""The first block formats: 32 weights, one step d, and for the _1 types an offset m. Little endian, fields in this order:

Q4_0  d f16 | qs 16 bytes: value j low, j + 16 high      weight = d (q - 8)
Q4_1  d, m f16 | qs 16                                   weight = d q + m
Q5_0  d f16 | qh: fifth bit of value j is bit j | qs 16  weight = d (q - 16)
Q5_1  d, m f16 | qh 4 | qs 16                            weight = d q + m
Q8_0  d f16 | qs 32 int8                                 weight = d q
Q8_1  d, s f16 | qs 32 int8                              weight = d q;  s = d sum(q)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vkback.quants import search
from vkback.quants.bits import HIGH_BITS, flipped_tops
from vkback.quants.codec import F32, U8, Codec, Weights, half, packed, put_half, random_half
from vkback.quants.quant_type import Plane, QuantType


def nibbles(qs: U8) -> U8:
    """[n, m] bytes -> [n, 2m]: all low nibbles, then all high ones."""
    return np.concatenate([qs & np.uint8(15), qs >> np.uint8(4)], axis=1)


def put_nibbles(qs: U8, q: U8) -> None:
    """Inverse of `nibbles`; q above 15 loses its high bits."""
    m = q.shape[1] // 2
    qs[...] = (q[:, :m] & np.uint8(15)) | (q[:, m:] << np.uint8(4))


def _with_high_bits(low: U8, qh: U8) -> U8:
    return low | (np.unpackbits(qh, axis=1, bitorder="little") << np.uint8(4))


def round_half_away(x: F32) -> F32:
    """C's roundf."""
    a = np.abs(x)
    whole = np.floor(a)
    whole += a - whole >= np.float32(0.5)
    return np.copysign(whole, x)


class _Nibbles(Codec):
    """Q4_0, Q4_1, Q5_0, Q5_1: `bits` per weight, an offset or none."""

    def __init__(self, name: str, ggml_id: int, bits: int, offset: bool) -> None:
        scales = ("dm", 4) if offset else ("d", 2)
        high = [("qh", 4)] if bits == 5 else []
        self.block = packed(scales, *high, ("qs", 16))
        planes = (Plane("qs", 16), *(Plane(*h) for h in high), Plane(*scales))
        self.type = QuantType(name, ggml_id, 32, self.block.itemsize, planes, step_factor=1)
        self.levels = 1 << bits
        self.offset = offset
        self.has_high = bits == 5
        self.moves = {"qh": HIGH_BITS} if bits == 5 else {"qs": flipped_tops()}

    def decode(self, blocks: U8) -> F32:
        b = self.fields(blocks)
        q = nibbles(b["qs"])
        if self.has_high:
            q = _with_high_bits(q, b["qh"])
        if self.offset:
            dm = half(b["dm"])
            return dm[:, :1] * q.astype(np.float32) + dm[:, 1:]
        return half(b["d"]) * (q.astype(np.int8) - np.int8(self.levels // 2)).astype(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        b = self.fields(blocks)
        if self.offset:
            d, m = self._offset_scales(x, weights)
            put_half(b["dm"], np.stack([d, m], axis=1))
            q = np.trunc((x - m[:, None]) * search.reciprocal(d)[:, None] + np.float32(0.5))
        else:
            d = self._scales(x, weights)
            put_half(b["d"], d)
            q = np.trunc(x * search.reciprocal(d)[:, None] + np.float32(self.levels / 2 + 0.5))
        q = np.clip(q, 0, self.levels - 1, out=q).astype(np.uint8)
        put_nibbles(b["qs"], q)
        if self.has_high:
            b["qh"] = np.packbits(q >> np.uint8(4), axis=1, bitorder="little")
        return blocks

    def _scales(self, x: F32, weights: Weights) -> F32:
        top = self.levels // 2
        if weights is None:
            extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)[:, 0]
            d: F32 = extreme / np.float32(-top)
            return d
        targets = [-top + 0.1 * i for i in range(-9, 10)]
        return search.scale(np.ascontiguousarray(x.T), np.ascontiguousarray(weights.T), search.integers(-top, top - 1), targets)

    def _offset_scales(self, x: F32, weights: Weights) -> tuple[F32, F32]:
        top = self.levels - 1
        if weights is None:
            low = x.min(axis=1)
            return (x.max(axis=1) - low) / np.float32(top), low
        spread = [0.06 * i for i in range(-16, 17)]
        return search.affine(np.ascontiguousarray(x.T), np.ascontiguousarray(weights.T), top, spread, free_offset=True)

    def randomize(self, blocks: U8, scale: float) -> None:
        b = self.fields(blocks)
        d = scale / self.levels
        if self.offset:
            random_half(b["dm"][:, :2], d)
            random_half(b["dm"][:, 2:], (self.levels - 1) / 2 * d)
            b["dm"][:, 3] |= 0x80
        else:
            random_half(b["d"], d, signed=True)


def _encode_int8(x: F32) -> tuple[F32, Any]:
    d = np.abs(x).max(axis=1) / np.float32(127)
    return d, round_half_away(x * search.reciprocal(d)[:, None]).astype(np.int8)


class _Q80(Codec):
    """The error of eight bits is so small that importances do not enter."""

    block = packed(("d", 2), ("qs0", 16), ("qs1", 16))
    type = QuantType("Q8_0", 8, 32, block.itemsize, (Plane("qs0", 16), Plane("qs1", 16), Plane("d", 2)), step_factor=1)

    def decode(self, blocks: U8) -> F32:
        return half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        d, q = _encode_int8(x)
        put_half(blocks[:, :2], d)
        blocks[:, 2:] = q.view(np.uint8)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 256)


class _Q81(Codec):
    """The file's form of Q8_1; the device's form of quantized activations is in q8_1.py."""

    block = packed(("d", 2), ("s", 2), ("qs", 32))
    type = QuantType("Q8_1", 9, 32, block.itemsize, ())

    def decode(self, blocks: U8) -> F32:
        return half(blocks[:, :2]) * blocks[:, 4:].view(np.int8).astype(np.float32)

    def encode(self, x: F32, weights: Weights) -> U8:
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        d, q = _encode_int8(x)
        put_half(blocks[:, :2], d)
        put_half(blocks[:, 2:4], d * q.sum(axis=1, dtype=np.int32).astype(np.float32))
        blocks[:, 4:] = q.view(np.uint8)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 256)
        sums = blocks[:, 4:].view(np.int8).sum(axis=1, dtype=np.int32).astype(np.float32)
        put_half(blocks[:, 2:4], half(blocks[:, :2])[:, 0] * sums)


CODECS: tuple[Codec, ...] = (
    _Nibbles("Q4_0", 2, bits=4, offset=False),
    _Nibbles("Q4_1", 3, bits=4, offset=True),
    _Nibbles("Q5_0", 6, bits=5, offset=False),
    _Nibbles("Q5_1", 7, bits=5, offset=True),
    _Q80(),
    _Q81(),
)
