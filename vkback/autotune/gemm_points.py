"""Points of the GEMM family: which kernel a product of several tokens takes, and in which tiles; and which of them a sweep may try.

A *task* is one weight shape times n tokens, with what is fused around it. The kernel is one of the axes: "gemv", where the GEMV
kernels, 16 tokens at a time, are as quick as any, or one of the GEMMs. So tasks of one weight and several n show where they cross.
A point that the planner would adjust, or that the device cannot run, is refused before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vkback import quants
from vkback.autotune.family_point import FamilyPoint, legal
from vkback.autotune.points import CORE_REGISTERS
from vkback.autotune.problem import LinearProblem
from vkback.device import Capabilities, Device
from vkback.graph import Node
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import table_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.choice import PARAMS_READ, ProductChoice, choose
from vkback.ops.matmul.linear_node import LinearNode, Path, path_for
from vkback.ops.op import OPS
from vkback.ops.workgroup import lanes_for
from vkback.plan.planner import check_limits
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import too_long
from vkback.tuning.lookup import Overrides

SUM_REGISTERS = 128
"""Sums of a thread at most: with fragments, weights in flight and addresses about what 255 registers hold (64 x 64 by 32 lanes)."""

OTHER_REGISTERS = 40
"""What a thread needs beside its sums, at least: workgroups whose threads would need more than a core has do not start."""

MISFIT = "tiles, parts and matrices do not divide each other, or the device has too few threads or too little shared memory"


class GemmPoint(FamilyPoint, family="gemm"):
    """A setting of every parameter of [[gemm]]; those that `kernel` does not read are neutral."""

    __slots__ = ()

    @property
    def text(self) -> str:
        if self.kernel == "gemv":
            return "gemv"
        subnormals = ", by subnormals" if self.subnormals else ""
        if self.kernel == "coop_reg":
            x_shared = ", x in shared memory" if self.x_shared else ""
            each = f", {self.tiles_each} row tiles a workgroup" if self.tiles_each > 1 else ""
            return f"coop_reg {self.tile_m}x{self.tile_n}, warp {self.warp_m}, {self.slice_k} subgroups a row{x_shared}{each}{subnormals}"
        if self.kernel != "coop_mat":
            return f"{self.kernel} {self.tile_n} columns" + (f", {self.rows} rows" if self.kernel == "f32" else "")
        parts = f", {self.split_k} parts" if self.split_k > 1 else ""
        return f"coop_mat {self.tile_m}x{self.tile_n}x{self.step_k}, warp {self.warp_m}x{self.warp_n}{parts}{subnormals}"

    @property
    def params(self) -> dict[str, Any]:
        """What a row says: the parameters that have an effect."""
        return {name: getattr(self, name) for name in ("kernel", *PARAMS_READ[self.kernel])}


@dataclass(frozen=True)
class GemmTask:
    """A product of several tokens. problem: x and output are F32, and there is no norm before it, as a prompt has it.

    count  products of it in a prompt, for the order of work
    """

    problem: LinearProblem
    matrices: bool
    path: Path
    count: int = 1

    @property
    def match(self) -> dict[str, Any]:
        """What a row about it matches beside its sizes."""
        return {"matrices": self.matrices, "path": self.path, "experts": self.problem.experts, "quant": self.problem.quant}

    @property
    def sizes(self) -> dict[str, int]:
        return {"n": self.problem.n, "m": self.problem.m, "k": self.problem.k}

    @property
    def key(self) -> str:
        return json.dumps(["gemm", self.match, self.sizes], sort_keys=True)

    @property
    def line(self) -> str:
        return self.problem.line

    @property
    def weight(self) -> tuple[Any, ...]:
        """Tasks with the same one use the same weights."""
        return dataclasses.astuple(dataclasses.replace(self.problem, n=1))

    @property
    def flops(self) -> int:
        p = self.problem
        return 2 * p.m * p.k * p.n * max(1, p.n_used)

    def node(self) -> Node:
        return self.problem.node()


def as_prompt(problem: LinearProblem) -> LinearProblem:
    """The product as prompts have it: F32 in and out, the norm in a stage of its own."""
    return dataclasses.replace(problem, roles=tuple(r for r in problem.roles if r != "norm"), x="F32", out="F32")


def tasks_for(problems: Iterable[tuple[LinearProblem, int]], ctx: LowerContext) -> tuple[list[GemmTask], list[str]]:
    """A task for each product, those of a weight together, the most operations first; and texts about those that are passed over. Of
    products that tables cannot tell apart the one with most inputs."""
    matrices = matrix_shape(ctx.caps) is not None and ctx.act == "auto"
    tasks: dict[str, GemmTask] = {}
    said: list[str] = []
    for problem, count in problems:
        plain = as_prompt(problem)
        path, _ = path_for(plain.quant, plain.m, plain.k, plain.n, plain.experts, ctx)
        task = GemmTask(plain, matrices, path, count)
        known = tasks.get(task.key)
        if known is not None:
            task = dataclasses.replace(max(task, known, key=lambda j: len(j.problem.roles)), count=known.count + count)
        tasks[task.key] = task
    for key, task in list(tasks.items()):
        if why := _passed_over(task, ctx):
            said.append(f"{task.line} passed over: {why}")
            del tasks[key]
    weights: dict[tuple[Any, ...], int] = {}
    for task in tasks.values():
        weights[task.weight] = weights.get(task.weight, 0) + task.count * task.flops
    return sorted(tasks.values(), key=lambda j: (-weights[j.weight], j.weight, -j.problem.n)), said


def _passed_over(task: GemmTask, ctx: LowerContext) -> str:
    """Why a task is not tuned; "" when it is."""
    if task.problem.n < 2:
        return "one token is for GEMVs (--op gemv)"
    try:
        return too_long(OPS["LINEAR"].lower(task.node(), ctx), ctx.caps)
    except PlanError as e:
        return str(e)


def with_point(ctx: LowerContext, point: GemmPoint) -> LowerContext:
    """The context that leads to a point."""
    return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"gemm": point.params}, "sweep"))


def point_of(choice: ProductChoice, caps: Capabilities) -> GemmPoint:
    """What the planner made of the tables' choice."""
    shape = choice.shape
    if shape is None:
        return GemmPoint("gemv")
    cut = dataclasses.asdict(shape) | {"rows": shape.tile_m // (shape.subgroups * lanes_for(caps)[0])}
    return GemmPoint(choice.kernel, **{name: cut[name] for name in PARAMS_READ[choice.kernel]})


def actual(task: GemmTask, ctx: LowerContext) -> tuple[GemmPoint, str]:
    """The point that the tables of a context lead to, and the row it comes from."""
    choice = choose(LinearNode.of(task.node()), ctx)
    return point_of(choice, ctx.caps), choice.source


def lowered(task: GemmTask, point: GemmPoint, ctx: LowerContext) -> list[Dispatch]:
    return OPS["LINEAR"].lower(task.node(), with_point(ctx, point))


def refusal(task: GemmTask, point: GemmPoint, ctx: LowerContext, *, chosen: bool = False) -> str:
    """Why a point is not worth compiling: the planner would make another of it, the device cannot run it, or it holds too much in
    registers; "" when it is. chosen: the tables lead to it, so that it is tried however much it takes."""
    caps = ctx.caps
    try:
        got, _ = actual(task, with_point(ctx, point))
        if point.kernel in ("coop_mat", "coop_reg") and got.kernel == "gemv":
            return MISFIT
        for name, a, b in zip(GemmPoint._fields, point, got, strict=True):
            if a != b:
                return f"{name} = {table_word(a)} would become {table_word(b)}"
        if point.kernel in ("coop_mat", "coop_reg") and not chosen and (why := _too_large(point, task, caps)):
            return why
        dispatches = lowered(task, point, ctx)
        for dispatch in dispatches:
            check_limits(dispatch, caps)
    except PlanError as e:
        return str(e)
    return too_long(dispatches, caps)


def _too_large(point: GemmPoint, task: GemmTask, caps: Capabilities) -> str:
    if point.kernel == "coop_reg":
        if point.tile_n >= 2 * max(task.problem.n, 8):
            return f"half of {point.tile_n} columns and more would be empty"
        return f"{point.slice_k} subgroups for a row of {task.problem.k} weights" if 128 * point.slice_k > task.problem.k else ""
    sums = point.warp_m * point.warp_n // caps.subgroup_size
    threads = point.tile_m // point.warp_m * (point.tile_n // point.warp_n) * caps.subgroup_size
    if sums > SUM_REGISTERS and not caps.software:
        return f"{sums} sums a thread, at most {SUM_REGISTERS} are worth trying"
    if (sums + OTHER_REGISTERS) * threads > CORE_REGISTERS and not caps.software:
        return f"{sums} sums and {OTHER_REGISTERS} other registers in each of {threads} threads: a core has {CORE_REGISTERS}"
    if point.tile_n >= 2 * max(task.problem.n * max(1, task.problem.n_used), matrix_columns(caps)):
        return f"half of {point.tile_n} columns and more would be empty"
    if point.split_k > max(1, task.problem.k // point.step_k):
        return f"{point.split_k} parts of a row of {task.problem.k} weights in steps of {point.step_k}"
    return ""


def matrix_columns(caps: Capabilities) -> int:
    """Columns of a matrix, 1 where there are none."""
    matrix = matrix_shape(caps)
    return matrix[1] if matrix else 1


def axes(caps: Capabilities) -> dict[str, tuple[Any, ...]]:
    """Values to try of each parameter of coop_mat. CPU drivers take long to compile large parts."""
    rows, columns, _ = matrix_shape(caps) or (16, 16, 16)
    listed = {name: values for name, values in legal("gemm", {}).items() if name != "kernel" and name in PARAMS_READ["coop_mat"]}
    if caps.software:
        return listed | {
            "tile_m": (2 * rows, 4 * rows, 8 * rows),
            "tile_n": (columns, 2 * columns, 4 * columns),
            "step_k": (32, 64),
            "warp_m": (rows, 2 * rows),
            "warp_n": (columns, 2 * columns),
            "split_k": (1, 2),
        }
    return listed | {
        "tile_m": (32, 64, 128, 256),
        "tile_n": tuple(sorted({columns, 16, 32, 64, 128, 256})),
        "step_k": (32, 64, 128),
        "warp_m": (16, 32, 64, 128),
        "warp_n": tuple(sorted({columns, 16, 32, 64, 128})),
        "split_k": (1, 2, 3, 4, 6, 8, 12, 16),
    }


COLUMNS = (4, 8, 16, 32)
"""tile_n to try of the kernels without matrices: columns whose sums a thread keeps beside those of four rows."""

SMALL = (
    (128, 16, 64, 32, 16),
    (128, 16, 128, 16, 16),
    (64, 16, 128, 16, 16),
    (256, 16, 64, 32, 16),
    (128, 32, 64, 32, 32),
    (64, 32, 64, 16, 32),
)
"""tile_m, tile_n, step_k, warp_m, warp_n for up to 32 tokens: few columns, many rows, all of a workgroup's subgroups along m."""

NARROW = {"tile_m": (64, 128, 256), "step_k": (64, 128), "warp_m": (16, 32), "split_k": (1, 2, 4, 8)}
"""Of tiles with as many columns as a matrix, or twice as many."""

MIDDLE = ((128, 64, 64, 32, 32), (128, 64, 64, 64, 32), (64, 64, 64, 32, 32), (128, 32, 64, 32, 32))
LARGE = ((128, 128, 64, 64, 64), (128, 128, 32, 64, 64), (128, 64, 64, 64, 32), (256, 128, 32, 64, 64), (128, 256, 32, 64, 64))
"""The same for up to 128 tokens, and for more."""


REGISTERS = {False: ((16, 16, 8), (16, 16, 4), (16, 16, 16), (64, 16, 2), (32, 32, 8)), True: ((16, 8, 2),)}
"""tile_m, warp_m and slice_k of coop_reg; on CPU drivers, which compile it for long, the least."""


def guesses(task: GemmTask, caps: Capabilities) -> Iterator[GemmPoint]:
    """Points of each kernel that have won somewhere, the plainest first."""
    yield GemmPoint("gemv")
    if task.matrices and task.problem.n <= 32 and task.problem.experts == "none":
        columns = 8 if task.problem.n <= 8 else 16 if task.problem.n <= 16 else 32
        has_step = quants.quant(task.problem.quant).step_factor > 0  # subnormals save registers, which few subgroups have to spare
        for m, warp_m, k in REGISTERS[caps.software]:
            yield GemmPoint("coop_reg", m, columns, warp_m=warp_m, slice_k=k, subnormals=has_step)
    if task.matrices:
        yield from _matrix_guesses(task, caps)
    if task.path == "int":
        yield from (GemmPoint("int_dot", tile_n=n) for n in COLUMNS)
    if caps.software or task.path == "float":
        yield from (GemmPoint("f32", tile_n=n, rows=4) for n in COLUMNS)


def _matrix_guesses(task: GemmTask, caps: Capabilities) -> Iterator[GemmPoint]:
    if caps.software:
        a = axes(caps)
        yield from (GemmPoint("coop_mat", a["tile_m"][-1], n, 32, a["warp_m"][-1], min(n, a["warp_n"][-1])) for n in a["tile_n"])
        return
    slots = task.problem.n * max(1, task.problem.n_used)
    if task.problem.experts != "none":  # slots of one expert fill a tile
        slots = min(slots, 2 * slots // max(1, task.problem.n_expert))
    cores = caps.shader_cores or 64
    for tile_m, tile_n, step_k, warp_m, warp_n in SMALL if slots <= 32 else MIDDLE if slots <= 128 else LARGE:
        yield GemmPoint("coop_mat", tile_m, tile_n, step_k, warp_m, warp_n)
        tiles = -(-task.problem.m // tile_m) * -(-slots // tile_n)
        # A full last wave of workgroups: as many parts as fill the cores once or twice.
        for parts in sorted({round(cores * waves / tiles) for waves in (1, 2)} - {0, 1}) if task.problem.experts == "none" else ():
            yield GemmPoint("coop_mat", tile_m, tile_n, step_k, warp_m, warp_n, min(16, parts))


def neighbours(point: GemmPoint, caps: Capabilities) -> Iterator[GemmPoint]:
    """Of a point of matrices those that differ in one parameter, and those where tile and part, or two sides, change together. Of
    "int_dot" and "f32" those with more or fewer columns, of "f32" other rows, too. Of "gemv", which has nothing to change, narrow tiles of
    matrices, lest it win against few of them."""
    if point.kernel == "gemv" and not caps.software and matrix_shape(caps) is not None:
        sides = itertools.product((1, 2), NARROW["tile_m"], NARROW["step_k"], NARROW["warp_m"], NARROW["split_k"])
        columns = matrix_columns(caps)
        yield from (GemmPoint("coop_mat", m, i * columns, k, warp_m, i * columns, parts) for i, m, k, warp_m, parts in sides)
    if point.kernel in ("int_dot", "f32"):
        yield from (point._replace(tile_n=n) for n in COLUMNS)
    listed = legal("gemm", {"slice_k": (2, 16)})
    if point.kernel == "f32":
        yield from (point._replace(rows=rows) for rows in listed["rows"])
    if point.kernel == "coop_reg" and not caps.software:
        yield point._replace(subnormals=not point.subnormals)
        yield point._replace(x_shared=not point.x_shared)
        yield from (point._replace(tiles_each=each) for each in listed["tiles_each"])
        for m, warp_m, k in itertools.product((16, 32, 64, 128), (16, 32), listed["slice_k"]):
            yield point._replace(tile_m=m, warp_m=warp_m, slice_k=k)
    if point.kernel != "coop_mat":
        return
    for name, values in axes(caps).items():
        for value in values:
            changed: dict[str, Any] = {name: value}
            yield point._replace(**changed)
    for tile, part in (("tile_m", "warp_m"), ("tile_n", "warp_n"), ("warp_m", "warp_n"), ("tile_m", "tile_n")):
        a, b = getattr(point, tile), getattr(point, part)
        yield point._replace(**{tile: 2 * a, part: 2 * b})
        yield point._replace(**{tile: a // 2, part: b // 2})
    for up, down in itertools.permutations(("tile_m", "tile_n", "step_k", "warp_m", "warp_n", "split_k"), 2):
        yield point._replace(**{up: 2 * getattr(point, up), down: max(1, getattr(point, down) // 2)})


def compile_points(device: Device, library: ShaderLibrary, task: GemmTask, points: Iterable[GemmPoint], ctx: LowerContext) -> None:
    """Kernels of points that are not refused."""
    good = [p for p in points if not refusal(task, p, ctx)]
    compile_kernels(device, library, [d for p in good for d in lowered(task, p, ctx)])
