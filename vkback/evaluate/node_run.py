"""Runs tokens of a model on a device so that the value of every node can be read afterwards.

The plan, its kernels and its barriers are those that the engine uses; only memory differs: each tensor has some of its own, filled with NaN
before every run. A node that reads what nobody wrote, or reads it too early, shows as NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.events import Report
from vkback.graph import Graph, Node, Tensor
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.ops.lowering import Act, LowerContext
from vkback.plan.planner import fused_nodes, plan
from vkback.plan.schedule import Schedule, Slot, allocate_unaliased
from vkback.program import Program, WeightRanges
from vkback.program.fragments import fragments_hold, row_lanes_found
from vkback.program.values import NAN_WORD, decoded
from vkback.shader import ShaderLibrary
from vkback.timing.stages import loaded
from vkback.tuning.lookup import Tuning

TIMEOUT_S = 600.0


class NodeRunError(VkbackError):
    """Tokens that cannot be run for a comparison of nodes."""


@dataclass(frozen=True)
class Batch:
    """What is run: `tokens` in a row, the last `n` of them at once and compared, those before one by one.

    n_ctx  rows of the KV cache
    """

    tokens: tuple[int, ...]
    n: int
    n_ctx: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.n > len(self.tokens):
            raise NodeRunError(f"[compare] {self.n} tokens at once of {len(self.tokens)}; expected at least 1 and at most all")
        if self.n > 1 and self.n != len(self.tokens):
            raise NodeRunError(f"[compare] {self.n} tokens at once after {len(self.tokens) - self.n} others: several go from position 0")
        if len(self.tokens) > self.n_ctx:
            raise NodeRunError(f"[compare] {len(self.tokens)} tokens do not fit a context of {self.n_ctx}; raise --ctx")

    @property
    def steps(self) -> list[tuple[int, Array]]:
        """(first position, tokens) of each run, the compared one last."""
        if self.n > 1:
            return [(0, np.array(self.tokens, np.int32))]
        return [(i, np.array([t], np.int32)) for i, t in enumerate(self.tokens)]

    def inputs(self, step: tuple[int, Array]) -> dict[str, Array]:
        first, tokens = step
        out_ids = np.array([len(tokens) - 1], np.int32)
        return {"tokens": tokens, "pos": np.arange(first, first + len(tokens), dtype=np.int32), "out_ids": out_ids}


@dataclass(frozen=True)
class NodeRun:
    """What a device made of the last step.

    values   by tensor, F32 or I32; caches with all their rows. Tensors in the order of a kernel's own (packed F16) are missing
    earlier  of each step before, the ids of experts by tensor
    """

    graph: Graph
    nodes: list[Node]
    ctx: LowerContext
    schedule: Schedule
    values: dict[str, Array]
    earlier: list[dict[str, Array]]
    timed_out: bool


def context_on(device: Device, library: ShaderLibrary, act: Act) -> LowerContext:
    """What the engine plans with on a device: its tables, and what a start-up check finds of cooperative matrices."""
    tables = Tuning.for_device(device.caps)
    fragments, lanes = fragments_hold(device, library), row_lanes_found(device, library)
    return LowerContext(device.caps, tables, act, fragments=fragments, row_lanes=lanes)


def graph_of(model: Model, batch: Batch) -> Graph:
    return model.graph(batch.n, batch.n_ctx, head="last" if batch.n == 1 else "all")


def unaliased(schedule: Schedule) -> Schedule:
    """The schedule with memory of its own for every tensor."""
    names = frozenset(schedule.slots)
    slots, size = allocate_unaliased(schedule.stages, names - schedule.sentinel_tensors, 0)
    spun_on, end = allocate_unaliased(schedule.stages, schedule.sentinel_tensors, size)
    return dataclasses.replace(schedule, slots=slots | spun_on, activation_bytes=end, sentinel_range=Slot(size, end - size))


def run_nodes(
    model: Model,
    device: Device,
    library: ShaderLibrary,
    ctx: LowerContext,
    batch: Batch,
    *,
    fusion: str = "all",
    alter: Callable[[Schedule], Schedule] | None = None,
    spoil: Callable[[Device, Mapping[str, WeightRanges]], object] | None = None,
    progress: Report | None = None,
) -> NodeRun:
    """Run a batch as `ctx` plans it, and read every node.

    alter, spoil  for tests: change the schedule, or the weights in memory, before the run
    Raises NodeRunError for a token outside the vocabulary, and where an activation is beyond the range of f16.
    """
    wrong = next((t for t in batch.tokens if not 0 <= t < model.hp.n_vocab), None)
    if wrong is not None:
        raise NodeRunError(f"[compare] token {wrong}: expected an id in 0..{model.hp.n_vocab - 1}")
    graph = graph_of(model, batch)
    nodes, planned = fused_nodes(graph, ctx, fusion=fusion)
    schedule = unaliased(plan(graph, ctx, fusion=fusion))
    schedule = alter(schedule) if alter else schedule
    tensors = schedule.tensors()
    known = {t.name: t for n in nodes for t in n.outputs}
    wanted = {name: known[name] for name in known if _readable(name, known[name], tensors)}
    ids = [t for t in wanted.values() if t.type == "I32"]
    with ExitStack() as stack:
        weights, ranges = loaded(model, tensors, device, stack, progress=progress)
        if spoil:
            spoil(device, weights)
        program = Program(device, library, schedule, ranges, weights)
        stack.callback(program.close)
        commands = program.record("nodes")
        earlier: list[dict[str, Array]] = []
        steps = batch.steps
        for number, step in enumerate(steps):
            for name in schedule.slots:
                block = program.range(name)
                device.upload(block, np.full(block.size // 4, NAN_WORD, np.uint32))
            for name, value in batch.inputs(step).items():
                if name in ranges:
                    device.upload(ranges[name], value)
            device.submit(commands).wait(TIMEOUT_S)
            read: Sequence[Tensor] = list(wanted.values()) if number == len(steps) - 1 else ids
            earlier.append({t.name: decoded(t, device.download(program.range(t.name)), device.caps) for t in read})
        if program.overflow is not None:
            words = program.overflowed(device.download(program.overflow, np.uint32))
            if words:
                raise NodeRunError(f"[compare] activations are beyond the range of f16 ({', '.join(words)}): compare with --act f32")
        return NodeRun(graph, nodes, planned, schedule, earlier[-1], earlier[:-1], program.timed_out)


def _readable(name: str, known: Tensor, planned: Mapping[str, Tensor]) -> bool:
    """Whether the plan holds a node's output as the node has it: it may have packed it in an order of a kernel's own."""
    there = planned.get(name)
    return there is not None and there.kind in ("node", "state") and there.type == known.type
