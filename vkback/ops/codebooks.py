"""Vector codebooks (types of decoder "codebook") as GLSL, for shaders/quant/codebook.glsl: generated/<type>_codes.glsl."""

from __future__ import annotations

from functools import partial

import numpy as np

from vkback import quants
from vkback.device import Capabilities
from vkback.ops.family import Chooser, declare
from vkback.ops.lowering import LowerContext
from vkback.shader import register_include

CODEBOOK_TYPES = tuple(dict.fromkeys(t.codebook.name for t in quants.QUANTS.values() if t.codebook))
"""Names of the codebooks: of the types they were made for."""

BYTE_SHIFTS = (0, 8, 4, 12)
"""Where 16 bits hold what belongs in bytes 0..3 of a word: `(e | e << 12) & mask` puts all four there at once."""


declare(
    "weight_layout",
    match={"quant": tuple(quants.PAIRED), "k": "number"},
    params={"codes": ("planes", "pairs")},  # of 4-bit codes: bit by bit, or two to a byte for look-ups in shared memory
    fixed="weights lie on the device as they were loaded",
)

IN_PAIRS: dict[str, str | int] = {"CODE_PAIRS": 1}
"""Defines and constants for a weight in pairs."""


def in_pairs(quant: str, k: int, tables: Chooser) -> bool:
    """Whether the codes of a weight of k columns lie in pairs on the device of these tables."""
    return quant in quants.PAIRED and tables.pick("weight_layout", quant=quant, k=k)["codes"] == "pairs"


def layout_defines(pairs: bool) -> dict[str, str | int]:
    """Defines that say in which layout a weight lies on a device."""
    return IN_PAIRS if pairs else {}


def decoder(quant: str, caps: Capabilities, pairs: bool = False) -> dict[str, str | int]:
    """Defines that choose the decoder of a weight (shaders/quant) in a kernel. pairs: as `in_pairs` says of it."""
    t = quants.quant(quant)
    defines = {"QUANT_FILE": f'"{t.shader}"', **layout_defines(pairs)}
    if t.codebook:
        defines["CODEBOOK_LITERALS"] = int(caps.software)
    return defines


def decoder_of(quant: str, k: int, ctx: LowerContext) -> dict[str, str | int]:
    """`decoder` of a weight of k columns."""
    return decoder(quant, ctx.caps, in_pairs(quant, k, ctx.tuning))


def shared_bytes(quant: str, caps: Capabilities) -> int:
    """Shared memory that a kernel's codebook takes (shaders/quant/codebook.glsl), 0 for types without one."""
    book = quants.quant(quant).codebook
    if book is None:
        return 0
    return len(book.grid()) * (2 if caps.software else book.entry_bytes)


def code_words(name: str) -> list[int]:
    """Two entries to a 32-bit word, 16 bits each: the level numbers of an entry's weights, lowest level 0.

    Weight b of the first four begins at bit BYTE_SHIFTS[b]; the second four, of entries of eight, two bits above.
    """
    grid = quants.codebook(name)
    levels = np.searchsorted(np.unique(grid), grid).astype(np.uint32)
    shifts = np.array([shift + 2 * four for four in range(grid.shape[1] // 4) for shift in BYTE_SHIFTS], np.uint32)
    entries = np.bitwise_or.reduce(levels << shifts, axis=1)
    return [int(w) for w in entries[0::2] | entries[1::2] << np.uint32(16)]


def include(name: str) -> str:
    """GLSL text: CODE_WORDS, and code_words either as the constant array CODES or, CODEBOOK_LITERALS, as stores into the array `codes`."""
    words = [f"0x{w:08x}u" for w in code_words(name)]
    quads = [", ".join(words[i : i + 4]) for i in range(0, len(words), 4)]
    array = ",\n    ".join(quads)
    stores = "\n    ".join(f"codes[{i}] = uvec4({quad});" for i, quad in enumerate(quads))
    return (
        f"#define CODE_WORDS {len(words)}\n"
        f"#if CODEBOOK_LITERALS\n"
        f"shared uvec4 codes[CODE_WORDS / 4];\n"
        f"void store_codes() {{\n    {stores}\n}}\n"
        f"#else\n"
        f"const uint CODES[CODE_WORDS] = uint[](\n    {array});\n"
        f"#endif\n"
    )


for _name in CODEBOOK_TYPES:
    register_include(f"{_name.lower()}_codes.glsl", partial(include, _name))
