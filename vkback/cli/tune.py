"""vkback tune: finds kernel shapes for this device and keeps them in its own tuning table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vkback.cli.hosts import DevicesOption, HostsOption, SchedulerOption, Where, WorkersOption, workers_of
from vkback.cli.shell import JsonOption, UsageError, measured_read_rate, one_of, output_file, picture_file
from vkback.cli.tune_families import DEFAULT_QUANTS, GEMM_QUANTS, GEMM_TOKENS, TASKS_OF, Paths, TuneRequest
from vkback.cli.tune_record import export_spaces, folder_of, record_spaces, show_simulation
from vkback.cli.tune_show import pictures, watched

if TYPE_CHECKING:
    from vkback.autotune.tunable import TuneResult
    from vkback.device import Device
    from vkback.ops.lowering import LowerContext

OPS = ("gemv", "gemm", "attention", "delta_net", "ssm_scan")
OF_MODELS = ("attention", "delta_net", "ssm_scan")
"""Tuned in the shapes of a model alone."""
PATHS = ("auto", "int", "float", "both")
DEFAULT_SHAPES = "4096x4096,4096x14336,14336x4096"


def tune(
    device: DevicesOption = None,
    scheduler: SchedulerOption = None,
    hosts: HostsOption = None,
    workers: WorkersOption = None,
    op: Annotated[str | None, typer.Option(help=f"Family of kernels: {', '.join(OPS)} [default: gemv; with a model all].")] = None,
    quant: Annotated[str | None, typer.Option(help=f"Weight types, with commas [default: {DEFAULT_QUANTS}; gemm: {GEMM_QUANTS}].")] = None,
    shape: Annotated[str, typer.Option(help="Weights as rows x columns, with commas.")] = DEFAULT_SHAPES,
    case: Annotated[list[str] | None, typer.Option(metavar="CASE", help="Fused products instead, as the suite prints them.")] = None,
    model: Annotated[str | None, typer.Option("-m", "--model", help="The kernels of this model instead: a token's and a prompt's.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--tokens",
            help=f"Tokens at once, with commas [default: gemv 1; gemm {','.join(map(str, GEMM_TOKENS))}, of a model a prompt's "
            "512 (64 on CPU drivers); attention 1 and a prompt's].",
        ),
    ] = None,
    ctx: Annotated[
        int | None, typer.Option("-c", "--ctx", min=32, help="Attention of one token: rows of the KV cache [default: as trained].")
    ] = None,
    depth: Annotated[
        int | None, typer.Option("-d", "--depth", min=0, help="Attention: rows of the cache in use [default: 128; before a prompt 0].")
    ] = None,
    path: Annotated[str, typer.Option(help=f"gemv: float or integer dot: {', '.join(PATHS)}; both keeps the quicker.")] = "auto",
    budget: Annotated[float, typer.Option(min=1, help="Seconds for all.")] = 480.0,
    resume: Annotated[bool, typer.Option("--resume", help="Pass over what an earlier run has finished.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Heatmap file [default: beside the table, if matplotlib is there].")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print every point.")] = False,
    where_written: Annotated[
        bool, typer.Option("--where", help="Tune nothing: print the file that tuning writes, and that a rule of your own goes to.")
    ] = False,
    share: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tune nothing: write device report, journal and table of earlier runs to one file.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Search nothing: time every point of each task and write the spaces, for --simulate.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tune nothing: write what earlier runs have timed in Kernel Tuner's formats.")
    ] = None,
    simulate: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Tune nothing: replay searches on a recorded space, or on those of a folder; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time kernel shapes on this device and write those that beat the tables, beyond the noise, into the device's own table.

    Every candidate's result is checked before it is timed. The measure is the latency of one launch that waits for the one before. Where
    stages of a model's decode schedule are barrier-free, it is the time of a token with the candidate in it; so it is for attention of one
    token. gemm is about products of several tokens: which kernel, the GEMV kernels among them, and which tiles. Exit code 1 when a
    kernel computed something wrong.
    """
    if where_written:
        _print_where(device, as_json)
        return
    if share is not None:
        _share(device, output_file(share, "--share"))
        return
    chosen = [name for name, given in (("--record", record), ("--export", export), ("--simulate", simulate)) if given]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other; expected one of them")
    if simulate:
        with _as_json(as_json) as found:
            show_simulation(simulate, found)
        return
    if export is not None:
        with _as_json(as_json) as found:
            _export(device, folder_of(export, "--export"), found)
        return
    if case is not None and model is not None and op not in OF_MODELS:
        raise UsageError("--case and --model exclude each other")
    if picture is not None:
        picture_file(picture, "--picture")
    paths = cast(Paths, one_of(path, PATHS, "--path"))
    ops = [one_of(op, OPS, "--op")] if op is not None else list(OPS) if model is not None else ["gemv"]
    if op in OF_MODELS and case is not None:
        raise UsageError(f"--op {op} takes a model, no --case")
    if op in OF_MODELS and model is None:
        raise UsageError(f"--op {op} is tuned with the shapes of a model; name one with --model")
    if op == "gemm" and path != "auto":
        raise UsageError(f"--path {path}: gemm takes the kernels of every path as candidates; leave it out")
    request = TuneRequest(case, model, quant, shape, _counts(tokens), paths, ctx, depth)
    where = workers_of(device, scheduler, hosts, workers)
    if record is not None:
        if where is not None or picture is not None or resume:
            raise UsageError("--record is of one device, without --picture; the same command again goes on where it was, without --resume")
        with _as_json(as_json) as found:
            _record(device, ops, request, folder_of(record, "--record"), budget, found)
        return
    if where is not None and picture is not None:
        raise UsageError("--picture is of one device; leave out --scheduler, --hosts, --workers and several devices")
    run = _Run(device, budget, resume, verbose)
    if as_json:
        with contextlib.redirect_stdout(sys.stderr):
            told: dict[str, Any] = {}
            wrong = _tune_where(where, ops, request, run, picture, told)
        print(json.dumps(told, indent=1))
    else:
        wrong = _tune_where(where, ops, request, run, picture)
    if wrong:
        raise typer.Exit(1)


@contextlib.contextmanager
def _as_json(wanted: bool) -> Iterator[dict[str, Any]]:
    """A dict for what comes of the block. wanted: it is printed as JSON in the end, and all else goes to stderr."""
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield found
    if wanted:
        print(json.dumps(found, indent=1))


def _record(device: str | None, ops: Sequence[str], request: TuneRequest, folder: Path, budget_s: float, found: dict[str, Any]) -> None:
    from vkback.autotune.device_table import table_lock
    from vkback.device import Device
    from vkback.paths import user_tuning_root

    with Device.open(device) as opened, table_lock(opened.caps, user_tuning_root(), _waits):
        print(opened.caps.summary_line(), flush=True)
        record_spaces(opened, _context(opened), ops, request, folder, budget_s, found)


def _export(device: str | None, folder: Path, found: dict[str, Any]) -> None:
    from vkback.device import Device

    with Device.open(device) as opened:
        export_spaces(opened, folder, found)


def _share(device: str | None, file: Path) -> None:
    """Write what tuning has found on a device so far."""
    from vkback.autotune.share import share
    from vkback.cli.devices import bug_report
    from vkback.device import Device
    from vkback.paths import user_tuning_root
    from vkback.report.community import WHERE

    with Device.open(device) as opened:
        share(opened.caps, bug_report(), user_tuning_root(), file)
    print(f"{file}: {WHERE} It tells device, driver, system, packages, what was timed and the times")


def _print_where(device: str | None, as_json: bool) -> None:
    """The device's own table."""
    from vkback.device import Device
    from vkback.paths import user_tuning_root
    from vkback.tuning.lookup import device_table

    with Device.open(device) as opened:
        file = user_tuning_root() / device_table(opened.caps)
    there = file.is_file()
    print(json.dumps({"table": str(file), "exists": there}, indent=1) if as_json else f"{file}{'' if there else ' (not there yet)'}")


def _counts(tokens: str | None) -> tuple[int, ...]:
    """Numbers from `2,4,8`; none where nothing was given."""
    words = [word.strip() for word in tokens.split(",")] if tokens is not None else []
    if not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"--tokens {tokens}: expected whole numbers above 0 with commas, as 2,8,512")
    return tuple(map(int, words))


@dataclasses.dataclass(frozen=True)
class _Run:
    """What applies to every family."""

    device: str | None
    budget_s: float
    resume: bool
    verbose: bool


def _tune_where(
    where: Where | None, ops: Sequence[str], request: TuneRequest, run: _Run, picture: Path | None, told: dict[str, Any] | None = None
) -> bool:
    """Tune by workers, or here."""
    if where is None:
        return _tune(ops, request, run, picture, told)
    from vkback.cli.tune_hosts import tune_by_workers

    return tune_by_workers(where, ops, request, run.budget_s, run.resume, run.verbose, told)


def _tune(ops: Sequence[str], request: TuneRequest, run: _Run, picture: Path | None, told: dict[str, Any] | None = None) -> bool:
    """Tune families one after the other, each with the share of the budget that it has of the tasks. Whether any kernel was wrong. told:
    gets what came of it as plain values."""
    from vkback.autotune.device_table import DeviceTable, table_lock
    from vkback.autotune.driver import Sweep
    from vkback.device import Device
    from vkback.paths import user_tuning_root
    from vkback.shader import ShaderLibrary

    start = time.monotonic()
    with Device.open(run.device) as opened, contextlib.ExitStack() as stack:
        print(opened.caps.summary_line())
        ctx = _context(opened)
        families = [family for op in ops for family in TASKS_OF[op](opened, request, ctx) if family.tasks]
        total = sum(len(family.tasks) for family in families)
        if not total:
            raise UsageError(f"nothing to tune on {opened.caps.name}: --path {request.paths} leaves no kernel, or all was passed over")
        # Two runs would measure each other, and the second would overwrite the first one's rows.
        stack.enter_context(table_lock(opened.caps, user_tuning_root(), _waits))
        own, rate = DeviceTable(opened.caps, ShaderLibrary(), user_tuning_root()), measured_read_rate(opened)
        counts = "; ".join(f"{len(family.tasks)} {family.noun}{family.about}" for family in families)
        print(f"read rate {rate:.1f} GB/s; {counts}, {run.budget_s:.0f} s", flush=True)
        results: list[Sequence[TuneResult[Any]]] = []
        faults: list[str] = []
        with watched(run.verbose) as watcher:
            for family in families:
                done = sum(own.journal.finished(task.key) for task in family.tasks) if run.resume else 0
                if done:
                    print(f"{done} of {len(family.tasks)} {family.noun} were finished by an earlier run")
                # Rows found by the families before are in the tables that this one starts from.
                tunable = family.make(dataclasses.replace(ctx, tuning=own.tables()))
                budget = run.budget_s * len(family.tasks) / total
                sweep = Sweep(tunable, own, rate, budget_s=budget, watcher=family.watch(watcher))
                try:
                    results.append(sweep.run(family.tasks, resume=run.resume))
                except KeyboardInterrupt:
                    ended = sum(own.journal.finished(task.key) for task in family.tasks)
                    _waits(f"stopped: {ended} of {len(family.tasks)} {family.noun} are finished; --resume goes on with the others")
                    raise
                faults += sweep.faults
        for family, found in zip(families, results, strict=True):
            family.show(found, own)
        for fault in faults:
            print(fault)
        for family, found in zip(families, results, strict=True):
            left = sum(not own.journal.finished(task.key) for task in family.tasks)
            if left:
                print(f"{left} of {len(family.tasks)} {family.noun} were not reached; --resume goes on with them")
            print(f"{sum(r.kept for r in found)} of {len(found)} {family.noun} improved")
        print(f"{time.monotonic() - start:.0f} s; table {own.path}")
        drawn = list(pictures(own, opened, ops, picture))
        print("\n".join(drawn))
        if told is not None:
            told["device"], told["read_gb_s"], told["seconds"] = opened.caps.name, rate, time.monotonic() - start
            told["table"], told["pictures"], told["faults"] = str(own.path), drawn, faults
            told["results"] = [
                {"jobs": family.noun, "kept": r.kept, "percent": r.percent, **r.to_json()}
                for family, found in zip(families, results, strict=True)
                for r in found
            ]
            told["left"] = {family.noun: sum(not own.journal.finished(task.key) for task in family.tasks) for family in families}
    return bool(faults) or any(r.wrong for found in results for r in found)


def _waits(what: str) -> None:
    print(f"vkback: {what}", file=sys.stderr, flush=True)


def _context(device: Device) -> LowerContext:
    """A context with the tables of the device, its own before all others."""
    from vkback.ops.lowering import LowerContext
    from vkback.program.fragments import fragments_hold
    from vkback.shader import ShaderLibrary
    from vkback.tuning.lookup import Tuning

    return LowerContext(device.caps, Tuning.for_device(device.caps), fragments=fragments_hold(device, ShaderLibrary()))
