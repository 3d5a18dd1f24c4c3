"""Rows of tuning tables: what each matches, and which of them comes first.

Within a table the row that names more keys wins; of two with equally many, the one whose keys stand first where the family declares them;
of two with the same keys, the one whose ranges lie inside the other's. Rows with the same keys that overlap and disagree are refused unless
a stronger row decides for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from vkback.device import Capabilities
from vkback.device.architecture import driver_class, mesa_series
from vkback.errors import VkbackError
from vkback.ops.family import Family, table_word

INFINITY = float("inf")

Range = tuple[float, float]
Values = frozenset[Any] | Range
Region = Mapping[str, Values]
"""Per match key the words a row is about, or the ends of its range of numbers; a key that is not there is free."""


class TuningError(VkbackError):
    """A table that cannot be used, with file, row and reason."""


@dataclass(frozen=True)
class Row:
    """One row of one table.

    number   its place among the rows of its family in the file, from 1
    label    the same as errors name it: "3", or "3.2" for the second row of a group
    region   `match`, checked and as sets and ranges
    devices  architectures, drivers and series of Mesa it is for; those it does not name are all meant
    """

    family: str
    file: str
    number: int
    label: str
    match: Mapping[str, Any]
    set: Mapping[str, Any]
    measured: str
    region: Region
    devices: Mapping[str, frozenset[str]]

    def matches(self, query: Mapping[str, Any]) -> bool:
        return all(key in query and _holds(values, query[key]) for key, values in self.region.items())

    @property
    def where(self) -> str:
        return f"{self.file} [[{self.family}]] row {self.label}"

    @property
    def about(self) -> str:
        """What it matches, as written: `quant = Q4_K, m >= 2048`; "anything" for a row without keys."""
        return ", ".join(phrase(k, v) for k, v in {**self.devices, **self.match}.items()) or "anything"

    def suits(self, caps: Capabilities) -> bool:
        """Whether it is for this device, as far as it says."""
        mine = {"architecture": caps.architecture, "driver": driver_class(caps.driver_id), "mesa": mesa_series(caps.driver_info)}
        return all(mine[key] in names for key, names in self.devices.items())


def phrase(key: str, want: Any) -> str:
    """A condition in words: `quant = Q4_K|Q5_K`, `m >= 2048`."""
    if isinstance(want, Mapping):
        low, high = want.get("min"), want.get("max")
        return f"{key} <= {high}" if low is None else f"{key} >= {low}" if high is None else f"{low} <= {key} <= {high}"
    values = sorted(want) if isinstance(want, frozenset) else want if isinstance(want, list) else [want]
    return f"{key} = {'|'.join(map(table_word, values))}"


def _holds(values: Values, value: Any) -> bool:
    if isinstance(values, frozenset):
        return value in values
    return bool(values[0] <= value <= values[1])


def _meet(a: Values, b: Values) -> Values | None:
    """What both hold; None when that is nothing."""
    if isinstance(a, frozenset) and isinstance(b, frozenset):
        return a & b or None
    assert not isinstance(a, frozenset)  # one key holds words or numbers
    assert not isinstance(b, frozenset)
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def _covers(outer: Values, inner: Values) -> bool:
    if isinstance(inner, frozenset):
        return all(_holds(outer, v) for v in inner)
    return not isinstance(outer, frozenset) and outer[0] <= inner[0] and inner[1] <= outer[1]


def _domain(family: Family, key: str) -> Values | None:
    """All that a query can hold under a key; None when that is open (words)."""
    kind = family.match[key]
    if isinstance(kind, tuple):
        return frozenset(kind)
    return (0.0, INFINITY) if kind == "number" else None


def _common(a: Region, b: Region) -> Region | None:
    """The cases that two rows both match; None when there are none."""
    out: dict[str, Values] = {**a, **b}
    for key in a.keys() & b.keys():
        met = _meet(a[key], b[key])
        if met is None:
            return None
        out[key] = met
    return out


def is_inside(a: Region, b: Region, family: Family) -> bool:
    """Whether b matches whatever a matches."""
    for key, values in b.items():
        mine = a.get(key, _domain(family, key))
        if mine is None or not _covers(values, mine):
            return False
    return True


def _same_level(a: Row, b: Row) -> bool:
    """Whether rows of one file can meet in one table of one device."""
    return bool(a.devices) == bool(b.devices) and all(a.devices[k] & b.devices[k] for k in a.devices.keys() & b.devices.keys())


def _serves_all(a: Row, b: Row) -> bool:
    """Whether a is for every device that b is for, rows of one level."""
    return all(key in b.devices and b.devices[key] <= names for key, names in a.devices.items())


def ordered(rows: Sequence[Row], family: Family) -> list[Row]:
    """Rows of one family and file, strongest first, once no two of them contradict each other."""
    inside = {(a.number, b.number): is_inside(a.region, b.region, family) for a in rows for b in rows if a is not b and _same_level(a, b)}

    order = list(family.match)
    keys = {r.number: (-len(r.region) - len(r.devices), *sorted(order.index(k) for k in r.region)) for r in rows}

    def beats(a: Row, b: Row) -> bool:
        if keys[a.number] != keys[b.number]:
            return keys[a.number] < keys[b.number]
        return inside.get((a.number, b.number), False) and not inside[b.number, a.number]

    def decides(c: Row, a: Row, b: Row) -> bool:
        return _same_level(a, c) and _same_level(b, c) and beats(c, a) and beats(c, b) and (_serves_all(c, a) or _serves_all(c, b))

    for a, b in combinations(rows, 2):
        if not _same_level(a, b) or beats(a, b) or beats(b, a):
            continue
        common = _common(a.region, b.region)
        disputed = {k for k in a.set if k in b.set and a.set[k] != b.set[k]}
        if common is None or not disputed:
            continue
        if any(decides(c, a, b) and disputed <= set(c.set) and is_inside(common, c.region, family) for c in rows):
            continue
        says = ", ".join(f"{k} ({table_word(a.set[k])} and {table_word(b.set[k])})" for k in a.set if k in disputed)
        raise TuningError(
            f"[tuning] {b.where} ({b.about}): overlaps row {a.label} ({a.about}), and they disagree on {says}; "
            "name a further key in one of them, or ranges that do not meet"
        )
    for row in rows:
        over = [s for s in rows if beats(s, row) and inside.get((row.number, s.number)) and _serves_all(s, row)]
        if set(row.set) <= {k for s in over for k in s.set}:
            raise TuningError(f"[tuning] {row.where}: never wins: row {over[0].label} ({over[0].about}) comes first wherever it matches")
    depth = {r.number: sum(beats(r, s) for s in rows) for r in rows}
    return sorted(rows, key=lambda r: (-depth[r.number], r.number))
