"""Activations beyond the range of f16: how kernels tell, and the power of two by which they are packed instead.

A kernel that packs activations as f16 has an overflow word (shaders/gemm/overflow.glsl), of kind "counter", which stays zero while all
values are within 65504. Where it is not zero after a run, what the run made is worth nothing: the host plans anew, with a scale for the
tensor in question (`LowerContext.f16_scales`), and runs again. Sums are multiplied by the inverse. Powers of two round nothing, so a scale
costs at the lower end alone: steps of 2^-24 become steps of 2^-24 / scale. With the least scale, 2^-13, that is 2^-11, and a token whose
activations are 1 rms is still off by (2^-11)^2 / 12 = 2e-8 by energy, less than f16's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from vkback.errors import VkbackError
from vkback.graph import Tensor

F16_MAX = 65504.0

HEADROOM = 8.0
"""How much larger than what was met later values may be before there is a next scale."""

MIN_SCALE = 2.0**-13

SUFFIX = ".overflow"


class F16RangeError(VkbackError):
    """Activations that f16 cannot hold, scaled or not."""


def overflow_word(packed: Tensor) -> Tensor:
    """The overflow word of an F16 tensor."""
    return Tensor(packed.name + SUFFIX, "I32", (1,), "counter")


def is_overflow_word(tensor: Tensor) -> bool:
    return tensor.kind == "counter" and tensor.name.endswith(SUFFIX)


def rescaled(scales: Mapping[str, float], sizes: Mapping[str, float]) -> dict[str, float]:
    """The scales to run with after overflow words were raised.

    scales  those of the run, by the name of the F16 tensor; 1 where none is given
    sizes   by name of the overflow word, what it held: the largest size met, of scaled values
    Infinities and NaN may come of an overflow elsewhere: they count only where nothing else overflowed. Raises F16RangeError for them, and
    where the scale would be too small.
    """
    numbers = {name.removesuffix(SUFFIX): size for name, size in sizes.items() if math.isfinite(size)}
    if not numbers:
        name = next(iter(sizes)).removesuffix(SUFFIX)
        raise F16RangeError(
            f"[f16] {name}: activations are infinite or no numbers; the file is damaged or a kernel is wrong on this device: "
            "run `vkback test-ops`"
        )
    found = dict(scales)
    for name, size in numbers.items():
        real = size / scales.get(name, 1.0)
        fraction, exponent = math.frexp(HEADROOM * real / F16_MAX)  # fraction from 0.5 to below 1: its power of two is exact
        found[name] = math.ldexp(1.0, (fraction == 0.5) - exponent)
        if found[name] < MIN_SCALE:
            raise F16RangeError(
                f"[f16] {name}: activations reach {real:.3g}, and f16 holds up to {F16_MAX / HEADROOM / MIN_SCALE:.2g} of them beside "
                "others of usual size; run with --act f32"
            )
    return found
