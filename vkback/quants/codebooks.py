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
from vkback.quants.codebook_search import NOTABLY, Products, bits_together, magnitudes, two_levels
from vkback.quants.codec import F32, U8, Codec, Limit, Weights, half, packed, put_half, random_half
from vkback.quants.k_quants import SUPER
from vkback.quants.quant_type import Codebook, Plane, QuantType

DELTA = np.float32(0.125)

EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)
"""Sign byte (bit i set: weight i is negative) of each 7-bit sign code."""


@cache
def _gguf_grid(name: str, index_bits: int) -> npt.NDArray[np.int8]:
    """int8 [2^index_bits, 8 or 4]. The grids are part of the format and kilobytes long: taken from its own package, at the first
    request."""
    from gguf import quants as tables

    source = getattr(tables, name)
    source.init_grid()
    grid: npt.NDArray[np.int8] = source.grid.reshape(1 << index_bits, -1).astype(np.int8)
    grid.flags.writeable = False
    return grid


def _codebook(name: str, index_bits: int, entry_bytes: int) -> Codebook:
    return Codebook(name, partial(_gguf_grid, name, index_bits), entry_bytes)


_IQ1 = _codebook("IQ1_S", 11, 4)


def _coded(name: str, ggml_id: int, block: np.dtype[np.void], planes: tuple[Plane, ...], book: Codebook) -> QuantType:
    return QuantType(name, ggml_id, SUPER, block.itemsize, planes, "codebook", codebook=book, rare=True)


_AT_ONCE = 32
"""Blocks that are encoded at once: products with all entries are some MB."""

_OF_IQ2 = tuple(np.geomspace(7.0, 64.0, 15))
_OF_IQ3 = tuple(np.geomspace(3.5, 80.0, 18))
_OF_IQ1 = (0.9, 1.0, *np.linspace(1.125, 3.0, 10))


def _in_bytes(nibbles: U8) -> U8:
    """[n, 2m] -> [n, m], the first of two in the low bits."""
    made: U8 = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    return made


def _sign_words(signs: U8, s: U8) -> npt.NDArray[np.uint32]:
    """Sign bytes [n, 32] and scales [n, 8] -> words [n, 8], as `_codes_and_scales` takes them."""
    words: npt.NDArray[np.uint32] = bits_together(signs & np.uint8(127), (0, 7, 14, 21), np.uint32) | (s.astype(np.uint32) << np.uint32(28))
    return words


@cache
def _levels(book: Codebook) -> F32:
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


class _Coded(Codec):
    """A type with a codebook. group: values under one scale; steps: what `two_levels` takes; targets: what `Products.fit` does."""

    group = 32
    steps: tuple[float, float, int]
    targets: tuple[float, ...]

    def encode(self, x: F32, weights: Weights) -> U8:
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        for start in range(0, len(x), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            self.encode_part(x[part], None if weights is None else weights[part], blocks[part])
        return blocks

    @abstractmethod
    def encode_part(self, x: F32, weights: Weights, blocks: U8) -> None:
        """[n, 256] into blocks, n up to _AT_ONCE."""

    def in_groups(self, values: Weights, entry: int) -> Any:
        """[n, 256] -> [groups, vectors, entry]; None stays None."""
        return None if values is None else values.reshape(-1, self.group // entry, entry)


class _Signed(_Coded):
    """IQ2 and IQ3: scale * grid[index] * sign. even: seven bits of signs stand for eight."""

    even = False

    @abstractmethod
    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        """Scales [n, groups], indices [n, groups of 8 or 4], sign bytes [n, 32]."""

    @abstractmethod
    def put(self, b: Any, s: U8, index: npt.NDArray[np.uint16], signs: U8) -> None:
        """The reverse of `parts`, without d; s: scales as they are stored."""

    def encode_part(self, x: F32, weights: Weights, blocks: U8) -> None:
        assert self.type.codebook is not None
        levels = _levels(self.type.codebook)
        size, signs = magnitudes(x, weights, self.even)
        products = Products(self.in_groups(size, levels.shape[1]), self.in_groups(weights, levels.shape[1]), levels)
        d, s, made = two_levels(products.fit(self.targets)[0].reshape(len(x), -1), *self.steps)
        index = products.nearest(made.reshape(-1)).reshape(len(x), -1)
        b = self.fields(blocks)
        put_half(b["d"], d)
        self.put(b, s, index.astype(np.uint16), signs)

    def decode(self, blocks: U8) -> F32:
        n = len(blocks)
        scales, index, signs = self.parts(self.fields(blocks))
        assert self.type.codebook is not None
        weight: F32 = scales[:, :, None] * _levels(self.type.codebook)[index].reshape(n, scales.shape[1], -1)
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
    type = _coded("IQ2_XXS", 16, block, (Plane("qs", 8), Plane("d", 2, SUPER)), _codebook("IQ2_XXS", 8, 8))

    even, steps, targets = True, (0.125, 0.25, 15), _OF_IQ2

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        words = _unsigned(b["qs"], np.uint32).reshape(len(b), 8, 2)
        signs, s = _codes_and_scales(words[:, :, 1])
        return half(b["d"]) * s * np.float32(0.25), b["qs"].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), 32), signs

    def put(self, b: Any, s: U8, index: npt.NDArray[np.uint16], signs: U8) -> None:
        codes = bits_together(index, (0, 8, 16, 24), np.uint32)
        b["qs"] = np.stack([codes, _sign_words(signs, s)], axis=2).reshape(len(b), 16).view(np.uint8)


class _IQ2XS(_Signed):
    block = packed(("d", 2), ("qs", 64), ("scales", 8))
    type = _coded("IQ2_XS", 17, block, (Plane("qs", 8), Plane("scales", 1), Plane("d", 2, SUPER)), _codebook("IQ2_XS", 9, 8))

    group, even, steps, targets = 16, True, (0.125, 0.25, 15), _OF_IQ2

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        words = _unsigned(b["qs"], np.uint16)
        s = np.float32(0.5) + _nibble_pairs(b["scales"]).astype(np.float32)
        return half(b["d"]) * s * np.float32(0.25), words & np.uint16(511), EVEN_SIGNS[words >> np.uint16(9)]

    def put(self, b: Any, s: U8, index: npt.NDArray[np.uint16], signs: U8) -> None:
        b["qs"] = (index | (signs & np.uint8(127)).astype(np.uint16) << np.uint16(9)).view(np.uint8)
        b["scales"] = _in_bytes(s)


class _IQ2S(_Signed):
    block = packed(("d", 2), ("qs", 64), ("head", 16))
    type = _coded("IQ2_S", 22, block, (Plane("qs", 8), Plane("head", 2), Plane("d", 2, SUPER)), _codebook("IQ2_S", 10, 8))
    moves: Mapping[str, Rearrange] = {"qs": interleave(np.uint32), "head": interleave(np.uint8)}

    group, steps, targets = 16, (0.125, 0.25, 15), _OF_IQ2

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        low, signs = b["qs"][:, :32], b["qs"][:, 32:]
        index = low.astype(np.uint16) | (_bits_of(b["head"][:, :8], (0, 2, 4, 6), 3).astype(np.uint16) << np.uint16(8))
        s = np.float32(0.5) + _nibble_pairs(b["head"][:, 8:]).astype(np.float32)
        return half(b["d"]) * s * np.float32(0.25), index, np.ascontiguousarray(signs)

    def put(self, b: Any, s: U8, index: npt.NDArray[np.uint16], signs: U8) -> None:
        b["qs"] = np.concatenate([index.astype(np.uint8), signs], axis=1)
        b["head"] = np.concatenate([bits_together(index >> np.uint16(8), (0, 2, 4, 6), np.uint8), _in_bytes(s)], axis=1)


class _IQ3XXS(_Signed):
    block = packed(("d", 2), ("qs", 64), ("signs", 32))
    type = _coded("IQ3_XXS", 18, block, (Plane("qs", 8), Plane("signs", 4), Plane("d", 2, SUPER)), _codebook("IQ3_XXS", 8, 4))

    even, steps, targets = True, (0.25, 0.5, 15), _OF_IQ3

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        signs, s = _codes_and_scales(_unsigned(b["signs"], np.uint32))
        return half(b["d"]) * s * np.float32(0.5), b["qs"], signs

    def put(self, b: Any, s: U8, index: npt.NDArray[np.uint16], signs: U8) -> None:
        b["qs"] = index
        b["signs"] = _sign_words(signs, s).view(np.uint8)


class _IQ3S(_Signed):
    block = packed(("d", 2), ("qs", 64), ("qh", 8), ("signs", 32), ("scales", 4))
    type = _coded(
        "IQ3_S",
        21,
        block,
        (Plane("qs", 8), Plane("signs", 4), Plane("qh", 1), Plane("scales", 4, SUPER), Plane("d", 2, SUPER)),
        _codebook("IQ3_S", 9, 4),
    )

    steps, targets = (1.0, 2.0, 15), tuple(np.geomspace(0.9, 20.0, 18))

    def parts(self, b: Any) -> tuple[F32, npt.NDArray[Any], U8]:
        index = b["qs"].astype(np.uint16) | (_bits_of(b["qh"], tuple(range(8)), 1).astype(np.uint16) << np.uint16(8))
        s = (1 + 2 * _nibble_pairs(b["scales"])).astype(np.float32)
        return half(b["d"]) * s, index, np.ascontiguousarray(b["signs"])

    def put(self, b: Any, s: U8, index: npt.NDArray[np.uint16], signs: U8) -> None:
        b["qs"] = index.astype(np.uint8)
        b["qh"] = bits_together(index >> np.uint16(8), tuple(range(8)), np.uint8)
        b["signs"], b["scales"] = signs, _in_bytes(s)


class _IQ1S(_Coded):
    block = packed(("d", 2), ("qs", 32), ("qh", 16))
    type = _coded("IQ1_S", 19, block, (Plane("qs", 4), Plane("qh", 2), Plane("d", 2, SUPER)), _IQ1)
    steps, targets = (1.0, 2.0, 7), _OF_IQ1

    def encode_part(self, x: F32, weights: Weights, blocks: U8) -> None:
        n, b = len(x), self.fields(blocks)
        values, levels = self.in_groups(x, 8), _levels(_IQ1)
        both = [Products(values, self.in_groups(weights, 8), levels + delta) for delta in (DELTA, -DELTA)]
        fits = [products.fit(self.targets) for products in both]
        minus = fits[1][1] > NOTABLY * fits[0][1]
        d, s, made = two_levels(np.where(minus, fits[1][0], fits[0][0]).reshape(n, 8), *self.steps)
        index = np.where(minus[:, None], both[1].nearest(made.reshape(-1)), both[0].nearest(made.reshape(-1))).reshape(n, 32)
        put_half(b["d"], d)
        b["qs"] = index
        top = s.astype(np.uint16) << np.uint16(12) | minus.reshape(n, 8).astype(np.uint16) << np.uint16(15)
        b["qh"] = (bits_together(index >> 8, (0, 3, 6, 9), np.uint16) | top).view(np.uint8)

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


class _IQ1M(_Coded):
    block = packed(("qs", 32), ("qh", 16), ("scales", 8))
    type = _coded("IQ1_M", 29, block, (Plane("qs", 4), Plane("qh", 2), Plane("scales", 8, SUPER)), _IQ1)
    group, steps, targets = 16, (1.0, 2.0, 7), _OF_IQ1

    def encode_part(self, x: F32, weights: Weights, blocks: U8) -> None:
        n, b, levels = len(x), self.fields(blocks), _levels(_IQ1)
        products = Products(self.in_groups(x, 8), self.in_groups(weights, 8), np.concatenate([levels + DELTA, levels - DELTA]))
        d, s, made = two_levels(products.fit(self.targets)[0].reshape(n, 16), *self.steps)
        index = products.nearest(made.reshape(-1)).reshape(n, 32)
        minus, low = np.divmod(index, len(levels))
        b["qs"] = low
        b["qh"] = _in_bytes((low >> 8 | minus << 3).astype(np.uint8))
        nibbles = d.astype(np.float16).view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) << np.uint16(12)
        b["scales"] = (bits_together(s, (0, 3, 6, 9), np.uint16) | nibbles).view(np.uint8)

    def unsound_limits(self) -> tuple[Limit, ...]:
        # The scale's nibbles are the top ones of four words of 16 bits, its exponent in those of the last two.
        return (Limit(52, 4, 0x7000C000, 0x7000C000),)

    def large_limits(self) -> tuple[Limit, ...]:
        return (Limit(54, 2, 0x4000, 0x4000),)

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
