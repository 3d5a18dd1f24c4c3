"""vkback test-ops by workers: what a worker runs, and how results of several devices are printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vkback.cli.hosts import Where, journal_of, run_on
from vkback.harness.result import CaseResult

if TYPE_CHECKING:
    from vkback.cluster.journal import UnitJournal
    from vkback.cluster.pull import Kind, Member, Pull, Unit
    from vkback.cluster.worker import Station, Tell
    from vkback.harness.output import About, Printer

RUN = "vkback.cli.test_ops_hosts:run_cases"


def run_cases(station: Station, args: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """On a worker: the cases of args["lines"] in args["mode"], with activations as args["act"] says."""
    from vkback.device import Device
    from vkback.harness.cases import find_case
    from vkback.harness.grad import graded
    from vkback.harness.perf import time_cases
    from vkback.harness.suite import KEPT, Suite
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary
    from vkback.timing.read_rate import measure_read_rate
    from vkback.tuning.lookup import Tuning, identity

    mode, act = args["mode"], args["act"]

    def opened(stack: ExitStack) -> tuple[Any, Any, str]:
        device = stack.enter_context(Device.open(station.device or None))
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps), act)
        library = ShaderLibrary(quick=device.caps.software and mode != "perf")
        if mode == "perf":
            rate = measure_read_rate(device, library).gb_s
            return (lambda cases: time_cases(device, library, cases, ctx, rate)), None, identity(ctx.tuning)
        suite = stack.enter_context(Suite(device, library, ctx, compile_threads=station.threads, kept=KEPT))
        return suite.run, suite, identity(ctx.tuning)

    run, _, tuning = station.kept(("test-ops", mode, act), opened)
    cases = [find_case(line) for line in args["lines"]]
    results = run(cases)
    found = list(graded(results, cases) if mode == "grad" else results)
    return {"results": [dataclasses.asdict(result) for result in found], "tuning": tuning}


def result_from(values: Mapping[str, Any]) -> CaseResult:
    """A CaseResult from its plain values."""
    lists = {name: tuple(values[name]) for name in ("samples_us", "seconds")}
    return CaseResult(**{**values, **lists})


@dataclasses.dataclass
class _Shown:
    """Results of a kind of device by line, of which the first `printed` lines are printed."""

    about: About
    heading: str
    results: dict[str, CaseResult] = dataclasses.field(default_factory=dict)
    printed: int = 0


class TestOps:
    """Cases as work for workers (vkback/cluster/pull.py). Results are printed in the order of the lines; those of a second kind of device
    come when those of the first are complete."""

    def __init__(
        self,
        lines: Sequence[str],
        mode: str,
        act: str,
        journal: UnitJournal,
        printer: Printer,
        expecting: Callable[[CaseResult, str], CaseResult],
        *,
        headings: bool,
        kept: Callable[[CaseResult, About], object],
    ) -> None:
        """expecting: a result with why it is expected to fail on a driver. kept: told of every new result."""
        self._lines, self._mode, self._act, self._journal = list(lines), mode, act, journal
        self.printer, self._expecting, self._headings, self._kept = printer, expecting, headings, kept
        self._kinds: dict[Kind, _Shown] = {}
        self.ran: list[CaseResult] = []

    @property
    def so_far(self) -> int:
        """Cases whose results are there, of `total`."""
        return sum(len(kind.results) for kind in self._kinds.values())

    @property
    def total(self) -> int:
        return len(self._lines) * max(1, len(self._kinds))

    def begin(self, member: Member) -> None:
        return None

    def units(self, member: Member, begun: Any) -> list[Unit]:
        from vkback.harness.output import About
        from vkback.harness.suite import chunks

        a = member.about
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = About(f"Vulkan{a['index']}", a["device"], a["driver"], a["build"], time, self._act)
        shown = self._kinds[member.kind] = _Shown(about, f"{a['device']}, {a['driver']}, build {a['build']}")
        left = []
        for line in self._lines:
            known = self._journal.known(member.kind, line)
            if known is None:
                left.append(line)
            else:
                shown.results[line] = result_from(known)
        return [self._unit(piece) for piece in chunks(left, 4)]

    def _unit(self, lines: Sequence[str]) -> Unit:
        from vkback.cluster.pull import Unit

        named = f"{len(lines)} cases from {lines[0]}" if len(lines) > 1 else lines[0]
        return Unit(named, RUN, {"lines": list(lines), "mode": self._mode, "act": self._act})

    def on_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        """Nothing: cases are short."""

    def on_late_message(self, member: Member, unit: Unit, message: Mapping[str, Any]) -> None:
        """Nothing."""

    def done(self, member: Member, unit: Unit, value: Any) -> list[Unit]:
        shown = self._kinds[member.kind]
        shown.about = dataclasses.replace(shown.about, tuning=value["tuning"])
        for values in value["results"]:
            result = result_from(values)
            shown.results[result.line] = result
            self._journal.keep(member.about, member.kind, result.line, values)
            self._kept(result, shown.about)
        return []

    def lost(self, member: Member, unit: Unit) -> list[Unit]:
        """Its halves: a case that takes workers with it is alone in the end."""
        lines = unit.args["lines"]
        half = len(lines) // 2
        return [self._unit(lines[:half]), self._unit(lines[half:])] if half else [unit]

    def again(self, member: Member, unit: Unit) -> list[Unit]:
        return [unit]

    def failed(self, member: Member, unit: Unit, why: str) -> None:
        for line in unit.args["lines"]:
            result = CaseResult(op=line.partition("(")[0], line=line, mode=cast(Any, self._mode), passed=False, message=why)
            self._kinds[member.kind].results[line] = result

    def flush(self) -> None:
        """Print what is next."""
        for shown in self._kinds.values():
            self.printer.about = shown.about
            if not shown.printed and self._headings and shown.results:
                print(shown.heading, flush=True)
            for line in self._lines[shown.printed :]:
                result = shown.results.get(line)
                if result is None:
                    break
                result = self._expecting(result, shown.about.driver)
                self.printer.add(result)
                self.ran.append(result)
                shown.printed += 1
            if shown.printed < len(self._lines):
                return


def run(
    where: Where,
    lines: Sequence[str],
    mode: str,
    act: str,
    journal: Path | None,
    printer_of: Callable[[About], Printer],
    expecting: Callable[[CaseResult, str], CaseResult],
    kept: Callable[[CaseResult, About], object],
    *,
    headings: bool,
) -> tuple[Printer, list[CaseResult]]:
    """Run cases by workers and print them; the printer, not yet finished, and the results. headings: print which device results are of."""
    from vkback.harness.output import About

    work = TestOps(
        lines,
        mode,
        act,
        journal_of(journal, command="test-ops", mode=mode, act=act),
        printer_of(About("", "", "", "", "")),
        expecting,
        headings=headings,
        kept=kept,
    )

    def progress(pull: Pull) -> str:
        return f"{work.so_far} of {work.total} cases, {len(work.printer.tally.failed)} failed"

    try:
        run_on(where, work, progress, flush=work.flush)
    finally:
        work.flush()
    return work.printer, work.ran
