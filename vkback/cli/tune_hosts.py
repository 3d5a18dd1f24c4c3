"""vkback tune by workers: what a worker runs, and how points and results come into the tables of each kind of device."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkback.cli.hosts import Where, run_on, say
from vkback.cli.shell import UsageError
from vkback.cli.tune_families import TASKS_OF, FamilyTasks, TuneRequest

if TYPE_CHECKING:
    from vkback.autotune.device_table import DeviceTable
    from vkback.autotune.tunable import RowMaker, Tunable, TuneResult
    from vkback.cluster.pull import Kind, Member, Pull, Unit
    from vkback.cluster.worker import Station, Tell
    from vkback.ops.lowering import LowerContext

LIST, TUNE = "vkback.cli.tune_hosts:list_tasks", "vkback.cli.tune_hosts:tune_one"

MAX_SUSPECTED = 2
"""Workers that may end while they try a point, before it is not tried again: the first may have been killed for another reason."""


# -- on a worker


@dataclasses.dataclass
class _Opened:
    """A device, the families of a request on it, and tunables made so far, with what they hold open."""

    ctx: LowerContext
    families: list[FamilyTasks]
    rate: float
    stack: ExitStack
    tunables: dict[int, Tunable[Any, Any]] = dataclasses.field(default_factory=dict)

    def tunable(self, index: int) -> Tunable[Any, Any]:
        if index not in self.tunables:
            made = self.families[index].make(self.ctx)
            self.stack.enter_context(made.opened())
            self.tunables[index] = made
        return self.tunables[index]


def _opened(station: Station, args: Mapping[str, Any]) -> _Opened:
    """What units of one request share: made once by a worker."""

    def make(stack: ExitStack) -> _Opened:
        from vkback.cli.shell import measured_read_rate
        from vkback.device import Device
        from vkback.ops.lowering import LowerContext
        from vkback.paths import tuning_root
        from vkback.program.fragments import fragments_hold
        from vkback.shader import ShaderLibrary
        from vkback.tuning.lookup import Tuning, device_table

        device = stack.enter_context(Device.open(station.device or None))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args["table"]:
            (folder / device_table(device.caps)).write_text(args["table"], encoding="utf-8")
        tables = Tuning.for_device(device.caps, tuning_root(), user=folder)
        ctx = LowerContext(device.caps, tables, fragments=fragments_hold(device, ShaderLibrary()))
        families = [f for op in args["ops"] for f in TASKS_OF[op](device, request_from(args["request"]), ctx)]
        return _Opened(ctx, families, measured_read_rate(device), stack)

    return station.kept(("tune", json.dumps([args["ops"], args["request"], args["table"]])), make)


def request_from(values: Mapping[str, Any]) -> TuneRequest:
    return TuneRequest(**{**values, "tokens": tuple(values["tokens"])})


def list_tasks(station: Station, args: Mapping[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """On a worker: the tasks of a request."""
    opened = _opened(station, args)
    return [
        {"family": i, "key": task.key, "line": task.line, "noun": family.noun}
        for i, family in enumerate(opened.families)
        for task in family.tasks
    ]


@dataclasses.dataclass
class SentNotes:
    """Notes of a search (vkback/autotune/journal.py) that go to the command, which began it with what it knows."""

    tell: Callable[[Mapping[str, Any]], None]
    suspects: frozenset[tuple[Any, ...]]
    points: Mapping[tuple[Any, ...], tuple[float, float]]

    def refusal(self, key: str, point: Iterable[Any]) -> str:
        return "workers ended while trying it" if tuple(point) in self.suspects else ""

    @contextmanager
    def trying(self, key: str, point: Iterable[Any]) -> Iterator[None]:
        at = list(point)
        self.tell({"trying": at})
        yield
        self.tell({"tried": at})

    def measured(self, key: str, point: Iterable[Any], us: float, spread_us: float) -> None:
        self.tell({"measured": list(point), "us": us, "spread_us": spread_us})

    def known(self, key: str) -> Mapping[tuple[Any, ...], tuple[float, float]]:
        return self.points


def tune_one(station: Station, args: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """On a worker: tune the task args["key"] of family args["family"] for args["budget_s"] seconds."""
    from vkback.autotune.driver import tune_task

    opened = _opened(station, args)
    tunable = opened.tunable(args["family"])
    task = next(task for task in opened.families[args["family"]].tasks if task.key == args["key"])
    points = {tuple(at): (us, spread) for at, us, spread in args["known"]}
    notes = SentNotes(tell, frozenset(tuple(at) for at in args["suspects"]), points)
    deadline = time.monotonic() + args["budget_s"]
    result = tune_task(
        tunable, task, tunable.prepare(task), deadline, notes, opened.rate, lambda point, said: tell({"said": said, "point": point.text})
    )
    return {"journal": tunable.journal, "result": result.to_json()}


# -- in the command


def row_makers() -> dict[str, RowMaker[Any]]:
    """What makes rows of results, by the journal's name for them."""
    from vkback.autotune.spaces import TUNED

    return {name: family.maker for name, family in TUNED.items()}


@dataclasses.dataclass
class _Kind:
    """own: the table and journal of a kind of device; tasks by key; points tried now, by the unit's key."""

    name: str
    own: DeviceTable
    table: str
    tasks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    trying: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    suspected: dict[tuple[str, tuple[Any, ...]], int] = dataclasses.field(default_factory=dict)
    results: list[TuneResult[Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


class TuneWork:
    """Tasks of a request as work for workers (vkback/cluster/pull.py): points and results go into the journal of the kind of device as they
    come, so that neither a worker nor a scheduler nor this command takes them with it."""

    def __init__(
        self,
        ops: Sequence[str],
        request: TuneRequest,
        budget_s: float,
        resume: bool,
        verbose: bool,
        stack: ExitStack,
        workers: Callable[[], int],
    ) -> None:
        """budget_s: of all tasks of a kind of device, divided among its workers' tasks. stack: holds the locks of tables."""
        self._ops, self._request, self._budget_s = list(ops), request, budget_s
        self._resume, self._verbose, self._stack, self._workers = resume, verbose, stack, workers
        self.kinds: dict[Kind, _Kind] = {}
        self.points = self.listed = 0

    @property
    def so_far(self) -> str:
        done = sum(len(kind.results) + len(kind.faults) for kind in self.kinds.values())
        return f"{done} of {sum(len(kind.tasks) for kind in self.kinds.values())} tasks, {self.points} points"

    def _args(self, kind: _Kind) -> dict[str, Any]:
        return {"ops": self._ops, "request": dataclasses.asdict(self._request), "table": kind.table}

    def begin(self, member: Member) -> Unit | None:
        from vkback.autotune.device_table import DeviceTable, table_lock
        from vkback.cluster.pull import Unit
        from vkback.device import Capabilities
        from vkback.paths import user_tuning_root
        from vkback.shader import ShaderLibrary

        kind = self.kinds.get(member.kind)
        if kind is None:
            caps = Capabilities.from_dict(member.about["caps"])
            self._stack.enter_context(table_lock(caps, user_tuning_root(), say))
            own = DeviceTable(caps, ShaderLibrary(), user_tuning_root())
            table = own.path.read_text(encoding="utf-8") if own.path.exists() else ""
            kind = self.kinds[member.kind] = _Kind(f"{member.about['device']}, {member.about['driver']}", own, table)
        return Unit("the list of tasks", LIST, self._args(kind))

    def units(self, member: Member, begun: Any) -> list[Unit]:
        kind = self.kinds[member.kind]
        journal = kind.own.journal
        self.listed += len(begun)
        left = []
        for task in begun:
            if self._resume and journal.finished(task["key"]):
                continue
            if not self._resume:
                journal.forget(task["key"])
            kind.tasks[task["key"]] = task
            left.append(task)
        if len(left) < len(begun):
            say(f"{len(begun) - len(left)} of {len(begun)} tasks were finished by an earlier run")
        return [self._unit(kind, task) for task in left]

    def _unit(self, kind: _Kind, task: Mapping[str, Any]) -> Unit:
        from vkback.cluster.pull import Unit

        key, journal = task["key"], kind.own.journal
        known = [[list(at), us, spread] for at, (us, spread) in journal.known(key).items()]
        suspects = [list(at) for at in journal.suspects(key)]
        share = self._budget_s * max(1, self._workers()) / max(1, len(kind.tasks))
        args = {**self._args(kind), "family": task["family"], "key": key, "known": known, "suspects": suspects, "budget_s": share}
        return Unit(task["line"], TUNE, args)

    def on_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        if "key" not in unit.args:
            return
        kind, key = self.kinds[member.kind], unit.args["key"]
        if "trying" in message:
            kind.trying[key] = tuple(message["trying"])
        elif "tried" in message:
            kind.trying.pop(key, None)
        elif "measured" in message:
            self._measured(kind, key, message)
        elif "said" in message and (self._verbose or message["said"].startswith("WRONG")):
            say(f"{member.name}: {unit.key} [{message['point']}] {message['said']}")

    def on_late_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        if "key" in unit.args and "measured" in message:
            self._measured(self.kinds[member.kind], unit.args["key"], message)

    def _measured(self, kind: _Kind, key: str, message: Mapping[str, Any]) -> None:
        """Keep a point. Of one that was on its way while the task began anew, the first time counts."""
        journal = kind.own.journal
        if tuple(message["measured"]) in journal.known(key) or any(result.key == key for result in kind.results):
            return
        self.points += 1
        journal.measured(key, message["measured"], message["us"], message["spread_us"])

    def done(self, member: Member, unit: Unit, value: Any) -> list[Unit]:
        from vkback.autotune.tunable import TuneResult

        kind, maker = self.kinds[member.kind], row_makers()[value["journal"]]
        result = TuneResult.from_json(value["result"], maker.point)
        kind.own.keep(maker, result)
        kind.results.append(result)
        print(f"  {result.line}: {result.tried} points, {result.latency_before:.2f} -> {result.latency:.2f} us ({member.name})", flush=True)
        return []

    def lost(self, member: Member, unit: Unit) -> list[Unit]:
        """The same task, which begins with the points that were measured; a point that workers end with is not tried again."""
        kind, key = self.kinds[member.kind], unit.args["key"]
        at = kind.trying.pop(key, None)
        if at is not None:
            times = kind.suspected[key, at] = kind.suspected.get((key, at), 0) + 1
            if times >= MAX_SUSPECTED:
                kind.own.journal.suspect(key, at)
        return self.again(member, unit)

    def again(self, member: Member, unit: Unit) -> list[Unit]:
        """The same task with the points that were measured since the unit was made."""
        kind, key = self.kinds[member.kind], unit.args["key"]
        kind.trying.pop(key, None)
        return [self._unit(kind, kind.tasks[key])]

    def failed(self, member: Member, unit: Unit, why: str) -> None:
        self.kinds[member.kind].faults.append(f"{unit.key}: {why}")


def tune_by_workers(
    where: Where, ops: Sequence[str], request: TuneRequest, budget_s: float, resume: bool, verbose: bool, told: dict[str, Any] | None
) -> bool:
    """Tune a request's tasks by workers, on each kind of device that they have. Whether any kernel was wrong. told: gets what came."""
    begun = time.monotonic()
    with ExitStack() as stack:
        count = [1]
        work = TuneWork(ops, request, budget_s, resume, verbose, stack, lambda: count[0])

        def progress(pull: Pull) -> str:
            count[0] = pull.workers
            return work.so_far

        pull = run_on(where, work, progress, kernels=True)
        if not work.listed:
            raise UsageError(f"nothing to tune: --path {request.paths} leaves no kernel, or all was passed over")
        for kind in work.kinds.values():
            for fault in kind.faults:
                print(fault)
            print(f"{kind.name}: {sum(r.kept for r in kind.results)} of {len(kind.results)} tasks improved; table {kind.own.path}")
        print(f"{time.monotonic() - begun:.0f} s; {work.points} points were timed")
        if told is not None:
            told["seconds"], told["working_s"], told["points"] = time.monotonic() - begun, pull.working_s, work.points
            told["devices"] = [
                {
                    "device": kind.name,
                    "table": str(kind.own.path),
                    "faults": kind.faults,
                    "results": [{"kept": r.kept, "percent": r.percent, **r.to_json()} for r in kind.results],
                }
                for kind in work.kinds.values()
            ]
        return any(kind.faults or any(r.wrong for r in kind.results) for kind in work.kinds.values())
