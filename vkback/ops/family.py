"""Families of kernels, as tuning tables know them: what a row may match and set, and what a query is answered with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class CountOr:
    """A kind of parameter: any whole number above 0, or `word`."""

    word: str


MatchKind = tuple[Any, ...] | Literal["word", "number"]
"""Of a match key: all words or booleans it can hold, any word, or any whole number from 0."""
ParameterKind = tuple[Any, ...] | Literal["positive"] | CountOr
"""Of a parameter: its legal values, or any whole number above 0 (or one word)."""


def is_one_of(value: Any, legal: Sequence[Any]) -> bool:
    """Whether a value is among some of the same type: True is not 1."""
    return any(type(value) is type(one) and value == one for one in legal)


def table_word(value: Any) -> str:
    """A value as tables spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Family:
    """What a family's rows may contain: `match` keys with their kind, `set` keys with their kind, `never` what nobody asks for. fixed: why
    nothing but tables may set its parameters; "" where cases, sweeps and scripts may."""

    match: Mapping[str, MatchKind]
    set: Mapping[str, ParameterKind]
    never: tuple[Mapping[str, Collection[Any]], ...] = ()
    fixed: str = ""

    def why_illegal(self, parameter: str, value: Any) -> str:
        """What a value of a parameter should have been; "" when it is legal."""
        kind = self.set[parameter]
        if isinstance(kind, tuple):
            if is_one_of(value, kind):
                return ""
            is_text = isinstance(value, str) and not any(isinstance(each, str) for each in kind)
            shown = f'"{value}" in quotes is a text and' if is_text else table_word(value)
            return f"{shown} is not legal, expected one of {', '.join(map(table_word, kind))}"
        count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        shown = f'"{value}" in quotes is a text' if isinstance(value, str) else table_word(value)
        if isinstance(kind, CountOr):
            return "" if count or value == kind.word else f"{shown}, expected an integer from 1, or {kind.word!r}"
        return "" if count else f"{shown}, expected an integer from 1"


POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

FAMILIES: dict[str, Family] = {}
"""Known families; every op file declares its own with `declare`."""


def declare(
    name: str,
    *,
    match: Mapping[str, MatchKind],
    params: Mapping[str, ParameterKind],
    never: Sequence[Mapping[str, Collection[Any]]] = (),
    fixed: str = "",
) -> None:
    """Make a family known. match: keys with their kind, the key that tells most first; params: parameters with their kind; never:
    combinations of match values that do not occur; fixed: why nothing but tables may set the parameters.

    What is not a quantity is a word or a boolean, never a number that stands for one.
    """
    FAMILIES[name] = Family(dict(match), dict(params), tuple(never), fixed)


@dataclass(frozen=True)
class Choice:
    """What the tuning tables say for one query: the parameters and the row they came from."""

    params: Mapping[str, Any]
    source: str

    def __getitem__(self, key: str) -> Any:
        return self.params[key]


class Chooser(Protocol):
    """Tuning tables, as ops see them."""

    def pick(self, family: str, **query: Any) -> Choice: ...


@dataclass(frozen=True)
class Adjustment:
    """A parameter that a kernel has otherwise than the tables say. why: the device's limit or the node's need behind it."""

    name: str
    wanted: int | str | bool
    got: int | str | bool
    why: str

    def __str__(self) -> str:
        return f"{self.name} {table_word(self.wanted)} -> {table_word(self.got)}: {self.why}"
