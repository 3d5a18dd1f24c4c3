"""The loop of a command that has work for many workers.

Each kind of device (name, driver, build) gets all units of the work once; workers of one kind share them. A worker has one unit at a
time, taken from what is left: so a quick device does more of them. What comes back is the command's to keep. A unit whose worker is gone,
or whose scheduler is, goes back to what is left.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from vkback.cluster.connect import PATIENCE_S, Cluster, reach
from vkback.cluster.errors import ClusterError
from vkback.cluster.worker import describe, execute

LOOK_S = 0.5
GATHER_S = 20.0
"""How long the first workers wait for others that will come."""
MAX_LOSSES = 3
"""Workers that a unit may take with it before it counts as failed."""


@dataclass(frozen=True)
class Unit:
    """Work for one worker at once.

    key       names it in journals and messages
    function  "module:name", as vkback/cluster/worker.py runs it
    args      plain values
    """

    key: str
    function: str
    args: Mapping[str, Any]


Kind = tuple[str, ...]
"""Device, driver and build."""


@dataclass(frozen=True)
class Member:
    """A worker: its address, and what it tells of itself."""

    address: str
    about: Mapping[str, Any]

    @property
    def kind(self) -> Kind:
        return (self.about["device"], self.about["driver"], self.about["build"])

    @property
    def name(self) -> str:
        return str(self.about["name"])


class Work(Protocol):
    """What a command wants done. All is called in the thread of `pull`."""

    def begin(self, member: Member) -> Unit | None:
        """Of the first worker of a kind: a unit that has to come before all others of its kind, if there is one."""

    def units(self, member: Member, begun: Any) -> Sequence[Unit]:
        """All units that are left of a kind. begun: what the unit of `begin` came to."""

    def on_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        """A message of a unit that runs."""

    def on_late_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        """A message of a unit that does not run any more: it was on its way when the worker, or the scheduler, went."""

    def done(self, member: Member, unit: Unit, value: Any) -> Sequence[Unit]:
        """What a unit came to; units that follow from it."""

    def lost(self, member: Member, unit: Unit) -> Sequence[Unit]:
        """The worker is gone while it ran a unit: what to do in its place, () for nothing."""

    def again(self, member: Member, unit: Unit) -> Sequence[Unit]:
        """The scheduler is gone while a worker ran a unit, which is no fault of the unit's: what to do in its place."""

    def failed(self, member: Member, unit: Unit, why: str) -> None:
        """It will not be done."""


@dataclass
class _Kind:
    """left: units in their order, or None before `begin` has come back; idle_since: when its last worker went."""

    left: deque[Unit] | None = None
    begun: bool = False
    losses: dict[str, int] = field(default_factory=dict)


@dataclass
class _Running:
    member: Member
    unit: Unit
    future: Any
    first: bool = False


class Pull:
    """One run. said: gets a line for what happens to workers and schedulers."""

    def __init__(
        self, cluster: Cluster, work: Work, said: Callable[[str], None], *, kernels: str | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        """kernels: what workers must have, by vkback.autotune.journal.kernel_identity; None for anything."""
        self._cluster, self._work, self._said = cluster, work, said
        self._kernels, self._patience_s = kernels, patience_s
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._members: dict[str, Member] = {}
        self._asked: dict[str, Any] = {}
        self._refused: set[str] = set()
        self._lost: set[str] = set()  # names of workers whose end was said
        self._kinds: dict[Kind, _Kind] = {}
        self._running: dict[str, _Running] = {}
        self._gone: dict[str, _Running] = {}
        self._errors: set[str] = set()
        self._number = 0
        self._client: Any = None
        self.done = self.failed = 0
        self.working_s = 0.0
        """Seconds from the first unit that was handed out to the last that came back."""
        self._first_at: float | None = None

    @property
    def workers(self) -> int:
        return len(self._members)

    @property
    def left(self) -> int:
        """Units that no worker has yet."""
        return sum(len(kind.left or ()) for kind in self._kinds.values())

    def run(self, each: Callable[[Pull], None] = lambda pull: None) -> None:
        """Until all is done. each: called now and then, to show how far it is.

        Raises ClusterError where no scheduler, or no worker, is there for `patience_s`.
        """
        self._client = reach(self._cluster, self._on_message, self._said, self._patience_s)
        begun, alone_since, looked = time.monotonic(), time.monotonic(), 0.0
        while True:
            if time.monotonic() - looked > LOOK_S:
                self._look()
                looked = time.monotonic()
                each(self)
            gathered = len(self._members) >= self._cluster.expected or time.monotonic() - begun > GATHER_S
            if self._members and (gathered or self._kinds):
                self._hand_out()
            if self._members or self._running:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self._patience_s:
                raise ClusterError(
                    f"[hosts] no worker is at {self._cluster.address}; start one on each machine with `vkback worker --scheduler "
                    f"{self._cluster.address}`, then run this again: what has come back is kept"
                )
            if self._kinds and all(kind.left is not None and not kind.left for kind in self._kinds.values()) and not self._running:
                return
            with suppress(queue.Empty):
                self._take(*self._events.get(timeout=LOOK_S))
                while True:
                    self._take(*self._events.get_nowait())

    # -- workers and the scheduler

    def _on_message(self, message: Any) -> None:
        self._events.put(("message", message))

    def _look(self) -> None:
        self._cluster.look()
        try:
            if self._client.status != "running":
                raise OSError("the connection is closed")
            listed = set(self._client.scheduler_info(n_workers=-1)["workers"])
        except Exception as e:  # whatever a connection that ends raises
            self._lose_scheduler(e)
            return
        for address in listed - self._members.keys() - self._asked.keys() - self._refused:
            future = self._client.submit(describe, workers=[address], allow_other_workers=False, pure=False)
            future.add_done_callback(lambda f, at=address: self._events.put(("described", (at, f))))
            self._asked[address] = future
        for address in self._asked.keys() - listed:
            self._asked.pop(address).cancel()
        for address in self._members.keys() - listed:
            self._lose_member(address)
        for name in self._cluster.ends.keys() - {member.name for member in self._members.values()}:
            why = self._cluster.ends.pop(name)
            if name not in self._lost:  # said with the unit that it ran
                self._said(f"worker {name}: {why}")
            self._lost.discard(name)

    def _lose_scheduler(self, error: Exception) -> None:
        back = list(self._running.values())
        self._said(
            f"the scheduler at {self._cluster.address} is gone; {len(back)} units that ran go back to the {self.left} that are left "
            f"({type(error).__name__})"
        )
        self._gone |= self._running
        self._running.clear()
        self._members.clear()
        self._asked.clear()
        for run in back:
            self._put_back(run, [run.unit] if run.first else self._work.again(run.member, run.unit))
        self._client = reach(self._cluster, self._on_message, self._said, self._patience_s)
        self._said(f"a scheduler answers at {self._cluster.address}")

    def _put_back(self, run: _Running, units: Sequence[Unit]) -> None:
        kind = self._kinds[run.member.kind]
        if run.first:
            kind.begun = False
        elif kind.left is not None:
            kind.left.extendleft(reversed(units))

    def _lose_member(self, address: str) -> None:
        member = self._members.pop(address)
        why = self._cluster.ends.pop(member.name, "")
        gone = f"worker {member.name} is gone{f' ({why})' if why else ''}"
        runs = [(key, run) for key, run in self._running.items() if run.member.address == address]
        if not runs:
            self._said(gone)
        for key, run in runs:
            self._gone[key] = self._running.pop(key)
            with suppress(Exception):
                run.future.cancel()
            self._count_loss(run, f"{gone} while it ran {_brief(run.unit)}")
        if not why:
            self._lost.add(member.name)

    def _count_loss(self, run: _Running, what: str) -> None:
        losses = self._kinds[run.member.kind].losses
        losses[run.unit.key] = losses.get(run.unit.key, 0) + 1
        if losses[run.unit.key] >= MAX_LOSSES:
            self._said(f"{what}, the {losses[run.unit.key]}rd time: it is left out")
            self._fail(run, f"{losses[run.unit.key]} workers were lost while they ran it")
            return
        self._said(f"{what}; another takes it")
        self._put_back(run, [run.unit] if run.first else self._work.lost(run.member, run.unit))

    def _fail(self, run: _Running, why: str) -> None:
        self.failed += 1
        self._work.failed(run.member, run.unit, why)
        kind = self._kinds[run.member.kind]
        if run.first:
            kind.left = deque()

    # -- units

    def _hand_out(self) -> None:
        busy = {run.member.address for run in self._running.values()}
        for address, member in self._members.items():
            if address in busy:
                continue
            kind = self._kinds.setdefault(member.kind, _Kind())
            if kind.left is None and not kind.begun:
                kind.begun = True
                first = self._work.begin(member)
                if first is not None:
                    self._submit(member, first, first=True)
                    continue
                kind.left = deque(self._work.units(member, None))
            if kind.left:
                self._submit(member, kind.left.popleft())

    def _submit(self, member: Member, unit: Unit, *, first: bool = False) -> None:
        self._first_at = self._first_at or time.monotonic()
        self._number += 1
        key = f"vkback-{self._cluster.topic[-8:]}-{self._number}"
        future = self._client.submit(
            execute,
            unit.function,
            dict(unit.args),
            self._cluster.topic,
            key=key,
            workers=[member.address],
            allow_other_workers=False,
            pure=False,
        )
        self._running[key] = _Running(member, unit, future, first)
        future.add_done_callback(lambda f: self._events.put(("done", (key, f))))

    def _take(self, what: str, event: Any) -> None:
        if what == "described":
            self._join(*event)
        elif what == "message":
            key = event.get("unit")
            if run := self._running.get(key):
                self._work.on_message(run.member, run.unit, event)
            elif run := self._gone.get(key):
                self._work.on_late_message(run.member, run.unit, event)
        else:
            self._end(*event)

    def _join(self, address: str, future: Any) -> None:
        if self._asked.pop(address, None) is None or future.status != "finished":
            return
        member = Member(address, future.result())
        if self._kernels is not None and member.about["kernels"] != self._kernels:
            self._refused.add(address)
            self._said(
                f"worker {member.name} has other kernels (build {member.about['build']}) than this command: it is left out; install "
                "the same vkback there"
            )
            return
        self._members[address] = member
        self._said(f"worker {member.name}: {member.about['device']}, {member.about['driver']}, build {member.about['build']}")

    def _end(self, key: str, future: Any) -> None:
        run = self._running.get(key)
        if run is None or run.future.key != future.key:
            return
        if future.status != "finished":
            if future.status == "error":
                del self._running[key]
                self._count_loss(run, f"worker {run.member.name} could not run {_brief(run.unit)}: {future.exception()}")
            return  # else its worker or the scheduler is gone, which `_look` finds
        try:
            answer = future.result(timeout=LOOK_S * 20)
        except Exception:  # its worker has gone with the answer
            return
        del self._running[key]
        self.working_s = time.monotonic() - (self._first_at or time.monotonic())
        if "value" in answer:
            kind = self._kinds[run.member.kind]
            if run.first:
                kind.left = deque(self._work.units(run.member, answer["value"]))
            else:
                self.done += 1
                assert kind.left is not None
                kind.left.extendleft(reversed(self._work.done(run.member, run.unit, answer["value"])))
        elif answer["lost"]:
            self._members.pop(run.member.address, None)
            self._refused.add(run.member.address)
            self._lost.add(run.member.name)
            self._count_loss(run, f"worker {run.member.name} lost its device while it ran {_brief(run.unit)}: {answer['error']}")
        else:
            if answer["error"] not in self._errors:  # often all units of a kind have the same
                self._errors.add(answer["error"])
                self._said(f"worker {run.member.name}: {_brief(run.unit)}: {answer['error']}")
            self._fail(run, answer["error"])


def _brief(unit: Unit) -> str:
    return unit.key if len(unit.key) <= 100 else f"{unit.key[:97]}..."
