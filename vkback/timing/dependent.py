"""Products that read what the one before made, timed as a token runs them: joined where the tables say so, and with barriers.

A round is what a feed-forward block reads: a product of k columns after an RMS norm, whose m results it rounds to Q8_1, and a product of m
columns that leads back to k. With experts a router's product stands before the two, the first chooses by its logits and the second adds up
what the chosen ones make. Rounds follow each other with weights that no cache holds any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import numpy as np

from vkback.device import BufferRange, Commands, Device
from vkback.graph import Graph, Tensor
from vkback.ops.base import Array, LowerContext, Problem, ceil_div, nbytes, shards
from vkback.ops.mat_vec import fused_case
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program, WeightRanges, compile_kernels
from vkback.program.values import stored_bytes
from vkback.shader import ShaderLibrary
from vkback.timing.launches import COLD_BYTES, Measurement, measurement_of, rotates, span_us, stamp, warm_up

ROUNDS, SOFTWARE_ROUNDS = 64, 4
"""Rounds of one run: its first stages stand behind barriers whatever the tables say, and are little beside the others."""


@dataclass(frozen=True)
class DependentTiming:
    """Microseconds a round.

    joined    as planned; None where the plan joins no stage
    barriers  with a barrier before every stage
    y         what the last product made, F32 [k]
    wrong     what makes the figure of barrier-free stages worthless, "" if nothing
    """

    barrier_free: Measurement | None
    barriers: Measurement
    y: Array
    wrong: str = ""


def products(quant: str, m: int, k: int, experts: int = 0, used: int = 0) -> list[Problem]:
    """The products of a round, each by itself with made-up values; y of the last has as many elements as x of the first."""
    if not experts:
        return [fused_case(quant, m, k, 1, ("norm",), out="Q8_1").build(), fused_case(quant, k, m, 1, ()).build()]
    return [
        fused_case("F32", experts, k, 1, ("norm",)).build(),
        fused_case(quant, m, k, 1, ("norm", "logits"), out="Q8_1", experts=experts, used=used).build(),
        fused_case(quant, k, m, 1, ("ids", "expert_weights"), experts=experts, used=used).build(),
    ]


class Dependent:
    """Rounds of products on a device. Use as a context manager.

    nbytes  of the weights that each product of a round reads
    """

    def __init__(
        self, device: Device, library: ShaderLibrary, quant: str, m: int, k: int, *, experts: int = 0, used: int = 0, rounds: int = 0
    ) -> None:
        self.device, self.library = device, library
        self.rounds = rounds or (SOFTWARE_ROUNDS if device.caps.software else ROUNDS)
        problems = products(quant, m, k, experts, used)
        heavy = [t for p in problems for t in p.node.inputs if rotates(t)]
        self.nbytes = [nbytes(t) * used // experts if len(t.shape) == 3 else nbytes(t) for t in heavy]
        cold = 1 if device.caps.software else COLD_BYTES
        copies = min(self.rounds, ceil_div(cold, sum(map(nbytes, heavy))))
        self.graph = _linked(problems, self.rounds, copies)
        self._stack = ExitStack()
        self._start, self._end = (stamp(device, label) for label in ("start", "end"))
        self._stack.callback(self._start.destroy)
        self._stack.callback(self._end.destroy)
        try:
            self._load(problems)
        except BaseException:
            self._stack.close()
            raise

    def _load(self, problems: Sequence[Problem]) -> None:
        """Weights in as many copies as a run goes through, and the first round's x."""
        caps = self.device.caps
        values = {f"{s}.{name}": v for s, p in enumerate(problems) for name, v in p.values.items()}
        tensors = [t for t in self.graph.tensors().values() if t.kind in ("weight", "input")]
        pieces = {t.name: [aligned(s.layout.nbytes) for s in shards(t, caps)] if rotates(t) else [aligned(nbytes(t))] for t in tensors}
        arena = self._stack.enter_context(self.device.arena("dependent products", sum(map(sum, pieces.values())), "device"))
        self.ranges: dict[str, BufferRange] = {}
        self.weights: dict[str, WeightRanges] = {}
        first: dict[str, tuple[BufferRange, ...]] = {}
        copies = self.device.recorder("copies")
        for t in tensors:
            blocks = tuple(arena.alloc(size, t.name) for size in pieces[t.name])
            if t.kind == "input":
                self.ranges[t.name] = blocks[0]
            else:
                self.weights[t.name] = WeightRanges(blocks)
            made = t.name.partition("@")[0]
            if made in first:
                for source, target in zip(first[made], blocks, strict=True):
                    copies.copy(source, target)
                continue
            first[made] = blocks
            for block, data in zip(blocks, stored_bytes(t, values[made], caps), strict=True):
                self.device.upload(block, data)
        self.device.run(copies)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compile(self, contexts: Sequence[LowerContext]) -> None:
        """Compile what several contexts lead to at once."""
        compile_kernels(self.device, self.library, [d for ctx in contexts for d in self.plan(ctx).dispatches()])

    def plan(self, ctx: LowerContext) -> Schedule:
        return plan(self.graph, ctx)

    def time(self, ctx: LowerContext, *, repetitions: int = 6) -> DependentTiming:
        """A round's time as `ctx` plans it. Raises PlanError."""
        schedule = self.plan(ctx)
        program = Program(self.device, self.library, schedule, self.ranges, self.weights)
        try:
            barriers, y = self._lap(program, program.record("barriers", barriers=True), repetitions)
            if not schedule.barrier_free:
                return DependentTiming(None, barriers, y)
            barrier_free, y_joined = self._lap(program, program.record("barrier_free"), repetitions)
            timed_out = program.timed_out
        finally:
            program.close()
        wrong = "a wait was given up" if timed_out else "" if y.tobytes() == y_joined.tobytes() else "other results than with barriers"
        return DependentTiming(barrier_free, barriers, y, wrong)

    def _lap(self, program: Program, run: Commands, repetitions: int) -> tuple[Measurement, Array]:
        """Microseconds a round, and the last y."""
        warm_up(self.device, run, 0.05)
        times = [span_us(self.device, self._start, run, self._end) / self.rounds for _ in range(repetitions)]
        return measurement_of(times), self.device.download(program.range(self.graph.outputs[0].name), np.float32)


def _linked(problems: Sequence[Problem], rounds: int, copies: int) -> Graph:
    """Rounds of products, x of each round the y of the one before. Names are STAGE.NAME@COPY for weights, STAGE.NAME of the first x."""
    graph = Graph()
    x: Tensor | None = None
    for r in range(rounds):
        made: dict[str, Tensor] = {} if x is None else {"x": x}  # by the role that it has for the products behind
        for s, problem in enumerate(problems):
            node = problem.node
            inputs = [_input(t, s, r % copies, made.get(role)) for role, t in zip(node.params["roles"], node.inputs, strict=True)]
            outputs = tuple(dataclasses.replace(t, name=f"{s}.{t.name} of {r}") for t in node.outputs)
            graph.add("MAT_VEC", tuple(inputs), outputs, **node.params)
            made = {"x": inputs[1]} | made | _roles(problems, s, outputs)
        x = outputs[0]
    graph.outputs = (outputs[0],)
    return graph


def _input(t: Tensor, stage: int, copy: int, made: Tensor | None) -> Tensor:
    """What a product reads in the place of a tensor of its own: a copy of the weight, what was made for it, or the run's input."""
    if t.kind == "weight":
        return dataclasses.replace(t, name=f"{stage}.{t.name}@{copy}", recipe=None)
    return dataclasses.replace(made, shape=t.shape) if made else dataclasses.replace(t, name=f"{stage}.{t.name}")


def _roles(problems: Sequence[Problem], stage: int, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a product's outputs are for those behind it in its round."""
    if len(outputs) == 3:
        return dict(zip(("x", "expert_weights", "ids"), outputs, strict=True))
    router = stage + 1 < len(problems) and "logits" in problems[stage + 1].node.params["roles"]
    return {"logits" if router else "x": outputs[0]}
