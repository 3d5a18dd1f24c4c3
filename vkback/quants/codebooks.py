"""Formats whose weights are looked up by eight or four in a codebook, under signs and small scales. Super-blocks of 256, units of 32:

    IQ2_XXS  d f16 | per unit: 4 indices of 8 bits, then u32: 4 x 7 bits of signs, scale in the top 4      d (1/2 + s) / 4 * grid * sign
    IQ2_XS   d f16 | per unit: 4 u16, index 9 bits, signs 7 | scales 8, a nibble per 16                     d (1/2 + s) / 4 * grid * sign
    IQ2_S    d f16 | indices 32 | signs 32 | qh 8, indices' bits 8 and 9 | scales 8, a nibble per 16        d (1/2 + s) / 4 * grid * sign
    IQ3_XXS  d f16 | indices 64, each 4 weights | per unit u32: signs and scale as in IQ2_XXS               d (1/2 + s) / 2 * grid * sign
    IQ3_S    d f16 | indices 64 | qh 8, their bit 8 | signs 32 | scales 4, a nibble per unit                d (1 + 2 s) * grid * sign
    IQ1_S    d f16 | indices 32 | per unit u16: 4 x 3 bits of indices, s in bits 12..14, bit 15: delta < 0  d (1 + 2 s) (grid + delta)
    IQ1_M    indices 32 | qh 16, per 8 weights 3 bits of index and sign of delta | scales 4 u16: s, 3 bits per 16, in bits 0..11;
             the four top nibbles together are d                                                            d (1 + 2 s) (grid + delta)

Seven bits of signs stand for eight: the number of minus signs is even. delta = 1/8.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.quants.bits import Rearrange, interleave
from vkback.quants.codec import F32, U8, Codec, DecodeOnly, half, packed, random_half
from vkback.quants.k_quants import SUPER
from vkback.quants.quant_type import CodeBook, Plane, QuantType

DELTA = np.float32(0.125)

EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)
"""Sign byte (bit i set: weight i is negative) of each 7-bit sign code."""


@cache
def _gguf_grid(name: str, index_bits: int) -> npt.NDArray[np.int8]:
    """int8 [2^index_bits, 8 or 4]. The grids are part of the format and kilobytes long: taken from its own package, when asked for."""
    from gguf import quants as tables

    source = getattr(tables, name)
    source.init_grid()
    grid: npt.NDArray[np.int8] = source.grid.reshape(1 << index_bits, -1).astype(np.int8)
    grid.flags.writeable = False
    return grid


def _code_book(name: str, index_bits: int, entry_bytes: int) -> CodeBook:
    return CodeBook(name, partial(_gguf_grid, name, index_bits), entry_bytes)


_IQ1 = _code_book("IQ1_S", 11, 4)


def _coded(name: str, ggml_id: int, block: np.dtype[np.void], planes: tuple[Plane, ...], book: CodeBook) -> QuantType:
    return QuantType(name, ggml_id, SUPER, block.itemsize, planes, "codebook", code_book=book, rare=True)


@cache
def _levels(book: CodeBook) -> F32:
    return book.grid().astype(np.float32)


def _nibble_pairs(field: U8) -> U8:
    """[n, m] -> [n, 2m]: low, high, low, high ..."""
    return np.stack([field & np.uint8(15), field >> np.uint8(4)], axis=2).reshape(len(field), -1)


def _bits_of(field: npt.NDArray[Any], shifts: tuple[int, ...], mask: int) -> npt.NDArray[Any]:
    """[n, m] -> [n, m * len(shifts)]."""
    kind = field.dtype.type
    values: npt.NDArray[Any] = (field[:, :, None] >> np.array(shifts, field.dtype)) & kind(mask)
    return values.reshape(len(field), -1)


def _unsigned(field: U8, dtype: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(field).view(dtype)


class _Signed(DecodeOnly):
    """IQ2 and IQ3: scale * grid[index] * sign."""

    @abstractmethod
    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        """Scales [n, groups], indices [n, groups of 8 or 4], sign bytes [n, 32]."""

    def decode(self, blocks: U8) -> F32:
        n = len(blocks)
        scales, index, signs = self.parts(self.fields(blocks))
        assert self.type.code_book is not None
        weight: F32 = scales[:, :, None] * _levels(self.type.code_book)[index].reshape(n, scales.shape[1], -1)
        weight = weight.reshape(n, SUPER)
        np.negative(weight, out=weight, where=np.unpackbits(signs, axis=1, bitorder="little").astype(np.bool_))
        return weight

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 128)


def _codes_and_scales(words: npt.NDArray[np.uint32]) -> tuple[U8, F32]:
    """[n, 8] words of four 7-bit sign codes and a scale -> sign bytes [n, 32], 1/2 + s [n, 8]."""
    return EVEN_SIGNS[_bits_of(words, (0, 7, 14, 21), 127)], np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32)


class _IQ2XXS(_Signed):
    block = packed(("d", 2), ("qs", 64))
    type = _coded("IQ2_XXS", 16, block, (Plane("qs", 8), Plane("d", 2, SUPER)), _code_book("IQ2_XXS", 8, 8))

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        words = _unsigned(b["qs"], np.uint32).reshape(len(b), 8, 2)
        signs, s = _codes_and_scales(words[:, :, 1])
        return half(b["d"]) * s * np.float32(0.25), b["qs"].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), 32), signs


class _IQ2XS(_Signed):
    block = packed(("d", 2), ("qs", 64), ("scales", 8))
    type = _coded("IQ2_XS", 17, block, (Plane("qs", 8), Plane("scales", 1), Plane("d", 2, SUPER)), _code_book("IQ2_XS", 9, 8))

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        words = _unsigned(b["qs"], np.uint16)
        s = np.float32(0.5) + _nibble_pairs(b["scales"]).astype(np.float32)
        return half(b["d"]) * s * np.float32(0.25), words & np.uint16(511), EVEN_SIGNS[words >> np.uint16(9)]


class _IQ2S(_Signed):
    block = packed(("d", 2), ("qs", 64), ("head", 16))
    type = _coded("IQ2_S", 22, block, (Plane("qs", 8), Plane("head", 2), Plane("d", 2, SUPER)), _code_book("IQ2_S", 10, 8))
    moves: Mapping[str, Rearrange] = {"qs": interleave(np.uint32), "head": interleave(np.uint8)}

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        low, signs = b["qs"][:, :32], b["qs"][:, 32:]
        index = low.astype(np.uint16) | (_bits_of(b["head"][:, :8], (0, 2, 4, 6), 3).astype(np.uint16) << np.uint16(8))
        s = np.float32(0.5) + _nibble_pairs(b["head"][:, 8:]).astype(np.float32)
        return half(b["d"]) * s * np.float32(0.25), index, np.ascontiguousarray(signs)


class _IQ3XXS(_Signed):
    block = packed(("d", 2), ("qs", 64), ("signs", 32))
    type = _coded("IQ3_XXS", 18, block, (Plane("qs", 8), Plane("signs", 4), Plane("d", 2, SUPER)), _code_book("IQ3_XXS", 8, 4))

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        signs, s = _codes_and_scales(_unsigned(b["signs"], np.uint32))
        return half(b["d"]) * s * np.float32(0.5), b["qs"], signs


class _IQ3S(_Signed):
    block = packed(("d", 2), ("qs", 64), ("qh", 8), ("signs", 32), ("scales", 4))
    type = _coded(
        "IQ3_S", 21, block, (Plane("qs", 8), Plane("signs", 4), Plane("qh", 1), Plane("scales", 4, SUPER), Plane("d", 2, SUPER)),
        _code_book("IQ3_S", 9, 4),
    )  # fmt: skip

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        index = b["qs"].astype(np.uint16) | (_bits_of(b["qh"], tuple(range(8)), 1).astype(np.uint16) << np.uint16(8))
        s = (1 + 2 * _nibble_pairs(b["scales"])).astype(np.float32)
        return half(b["d"]) * s, index, np.ascontiguousarray(b["signs"])


class _IQ1S(DecodeOnly):
    block = packed(("d", 2), ("qs", 32), ("qh", 16))
    type = _coded("IQ1_S", 19, block, (Plane("qs", 4), Plane("qh", 2), Plane("d", 2, SUPER)), _IQ1)

    def decode(self, blocks: U8) -> F32:
        n = len(blocks)
        b = self.fields(blocks)
        qh = _unsigned(b["qh"], np.uint16)
        index = b["qs"].astype(np.uint16) | (_bits_of(qh, (0, 3, 6, 9), 7) << np.uint16(8))
        scales = half(b["d"]) * (1 + 2 * (qh >> np.uint16(12) & np.uint16(7))).astype(np.float32)
        delta = np.where(qh >> np.uint16(15), -DELTA, DELTA)
        weight: F32 = scales[:, :, None] * (_levels(_IQ1)[index].reshape(n, 8, 32) + delta[:, :, None])
        return weight.reshape(n, SUPER)

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 8)


class _IQ1M(DecodeOnly):
    block = packed(("qs", 32), ("qh", 16), ("scales", 8))
    type = _coded("IQ1_M", 29, block, (Plane("qs", 4), Plane("qh", 2), Plane("scales", 8, SUPER)), _IQ1)

    def unsound(self, blocks: U8) -> npt.NDArray[np.bool_]:
        # The scale's exponent is in the top bits of the last two words.
        words = _unsigned(self.fields(blocks)["scales"], np.uint16)
        full: npt.NDArray[np.bool_] = ((words[:, 3] & np.uint16(0x7000)) == 0x7000) & (words[:, 2] >= np.uint16(0xC000))
        return full

    def scaled_up(self, blocks: U8) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (_unsigned(self.fields(blocks)["scales"], np.uint16)[:, 3] & np.uint16(0x4000)) != 0
        return found

    def decode(self, blocks: U8) -> F32:
        n = len(blocks)
        b = self.fields(blocks)
        words = _unsigned(b["scales"], np.uint16)
        d = np.bitwise_or.reduce(words >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16), axis=1)
        s = (1 + 2 * _bits_of(words, (0, 3, 6, 9), 7)).astype(np.float32)
        scales = d.view(np.float16).astype(np.float32)[:, None] * s
        high = _nibble_pairs(b["qh"])
        index = b["qs"].astype(np.uint16) | ((high & np.uint8(7)).astype(np.uint16) << np.uint16(8))
        delta = np.where(high & np.uint8(8), -DELTA, DELTA)
        level = _levels(_IQ1)[index] + delta[:, :, None]
        weight: F32 = scales[:, :, None] * level.reshape(n, 16, 16)
        return weight.reshape(n, SUPER)

    def randomize(self, blocks: U8, scale: float) -> None:
        words = self.fields(blocks)["scales"].view(np.uint16)
        d = np.ascontiguousarray(words[:, :1]).view(np.uint8)
        random_half(d, scale / 8)
        nibbles = d.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) << np.uint16(12)
        words &= np.uint16(0x0FFF)
        words |= nibbles


CODECS: tuple[Codec, ...] = (_IQ1S(), _IQ1M(), _IQ2XXS(), _IQ2XS(), _IQ2S(), _IQ3XXS(), _IQ3S())
