"""A list of units as work for workers: results by kind of device, in the order of the list, kept in a journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vkback.cli.hosts import Where, run_on
from vkback.errors import VkbackError

if TYPE_CHECKING:
    from vkback.cluster.journal import UnitJournal
    from vkback.cluster.pull import Kind, Member, Pull, Unit


class UnitsFailedError(VkbackError):
    """Some units of a command were not done."""


@dataclass
class KindResults:
    """What a kind of device has come to. about: of one of its workers; values: by the unit's key; faults: why a unit was not done."""

    about: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.about['device']} ({self.about['driver']})"


class ListedWork:
    """The work. listed: all units; where it is a function, of what the unit `first` came to, which runs before all others."""

    def __init__(
        self, listed: Sequence[Unit] | Callable[[Any], Sequence[Unit]], journal: UnitJournal, noun: str, first: Unit | None = None
    ) -> None:
        self._listed, self._journal, self._noun, self._first = listed, journal, noun, first
        self.kinds: dict[Kind, KindResults] = {}
        self.firsts: dict[Kind, Any] = {}
        self._total = 0

    def begin(self, member: Member) -> Unit | None:
        return self._first

    def units(self, member: Member, begun: Any) -> list[Unit]:
        found = self.kinds.setdefault(member.kind, KindResults(member.about))
        self.firsts[member.kind] = begun
        listed = self._listed(begun) if callable(self._listed) else self._listed
        self._total += len(listed)
        known = {unit.key: self._journal.known(member.kind, unit.key) for unit in listed}
        found.values |= {key: value for key, value in known.items() if value is not None}
        return [unit for unit in listed if known[unit.key] is None]

    def on_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        """Nothing is sent."""

    def on_late_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        """Nothing is sent."""

    def done(self, member: Member, unit: Unit, value: Any) -> list[Unit]:
        self.kinds[member.kind].values[unit.key] = value
        self._journal.keep(member.about, member.kind, unit.key, value)
        return []

    def lost(self, member: Member, unit: Unit) -> list[Unit]:
        return [unit]

    def again(self, member: Member, unit: Unit) -> list[Unit]:
        return [unit]

    def failed(self, member: Member, unit: Unit, why: str) -> None:
        self.kinds.setdefault(member.kind, KindResults(member.about)).faults[unit.key] = why

    def run(self, where: Where) -> list[KindResults]:
        """Do it; what each kind of device has come to. Raises UnitsFailedError where a unit was not done, once the others are."""

        def progress(pull: Pull) -> str:
            return f"{sum(len(kind.values) for kind in self.kinds.values())} of {self._total} {self._noun}"

        run_on(where, self, progress)
        faults = [f"{kind.name}: {key}: {why}" for kind in self.kinds.values() for key, why in kind.faults.items()]
        if faults:
            raise UnitsFailedError(f"[hosts] {len(faults)} of {self._total} {self._noun} were not done: {faults[0]}")
        return list(self.kinds.values())
