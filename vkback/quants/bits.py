"""Moving bits between the order of a GGUF block and the order of the device, many blocks at once.

All of it is permutations of bits that only exchange bits of the position number: position p of a 64-bit word has the number's binary
digits as coordinates, and every rearrangement here permutes coordinates. So two in-place steps do everything: exchanging two coordinates
inside a word, and exchanging a coordinate with "which of two words". Words are kept word-major (`[word, block]`), so that each numpy call
runs along many blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]


@cache
def _positions_with(digit: int, bits: int) -> int:
    """Mask of the positions of a word whose binary digit `digit` is 1."""
    return sum(1 << p for p in range(bits) if p >> digit & 1)


def swap_digits(x: Words, high: int, low: int) -> None:
    """Exchanges digits `high` and `low` (high > low) of every bit's position, in place: one delta swap."""
    bits = 8 * x.itemsize
    kind = x.dtype.type
    shift = kind((1 << high) - (1 << low))
    t = x >> shift
    t ^= x
    t &= kind(_positions_with(low, bits) & ~_positions_with(high, bits))
    x ^= t
    t <<= shift
    x ^= t


def swap_words(x: Words, y: Words, digit: int) -> None:
    """Exchanges the positions of x with `digit` 1 against those of y with `digit` 0, in place."""
    bits = 8 * x.itemsize
    kind = x.dtype.type
    t = x >> kind(1 << digit)
    t ^= y
    t &= kind(((1 << bits) - 1) & ~_positions_with(digit, bits))
    y ^= t
    t <<= kind(1 << digit)
    x ^= t


def swap_digit_pairs(x: Words, pairs: tuple[tuple[int, int], ...]) -> None:
    for high, low in pairs:
        swap_digits(x, high, low)


Move = Callable[[U8, U8], None]


@dataclass(frozen=True)
class Rearrange:
    """How a field of the block becomes a plane: two functions of (source [n, bytes], destination [n, bytes]) that undo each other.

    renamed  where they do more than move and flip bits: what nibble n of the field becomes, before `bits` moves it
    bits     `to_device` without that
    """

    to_device: Move
    to_file: Move
    renamed: tuple[int, ...] = ()
    bits: Move | None = None


def _word_major(src: U8) -> npt.NDArray[np.uint64]:
    """[n, bytes] as [bytes / 8, n] of 64-bit words, a copy."""
    return src.view(np.uint64).T.copy()


def _nibble_exchange(half: int) -> Rearrange:
    """The first `half` 64-bit words of a run give their high nibbles for the low nibbles of the next `half`: its own inverse."""

    def exchange(src: U8, dst: U8) -> None:
        words = _word_major(src)
        halves = words.reshape(-1, 2, half, words.shape[-1])
        swap_words(halves[:, 0], halves[:, 1], 2)
        dst.view(np.uint64)[...] = words.T

    return Rearrange(exchange, exchange)


NIBBLE_CHUNKS = _nibble_exchange(2)
"""Q4_K, Q5_K: a chunk of 64 weights has 32 bytes, value l low and 32 + l high; a unit wants value j low and 16 + j high. So the upper 16
bytes' low nibbles trade places with the lower 16 bytes' high nibbles, and the two resulting units lie where the two halves lay."""

NIBBLE_GROUPS = _nibble_exchange(1)
"""NVFP4: a group of 16 weights has 8 bytes, value l low and 8 + l high; two groups make a unit."""


def _q6_nibbles_to_device(src: U8, dst: U8) -> None:
    words = _word_major(src)
    n = words.shape[-1]
    halves = words.reshape(2, 2, 2, 2, n)
    swap_words(halves[:, :, 0], halves[:, :, 1], 2)
    # Q6_K pairs unit p with unit p + 2 of its half in one chunk, not with its neighbour.
    dst.view(np.uint64).reshape(n, 2, 2, 2, 2)[...] = halves.transpose(4, 0, 2, 1, 3)


def _q6_nibbles_to_file(src: U8, dst: U8) -> None:
    n = len(src)
    halves = src.view(np.uint64).reshape(n, 2, 2, 2, 2).transpose(1, 3, 2, 4, 0).copy()
    swap_words(halves[:, :, 0], halves[:, :, 1], 2)
    dst.view(np.uint64)[...] = halves.reshape(16, n).T


Q6_NIBBLES = Rearrange(_q6_nibbles_to_device, _q6_nibbles_to_file)


def _crumb_steps(words: npt.NDArray[np.uint64]) -> None:
    # words [2, 2, pair, n]: an 8-word square of 2-bit fields. Word number (pair, digit 5) trades with field number (digits 2, 1).
    swap_words(words[:, :, 0], words[:, :, 1], 2)
    swap_digits(words, 5, 1)


def _crumbs_to_device(src: U8, dst: U8) -> None:
    # Byte 32h + l, bits 2s..2s+1 hold value l of unit 4h + s; a unit wants bits 8b + 2i of word w to hold value 16w + 4i + b.
    words = _word_major(src)
    n = words.shape[-1]
    words = words.reshape(2, 2, 2, n)  # half h, word w of the unit, pair of 4-byte groups i
    _crumb_steps(words)  # now half, w, pair of units s; digit 5 is s & 1
    swap_words(words[:, 0], words[:, 1], 5)
    dst.view(np.uint64).reshape(n, 2, 2, 2)[...] = words.transpose(3, 0, 2, 1)


def _crumbs_to_file(src: U8, dst: U8) -> None:
    n = len(src)
    words = src.view(np.uint64).reshape(n, 2, 2, 2).transpose(1, 3, 2, 0).copy()
    swap_words(words[:, 0], words[:, 1], 5)
    _crumb_steps(words)
    dst.view(np.uint64)[...] = words.reshape(8, n).T


CRUMBS = Rearrange(_crumbs_to_device, _crumbs_to_file)
"""Q2_K, Q3_K low bits and Q6_K high bits: 64 bytes a block."""


def _bit_square(src: U8, dst: U8) -> None:
    # Bit u of byte l holds value l of unit u; a unit wants bit 8b + i to hold value 4i + b. In each byte column b that is the transposition
    # of 8 words (i) by 8 bits (u), its own inverse.
    words = _word_major(src)
    swap_words(words[:2], words[2:], 2)
    swap_words(words[0::2], words[1::2], 1)
    swap_digits(words, 5, 0)
    dst.view(np.uint64)[...] = words.T


BIT_SQUARE = Rearrange(_bit_square, _bit_square)
"""Q3_K and Q5_K high bits: 32 bytes a block."""


def then_digits(first: Rearrange, steps: tuple[tuple[int, int], ...]) -> Rearrange:
    """`first`, and exchanges of digits in the 64-bit words of its result."""

    def to_device(src: U8, dst: U8) -> None:
        first.to_device(src, dst)
        swap_digit_pairs(dst.view(np.uint64), steps)

    def to_file(src: U8, dst: U8) -> None:
        words = src.copy()
        swap_digit_pairs(words.view(np.uint64), steps[::-1])
        first.to_file(words, dst)

    return Rearrange(to_device, to_file)


def renamed_nibbles(order: Sequence[int], first: Rearrange | None = None) -> Rearrange:
    """Nibble n becomes order[n], after the moves of `first`. Two bytes are looked up at a time."""
    byte = np.array([order[b & 15] | order[b >> 4] << 4 for b in range(256)], np.uint16)
    pair = (byte[None, :] | byte[:, None] << np.uint16(8)).ravel()
    back = np.empty_like(pair)
    back[pair] = np.arange(1 << 16, dtype=np.uint16)

    def to_device(src: U8, dst: U8) -> None:
        if first is not None:
            first.to_device(src, dst)
            src = dst
        dst.view(np.uint16)[...] = pair[np.ascontiguousarray(src).view(np.uint16)]

    def to_file(src: U8, dst: U8) -> None:
        nibbles = back[src.view(np.uint16)].view(np.uint8)
        if first is None:
            dst[...] = nibbles
        else:
            first.to_file(nibbles, dst)

    return Rearrange(to_device, to_file, tuple(order), _as_is if first is None else first.to_device)


def _as_is(src: U8, dst: U8) -> None:
    dst[...] = src


def _exchanged(first: Rearrange, exchange: Callable[[U8], None]) -> Rearrange:
    """`first`, which may rename nibbles, then an exchange of bits in place, which undoes itself."""

    def then_exchange(move: Move) -> Move:
        def moved(src: U8, dst: U8) -> None:
            move(src, dst)
            exchange(dst)

        return moved

    def to_file(src: U8, dst: U8) -> None:
        nibbles = src.copy()
        exchange(nibbles)
        first.to_file(nibbles, dst)

    return Rearrange(then_exchange(first.to_device), to_file, first.renamed, then_exchange(first.bits or first.to_device))


def bit_planes(first: Rearrange) -> Rearrange:
    """After the moves of `first`, 16 bytes of nibbles become four words: bit 8b + i of word k is bit k of value 4i + b. Digits 1 and 0 of a
    bit's position, its place in the nibble, change places with digits 6 and 5, the number of the word."""

    def exchange(planes: U8) -> None:
        words = planes.view(np.uint64)
        swap_words(words[:, 0::2], words[:, 1::2], 1)
        swap_digits(words, 5, 0)

    return _exchanged(first, exchange)


def pairs_two_apart(first: Rearrange) -> Rearrange:
    """After the moves of `first`, 16 bytes of nibbles, byte j of values j and 16 + j: byte 4w + 2h + p comes to hold values 16h + 4w + p,
    low, and that + 2, high."""

    def exchange(nibbles: U8) -> None:
        swap_digits(nibbles.view(np.uint64), 4, 2)

    return _exchanged(first, exchange)


def flipped_tops(first: Rearrange | None = None) -> Rearrange:
    """The top bit of every byte flipped, after the moves of `first`: high nibbles are then signed, the low ones masked out."""

    def flip(src: U8, dst: U8) -> None:
        np.bitwise_xor(src, np.uint8(0x80), out=dst)

    if first is None:
        return Rearrange(flip, flip)

    def to_device(src: U8, dst: U8) -> None:
        first.to_device(src, dst)
        flip(dst, dst)

    def to_file(src: U8, dst: U8) -> None:
        first.to_file(src ^ np.uint8(0x80), dst)

    return Rearrange(to_device, to_file)


# A unit's word number is the half; a byte's field numbers are (i1 i0) of values 4i..4i+3. They become i1 and (i0, half).
_HALVES_SIDE_BY_SIDE = ((5, 2), (2, 1))

Q2_CRUMBS = then_digits(CRUMBS, _HALVES_SIDE_BY_SIDE)
"""Q2_K: as CRUMBS, the two halves of a unit side by side in every byte."""


def interleave(item: type[np.unsignedinteger[Any]]) -> Rearrange:
    """Two fields, one after the other, of one item per unit each, become pairs of items."""

    def pairs(src: U8, dst: U8) -> None:
        n = len(src)
        dst.view(item).reshape(n, -1, 2)[...] = src.view(item).reshape(n, 2, -1).transpose(0, 2, 1)

    def halves(src: U8, dst: U8) -> None:
        n = len(src)
        dst.view(item)[...] = src.view(item).reshape(n, -1, 2).transpose(0, 2, 1).reshape(n, -1)

    return Rearrange(pairs, halves)


# Q5_0 and Q5_1: bit 4i + b becomes bit 8b + i. Digits (i2 i1 i0 b1 b0) to (b1 b0 i2 i1 i0).
_HIGH_BIT_STEPS = ((4, 1), (3, 0), (2, 1), (1, 0))


def _digit_steps(steps: tuple[tuple[int, int], ...]) -> Move:
    def move(src: U8, dst: U8) -> None:
        words = src.copy().view(np.uint32)
        swap_digit_pairs(words, steps)
        dst.view(np.uint32)[...] = words

    return move


HIGH_BITS = Rearrange(_digit_steps(_HIGH_BIT_STEPS), _digit_steps(_HIGH_BIT_STEPS[::-1]))
"""Q5_0, Q5_1: 4 bytes a block."""

TWO_BITS = Rearrange(_digit_steps(((3, 1), (4, 2))), _digit_steps(((3, 1), (4, 2))))
"""Q2_0: of 16 values in a word, value 4b + i moves from bits 8b + 2i to 8i + 2b."""
