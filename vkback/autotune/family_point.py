"""Settings of a family of tuning tables as points of a search: their names, order and neutral values are those that the family declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from vkback.ops.family import FAMILIES, CountOr, ParameterKind


def neutral(kind: ParameterKind) -> Any:
    """What a parameter is where a point does not say: the first legal value, 1, or the word for no number."""
    return kind[0] if isinstance(kind, tuple) else kind.word if isinstance(kind, CountOr) else 1


class FamilyPoint(tuple[Any, ...]):
    """A setting of every parameter of a family, in its order; given by position or by name. A parameter is an attribute of its name.

    A subclass names its family: `class Point(FamilyPoint, family="gemv")`.
    """

    family: ClassVar[str]
    _fields: ClassVar[tuple[str, ...]]
    __slots__ = ()

    def __init_subclass__(cls, *, family: str) -> None:
        cls.family, cls._fields = family, tuple(FAMILIES[family].set)

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Raises TypeError for a parameter that the family does not have, and for one that is given twice."""
        given = dict(zip(cls._fields, values, strict=False))
        if len(values) > len(cls._fields) or named.keys() - set(cls._fields) or named.keys() & given.keys():
            raise TypeError(f"[tune] {cls.family} has the parameters {', '.join(cls._fields)}, got {values} and {named}")
        given |= named
        return super().__new__(cls, (given.get(name, neutral(kind)) for name, kind in FAMILIES[cls.family].set.items()))

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would give `__new__` the whole tuple as the first value."""
        return tuple(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[self._fields.index(name)]
        except ValueError:
            raise AttributeError(f"{self.family} has no parameter {name!r}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changed: Any) -> Self:
        return type(self)(**{**self._asdict(), **changed})


def legal(family: str, limits: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Any, ...]]:
    """The values that a family lists for each of its parameters; of numbers those within `limits`, ends included."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, kind in FAMILIES[family].set.items():
        if isinstance(kind, tuple):
            low, high = limits.get(name, (None, None))
            found[name] = tuple(v for v in kind if low is None or high is None or low <= v <= high)
    return found
