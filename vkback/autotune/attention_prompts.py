"""Attention of many tokens tuned in chains of its own launches: which kernel, and how it cuts queries and cache.

A prompt's program has a barrier before and after attention, so a chain of launches that wait for each other says what it costs there. The
cache is as full as after a prompt of so many tokens at a depth. The result of every point is compared with the reference, for tokens drawn
all over the prompt, before it is timed. Size of the cache and rows in use change the time, but hardly which point is best: rows say
nothing of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vkback.autotune.chain_trial import ChainFamily, ChainTrial
from vkback.autotune.tunable import Chosen, Trial
from vkback.device import Capabilities, Device
from vkback.errors import VkbackError
from vkback.graph import Node
from vkback.ops.attention.choice import prompt_shape
from vkback.ops.attention.flash import DECODE_TOKENS
from vkback.ops.case import Array, Problem
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import FAMILIES
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.paths import tuning_root
from vkback.plan.planner import check_limits
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import Bench, too_long
from vkback.tuning.lookup import Overrides, Tuning

CHECKED_TOKENS = 48
"""Tokens whose results are compared: the first, the last, and others drawn at random, all heads of each."""

NO_EFFECT = 1


class PromptPoint(NamedTuple):
    """A setting of the parameters of [[attention]] for many tokens; for kernel "decode" the others have no effect."""

    kernel: Literal["decode", "plain", "matrix"]
    tile_q: int = NO_EFFECT
    tile_kv: int = NO_EFFECT
    warps: int = NO_EFFECT

    @property
    def text(self) -> str:
        return (
            self.kernel if self.kernel == "decode" else f"{self.kernel} {self.tile_q} queries x {self.tile_kv} rows, {self.warps} subgroups"
        )

    @property
    def params(self) -> dict[str, Any]:
        """What a row says: the parameters that have an effect."""
        return {"kernel": self.kernel} if self.kernel == "decode" else self._asdict()


@dataclass(frozen=True)
class PromptTask:
    """Attention of n tokens after `depth` others, by what the tables tell apart, and a window and sinks if the layer has them."""

    n: int
    n_head: int
    n_head_kv: int
    head_dim: int
    depth: int = 0
    window: int = 0
    sinks: bool = False

    @property
    def key(self) -> str:
        return json.dumps(["prompt attention", *dataclasses.astuple(self)])

    @property
    def line(self) -> str:
        return f"attention of {self.n} tokens, {self.n_head}/{self.n_head_kv} heads of {self.head_dim}, depth {self.depth}"

    @property
    def match(self) -> dict[str, Any]:
        return {"n_head": self.n_head, "n_head_kv": self.n_head_kv, "head_dim": self.head_dim}

    @property
    def sizes(self) -> dict[str, int]:
        return {"n": self.n}

    def build(self) -> Problem:
        """The node, the last n tokens of a full cache, with made-up values."""
        rows = self.depth + self.n
        case = OPS["FLASH_ATTN_EXT"].build_case(
            self.n_head, self.n_head_kv, self.head_dim, window=self.window, sinks=self.sinks, kv=rows, nb=self.n
        )
        return case.build()

    def node(self) -> Node:
        """The node alone; its values, which are many, are made once, in `build`."""
        small = dataclasses.replace(self, n=1, depth=0).build().node
        q, cache_k, cache_v, pos, *sinks = small.inputs
        caches = (dataclasses.replace(c, shape=(self.n_head_kv, self.depth + self.n, self.head_dim)) for c in (cache_k, cache_v))
        inputs = (dataclasses.replace(q, shape=(self.n, *q.shape[1:])), *caches, dataclasses.replace(pos, shape=(self.n,)), *sinks)
        (out,) = small.outputs
        return Node(small.op, inputs, (dataclasses.replace(out, shape=(self.n, *out.shape[1:])),), small.params)


def tasks_for(nodes: Iterable[Node], depth: int, ctx: LowerContext) -> tuple[list[PromptTask], list[str]]:
    """A task for each shape of attention among the nodes of a prompt, and texts about those that are passed over. Of layers that tables
    cannot tell apart one without a window, if there is one."""
    tasks: dict[str, PromptTask] = {}
    for node in nodes:
        if node.op != "FLASH_ATTN_EXT":
            continue
        (n, n_head, head_dim), n_head_kv = node.inputs[0].shape, node.inputs[1].shape[0]
        task = PromptTask(n, n_head, n_head_kv, head_dim, depth, int(node.params.get("window", 0)), len(node.inputs) > 4)
        known = tasks.get(json.dumps([task.match, task.sizes]))
        if known is None or known.window:
            tasks[json.dumps([task.match, task.sizes])] = task
    found = list(tasks.values())
    said = {task.key: _passed_over(task, ctx) for task in found}
    return [j for j in found if not said[j.key]], [f"{j.line} passed over: {said[j.key]}" for j in found if said[j.key]]


def _passed_over(task: PromptTask, ctx: LowerContext) -> str:
    if task.n <= DECODE_TOKENS:
        return f"up to {DECODE_TOKENS} tokens take the kernel of generation"
    try:
        return too_long(OPS["FLASH_ATTN_EXT"].lower(task.node(), ctx), ctx.caps)
    except PlanError as e:
        return str(e)


def with_point(ctx: LowerContext, point: PromptPoint) -> LowerContext:
    """The context that leads to a point."""
    return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"attention": point.params}, "sweep"))


def actual(node: Node, ctx: LowerContext) -> PromptPoint:
    """The point that a kernel is built for by the tables of a context."""
    shape = prompt_shape(node, ctx)
    return PromptPoint("decode") if shape is None else PromptPoint(shape.kernel, shape.tile_q, shape.tile_kv, shape.warps)


def lowered(node: Node, point: PromptPoint, ctx: LowerContext) -> list[Dispatch]:
    return OPS[node.op].lower(node, with_point(ctx, point))


def refusal(node: Node, point: PromptPoint, ctx: LowerContext) -> str:
    """Why a point is not worth compiling: the planner would make another of it, or the device cannot run it; "" when it is."""
    for name, value in point.params.items():
        if why := FAMILIES["attention"].why_illegal(name, value):
            return f"{name} = {why}"
    try:
        for name, a, b in zip(point._fields, point, actual(node, with_point(ctx, point)), strict=True):
            if a != b:
                return f"{name} = {a} would become {b}"
        dispatches = lowered(node, point, ctx)
        for dispatch in dispatches:
            check_limits(dispatch, ctx.caps)
    except PlanError as e:
        return str(e)
    return too_long(dispatches, ctx.caps)


def axes(caps: Capabilities) -> dict[str, tuple[int, ...]]:
    """Values to try of each parameter. CPU drivers take long to compile large tiles."""
    if caps.software:
        return {"tile_q": (8, 16, 32), "tile_kv": (4, 8, 16), "warps": (1, 2)}
    return {"tile_q": (16, 32, 64, 128, 256), "tile_kv": (8, 16, 32, 64, 128), "warps": (1, 2, 4, 8)}


def neighbours(point: PromptPoint, caps: Capabilities) -> Iterator[PromptPoint]:
    """Points that differ in one parameter, and those where two change together or against each other."""
    if point.kernel == "decode":
        return
    for name, values in axes(caps).items():
        for value in values:
            changed: dict[str, Any] = {name: value}
            yield point._replace(**changed)
    yield point._replace(tile_q=2 * point.tile_q, warps=2 * point.warps)
    yield point._replace(tile_q=point.tile_q // 2, warps=max(1, point.warps // 2))
    for up, down in itertools.permutations(("tile_q", "tile_kv", "warps"), 2):
        yield point._replace(**{up: 2 * getattr(point, up), down: max(1, getattr(point, down) // 2)})


def guesses(caps: Capabilities) -> Iterator[PromptPoint]:
    """Points of each kernel that have won somewhere."""
    yield PromptPoint("decode")
    if caps.software:
        yield from (PromptPoint("plain", 16, 8, 1), PromptPoint("plain", 8, 4, 1))
        if matrix_shape(caps) is not None:
            yield PromptPoint("matrix", 16, 8, 2)
        return
    if matrix_shape(caps) is not None:
        yield from (PromptPoint("matrix", q, kv, warps) for q, kv, warps in ((64, 64, 4), (64, 32, 4), (32, 32, 2), (128, 64, 8)))
    yield from (PromptPoint("plain", q, kv, 4) for q, kv in ((64, 16), (64, 32), (32, 16)))


class PromptTrial(ChainTrial[PromptPoint]):
    """Attention in a chain of launches."""

    def with_point(self, point: PromptPoint) -> LowerContext:
        return with_point(self.ctx, point)

    def compile(self, points: Iterable[PromptPoint]) -> None:
        compile_points(self.bench.device, self.bench.library, self.node, points, self.ctx)


def compile_points(device: Device, library: ShaderLibrary, node: Node, points: Iterable[PromptPoint], ctx: LowerContext) -> None:
    """Kernels of points that are not refused."""
    good = [p for p in points if not refusal(node, p, ctx)]
    compile_kernels(device, library, [d for p in good for d in lowered(node, p, ctx)])


class PromptAttention(ChainFamily[PromptPoint]):
    """Attention of prompts as a `Tunable`. The incumbent is what the tables that come with vkback say."""

    journal = "prompt attention"
    families = ("attention",)
    least = DECODE_TOKENS + 1

    @classmethod
    def point(cls, values: Iterable[Any]) -> PromptPoint:
        return PromptPoint(*values)

    def chosen(self, task: PromptTask) -> Chosen[PromptPoint]:
        node, shipped = task.node(), Tuning.for_device(self.ctx.caps, tuning_root())
        query = {**task.match, "n": task.n, "n_ctx": task.depth + task.n}
        incumbent = actual(node, dataclasses.replace(self.ctx, tuning=shipped))
        return Chosen(incumbent, shipped.pick("attention", **query).source, actual(node, self.ctx))

    def starts(self, task: PromptTask) -> list[PromptPoint]:
        chosen, node = self.chosen(task), task.node()
        found = [chosen.incumbent, chosen.present]
        for guess in guesses(self.ctx.caps):
            with suppress(PlanError):
                found.append(actual(node, with_point(self.ctx, guess)))
        return list(dict.fromkeys(found))

    def neighbours(self, point: PromptPoint) -> Iterator[PromptPoint]:
        return neighbours(point, self.ctx.caps)

    def refusal(self, task: PromptTask, point: PromptPoint, *, chosen: bool) -> str:
        return refusal(task.node(), point, self.ctx)

    def prepare(self, task: PromptTask) -> Callable[[], Trial[PromptPoint]]:
        problem = task.build()
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            compile_points(self.device, self.library, task.node(), self.starts(task), self.ctx)
        tokens, want = sample(problem)

        def open_trial() -> PromptTrial:
            # One cache: that of a prompt was stored a moment ago.
            return PromptTrial(Bench(self.device, self.library, problem, self.ctx, cold_bytes=1), self.ctx, tokens, want)

        return open_trial


def sample(problem: Problem) -> tuple[npt.NDArray[np.intp], Array]:
    """Some tokens, and the reference's output for them, float64."""
    node = problem.node
    n, rng = node.inputs[0].shape[0], np.random.default_rng(11)
    tokens = np.unique(np.concatenate([[0, n - 1], rng.choice(n, min(n, CHECKED_TOKENS), replace=False)]))
    inputs = [np.asarray(v, np.float64) if v.dtype.kind == "f" else v for v in (problem.values[t.name] for t in node.inputs)]
    cut = [inputs[0][tokens], *inputs[1:3], inputs[3][tokens], *inputs[4:]]
    (out,) = OPS[node.op].reference(cut, node.params)
    return tokens, out.reshape(len(tokens), -1)
