"""What a quantized type is: its block in a GGUF file, the planes it is cut into on the device, and how a kernel decodes it. No codec.

These facts are the only place that says them: kernels, tables, the suite and the models ask the type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError

UNIT = 32
"""Weights in a unit, the grain of the device layout: every plane holds a whole number of bytes per unit or per 256 weights."""


class UnknownQuant(VkbackError):  # noqa: N818  what it says is enough
    """A type name that no codec here knows."""


class QuantShapeError(VkbackError):
    """A row length or an array that does not fit the type's block."""


class QuantRangeError(VkbackError):
    """Weights that a type cannot hold: too large for its scales, or no numbers."""


class NoEncoder(VkbackError):  # noqa: N818  what it says is enough
    """A type that can be read but not written here."""


@dataclass(frozen=True)
class Plane:
    """One plane of the device layout: `nbytes` for every `values` consecutive weights of a row."""

    name: str
    nbytes: int
    values: int = UNIT


Decoder = Literal["float", "bits", "levels", "codebook", "ternary"]
"""What a kernel does to decode a weight:

    float     nothing but a conversion
    bits      shifts and masks give an integer, scales (and offsets) the weight
    levels    four bits choose one of 16 levels, which a kernel computes (a scalar codebook)
    codebook  an index chooses 4 or 8 weights at once from a table in shared memory (a vector codebook)
    ternary   -1, 0 or 1 times a scale
"""


@dataclass(frozen=True)
class Codebook:
    """A vector codebook.

    name         of the type it was made for; types that share it name it alike. Shaders include it as generated/<name>_codes.glsl
    grid         gives it: int8 [entries, 4 or 8], at most four levels of entries of 8, eight levels of entries of 4
    entry_bytes  of an entry in a GPU's shared memory: of ENTRY in shaders/quant
    """

    name: str
    grid: Callable[[], npt.NDArray[np.int8]]
    entry_bytes: int


@dataclass(frozen=True)
class QuantType:
    """A GGUF tensor type.

    name          as GGUF spells it, "Q4_K"
    ggml_id       number in the file
    block_values  weights in a block of the file; 1 for plain floats
    block_bytes   bytes of that block
    planes        device layout, bulky planes first; empty when weights of this type are not kept on the device
    decoder       how a kernel decodes it; a match key of the tuning tables
    int_dot       whether its shader has an integer-dot path (UNIT_INTS)
    codebook     of decoder "codebook"
    step_factor  the quantization step of a unit is the block's scale `d` times at most this; 0: kernels know no such step
    rare          seldom met in files: the suite that runs at every build takes few of its cases, each of which is a compilation
    """

    name: str
    ggml_id: int
    block_values: int
    block_bytes: int
    planes: tuple[Plane, ...]
    decoder: Decoder = "bits"
    int_dot: bool = True
    codebook: Codebook | None = None
    rare: bool = False
    step_factor: int = 0

    @property
    def shader(self) -> str:
        """The file that decodes it on the device, relative to the shaders folder."""
        return f"quant/{self.name.lower()}.glsl"

    def row_bytes(self, k: int, tensor: str = "") -> int:
        """Bytes of a row of k weights in the file. Raises QuantShapeError, naming `tensor`, when k does not divide into blocks."""
        if k <= 0 or k % self.block_values:
            where = f"[{tensor}] " if tensor else "[quants] "
            raise QuantShapeError(f"{where}{k} columns is not a multiple of the {self.name} block ({self.block_values})")
        return k // self.block_values * self.block_bytes
