"""Whole tokens of the built-in models against the float64 twin: what cases of single ops cannot see of a plan, its order and its memory.

A case plans a token (or a few at once), lays it out in memory as the engine does, and compares the logits. Between barriers the
dispatches of a stage are recorded in reverse: they may run in any order, and on a device that runs them one by one a missing barrier
shows only so. The memory of activations holds NaN before every run.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from vkback.device import Device
from vkback.evaluate.judge import Verdict, judge
from vkback.evaluate.twin import FLOAT, NumpyTwin
from vkback.models.registry import Model
from vkback.ops.case import Array, Tolerance
from vkback.ops.lowering import Act, LowerContext, PlanError, Sync
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import Program
from vkback.program.values import NAN_WORD
from vkback.shader import ShaderLibrary
from vkback.timing.stages import loaded
from vkback.tuning.lookup import Overrides, Tuning

N_CTX = 64
TOKENS = (1, 17, 300, 5, 42, 7, 99, 3, 250, 11, 23, 8)
"""Single tokens run through a model one after another; with rows_per_split = 4 the last has three splits of the cache."""

EIGHT_BITS = Tolerance(3e-4, 0.2, "activations of some thirty GEMVs in a row are rounded to eight bits, each an NMSE of 1.5e-5 to 4e-5")


@dataclass(frozen=True)
class TokenCase:
    """Tokens of a built-in model, n at once.

    router, norm  parameters of the [[schedule]] tables that change the plan
    ops           ops that the plan must have: what the case is there for
    """

    model: str
    n: int
    act: Act
    sync: Sync = "barrier"
    router: str = "gemv"
    norm: str = "prologue"
    ops: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        shown = (f.name for f in dataclasses.fields(self) if f.name != "ops")
        return f"TOKEN({','.join(f'{name}={getattr(self, name)}' for name in shown)})"

    @property
    def tolerance(self) -> Tolerance:
        return FLOAT if self.act == "f32" else EIGHT_BITS

    def context(self, device: Device) -> LowerContext:
        """Tables of the device, with many splits of the cache and the case's schedule."""
        params: dict[str, dict[str, Any]] = {
            "schedule": {"sync": self.sync, "router": self.router, "norm": self.norm},
            "attention": {"wg_size": 64, "groups": 64, "rows_per_split": 4},
        }
        return LowerContext(device.caps, Overrides(Tuning.for_device(device.caps), params, "the case's own parameters"), self.act)


CASES = (
    TokenCase("demo-dense", 1, "f32"),
    TokenCase("demo-moe", 1, "f32", router="experts"),
    TokenCase("demo-moe", 1, "f32", ops=frozenset({"MOE_ROUTER"})),
    TokenCase("demo-moe", 1, "auto", sync="sentinel", ops=frozenset({"MOE_ROUTER"})),
    TokenCase("demo-dense", 1, "auto", sync="sentinel"),
    TokenCase("demo-dense", 1, "f32", norm="stage"),
    TokenCase("demo-moe", 5, "f32", sync="sentinel"),
)
"""Part of what every build runs (tests/models/test_token_cases.py)."""


def planned(case: TokenCase, model: Model, device: Device) -> Schedule:
    """The schedule of a case, the dispatches of its stages in reverse where barriers stand between all stages. Raises PlanError where it
    lacks one of the case's ops."""
    schedule = plan(model.graph(case.n, N_CTX, head="last" if case.n == 1 else "all"), case.context(device))
    if missing := case.ops - {d.op for d in schedule.dispatches()}:
        raise PlanError(f"[token] {case.line}: the plan has no {', '.join(sorted(missing))}, which the case is there for")
    if schedule.barrier_free:
        return schedule
    return dataclasses.replace(schedule, stages=[stage[::-1] for stage in schedule.stages])


def run(case: TokenCase, device: Device, library: ShaderLibrary) -> Verdict:
    """Run the tokens and judge the logits of all of them."""
    model = Model.open(builtin_model(case.model))
    got, timed_out = logits(case, model, device, library)
    if timed_out:
        return Verdict(False, float("inf"), float("inf"), "a spin-wait timed out")
    return judge(got, NumpyTwin(model, n_ctx=N_CTX).logits(TOKENS[: len(got)]), case.tolerance)


def logits(case: TokenCase, model: Model, device: Device, library: ShaderLibrary) -> tuple[Array, bool]:
    """Logits [tokens, vocabulary] of the device, and whether a spin-wait timed out."""
    schedule = planned(case, model, device)
    rows = []
    with ExitStack() as stack:
        weights, ranges = loaded(model, schedule.tensors(), device, stack)
        program = Program(device, library, schedule, ranges, weights)
        stack.callback(program.close)
        commands = program.record(case.line)
        for first in range(0, len(TOKENS) if case.n == 1 else case.n, case.n):
            for name in schedule.slots:
                block = program.range(name)
                device.upload(block, np.full(block.size // 4, NAN_WORD, np.uint32))
            device.upload(ranges["tokens"], np.array(TOKENS[first : first + case.n], np.int32))
            device.upload(ranges["pos"], np.arange(first, first + case.n, dtype=np.int32))
            device.submit(commands).wait(600)
            rows.append(device.download(program.range("result_output"), np.float32)[: case.n * model.hp.n_vocab])
        return np.concatenate(rows).reshape(-1, model.hp.n_vocab), program.timed_out
