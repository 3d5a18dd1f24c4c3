"""Delta nets of a prompt tuned in chains of launches: token by token or in chunks of tokens, and how a workgroup shares a head.

A prompt's program has a barrier before and after a delta net, as a chain of launches has. The result of every point is compared with the
reference, all tokens of it, before it is timed.
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

from vkback.autotune.chain_trial import ChainFamily, ChainTrial
from vkback.autotune.family_point import legal
from vkback.autotune.tunable import Chosen, Trial
from vkback.device import Device
from vkback.errors import VkbackError
from vkback.graph import Node
from vkback.ops.case import Case
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import FAMILIES
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.recurrent.delta_chunks import ChunkShape
from vkback.ops.recurrent.delta_heads import Heads
from vkback.ops.recurrent.delta_net import DeltaNet, shape_for
from vkback.paths import tuning_root
from vkback.plan.planner import check_limits
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import Bench, too_long
from vkback.tuning.lookup import Overrides, Tuning

MIN_TOKENS = 17
"""Of a task: with fewer a delta net runs in steps, whose states may be kept."""

DELTA_NET = DeltaNet()

NO_EFFECT = 1

PARAMETERS = {"scan": ("lanes", "rows", "per_thread"), "chunks": ("chunk", "rows", "tokens")}


class DeltaPoint(NamedTuple):
    """A setting of the parameters of [[delta_net]]; those of the other kernel are NO_EFFECT."""

    kernel: Literal["scan", "chunks"]
    rows: int
    lanes: int = NO_EFFECT
    per_thread: int = NO_EFFECT
    chunk: int = NO_EFFECT
    tokens: int = NO_EFFECT

    @property
    def text(self) -> str:
        if self.kernel == "scan":
            return f"scan, {self.lanes} lanes, {self.per_thread} of {self.rows} rows a thread"
        return f"chunks of {self.chunk} tokens, {self.rows} rows, {self.tokens} tokens a thread"

    @property
    def params(self) -> dict[str, Any]:
        """What a row says: the parameters that have an effect."""
        return {"kernel": self.kernel} | {name: getattr(self, name) for name in PARAMETERS[self.kernel]}


@dataclass(frozen=True)
class DeltaTask:
    """A delta net of n tokens. tiled: which heads share keys."""

    n: int
    heads: Heads
    tiled: bool = True

    @property
    def key(self) -> str:
        return json.dumps(["delta net", self.n, *dataclasses.astuple(self.heads), self.tiled])

    @property
    def line(self) -> str:
        h = self.heads
        return f"delta net of {self.n} tokens, {h.n} heads of {h.dim}, {h.n_group} of {h.key} for q and k"

    @property
    def match(self) -> dict[str, Any]:
        return {"n_head": self.heads.n, "dim": self.heads.dim, "key": self.heads.key}

    @property
    def sizes(self) -> dict[str, int]:
        return {"n": self.n}

    @property
    def case(self) -> Case:
        """The first n tokens of a text, so that a launch leaves no state to the next one."""
        return DELTA_NET.build_case(self.n, self.heads.n, self.heads.dim, self.heads.key, self.heads.n_group, self.tiled)

    def node(self) -> Node:
        return self.case.node()


def tasks_for(nodes: Iterable[Node], ctx: LowerContext) -> tuple[list[DeltaTask], list[str]]:
    """A task for each shape of delta net among the nodes of a prompt, and texts about those that are passed over."""
    found = list(
        dict.fromkeys(
            DeltaTask(n.outputs[0].shape[0], Heads.of(n.outputs[1], n.params), bool(n.params["tiled"]))
            for n in nodes
            if n.op == DELTA_NET.name
        )
    )
    said = {task: too_long(DELTA_NET.lower(task.node(), ctx), ctx.caps) for task in found}
    return [task for task in found if not said[task]], [f"{task.line} passed over: {text}" for task, text in said.items() if text]


def with_point(ctx: LowerContext, point: DeltaPoint) -> LowerContext:
    """The context that leads to a point."""
    return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"delta_net": point.params}, "sweep"))


def actual(node: Node, ctx: LowerContext) -> DeltaPoint:
    """The point that kernels are built for by the tables of a context."""
    shape = shape_for(node, ctx)[0]
    if isinstance(shape, ChunkShape):
        return DeltaPoint("chunks", shape.rows, chunk=shape.chunk, tokens=shape.tokens)
    return DeltaPoint("scan", shape.rows, shape.lanes, shape.per_thread)


def lowered(node: Node, point: DeltaPoint, ctx: LowerContext) -> list[Dispatch]:
    return DELTA_NET.lower(node, with_point(ctx, point))


def refusal(node: Node, point: DeltaPoint, ctx: LowerContext) -> str:
    """Why a point is not worth compiling: the planner would make another of it, or the device cannot run it; "" when it is."""
    for name, value in point.params.items():
        if why := FAMILIES["delta_net"].why_illegal(name, value):
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


def neighbours(point: DeltaPoint) -> Iterator[DeltaPoint]:
    """Points of the same kernel that differ in one parameter, and those where two change against each other."""
    names, values = PARAMETERS[point.kernel], legal("delta_net", {})
    for name in names:
        for value in values[name]:
            changed: dict[str, Any] = {name: value}
            if value != getattr(point, name):
                yield point._replace(**changed)
    for up, down in itertools.permutations(names, 2):
        yield point._replace(**{up: 2 * getattr(point, up), down: max(1, getattr(point, down) // 2)})


GUESSES = (
    DeltaPoint("scan", 16, 8, 1),
    DeltaPoint("chunks", 32, chunk=32, tokens=2),
    DeltaPoint("chunks", 16, chunk=32, tokens=2),
    DeltaPoint("chunks", 16, chunk=16, tokens=1),
)
"""Points of each kernel that have won somewhere, or come near."""


def compile_points(device: Device, library: ShaderLibrary, node: Node, points: Iterable[DeltaPoint], ctx: LowerContext) -> None:
    """Kernels of points that are not refused."""
    good = [p for p in points if not refusal(node, p, ctx)]
    compile_kernels(device, library, [d for p in good for d in lowered(node, p, ctx)])


class DeltaTrial(ChainTrial[DeltaPoint]):
    """A delta net in a chain of launches."""

    def with_point(self, point: DeltaPoint) -> LowerContext:
        return with_point(self.ctx, point)

    def compile(self, points: Iterable[DeltaPoint]) -> None:
        compile_points(self.bench.device, self.bench.library, self.node, points, self.ctx)


class DeltaNets(ChainFamily[DeltaPoint]):
    """Delta nets of prompts as a `Tunable`. The incumbent is what the tables that come with vkback say."""

    journal = "delta net"
    families = ("delta_net",)
    least = MIN_TOKENS

    @classmethod
    def point(cls, values: Iterable[Any]) -> DeltaPoint:
        return DeltaPoint(*values)

    def chosen(self, task: DeltaTask) -> Chosen[DeltaPoint]:
        node, shipped = task.node(), Tuning.for_device(self.ctx.caps, tuning_root())
        incumbent = actual(node, dataclasses.replace(self.ctx, tuning=shipped))
        return Chosen(incumbent, shipped.pick("delta_net", **task.sizes, **task.match).source, actual(node, self.ctx))

    def starts(self, task: DeltaTask) -> list[DeltaPoint]:
        chosen, node = self.chosen(task), task.node()
        return list(dict.fromkeys([chosen.incumbent, chosen.present, *(actual(node, with_point(self.ctx, guess)) for guess in GUESSES)]))

    def neighbours(self, point: DeltaPoint) -> Iterator[DeltaPoint]:
        return neighbours(point)

    def refusal(self, task: DeltaTask, point: DeltaPoint, *, chosen: bool) -> str:
        return refusal(task.node(), point, self.ctx)

    def prepare(self, task: DeltaTask) -> Callable[[], Trial[DeltaPoint]]:
        problem = task.case.build()
        node = problem.node
        with suppress(VkbackError):  # said again, for the point it is about, when that is tried
            compile_points(self.device, self.library, node, self.starts(task), self.ctx)
        want = DELTA_NET.reference([problem.values[t.name] for t in node.inputs], node.params)[0]

        def open_trial() -> DeltaTrial:
            # One state: that of a prompt was stored a moment ago.
            return DeltaTrial(Bench(self.device, self.library, problem, self.ctx, cold_bytes=1), self.ctx, np.arange(task.n), want)

        return open_trial
