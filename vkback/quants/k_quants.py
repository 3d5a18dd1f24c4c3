"""K-quants: super-blocks of 256 weights in groups of 16 or 32 with small integer scales under f16 super-scales. Fields in file order:

    Q2_K  scales 16: scale low nibble, min high | qs 64, 2 bits | d, dmin f16          weight = d s q - dmin m      groups of 16
    Q3_K  hmask 32 | qs 64, 2 bits | scales 12, 6 bits each | d f16                    weight = d (s - 32) (q - 4)  groups of 16
    Q4_K  d, dmin f16 | scales 12: 8 scales and 8 mins of 6 bits | qs 128              weight = d s q - dmin m      groups of 32
    Q5_K  d, dmin f16 | scales 12 | qh 32, fifth bits | qs 128                         weight = d s q - dmin m      groups of 32
    Q6_K  ql 128, low nibbles | qh 64, upper 2 bits | scales 16 int8 | d f16           weight = d s (q - 32)        groups of 16

2-bit fields: byte 32h + l, bits 2s hold value 128h + 32s + l. Single bits: bit u of byte l holds value 32u + l. Nibbles of Q4_K and Q5_K:
byte 32c + l holds value 64c + l low, 64c + 32 + l high; of Q6_K: byte 64h + l (l < 64) holds value 128h + l low, 128h + 64 + l high.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.quants import search
from vkback.quants.bits import BIT_SQUARE, CRUMBS, NIBBLE_CHUNKS, Q2_CRUMBS, Q6_NIBBLES, Rearrange, Words, flipped_tops, swap_digit_pairs
from vkback.quants.codec import F32, U8, Codec, Weave, Weights, half, packed, put_half, random_half
from vkback.quants.quant_type import Plane, QuantType

SUPER = 256


def crumbs(field: U8) -> U8:
    """2-bit fields: [n, 64] -> [n, 256]."""
    return _shifted(field, 32, (0, 2, 4, 6), 3)


def put_crumbs(field: U8, q: U8) -> None:
    _put_shifted(field, q, 32, (0, 2, 4, 6))


def _shifted(field: U8, span: int, shifts: tuple[int, ...], mask: int) -> U8:
    """Each run of `span` bytes gives len(shifts) runs of values."""
    amounts = np.array(shifts, np.uint8)[:, None]
    values: U8 = (field.reshape(len(field), -1, 1, span) >> amounts) & np.uint8(mask)
    return values.reshape(len(field), -1)


def _put_shifted(field: U8, q: U8, span: int, shifts: tuple[int, ...]) -> None:
    amounts = np.array(shifts, np.uint8)[:, None]
    runs: U8 = q.reshape(len(q), -1, len(shifts), span) << amounts
    field[...] = np.bitwise_or.reduce(runs, axis=2).reshape(len(q), -1)


def value_major(x: F32 | None, group: int) -> Any:
    """[n, 256] -> [group, 256 / group, n], the order of the search; None stays None."""
    return None if x is None else np.ascontiguousarray(x.reshape(len(x), -1, group).transpose(2, 1, 0))


def block_major(q: npt.NDArray[Any]) -> U8:
    """Inverse of `value_major`, as bytes."""
    codes: U8 = np.ascontiguousarray(q.transpose(2, 1, 0), np.uint8)
    return codes.reshape(q.shape[2], SUPER)


def _by_group(scales: F32, values: F32) -> F32:
    """[n, groups] times [n, 256]."""
    product: F32 = scales[:, :, None] * values.reshape(*scales.shape, -1)
    return product.reshape(len(values), -1)


def _six_bit_pairs(field: U8) -> tuple[U8, U8]:
    """Q4_K, Q5_K: [n, 12] -> scales and mins [n, 8]. Pairs 4..7 have their low nibbles in the last bytes, the rest in others' top bits."""
    first, second, third = field[:, 0:4], field[:, 4:8], field[:, 8:12]

    def both(low_half: U8, nibble: U8) -> U8:
        return np.concatenate([low_half & np.uint8(63), nibble | (low_half >> np.uint8(6) << np.uint8(4))], axis=1)

    return both(first, third & np.uint8(15)), both(second, third >> np.uint8(4))


def _put_six_bit_pairs(field: U8, scales: U8, mins: U8) -> None:
    field[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> np.uint8(4) << np.uint8(6))
    field[:, 4:8] = mins[:, :4] | (mins[:, 4:] >> np.uint8(4) << np.uint8(6))
    field[:, 8:12] = (scales[:, 4:] & np.uint8(15)) | (mins[:, 4:] << np.uint8(4))


def _six_bit_scales(field: U8) -> U8:
    """Q3_K: [n, 12] -> [n, 16], 32 not yet subtracted."""
    low: U8 = np.concatenate([field[:, :8] & np.uint8(15), field[:, :8] >> np.uint8(4)], axis=1)
    return low | (_shifted(field[:, 8:], 4, (0, 2, 4, 6), 3) << np.uint8(4))


def _put_six_bit_scales(field: U8, scales: U8) -> None:
    field[:, :8] = (scales[:, :8] & np.uint8(15)) | (scales[:, 8:] << np.uint8(4))
    _put_shifted(field[:, 8:], scales >> np.uint8(4), 4, (0, 2, 4, 6))


# Device form of the scales.

_GATHERED = {2: (0x03030303, 0x000F000F, 0xFF), 4: (0x0F0F0F0F, 0x00FF00FF, 0xFFFF)}  # bits of bytes: as they are, in pairs, all together
_LOW_NIBBLES = ((5, 2), (4, 2), (3, 2))  # nibble of scale s from byte s & 7, half s >> 3, to nibble s
_TOP_PAIRS = ((4, 2), (3, 1))  # bits of scale 4c + a from byte a, field c, to field 4c + a


def _gathered(words: Words, bits: int) -> Words:
    """The lowest bits, 2 or 4, of the four bytes of each word side by side."""
    of_bytes, of_pairs, of_all = (np.uint32(n) for n in _GATHERED[bits])
    pairs = words & of_bytes
    pairs = (pairs | (pairs >> np.uint32(8 - bits))) & of_pairs
    return (pairs | (pairs >> np.uint32(16 - 2 * bits))) & of_all


def _scattered(words: Words, bits: int) -> Words:
    """Undoes `_gathered`."""
    of_bytes, of_pairs, of_all = (np.uint32(n) for n in _GATHERED[bits])
    pairs = words & of_all
    pairs = (pairs | (pairs << np.uint32(16 - 2 * bits))) & of_pairs
    return (pairs | (pairs << np.uint32(8 - bits))) & of_bytes


def _head_to_device(src: U8, dst: U8) -> None:
    d, scales, mins, low = src.view(np.uint32).T.copy()
    out = dst.view(np.uint32)
    four, six, eight, half = (np.uint32(n) for n in (4, 6, 8, 16))
    out[:, 0] = d
    out[:, 1] = _gathered(scales, 4) | (_gathered(mins, 4) << half)
    out[:, 2] = _gathered(low, 4) | (_gathered(low >> four, 4) << half)
    scale_tops, min_tops = (_gathered(w >> four, 2) | (_gathered(w >> six, 2) << eight) for w in (scales, mins))
    out[:, 3] = scale_tops | (min_tops << half)


def _head_to_file(src: U8, dst: U8) -> None:
    d, first, second, tops = src.view(np.uint32).T.copy()
    out = dst.view(np.uint32)
    four, six, eight, half = (np.uint32(n) for n in (4, 6, 8, 16))
    out[:, 0] = d
    for word, low, top in ((1, first, tops), (2, first >> half, tops >> half)):
        out[:, word] = _scattered(low, 4) | (_scattered(top, 2) << four) | (_scattered(top >> eight, 2) << six)
    out[:, 3] = _scattered(second, 4) | (_scattered(second >> half, 4) << four)


_HEAD = Rearrange(_head_to_device, _head_to_file)


def _scales12(src: U8, dst: U8, low_steps: tuple[tuple[int, int], ...], top_steps: tuple[tuple[int, int], ...]) -> None:
    low = src[:, :8].copy().view(np.uint64)
    swap_digit_pairs(low, low_steps)
    dst[:, :8].view(np.uint64)[...] = low
    top = src[:, 8:].copy().view(np.uint32)
    swap_digit_pairs(top, top_steps)
    dst[:, 8:].view(np.uint32)[...] = top


_SCALES12 = Rearrange(
    lambda src, dst: _scales12(src, dst, _LOW_NIBBLES, _TOP_PAIRS),
    lambda src, dst: _scales12(src, dst, _LOW_NIBBLES[::-1], _TOP_PAIRS[::-1]),
)


def _words(plane: U8, unit: int) -> Words:
    """A plane [n, bytes] with `unit` words a unit as [n, units, unit]."""
    return plane.view(np.uint32).reshape(len(plane), -1, unit)


def _every_byte(*fields: tuple[Words, int, int]) -> Words:
    """Fields put together: of (words, mask, shift) each byte's bits of `mask`, moved up by `shift` (down where it is negative)."""
    together = np.zeros_like(fields[0][0])
    for words, mask, shift in fields:
        bits = words & np.uint32(mask * 0x01010101)
        if shift > 0:
            bits <<= np.uint32(shift)
        elif shift < 0:
            bits >>= np.uint32(-shift)
        together |= bits
    return together


class _Q2K(Codec):
    block = packed(("scales", 16), ("qs", 64), ("dm", 4))
    type = QuantType("Q2_K", 10, SUPER, block.itemsize, (Plane("qs", 8), Plane("scales", 2), Plane("dm", 4, SUPER)), step_factor=15)
    moves: Mapping[str, Rearrange] = {"qs": Q2_CRUMBS}

    def decode(self, blocks: U8) -> F32:
        b = self.fields(blocks)
        dm = half(b["dm"])
        scales = dm[:, :1] * (b["scales"] & np.uint8(15)).astype(np.float32)
        mins = dm[:, 1:] * (b["scales"] >> np.uint8(4)).astype(np.float32)
        weight = _by_group(scales, crumbs(b["qs"]).astype(np.float32))
        weight -= np.repeat(mins, 16, axis=1)
        return weight

    def encode(self, x: F32, weights: Weights) -> U8:
        xv = value_major(x, 16)
        d, dmin, s, m = search.two_level_affine(xv, value_major(weights, 16), 3, [0.1 * i for i in range(-9, 10)], 15)
        q = search.integers(0, 3)((xv + dmin * m) * search.reciprocal(d * s))
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        b = self.fields(blocks)
        put_half(b["dm"], np.stack([d, dmin], axis=1))
        b["scales"] = s.T.astype(np.uint8) | (m.T.astype(np.uint8) << np.uint8(4))
        put_crumbs(b["qs"], block_major(q))
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        _random_pair(self.fields(blocks)["dm"], scale / 60, mean_q=1.5)


def _random_pair(dm: U8, d: float, mean_q: float) -> None:
    """d and dmin such that the weights' mean is about zero: scales and mins are spread alike."""
    random_half(dm[:, :2], d)
    random_half(dm[:, 2:], d * mean_q)


def _weave_q3(planes: Mapping[str, U8]) -> None:
    """From 2-bit fields of a unit's first half (a) and second (b) and third bits (h) to whole numbers, as in shaders/quant/q3_k.glsl."""
    low, h = _words(planes["qs"], 2), planes["qh"].view(np.uint32)
    a, b = low[..., 0], low[..., 1]
    x = _every_byte((a, 0x03, 0), (h, 0x01, 2), (b, 0x03, 3), (h, 0x10, 1), (a, 0xC0, 0))
    y = _every_byte((a, 0x0C, -2), (h, 0x02, 1), (b, 0x0C, 1), (h, 0x20, 0), (h, 0x08, 3), (h, 0x80, 0))
    z = _every_byte((a, 0x30, -4), (h, 0x04, 0), (b, 0x30, -1), (h, 0x40, -1), (b, 0xC0, 0))
    low[..., 0], low[..., 1], h[...] = x, y, z


def _unweave_q3(planes: Mapping[str, U8]) -> None:
    low, h = _words(planes["qs"], 2), planes["qh"].view(np.uint32)
    x, y, z = low[..., 0], low[..., 1], h
    a = _every_byte((x, 0x03, 0), (y, 0x03, 2), (z, 0x03, 4), (x, 0xC0, 0))
    b = _every_byte((x, 0x18, -3), (y, 0x18, -1), (z, 0x18, 1), (z, 0xC0, 0))
    bits = _every_byte((x, 0x04, -2), (y, 0x04, -1), (z, 0x04, 0), (y, 0x40, -3), (x, 0x20, -1), (y, 0x20, 0), (z, 0x20, 1), (y, 0x80, 0))
    low[..., 0], low[..., 1], h[...] = a, b, bits


class _Q3K(Codec):
    block = packed(("qh", 32), ("qs", 64), ("scales", 12), ("d", 2))
    type = QuantType(
        "Q3_K",
        11,
        SUPER,
        block.itemsize,
        (Plane("qs", 8), Plane("qh", 4), Plane("scales", 12, SUPER), Plane("d", 2, SUPER)),
        step_factor=32,
    )
    moves: Mapping[str, Rearrange] = {"qs": CRUMBS, "qh": BIT_SQUARE, "scales": _SCALES12}
    weave = Weave(("qs", "qh"), _weave_q3, _unweave_q3)

    def decode(self, blocks: U8) -> F32:
        b = self.fields(blocks)
        scales = half(b["d"]) * (_six_bit_scales(b["scales"]).astype(np.int8) - np.int8(32)).astype(np.float32)
        q = crumbs(b["qs"]) | (_shifted(b["qh"], 32, tuple(range(8)), 1) << np.uint8(2))
        return _by_group(scales, (q.astype(np.int8) - np.int8(4)).astype(np.float32))

    def encode(self, x: F32, weights: Weights) -> U8:
        xv = value_major(x, 16)
        nearest = search.integers(-4, 3)
        targets = [-4 + 0.1 * i for i in range(-9, 20)]
        d, s = search.two_level_scale(xv, value_major(weights, 16), nearest, targets, (-32, 31))
        q = block_major(nearest(xv * search.reciprocal(d * s)) + 4)
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        b = self.fields(blocks)
        put_half(b["d"], d)
        _put_six_bit_scales(b["scales"], (s.T + 32).astype(np.uint8))
        put_crumbs(b["qs"], q & np.uint8(3))
        _put_shifted(b["qh"], q >> np.uint8(2), 32, tuple(range(8)))
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 128, signed=True)


def _weave_q5(planes: Mapping[str, U8]) -> None:
    """From nibbles (word w of qs: values 4w + b low, 16 + 4w + b high) and fifth bits to whole numbers, as in shaders/quant/q5_k.glsl."""
    low, h = _words(planes["qs"], 4), planes["qh"].view(np.uint32)
    a, b, c, d = (low[..., i].copy() for i in range(4))
    fifth = h.copy()
    low[..., 0] = _every_byte((a, 0x0F, 0), (fifth, 0x01, 4), (b, 0x70, 1))
    low[..., 1] = _every_byte((b, 0x0F, 0), (fifth, 0x02, 3), (b, 0x80, -2), (fifth, 0x20, 1), (d, 0x80, 0))
    low[..., 2] = _every_byte((c, 0x0F, 0), (fifth, 0x04, 2), (c, 0x70, 1))
    low[..., 3] = _every_byte((d, 0x0F, 0), (fifth, 0x08, 1), (c, 0x80, -2), (fifth, 0xC0, 0))
    h[...] = _every_byte((a, 0xF0, -4), (fifth, 0x10, 0), (d, 0x70, 1))


def _unweave_q5(planes: Mapping[str, U8]) -> None:
    low, h = _words(planes["qs"], 4), planes["qh"].view(np.uint32)
    v, w, x, y = (low[..., i].copy() for i in range(4))
    z = h.copy()
    low[..., 0] = _every_byte((v, 0x0F, 0), (z, 0x0F, 4))
    low[..., 1] = _every_byte((w, 0x0F, 0), (v, 0xE0, -1), (w, 0x20, 2))
    low[..., 2] = _every_byte((x, 0x0F, 0), (x, 0xE0, -1), (y, 0x20, 2))
    low[..., 3] = _every_byte((y, 0x0F, 0), (z, 0xE0, -1), (w, 0x80, 0))
    h[...] = _every_byte((v, 0x10, -4), (w, 0x10, -3), (x, 0x10, -2), (y, 0x10, -1), (z, 0x10, 0), (w, 0x40, -1), (y, 0xC0, 0))


def _weave_q6(planes: Mapping[str, U8]) -> None:
    """From nibbles (as those of Q5_K) and 2-bit fields of a unit's halves to whole numbers, as in shaders/quant/q6_k.glsl."""
    low, high = _words(planes["qs"], 4), _words(planes["qh"], 2)
    a, b, c, d = (low[..., i].copy() for i in range(4))
    first, second = high[..., 0].copy(), high[..., 1].copy()
    low[..., 0] = _every_byte((a, 0x0F, 0), (first, 0x03, 4), (d, 0x03, 6))
    low[..., 1] = _every_byte((b, 0x0F, 0), (first, 0x0C, 2), (d, 0x0C, 4))
    low[..., 2] = _every_byte((c, 0x0F, 0), (first, 0xF0, 0))
    low[..., 3] = _every_byte((a, 0xF0, -4), (second, 0x03, 4), (d, 0x30, 2))
    high[..., 0] = _every_byte((b, 0xF0, -4), (second, 0x0C, 2), (d, 0xC0, 0))
    high[..., 1] = _every_byte((c, 0xF0, -4), (second, 0xF0, 0))


def _unweave_q6(planes: Mapping[str, U8]) -> None:
    low, high = _words(planes["qs"], 4), _words(planes["qh"], 2)
    u, v, w, x = (low[..., i].copy() for i in range(4))
    y, z = high[..., 0].copy(), high[..., 1].copy()
    low[..., 0] = _every_byte((u, 0x0F, 0), (x, 0x0F, 4))
    low[..., 1] = _every_byte((v, 0x0F, 0), (y, 0x0F, 4))
    low[..., 2] = _every_byte((w, 0x0F, 0), (z, 0x0F, 4))
    low[..., 3] = _every_byte((u, 0xC0, -6), (v, 0xC0, -4), (x, 0xC0, -2), (y, 0xC0, 0))
    high[..., 0] = _every_byte((u, 0x30, -4), (v, 0x30, -2), (w, 0xF0, 0))
    high[..., 1] = _every_byte((x, 0x30, -4), (y, 0x30, -2), (z, 0xF0, 0))


class _Q45K(Codec):
    """Q4_K and Q5_K: Q5_K adds the plane of fifth bits, with which its nibbles are woven into whole numbers."""

    def __init__(self, name: str, ggml_id: int, bits: int) -> None:
        high = [("qh", 32)] if bits == 5 else []
        self.block = packed(("head", 16), *high, ("qs", 128))
        planes = [Plane("qs", 16), *(Plane("qh", 4) for _ in high), Plane("head", 16, SUPER)]
        self.type = QuantType(name, ggml_id, SUPER, self.block.itemsize, tuple(planes), step_factor=63)
        self.bits = bits
        self.moves = {"qs": NIBBLE_CHUNKS if bits == 5 else flipped_tops(NIBBLE_CHUNKS), "qh": BIT_SQUARE, "head": _HEAD}
        self.weave = Weave(("qs", "qh"), _weave_q5, _unweave_q5) if bits == 5 else None

    def halves(self) -> tuple[int, ...]:
        return 0, 2

    def decode(self, blocks: U8) -> F32:
        b = self.fields(blocks)
        dm = half(b["head"][:, :4])
        s, m = _six_bit_pairs(b["head"][:, 4:])
        q = _shifted(b["qs"], 32, (0, 4), 15)
        if self.bits == 5:
            q |= _shifted(b["qh"], 32, tuple(range(8)), 1) << np.uint8(4)
        weight = _by_group(dm[:, :1] * s.astype(np.float32), q.astype(np.float32))
        weight -= np.repeat(dm[:, 1:] * m.astype(np.float32), 32, axis=1)
        return weight

    def encode(self, x: F32, weights: Weights) -> U8:
        xv = value_major(x, 32)
        top = (1 << self.bits) - 1
        d, dmin, s, m = search.two_level_affine(xv, value_major(weights, 32), top, [0.1 * i for i in range(-15, 10)], 63)
        q = block_major(search.integers(0, top)((xv + dmin * m) * search.reciprocal(d * s)))
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        b = self.fields(blocks)
        put_half(b["head"][:, :4], np.stack([d, dmin], axis=1))
        _put_six_bit_pairs(b["head"][:, 4:], s.T.astype(np.uint8), m.T.astype(np.uint8))
        _put_shifted(b["qs"], q & np.uint8(15), 32, (0, 4))
        if self.bits == 5:
            _put_shifted(b["qh"], q >> np.uint8(4), 32, tuple(range(8)))
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        mean_q = ((1 << self.bits) - 1) / 2
        _random_pair(self.fields(blocks)["head"][:, :4], scale / (mean_q * 63), mean_q)


class _Q6K(Codec):
    block = packed(("qs", 128), ("qh", 64), ("scales", 16), ("d", 2))
    type = QuantType(
        "Q6_K", 14, SUPER, block.itemsize, (Plane("qs", 16), Plane("qh", 8), Plane("scales", 2), Plane("d", 2, SUPER)), step_factor=128
    )
    moves: Mapping[str, Rearrange] = {"qs": Q6_NIBBLES, "qh": CRUMBS}
    weave = Weave(("qs", "qh"), _weave_q6, _unweave_q6)

    def decode(self, blocks: U8) -> F32:
        b = self.fields(blocks)
        scales = half(b["d"]) * b["scales"].view(np.int8).astype(np.float32)
        q = _shifted(b["qs"], 64, (0, 4), 15) | (crumbs(b["qh"]) << np.uint8(4))
        return _by_group(scales, (q.astype(np.int8) - np.int8(32)).astype(np.float32))

    def encode(self, x: F32, weights: Weights) -> U8:
        xv = value_major(x, 16)
        nearest = search.integers(-32, 31)
        targets = [-32 + 0.2 * i for i in range(-9, 10)]
        d, s = search.two_level_scale(xv, value_major(weights, 16), nearest, targets, (-128, 127))
        q = block_major(nearest(xv * search.reciprocal(d * s)) + 32)
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        b = self.fields(blocks)
        put_half(b["d"], d)
        b["scales"] = s.T.astype(np.int8).view(np.uint8)
        _put_shifted(b["qs"], q & np.uint8(15), 64, (0, 4))
        put_crumbs(b["qh"], q >> np.uint8(4))
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        random_half(self.fields(blocks)["d"], scale / 4096, signed=True)


CODECS: tuple[Codec, ...] = (_Q2K(), _Q3K(), _Q45K("Q4_K", 12, bits=4), _Q45K("Q5_K", 13, bits=5), _Q6K())
