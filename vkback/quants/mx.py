"""Microscaling formats: 4-bit floats (E2M1) under a shared 8-bit scale.

    MXFP4  e, an exponent | qs 16 bytes: value j low, j + 16 high                    weight = 2^(e - 128) level(q)
    NVFP4  d 4 bytes, UE4M3, one per 16 of 64 weights | qs 32: per 16 weights
           8 bytes, value j low, j + 8 high                                          weight = d / 2 level(q)

Levels are twice the E2M1 values, which makes them integers; hence 128 where the exponent's bias is 127, and d / 2. UE4M3 is a float of 4
exponent bits (bias 7) and 3 fraction bits without a sign; its codes 0 and 0x7f mean 0. A tensor of NVFP4 may come with a further f32 scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from vkback.quants.bits import NIBBLE_GROUPS, Rearrange, renamed_nibbles
from vkback.quants.codec import F32, U8, Codec, Weights, packed
from vkback.quants.legacy import nibbles, put_nibbles
from vkback.quants.quant_type import Plane, QuantType

MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1_DOUBLED = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
E2M1_ORDER = (7, 1, 10, 3, 6, 2, 4, 5, 13, 11, 0, 9, 12, 8, 14, 15)
"""The device's nibble for each code of the file; shaders/quant/e2m1.glsl has the formula that this order makes true."""
_MIDDLES = np.array([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], np.float32)


E8M0_BIAS = 127

HALF_E8M0 = np.ldexp(np.float32(0.5), np.arange(256) - E8M0_BIAS).astype(np.float32)
"""Half the scale of each code of E8M0, a power of two without sign or fraction: half because E2M1_DOUBLED holds levels twice as large. The
scales of codes 0 and 1 are subnormal then. Code 255, NaN in the specification, is a power of two like the others, as gguf has it; encoders
do not write it, and a load refuses it. Kernels that look levels up take its scale as infinite, and of code 0, which is that of zeros, the
weights (at most 2^-124) as 0: the exact scale costs 3 % of their instructions (ACO, 152.2 -> 156.7 in32 on polaris10)."""

LARGEST_E8M0 = 252
"""That an encoder writes: by the next one the two largest levels are beyond F32."""


def e8m0_to_f32_half(e: U8) -> F32:
    """2^(e - 127) / 2."""
    return HALF_E8M0[e]


def nearest_e2m1(x: F32, unit: F32) -> U8:
    """Codes of the levels nearest to x / unit; halfway goes to the smaller magnitude. unit is a power of two, so that x / unit is exact."""
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.abs(x) / unit
    code = np.zeros(x.shape, np.uint8)
    for middle in _MIDDLES:
        code += magnitude > middle
    code[(code > 0) & (x < 0)] += np.uint8(8)
    return code


class _MXFP4(Codec):
    block = packed(("e", 1), ("qs", 16))
    type = QuantType("MXFP4", 39, 32, block.itemsize, (Plane("qs", 16), Plane("e", 1)), "levels", step_factor=1)
    moves: Mapping[str, Rearrange] = {"qs": renamed_nibbles(E2M1_ORDER)}

    def decode(self, blocks: U8) -> F32:
        return e8m0_to_f32_half(blocks[:, :1]) * E2M1_DOUBLED[nibbles(blocks[:, 1:])]

    def encode(self, x: F32, weights: Weights) -> U8:
        """Without weights by the rule of the OCP specification (the largest magnitude decides the exponent); with weights also one more.

        The exponent is read off the number: a logarithm in f32 rounds up just below a power of two, at the largest F32 to a scale whose
        level 8 is infinite. Exponents end at LARGEST_E8M0 then, as those of shaders/encode/units.glsl do.
        """
        amax = np.abs(x).max(axis=1, keepdims=True)
        exponent = np.frexp(amax)[1] - 1 + (E8M0_BIAS - 2)
        e = np.clip(np.where(amax > 0, exponent, 0), 0, LARGEST_E8M0).astype(np.uint8)
        code = nearest_e2m1(x, e8m0_to_f32_half(e))
        if weights is not None:
            above = np.minimum(e, np.uint8(LARGEST_E8M0 - 1)) + np.uint8(1)
            code_above = nearest_e2m1(x, e8m0_to_f32_half(above))

            def error(e: U8, code: U8) -> F32:
                with np.errstate(over="ignore"):
                    off: F32 = e8m0_to_f32_half(e) * E2M1_DOUBLED[code] - x
                    total: F32 = (off * off * weights).sum(axis=1, keepdims=True)
                return total

            better = error(above, code_above) < error(e, code)
            e, code = np.where(better, above, e), np.where(better, code_above, code)
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        blocks[:, :1] = e
        put_nibbles(blocks[:, 1:], code)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        # The random byte decides between two neighbouring exponents, so that any scale is met on average.
        whole, part = divmod(float(np.log2(scale / 8)) + 128, 1)
        e = blocks[:, 0]
        e[...] = (e < int(part * 256)) + np.uint8(np.clip(whole, 0, 253))


def _ue4m3(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    if code in (0, 0x7F):
        return 0.0
    return fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)


HALF_UE4M3 = np.array([_ue4m3(code) / 2 for code in range(256)], np.float32)
"""d / 2 for each code of NVFP4's scales."""


def nearest_ue4m3(d: F32) -> U8:
    """Codes of the scales nearest to d >= 0; halfway goes to the even code, beyond the largest to that."""
    middles = (HALF_UE4M3[:126] + HALF_UE4M3[1:127]).astype(np.float32)
    below, above = np.searchsorted(middles, d, side="left"), np.searchsorted(middles, d, side="right")
    code: U8 = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return code


class _NVFP4(Codec):
    block = packed(("d", 4), ("qs", 32))
    type = QuantType("NVFP4", 40, 64, block.itemsize, (Plane("qs", 16), Plane("d", 2)), "levels", rare=True)
    moves: Mapping[str, Rearrange] = {"qs": renamed_nibbles(E2M1_ORDER, NIBBLE_GROUPS)}

    def decode(self, blocks: U8) -> F32:
        n = len(blocks)
        level = E2M1_DOUBLED[nibbles(blocks[:, 4:].reshape(n * 4, 8))]
        weight: F32 = HALF_UE4M3[blocks[:, :4]].reshape(n * 4, 1) * level
        return weight.reshape(n, 64)

    def encode(self, x: F32, weights: Weights) -> U8:
        """The largest magnitude of 16 values becomes the largest level, as nearly as the scale can say; importances do not enter."""
        groups = x.reshape(-1, 16)
        code = nearest_ue4m3(np.abs(groups).max(axis=1) / np.float32(6))
        levels = nearest_e2m1(groups, HALF_UE4M3[code][:, None])
        levels[code == 0] = 0
        blocks = np.empty((len(x), self.type.block_bytes), np.uint8)
        blocks[:, :4] = code.reshape(-1, 4)
        packed_levels = np.empty((len(groups), 8), np.uint8)
        put_nibbles(packed_levels, levels)
        blocks[:, 4:] = packed_levels.reshape(-1, 32)
        return blocks

    def randomize(self, blocks: U8, scale: float) -> None:
        # Codes are few: the random byte decides between the two around the scale wanted. Below 2^-6 a code counts 512ths.
        d = scale / 4
        exponent = max(int(np.floor(np.log2(d))), -6)
        code = d * 512 if d < 2.0**-6 else 8 * (exponent + 6 + d / 2.0**exponent)
        whole, part = divmod(float(np.clip(code, 1, 0x7D)), 1)
        field = blocks[:, :4]
        field[...] = (field < int(part * 256)) + np.uint8(whole)


CODECS: tuple[Codec, ...] = (_MXFP4(), _NVFP4())
