"""SPIR-V whose float arithmetic is carried out as written.

A driver may join a product and a sum into one fused multiply-add, or reorder a sum, and may choose otherwise in each variant of a shader.
NoContraction forbids it for an instruction. `as_written` puts it on all float arithmetic of a module, so that two variants with the same
operations on a value give it the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

HEADER_WORDS = 5
EXT_INST_IMPORT, EXT_INST, DECORATE = 11, 12, 71
NO_CONTRACTION = 42

ARITHMETIC = frozenset((127, 129, 131, 133, 136, 140, 141, *range(142, 149)))
"""Float instructions: FNegate, FAdd, FSub, FMul, FDiv, FRem, FMod, products of vectors and matrices, Dot. Result id in the second word."""

EXTENDED = frozenset((46, 50))
"""Of GLSL.std.450: FMix and Fma, which is one operation only where it is decorated."""

BEFORE_ANNOTATIONS = frozenset((2, 3, 4, 5, 6, 7, 8, 10, EXT_INST_IMPORT, 14, 15, 16, 17, 330, 331))
"""What may stand before the annotations of a module: sources and names, extensions, memory model, entry points, modes, capabilities."""


def as_written(spirv: bytes) -> bytes:
    """The module with NoContraction on its float arithmetic."""
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    place, glsl, found, there = 0, 0, list[int](), set[int]()
    for at, opcode, length in instructions(words):
        place = place or (0 if opcode in BEFORE_ANNOTATIONS else at)
        if opcode == EXT_INST_IMPORT and struct.pack(f"<{length - 2}I", *words[at + 2 : at + length]).startswith(b"GLSL.std.450\0"):
            glsl = words[at + 1]
        if opcode in ARITHMETIC or (opcode == EXT_INST and words[at + 3] == glsl and words[at + 4] in EXTENDED):
            found.append(words[at + 2])
        if opcode == DECORATE and words[at + 2] == NO_CONTRACTION:
            there.add(words[at + 1])  # by `precise`
    added = [word for id in found if id not in there for word in (3 << 16 | DECORATE, id, NO_CONTRACTION)]
    return struct.pack(f"<{len(words) + len(added)}I", *words[:place], *added, *words[place:])


def instructions(words: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(first word, opcode, words) of each instruction."""
    at = HEADER_WORDS
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        yield at, opcode, length
        at += length
