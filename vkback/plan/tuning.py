"""Tuning tables: rows of kernel parameters with the evidence that justifies them, most specific table first.

A table is a TOML file. Each op family has rows:

    [[mat_vec]]
    architecture = ["rdna3", "rdna4"] # classes of docs/device_profiles.md; only in a vendor's table
    driver = "mesa_radv"              # VkDriverId in lower case; only in a vendor's table
    mesa = ["22", "23"]               # series of Mesa, for rows about one compiler; only in a vendor's table
    quant = ["Q4_K", "Q5_K"]          # what the row is about: words and booleans match by equality, a list by any of its words,
    m = { min = 2048 }                # numbers by value or by a range, inclusive
    set = { rows = 2, lanes = 32 }    # what it says
    measured = "2026-01-15 ..."       # why: a measurement with date, device, driver, shape and figures, or the source of the value

Rows that share conditions form a group, which says them once:

    [[mat_vec]]                       # match keys and `set` of every row of the group; with `measured` also a row of its own
    experts = "none"
    set = { unroll = 1 }

    [[mat_vec.row]]                   # adds match keys, and parameters, which come before the group's
    quant = "Q4_K"
    set = { rows = 2 }
    measured = "..."

Tables fall back: device (the user's own, then the one shipped) -> architecture or driver -> vendor -> default. Within a table the row that
names more keys wins; of two with equally many, the one whose keys stand first where the family declares them; of two with the same keys,
the one whose ranges lie inside the other's. Rows with the same keys that overlap and disagree are refused unless a stronger row decides for
them. A parameter missing from the winning row is taken from the next one that matches, so a row says only what it changes. Every parameter
of a family must have a value in default.toml.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from vkback.device import Capabilities
from vkback.device.architecture import CLASSES, DRIVERS, driver_class, known_class, mesa_series
from vkback.errors import VkbackError
from vkback.ops.family import FAMILIES, Choice, Chooser, Family, MatchKind, is_one_of, table_word
from vkback.paths import tuning_root, user_tuning_root

INFINITY = float("inf")

Range = tuple[float, float]
Values = frozenset[Any] | Range
Region = Mapping[str, Values]
"""Per match key the words a row is about, or the ends of its range of numbers; a key that is not there is free."""

DEVICE_KEYS = ("architecture", "driver", "mesa")
RESERVED = (*DEVICE_KEYS, "row", "set", "measured")


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
        return ", ".join(_phrase(k, v) for k, v in {**self.devices, **self.match}.items()) or "anything"

    def suits(self, caps: Capabilities) -> bool:
        """Whether it is for this device, as far as it says."""
        mine = {"architecture": caps.architecture, "driver": driver_class(caps.driver_id), "mesa": mesa_series(caps.driver_info)}
        return all(mine[key] in names for key, names in self.devices.items())


def _phrase(key: str, want: Any) -> str:
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


def _inside(a: Region, b: Region, family: Family) -> bool:
    """Whether b matches whatever a matches."""
    for key, values in b.items():
        mine = a.get(key, _domain(family, key))
        if mine is None or not _covers(values, mine):
            return False
    return True


class Tuning:
    """The tables that apply to one device, most specific first, the rows of each with the strongest first."""

    def __init__(self, tables: Sequence[Sequence[Row]]) -> None:
        self.tables = tables
        self._picked: dict[tuple[str, tuple[tuple[str, Any], ...]], Choice] = {}

    @classmethod
    def for_device(cls, caps: Capabilities, root: Path | None = None, *, user: Path | None = None) -> Tuning:
        """Tables by device name and vendor, then default.toml, each if it exists.

        root  folder of the tables, default vkback's own
        user  folder of the user's device tables, default the platform's (`paths.user_tuning_root`) if `root` is not given either
        """
        import vkback.plan.fuse  # noqa: F401  declares the planner's family; with it come all ops and theirs

        if user is None and root is None:
            user = user_tuning_root()
        root = root or tuning_root()
        device = device_table(caps)
        vendor = load_table(root / f"{caps.vendor}.toml")
        tables = [
            load_table(user / device, shown=str(user / device)) if user else (),
            load_table(root / device),
            [r for r in vendor if r.devices and r.suits(caps)],
            [r for r in vendor if not r.devices],
            load_table(root / "default.toml"),
        ]
        return cls([t for t in tables if t])

    def rows(self, family: str, query: Mapping[str, Any]) -> list[Row]:
        """Rows that match, the winner first."""
        return [r for table in self.tables for r in table if r.family == family and r.matches(query)]

    def origins(self, family: str, query: Mapping[str, Any]) -> dict[str, Row]:
        """The row that each parameter comes from."""
        found: dict[str, Row] = {}
        for row in self.rows(family, query):
            for key in row.set:
                found.setdefault(key, row)
        return found

    def pick(self, family: str, **query: Any) -> Choice:
        """Parameters for a query, each from the most specific row that sets it; `source` names the winning row."""
        key = family, tuple(query.items())
        if key not in self._picked:
            self._picked[key] = self._pick(family, query)
        return self._picked[key]

    def _pick(self, family: str, query: Mapping[str, Any]) -> Choice:
        found = self.rows(family, query)
        params: dict[str, Any] = {}
        for row in reversed(found):
            params.update(row.set)
        missing = [k for k in FAMILIES[family].set if k not in params] if family in FAMILIES else []
        if not found or missing:
            what = missing or "anything"
            raise TuningError(f"[tuning] no row of family {family!r} sets {what} for {dict(query)}: default.toml must have one")
        return Choice(params, found[0].where)


@dataclass(frozen=True)
class Overrides:
    """Tables with overrides: some parameters, whatever the tables say.

    params  by family; the families' other parameters stay as the tables have them
    match   only for queries that hold these values
    """

    tables: Chooser
    params: Mapping[str, Mapping[str, Any]]
    source: str
    match: Mapping[str, Any] = field(default_factory=dict)

    def pick(self, family: str, **query: Any) -> Choice:
        choice = self.tables.pick(family, **query)
        mine = self.params.get(family)
        if mine is None or any(key not in query or query[key] != value for key, value in self.match.items()):
            return choice
        return Choice({**choice.params, **mine}, self.source)

    @classmethod
    def everywhere(cls, tables: Chooser, params: Mapping[str, Any], source: str) -> Overrides:
        """With overrides in every family that has the parameters."""
        by_family = {name: {k: v for k, v in params.items() if k in family.set} for name, family in FAMILIES.items()}
        return cls(tables, {name: mine for name, mine in by_family.items() if mine}, source)


def slug(name: str) -> str:
    """File-name form of a device name: lower case, runs of other characters become one underscore."""
    out = "".join(c if c.isalnum() else "_" for c in name.lower())
    return "_".join(part for part in out.split("_") if part)


def device_table(caps: Capabilities) -> str:
    """File name of a device's own table."""
    return f"device_{slug(caps.name)}.toml"


def load_table(path: Path, *, shown: str = "") -> list[Row]:
    """Read and check one table; none there gives no rows. Strongest rows first, families in the file's order.

    shown  the name that errors and choices give it, default the file's
    Raises TuningError naming file, row and reason for: a name that is neither default, nor a vendor's, nor device_*; bad TOML; an unknown
    family, key or architecture; an illegal value; missing evidence; a row that says nothing, that nothing can match or that never wins;
    rows that overlap and disagree.
    """
    try:
        changed = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return list(_load(path, shown or path.name, changed.st_mtime_ns, changed.st_size))


@lru_cache(maxsize=64)
def _load(path: Path, file: str, _mtime: int, _size: int) -> tuple[Row, ...]:
    return tuple(parse_table(path.read_text(encoding="utf-8"), file))


def parse_table(text: str, file: str) -> list[Row]:
    """`load_table` of a text; `file` is the name it goes by."""
    stem = Path(file).stem
    if stem not in ("default", *CLASSES) and not stem.startswith("device_"):
        known = ", ".join(sorted(CLASSES))
        raise TuningError(f"[tuning] {file}: no device has this table; expected default, device_NAME or one of {known}")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise TuningError(f"[tuning] {file}: not valid TOML: {e}") from e
    table: list[Row] = []
    for family, entries in data.items():
        if family not in FAMILIES:
            raise TuningError(f"[tuning] {file}: unknown family {family!r}, expected one of {', '.join(sorted(FAMILIES))}")
        if not isinstance(entries, list):
            raise TuningError(f"[tuning] {file}: {family} must be rows, written [[{family}]]")
        rows = [_row(file, stem, family, i, *labelled) for i, labelled in enumerate(_single(file, family, entries), 1)]
        table += _ordered(rows, FAMILIES[family])
    return table


def _single(file: str, family: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(label, row) of every row, groups resolved: each with the keys and parameters that it inherits."""
    for number, entry in enumerate(entries, 1):
        shared = {key: value for key, value in entry.items() if key != "row"}
        rows = entry.get("row", [])
        if not rows or "measured" in shared:
            yield str(number), shared
        if not isinstance(rows, list):
            raise TuningError(f"[tuning] {file} [[{family}]] row {number}: the rows of a group are written [[{family}.row]]")
        for i, row in enumerate(rows, 1):
            where = f"[tuning] {file} [[{family}]] row {number}.{i}"
            twice = [key for key in row if key in shared and key not in ("set", "measured")]
            if twice:
                raise TuningError(f"{where}: {twice[0]} is among what its group says already; leave it out here or there")
            if "row" in row:
                raise TuningError(f"{where}: a row of a group has no rows of its own")
            both = {**shared, **row}
            if all(isinstance(one.get("set", {}), Mapping) for one in (shared, row)):
                both["set"] = {**shared.get("set", {}), **row.get("set", {})}
            if "measured" not in row:
                both.pop("measured", None)
            yield f"{number}.{i}", both


def _row(file: str, stem: str, family: str, number: int, label: str, entry: Mapping[str, Any]) -> Row:
    known = FAMILIES[family]
    where = f"[tuning] {file} [[{family}]] row {label}"
    match = {k: v for k, v in entry.items() if k not in RESERVED}
    params, measured = entry.get("set"), entry.get("measured")
    if not isinstance(params, Mapping) or not params:
        raise TuningError(f"{where}: has no `set = {{ ... }}`")
    if not isinstance(measured, str) or not measured.strip():
        raise TuningError(f'{where}: has no evidence; add `measured = "..."` with date, device, shape and figures, or the value\'s source')
    region: dict[str, Values] = {}
    for key, want in match.items():
        if key not in known.match:
            raise TuningError(f"{where}: unknown key {key!r}, expected one of {', '.join([*sorted(known.match), *RESERVED])}")
        region[key] = _values(where, key, known, want)
    for key, value in params.items():
        _check_parameter(where, known, key, value)
    for never in known.never:
        if _inside(region, {k: frozenset(v) for k, v in never.items()}, known):
            shown = " and ".join(_phrase(k, match[k]) for k in never)
            raise TuningError(f"{where}: matches nothing: there is no {family} with {shown}")
    devices = {key: _devices(where, stem, key, entry[key]) for key in DEVICE_KEYS if key in entry}
    return Row(family, file, number, label, match, dict(params), measured, region, devices)


def _values(where: str, key: str, known: Family, want: Any) -> Values:
    """What a match key of a row says, checked against what queries can hold."""
    kind = known.match[key]
    if isinstance(want, Mapping):
        ends = [want[e] for e in ("min", "max") if e in want]
        if kind != "number":
            what = "true or false" if kind == (False, True) else "a word or a list of words"
            raise TuningError(f"{where}: {key} must be {what}, got {dict(want)}")
        if not ends or not set(want) <= {"min", "max"} or not all(_whole(e) for e in ends) or ends[0] > ends[-1]:
            raise TuningError(f"{where}: {key} = {dict(want)} is not a range; write {{ min = .., max = .. }}, whole numbers, min <= max")
        return want.get("min", 0), want.get("max", INFINITY)
    if kind == "number":
        if not _whole(want):
            raise TuningError(f"{where}: {key} must be a whole number or a range {{ min = .., max = .. }}, got {want!r}")
        return (want, want)
    values = want if isinstance(want, list) else [want]
    wrong = [v for v in values if not (is_one_of(v, kind) if isinstance(kind, tuple) else isinstance(v, str))]
    if wrong or not values:
        raise TuningError(f"{where}: matches nothing: {key} = {_spelled(wrong[0] if wrong else want)}, expected {_legal(kind)}")
    return frozenset(values)


def _spelled(value: Any) -> str:
    return table_word(value) if isinstance(value, bool) else repr(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _legal(kind: MatchKind) -> str:
    return f"one of {', '.join(map(table_word, kind))}" if isinstance(kind, tuple) else "numbers from 0" if kind == "number" else "words"


def _check_parameter(where: str, known: Family, key: str, value: Any) -> None:
    if key not in known.set:
        raise TuningError(f"{where}: unknown parameter {key!r}, expected one of {', '.join(sorted(known.set))}")
    if why := known.why_illegal(key, value):
        raise TuningError(f"{where}: {key} = {why}")


def _devices(where: str, vendor: str, key: str, want: Any) -> frozenset[str]:
    """The architectures, drivers or series of Mesa that a row of a vendor's table names."""
    names = want if isinstance(want, list) else [want]
    if vendor not in CLASSES:
        raise TuningError(f"{where}: {key} belongs in a vendor's table: {', '.join(sorted(CLASSES))}")
    legal: dict[str, tuple[Callable[[str], bool], Sequence[str]]] = {
        "architecture": (lambda n: known_class(vendor, n), CLASSES[vendor]),
        "driver": (lambda n: n in DRIVERS, DRIVERS),
        "mesa": (str.isdecimal, ("22", "and so on")),
    }
    is_known, known = legal[key]
    wrong = [n for n in names if not isinstance(n, str) or not is_known(n)]
    if wrong or not names:
        raise TuningError(
            f"{where}: matches nothing: {vendor} has no {key} {wrong[0] if wrong else want!r}, expected one of {', '.join(known)}"
        )
    return frozenset(names)


def _same_level(a: Row, b: Row) -> bool:
    """Whether rows of one file can meet in one table of one device."""
    return bool(a.devices) == bool(b.devices) and all(a.devices[k] & b.devices[k] for k in a.devices.keys() & b.devices.keys())


def _serves_all(a: Row, b: Row) -> bool:
    """Whether a is for every device that b is for, rows of one level."""
    return all(key in b.devices and b.devices[key] <= names for key, names in a.devices.items())


def _ordered(rows: Sequence[Row], family: Family) -> list[Row]:
    """Rows of one family and file, strongest first, once no two of them contradict each other."""
    inside = {(a.number, b.number): _inside(a.region, b.region, family) for a in rows for b in rows if a is not b and _same_level(a, b)}

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
        if any(decides(c, a, b) and disputed <= set(c.set) and _inside(common, c.region, family) for c in rows):
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


def row_lines(family: str, match: Mapping[str, Any], set: Mapping[str, Any], measured: str) -> list[str]:
    """A row as it stands in a table."""
    keys = [f"{key} = {_toml(value)}" for key, value in match.items()]
    return [f"[[{family}]]", *keys, f"set = {_toml(set)}", f"measured = {json.dumps(measured)}"]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value)
