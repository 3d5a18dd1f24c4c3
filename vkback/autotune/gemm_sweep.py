"""Products of several tokens tuned in chains of their own launches: GEMV kernels against GEMMs, and tiles of these.

Each launch waits for the one before, as a stage of a prompt does, and takes with it what the kernel needs of x: packing for cooperative
matrices, rounding to Q8_1 for integer dot products. The result of every point is compared with the reference, for rows and tokens drawn all
over the product, before it is timed. Weights are cold: copies of them larger than any cache are read in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.autotune import gemm_points as points
from vkback.autotune.gemm_points import GemmPoint, GemmTask, actual, compile_points, guesses, lowered, neighbours, with_point
from vkback.autotune.gemm_rows import gemm_rows
from vkback.autotune.search import RELATIVE_NOISE
from vkback.autotune.tunable import Chosen, Trial, TuneResult
from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import fault
from vkback.ops.case import Array, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.choice import Kernel
from vkback.ops.matmul.linear_node import inputs_by_role
from vkback.ops.op import OPS
from vkback.paths import tuning_root
from vkback.shader import ShaderLibrary
from vkback.timing.launches import COLD_BYTES, WARM_S, Bench, Measurement, predicted_us
from vkback.tuning.lookup import Tuning
from vkback.tuning.row import Row

SOFTWARE_COLD_BYTES = 16 << 20

SOFTWARE_RUN_US = 2e4
"""Of one recording on a CPU driver at the low rates of `low_costs`: its speed is the same in few launches as in many."""

CHECKED_DENSE, CHECKED_EXPERTS = 1 << 31, 1 << 28
"""Multiply-adds of the reference at most, about a second: a dense product is one of matrices, of experts each slot is one by itself."""

CHECKED_SLOTS = 1024
"""Slots of experts whose results are compared at most; a dense product is compared for all its tokens."""

GATHERED = 1 << 25
"""Weights of chosen experts that the reference copies at once."""

BLOCK = 32
"""Of so many neighbouring output columns one is compared, at a place drawn at random: all tiles and all places in a tile come up."""


@dataclass(frozen=True)
class Sample:
    """The reference's output for some tokens and some columns of the output's last axis, float64 [tokens, ..., columns]."""

    tokens: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    values: Array


def sample(problem: Problem, task: GemmTask) -> Sample:
    """The reference of a task, for tokens and columns drawn all over it. problem: of the task's weight, with as many tokens or more."""
    p, rng = task.problem, np.random.default_rng(11)
    used, outs = max(1, p.n_used), p.m >> p.glu
    count = min(p.n, max(1, CHECKED_SLOTS // used)) if p.n_expert else p.n
    tokens = _drawn(rng, p.n, count)
    most = max(1, (CHECKED_EXPERTS if p.n_expert else CHECKED_DENSE) // (count * used * p.k << p.glu))
    starts = np.arange(0, outs, BLOCK)
    columns = np.append(np.minimum(starts + rng.integers(BLOCK, size=len(starts)), outs - 1), outs - 1)
    columns = np.unique(columns if len(columns) <= most else columns[_drawn(rng, len(columns), most)])
    rows = np.sort(np.concatenate([2 * columns, 2 * columns + 1])) if p.glu else columns
    by = inputs_by_role(problem.node)
    values = {role: problem.values[tensor.name] for role, tensor in by.items()}
    raw = values["w"].reshape(-1, p.m, values["w"].shape[-1])[:, rows]
    decoded = quants.decode(p.quant, raw.reshape(-1, raw.shape[-1])).reshape(raw.shape[0], len(rows), -1)[..., : p.k]
    w = np.asarray(decoded, np.float64)
    cut: dict[str, Any] = {"w": w if p.n_expert else w[0]}
    if "bias" in values:
        cut["bias"] = values["bias"].reshape(-1, p.m)[:, rows].ravel()
    step = max(1, GATHERED // (used * len(rows) * p.k)) if p.n_expert else len(tokens)
    parts = []
    for first in range(0, len(tokens), step):
        some = tokens[first : first + step]
        for role in set(values) - {"w", "bias"}:
            cut[role] = values[role][some][..., columns] if role == "residual" else values[role][some]
        (out,) = OPS["LINEAR"].reference([cut[role] for role in problem.node.params["roles"]], problem.node.params)
        parts.append(out)
    return Sample(tokens, columns, np.concatenate(parts))


def _drawn(rng: np.random.Generator, n: int, count: int) -> npt.NDArray[np.intp]:
    """`count` of n numbers in order, the first and the last among them."""
    if count >= n:
        return np.arange(n)
    return np.unique(np.concatenate([[0, n - 1], rng.choice(n, max(count - 2, 0), replace=False)]))


class GemmTrial:
    """A task in a chain of launches. quickest: kept up to date with the shortest time of each kernel, in microseconds."""

    def __init__(self, bench: Bench, task: GemmTask, ctx: LowerContext, want: Sample, quickest: dict[Kernel, float]) -> None:
        self._bench, self.task, self._ctx, self._want, self._quickest = bench, task, ctx, want, quickest
        self._node = task.node()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: the next task may have the same weights."""

    def compile(self, points: Iterable[GemmPoint]) -> None:
        compile_points(self._bench.device, self._bench.library, self.task, points, self._ctx)

    def wrong(self, point: GemmPoint) -> str:
        ctx = with_point(self._ctx, point)
        got = self._bench.outputs(ctx, self._node)[self._node.outputs[0].name]
        compared = got[self._want.tokens][..., self._want.columns]
        return fault(got, compared, self._want.values, OPS["LINEAR"].tolerance(self._node, ctx))

    def measure(self, point: GemmPoint, repetitions: int) -> Measurement:
        found = self.measured(point, True, repetitions)
        self._quickest[point.kernel] = min(found.us, self._quickest.get(point.kernel, found.us))
        return found

    def throughput(self, point: GemmPoint) -> float:
        return self.measured(point, False, 5).us

    def measured(self, point: GemmPoint, chained: bool, repetitions: int) -> Measurement:
        ctx, launches = with_point(self._ctx, point), None
        if self._ctx.caps.software:
            launches = max(1, int(SOFTWARE_RUN_US / predicted_us(lowered(self.task, point, self._ctx), self._ctx.caps)))
        return self._bench.measure(ctx, chained=chained, repetitions=repetitions, warm_s=WARM_S, node=self._node, launches=launches)

    def nbytes(self, point: GemmPoint) -> int:
        return sum(d.nbytes for d in lowered(self.task, point, self._ctx))


class Gemms:
    """Products of several tokens as a `Tunable`. The incumbent is what the tables that come with vkback say.

    tasks        all that will be requested: those of one weight share its copies on the device
    cold_bytes  weights in rotation, more than any cache holds
    quickest    by task and kernel, the shortest time measured so far, in microseconds
    """

    journal = "gemm"
    families = ("gemm",)
    relative_noise = RELATIVE_NOISE

    def __init__(
        self, device: Device, library: ShaderLibrary, ctx: LowerContext, tasks: Sequence[GemmTask], *, cold_bytes: int | None = None
    ) -> None:
        self.device, self.library, self.ctx = device, library, ctx
        self.cold_bytes = cold_bytes if cold_bytes is not None else SOFTWARE_COLD_BYTES if device.caps.software else COLD_BYTES
        self.quickest: dict[str, dict[Kernel, float]] = {}
        self._largest: dict[tuple[Any, ...], GemmTask] = {}
        for task in sorted(tasks, key=lambda j: j.problem.n):
            self._largest[task.weight] = task
        self._problem: tuple[tuple[Any, ...], Problem] | None = None
        self._bench: tuple[tuple[Any, ...], Bench] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        if self._bench is not None:
            self._bench[1].__exit__()
            self._bench = None

    @classmethod
    def point(cls, values: Iterable[Any]) -> GemmPoint:
        return GemmPoint(*values)

    def chosen(self, task: GemmTask) -> Chosen[GemmPoint]:
        shipped = Tuning.for_device(self.ctx.caps, tuning_root())
        incumbent, source = actual(task, LowerContext(self.ctx.caps, shipped, self.ctx.act, fragments=self.ctx.fragments))
        return Chosen(incumbent, source, actual(task, self.ctx)[0])

    def starts(self, task: GemmTask) -> list[GemmPoint]:
        chosen = self.chosen(task)
        found = [chosen.incumbent, chosen.present]
        for guess in guesses(task, self.ctx.caps):
            with suppress(PlanError):
                found.append(actual(task, with_point(self.ctx, guess))[0])
        return list(dict.fromkeys(found))

    def neighbours(self, point: GemmPoint) -> Iterator[GemmPoint]:
        return neighbours(point, self.ctx.caps)

    def refusal(self, task: GemmTask, point: GemmPoint, *, chosen: bool) -> str:
        return points.refusal(task, point, self.ctx, chosen=chosen)

    def prepare(self, task: GemmTask) -> Callable[[], Trial[GemmPoint]]:
        largest = self._largest[task.weight]
        if self._problem is None or self._problem[0] != task.weight:
            self._problem = task.weight, largest.problem.build()
        problem = self._problem[1]
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            compile_points(self.device, self.library, task, self.starts(task), self.ctx)
        want = sample(problem, task)

        def open_trial() -> GemmTrial:
            if self._bench is None or self._bench[0] != task.weight:
                self._close()
                self._bench = task.weight, Bench(self.device, self.library, problem, self.ctx, cold_bytes=self.cold_bytes)
            return GemmTrial(self._bench[1], task, self.ctx, want, self.quickest.setdefault(task.key, {}))

        return open_trial

    def learn(self, tables: Tuning) -> None:
        """Nothing: a chain of launches holds one product, which rows about others do not change."""

    @classmethod
    def rows(cls, results: Sequence[TuneResult[GemmPoint]], present: Sequence[Row], card: str) -> list[list[str]]:
        """From the journal alone: the range of a row depends on the sizes measured beside its own."""
        return gemm_rows(results, card)
