"""Ops of many tokens tuned in chains of their own launches: what their families share, a trial on the device, rows by numbers of tokens.

A prompt's program has a barrier before and after such an op, as a chain of launches has. The result of every point is compared with the
reference before it is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from vkback.autotune.family_point import legal
from vkback.autotune.gemv_rows import edges
from vkback.autotune.search import RELATIVE_NOISE
from vkback.autotune.tunable import Chosen, Setting, Trial, Tuned, TuneResult
from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import fault
from vkback.graph import Node
from vkback.ops.case import Array, Problem
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import FAMILIES
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.paths import tuning_root
from vkback.plan.planner import check_limits
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import WARM_S, Bench, Measurement, too_long
from vkback.tuning.lookup import Overrides, Tuning
from vkback.tuning.row import Row
from vkback.tuning.table import row_lines

SOFTWARE_LAUNCHES = 2

NO_EFFECT = 1
"""Value of a parameter that a point's kernel does not have."""


class TokenSetting(Setting, Protocol):
    """A setting, some of whose parameters may have no effect: a NamedTuple."""

    @property
    def _fields(self) -> tuple[str, ...]: ...

    @property
    def params(self) -> Mapping[str, Any]:
        """What a row says: the parameters that have an effect."""


class TokenTask(Tuned, Protocol):
    """An op of many tokens."""

    def build(self) -> Problem:
        """The node, with made-up values."""

    def node(self) -> Node:
        """The node alone."""


P = TypeVar("P", bound=TokenSetting)
T = TypeVar("T", bound=TokenTask)


class ChainFamily(Generic[T, P]):
    """What the `Tunable`s of such ops share. The incumbent is what the tables that come with vkback say.

    journal   the journal's name for the results
    families  the one family that they tune
    least     the fewest tokens of a row
    """

    journal: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    least: ClassVar[int]
    relative_noise = RELATIVE_NOISE

    def __init__(self, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
        self.device, self.library, self.ctx = device, library, ctx

    # -- what each says

    @classmethod
    def actual(cls, node: Node, ctx: LowerContext) -> P:
        """The point that kernels are built for by the tables of a context."""
        raise NotImplementedError

    def guesses(self) -> Iterable[P]:
        """Points of each kernel that have won somewhere, or come near."""
        raise NotImplementedError

    def query(self, task: T) -> Mapping[str, Any]:
        """What the tables are asked with."""
        return {**task.sizes, **task.match}

    def sample(self, problem: Problem) -> tuple[npt.NDArray[np.intp], Array]:
        """Tokens that are compared, and the reference's first output for them: all of them."""
        node = problem.node
        want = OPS[node.op].reference([problem.values[t.name] for t in node.inputs], node.params)[0]
        return np.arange(len(want)), want

    # -- points

    @classmethod
    def with_point(cls, ctx: LowerContext, point: P) -> LowerContext:
        """The context that leads to a point."""
        return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {cls.families[0]: point.params}, "sweep"))

    @classmethod
    def lowered(cls, node: Node, point: P, ctx: LowerContext) -> list[Dispatch]:
        return OPS[node.op].lower(node, cls.with_point(ctx, point))

    @classmethod
    def why_not(cls, node: Node, point: P, ctx: LowerContext) -> str:
        """Why a point is not worth compiling: the planner would make another of it, or the device cannot run it; "" when it is."""
        for name, value in point.params.items():
            if why := FAMILIES[cls.families[0]].why_illegal(name, value):
                return f"{name} = {why}"
        try:
            for name, a, b in zip(point._fields, point, cls.actual(node, cls.with_point(ctx, point)), strict=True):
                if a != b:
                    return f"{name} = {a} would become {b}"
            dispatches = cls.lowered(node, point, ctx)
            for dispatch in dispatches:
                check_limits(dispatch, ctx.caps)
        except PlanError as e:
            return str(e)
        return too_long(dispatches, ctx.caps)

    def compile(self, node: Node, points: Iterable[P]) -> None:
        """Kernels of points that are not refused."""
        good = [p for p in points if not self.why_not(node, p, self.ctx)]
        compile_kernels(self.device, self.library, [d for p in good for d in self.lowered(node, p, self.ctx)])

    # -- what a sweep asks for

    def opened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def chosen(self, task: T) -> Chosen[P]:
        node, shipped = task.node(), Tuning.for_device(self.ctx.caps, tuning_root())
        incumbent = self.actual(node, dataclasses.replace(self.ctx, tuning=shipped))
        return Chosen(incumbent, shipped.pick(self.families[0], **self.query(task)).source, self.actual(node, self.ctx))

    def starts(self, task: T) -> list[P]:
        chosen, node = self.chosen(task), task.node()
        found = [chosen.incumbent, chosen.present]
        for guess in self.guesses():
            with suppress(PlanError):
                found.append(self.actual(node, self.with_point(self.ctx, guess)))
        return list(dict.fromkeys(found))

    def refusal(self, task: T, point: P, *, chosen: bool) -> str:
        return self.why_not(task.node(), point, self.ctx)

    def prepare(self, task: T) -> Callable[[], Trial[P]]:
        problem = task.build()
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            self.compile(problem.node, self.starts(task))
        seen, want = self.sample(problem)

        def open_trial() -> ChainTrial[T, P]:
            # One cache or state: that of a prompt was stored a moment ago.
            return ChainTrial(self, Bench(self.device, self.library, problem, self.ctx, cold_bytes=1), seen, want)

        return open_trial

    def learn(self, tables: Tuning) -> None:
        """Nothing: a chain of launches holds one op."""

    @classmethod
    def rows(cls, results: Sequence[TuneResult[P]], present: Sequence[Row], card: str) -> list[list[str]]:
        """From the journal alone, beside rows that choose no kernel (by hand, or about generation), which stay."""
        stays = [row_lines(r.family, r.match, r.set, r.measured) for r in present if "kernel" not in r.set]
        return stays + list(rows_by_tokens(cls.families[0], results, cls.least, card))


class ChainTrial(Generic[T, P]):
    """A node in a chain of launches. seen: its tokens that are compared; want: the reference's first output for them."""

    def __init__(self, family: ChainFamily[T, P], bench: Bench, seen: npt.NDArray[np.intp], want: Array) -> None:
        self.family, self.bench, self._seen, self._want = family, bench, seen, want
        self.node, self.ctx = bench.problem.node, family.ctx

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bench.__exit__()

    def compile(self, points: Iterable[P]) -> None:
        self.family.compile(self.node, points)

    def wrong(self, point: P) -> str:
        got = self.bench.outputs(self.family.with_point(self.ctx, point))[self.node.outputs[0].name]
        return fault(got, got[self._seen], self._want, OPS[self.node.op].tolerance(self.node, self.ctx))

    def measure(self, point: P, repetitions: int) -> Measurement:
        return self.measured(point, True, repetitions)

    def throughput(self, point: P) -> float:
        return self.measured(point, False, 5).us

    def measured(self, point: P, chained: bool, repetitions: int) -> Measurement:
        ctx, launches = self.family.with_point(self.ctx, point), SOFTWARE_LAUNCHES if self.ctx.caps.software else None
        return self.bench.measure(ctx, chained=chained, launches=launches, repetitions=repetitions, warm_s=WARM_S)

    def nbytes(self, point: P) -> int:
        return sum(d.nbytes for d in self.family.lowered(self.node, point, self.ctx))


def differing(point: P, names: Sequence[str], family: str) -> Iterator[P]:
    """Points that differ in one of some parameters, by the values that the family lists, and those where two change against each other."""
    values, replaced = legal(family, {}), point._replace  # type: ignore[attr-defined]  # of a NamedTuple
    for name in names:
        for value in values[name]:
            if value != getattr(point, name):
                yield replaced(**{name: value})
    for up, down in itertools.permutations(names, 2):
        yield replaced(**{up: 2 * getattr(point, up), down: max(1, getattr(point, down) // 2)})


def passed_over(task: TokenTask, ctx: LowerContext) -> str:
    """Why a task is not worth a sweep: the tables' own kernel cannot run, or takes too long; "" where it is."""
    node = task.node()
    try:
        return too_long(OPS[node.op].lower(node, ctx), ctx.caps)
    except PlanError as e:
        return str(e)


def worth_it(tasks: Iterable[T], why_not: Callable[[T], str]) -> tuple[list[T], list[str]]:
    """Tasks to tune, and texts about those that are passed over."""
    said = {task: why_not(task) for task in tasks}
    return [task for task in said if not said[task]], [f"{task.line} passed over: {text}" for task, text in said.items() if text]


def rows_by_tokens(family: str, results: Sequence[TuneResult[P]], least: int, card: str) -> Iterator[list[str]]:
    """A row for each number of tokens, by its newest result, where that beat the shipped tables. least: the fewest tokens of a row."""
    forms: dict[str, dict[int, TuneResult[P]]] = {}
    for result in results:
        forms.setdefault(json.dumps(result.match), {})[result.sizes["n"]] = result
    for form in forms.values():
        ranges = edges(form)
        for n, result in form.items():
            if result.kept:
                low, high = ranges[n]
                was = f"was {result.latency_before:.2f} ({result.before.text}; {result.source}, noise {result.noise:.2f})"
                evidence = f"{result.date} {card}, {result.line}: latency {result.latency:.2f} us, {was}"
                tokens = {"min": max(least, low), "max": high}
                yield row_lines(family, {"n": tokens, **result.match}, result.after.params, evidence)
