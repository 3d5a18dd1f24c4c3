"""The kernel parameters of a device: its tuning tables, most specific first, and what they answer.

Tables fall back: device (the user's own, then the one shipped) -> architecture or driver -> vendor -> default. A parameter missing from the
winning row is taken from the next one that matches, so a row says only what it changes. Every parameter of a family must have a value in
default.toml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vkback.device import Capabilities
from vkback.ops.family import FAMILIES, Choice, Chooser
from vkback.paths import tuning_root, user_tuning_root
from vkback.plan.tuning_row import Row, TuningError
from vkback.plan.tuning_table import load_table


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
        import vkback.plan.schedule_choice  # noqa: F401  declares the planner's family; with it come all ops and theirs

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
