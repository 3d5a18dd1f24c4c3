"""What callers give, checked by its name and kind before anything is done with it.

A wrong value is one ModelError that says which, what was expected and what came, and never a TypeError of Python from somewhere below.
numpy's numbers count as numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vkback.api.errors import ModelError
from vkback.device import Device as VulkanDevice
from vkback.errors import did_you_mean

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
"""A text, or the ids of its tokens."""

Choice = TypeVar("Choice", bound=str)


def wrong(name: str, value: object, expected: str, who: str = "model") -> ModelError:
    """The error to raise for a value."""
    shown = repr(value)
    short = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ModelError(f"[{who}] {name} is {short} ({type(value).__name__}), expected {expected}")


def whole(name: str, value: Any, expected: str, least: int | None = None, who: str = "model") -> int:
    """A whole number, no truth value."""
    try:
        if type(value).__name__ in ("bool", "bool_"):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise wrong(name, value, expected, who) from None
    if least is not None and found < least:
        raise wrong(name, value, expected, who)
    return found


def number(name: str, value: Any, expected: str, least: float = -math.inf, most: float = math.inf, who: str = "model") -> float:
    """A finite number within bounds."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or not least <= float(value) <= most:
        raise wrong(name, value, expected, who)
    return float(value)


def flag(name: str, value: Any, who: str = "model") -> bool:
    if type(value).__name__ not in ("bool", "bool_"):
        raise wrong(name, value, "True or False", who)
    return bool(value)


def choice(name: str, value: Any, known: Sequence[Choice], who: str = "model") -> Choice:
    """One of the words known."""
    for word in known:
        if isinstance(value, str) and value == word:
            return word
    near = did_you_mean(value, known) if isinstance(value, str) else ""
    raise wrong(name, value, f"one of {', '.join(known)}{'.' if near else ''}{near}", who)


def path(name: str, value: Any, who: str = "model") -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise wrong(name, value, "the path of a file", who)
    return Path(value)


def device(name: str, value: Any, who: str = "model") -> VulkanDevice | str | int | None:
    """What `vkback.device.Device.open` takes, or such a device."""
    if value is None or isinstance(value, str | VulkanDevice):
        return value
    return whole(name, value, "an index, part of a name, a UUID, a vkback.Device, or None", who=who)


def token_ids(name: str, value: Any, n_vocab: int) -> list[int]:
    """Ids of a vocabulary, given as a list, a tuple or an array of one axis."""
    expected = "a text, or token ids"
    if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise wrong(name, value, expected)
    ids = []
    for i, token in enumerate(value):
        if isinstance(token, str):
            raise wrong(name, value, f"{expected}; this is a list of texts, and one call goes on from one: call it for each")
        id = whole(f"{name}[{i}]", token, f"a token id in 0..{n_vocab - 1}")
        if not 0 <= id < n_vocab:
            raise ModelError(f"[model] {name}: token {i} is {id}, expected an id in 0..{n_vocab - 1}")
        ids.append(id)
    return ids
