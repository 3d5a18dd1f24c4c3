"""Keys and values beyond the range of a cache's type: which they are, once logits turn out to be no numbers.

A kernel that meets a number that the type cannot hold stores BEYOND_F16 in its place, or as the scale of its unit
(shaders/cache/f16_bits.glsl). That is a NaN, so attention over the row gives NaN, and the check of the logits finds it without
further reads of the device. Only then does the host look through the caches. An infinity counts as well: it is what a kernel would store
that does not do so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

BEYOND_F16 = 0x7FFF

LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "Q4_0": 8 * 65504.0}
"""Size of a value that a type holds, at most."""

_NAME = re.compile(r"cache_([kv])_l(\d+)")

Found = Literal["numbers", "beyond", "nan"]


def judge(halves: npt.NDArray[np.uint16]) -> Found:
    """What values or scales are, by their F16 bits."""
    magnitude = halves & 0x7FFF
    if ((magnitude == BEYOND_F16) | (magnitude == 0x7C00)).any():
        return "beyond"
    return "nan" if (magnitude > 0x7C00).any() else "numbers"


def beyond_range(names: Sequence[str], look: Callable[[str], Found]) -> list[str]:
    """Caches of the first layer whose keys or values are beyond the range of their type; none where they are no numbers for another reason
    in that layer or before it. look: what is in a cache."""
    numbered = sorted((int(found[2]), name) for name in names if (found := _NAME.fullmatch(name)))
    for _, layer in groupby(numbered, key=lambda one: one[0]):
        states = {name: look(name) for _, name in layer}
        if any(what != "numbers" for what in states.values()):
            return [name for name, what in states.items() if what == "beyond"]
    return []


def overflow_message(found: Sequence[tuple[str, str]]) -> str:
    """One line of (name, type) of caches that `beyond_range` found: layer, what is beyond which type, and what to do."""
    parts = [(match[1], match[2], kind) for name, kind in found if (match := _NAME.fullmatch(name))]
    whats = " and ".join(f"{'keys' if which == 'k' else 'values'} are beyond {LARGEST[kind]:.0f}" for which, _, kind in parts)
    types = " and ".join(dict.fromkeys(kind.lower() for _, _, kind in parts))
    options = " ".join(f"--cache-type-{which} f32" for which, _, _ in parts)
    arguments = ", ".join(f'cache_type_{which}="f32"' for which, _, _ in parts)
    return f"layer {parts[0][1]}: {whats}, the range of a cache of {types}; load with {options} (Python: {arguments})"
