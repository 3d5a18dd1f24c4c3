"""Points of the GEMV family: which of them a sweep may try, and the neighbours of each.

A *task* is one GEMV on one path: in a chain of its own launches with barriers between, or in the program of a model's token with
barrier-free stages. A point that the planner would adjust, or that the device cannot run, is refused before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vkback import quants
from vkback.autotune.family_point import FamilyPoint, legal
from vkback.autotune.problem import LinearProblem
from vkback.device import Capabilities, Device
from vkback.ops.dispatch import Dispatch, ceil_div
from vkback.ops.family import FAMILIES, table_word
from vkback.ops.lowering import Act, LowerContext, PlanError
from vkback.ops.matmul.gemv import DEFAULT_SUBGROUP, PER_TILE, GemvConfig, subgroup_for
from vkback.ops.matmul.linear_node import INT_QUANTS, Path, path_for
from vkback.ops.op import OPS
from vkback.plan.planner import check_limits
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

REGISTER_WORDS = 96
"""Weights in flight a thread, 32-bit words: with sums, activations and addresses about what 255 registers hold; more spills."""

ADJUSTED = frozenset({"prefetch", "x_in_shared", "groups", "subgroup"})
"""Parameters that a kernel's `GemvConfig` has in another form than the tables, or that have an effect only with others."""

CORE_REGISTERS = 64 << 10
"""32-bit registers of a core of today's GPUs (an NVIDIA multiprocessor, an AMD compute unit): what a workgroup has at most, weights and all
else; a shape with 84 % of it in weights has won on an H200 (Q8_0, 54 words in each of 1024 threads)."""


class Point(FamilyPoint, family="gemv"):
    """A setting of every parameter of [[gemv]]."""

    __slots__ = ()

    @property
    def text(self) -> str:
        parts = [f"{self.wg} threads", f"{self.lanes} lanes", f"{self.rows} rows", f"unroll {self.unroll}"]
        parts += [f"lanes {self.lane_order}"] if self.lane_order != "strided" else []
        parts += [f"prefetch {self.prefetch}"] if self.prefetch != "none" else []
        parts += [f"scales of {self.scales}"] if self.scales != "weights" else []
        parts += ["x in shared memory"] if self.x_in_shared else []
        parts += ["pairs in shared memory"] if self.pairs_in_shared else []
        parts += [f"{self.groups} groups"] if self.groups != PER_TILE else []
        parts += [f"subgroup {self.subgroup}"] if self.subgroup != DEFAULT_SUBGROUP else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Task:
    """A GEMV on one path.

    count    launches of it in a token, for the order of work
    program  the model in whose token's program it is timed; "" in a chain of its own launches, with barriers between
    """

    problem: LinearProblem
    path: Path
    count: int = 1
    program: str = ""

    @property
    def match(self) -> dict[str, Any]:
        """What a row about it matches beside its sizes."""
        p = self.problem
        return {
            "y": p.out,
            "prologue": "norm" if {"norm", "post_norm"} & set(p.roles) else "none",
            "experts": p.experts,
            "glu": p.glu,
            "n": p.n,
            "quant": p.quant,
            "path": self.path,
            "sync": "sentinel" if self.program else "barrier",
        }

    @property
    def sizes(self) -> dict[str, int]:
        return {"m": self.problem.m, "k": self.problem.k}

    @property
    def key(self) -> str:
        """The journal's key. Tasks with equal keys are the same to the tables."""
        return json.dumps([self.match, self.problem.m, self.problem.k], sort_keys=True)

    @property
    def line(self) -> str:
        return f"{self.problem.line} {self.path}" + (f" in {self.program}" if self.program else "")

    def context(self, ctx: LowerContext, point: Point | None = None) -> LowerContext:
        """The context that leads to this path, and to a point."""
        tuning = ctx.tuning if point is None else Overrides(ctx.tuning, {"gemv": point._asdict()}, "sweep")
        act: Act = "q8_1" if self.path == "int" else "f32"
        return dataclasses.replace(ctx, tuning=tuning, act=act, sync="sentinel" if self.program else "barrier")


def tasks_for(
    problems: Iterable[tuple[LinearProblem, int]],
    ctx: LowerContext,
    paths: Literal["auto", "int", "float", "both"] = "auto",
    program: str = "",
) -> list[Task]:
    """A task for each GEMV and path, the most bytes a token first. Of GEMVs that tables cannot tell apart the one with most inputs."""
    tasks: dict[str, Task] = {}
    for problem, count in problems:
        chosen, _ = path_for(problem.quant, problem.m, problem.k, problem.n, problem.experts, ctx)
        possible = problem.quant in INT_QUANTS and ctx.caps.int_dot and problem.k % 32 == 0
        wanted: tuple[Path, ...] = ("int", "float") if paths == "both" else (chosen if paths == "auto" else paths,)
        for path in wanted:
            if path == "int" and not possible:
                continue
            # In a schedule the producer leaves x as the GEMV wants it; a norm in the prologue takes it as F32.
            x = "Q8_1" if path == "int" and "norm" not in problem.roles else "F32"
            task = Task(problem.with_x(x), path, count, program)
            known = tasks.get(task.key)
            if known is not None:
                task = dataclasses.replace(max(task, known, key=lambda j: len(j.problem.roles)), count=known.count + count)
            tasks[task.key] = task

    def read(task: Task) -> int:
        p = task.problem
        return task.count * quants.layout(p.quant, p.m * max(1, p.n_used), p.k).nbytes

    return sorted(tasks.values(), key=read, reverse=True)


def actual(point: Point, task: Task, ctx: LowerContext) -> Point:
    """The point that a kernel is built for when the tables say `point`: adjusted to what it needs, without what has no effect."""
    return _built(point, lowered(point, task, ctx), task, ctx)


def _built(point: Point, dispatches: Sequence[Dispatch], task: Task, ctx: LowerContext) -> Point:
    """What `actual` says of the dispatches that a point leads to."""
    configs = [d.config for d in dispatches if isinstance(d.config, GemvConfig)]
    got, loop_tiles = configs[-1], any(config.loop_tiles for config in configs)
    size, required = subgroup_for(ctx, point.subgroup)
    several = ctx.caps.subgroup_min != ctx.caps.subgroup_max
    held = several and required == point.subgroup == size != ctx.caps.subgroup_size
    values = {name: getattr(got, name) for name in Point._fields if name not in ADJUSTED}
    values |= {
        "prefetch": got.prefetch if loop_tiles or got.several_chunks else "none",
        "x_in_shared": point.x_in_shared and got.prologue == "copy" and not task.program,  # in a barrier-free program x always is
        "groups": point.groups if loop_tiles else PER_TILE,
        "subgroup": point.subgroup if held else DEFAULT_SUBGROUP,
    }
    return Point(**values)


def refusal(point: Point, task: Task, ctx: LowerContext, *, chosen: bool = False) -> str:
    """Why a point is not worth compiling: the planner would make another of it, or the device cannot run it; "" when it is.

    chosen  the tables choose it, so that it is tried however much it takes
    """
    for name, value in point._asdict().items():
        if FAMILIES["gemv"].why_illegal(name, value):
            return f"{name} = {table_word(value)} is not legal"
    try:
        dispatches = lowered(point, task, ctx)
    except PlanError as e:
        return str(e)
    for name, wanted, got in zip(Point._fields, point, _built(point, dispatches, task, ctx), strict=True):
        if wanted != got:
            return f"{name} = {table_word(wanted)} would become {table_word(got)}"
    layout = quants.layout(task.problem.quant, 64, task.problem.k)
    words = ceil_div(layout.nbytes, 64 * ceil_div(task.problem.k, 32) * 4) * point.rows * point.unroll
    if words > REGISTER_WORDS and not chosen:
        return f"{words} registers of weights in flight, at most {REGISTER_WORDS} are worth trying"
    if words * point.wg >= CORE_REGISTERS and not chosen:
        return f"{words} registers of weights in flight in each of {point.wg} threads: a core has {CORE_REGISTERS}"
    try:
        for dispatch in dispatches:
            check_limits(dispatch, ctx.caps)
    except PlanError as e:
        return str(e)
    return ""


def lowered(point: Point, task: Task, ctx: LowerContext) -> list[Dispatch]:
    return OPS["LINEAR"].lower(task.problem.node(), task.context(ctx, point))


def axes(caps: Capabilities) -> dict[str, tuple[Any, ...]]:
    """Values to try of each parameter: those that the family lists, within what is worth trying. Workgroup counts are multiples of the
    device's cores, where it tells them; subgroup sizes are those that it can be held to."""
    cores, cpu = caps.shader_cores or 64, caps.software
    found = legal("gemv", {"wg": (8, 64) if cpu else (32, 1024), "lanes": (1, 16) if cpu else (8, 256), "rows": (1, 8), "unroll": (1, 8)})
    if cpu:  # its shared memory is the memory that x is in
        found["x_in_shared"] = (False,)
    found["groups"] = (PER_TILE,) if cpu else (PER_TILE, cores, 2 * cores, 4 * cores, 8 * cores)
    able = [s for s in found["subgroup"] if s != DEFAULT_SUBGROUP and caps.subgroup_min <= s <= caps.subgroup_max]
    able = able if caps.subgroup_required_size and len(able) > 1 else []
    found["subgroup"] = (DEFAULT_SUBGROUP, *(s for s in able if s != caps.subgroup_size))
    return found


def neighbours(point: Point, choices: Mapping[str, Sequence[Any]]) -> Iterator[Point]:
    """Points that differ in one parameter, and those where two change against each other."""
    for name, values in choices.items():
        for value in values:
            if value != getattr(point, name):
                yield point._replace(**{name: value})
    for up, down in itertools.permutations(("wg", "lanes", "rows", "unroll"), 2):
        yield point._replace(**{up: getattr(point, up) * 2, down: getattr(point, down) // 2})
    yield point._replace(wg=point.wg * 2, lanes=point.lanes * 2)
    yield point._replace(wg=point.wg // 2, lanes=point.lanes // 2)


def compile_points(device: Device, library: ShaderLibrary, points: Iterable[Point], task: Task, ctx: LowerContext) -> None:
    """Kernels of points that are not refused."""
    good = [p for p in points if not refusal(p, task, ctx)]
    compile_kernels(device, library, [d for p in good for d in lowered(p, task, ctx)])
