"""Sweeps of attention inside the program of a model's token, at a size of the cache and a depth.

Attention runs between two products, beside the workgroups of both where stages hand over, so a chain of its own launches says little.
Each point takes the place of the tables' choice for all layers of one form (heads, head size, rows of the cache), and what counts is the
time of a token. A point is judged as those of products in a program are (vkback/harness/in_program.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from vkback.autotune.own_table import OwnTable
from vkback.autotune.program_sweep import TOKEN_NOISE, ProgramTrial
from vkback.autotune.search import Search, duel, noise
from vkback.device import Capabilities
from vkback.graph import Graph
from vkback.ops.attention import DECODE_TOKENS, shape_for
from vkback.ops.base import Choice, Chooser, LowerContext, PlanError
from vkback.plan.planner import plan
from vkback.plan.tuning import Overrides, Row, parse_table, row_lines
from vkback.timing.token_program import Tokens

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
            f"shares of {self.rows_per_split} rows"
        )


class AttentionShape(NamedTuple):
    """Attention that the tables cannot tell apart."""

    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx: int

    @property
    def line(self) -> str:
        return f"attention of {self.n_head}/{self.n_head_kv} heads of {self.head_dim}, a cache of {self.n_ctx} rows"


@dataclass(frozen=True)
class AttentionResult:
    """What a form came to. us: microseconds a token; before and after are the same where nothing beats the tables."""

    form: AttentionShape
    depth: int
    before: AttentionPoint
    source: str
    before_us: float
    after: AttentionPoint
    after_us: float
    noise_us: float
    tried: int
    wrong: tuple[str, ...]

    @property
    def kept(self) -> bool:
        return self.after != self.before

    def row(self, table: str, device: str, driver: str) -> Row:
        """The row of the device's table that says so."""
        f = self.form
        caches = {"min": math.ceil(f.n_ctx / SPREAD), "max": math.floor(f.n_ctx * SPREAD)}
        match = {"n": {"max": DECODE_TOKENS}, "n_head": f.n_head, "n_head_kv": f.n_head_kv, "head_dim": f.head_dim, "n_ctx": caches}
        measured = (
            f"{date.today().isoformat()} {device}, {driver}, {f.line} with {self.depth} in use: {self.after_us:.2f} us a token, "
            f"was {self.before_us:.2f} ({self.source}, noise {self.noise_us:.2f})"
        )
        (row,) = parse_table("\n".join(row_lines("attention", match, self.after._asdict(), measured)), table)
        return row


@dataclass
class _Asked:
    """Tables that remember which attention they were asked for."""

    tables: Chooser
    forms: dict[AttentionShape, None] = field(default_factory=dict)

    def pick(self, family: str, **query: Any) -> Choice:
        if family == "attention":
            self.forms[AttentionShape(*(query[name] for name in AttentionShape._fields))] = None
        return self.tables.pick(family, **query)


def attention_shapes(graph: Graph, ctx: LowerContext) -> list[AttentionShape]:
    """The forms of attention in a graph's schedule."""
    asked = _Asked(ctx.tuning)
    plan(graph, dataclasses.replace(ctx, tuning=asked))
    return list(asked.forms)


def actual(choice: Choice, form: AttentionShape, ctx: LowerContext) -> AttentionPoint:
    """The point that a kernel of one token is built for when the tables say `choice`. Raises PlanError where there is none."""
    s = shape_for(choice, 1, form.n_head, form.n_head_kv, form.head_dim, form.n_ctx, 0, fused=True, quantizes=True, ctx=ctx)
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


def refusal(point: AttentionPoint, form: AttentionShape, ctx: LowerContext) -> str:
    """Why a point is not worth compiling: the planner would make another of it; "" when it is."""
    try:
        real = actual(Choice(point._asdict(), "sweep"), form, ctx)
    except PlanError as e:
        return str(e)
    return ", ".join(f"{name} = {a} would become {b}" for name, a, b in zip(point._fields, point, real, strict=True) if a != b)


def key_of(form: AttentionShape, depth: int) -> str:
    """The journal's key of a form with so many rows of the cache in use."""
    return json.dumps(["attention", *form, depth])


def tune_attention(
    tokens: Tokens, ctx: LowerContext, form: AttentionShape, own: OwnTable, seconds: float,
    watch: Callable[[AttentionPoint, str], None] = lambda point, said: None,
) -> AttentionResult:  # fmt: skip
    """Look for a point that beats the tables beyond the noise, from the tables' own on, always to the best neighbour, for so long. What
    comes of it goes into the device's own table and journal.

    watch  is told of every point and what became of it
    Raises SweepError where the present program is wrong.
    """
    key = key_of(form, tokens.depth)
    asked = form._asdict()
    choice = ctx.tuning.pick("attention", n=1, **asked)
    before = actual(choice, form, ctx)

    def tables(point: AttentionPoint) -> Chooser:
        return Overrides(ctx.tuning, {"attention": point._asdict()}, "sweep", asked)

    def refused(point: AttentionPoint) -> str:
        return refusal(point, form, ctx) or own.journal.refusal(key, point)

    with ProgramTrial(tokens, ctx, form.line, tables) as trial:
        climb = Search(trial, refused, watch, time.monotonic() + seconds, ctx.caps.software, partial(own.journal.trying, key))
        climb.begin([before], before, f"{form.line}: the kernel that the tables choose ({choice.source}: {before.text})")
        choices = axes(ctx.caps)
        climb.hill_climb(lambda point: neighbours(point, choices))
        after, measured = duel(trial, before, climb.best(2), TOKEN_NOISE)
    result = AttentionResult(
        form=form, depth=tokens.depth, before=before, source=choice.source, before_us=measured[before].us, after=after,
        after_us=measured[after].us, noise_us=noise(measured[after], measured[before], TOKEN_NOISE), tried=len(climb.measured),
        wrong=tuple(f"{p.text}: {why}" for p, why in climb.wrong.items()),
    )  # fmt: skip
    own.journal.finish("attention", key, dataclasses.asdict(result))
    if result.kept:
        own.write([result.row(own.path.name, ctx.caps.name, own.driver)])
    return result
