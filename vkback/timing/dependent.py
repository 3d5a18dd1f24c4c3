"""Dependent GEMV chains: each GEMV reads what the one before made, as in a token. Timed with barriers and, where the tables say so,
barrier-free.

A round is what a feed-forward block reads: a GEMV of k columns after an RMS norm, whose m results it rounds to Q8_1, and a GEMV of m
columns that leads back to k. With experts a router's GEMV stands before the two; the first chooses experts by its logits, and the second
sums their results. Rounds follow each other with copies of the weights, so that no cache holds what a round reads.
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
from vkback.ops.case import Array, Problem
from vkback.ops.dispatch import ceil_div
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_cases import fused_case
from vkback.ops.storage import nbytes
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import Program, WeightRanges, compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.copies import copied_bytes, rotates, upload_copies
from vkback.timing.launches import COLD_BYTES, Measurement, span_us, stamp, summarize, warm_up

ROUNDS, SOFTWARE_ROUNDS = 64, 4
"""Rounds of one run. Its first stages have barriers whatever the tables say, and are few beside the others."""


@dataclass(frozen=True)
class DependentTiming:
    """Microseconds a round.

    barrier_free  as planned; None where the plan has no barrier-free stage
    barriers      with a barrier before every stage
    y             what the last GEMV made, F32 [k]
    wrong         why the barrier-free time counts for nothing; "" when it counts
    """

    barrier_free: Measurement | None
    barriers: Measurement
    y: Array
    wrong: str = ""


def round_problems(quant: str, m: int, k: int, experts: int = 0, used: int = 0) -> list[Problem]:
    """The GEMVs of a round, each by itself with made-up values; y of the last has as many elements as x of the first."""
    if not experts:
        return [fused_case(quant, m, k, 1, ("norm",), out="Q8_1").build(), fused_case(quant, k, m, 1, ()).build()]
    return [
        fused_case("F32", experts, k, 1, ("norm",)).build(),
        fused_case(quant, m, k, 1, ("norm", "logits"), out="Q8_1", experts=experts, used=used).build(),
        fused_case(quant, k, m, 1, ("ids", "expert_weights"), experts=experts, used=used).build(),
    ]


class DependentChain:
    """Rounds of dependent GEMVs on a device. Use as a context manager.

    rounds  in one run
    nbytes  of the weights that each GEMV of a round reads
    """

    def __init__(
        self, device: Device, library: ShaderLibrary, quant: str, m: int, k: int, *, experts: int = 0, used: int = 0, rounds: int = 0
    ) -> None:
        self.device, self.library = device, library
        self.rounds = rounds or (SOFTWARE_ROUNDS if device.caps.software else ROUNDS)
        problems = round_problems(quant, m, k, experts, used)
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
        """Weights in as many copies as a run takes turns with, and the first round's x."""
        values = {f"{s}.{name}": v for s, p in enumerate(problems) for name, v in p.values.items()}
        tensors = [t for t in self.graph.tensors().values() if t.kind in ("weight", "input")]
        device, caps = self.device, self.device.caps
        arena = self._stack.enter_context(device.arena("dependent GEMVs", copied_bytes(tensors, caps), "device"))
        self.ranges: dict[str, BufferRange] = {}
        self.weights: dict[str, WeightRanges] = {}
        same: dict[str, list[Tensor]] = {}
        for t in tensors:
            same.setdefault(t.name.partition("@")[0], []).append(t)
        for name, copies in same.items():
            for t, blocks in zip(copies, upload_copies(device, arena, caps, copies[0], values[name], len(copies)), strict=True):
                if t.kind == "input":
                    self.ranges[t.name] = blocks[0]
                else:
                    self.weights[t.name] = WeightRanges(blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compile(self, contexts: Sequence[LowerContext]) -> None:
        """Compile the kernels of several contexts in parallel."""
        compile_kernels(self.device, self.library, [d for ctx in contexts for d in self.plan(ctx).dispatches()])

    def plan(self, ctx: LowerContext) -> Schedule:
        return plan(self.graph, ctx)

    def time(self, ctx: LowerContext, *, repetitions: int = 6) -> DependentTiming:
        """A round's time as `ctx` plans it. Raises PlanError."""
        schedule = self.plan(ctx)
        program = Program(self.device, self.library, schedule, self.ranges, self.weights)
        try:
            barriers, y = self._measure(program, program.record("barriers", barriers=True), repetitions)
            if not schedule.barrier_free:
                return DependentTiming(None, barriers, y)
            barrier_free, y_barrier_free = self._measure(program, program.record("barrier_free"), repetitions)
            timed_out = program.timed_out
        finally:
            program.close()
        same = y.tobytes() == y_barrier_free.tobytes()
        wrong = "a spin-wait timed out" if timed_out else "" if same else "other results than with barriers"
        return DependentTiming(barrier_free, barriers, y, wrong)

    def _measure(self, program: Program, run: Commands, repetitions: int) -> tuple[Measurement, Array]:
        """Microseconds a round, and the last y."""
        warm_up(self.device, run, 0.05)
        times = [span_us(self.device, self._start, run, self._end) / self.rounds for _ in range(repetitions)]
        return summarize(times), self.device.download(program.range(self.graph.outputs[0].name), np.float32)


def _linked(problems: Sequence[Problem], rounds: int, copies: int) -> Graph:
    """Rounds of GEMVs, x of each round the y of the one before. Weights are named STAGE.NAME@COPY, the first x STAGE.NAME."""
    graph = Graph()
    x: Tensor | None = None
    for r in range(rounds):
        made: dict[str, Tensor] = {} if x is None else {"x": x}  # by its role for the GEMVs behind
        for s, problem in enumerate(problems):
            node = problem.node
            inputs = [_input(t, s, r % copies, made.get(role)) for role, t in zip(node.params["roles"], node.inputs, strict=True)]
            outputs = tuple(dataclasses.replace(t, name=f"{s}.{t.name} of {r}") for t in node.outputs)
            graph.add("LINEAR", tuple(inputs), outputs, **node.params)
            made = {"x": inputs[1]} | made | _roles(problems, s, outputs)
        x = outputs[0]
    graph.outputs = (outputs[0],)
    return graph


def _input(t: Tensor, stage: int, copy: int, made: Tensor | None) -> Tensor:
    """What a GEMV reads in the place of a tensor of its own: a copy of the weight, what an earlier one made, or the run's input."""
    if t.kind == "weight":
        return dataclasses.replace(t, name=f"{stage}.{t.name}@{copy}", recipe=None)
    return dataclasses.replace(made, shape=t.shape) if made else dataclasses.replace(t, name=f"{stage}.{t.name}")


def _roles(problems: Sequence[Problem], stage: int, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The outputs of a GEMV by their role for those behind it in its round."""
    if len(outputs) == 3:
        return dict(zip(("x", "expert_weights", "ids"), outputs, strict=True))
    router = stage + 1 < len(problems) and "logits" in problems[stage + 1].node.params["roles"]
    return {"logits" if router else "x": outputs[0]}
