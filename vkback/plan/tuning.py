"""Tuning tables: rows of kernel parameters with the evidence that justifies them, most specific table first.

A table is a TOML file in `tuning/`. Each op family has rows:

    [[mat_vec]]
    quant = ["Q4_K", "Q5_K"]          # what the row is about: strings or lists of strings match by equality,
    m = { min = 2048 }                # numbers by a range, inclusive
    set = { rows = 2, lanes = 32 }    # what it says
    measured = "2026-01-15 ..."       # why

Files fall back: device -> architecture -> vendor -> default, and within a file the later row of two that match wins. A parameter missing from the winning
row is taken from the next one that matches, so a row says only what it changes. Every parameter of a family must have a value in default.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.ops.base import FAMILIES, Choice
from vkback.paths import tuning_root


class TuningError(VkbackError):
    """A table that cannot be used, with file, row and reason."""


@dataclass(frozen=True)
class Row:
    """One row of one table."""

    family: str
    file: str
    number: int
    match: Mapping[str, Any]
    set: Mapping[str, Any]
    measured: str

    def matches(self, query: Mapping[str, Any]) -> bool:
        return all(k in query and _fits(query[k], want) for k, want in self.match.items())

    @property
    def where(self) -> str:
        return f"{self.file} [[{self.family}]] row {self.number}"


def _fits(value: Any, want: Any) -> bool:
    if isinstance(want, Mapping):
        return bool(want.get("min", value) <= value <= want.get("max", value))
    if isinstance(want, list):
        return value in want
    return bool(value == want)


class Tuning:
    """The tables that apply to one device, most specific first."""

    def __init__(self, tables: Sequence[Sequence[Row]]) -> None:
        self.tables = tables

    @classmethod
    def for_device(cls, caps: Capabilities, root: Path | None = None) -> Tuning:
        """Tables by device name, architecture class, vendor, then default.toml, each if it exists."""
        import vkback.plan.fuse  # noqa: F401  declares the planner's family; with it come all ops and theirs

        root = root or tuning_root()
        names = [f"device_{slug(caps.name)}", f"{caps.vendor}_{caps.architecture}", caps.vendor, "default"]
        return cls([load_table(root / f"{n}.toml") for n in names if (root / f"{n}.toml").exists()])

    def rows(self, family: str, query: Mapping[str, Any]) -> list[Row]:
        """Rows that match, the winner first."""
        return [r for table in self.tables for r in reversed(table) if r.family == family and r.matches(query)]

    def pick(self, family: str, **query: Any) -> Choice:
        """Parameters for a query, each from the most specific row that sets it; `source` names the winning row."""
        found = self.rows(family, query)
        params: dict[str, Any] = {}
        for row in reversed(found):
            params.update(row.set)
        missing = [k for k in FAMILIES[family].set if k not in params] if family in FAMILIES else []
        if not found or missing:
            raise TuningError(f"[tuning] no row of family {family!r} sets {missing or 'anything'} for {dict(query)}: default.toml must have one")
        return Choice(params, found[0].where)


def slug(name: str) -> str:
    """File-name form of a device name: lower case, runs of other characters become one underscore."""
    out = "".join(c if c.isalnum() else "_" for c in name.lower())
    return "_".join(part for part in out.split("_") if part)


def load_table(path: Path) -> list[Row]:
    """Read and check one table.

    Raises TuningError naming file, row and reason for: bad TOML, unknown family or key, illegal value, missing evidence, an empty row.
    """
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as e:
        raise TuningError(f"[tuning] {path.name}: not valid TOML: {e}") from e
    rows: list[Row] = []
    for family, entries in data.items():
        if family not in FAMILIES:
            raise TuningError(f"[tuning] {path.name}: unknown family {family!r}, expected one of {', '.join(sorted(FAMILIES))}")
        if not isinstance(entries, list):
            raise TuningError(f"[tuning] {path.name}: {family} must be rows, written [[{family}]]")
        for number, entry in enumerate(entries, 1):
            rows.append(_row(path.name, family, number, entry))
    return rows


def _row(file: str, family: str, number: int, entry: Mapping[str, Any]) -> Row:
    known = FAMILIES[family]
    where = f"[tuning] {file} [[{family}]] row {number}"
    entry = dict(entry)
    params = entry.pop("set", None)
    measured = entry.pop("measured", None)
    if not isinstance(params, Mapping) or not params:
        raise TuningError(f"{where}: has no `set = {{ ... }}`")
    if not isinstance(measured, str) or not measured.strip():
        raise TuningError(f"{where}: has no evidence; add `measured = \"...\"` with date, device, shape and figures, or the source of the value")
    for key, want in entry.items():
        kind = known.match.get(key)
        if kind is None:
            raise TuningError(f"{where}: unknown key {key!r}, expected one of {', '.join(sorted(known.match))}, set, measured")
        if kind == "number" and not isinstance(want, (int, Mapping)):
            raise TuningError(f"{where}: {key} must be a number or a range {{ min = .., max = .. }}, got {want!r}")
        if isinstance(want, Mapping) and (not set(want) <= {"min", "max"} or not want or want.get("min", 0) > want.get("max", float("inf"))):
            raise TuningError(f"{where}: {key} = {dict(want)} is not a range; write {{ min = .., max = .. }} with min <= max")
    for key, value in params.items():
        legal = known.set.get(key)
        if legal is None:
            raise TuningError(f"{where}: unknown parameter {key!r}, expected one of {', '.join(sorted(known.set))}")
        if isinstance(legal, str):
            least = 1 if legal == "positive" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TuningError(f"{where}: {key} = {value!r}, expected an integer from {least}")
        elif value not in legal:
            raise TuningError(f"{where}: {key} = {value!r} is not legal, expected one of {', '.join(map(str, legal))}")
    return Row(family, file, number, entry, dict(params), measured)
