"""The kernel parameters of a device: its tuning tables, most specific first, and what they answer.

Tables fall back: device (the user's own, then the one shipped) -> architecture or driver -> vendor -> default. A parameter missing from the
winning row is taken from the next one that matches, so a row says only what it changes. Every parameter of a family must have a value in
default.toml.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vkback.device import Capabilities
from vkback.events import TO_MEND, log
from vkback.ops.family import FAMILIES, Choice, Chooser, Family, table_word
from vkback.paths import tuning_root, user_tuning_root
from vkback.tuning.overrides import OVERRIDES, override_rows, row_text
from vkback.tuning.row import Row, TuningError
from vkback.tuning.table import check_match, check_parameter, load_table, renamed


class Tuning:
    """The tables that apply to one device, most specific first, the rows of each with the strongest first."""

    def __init__(self, tables: Sequence[Sequence[Row]]) -> None:
        self.tables = tables
        self._picked: dict[tuple[str, tuple[tuple[str, Any], ...]], Choice] = {}

    @classmethod
    def for_device(cls, caps: Capabilities, root: Path | None = None, *, user: Path | None = None) -> Tuning:
        """Rows of the variable VKBACK_OVERRIDES, then tables by device name and vendor, then default.toml, each if it exists.

        root  folder of the tables, default vkback's own
        user  folder of the user's device tables, default the platform's (`paths.user_tuning_root`) if `root` is not given either
        """
        known_families()
        if user is None and root is None:
            user = user_tuning_root()
        root = root or tuning_root()
        device = device_table(caps)
        mine = user_tables(user) if user else []
        _tell_unread(mine, device)
        vendor = load_table(root / f"{caps.vendor}.toml")
        tables = [
            override_rows(os.environ.get("VKBACK_OVERRIDES", "")),
            load_table(user / device, shown=str(user / device)) if user and user / device in mine else (),
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
    source  what overrides, in the words of a choice's reason
    Raises TuningError for a family, a key or a value that no table could have: it would change nothing, or act as another value.
    """

    tables: Chooser
    params: Mapping[str, Mapping[str, Any]]
    source: str
    match: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        families = known_families()
        for name, params in self.params.items():
            where = f"[tuning] {self.source}: {name}"
            if name not in families:
                raise TuningError(f"{where}: no such family, expected one of {', '.join(sorted(families))}")
            if families[name].fixed:
                raise TuningError(f"{where}: only tables set it: {families[name].fixed}")
            for key, value in params.items():
                check_parameter(where, families[name], key, value)
            for key, value in self.match.items():
                check_match(where, families[name], key, value)

    def pick(self, family: str, **query: Any) -> Choice:
        choice = self.tables.pick(family, **query)
        mine = self.params.get(family)
        if mine is None or any(key not in query or query[key] != value for key, value in self.match.items()):
            return choice
        return Choice({**choice.params, **mine}, self.source)

    @classmethod
    def everywhere(cls, tables: Chooser, params: Mapping[str, Any], source: str) -> Overrides:
        """With overrides in every family that takes the parameters. Raises TuningError for a parameter that none takes."""
        families = {name: family for name, family in known_families().items() if not family.fixed}
        for key, value in params.items():
            if fault := fault_anywhere(key, value, families.values()):
                raise TuningError(f"[tuning] {source}: {key}={table_word(value)}: {fault}")
        by_family = {
            name: {k: v for k, v in params.items() if k in family.set and not family.why_illegal(k, v)} for name, family in families.items()
        }
        return cls(tables, {name: mine for name, mine in by_family.items() if mine}, source)


def identity(tables: Chooser) -> str:
    """What tells tables apart that may choose otherwise: a hash of their rows without evidence, and of what overrides them; 12 digits."""
    digest = hashlib.sha256()
    if isinstance(tables, Overrides):
        digest.update(f"{identity(tables.tables)} {dict(tables.params)} {dict(tables.match)}".encode())
    elif isinstance(tables, Tuning):
        for table in tables.tables:
            for row in table:
                digest.update(f"{row.family} {row.match} {row.set}\n".encode())
            digest.update(b"\0")
    elif inner := getattr(tables, "tables", None):  # what queries them otherwise, as --exact does
        digest.update(f"{type(tables).__name__} {identity(inner)}".encode())
    else:
        return ""
    return digest.hexdigest()[:12]


def with_overrides(tables: Tuning, text: str) -> Tuning:
    """Tables that the rows of `text` come before (vkback/tuning/overrides.py)."""
    return Tuning([override_rows(text), *tables.tables])


def tables_text(tables: Chooser) -> str:
    """The files that rows come from, the strongest first, and in place of a file the rows of a command line:
    "gemv : wg=512, device_my_card.toml, nvidia.toml, default.toml"."""
    if isinstance(tables, Overrides):
        return ", ".join(filter(None, (tables.source, tables_text(tables.tables))))
    if not isinstance(tables, Tuning):
        inner = getattr(tables, "tables", None)
        return tables_text(inner) if inner else ""
    names = [row_text(row) if row.file == OVERRIDES else Path(row.file).name for table in tables.tables for row in table]
    return ", ".join(dict.fromkeys(names))


def known_families() -> Mapping[str, Family]:
    """Every family of tables: those of the ops and the planner's own."""
    import vkback.ops
    import vkback.tuning.planner  # noqa: F401  both declare their families when they are imported

    return FAMILIES


def fault_anywhere(key: str, value: Any, families: Collection[Family]) -> str:
    """Why no family takes a parameter with this value; "" where one does."""
    kinds = [family.set[key] for family in families if key in family.set]
    if not kinds:
        return f"no parameter is called {key}" + renamed(key, [name for family in families for name in family.set])
    faults = [Family({}, {key: kind}).why_illegal(key, value) for kind in kinds]
    if not all(faults):
        return ""
    # Families that list different values share the name: all of them could have been meant.
    listed = [kind for kind in kinds if isinstance(kind, tuple)]
    legal = tuple(dict.fromkeys(each for kind in listed for each in kind))
    return Family({}, {key: legal}).why_illegal(key, value) if len(listed) == len(kinds) else faults[0]


_told: set[Path] = set()


def user_tables(folder: Path) -> list[Path]:
    """The files of a user's folder of tables. A folder that may not be looked into has none, as that of another user, whose HOME `sudo` or
    a container leaves in place; a warning says so once a process."""
    try:
        return sorted(file for file in folder.iterdir() if file.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        if folder not in _told:
            _told.add(folder)
            log.warning("no tables are read from %s: %s. Give a folder of yours by VKBACK_TUNING", folder, e.strerror, extra=TO_MEND)
        return []


def _tell_unread(files: Iterable[Path], own: str) -> None:
    """A warning, once a process, for each table of a user that no device reads."""
    for path in files:
        if path not in _told and not path.name.startswith("device_"):
            _told.add(path)
            log.warning("%s is never read: the table of this device is called %s", path, own, extra=TO_MEND)


def slug(name: str) -> str:
    """File-name form of a device name: lower case, runs of other characters become one underscore."""
    out = "".join(c if c.isalnum() else "_" for c in name.lower())
    return "_".join(part for part in out.split("_") if part)


def device_table(caps: Capabilities) -> str:
    """File name of a device's own table."""
    return f"device_{slug(caps.name)}.toml"
