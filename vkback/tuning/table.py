"""Tuning tables as files: rows of kernel parameters with the evidence that justifies them.

A table is a TOML file. Each op family has rows:

    [[gemv]]
    architecture = ["rdna3", "rdna4"] # classes of docs/device_profiles.md; only in a vendor's table
    driver = "mesa_radv"              # VkDriverId in lower case; only in a vendor's table
    mesa = ["22", "23"]               # series of Mesa, for rows about one compiler; only in a vendor's table
    quant = ["Q4_K", "Q5_K"]          # what the row is about: words and booleans match by equality, a list by any of its words,
    m = { min = 2048 }                # numbers by value or by a range, inclusive
    set = { rows = 2, lanes = 32 }    # what it says
    measured = "2026-01-15 ..."       # why: a measurement with date, device, driver, shape and figures, or the source of the value

Rows that share conditions form a group, which says them once:

    [[gemv]]                       # match keys and `set` of every row of the group; with `measured` also a row of its own
    experts = "none"
    set = { unroll = 1 }

    [[gemv.row]]                   # adds match keys, and parameters, which come before the group's
    quant = "Q4_K"
    set = { rows = 2 }
    measured = "..."
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from vkback.device.architecture import CLASSES, DRIVERS, known_class
from vkback.ops.family import FAMILIES, Family, MatchKind, is_one_of, table_word
from vkback.tuning.row import INFINITY, Row, TuningError, Values, is_inside, ordered, phrase

FORMER_NAMES = {"mat_vec": "gemv", "mat_mul": "gemm"}
"""Names of families in tables that older builds wrote."""

FORMER_PARAMETERS = {"way": "kernel"}
"""Names of parameters in such tables."""

DEVICE_KEYS = ("architecture", "driver", "mesa")
RESERVED = (*DEVICE_KEYS, "row", "set", "measured")


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
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise TuningError(f"[tuning] {file}: not UTF-8 text: {e.reason} at byte {e.start}") from e
    return tuple(parse_table(text, file))


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
            hint = f"; it is called [[{FORMER_NAMES[family]}]] now" if family in FORMER_NAMES else ""
            raise TuningError(f"[tuning] {file}: unknown family {family!r}{hint}, expected one of {', '.join(sorted(FAMILIES))}")
        if not isinstance(entries, list):
            raise TuningError(f"[tuning] {file}: {family} must be rows, written [[{family}]]")
        rows = [_row(file, stem, family, i, *labelled) for i, labelled in enumerate(_single(file, family, entries), 1)]
        table += ordered(rows, FAMILIES[family])
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
            inner = next((k for k in want if k in known.match), "") if isinstance(want, Mapping) else ""
            hint = f" (keys stand in the row itself, as {inner} = {json.dumps(want[inner])})" if inner else ""
            raise TuningError(f"{where}: unknown key {key!r}{hint}, expected one of {', '.join([*sorted(known.match), *RESERVED])}")
        region[key] = _values(where, key, known, want)
    for key, value in params.items():
        check_parameter(where, known, key, value)
    for never in known.never:
        if is_inside(region, {k: frozenset(v) for k, v in never.items()}, known):
            shown = " and ".join(phrase(k, match[k]) for k in never)
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


def renamed(key: str, known: Collection[str]) -> str:
    """A hint for a parameter that has another name now, one of `known`; "" for others."""
    return f"; it is called {FORMER_PARAMETERS[key]} now" if FORMER_PARAMETERS.get(key) in known else ""


def check_parameter(where: str, known: Family, key: str, value: Any) -> None:
    """Raises TuningError for a parameter that a family does not have, or a value that is not legal."""
    if key not in known.set:
        raise TuningError(f"{where}: unknown parameter {key!r}{renamed(key, known.set)}, expected one of {', '.join(sorted(known.set))}")
    if why := known.why_illegal(key, value):
        raise TuningError(f"{where}: {key} = {why}")


def check_match(where: str, known: Family, key: str, value: Any) -> None:
    """Raises TuningError for a match key that a family does not have, or a value that no query of it holds."""
    if key not in known.match:
        raise TuningError(f"{where}: unknown key {key!r}, expected one of {', '.join(sorted(known.match))}")
    _values(where, key, known, value)


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


def row_lines(family: str, match: Mapping[str, Any], set: Mapping[str, Any], measured: str) -> list[str]:
    """A row as it stands in a table."""
    keys = [f"{key} = {_toml(value)}" for key, value in match.items()]
    return [f"[[{family}]]", *keys, f"set = {_toml(set)}", f"measured = {json.dumps(measured)}"]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value)
