"""Values that callers give, checked by name and kind before anything is done with them.

A wrong value is one OptionError that says which, what was expected and what came, and never a TypeError of Python from somewhere below.
numpy's numbers count as numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from vkback.errors import ModelError, did_you_mean

Choice = TypeVar("Choice", bound=str)


class OptionError(ModelError):
    """A value that an option cannot have. name, value: what was given; expected: what can be."""

    def __init__(self, name: str, value: object, expected: str, who: str = "model", hint: str = "") -> None:
        """who: speaks, as every error begins. hint: what may have been meant."""
        shown = repr(value)
        short = shown if len(shown) <= 60 else f"{shown[:57]}..."
        super().__init__(f"[{who}] {name} is {short} ({type(value).__name__}), expected {expected}{hint and '.'}{hint}")
        self.name, self.value, self.expected = name, value, expected


def wrong(name: str, value: object, expected: str, who: str = "model") -> OptionError:
    """The error to raise for a value."""
    return OptionError(name, value, expected, who)


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
    raise OptionError(name, value, f"one of {', '.join(known)}", who, near)


def path(name: str, value: Any, who: str = "model") -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise wrong(name, value, "the path of a file", who)
    return Path(value)
