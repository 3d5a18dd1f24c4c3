"""GEMVs tuned in chains of their own launches.

Each launch waits for the one before, which is what a token pays. The result of every point is checked against the reference before it is
timed. Weights are cold: copies of them larger than any cache are read in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.autotune.gemvs import Gemvs
from vkback.autotune.points import Point, Task, compile_points, lowered
from vkback.autotune.problem import LinearProblem
from vkback.autotune.tunable import Trial
from vkback.device import Capabilities, Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import fault
from vkback.ops.case import Array, Problem
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_node import inputs_by_role
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary
from vkback.timing.launches import COLD_BYTES, WARM_S, Bench, Measurement
from vkback.tuning.lookup import Tuning

CHECKED_WEIGHTS = 64 << 20
"""Weights beyond which the reference is computed for a part of the rows only; decoding takes about a second for 30 million."""

REFERENCE_ROWS = 2048

STARTS = (
    Point(64, 64, 2, 2),
    Point(64, 32, 2, 4),
    Point(512, 64, 1, 1),
    Point(256, 32, 2, 2),
    Point(512, 16, 4, 1),
    Point(512, 32, 4, 2),
    Point(128, 64, 2, 1),
    Point(8, 8, 1, 1),
    Point(32, 8, 4, 1),
)
"""Shapes that have won somewhere: one subgroup a row, many rows a workgroup, half a workgroup a row."""


@dataclass(frozen=True)
class Expected:
    """The reference's output for some rows: `columns` of the output's last axis and their values, float64."""

    columns: npt.NDArray[np.intp]
    values: Array


def expected(problem: Problem, gemv: LinearProblem) -> Expected:
    """The reference, block of rows by block; of a GEMV with more than CHECKED_WEIGHTS weights the first, the last and two others."""
    node = problem.node
    by = inputs_by_role(node)
    values = {role: problem.values[t.name] for role, t in by.items()}
    if by["x"].type == "Q8_1":
        values["x"] = quants.q8_1_dequantize(values["x"].reshape(-1, quants.q8_1_stride(gemv.k)), gemv.k).reshape(by["x"].shape)
    raw = values["w"].reshape(-1, gemv.m, values["w"].shape[-1])
    if gemv.experts != "none":
        chosen, ids = np.unique(values["ids"], return_inverse=True)
        raw, values["ids"] = raw[chosen], ids.reshape(values["ids"].shape)
    starts = list(range(0, gemv.m, REFERENCE_ROWS))
    if raw.shape[0] * gemv.m * gemv.k > CHECKED_WEIGHTS:
        starts = sorted({0, starts[len(starts) // 3], starts[2 * len(starts) // 3], starts[-1]})
    columns, parts = [], []
    for first in starts:
        last = min(first + REFERENCE_ROWS, gemv.m)
        rows, outs = slice(first, last), slice(first >> gemv.glu, last >> gemv.glu)
        w = quants.decode(gemv.quant, raw[:, rows].reshape(-1, raw.shape[-1])).reshape(raw.shape[0], last - first, gemv.k)
        cut = {**values, "w": w if gemv.experts != "none" else w[0]}
        if "bias" in cut:
            experts = chosen if gemv.experts != "none" else np.zeros(1, np.intp)
            cut["bias"] = cut["bias"].reshape(-1, gemv.m)[experts, rows].ravel()
        if "residual" in cut:
            cut["residual"] = cut["residual"][..., outs]
        (out,) = OPS["LINEAR"].reference([cut[role] for role in node.params["roles"]], node.params)
        columns.append(np.arange(outs.start, outs.stop))
        parts.append(out)
    return Expected(np.concatenate(columns), np.concatenate(parts, axis=-1))


def wrong(bench: Bench, task: Task, ctx: LowerContext, want: Expected) -> str:
    """What is wrong with the result of the kernel that `ctx` leads to; "" when it is right."""
    node = bench.problem.node
    got = bench.outputs(ctx)[node.outputs[0].name]
    return fault(got, got[..., want.columns], want.values, OPS["LINEAR"].tolerance(node, ctx))


class ChainTrial:
    """A task in a chain of launches."""

    def __init__(self, bench: Bench, task: Task, ctx: LowerContext, want: Expected) -> None:
        self._bench, self._task, self._ctx, self._want = bench, task, ctx, want

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bench.__exit__()

    def compile(self, points: Iterable[Point]) -> None:
        compile_points(self._bench.device, self._bench.library, points, self._task, self._ctx)

    def wrong(self, point: Point) -> str:
        return wrong(self._bench, self._task, self._task.context(self._ctx, point), self._want)

    def measure(self, point: Point, repetitions: int) -> Measurement:
        return self._bench.measure(self._task.context(self._ctx, point), chained=True, repetitions=repetitions, warm_s=WARM_S)

    def throughput(self, point: Point) -> float:
        return self._bench.measure(self._task.context(self._ctx, point), chained=False, warm_s=WARM_S).us

    def nbytes(self, point: Point) -> int:
        return sum(d.nbytes for d in lowered(point, self._task, self._ctx))


def guesses(caps: Capabilities, shipped: Point) -> list[Point]:
    """Points that have won elsewhere, and the shipped one with a fixed number of workgroups."""
    many = [] if caps.software else [shipped._replace(groups=4 * (caps.shader_cores or 64))]
    return [start for start in STARTS if caps.software == (start.wg < 64)] + many


class ChainGemvs(Gemvs):
    """GEMVs, each timed in a chain of launches of its own.

    cold_bytes  weights in rotation, more than any cache holds
    """

    def __init__(self, device: Device, library: ShaderLibrary, ctx: LowerContext, *, cold_bytes: int | None = None) -> None:
        super().__init__(ctx)
        self.device, self.library = device, library
        self.cold_bytes = cold_bytes if cold_bytes is not None else (16 << 20 if device.caps.software else COLD_BYTES)

    def opened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, task: Task) -> Callable[[], Trial[Point]]:
        problem = task.problem.build()
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            compile_points(self.device, self.library, self.starts(task), task, self.ctx)
        want = expected(problem, task.problem)

        def open_trial() -> ChainTrial:
            bench = Bench(self.device, self.library, problem, task.context(self.ctx), cold_bytes=self.cold_bytes)
            return ChainTrial(bench, task, self.ctx, want)

        return open_trial

    def guesses(self, task: Task, shipped: Point) -> list[Point]:
        return guesses(self.ctx.caps, shipped)

    def learn(self, tables: Tuning) -> None:
        """Nothing: a chain of launches holds one GEMV, which rows about others do not change."""
