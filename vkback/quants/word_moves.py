"""Repacking as a table that shaders/load/repack.comp reads: which bits of which words of the file make each word of the device layout.

Whatever a codec's moves and weave do, they only move bits within a block and flip some, apart from nibbles that get other names. So the
table is found by asking: blocks in which bit i is digit k of the number i, for every k, tell after `repack` where each bit came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from vkback.quants.codec import Codec, Limit
from vkback.quants.device_layout import blocks_to_planes
from vkback.quants.quant_type import QuantShapeError
from vkback.quants.registry import codec

U32 = npt.NDArray[np.uint32]

UNSOUND, LARGE, COARSE = 1, 2, 4
"""Bits of a flag that the shader raises: weights that are NaN or infinite; scales that may be too large for f16 (`Codec.large_limits`), or
for subnormal f16 (`Codec.coarse_limits`)."""

IDENTITY_MAP = tuple(range(16))

_HEADER, _PER_PLANE, _PER_WORD, _PER_TERM = 4, 4, 3, 2


@dataclass(frozen=True)
class WordMoves:
    """How a group of blocks of a type becomes words of its planes. A unit of 32 values counts as the block of plain floats.

    block_bytes  of one block
    blocks       in a group: the fewest that make whole words of every plane, so 1, 2 or 4
    words        32-bit words of a group, in the file and on the device alike
    planes       words of each plane, per group
    table        what the shader reads; the comment at its top has the layout
    """

    name: str
    block_bytes: int
    blocks: int
    words: int
    planes: tuple[int, ...]
    table: U32

    @property
    def nbytes(self) -> int:
        """Of a group."""
        return 4 * self.words


def moves_words(name: str) -> bool:
    """Whether a type has a table."""
    try:
        word_moves(name)
    except QuantShapeError:
        return False
    return True


@cache
def word_moves(name: str) -> WordMoves:
    """The table of a type. Raises QuantShapeError for one whose repacking does more than move bits and rename nibbles."""
    c = codec(name)
    size = c.block.itemsize
    widths = [c.block[plane.name].itemsize for plane in c.type.planes]
    count = next(n for n in (1, 2, 4) if all(n * width % 4 == 0 for width in widths))
    words = count * size // 4
    digits = (32 * words - 1).bit_length()
    numbers = np.arange(32 * words, dtype=np.uint32)
    asked = np.zeros((1 + digits, 32 * words), np.uint8)
    for k in range(digits):
        asked[1 + k] = numbers >> np.uint32(k) & np.uint32(1)
    answers = _repacked(c, np.packbits(asked, axis=1, bitorder="little"), widths, count)
    flips = answers[0]
    sources = sum((answers[1 + k] ^ flips).astype(np.int64) << k for k in range(digits))
    if not np.array_equal(np.sort(sources), numbers):
        raise QuantShapeError(f"[quants] {name}: repacking is no permutation of bits; give its moves `renamed` where they rename nibbles")
    planes = tuple(count * width // 4 for width in widths)
    return WordMoves(name, size, count, words, planes, _table(c, count, words, planes, np.asarray(sources), flips))


def _repacked(c: Codec, groups: npt.NDArray[np.uint8], widths: Sequence[int], count: int) -> npt.NDArray[np.uint8]:
    """Groups [n, bytes] as the bits of their planes, end to end [n, bits]."""
    blocks = groups.reshape(-1, c.block.itemsize)
    planes = [np.empty((len(blocks), width), np.uint8) for width in widths]
    blocks_to_planes(c, blocks, planes, names=False)
    return np.unpackbits(np.concatenate([p.reshape(len(groups), -1) for p in planes], axis=1), axis=1, bitorder="little")


def _table(c: Codec, count: int, words: int, planes: Sequence[int], sources: npt.NDArray[np.int64], flips: npt.NDArray[np.uint8]) -> U32:
    heads: list[int] = []
    entries: list[int] = []
    terms: list[int] = []
    first_entry = _HEADER + _PER_PLANE * len(planes)
    first_term = first_entry + _PER_WORD * words
    word = 0
    for plane, length in zip(c.type.planes, planes, strict=True):
        move = c.moves.get(plane.name)
        order = (move.renamed if move else ()) or IDENTITY_MAP
        low, high = (sum(order[8 * half + n] << 4 * n for n in range(8)) for half in (0, 1))
        heads += [length, first_entry + _PER_WORD * word, low, high]
        for _ in range(length):
            bits = slice(32 * word, 32 * word + 32)
            begin = first_term + len(terms)
            for (source, left), mask in _terms(sources[bits]).items():
                terms += [source | left << 16, mask]
            entries += [begin, first_term + len(terms), sum(int(flip) << bit for bit, flip in enumerate(flips[bits]))]
            word += 1
    all_limits = ((UNSOUND, c.unsound_limits()), (LARGE, c.large_limits()), (COARSE, c.coarse_limits()))
    limits = [n for bit, found in all_limits for n in _limits(c, count, found, bit)]
    header = [words, len(planes), first_term + len(terms), len(limits) // 4]
    return np.array([*header, *heads, *entries, *terms, *limits], np.uint32)


def _terms(sources: npt.NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """Of one word: (word of the group, bits to rotate it left by) -> mask of the bits that it then gives."""
    found: dict[tuple[int, int], int] = {}
    for bit, source in enumerate(map(int, sources)):
        key = source >> 5, (bit - source) & 31
        found[key] = found.get(key, 0) | 1 << bit
    return found


def _limits(c: Codec, count: int, limits: Sequence[Limit], bit: int) -> list[int]:
    """For every block of a group: word, mask, least and the flag's bit."""
    found: list[int] = []
    for begin in range(0, count * c.block.itemsize, c.type.block_bytes):
        for limit in limits:
            at = begin + limit.at
            shift = 8 * (at % 4)
            if shift + 8 * limit.nbytes > 32:
                raise QuantShapeError(f"[quants] {c.type.name}: {limit} of a block at byte {begin} lies in two words")
            found += [at // 4, limit.mask << shift, limit.least << shift, bit]
    return found
