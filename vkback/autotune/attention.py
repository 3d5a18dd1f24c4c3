"""Attention tuned in the program of a model's token, at a size of the KV cache and a depth.

Attention runs between two GEMVs, and beside the workgroups of both where stages are barrier-free: a chain of its own launches says
little. Each point takes the place of the tables' choice in all layers of one shape (heads, head size, rows of the cache). The measure is
the time of a token, and points are judged as those of GEMVs in a program are (vkback/autotune/program_sweep.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vkback.autotune.program_sweep import InProgram, ProgramTrial
from vkback.autotune.tunable import Chosen, Trial, TuneResult
from vkback.device import Capabilities
from vkback.graph import Graph
from vkback.ops.attention.flash import DECODE_TOKENS, shape_for
from vkback.ops.family import Choice, Chooser
from vkback.ops.lowering import LowerContext, PlanError
from vkback.plan.planner import plan
from vkback.timing.token_program import Tokens
from vkback.tuning.lookup import Overrides
from vkback.tuning.row import Row
from vkback.tuning.table import row_lines

SPREAD = math.sqrt(2)
"""A row speaks for caches up to this factor larger or smaller."""


class AttentionPoint(NamedTuple):
    """A setting of every parameter of [[attention]]."""

    wg_size: int
    lanes: int
    steps: int
    queries: int
    groups: int
    rows_per_split: int

    @property
    def text(self) -> str:
        return (
            f"{self.wg_size} threads, {self.lanes} lanes, {self.steps} steps, {self.queries} queries, {self.groups} groups, "
            f"splits of {self.rows_per_split} rows"
        )


class AttentionShape(NamedTuple):
    """What the tables tell apart of attention: heads, values a head, rows of the cache."""

    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx: int

    @property
    def line(self) -> str:
        return f"attention of {self.n_head}/{self.n_head_kv} heads of {self.head_dim}, a cache of {self.n_ctx} rows"


@dataclass(frozen=True)
class AttentionTask:
    """One shape of attention with so many rows of the cache in use."""

    shape: AttentionShape
    depth: int

    @property
    def key(self) -> str:
        return json.dumps(["attention", *self.shape, self.depth])

    @property
    def line(self) -> str:
        return f"{self.shape.line}, {self.depth} in use"

    @property
    def match(self) -> dict[str, Any]:
        s = self.shape
        return {"n": 1, "n_head": s.n_head, "n_head_kv": s.n_head_kv, "head_dim": s.head_dim}

    @property
    def sizes(self) -> dict[str, int]:
        return {"n_ctx": self.shape.n_ctx}


@dataclass
class _RecordingTuning:
    """Tables that record for which shapes of attention they were queried."""

    tables: Chooser
    shapes: dict[AttentionShape, None] = field(default_factory=dict)

    def pick(self, family: str, **query: Any) -> Choice:
        if family == "attention":
            self.shapes[AttentionShape(*(query[name] for name in AttentionShape._fields))] = None
        return self.tables.pick(family, **query)


def attention_shapes(graph: Graph, ctx: LowerContext) -> list[AttentionShape]:
    """The shapes of attention in a graph's schedule."""
    recording = _RecordingTuning(ctx.tuning)
    plan(graph, dataclasses.replace(ctx, tuning=recording))
    return list(recording.shapes)


def actual(choice: Choice, shape: AttentionShape, ctx: LowerContext) -> AttentionPoint:
    """The point that a kernel of one token is built for when the tables say `choice`. Raises PlanError where there is none."""
    s = shape_for(choice, 1, shape.n_head, shape.n_head_kv, shape.head_dim, shape.n_ctx, 0, fused=True, quantizes=True, ctx=ctx)
    return AttentionPoint(s.wg, s.lanes, s.steps, s.queries, choice["groups"], choice["rows_per_split"])


def axes(caps: Capabilities) -> dict[str, tuple[int, ...]]:
    """Values to try of each parameter. Workgroup counts follow the device's cores, where it tells them."""
    cores = caps.shader_cores or 64
    software = caps.software
    return {
        "wg_size": (8, 16, 32, 64) if software else (64, 128, 256, 512, 1024),
        "lanes": (1, 2, 4, 8) if software else (4, 8, 16, 32),
        "steps": (1, 2, 4, 8),
        "queries": (1, 2, 4, 8),
        "groups": (1, 2, 4, 8) if software else (cores // 2, 3 * cores // 4, 7 * cores // 8, cores, 2 * cores, 4 * cores),
        "rows_per_split": (64, 256, 1024, 4096) if software else (32, 64, 128, 256, 512),
    }


def neighbours(point: AttentionPoint, choices: Mapping[str, Sequence[int]]) -> Iterator[AttentionPoint]:
    """Points that differ in one parameter, and those where two change against each other."""
    for name, values in choices.items():
        for value in values:
            if value != getattr(point, name):
                yield point._replace(**{name: value})
    for up, down in itertools.permutations(("wg_size", "steps", "queries"), 2):
        yield point._replace(**{up: getattr(point, up) * 2, down: max(1, getattr(point, down) // 2)})


def refusal(point: AttentionPoint, shape: AttentionShape, ctx: LowerContext) -> str:
    """Why a point is not worth compiling: the planner would make another of it; "" when it is."""
    try:
        real = actual(Choice(point._asdict(), "sweep"), shape, ctx)
    except PlanError as e:
        return str(e)
    return ", ".join(f"{name} = {a} would become {b}" for name, a, b in zip(point._fields, point, real, strict=True) if a != b)


class Attention(InProgram):
    """Attention as a `Tunable`. The incumbent is what all tables say, the device's own among them."""

    journal = "attention"
    families = ("attention",)

    def __init__(self, tokens: Callable[[], AbstractContextManager[Tokens]], ctx: LowerContext) -> None:
        super().__init__(tokens)
        self.ctx = ctx

    @classmethod
    def point(cls, values: Iterable[Any]) -> AttentionPoint:
        return AttentionPoint(*values)

    def chosen(self, task: AttentionTask) -> Chosen[AttentionPoint]:
        choice = self.ctx.tuning.pick("attention", n=1, **task.shape._asdict())
        point = actual(choice, task.shape, self.ctx)
        return Chosen(point, choice.source, point)

    def starts(self, task: AttentionTask) -> list[AttentionPoint]:
        return [self.chosen(task).incumbent]

    def neighbours(self, point: AttentionPoint) -> Iterator[AttentionPoint]:
        return neighbours(point, axes(self.ctx.caps))

    def refusal(self, task: AttentionTask, point: AttentionPoint, *, chosen: bool) -> str:
        return refusal(point, task.shape, self.ctx)

    def prepare(self, task: AttentionTask) -> Callable[[], Trial[AttentionPoint]]:
        def tables(point: AttentionPoint) -> Chooser:
            return Overrides(self.ctx.tuning, {"attention": point._asdict()}, "sweep", task.shape._asdict())

        return lambda: ProgramTrial(self._tokens, self.ctx, task.line, tables)

    @classmethod
    def rows(cls, results: Sequence[TuneResult[AttentionPoint]], present: Sequence[Row], card: str) -> list[list[str]]:
        """Those the table has, the newest result's in the place of one that matches the same, or did so when tuning gave what it had
        measured of one token to up to DECODE_TOKENS."""
        newest = results[-1]
        match = {**newest.match, **{name: around(size) for name, size in newest.sizes.items()}}
        replaced = (match, {**match, "n": {"max": DECODE_TOKENS}})
        stays = [r for r in present if not (newest.kept and r.match in replaced)]
        rows = [row_lines(r.family, r.match, r.set, r.measured) for r in stays]
        return [*rows, row_lines("attention", match, newest.after._asdict(), evidence(newest, card))] if newest.kept else rows


def around(n_ctx: int) -> dict[str, int]:
    """The sizes of a cache that a row measured at one speaks for."""
    return {"min": math.ceil(n_ctx / SPREAD), "max": math.floor(n_ctx * SPREAD)}


def evidence(result: TuneResult[AttentionPoint], card: str) -> str:
    """What a row says of its measurement."""
    times = f"{result.latency:.2f} us a token, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f})"
    return f"{result.date} {card}, {result.line}: {times}"
