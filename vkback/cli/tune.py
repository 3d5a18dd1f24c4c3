"""vkback tune: finds kernel shapes for this device and keeps them in its own tuning table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from vkback.cli.shell import DeviceOption, UsageError, measured_read_rate, model_path, one_of

if TYPE_CHECKING:
    from vkback.autotune.driver import Watcher
    from vkback.autotune.own_table import OwnTable
    from vkback.autotune.points import Job, Point
    from vkback.autotune.problem import MatVecProblem
    from vkback.autotune.tunable import Setting, Tuned, TuneResult
    from vkback.device import Device
    from vkback.ops.base import LowerContext

Paths = Literal["auto", "int", "float", "both"]

OPS = ("mat_vec", "attention")
PATHS = ("auto", "int", "float", "both")
DEFAULT_QUANTS = "Q4_0,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_XS,MXFP4,F16"
DEFAULT_SHAPES = "4096x4096,4096x14336,14336x4096"


def tune(
    device: DeviceOption = None,
    op: Annotated[str, typer.Option(help=f"Family of kernels: {', '.join(OPS)}.")] = "mat_vec",
    quant: Annotated[str, typer.Option(help="Weight types, with commas.")] = DEFAULT_QUANTS,
    shape: Annotated[str, typer.Option(help="Weights as rows x columns, with commas.")] = DEFAULT_SHAPES,
    case: Annotated[list[str] | None, typer.Option(metavar="CASE", help="Fused mat-vecs instead, as the suite prints them.")] = None,
    model: Annotated[str | None, typer.Option("-m", "--model", help="The mat-vecs of this model's decode schedule instead.")] = None,
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

    Every candidate's result is checked before it is timed. The measure is the latency of one launch that waits for the one before. Where
    stages of a model's decode schedule are barrier-free, it is the time of a token with the candidate in it; so it is for attention, which
    takes --op attention and a model. Exit code 1 when a kernel computed something wrong.
    """
    if sum(given is not None for given in (case, model)) > 1 and op == "mat_vec":
        raise UsageError("--case and --model exclude each other")
    paths = cast(Paths, one_of(path, PATHS, "--path"))
    if one_of(op, OPS, "--op") == "attention":
        if case is not None:
            raise UsageError("--op attention takes a model, no --case")
        if model is None:
            raise UsageError("--op attention is tuned in the program of a model's token; name one with --model")
        wrong = _tune_attention(_Run(device, budget, resume, verbose), model, ctx, depth)
    else:
        asked = _Asked(case, model, quant, shape, tokens, paths)
        wrong = _tune_mat_vecs(_Run(device, budget, resume, verbose), asked, picture)
    if wrong:
        raise typer.Exit(1)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What applies to every family."""

    device: str | None
    budget_s: float
    resume: bool
    verbose: bool


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Which mat-vecs to tune: cases, or a model's, or all of some types and shapes."""

    cases: Sequence[str] | None
    model: str | None
    quants: str
    shapes: str
    tokens: int
    paths: Paths


def _own_table(device: Device) -> tuple[OwnTable, LowerContext]:
    """The device's own table, and a context with it before all others."""
    from vkback.autotune.own_table import OwnTable
    from vkback.ops.base import LowerContext
    from vkback.paths import user_tuning_root
    from vkback.shader import ShaderLibrary

    own = OwnTable(device, ShaderLibrary(), user_tuning_root())
    return own, LowerContext(device.caps, own.tables())


def _tune_mat_vecs(run: _Run, asked: _Asked, picture: Path | None) -> bool:
    """Mat-vecs in a token's program where it has barrier-free stages, the others in chains. Whether any gave a wrong result."""
    from vkback.autotune.points import jobs_for
    from vkback.device import Device
    from vkback.ops.base import LowerContext
    from vkback.plan.tuning import Tuning

    start = time.monotonic()
    with Device.open(run.device) as opened:
        print(opened.caps.summary_line())
        ctx = LowerContext(opened.caps, Tuning.for_device(opened.caps))
        inside = _in_program(asked.model, ctx) if asked.model is not None and asked.tokens == 1 else []
        # Where a program has barrier-free stages, rows about chains with barriers say nothing of any of its mat-vecs.
        chain = [] if inside and asked.paths == "auto" else jobs_for(_mat_vecs(asked, ctx), ctx, asked.paths)
        jobs = [*inside, *chain]
        if not jobs:
            raise UsageError(f"--path {asked.paths}: none of these mat-vecs has such a path on {opened.caps.name}")
        rate = measured_read_rate(opened)
        where = f", {len(inside)} of them in the program of a token" if inside else ""
        print(f"read rate {rate:.1f} GB/s; {len(jobs)} mat-vecs{where}, {run.budget_s:.0f} s")
        with _watched(run.verbose) as watcher:
            own, ctx = _own_table(opened)
            results, faults = _sweep_mat_vecs(opened, own, ctx, inside, chain, rate, run, watcher, asked.model)
        for sync in ("sentinel", "barrier"):
            _show([r for r in results if r.match["sync"] == sync])
        for fault in faults:
            print(fault)
        kept = sum(r.kept for r in results)
        left = sum(not own.journal.finished(job.key) for job in jobs)
        if left:
            print(f"{left} of {len(jobs)} mat-vecs were not reached; --resume goes on with them")
        print(f"{kept} of {len(results)} mat-vecs improved in {time.monotonic() - start:.0f} s; table {own.path}")
        print(_draw(own, ctx, picture or own.path.with_suffix(".png")))
    return bool(faults) or any(r.wrong for r in results)


def _sweep_mat_vecs(
    device: Device, own: OwnTable, ctx: LowerContext, inside: Sequence[Job], chain: Sequence[Job], rate: float, run: _Run,
    watcher: Watcher, model: str | None,
) -> tuple[list[TuneResult[Point]], list[str]]:  # fmt: skip
    """Results, and why jobs have none. Each part gets of the budget what it has of the jobs."""
    from vkback.autotune.chain_sweep import ChainMatVecs
    from vkback.autotune.driver import Sweep
    from vkback.autotune.program_sweep import ProgramMatVecs
    from vkback.models.registry import Model
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import Tokens

    library = ShaderLibrary()
    results: list[TuneResult[Point]] = []
    faults: list[str] = []
    for part in filter(None, (inside, chain)):
        tunable: ProgramMatVecs | ChainMatVecs
        if part is inside:
            assert model is not None
            tunable = ProgramMatVecs(partial(Tokens, Model.open(model_path(model)), device, library, ctx), ctx)
        else:
            tunable = ChainMatVecs(device, library, ctx)
        budget = run.budget_s * len(part) / (len(inside) + len(chain))
        sweep = Sweep(tunable, own, rate, budget_s=budget, watcher=watcher)
        results += sweep.run(part, resume=run.resume)
        faults += sweep.faults
    return results, faults


def _tune_attention(run: _Run, model: str, n_ctx: int | None, depth: int) -> bool:
    """Attention of a model's token, with so many rows of the cache in use. Whether any gave a wrong result."""
    from vkback.autotune.attention import Attention, AttentionJob, attention_shapes
    from vkback.autotune.driver import Sweep
    from vkback.device import Device
    from vkback.models.registry import Model
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import Tokens, fitting_depth, token_graph

    start = time.monotonic()
    with Device.open(run.device) as opened:
        print(opened.caps.summary_line())
        own, ctx = _own_table(opened)
        opened_model = Model.open(model_path(model))
        depth = fitting_depth(opened_model, n_ctx, depth)
        jobs = [AttentionJob(shape, depth) for shape in attention_shapes(token_graph(opened_model, n_ctx), ctx)]
        done = sum(own.journal.finished(job.key) for job in jobs) if run.resume else 0
        if done:
            print(f"{done} of {len(jobs)} shapes were finished by an earlier run")
        tokens = partial(Tokens, opened_model, opened, ShaderLibrary(), ctx, n_ctx=n_ctx, depth=depth)
        rate = measured_read_rate(opened)
        with _watched(run.verbose) as watcher:
            watcher = dataclasses.replace(watcher, begin=_both(watcher.begin, lambda job, *_: print(job.line)), end=_tell, fault=print)
            sweep = Sweep(Attention(tokens, ctx), own, rate, budget_s=run.budget_s, watcher=watcher)
            results = sweep.run(jobs, resume=run.resume)
        print(f"{time.monotonic() - start:.0f} s; table {own.path}")
    return bool(sweep.faults) or any(r.wrong for r in results)


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


def _tell(result: TuneResult[Setting]) -> None:
    change = f"{result.percent:+.1f} %" if result.kept else "nothing better"
    print(f"  before: {result.before.text}: {result.latency_before:.2f} us a token ({result.source})")
    print(f"  after:  {result.after.text}: {result.latency:.2f} us a token, {change}, of {result.tried} points")


def _in_program(model: str, ctx: LowerContext) -> list[Job]:
    """The mat-vecs of a model's decode schedule if its stages are barrier-free, to be tuned in the program of a token."""
    from vkback.autotune.points import jobs_for
    from vkback.models.registry import Model
    from vkback.timing.token_program import is_barrier_free

    path = model_path(model)
    if not is_barrier_free(Model.open(path), ctx):
        return []
    barrier_free = dataclasses.replace(ctx, sync="sentinel")
    return jobs_for(of_model(model, 1, barrier_free), barrier_free, program=path.stem)


def _mat_vecs(asked: _Asked, ctx: LowerContext) -> Iterator[tuple[MatVecProblem, int]]:
    from vkback.autotune.problem import MatVecProblem

    if asked.cases is not None:
        for text in asked.cases:
            yield MatVecProblem.parse(text), 1
    elif asked.model is not None:
        yield from of_model(asked.model, asked.tokens, ctx)
    else:
        for name in asked.quants.split(","):
            for size in asked.shapes.split(","):
                m, cross, k = size.strip().partition("x")
                if not (cross and m.isdigit() and k.isdigit()):
                    raise UsageError(f"--shape {size}: expected rows x columns, as 4096x14336")
                yield MatVecProblem.parse(f"MUL_MAT(type_a={name.strip()},m={m},n={asked.tokens},k={k})"), 1


def of_model(model: str, tokens: int, ctx: LowerContext) -> Iterator[tuple[MatVecProblem, int]]:
    """The mat-vecs of a model's schedule on a device, fused as they are there, with how often each comes."""
    from collections import Counter

    from vkback.autotune.problem import MatVecProblem
    from vkback.graph import live
    from vkback.models.registry import Model
    from vkback.ops.router import mat_vec_of
    from vkback.plan.fuse import fuse

    opened = Model.open(model_path(model))
    graph = opened.graph(tokens, opened.default_n_ctx, head="last")
    nodes = live(fuse(graph, ctx), graph.outputs)
    mat_vecs = (mat_vec_of(n) if n.op == "MOE_ROUTER" else n for n in nodes)
    yield from Counter(MatVecProblem.of(n) for n in mat_vecs if n.op == "MAT_VEC").items()


class _watched:  # noqa: N801  used as a function
    """A progress bar fed by a sweep, as long as the block lasts."""

    def __init__(self, verbose: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        said = TextColumn("{task.fields[said]}")
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), said, transient=True)
        self._task = self._bar.add_task("tune", total=None, said="")
        self._verbose = verbose
        self._points = 0

    def __enter__(self) -> Watcher:
        from vkback.autotune.driver import Watcher

        self._bar.start()
        return Watcher(self._begin, self._point, self._end)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _begin(self, job: Tuned, number: int, total: int) -> None:
        self._points = 0
        self._bar.update(self._task, description=job.line, completed=number, total=total, said="")

    def _point(self, job: Tuned, point: Setting, said: str) -> None:
        self._points += not said.startswith("refused")
        self._bar.update(self._task, said=f"{self._points} points")
        if self._verbose or said.startswith("WRONG"):
            self._bar.console.print(f"  {job.line} [{point.text}] {said}", markup=False, highlight=False, soft_wrap=True)

    def _end(self, result: TuneResult[Any]) -> None:
        self._bar.update(self._task, advance=1)
        if not self._bar.console.is_terminal:
            print(f"  {result.line}: {result.tried} points, {result.latency_before:.2f} -> {result.latency:.2f} us", flush=True)


def _show(results: Sequence[TuneResult[Point]]) -> None:
    """Before and after, a line a mat-vec, all in a token's program or none; nothing where there is no mat-vec."""
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    if not results:
        return
    alone = results[0].match["sync"] == "barrier"
    unit = "latency us" if alone else "us a token"
    shown = pd.DataFrame(
        [
            (
                r.line, r.before.text, f"{r.latency_before:.2f}", _difference(r.before, r.after) if r.kept else "same",
                f"{r.latency:.2f}", f"{r.percent:+.1f} %" if r.kept else "", f"{r.noise:.2f}",
                f"{r.throughput:.2f}", f"{r.throughput_before:.2f}", f"{100 * r.read_share:.0f}",
            )
            for r in results
        ],
        columns=["mat-vec", "before", unit, "after", unit, "change", "noise us", "throughput us", "was", "% of read rate"],
    )  # fmt: skip
    if not alone:
        shown = shown.drop(columns=["throughput us", "was"])
    table = Table(box=None, pad_edge=False)
    for name in shown.columns:
        table.add_column(name, justify="left" if name in ("mat-vec", "before", "after") else "right", no_wrap=True)
    for row in shown.itertuples(index=False):
        table.add_row(*row)
    Console(width=260).print(table)


def _difference(before: Point, after: Point) -> str:
    from vkback.ops.base import table_word

    return ", ".join(f"{name} {table_word(a)}->{table_word(b)}" for name, a, b in zip(before._fields, before, after, strict=True) if a != b)


def _draw(own: OwnTable, ctx: LowerContext, file: Path) -> str:
    """The heatmap of all mat-vecs timed in chains so far, or why there is none."""
    from vkback.autotune.points import Point
    from vkback.autotune.tunable import results_table

    try:
        from vkback.report.heatmap import draw
    except ImportError:
        return "no picture: matplotlib is missing, pip install vkback[pictures]"
    chains = [r for r in own.results("mat_vec", lambda values: Point(*values)) if r.match["sync"] == "barrier"]
    if not chains:
        return "no picture: no mat-vec was timed by itself"
    draw(results_table(chains), file, ctx.caps.name)
    return f"picture {file}"
