"""What a quantized type is: its block in a GGUF file and the planes it is cut into on the device. Numbers only, no codec."""

from __future__ import annotations

from dataclasses import dataclass

from vkback.errors import VkbackError

UNIT = 32
"""Weights in a unit, the grain of the device layout: every plane holds a whole number of bytes per unit or per 256 weights."""


class UnknownQuant(VkbackError):  # noqa: N818  what it says is enough
    """A type name that no codec here knows."""


class QuantShapeError(VkbackError):
    """A row length or an array that does not fit the type's block."""


class NoEncoder(VkbackError):  # noqa: N818  what it says is enough
    """A type that can be read but not written here."""


@dataclass(frozen=True)
class Plane:
    """One plane of the device layout: `nbytes` for every `values` consecutive weights of a row."""

    name: str
    nbytes: int
    values: int = UNIT


@dataclass(frozen=True)
class QuantType:
    """A GGUF tensor type.

    name          as GGUF spells it, "Q4_K"
    ggml_id       number in the file
    block_values  weights in a block of the file; 1 for plain floats
    block_bytes   bytes of that block
    planes        device layout, bulky planes first; empty when weights of this type are not kept on the device
    """

    name: str
    ggml_id: int
    block_values: int
    block_bytes: int
    planes: tuple[Plane, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_values

    def row_bytes(self, k: int, tensor: str = "") -> int:
        """Bytes of a row of k weights in the file. Raises QuantShapeError, naming `tensor`, when k does not divide into blocks."""
        if k <= 0 or k % self.block_values:
            where = f"[{tensor}] " if tensor else "[quants] "
            raise QuantShapeError(f"{where}{k} columns is not a multiple of the {self.name} block ({self.block_values})")
        return k // self.block_values * self.block_bytes
