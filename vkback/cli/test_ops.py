"""vkback test-ops: every op against its numpy reference on a device, timed, or asked whether it can run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from vkback.cli.hosts import DevicesOption, HostsOption, JournalOption, SchedulerOption, WorkersOption, workers_of
from vkback.cli.loading import ActOption
from vkback.cli.shell import OutputError, UsageError, act_of, one_of, output_file, read_text
from vkback.cli.terminal import StatusLine
from vkback.errors import VkbackError, did_you_mean
from vkback.paths import reason, unwritable
from vkback.terminal import colours_wanted

if TYPE_CHECKING:
    from vkback.cli.hosts import Where
    from vkback.device import Device
    from vkback.harness.output import About, Printer
    from vkback.harness.result import CaseResult
    from vkback.ops.case import Case
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary

MODES = ("test", "grad", "perf", "support")
OUTPUTS = ("console", "csv", "sql", "json")

SHRUNK = 10
"""Most failing cases that are made smaller in one run."""


def test_ops(
    wanted: Annotated[
        list[str] | None,
        typer.Argument(metavar="[test|grad|perf|support] [CASE]...", help="Mode, default test; whole cases, as a run prints them."),
    ] = None,
    ops: Annotated[list[str] | None, typer.Option("-o", help="Op names or whole cases, with commas; may be repeated.")] = None,
    params: Annotated[str | None, typer.Option("-p", help="Only cases whose parameters match this regular expression.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Run the cases in this text: what test-backend-ops printed, its csv or sql, or any other.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All cases of the suite, not just the ones every build runs.")] = False,
    library: Annotated[
        Path | None, typer.Option("--library", metavar="FILE", help="Judge a backend of ggml, as libggml-vulkan.so, by the same cases.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Judge this model's own nodes, of one token and of several, instead of cases.")
    ] = None,
    must_pass: Annotated[
        bool, typer.Option("--must-pass", help="The cases that a driver must get right for models to run: some minutes.")
    ] = False,
    device: DevicesOption = None,
    scheduler: SchedulerOption = None,
    hosts: HostsOption = None,
    workers: WorkersOption = None,
    journal: JournalOption = None,
    act: ActOption = "auto",
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Other values for every case [default: as its line says].")] = None,
    processes: Annotated[int, typer.Option("-j", min=1, max=256, help="Processes that run cases, each with a device of its own.")] = 1,
    output: Annotated[str, typer.Option("--output", help=", ".join(OUTPUTS))] = "console",
    baseline: Annotated[Path | None, typer.Option("--baseline", help="perf: json of an earlier run to compare with.")] = None,
    store: Annotated[Path | None, typer.Option("--store", metavar="FILE", help="perf: append to a store, for vkback history.")] = None,
    xfail: Annotated[
        Path | None, typer.Option("--xfail", metavar="FILE.toml", help="Cases that are known to fail, by driver, with reasons.")
    ] = None,
    smaller: Annotated[bool, typer.Option("--shrink", help="Look for the smallest case that fails and save its values.")] = False,
    save_in: Annotated[Path, typer.Option("--save-in", help="Folder for what --shrink saves.")] = Path("failing-cases"),
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the error and its bound for cases that pass, too.")] = False,
    cover: Annotated[bool, typer.Option("--coverage", help="Run nothing; list the cases by op, type, tokens and conditions.")] = False,
    list_ops: Annotated[bool, typer.Option("--list-ops", help="List the ops with their number of cases.")] = False,
) -> None:
    """Run the seeded cases of ops on a device and judge each against the op's numpy reference and, where it is a fusion, against the ops it
    replaces. Exit code 1 when one fails, 2 for a line that names no case. Cases are written as llama.cpp's test-backend-ops prints them.

    grad runs the ops that make gradients, and compares their references with finite differences of what they differentiate, too.
    perf times cases with cold weights; support says what the device runs and why not the rest.
    """
    from vkback.harness.cases import full_cases, must_pass_cases, perf_cases, quick_cases

    names = list(wanted or [])
    mode = names.pop(0) if names and names[0] in MODES else "test"
    output = "json" if as_json else one_of(output, OUTPUTS, "--output")
    act_of(act)
    if store is not None and mode != "perf":
        raise UsageError(f"--store keeps times: expected vkback test-ops perf, not {mode}")
    if baseline is not None and mode != "perf":
        raise UsageError(f"--baseline compares times: expected vkback test-ops perf, not {mode}")
    if smaller and (why := unwritable(next(p for p in (save_in, *save_in.absolute().parents) if p.exists()) / "case.npz")):
        raise UsageError(f"--save-in {save_in}: {why}")
    notes = _against(baseline)
    if store is not None:
        output_file(store, "--store")
    if list_ops:
        print_counts(output == "json")
        return
    if model is not None:
        if mode != "test" or names or ops or source or library or full or processes > 1 or smaller or xfail or must_pass:
            raise UsageError("-m judges a model's own nodes: expected mode test, without cases, -o, --from, --full, -j and the like")
        if _run_model(model, params, device, act, output, verbose):
            raise typer.Exit(1)
        return
    if must_pass and (mode != "test" or source or full):
        raise UsageError("--must-pass is a set of cases of its own: expected mode test, without --from and --full")
    names += [name for text in ops or () for name in _split(text)]
    if ops is not None and not names:
        raise UsageError(f"-o {','.join(ops)!r} names no op; give some, as -o MUL_MAT,ROPE, or leave it out for all")
    listed = (
        must_pass_cases()
        if must_pass
        else lines_of(source)
        if source
        else perf_cases()
        if mode == "perf"
        else full_cases()
        if full
        else quick_cases()
    )
    if mode == "grad":
        from vkback.harness.grad import is_gradient

        listed = [case for case in listed if is_gradient(case)]
    cases = list(select(listed, names, params))
    if mode == "grad" and (others := sorted({case.op for case in cases if not is_gradient(case)})):
        raise UsageError(f"{', '.join(others)}: no op that makes a gradient; vkback test-ops grad runs all that do")
    if seed is not None:
        cases = [case.reseeded(seed) for case in cases]
    if cover:
        from vkback.harness.coverage import cells, coverage
        from vkback.report import tables

        found = coverage(cases)
        print(tables.machine(found, "json") if output == "json" else "\n".join(tables.markdown(cells(found), ("op", "type"))))
        return
    by_op = source is not None
    where = workers_of(device, scheduler, hosts, workers, journal)
    if where is not None and (mode == "support" or processes > 1 or smaller):
        what = "support" if mode == "support" else "-j" if processes > 1 else "--shrink"
        raise UsageError(f"{what} is of one device; leave out --scheduler, --hosts, --workers and several devices")
    if xfail is not None:
        from vkback.harness.xfail import load

        if mode not in ("test", "grad"):
            raise UsageError(f"--xfail is about cases that are judged: expected mode test or grad, not {mode}")
        load(xfail, "")  # a fault in it is told before the work
    if library is not None:
        if mode != "test" or processes > 1 or device or act != "auto" or where is not None:
            raise UsageError("--library judges another program's backend: expected mode test, without -j, --device, workers and --act")
        if _run_library(library, cases, output, save_in if smaller else None, verbose, by_op, xfail):
            raise typer.Exit(1)
        return
    if where is not None:
        if _run_by_workers(where, journal, mode, cases, act, output, notes, store, verbose, by_op, xfail):
            raise typer.Exit(1)
        return
    failed = _run(mode, cases, device, act, processes, output, notes, store, save_in if smaller else None, verbose, by_op, xfail)
    if failed:
        raise typer.Exit(1)


def _run(
    mode: str,
    cases: Sequence[Case],
    device: str | None,
    act: str,
    processes: int,
    output: str,
    notes: Callable[[CaseResult], str],
    store: Path | None,
    save_in: Path | None,
    verbose: bool,
    by_op: bool,
    xfail: Path | None,
) -> bool:
    """Run, print, and say whether a case failed that is not listed in xfail.

    by_op  a table of the ops in the end, on stderr where the output is for machines
    """
    from vkback.device import Device
    from vkback.harness.output import fields_of, op_table, spent_lines
    from vkback.harness.suite import KEPT, Suite
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary
    from vkback.tuning.lookup import Tuning

    with ExitStack() as stack:
        opened = stack.enter_context(Device.open(device))
        ctx = LowerContext(opened.caps, Tuning.for_device(opened.caps), act_of(act))
        library = ShaderLibrary(quick=opened.caps.software and mode != "perf")
        printer = _printer(output, opened, ctx, verbose, notes)
        if output == "console":
            print(opened.caps.summary_line(opened.index), flush=True)
        if mode == "support":
            _print_support(cases, ctx, printer, output, verbose)
            return False
        results: Iterable[CaseResult]
        if mode == "perf":
            results = _timed(opened, library, cases, ctx, output)
        elif processes > 1:
            from vkback.harness.suite import run_in_processes

            results = stack.enter_context(closing(run_in_processes([c.line for c in cases], processes, opened.index, act)))
        else:
            results = stack.enter_context(Suite(opened, library, ctx, kept=KEPT)).run(cases)
        if mode == "grad":
            from vkback.harness.grad import graded

            results = graded(results, cases)
        results = _expecting(results, xfail, f"{opened.caps.name} {opened.caps.driver_name} {opened.caps.driver_info}")
        kept = None
        if store is not None:
            from vkback.report.store import Store

            kept = stack.enter_context(Store(store))
        ran: list[CaseResult] = []
        begun = time.perf_counter()
        status = stack.enter_context(StatusLine(wanted=not sys.stdout.isatty()))  # where lines are seen as they come, these will do
        try:
            for number, result in enumerate(results, start=1):
                status.say(f"vkback: {number} of {len(cases)} cases, {len(printer.tally.failed)} failed")
                printer.add(result)
                ran.append(result)
                if kept is not None and result.supported:
                    kept.add_op(fields_of(result, printer.about), result.samples_us or ())
        except (KeyboardInterrupt, VkbackError) as e:
            if output != "console":  # what was printed is whole
                printer.finish()
            if isinstance(e, KeyboardInterrupt):
                status.clear()
                print(f"vkback: stopped: {len(ran)} of {len(cases)} cases ran, {len(printer.tally.failed)} failed", file=sys.stderr)
            raise
        if mode in ("test", "grad") or printer.tally.failed or output != "console":
            printer.finish()
        if by_op and mode in ("test", "grad"):
            text = [*op_table(ran), "", *spent_lines(ran, time.perf_counter() - begun)]
            print("\n" + "\n".join(text).rstrip(), file=sys.stdout if output == "console" else sys.stderr)
        if save_in is not None and mode == "test" and printer.tally.failed:
            with Suite(opened, library, ctx) as suite:
                _shrink(suite, printer.tally.failed, save_in)
        return bool(printer.tally.failed)


def _run_by_workers(
    where: Where,
    journal: Path | None,
    mode: str,
    cases: Sequence[Case],
    act: str,
    output: str,
    notes: Callable[[CaseResult], str],
    store: Path | None,
    verbose: bool,
    by_op: bool,
    xfail: Path | None,
) -> bool:
    """Run by workers, print, and say whether a case failed that is not listed in xfail."""
    from vkback.cli.test_ops_hosts import run
    from vkback.harness.output import fields_of, op_table, spent_lines

    begun = time.perf_counter()
    with ExitStack() as stack:
        kept = None
        if store is not None:
            from vkback.report.store import Store

            kept = stack.enter_context(Store(store))

        def keep(result: CaseResult, about: About) -> None:
            if kept is not None and result.supported:
                kept.add_op(fields_of(result, about), result.samples_us or ())

        def expecting(result: CaseResult, driver: str) -> CaseResult:
            return next(iter(_expecting([result], xfail, driver)))

        printer, ran = run(
            where,
            [case.line for case in cases],
            mode,
            act,
            journal,
            lambda about: _printer_of(output, about, verbose, notes),
            expecting,
            keep,
            headings=output == "console",
        )
    if mode in ("test", "grad") or printer.tally.failed or output != "console":
        printer.finish()
    if by_op and mode in ("test", "grad"):
        text = [*op_table(ran), "", *spent_lines(ran, time.perf_counter() - begun)]
        print("\n" + "\n".join(text).rstrip(), file=sys.stdout if output == "console" else sys.stderr)
    return bool(printer.tally.failed)


def _run_model(name: str, params: str | None, device: str | None, act: str, output: str, verbose: bool) -> bool:
    """Judge the nodes of a model, of one token behind some others and of several at once, and say whether one is wrong."""
    from vkback.cli.compare import TOKENS, batch_of
    from vkback.cli.shell import model_path
    from vkback.device import Device
    from vkback.evaluate.node_run import context_on
    from vkback.harness.model_cases import model_cases
    from vkback.models.registry import Model
    from vkback.shader import ShaderLibrary

    opened = Model.open(model_path(name))
    pattern = _pattern(params)
    lines: list[str] = []
    with Device.open(device) as here:
        library = ShaderLibrary(quick=here.caps.software)
        context = context_on(here, library, act_of(act))
        printer = _printer(output, here, context, verbose, lambda result: "")
        if output == "console":
            print(f"{here.caps.summary_line(here.index)}\n{opened.heading}", flush=True)
        for at_once in (False, True):
            for case in model_cases(opened, here, library, context, batch_of(opened, None, TOKENS, at_once, None)):
                if not pattern.search(case.text):
                    continue
                printer.add(case.result)
                if case.worst.outside and case.line:
                    lines.append(case.line)
        printer.finish()
    for line in dict.fromkeys(lines):
        print(f"alone: vkback test-ops '{line}'", file=sys.stdout if output == "console" else sys.stderr)
    return bool(printer.tally.failed)


def _expecting(results: Iterable[CaseResult], xfail: Path | None, driver: str) -> Iterable[CaseResult]:
    """Results with the reasons of those that are expected to fail on this driver."""
    if xfail is None:
        return results
    from vkback.harness.xfail import expecting, load

    return expecting(results, load(xfail, driver))


def _run_library(
    library: Path, cases: Sequence[Case], output: str, save_in: Path | None, verbose: bool, by_op: bool, xfail: Path | None
) -> bool:
    """Judge a backend of ggml, and say whether a case failed. Cases of ops that it has not, or that vkback alone has, are not supported."""
    from vkback.harness.ggml_library import GgmlSuite, distinct
    from vkback.harness.output import About, op_table
    from vkback.report.build import build_info

    with GgmlSuite(library) as suite:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = About("ggml0", suite.description, library.name, build_info()[0], now, "auto", "")
        printer = _printer_of(output, about, verbose, lambda result: "")
        if output == "console":
            print(f"{library}: {suite.description}", flush=True)
        cases = distinct(cases)
        ran: list[CaseResult] = []
        with StatusLine(wanted=not sys.stdout.isatty()) as status:
            try:
                for number, result in enumerate(_expecting(suite.run(cases), xfail, f"{library.name} {suite.description}"), start=1):
                    status.say(f"vkback: {number} of {len(cases)} cases, {len(printer.tally.failed)} failed")
                    printer.add(result)
                    ran.append(result)
            finally:
                status.clear()
                printer.finish()
        if by_op:
            print("\n" + "\n".join(op_table(ran)), file=sys.stdout if output == "console" else sys.stderr)
        if save_in is not None and printer.tally.failed:
            _shrink(suite, printer.tally.failed, save_in, f" --library {library}")
        return bool(printer.tally.failed)


def _print_support(cases: Sequence[Case], ctx: LowerContext, printer: Printer, output: str, verbose: bool) -> None:
    """Whether the device runs each case: on the console a table of ops, else, or with verbose, each by itself."""
    from vkback.harness.support import support_of, support_table

    made = list(support_of(cases, ctx))
    for result in made if verbose or output != "console" else ():
        printer.add(result)
    if output == "console":
        print("\n".join(support_table(cases, made)))
    else:
        printer.finish()


def _timed(device: Device, library: ShaderLibrary, cases: Sequence[Case], ctx: LowerContext, output: str) -> Iterator[CaseResult]:
    """Times of cases, beside the read rate that is measured first."""
    from vkback.cli.shell import measured_read_rate
    from vkback.harness.perf import time_cases

    rate = measured_read_rate(device)
    if output == "console":
        print(f"read rate {rate:.0f} GB/s", flush=True)
    return time_cases(device, library, cases, ctx, rate)


def _shrink(suite: Any, failed: Sequence[str], save_in: Path, how: str = "") -> None:
    from vkback.harness.cases import find_case
    from vkback.harness.shrink import save, shrink

    for line in failed[:SHRUNK]:
        least = shrink(find_case(line), lambda case: suite.run_one(case).result.passed is False)
        run = suite.run_one(least)
        try:
            path = save(run, save_in)
        except OSError as e:
            raise OutputError(f"--save-in {save_in}: cannot be written: {reason(e)}") from e
        print(f"\nSmallest failing case of {line}:\n  {least.line}\n  {run.result.message}", file=sys.stderr)
        print(f"  values in {path}; rerun: vkback test-ops{how} '{least.line}'", file=sys.stderr)


def _printer(output: str, device: Any, ctx: LowerContext, verbose: bool, notes: Callable[[CaseResult], str]) -> Printer:
    from vkback.harness.output import About
    from vkback.report.build import build_info
    from vkback.tuning.lookup import identity

    caps = device.caps
    about = About(
        f"Vulkan{device.index}",
        caps.name,
        f"{caps.driver_name} {caps.driver_info}",
        build_info()[0],
        datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        ctx.act,
        identity(ctx.tuning),
    )
    return _printer_of(output, about, verbose, notes)


def _printer_of(output: str, about: About, verbose: bool, notes: Callable[[CaseResult], str]) -> Printer:
    from vkback.harness.output import Console, Csv, Json, Sql

    if output == "console":
        style = _coloured if colours_wanted(sys.stdout) else _plain
        return Console(sys.stdout, about, verbose=verbose, style=style, notes=notes)
    forms: dict[str, Callable[[TextIO, About], Printer]] = {"csv": Csv, "sql": Sql, "json": Json}
    return forms[output](sys.stdout, about)


def _coloured(text: str, colour: str) -> str:
    return typer.style(text, fg=colour)


def _plain(text: str, colour: str) -> str:
    return text


def _against(baseline: Path | None) -> Callable[[CaseResult], str]:
    """What an earlier run says of a timed case: the change, and whether it beats the noise. Raises UsageError when it cannot be read."""
    if baseline is None:
        return lambda result: ""
    from vkback.harness.output import samples_by_line

    text = read_text(baseline, "--baseline")
    try:
        before = samples_by_line(text)
    except ValueError as e:
        raise UsageError(f"--baseline {baseline}: not the json of a perf run: {e}") from e
    if not before:
        raise UsageError(f"--baseline {baseline}: holds no timed case; expected what vkback test-ops perf --json prints")
    return lambda result: compared(before, result)


def compared(before: Mapping[str, Sequence[float]], result: CaseResult) -> str:
    """The change against the samples of an earlier run, in microseconds a launch."""
    from statistics import fmean, stdev

    from vkback.report.compare import Speed, change_between, change_text

    old = before.get(result.line)
    if not old or not result.samples_us:
        return ", not in the baseline"

    def speed(samples: Sequence[float]) -> Speed:
        return Speed(fmean(samples), stdev(samples) if len(samples) > 1 else 0.0, len(samples))

    was, now = speed(old), speed(result.samples_us)
    change = change_text(change_between(was, now))
    return f", time {100 * (now.mean / was.mean - 1):+.1f} % against {was.mean:.2f} us, beats the noise: {change}"


def print_counts(as_json: bool = False) -> None:
    """Ops with their number of cases in each set."""
    import json
    from collections import Counter

    from vkback.harness.cases import full_cases, perf_cases, quick_cases
    from vkback.ops.op import OPS

    sets = [Counter(case.op for case in made()) for made in (quick_cases, full_cases, perf_cases)]
    if as_json:
        kinds = ("quick", "full", "perf")
        print(json.dumps({name: {kind: s[name] for kind, s in zip(kinds, sets, strict=True)} for name in sorted(OPS)}, indent=1))
        return
    for name in sorted(OPS):
        print("{:24} {:5} quick {:6} full {:5} perf cases".format(name, *(s[name] for s in sets)))
    print("{:24} {:5} quick {:6} full {:5} perf cases".format("all", *(s.total() for s in sets)))


def lines_of(source: Path) -> list[Case]:
    """The cases in a file. Raises UsageError when it cannot be read, CaseLineError for lines that make no case."""
    from vkback.harness.lines import cases_of

    try:
        return cases_of(source.read_text(encoding="utf-8", errors="replace"), str(source))
    except OSError as e:
        raise UsageError(f"--from {source}: cannot be read: {e.strerror}") from e


def _split(ops: str | None) -> list[str]:
    from vkback.ops.case_line import split_lines

    return split_lines(ops) if ops else []


def _pattern(params: str | None) -> re.Pattern[str]:
    try:
        return re.compile(params or "", re.IGNORECASE)
    except re.error as e:
        raise UsageError(f"-p {params}: not a regular expression: {e}") from e


def select(cases: Iterable[Case], names: Sequence[str], params: str | None) -> Iterator[Case]:
    """Cases of the named ops; of those, the ones whose parameters match. A name may be a whole case, of this set or of any other.

    Raises UsageError for a name that is neither an op nor a case, for a bad expression, and when nothing is left.
    """
    pattern = _pattern(params)
    names = [n.strip() for n in names]
    unmatched = dict.fromkeys(names)
    found = False
    for case in cases:
        keys = {case.op, case.line} & set(names)
        for key in keys:
            unmatched.pop(key, None)
        if (keys or not names) and pattern.search(case.line.partition("(")[2]):
            found = True
            yield case
    if unmatched:
        from vkback.harness.cases import find_case
        from vkback.ops.op import OPS

        for name in sorted(n for n in unmatched if "(" not in n):
            if name in OPS:
                raise UsageError(f"{name} has no case of this kind; --list-ops shows how many each op has")
            raise UsageError(f"no op and no case is called {name}.{did_you_mean(name, OPS)} --list-ops shows the ops")
        for line in unmatched:
            found = True
            yield find_case(line)
    if not found:
        raise UsageError(f"-p {params}: no case matches")
