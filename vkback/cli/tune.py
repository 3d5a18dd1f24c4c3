"""vkback tune: finds kernel shapes for this device and keeps them in its own tuning table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from vkback.cli.shell import DeviceOption, UsageError, measured_read_rate, model_path, one_of

if TYPE_CHECKING:
    from vkback.autotune.attention import AttentionPoint, AttentionShape
    from vkback.autotune.own_table import TuneResult
    from vkback.autotune.points import Job, Point
    from vkback.autotune.problem import MatVecProblem
    from vkback.ops.base import LowerContext

OPS = ("mat_vec", "attention")
PATHS = ("auto", "int", "float", "both")
DEFAULT_QUANTS = "Q4_0,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_XS,MXFP4,F16"
DEFAULT_SHAPES = "4096x4096,4096x14336,14336x4096"


def tune(
    device: DeviceOption = None,
    op: Annotated[str, typer.Option(help=f"Family of kernels: {', '.join(OPS)}.")] = "mat_vec",
    quant: Annotated[str, typer.Option(help="Weight types, with commas.")] = DEFAULT_QUANTS,
    shape: Annotated[str, typer.Option(help="Weights as rows x columns, with commas.")] = DEFAULT_SHAPES,
    case: Annotated[list[str] | None, typer.Option(metavar="CASE", help="Fused products instead, as the suite prints them.")] = None,
    model: Annotated[str | None, typer.Option("-m", "--model", help="The products of this model's decode schedule instead.")] = None,
    tokens: Annotated[int, typer.Option("-t", "--tokens", min=1, help="Tokens at once.")] = 1,
    ctx: Annotated[int | None, typer.Option("-c", "--ctx", min=32, help="Attention: rows of the KV cache [default: as trained].")] = None,
    depth: Annotated[int, typer.Option("-d", "--depth", min=0, help="Attention: rows of the cache in use.")] = 128,
    path: Annotated[str, typer.Option(help=f"Float or integer dot: {', '.join(PATHS)}; both times both and keeps the quicker.")] = "auto",
    budget: Annotated[float, typer.Option(min=1, help="Seconds for all.")] = 480.0,
    resume: Annotated[bool, typer.Option("--resume", help="Pass over what an earlier run has finished.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Heatmap file [default: beside the table, if matplotlib is there].")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print every point.")] = False,
) -> None:
    """Time kernel shapes on this device and write those that beat the tables, beyond the noise, into the device's own table.

    Every candidate's result is checked before it is timed. The measure is the latency of one launch that waits for the one before; where
    stages of a model's decode schedule hand over without barriers, the time of a token with the candidate in it; of attention, which takes
    --op attention and a model, always that. Exit code 1 when a kernel computed something wrong.
    """
    from vkback.autotune.points import jobs_for
    from vkback.autotune.program_sweep import ProgramSweep
    from vkback.autotune.sweep import Sweep
    from vkback.device import Device
    from vkback.models.registry import Model
    from vkback.ops.base import LowerContext
    from vkback.paths import user_tuning_root
    from vkback.plan.tuning import Tuning
    from vkback.shader import ShaderLibrary

    if one_of(op, OPS, "--op") == "attention":
        if case is not None:
            raise UsageError("--op attention takes a model, no --case")
        _tune_attention(device, model, ctx, depth, budget, resume, verbose)
        return
    wanted = cast(Literal["auto", "int", "float", "both"], one_of(path, PATHS, "--path"))
    if sum(given is not None for given in (case, model)) > 1:
        raise UsageError("--case and --model exclude each other")
    start = time.monotonic()
    with Device.open(device) as opened:
        print(opened.caps.summary_line())
        context = LowerContext(opened.caps, Tuning.for_device(opened.caps))
        inside = _in_program(model, context) if model is not None and tokens == 1 else []
        # Where a program hands over without barriers, rows about chains with barriers say nothing of any of its products.
        chain = [] if inside and wanted == "auto" else jobs_for(_products(case, model, quant, shape, tokens, context), context, wanted)
        jobs = [*inside, *chain]
        if not jobs:
            raise UsageError(f"--path {path}: none of these products has such a path on {opened.caps.name}")
        rate = measured_read_rate(opened)
        where = f", {len(inside)} of them in the program of a token" if inside else ""
        print(f"read rate {rate:.1f} GB/s; {len(jobs)} products{where}, {budget:.0f} s")
        results: list[TuneResult] = []
        faults: list[str] = []
        with _watched(verbose) as watcher:
            for part in filter(None, (inside, chain)):
                kind = partial(ProgramSweep, Model.open(model_path(model))) if part is inside else Sweep
                share = budget * len(part) / len(jobs)
                sweep = kind(opened, ShaderLibrary(), user_tuning_root(), rate, budget_s=share, watcher=watcher)
                results += sweep.run(part, resume=resume)
                faults += sweep.faults
        for sync in ("sentinel", "barrier"):
            _show([r for r in results if r.match["sync"] == sync])
        for fault in faults:
            print(fault)
        kept = sum(r.kept for r in results)
        left = sum(not sweep.own.journal.finished(job.key) for job in jobs)
        if left:
            print(f"{left} of {len(jobs)} products were not reached; --resume goes on with them")
        print(f"{kept} of {len(results)} products improved in {time.monotonic() - start:.0f} s; table {sweep.own.path}")
        drawn = _draw(sweep.own.results, picture or sweep.own.path.with_suffix(".png"), opened.caps.name)
        print(drawn)
    if faults or any(r.wrong for r in results):
        raise typer.Exit(1)


def _tune_attention(
    device: str | None, model: str | None, n_ctx: int | None, depth: int, budget: float, resume: bool, verbose: bool
) -> None:
    """Attention of a model's token, with so many rows of the cache in use."""
    from vkback.autotune.attention import attention_shapes, key_of, tune_attention
    from vkback.autotune.own_table import OwnTable
    from vkback.autotune.search import SweepError
    from vkback.device import Device
    from vkback.models.registry import Model
    from vkback.ops.base import LowerContext
    from vkback.paths import user_tuning_root
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import Tokens

    if model is None:
        raise UsageError("--op attention is tuned in the program of a model's token; name one with --model")
    start = time.monotonic()
    library = ShaderLibrary()
    wrong = 0
    with Device.open(device) as opened:
        print(opened.caps.summary_line())
        own = OwnTable(opened, library, user_tuning_root())
        context = LowerContext(opened.caps, own.tables())
        opened_model = Model.open(model_path(model))
        with Tokens(opened_model, opened, library, context, n_ctx=n_ctx, depth=depth) as tokens, _watched(verbose) as watcher:
            forms = attention_shapes(tokens.graph, context)
            todo = [f for f in forms if not (resume and own.journal.finished(key_of(f, tokens.depth)))]
            if len(todo) < len(forms):
                print(f"{len(forms) - len(todo)} of {len(forms)} forms were finished by an earlier run")
            for i, form in enumerate(todo):
                print(f"{form.line}, {tokens.depth} in use")
                watcher.begin(form, i, len(todo))
                try:
                    result = tune_attention(tokens, context, form, own, budget / len(todo), partial(watcher.point, form))
                except SweepError as e:
                    print(e)
                    wrong += 1
                    continue
                wrong += len(result.wrong)
                change = f"{100 * (result.after_us / result.before_us - 1):+.1f} %" if result.kept else "nothing better"
                print(f"  before: {result.before.text}: {result.before_us:.2f} us a token ({result.source})")
                print(f"  after:  {result.after.text}: {result.after_us:.2f} us a token, {change}, of {result.tried} points")
        print(f"{time.monotonic() - start:.0f} s; table {own.path}")
    if wrong:
        raise typer.Exit(1)


def _in_program(model: str, ctx: LowerContext) -> list[Job]:
    """The products of a model's decode schedule if its stages hand over without barriers, to be tuned in the program of a token."""
    from vkback.autotune.points import jobs_for
    from vkback.models.registry import Model
    from vkback.timing.token_program import is_barrier_free

    path = model_path(model)
    if not is_barrier_free(Model.open(path), ctx):
        return []
    barrier_free = dataclasses.replace(ctx, sync="sentinel")
    return jobs_for(of_model(model, 1, barrier_free), barrier_free, program=path.stem)


def _products(
    case: Sequence[str] | None, model: str | None, quant: str, shape: str, tokens: int, ctx: LowerContext
) -> Iterator[tuple[MatVecProblem, int]]:
    from vkback.autotune.problem import MatVecProblem

    if case is not None:
        for text in case:
            yield MatVecProblem.parse(text), 1
    elif model is not None:
        yield from of_model(model, tokens, ctx)
    else:
        for name in quant.split(","):
            for size in shape.split(","):
                m, cross, k = size.strip().partition("x")
                if not (cross and m.isdigit() and k.isdigit()):
                    raise UsageError(f"--shape {size}: expected rows x columns, as 4096x14336")
                yield MatVecProblem.parse(f"MUL_MAT(type_a={name.strip()},m={m},n={tokens},k={k})"), 1


def of_model(model: str, tokens: int, ctx: LowerContext) -> Iterator[tuple[MatVecProblem, int]]:
    """The products of a model's schedule on a device, fused as they are there, with how often each comes."""
    from collections import Counter

    from vkback.autotune.problem import MatVecProblem
    from vkback.graph import live
    from vkback.models.registry import Model
    from vkback.ops.router import product_of
    from vkback.plan.fuse import fuse

    opened = Model.open(model_path(model))
    graph = opened.graph(tokens, opened.default_n_ctx, head="last")
    nodes = live(fuse(graph, ctx), graph.outputs)
    products = (product_of(n) if n.op == "MOE_ROUTER" else n for n in nodes)
    yield from Counter(MatVecProblem.of(n) for n in products if n.op == "MAT_VEC").items()


class _watched:  # noqa: N801  used as a function
    """A progress bar fed by a sweep, as long as the block lasts."""

    def __init__(self, verbose: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        said = TextColumn("{task.fields[said]}")
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), said, transient=True)
        self._task = self._bar.add_task("tune", total=None, said="")
        self._verbose = verbose
        self._points = 0

    def __enter__(self) -> Any:
        from vkback.autotune.sweep import Watcher

        self._bar.start()
        return Watcher(self._begin, self._point, self._end)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _begin(self, job: Job | AttentionShape, number: int, total: int) -> None:
        self._points = 0
        self._bar.update(self._task, description=job.line, completed=number, total=total, said="")

    def _point(self, job: Job | AttentionShape, point: Point | AttentionPoint, said: str) -> None:
        self._points += not said.startswith("refused")
        self._bar.update(self._task, said=f"{self._points} points")
        if self._verbose or said.startswith("WRONG"):
            self._bar.console.print(f"  {job.line} [{point.text}] {said}", markup=False, highlight=False, soft_wrap=True)

    def _end(self, result: TuneResult) -> None:
        self._bar.update(self._task, advance=1)
        if not self._bar.console.is_terminal:
            print(f"  {result.line}: {result.tried} points, {result.latency_before:.2f} -> {result.latency:.2f} us", flush=True)


def _show(results: Sequence[TuneResult]) -> None:
    """Before and after, a line a product, all in a token's program or none; nothing where there is no product."""
    from rich.console import Console
    from rich.table import Table

    if not results:
        return
    table = Table(box=None, pad_edge=False)
    alone = results[0].match["sync"] == "barrier"
    unit = "latency us" if alone else "us a token"
    through = ("throughput us", "was") if alone else ()
    for name in ("product", "before", unit, "after", unit, "change", "noise us", *through, "% of read rate"):
        table.add_column(name, justify="left" if name in ("product", "before", "after") else "right", no_wrap=True)
    for r in results:
        change = f"{100 * (r.latency / r.latency_before - 1):+.1f} %"
        after = _difference(r.before, r.after) if r.kept else "same"
        through = (f"{r.throughput:.2f}", f"{r.throughput_before:.2f}") if alone else ()
        table.add_row(
            r.line, r.before.text, f"{r.latency_before:.2f}", after, f"{r.latency:.2f}", change if r.kept else "", f"{r.noise:.2f}",
            *through, f"{100 * r.read_share:.0f}",
        )  # fmt: skip
    wide = Console(width=260)
    wide.print(table)


def _difference(before: Point, after: Point) -> str:
    return ", ".join(f"{name} {a}->{b}" for name, a, b in zip(before._fields, before, after, strict=True) if a != b)


def _draw(results: Sequence[TuneResult], file: Path, device: str) -> str:
    """The heatmap of chains, or why there is none."""
    try:
        from vkback.report.heatmap import draw
    except ImportError:
        return "no picture: matplotlib is missing, pip install vkback[pictures]"
    chains = [r for r in results if r.match["sync"] == "barrier"]
    if not chains:
        return "no picture: no product was timed by itself"
    draw(chains, file, device)
    return f"picture {file}"
