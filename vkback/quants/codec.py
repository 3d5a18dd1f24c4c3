"""A codec: decode, encode and random blocks of one type, and how its fields become planes.

A family module defines codecs and lists them in `CODECS`; `vkback/quants/registry.py` collects them. Blocks travel as uint8 `[n, bytes]`,
values as float32 `[n, values]`, with n small enough for the cache: callers cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vkback.quants.bits import Rearrange
from vkback.quants.quant_type import NoEncoder, QuantType

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32] | None

LARGEST_HALF = np.float32(65504)
EXPONENT_OF_HALF = 0x7C00
HALF_BITS_OF_2, HALF_BITS_OF_4 = 0x4000, 0x4400
COARSE_STEP = 15 / 64
"""The least quantization step that counts as coarse; kernels hold steps of less than 65504 * 2^-18, nearly 1/4."""


def packed(*fields: tuple[str, int]) -> np.dtype[np.void]:
    """A block as consecutive byte fields (name, bytes)."""
    return np.dtype([(name, np.uint8, (nbytes,)) for name, nbytes in fields])


@dataclass(frozen=True)
class Weave:
    """Planes that trade bits: two functions that change them in place, contiguous [n, bytes] each, and undo each other."""

    planes: tuple[str, ...]
    to_device: Callable[[Mapping[str, U8]], None]
    to_file: Callable[[Mapping[str, U8]], None]


class Limit(NamedTuple):
    """Matches a block if `read_uint(block, at, nbytes) & mask >= least`."""

    at: int
    nbytes: int
    mask: int
    least: int

    def reached(self, blocks: U8) -> npt.NDArray[np.bool_]:
        """[n, block_bytes] -> [n]."""
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[self.nbytes]
        value = blocks[:, self.at : self.at + self.nbytes].view(kind)[:, 0]
        found: npt.NDArray[np.bool_] = (value & kind(self.mask)) >= kind(self.least)
        return found


class Codec(ABC):
    """One type.

    type   what it is
    block  fields of a block in the file; of a unit of 32 weights for plain floats
    moves  planes whose bits are not in the file's order; every other plane is the field of the same name, byte for byte
    weave  what some planes do to each other after that
    """

    type: QuantType
    block: np.dtype[np.void]
    moves: Mapping[str, Rearrange] = {}
    weave: Weave | None = None

    @abstractmethod
    def decode(self, blocks: U8) -> F32:
        """[n, block_bytes] -> [n, block_values], with the rounding steps of ggml."""

    @abstractmethod
    def encode(self, x: F32, weights: Weights) -> U8:
        """[n, block_values] (and weights of the squared error, same shape, > 0) -> [n, block_bytes]."""

    @abstractmethod
    def randomize(self, blocks: U8, scale: float) -> None:
        """Random bytes become blocks whose weights have a magnitude of about `scale`: sets the scale fields, leaves the rest as it is."""

    def halves(self) -> tuple[int, ...]:
        """Bytes of a block at which its f16 begin: of the scale `d`, or of scale and offset `dm`."""
        places: Mapping[str, Any] = self.block.fields or {}
        found = (places[name][1] for name in ("d", "dm") if name in places and self.block[name].itemsize == 2 * len(name))
        return tuple(at + 2 * i for at in found for i in range(1 + ("dm" in places)))

    def unsound_limits(self) -> tuple[Limit, ...]:
        """Which blocks have weights that are NaN or infinite. Looks at the block's floats alone: its f16, and an exponent `e` (E8M0),
        of which 255 is NaN."""
        halves = (Limit(at, 2, EXPONENT_OF_HALF, EXPONENT_OF_HALF) for at in self.halves())
        return (*halves, *(Limit(at, 1, 0xFF, 255) for at in self._exponents()))

    def large_limits(self) -> tuple[Limit, ...]:
        """Which have a scale or offset of 2 or more. Others have no weight beyond 8192: by a scale of 1 the largest is 4096 (Q6_K)."""
        halves = (Limit(at, 2, 0x7FFF, HALF_BITS_OF_2) for at in self.halves())
        return (*halves, *(Limit(at, 1, 0xFF, 128) for at in self._exponents()))

    def coarse_limits(self) -> tuple[Limit, ...]:
        """Which may have a coarse quantization step, or an offset of 4 or more: what kernels that decode by way of subnormal f16 cannot
        hold (shaders/gemm/unit_f16.glsl)."""
        if not self.type.step_factor:
            return ()
        if exponents := self._exponents():  # a step of 2^(e - 128)
            return tuple(Limit(at, 1, 0xFF, 128 + ceil(log2(COARSE_STEP))) for at in exponents)
        step, *offsets = self.halves()
        least = int(np.float16(COARSE_STEP / self.type.step_factor).view(np.uint16))
        return (Limit(step, 2, 0x7FFF, least), *(Limit(at, 2, 0x7FFF, HALF_BITS_OF_4) for at in offsets))

    def _exponents(self) -> tuple[int, ...]:
        places: Mapping[str, Any] = self.block.fields or {}
        return (places["e"][1],) if "e" in places else ()

    def unsound(self, blocks: U8) -> npt.NDArray[np.bool_]:
        """[n, block_bytes] -> [n]: blocks with weights that are NaN or infinite."""
        return _any_reached(self.unsound_limits(), blocks)

    def coarse(self, blocks: U8) -> bool:
        """Whether one of [n, block_bytes] reaches a limit of these."""
        return bool(_any_reached(self.coarse_limits(), blocks).any())

    def beyond_f16(self, blocks: U8) -> bool:
        """Whether weights of [n, block_bytes] may overflow where a kernel makes f16 of them (shaders/gemm/unit_f16.glsl): whether one is
        beyond a quarter of the largest f16, which leaves room for what is subtracted last."""
        large = _any_reached(self.large_limits(), blocks)
        return bool(large.any()) and bool(np.abs(self.decode(np.ascontiguousarray(blocks[large]))).max() > LARGEST_HALF / 4)

    def fields(self, blocks: U8) -> Any:
        """Record view of [n, bytes] blocks: `fields(b)["qs"]` is [n, 16], writable through."""
        return blocks.view(self.block)[:, 0]


class DecodeOnly(Codec):
    """A type whose weights are read, never made."""

    def encode(self, x: F32, weights: Weights) -> U8:
        raise NoEncoder(f"[quants] {self.type.name} can be decoded, not encoded: quantize with another tool, or to Q2_K")


def _any_reached(limits: Sequence[Limit], blocks: U8) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(blocks), np.bool_)
    for limit in limits:
        found |= limit.reached(blocks)
    return found


def half(field: U8) -> F32:
    """[n, 2m] bytes of f16 -> [n, m] float32."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def as_half(values: F32) -> F32:
    """The nearest finite f16, as float32."""
    return np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float32)


def put_half(field: U8, values: F32) -> None:
    """Writes [n] or [n, m] float32 as f16 into [n, 2m] bytes; beyond the range of f16 its largest, never inf."""
    field[...] = as_half(values).astype(np.float16).reshape(len(field), -1).view(np.uint8)


def random_half(field: U8, center: float, signed: bool = False) -> None:
    """Makes [n, 2] random bytes an f16 of about `center`: up to half above, never inf or nan. `signed` keeps the random sign."""
    bits = field.view(np.uint16)
    base = max(int(np.float16(min(center, 3e4)).view(np.uint16)), 1)
    # The low bits stay random. Below 1024 an f16 is subnormal and its bits are its value, so that few may vary.
    spread = min(0x1FF, (1 << (base.bit_length() - 1)) // 2 - 1) if base > 1 else 0
    keep = np.uint16(max(spread, 0) | (0x8000 if signed else 0))
    bits &= keep
    bits += np.uint16(base)
