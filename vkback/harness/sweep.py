"""Sweeps of the mat-vec family's tuning parameters on one device: what `vkback tune` does.

A *job* is one product on one path: in launches of its own with barriers between (here), or in the program of a model's token whose stages
hand over without them (vkback/harness/in_program.py). Its search (vkback/harness/climb.py) begins at what the tables say and at a few
shapes that have won elsewhere, then changes one parameter of the best point at a time (and some pairs), until nothing is better or its
share of the budget is spent. Points that the planner would bend are refused before anything is compiled; the result of every other is
checked against the reference before it is timed. The measure is the time of a launch that waits for the one before, or that of a token:
what a token pays.

What is found goes into a journal beside the device's table, a line an event, so that a run that was cut short can go on; the table is made
from the journal alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Capabilities, Device
from vkback.errors import VkbackError
from vkback.harness.climb import RELATIVE_NOISE, Climb, SweepError, Tried, duel, noise
from vkback.harness.judge import judge
from vkback.harness.products import Product
from vkback.harness.timing import Bench, Lap
from vkback.ops.base import FAMILIES, OPS, Dispatch, LowerContext, PlanError, Problem, ceil_div
from vkback.ops.mat_vec import INT_QUANTS, path_for, subgroup_for
from vkback.paths import tuning_root, write_atomic
from vkback.plan.planner import check_limits
from vkback.plan.tuning import Fixed, Row, Tuning, device_table, load_table, parse_table
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary

Array = npt.NDArray[Any]
Path2 = Literal["int", "float"]

REGISTER_WORDS = 96
"""Weights in flight a thread, 32-bit words: with sums, activations and addresses about what 255 registers hold; more spills."""

CHECKED_WEIGHTS = 64 << 20
"""Weights beyond which the reference is computed for a part of the rows only; decoding takes about a second for 30 million."""

REFERENCE_ROWS = 2048

WARM_S = 0.005
"""Before each lap of a search: the GPU has been busy all along."""

JOURNAL_FORMAT = 4


class Point(NamedTuple):
    """A setting of every parameter of the family."""

    wg: int
    lanes: int
    rows: int
    unroll: int
    prefetch: int
    stage: int
    groups: int
    subgroup: int
    adjoin: int = 0

    @property
    def text(self) -> str:
        parts = [f"{self.wg} threads", f"{self.lanes} lanes", f"{self.rows} rows", f"unroll {self.unroll}"]
        parts += ["units adjoin"] if self.adjoin else []
        parts += [("prefetch", "prefetch with x")[self.prefetch - 1]] if self.prefetch else []
        parts += ["x staged"] if self.stage else []
        parts += [f"{self.groups} groups"] if self.groups else []
        parts += [f"subgroup {self.subgroup}"] if self.subgroup else []
        return ", ".join(parts)


STARTS = (
    Point(64, 64, 2, 2, 0, 0, 0, 0),
    Point(64, 32, 2, 4, 0, 0, 0, 0),
    Point(512, 64, 1, 1, 0, 0, 0, 0),
    Point(256, 32, 2, 2, 0, 0, 0, 0),
    Point(512, 16, 4, 1, 0, 0, 0, 0),
    Point(512, 32, 4, 2, 0, 0, 0, 0),
    Point(128, 64, 2, 1, 0, 0, 0, 0),
    Point(8, 8, 1, 1, 0, 0, 0, 0),
    Point(32, 8, 4, 1, 0, 0, 0, 0),
)
"""Shapes that have won somewhere: one subgroup a row, many rows a workgroup, half a workgroup a row."""


@dataclass(frozen=True)
class Job:
    """A product on one path.

    count    launches of it in a token, for the order of work
    program  the model in whose token's program it is timed; "" in a chain of its own launches, with barriers between
    """

    product: Product
    path: Path2
    count: int = 1
    program: str = ""

    @property
    def match(self) -> dict[str, Any]:
        """What a row about it says beside m and k."""
        p = self.product
        return {
            "y": p.out, "prologue": 2 if "norm" in p.roles else 0, "ids": p.ids, "glu": int(p.glu), "n": p.n, "quant": p.quant,
            "path": self.path, "handover": int(bool(self.program)),
        }  # fmt: skip

    @property
    def key(self) -> str:
        """Jobs with equal keys are the same to the tables."""
        return json.dumps([self.match, self.product.m, self.product.k], sort_keys=True)

    @property
    def line(self) -> str:
        return f"{self.product.line} {self.path}" + (f" in {self.program}" if self.program else "")

    def context(self, ctx: LowerContext, point: Point | None = None) -> LowerContext:
        """The context that leads to this path, and to a point."""
        tuning = ctx.tuning if point is None else Fixed(ctx.tuning, {"mat_vec": point._asdict()}, "sweep")
        return dataclasses.replace(ctx, tuning=tuning, act="q8_1" if self.path == "int" else "f32", handover=bool(self.program))


@dataclass(frozen=True)
class Result:
    """What a job came to. Times are microseconds a launch: `latency` of one that waits for the one before, `throughput` back to back; of a
    job in a program both are microseconds a token, and `nbytes` what a token reads.

    before, after  the tables' point and the one to use; the same where nothing beats it
    source         the row that the first came from
    refused, wrong, tried  how many points were not compiled, gave wrong results, were timed
    """

    key: str
    line: str
    match: Mapping[str, Any]
    m: int
    k: int
    before: Point
    source: str
    latency_before: float
    throughput_before: float
    after: Point
    latency: float
    throughput: float
    noise: float
    nbytes: int
    read_rate: float
    tried: int
    refused: int
    wrong: tuple[str, ...]
    date: str

    @property
    def kept(self) -> bool:
        return self.after != self.before

    @property
    def read_share(self) -> float:
        """Bytes a second back to back over the device's read rate."""
        return self.nbytes / self.throughput / 1e3 / self.read_rate

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Result:
        return cls(**{**values, "before": Point(*values["before"]), "after": Point(*values["after"]), "wrong": tuple(values["wrong"])})


def jobs_for(
    products: Iterable[tuple[Product, int]], ctx: LowerContext, paths: Literal["auto", "int", "float", "both"] = "auto", program: str = ""
) -> list[Job]:
    """A job for each product and path, the most bytes a token first; of products that tables cannot tell apart the one with most inputs."""
    jobs: dict[str, Job] = {}
    for product, count in products:
        chosen, _ = path_for(product.quant, product.m, product.k, product.n, product.ids, ctx)
        possible = product.quant in INT_QUANTS and ctx.caps.int_dot and product.k % 32 == 0
        wanted = {"auto": (chosen,), "int": ("int",), "float": ("float",), "both": ("int", "float")}[paths]
        for path in wanted:
            if path == "int" and not possible:
                continue
            # In a schedule the producer leaves x as the product wants it; a norm in the prologue takes it as F32.
            x = "Q8_1" if path == "int" and "norm" not in product.roles else "F32"
            job = Job(product.with_x(x), cast(Path2, path), count, program)
            known = jobs.get(job.key)
            if known is not None:
                job = dataclasses.replace(max(job, known, key=lambda j: len(j.product.roles)), count=known.count + count)
            jobs[job.key] = job

    def read(job: Job) -> int:
        p = job.product
        return job.count * quants.layout(p.quant, p.m * max(1, p.used), p.k).nbytes

    return sorted(jobs.values(), key=read, reverse=True)


def actual(point: Point, job: Job, ctx: LowerContext) -> Point:
    """The point that a kernel is built for when the tables say `point`: bent to what it needs, without what has no effect."""
    kernels = [{k: v for k, v in d.kernel.defines if isinstance(v, int)} for d in lowered(point, job, ctx)]
    got, tiles = kernels[-1], any(kernel.get("TILES") for kernel in kernels)
    units = got["K_UNITS"] * (got["N_USED"] if got["IDS"] == 2 else 1)
    size, required = subgroup_for(ctx, point.subgroup)
    single = ctx.caps.subgroup_min == ctx.caps.subgroup_max
    return Point(
        got["WG"], got["LANES"], got["ROWS"], got["UNROLL"],
        prefetch=got["PREFETCH"] if tiles or got["LANES"] * got["UNROLL"] < units else 0,
        stage=point.stage if got["PROLOGUE"] == 3 and not job.program else 0,  # in a program with hand-overs x is always staged
        groups=point.groups if tiles else 0,
        subgroup=point.subgroup if required == point.subgroup == size and not single and size != ctx.caps.subgroup_size else 0,
        adjoin=got["ADJOIN"],
    )  # fmt: skip


def refusal(point: Point, job: Job, ctx: LowerContext, *, chosen: bool = False) -> str:
    """Why a point is not worth compiling: the planner would make another of it, or the device cannot run it; "" when it is.

    chosen  the tables choose it, so that it is tried however much it takes
    """
    for name, value in point._asdict().items():
        legal = FAMILIES["mat_vec"].set[name]
        if not isinstance(legal, str) and value not in legal:
            return f"{name} = {value} is not legal"
    try:
        real = actual(point, job, ctx)
    except PlanError as e:
        return str(e)
    for name, wanted, got in zip(Point._fields, point, real, strict=True):
        if wanted != got:
            return f"{name} = {wanted} would become {got}"
    layout = quants.layout(job.product.quant, 64, job.product.k)
    words = ceil_div(layout.nbytes, 64 * ceil_div(job.product.k, 32) * 4) * point.rows * point.unroll
    if words > REGISTER_WORDS and not chosen:
        return f"{words} registers of weights in flight, at most {REGISTER_WORDS} are worth trying"
    try:
        for dispatch in lowered(point, job, ctx):
            check_limits(dispatch, ctx.caps)
    except PlanError as e:
        return str(e)
    return ""


def lowered(point: Point, job: Job, ctx: LowerContext) -> list[Dispatch]:
    return OPS["MAT_VEC"].lower(job.product.node(), job.context(ctx, point))


def axes(caps: Capabilities) -> dict[str, tuple[int, ...]]:
    """Values to try of each parameter. Workgroup counts are multiples of the device's cores, where it tells them."""
    cores = caps.shader_cores or 64
    sizes = [s for s in (8, 16, 32, 64, 128) if caps.subgroup_required_size and caps.subgroup_min <= s <= caps.subgroup_max]
    threads = (8, 16, 32, 64) if caps.software else (32, 64, 128, 256, 512, 1024)
    return {
        "wg": threads,
        "lanes": (1, 2, 4, 8, 16) if caps.software else (8, 16, 32, 64, 128, 256),
        "rows": (1, 2, 4, 8),
        "unroll": (1, 2, 3, 4, 6, 8),
        "prefetch": (0, 1, 2),
        "adjoin": (0, 1),
        "stage": (0,) if caps.software else (0, 1),
        "groups": (0,) if caps.software else (0, cores, 2 * cores, 4 * cores, 8 * cores),
        "subgroup": (0,) if len(sizes) < 2 else (0, *(s for s in sizes if s != caps.subgroup_size)),
    }


def neighbours(point: Point, choices: Mapping[str, Sequence[int]]) -> Iterator[Point]:
    """Points that differ in one parameter, and those where two change against each other."""
    for name, values in choices.items():
        for value in values:
            if value != getattr(point, name):
                yield point._replace(**{name: value})
    for up, down in itertools.permutations(("wg", "lanes", "rows", "unroll"), 2):
        yield point._replace(**{up: getattr(point, up) * 2, down: getattr(point, down) // 2})
    yield point._replace(wg=point.wg * 2, lanes=point.lanes * 2)
    yield point._replace(wg=point.wg // 2, lanes=point.lanes // 2)


# -- references


@dataclass(frozen=True)
class Expected:
    """The reference's output for some rows: `columns` of the output's last axis and their values, float64."""

    columns: npt.NDArray[np.intp]
    values: Array


def expected(problem: Problem, product: Product) -> Expected:
    """The reference, block of rows by block; of a product with more than CHECKED_WEIGHTS weights the first, the last and two others."""
    node = problem.node
    by = dict(zip(node.params["roles"], node.inputs, strict=True))
    values = {role: problem.values[t.name] for role, t in by.items()}
    if by["x"].type == "Q8_1":
        values["x"] = quants.q8_1_dequantize(values["x"].reshape(-1, quants.q8_1_stride(product.k)), product.k).reshape(by["x"].shape)
    raw = values["w"].reshape(-1, product.m, values["w"].shape[-1])
    if product.ids:
        chosen, ids = np.unique(values["ids"], return_inverse=True)
        raw, values["ids"] = raw[chosen], ids.reshape(values["ids"].shape)
    starts = list(range(0, product.m, REFERENCE_ROWS))
    if raw.shape[0] * product.m * product.k > CHECKED_WEIGHTS:
        starts = sorted({0, starts[len(starts) // 3], starts[2 * len(starts) // 3], starts[-1]})
    columns, parts = [], []
    for first in starts:
        last = min(first + REFERENCE_ROWS, product.m)
        rows, outs = slice(first, last), slice(first >> product.glu, last >> product.glu)
        w = quants.decode(product.quant, raw[:, rows].reshape(-1, raw.shape[-1])).reshape(raw.shape[0], last - first, product.k)
        cut = {**values, "w": w if product.ids else w[0]}
        if "bias" in cut:
            experts = chosen if product.ids else np.zeros(1, np.intp)
            cut["bias"] = cut["bias"].reshape(-1, product.m)[experts, rows].ravel()
        if "residual" in cut:
            cut["residual"] = cut["residual"][..., outs]
        (out,) = OPS["MAT_VEC"].reference([cut[role] for role in node.params["roles"]], node.params)
        columns.append(np.arange(outs.start, outs.stop))
        parts.append(out)
    return Expected(np.concatenate(columns), np.concatenate(parts, axis=-1))


def wrong(bench: Bench, job: Job, ctx: LowerContext, want: Expected) -> str:
    """What is wrong with the result of the kernel that `ctx` leads to; "" when it is right."""
    node = bench.problem.node
    got = bench.outputs(ctx)[node.outputs[0].name]
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} of {got.size} values are not finite"
    verdict = judge(got[..., want.columns], want.values, OPS["MAT_VEC"].tolerance(node, ctx))
    return "" if verdict.ok else verdict.text


# -- the journal


def kernel_identity(library: ShaderLibrary) -> str:
    """Changes when any shader does: results of other kernels are not taken up again."""
    digest = hashlib.sha256()
    for file in sorted(p for p in library.root.rglob("*") if p.suffix in (".comp", ".glsl")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Journal:
    """Results by job, and points whose trial never ended, in a file of JSON lines: a line is whole or it is not read."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = {"format": JOURNAL_FORMAT, **identity}
        self.results: dict[str, Result] = {}
        self.suspects: set[tuple[str, Point]] = set()
        self._finished: set[str] = set()
        for event in self._events():
            if "result" in event:
                result = Result.from_json(event["result"])
                self.results[result.key] = result
                if event["kernels"] == self.identity["kernels"]:
                    self._finished.add(result.key)
            elif "trying" in event:
                self.suspects.add((event["trying"], Point(*event["point"])))
            elif "tried" in event:
                self.suspects.discard((event["tried"], Point(*event["point"])))
        self._write_whole()

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except ValueError:  # cut short when the last run ended
                continue
        same = ("format", "device", "driver")
        if events and all(events[0].get(k) == self.identity[k] for k in same):
            yield from events[1:]

    def finished(self, job: Job) -> bool:
        """Whether a run with these kernels and this driver came to a result."""
        return job.key in self._finished

    def trying(self, job: Job, point: Point) -> None:
        self._append({"trying": job.key, "point": point})

    def tried(self, job: Job, point: Point) -> None:
        self._append({"tried": job.key, "point": point})

    def finish(self, result: Result) -> None:
        self.results[result.key] = result
        self._finished.add(result.key)
        self._append({"result": result.to_json(), "kernels": self.identity["kernels"]})

    def _append(self, event: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def _write_whole(self) -> None:
        events: list[Mapping[str, Any]] = [self.identity]
        for key, result in self.results.items():
            events.append({"result": result.to_json(), "kernels": self.identity["kernels"] if key in self._finished else ""})
        events += [{"trying": key, "point": point} for key, point in sorted(self.suspects)]
        if not write_atomic(self.path, "".join(json.dumps(e) + "\n" for e in events).encode()):
            raise SweepError(f"[tune] {self.path} cannot be written: choose another folder with VKBACK_TUNING")


# -- the sweep


@dataclass
class Watcher:
    """What a sweep tells while it runs; the command draws a progress bar from it."""

    begin: Callable[[Job, int, int], None] = lambda job, number, total: None
    point: Callable[[Job, Point, str], None] = lambda job, point, said: None
    end: Callable[[Result], None] = lambda result: None


class Trial(Tried[Point], Protocol):
    """A job on the device, ready for points to be tried, as long as the block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def throughput(self, point: Point) -> float:
        """Microseconds without waiting."""

    def nbytes(self, point: Point) -> int:
        """Bytes that are read in that time."""


def compile_points(device: Device, library: ShaderLibrary, points: Iterable[Point], job: Job, ctx: LowerContext) -> None:
    """Kernels of points that are not refused."""
    good = [p for p in points if not refusal(p, job, ctx)]
    compile_kernels(device, library, [d for p in good for d in lowered(p, job, ctx)])


class ChainTrial:
    """A job in launches that each wait for the one before."""

    def __init__(self, bench: Bench, job: Job, ctx: LowerContext, want: Expected) -> None:
        self._bench, self._job, self._ctx, self._want = bench, job, ctx, want

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bench.__exit__()

    def compile(self, points: Iterable[Point]) -> None:
        compile_points(self._bench.device, self._bench.library, points, self._job, self._ctx)

    def wrong(self, point: Point) -> str:
        return wrong(self._bench, self._job, self._job.context(self._ctx, point), self._want)

    def lap(self, point: Point, repetitions: int) -> Lap:
        return self._bench.lap(self._job.context(self._ctx, point), chained=True, repetitions=repetitions, warm_s=WARM_S)

    def throughput(self, point: Point) -> float:
        return self._bench.lap(self._job.context(self._ctx, point), chained=False, warm_s=WARM_S).us

    def nbytes(self, point: Point) -> int:
        return sum(d.nbytes for d in lowered(point, self._job, self._ctx))


class Sweep:
    """Tunes jobs on a device and keeps its table.

    folder   of the device's table and journal, the user's own
    budget_s seconds for all jobs; each gets an equal share of what is left
    """

    relative_noise: ClassVar[float] = RELATIVE_NOISE

    def __init__(
        self, device: Device, library: ShaderLibrary, folder: Path, read_rate: float, *, budget_s: float, cold_bytes: int | None = None,
        watcher: Watcher | None = None, driver: str = "",
    ) -> None:  # fmt: skip
        self.device, self.library, self.folder, self.read_rate = device, library, folder, read_rate
        caps = device.caps
        self.ctx = LowerContext(caps, self._tables())
        self.budget_s = budget_s
        self.cold_bytes = cold_bytes if cold_bytes is not None else (16 << 20 if caps.software else 512 << 20)
        self.watcher = watcher or Watcher()
        self.faults: list[str] = []
        self.driver = driver or f"{caps.driver_name} {caps.driver_info}".strip()
        self.table_path = folder / device_table(caps)
        self.journal = Journal(
            self.table_path.with_suffix(".journal"), {"device": caps.name, "driver": self.driver, "kernels": kernel_identity(library)}
        )

    def run(self, jobs: Sequence[Job], *, resume: bool = False) -> list[Result]:
        """Tune each job and write the table after each, until the budget is spent; the first is done in any case. A job whose present
        kernel is wrong is left with a text in `faults`.

        resume  pass over the jobs that the journal has a result for
        """
        start = time.monotonic()
        todo = [j for j in jobs if not (resume and self.journal.finished(j))]
        results: list[Result] = []
        with ThreadPoolExecutor(1) as ahead:
            next_one = ahead.submit(self._prepare, todo[0]) if todo else None
            for i, job in enumerate(todo):
                assert next_one is not None
                left = self.budget_s - (time.monotonic() - start)
                if left <= 0 and i:
                    next_one.cancel()
                    break
                self.watcher.begin(job, i, len(todo))
                opened = next_one.result()
                next_one = ahead.submit(self._prepare, todo[i + 1]) if i + 1 < len(todo) and not self.device.caps.software else None
                try:
                    result = self._tune(job, opened, time.monotonic() + left / (len(todo) - i))
                except SweepError as e:
                    self.faults.append(str(e))
                else:
                    self.journal.finish(result)
                    self.write_table()
                    results.append(result)
                    self.watcher.end(result)
                if next_one is None and i + 1 < len(todo):
                    next_one = ahead.submit(self._prepare, todo[i + 1])
        return results

    def write_table(self, rows: Sequence[Row] = ()) -> None:
        """The device's table from the journal, checked as any table before it takes the old one's place.

        rows  of other families, in the place of those that speak of the same
        """
        mine = [(r.family, r.match) for r in rows]
        kept = [r for r in load_table(self.table_path) if r.family not in ("mat_vec", "mat_vec_path") and (r.family, r.match) not in mine]
        others = [*kept, *rows]
        text = table_text(self.journal.results.values(), self.device.caps.name, self.driver, others)
        parse_table(text, self.table_path.name)
        if not write_atomic(self.table_path, text.encode()):
            raise SweepError(f"[tune] {self.table_path} cannot be written: choose another folder with VKBACK_TUNING")

    def _tables(self) -> Tuning:
        return Tuning.for_device(self.device.caps, tuning_root(), user=self.folder)

    def _prepare(self, job: Job) -> Callable[[], Trial]:
        """What a job needs beside the device's memory; then its trial is opened."""
        problem = job.product.problem()
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            compile_points(self.device, self.library, self._starts(job), job, self.ctx)
        want = expected(problem, job.product)

        def opened() -> Trial:
            bench = Bench(self.device, self.library, problem, job.context(self.ctx), cold_bytes=self.cold_bytes)
            return ChainTrial(bench, job, self.ctx, want)

        return opened

    def _said(self, job: Job, tuning: Tuning) -> tuple[Point, str]:
        """The point that tables lead to, and the row it comes from."""
        p = job.product
        choice = tuning.pick("mat_vec", **job.match, m=p.m, k=p.k)
        return actual(Point(**{k: choice[k] for k in Point._fields}), job, job.context(self.ctx)), choice.source

    def _starts(self, job: Job) -> list[Point]:
        shipped = Tuning.for_device(self.device.caps, tuning_root())
        points = [self._said(job, shipped)[0], self._said(job, cast(Tuning, self.ctx.tuning))[0]]
        points += self._guesses(job, points[0])
        out = []
        for point in points:
            try:
                out.append(actual(point, job, job.context(self.ctx)))
            except PlanError:
                continue
        return list(dict.fromkeys(out))

    def _guesses(self, job: Job, shipped: Point) -> list[Point]:
        """Points that a search begins at beside those of the tables."""
        cores = self.device.caps.shader_cores or 64
        many = [] if self.device.caps.software else [shipped._replace(groups=4 * cores)]
        return [start for start in STARTS if self.device.caps.software == (start.wg < 64)] + many

    def _tune(self, job: Job, opened: Callable[[], Trial], deadline: float) -> Result:
        shipped = Tuning.for_device(self.device.caps, tuning_root())
        before, source = self._said(job, shipped)
        present, _ = self._said(job, cast(Tuning, self.ctx.tuning))
        with opened() as trial:
            climb = Climb(
                trial, partial(self._refusal, job, {before, present}), partial(self.watcher.point, job), deadline,
                self.device.caps.software, partial(self._noted, job),
            )  # fmt: skip
            trial.lap(before, 1)
            climb.begin(self._starts(job), before, f"{job.line}: the kernel that the tables choose ({source}: {before.text})")
            choices = axes(self.device.caps)
            climb.to_the_top(lambda point: neighbours(point, choices))
            challengers = [p for p in (present, *climb.best(2)) if p in climb.laps]
            after, laps = duel(trial, before, challengers, self.relative_noise)
            through = {p: trial.throughput(p) for p in dict.fromkeys((before, after))}
            nbytes = trial.nbytes(after)
        return Result(
            key=job.key, line=job.line, match=job.match, m=job.product.m, k=job.product.k, before=before, source=source,
            latency_before=laps[before].us, throughput_before=through[before], after=after, latency=laps[after].us,
            throughput=through[after], noise=noise(laps[after], laps[before], self.relative_noise), nbytes=nbytes,
            read_rate=self.read_rate, tried=len(climb.laps), refused=len(climb.refused), date=date.today().isoformat(),
            wrong=tuple(f"{p.text}: {why}" for p, why in climb.wrong.items()),
        )  # fmt: skip

    def _refusal(self, job: Job, chosen: Container[Point], point: Point) -> str:
        why = refusal(point, job, job.context(self.ctx), chosen=point in chosen)
        return why or ("the last run ended while trying it" if (job.key, point) in self.journal.suspects else "")

    @contextmanager
    def _noted(self, job: Job, point: Point) -> Iterator[None]:
        """A point that a run ends with is not tried by the next."""
        self.journal.trying(job, point)
        yield
        self.journal.tried(job, point)


# -- the table


def edges(values: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each of some sizes the range it speaks for: to the geometric mean with its neighbours, and to a factor of 2 at the ends."""
    ordered = sorted(set(values))
    cuts = [math.ceil(math.sqrt(a * b)) for a, b in itertools.pairwise(ordered)]
    lows = [max(1, ordered[0] // 2), *cuts]
    highs = [*(c - 1 for c in cuts), 2 * ordered[-1]]
    return {v: (low, high) for v, low, high in zip(ordered, lows, highs, strict=True)}


def table_text(results: Iterable[Result], device: str, driver: str, others: Iterable[Row] = ()) -> str:
    """The table of a device: a row for each result that beat the shipped tables, for the sizes around its own; and rows that no sweep
    makes, as they were."""
    lines = [
        f"# {device}, {driver}. Made by `vkback tune`: each row it made beat the tables that come with vkback, beyond the noise.",
        "# Latency: a launch that waits for the one before; throughput: launches back to back. Edit or delete at will.",
    ]
    for row in others:
        lines += ["", *row_lines(row.family, row.match, row.set, row.measured)]
    forms: dict[str, list[Result]] = {}
    for result in results:
        forms.setdefault(json.dumps(result.match, sort_keys=True), []).append(result)
    for _, form in sorted(forms.items()):
        ks = edges([r.k for r in form])
        for k, k_range in sorted(ks.items()):
            ms = edges([r.m for r in form if r.k == k])
            for result in sorted((r for r in form if r.k == k), key=lambda r: r.m):
                if result.kept:
                    lines += ["", *_result_lines(result, ms[result.m], k_range, device, driver)]
    for form_text in _path_rows(forms, device, driver):
        lines += ["", *form_text]
    return "\n".join(lines) + "\n"


def _result_lines(result: Result, m: tuple[int, int], k: tuple[int, int], device: str, driver: str) -> list[str]:
    if result.match["handover"]:
        times = f"{result.latency:.2f} us a token, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f})"
    else:
        times = (
            f"latency {result.latency:.2f} us, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f}); "
            f"throughput {result.throughput:.2f} us, was {result.throughput_before:.2f}"
        )
    evidence = f"{result.date} {device}, {driver}, {result.line}: {times}, {100 * result.read_share:.0f} % of the read rate"
    match = {**result.match, "m": _range(m), "k": _range(k)}
    return row_lines("mat_vec", match, result.after._asdict(), evidence)


def row_lines(family: str, match: Mapping[str, Any], set: Mapping[str, Any], measured: str) -> list[str]:
    """A row as it stands in a table."""
    keys = [f"{key} = {_toml(value)}" for key, value in match.items()]
    return [f"[[{family}]]", *keys, f"set = {_toml(set)}", f"measured = {json.dumps(measured)}"]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    return json.dumps(value)


def _range(ends: tuple[int, int]) -> dict[str, int]:
    return {"min": ends[0], "max": ends[1]}


def _path_rows(forms: Mapping[str, Sequence[Result]], device: str, driver: str) -> Iterator[list[str]]:
    """Rows that choose the path, for products that were tuned on both. Fused forms share the choice of the plain one, if that was tuned."""
    pairs: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, Result]]] = {}
    for result in (r for form in forms.values() for r in form if not r.match["handover"]):
        match = result.match
        fused = (match["prologue"], match["glu"], match["y"])
        product = pairs.setdefault((match["ids"], match["n"], match["quant"], result.m, result.k), {})
        product.setdefault(fused, {})[match["path"]] = result
    both = {}
    for key, by_form in pairs.items():
        found = [by_form[fused] for fused in sorted(by_form) if len(by_form[fused]) == 2]
        if found:
            both[key] = found[0]
    for ids, n, quant in sorted({key[:3] for key in both}):
        mine = {key[3:]: pair for key, pair in both.items() if key[:3] == (ids, n, quant)}
        ks = edges([k for _, k in mine])
        for k, k_range in sorted(ks.items()):
            ms = edges([m for m, other in mine if other == k])
            for m, m_range in sorted(ms.items()):
                pair = mine[m, k]
                first = min(pair, key=lambda path: pair[path].latency)
                evidence = (
                    f"{pair[first].date} {device}, {driver}, {quant} {m}x{k}: latency {pair['int'].latency:.2f} us in integers, "
                    f"{pair['float'].latency:.2f} in floats"
                )
                keys = {"ids": ids, "n": n, "quant": quant, "m": _range(m_range), "k": _range(k_range)}
                yield row_lines("mat_vec_path", keys, {"path": first}, evidence)
