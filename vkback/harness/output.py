"""Results of the suite as text: console lines as test-backend-ops prints them, csv, sql and json.

The fields of csv and sql are those of test-backend-ops, under its names and in its order; ours follow. `op_params` is as it prints them;
the seed has a field of its own.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, cast

from vkback.harness.result import SPENT, CaseResult
from vkback.records import CsvRecords, JsonArray, RecordWriter, SqlRecords, read_objects
from vkback.terminal import columns

if TYPE_CHECKING:
    from vkback.ops.matmul.gemm_problem import GemmKernel

SQL_TABLE = "test_backend_ops"

OURS = (
    "nmse",
    "worst",
    "tolerance_nmse",
    "tolerance_worst",
    "spread_us",
    "latency_us",
    "latency_spread_us",
    "barrier_free_us",
    "read_rate_gb_s",
    "read_rate_percent",
    "math_way",
    "math_rate_tflops",
    "math_rate_percent",
    "driver_info",
    "act",
    "tuning",
    "seed",
    "reason",
)
"""Fields that test-backend-ops does not have. reason: why a case is not supported."""

CSV_FIELDS = (
    "backend_name",
    "op_name",
    "op_params",
    "test_mode",
    "supported",
    "error_message",
    "backend_reg_name",
    "passed",
    "time_us",
    "flops",
    "bandwidth_gb_s",
    "memory_kb",
    "n_runs",
    *OURS,
)

SQL_FIELDS: Mapping[str, str] = {
    "test_time": "TEXT",
    "build_commit": "TEXT",
    "backend_name": "TEXT",
    "op_name": "TEXT",
    "op_params": "TEXT",
    "test_mode": "TEXT",
    "supported": "INTEGER",
    "passed": "INTEGER",
    "error_message": "TEXT",
    "time_us": "REAL",
    "flops": "REAL",
    "bandwidth_gb_s": "REAL",
    "memory_kb": "INTEGER",
    "n_runs": "INTEGER",
    "device_description": "TEXT",
    "backend_reg_name": "TEXT",
    **{name: "TEXT" if name in ("driver_info", "act", "tuning", "math_way", "reason") else "REAL" for name in OURS},
}

Style = Callable[[str, str], str]


@dataclass(frozen=True)
class About:
    """What a run's results have in common. tuning: what identifies the tuning tables (vkback/tuning/lookup.py)."""

    backend_name: str
    device: str
    driver: str
    commit: str
    time: str
    act: str = "auto"
    tuning: str = ""


MAX_REASONS = 3
"""Reasons shown of those for which an op's cases did not run."""


def with_reasons(row: str, reasons: str) -> list[str]:
    """A row of a table with a remark on it: beside it where a terminal has room, else below."""
    if not reasons:
        return [row.rstrip()]
    if len(row) + 2 + len(reasons) <= columns():
        return [f"{row}  {reasons}"]
    return [row.rstrip(), *textwrap.wrap(reasons, columns(), initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)]


def op_table(results: Iterable[CaseResult]) -> list[str]:
    """Lines of a table: of each op the cases, how many ran and were right, how many are not supported, and why."""
    by_op: dict[str, list[CaseResult]] = {}
    for result in results:
        by_op.setdefault(result.op, []).append(result)
    width = max((len(op) for op in by_op), default=2)
    head = f"{'op':{width}}  {'lines':>6} {'run':>6} {'right':>6} {'not supported':>14}"

    def row(name: str, own: Sequence[CaseResult]) -> str:
        run = [r for r in own if r.supported]
        return f"{name:{width}}  {len(own):6} {len(run):6} {sum(r.passed is True for r in run):6} {len(own) - len(run):14}"

    lines = [head]
    for op in sorted(by_op):
        reasons = Counter(r.message.removeprefix(f"[{op}] ") for r in by_op[op] if not r.supported)
        shown = [f"{why} ({count})" for why, count in reasons.most_common(MAX_REASONS)]
        shown += [f"{len(reasons) - MAX_REASONS} other reasons"] if len(reasons) > MAX_REASONS else []
        lines += with_reasons(row(op, by_op[op]), "; ".join(shown))
    return [*lines, row("all", [r for own in by_op.values() for r in own])]


SLOWEST = 3


def spent_lines(results: Iterable[CaseResult], clock_s: float) -> list[str]:
    """Where the time of a run went: seconds by kind of all processes together, and the ops and cases that took most."""
    timed = [r for r in results if r.seconds]
    if not timed:
        return []
    kinds = ", ".join(f"{kind} {sum(r.seconds[i] for r in timed):.1f}" for i, kind in enumerate(SPENT))
    ops: dict[str, float] = {}
    for r in timed:
        ops[r.op] = ops.get(r.op, 0.0) + sum(r.seconds)
    most = ", ".join(f"{op} {ops[op]:.1f}" for op in sorted(ops, key=lambda op: -ops[op])[:SLOWEST])
    cases = sorted(timed, key=lambda r: -sum(r.seconds))[:SLOWEST]
    return [
        *textwrap.wrap(f"{clock_s:.1f} s; seconds of all processes: {kinds}; most in {most}", columns(), subsequent_indent="    "),
        *(f"  {sum(r.seconds):.2f} s: {r.line}" for r in cases),
    ]


@dataclass
class Tally:
    """What has been printed so far."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    unsupported: int = 0
    total: int = 0
    xfailed: int = 0
    xpassed: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    right: list[tuple[str, str]] = field(default_factory=list)
    """Passed though they are expected to fail. wrong, right: what was judged, each line with its kernels."""

    def count(self, result: CaseResult) -> None:
        self.total += 1
        if result.passed is not None and not result.expected:
            (self.right if result.passed else self.wrong).append((result.line, result.kernel))
        self.unsupported += not result.supported
        if result.passed is False and result.expected:
            self.xfailed += 1
        elif result.passed is False:
            self.failed.append(result.line)
        elif result.supported:
            self.passed += 1
            if result.passed and result.expected:
                self.xpassed.append(result.line)


class Printer(ABC):
    """Writes results as they come."""

    def __init__(self, out: TextIO, about: About) -> None:
        self.out, self.about, self.tally = out, about, Tally()

    def add(self, result: CaseResult) -> None:
        self.tally.count(result)
        self.write(result)
        self.out.flush()

    @abstractmethod
    def write(self, result: CaseResult) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...


def fields_of(result: CaseResult, about: About) -> dict[str, Any]:
    """Every field of csv and sql. In support mode error_message says "yes" or "no", as that of test-backend-ops: its table of ops counts
    these."""
    seed = result.line.rpartition("seed=")[2].removesuffix(")")
    return {
        "test_time": about.time,
        "build_commit": about.commit,
        "backend_name": about.backend_name,
        "op_name": result.op,
        "op_params": result.params.removesuffix(f"seed={seed}").removesuffix(",") if seed.isdigit() else result.params,
        "test_mode": result.mode,
        "supported": int(result.supported),
        "passed": None if result.passed is None else int(result.passed),
        "error_message": ("yes" if result.supported else "no") if result.mode == "support" else result.message,
        "time_us": result.time_us,
        "flops": 1e6 * result.flops / result.time_us if result.time_us else None,
        "bandwidth_gb_s": result.gb_s,
        "memory_kb": result.nbytes // 1024,
        "n_runs": result.n_runs,
        "device_description": about.device,
        "backend_reg_name": "Vulkan",
        "nmse": result.nmse,
        "worst": result.worst,
        "tolerance_nmse": result.tolerance_nmse,
        "tolerance_worst": result.tolerance_worst,
        "spread_us": result.spread_us,
        "latency_us": result.latency_us,
        "latency_spread_us": result.latency_spread_us,
        "barrier_free_us": result.barrier_free_us,
        "read_rate_gb_s": result.read_rate_gb_s,
        "read_rate_percent": result.read_rate_percent,
        "math_way": result.math_way,
        "math_rate_tflops": result.math_rate_tflops,
        "math_rate_percent": result.math_rate_percent,
        "driver_info": about.driver,
        "act": about.act,
        "tuning": about.tuning,
        "seed": int(seed) if seed.isdigit() else None,
        "reason": "" if result.supported else result.message,
    }


class Console(Printer):
    """Lines for people. verbose: errors and bounds of cases that pass, too; notes: what else to say of a line, by line."""

    def __init__(
        self, out: TextIO, about: About, *, verbose: bool, style: Style, notes: Callable[[CaseResult], str] = lambda r: ""
    ) -> None:
        super().__init__(out, about)
        self.verbose, self.style, self.notes = verbose, style, notes

    def write(self, result: CaseResult) -> None:
        if result.passed is False and not result.expected:
            self._line(result.message)
        if not result.supported:
            verdict = self.style("not supported", "yellow") + f" [{result.message}]"
        elif result.mode == "support":
            verdict = self.style("yes", "green")
        elif result.passed is False:
            verdict = self.style("XFAIL", "yellow") + f" [{result.expected}]" if result.expected else self.style("FAIL", "red")
        elif result.expected:
            verdict = self.style("XPASS", "yellow") + f" [{result.expected}]"
        elif result.mode == "perf":
            self._line(perf_line(result) + self.notes(result))
            return
        else:
            verdict = self.style("OK", "green")
        self._line(f"  {result.line}: {verdict}{self._details(result)}")

    def _details(self, result: CaseResult) -> str:
        if not self.verbose or not result.detail:
            return ""
        limit = f"; llama.cpp allows NMSE {result.peer_limit:.0e}" if result.peer_limit is not None else ""
        return f"  {result.detail}{limit}"

    def _line(self, text: str) -> None:
        self.out.write(text + "\n")

    def finish(self) -> None:
        ran = self.tally.total - self.tally.unsupported
        rest = f", {self.tally.unsupported} not supported" if self.tally.unsupported else ""
        rest = (f", {self.tally.xfailed} failed as expected" if self.tally.xfailed else "") + rest
        self._line(f"  {self.tally.passed}/{ran} tests passed{rest}")
        if self.tally.xpassed:
            self._line("\nPassing though expected to fail (take them off the list):")
            for line in self.tally.xpassed:
                self._line(f"  {line}")
        if self.tally.failed:
            self._line("\nFailing tests:")
            for line in self.tally.failed:
                self._line(f"  {line}")
            from vkback.harness.common import common_lines  # reads plans, which tables of results have no need of

            if shared := common_lines(self.tally.wrong, self.tally.right):
                self._line(f"\nIn common: {shared}")


def perf_line(result: CaseResult) -> str:
    """One timed case: throughput, what it comes to, share of the math rate of a GEMM and of the read rate, deviation, latency with a
    barrier and, if known, without."""
    time, spread, latency = result.time_us or 0.0, result.spread_us or 0.0, result.latency_us or 0.0
    head = f"  {result.line}: "
    head += " " * (-len(head) % 8)
    math, of_math = "", result.math_rate_percent
    if of_math is not None:
        from vkback.timing.math_rate import RATE_NAMES  # brings all ops, which reports have no use for

        math = f" ({of_math:.1f} % of {RATE_NAMES[cast('GemmKernel', result.math_way)]})"
    work = f"{_scaled(result.flops)}FLOP/run - {_scaled(1e6 * result.flops / time)}FLOPS{math} - " if result.flops and time else ""
    percent = result.read_rate_percent
    share = f" ({percent:.1f} % of read rate)" if percent is not None else ""
    deviation = 100 * spread / time if time else 0.0
    barrier_free = f", barrier-free {result.barrier_free_us:.2f} us" if result.barrier_free_us is not None else ""
    return (
        f"{head}{result.n_runs:8d} runs - {time:8.2f} us/run ±{deviation:.1f} % - {work}{result.gb_s or 0.0:7.2f} GB/s{share}, "
        f"latency {latency:.2f} us{barrier_free}"
    )


def _scaled(value: float) -> str:
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= unit:
            return f"{value / unit:6.2f} {prefix}"
    return f"{value:6.2f} "


class Records(Printer):
    """Results as records for machines."""

    def __init__(self, records: RecordWriter, about: About) -> None:
        super().__init__(records.out, about)
        self._records = records
        records.begin()

    def write(self, result: CaseResult) -> None:
        self._records.write(fields_of(result, self.about))

    def finish(self) -> None:
        self._records.end()


class Csv(Records):
    """A line a case, every value quoted."""

    def __init__(self, out: TextIO, about: About) -> None:
        super().__init__(CsvRecords(out, CSV_FIELDS, quote_header=True), about)


class Sql(Records):
    """Statements that make a table and fill it."""

    def __init__(self, out: TextIO, about: About) -> None:
        super().__init__(SqlRecords(out, SQL_TABLE, SQL_FIELDS), about)


class Json(Records):
    """One array of objects: the fields of sql, and all that a result holds."""

    def __init__(self, out: TextIO, about: About) -> None:
        super().__init__(JsonArray(out, indent=1), about)

    def write(self, result: CaseResult) -> None:
        self._records.write({**fields_of(result, self.about), **asdict(result)})


def samples_by_line(text: str) -> dict[str, tuple[float, ...]]:
    """Microseconds of each repetition by case, from the json of a perf run. Raises ValueError for what is no json of results."""
    return {str(o.get("line")): tuple(o["samples_us"]) for o in read_objects(text) if o.get("mode") == "perf" and o.get("samples_us")}
