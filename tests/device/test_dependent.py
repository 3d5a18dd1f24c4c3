"""GEMVs that read what the one before made: how rounds are linked, which stages are barrier-free, and what they compute."""

from __future__ import annotations

import dataclasses
from math import prod

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback import quants
from vkback.device import Device
from vkback.evaluate.judge import judge
from vkback.harness.cases import make_case
from vkback.harness.perf import has_rounds, time_cases
from vkback.ops.case import Array, Case, Tolerance
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case, mul_mat_id_case
from vkback.ops.op import OPS
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary
from vkback.timing.dependent import DependentChain, DependentTiming, round_problems
from vkback.timing.launches import Measurement
from vkback.tuning.lookup import Overrides, Tuning
from vkback.tuning.overrides import override_rows
from vkback.tuning.row import TuningError

WORD = {"schedule": {"sync": "sentinel"}}
DENSE, EXPERTS = (0, 0), (8, 3)


@pytest.mark.vulkan
@pytest.mark.parametrize("experts", [DENSE, EXPERTS])
def test_every_gemv_reads_what_the_one_before_made(device: Device, library: ShaderLibrary, experts: tuple[int, int]) -> None:
    with DependentChain(device, library, "Q4_K", 512, 256, experts=experts[0], used=experts[1], rounds=3) as dependent:
        graph = dependent.graph
    stages = 3 if experts[0] else 2
    assert len(graph.nodes) == 3 * stages and len(dependent.nbytes) == stages
    assert [t.name for t in graph.tensors().values() if t.kind == "input"] == ["0.x"]
    for before, node in zip(graph.nodes, graph.nodes[1:], strict=False):
        assert {t.name for t in before.outputs} & {t.name for t in node.inputs}
    assert graph.outputs == (graph.nodes[-1].outputs[0],)
    weights = [{t.name for t in n.inputs if t.kind == "weight"} for n in graph.nodes]
    assert all(len(names) in (1, 2) for names in weights)
    if experts[0]:
        router, first, second = graph.nodes[:3]
        assert dict(zip(first.params["roles"], first.inputs, strict=True))["logits"].name == router.outputs[0].name
        assert [t.name for t in second.inputs[1:]] == [first.outputs[i].name for i in (0, 2, 1)]


@pytest.mark.vulkan
@pytest.mark.parametrize("experts", [DENSE, EXPERTS])
def test_all_stages_are_barrier_free_where_the_tables_say_so(device: Device, library: ShaderLibrary, experts: tuple[int, int]) -> None:
    with DependentChain(device, library, "Q4_K", 512, 256, experts=experts[0], used=experts[1]) as dependent:
        schedule = plan(dependent.graph, planned_for("nvidia_h200_linux"))
    assert schedule.barrier_free == set(range(2, len(schedule.stages)))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", ["Q2_K", "MXFP4"])
@pytest.mark.parametrize("experts", [DENSE, EXPERTS])
def test_rounds_compute_the_chain_barrier_free_or_not(device: Device, library: ShaderLibrary, quant: str, experts: tuple[int, int]) -> None:
    ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
    word = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, WORD, "test"))
    with DependentChain(device, library, quant, 512, 256, experts=experts[0], used=experts[1], rounds=2) as dependent:
        apart, barrier_free = dependent.time(ctx, repetitions=1), dependent.time(word, repetitions=1)
    assert apart.barrier_free is None and apart.barriers.us > 0
    assert barrier_free.barrier_free is not None and barrier_free.barrier_free.us > 0 and not barrier_free.wrong
    tolerance = Tolerance(5e-3, 0.5, "two rounds of up to three GEMVs that round x to 8 bits: 4e-5 each, passed on by the next")
    for timing in (apart, barrier_free):
        verdict = judge(timing.y, chain(quant, 512, 256, *experts, rounds=2), tolerance)
        assert verdict.ok, verdict.text


def chain(quant: str, m: int, k: int, experts: int, used: int, rounds: int) -> Array:
    """The last y by the GEMVs' numpy references."""
    problems = round_problems(quant, m, k, experts, used)
    x = problems[0].values["x"]
    for _ in range(rounds):
        made: dict[str, Array] = {"x": x}
        for s, problem in enumerate(problems):
            inputs = []
            for role, t in zip(problem.node.params["roles"], problem.node.inputs, strict=True):
                value = problem.values[t.name] if t.kind == "weight" else made[role].reshape(t.shape)
                if t.kind == "weight" and len(t.shape) > 1:
                    value = quants.decode(t.type, value.reshape(prod(t.shape[:-1]), -1)).reshape(t.shape)
                inputs.append(value)
            found = OPS["LINEAR"].reference(inputs, problem.node.params)
            router = s == 0 and experts
            made |= {"logits": found[0]} if router else dict(zip(("x", "expert_weights", "ids"), found, strict=False))
        x = made["x"]
    return np.asarray(x).ravel()


@pytest.mark.parametrize(
    ("case", "has"),
    [
        (mul_mat_case("Q4_K", 512, 1, 256), True),
        (mul_mat_case("Q4_K", 512, 1, 256, type_b="q8_1"), True),
        (mul_mat_id_case("MXFP4", 8, 3, 96, 1, 256, shared=True), True),
        (mul_mat_case("Q4_K", 512, 2, 256), False),
        (mul_mat_case("Q4_K", 96, 1, 256), False),
        (mul_mat_case("F16", 512, 1, 256), False),
        (fused_case("Q4_K", 512, 256, 1, ("residual",)), False),
        (make_case("RMS_NORM", {"ne": (1, 256)}), False),
    ],
)
def test_which_cases_have_rounds(case: Case, has: bool) -> None:
    ctx = planned_for("nvidia_h200_linux")
    assert has_rounds(case, ctx) == has
    assert not has_rounds(case, dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"schedule": {"sync": "barrier"}}, "test")))


@pytest.mark.vulkan
def test_perf_mode_times_barrier_free_gemvs_where_the_tables_have_them(
    device: Device, library: ShaderLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
    word = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, WORD, "test"))
    cases = [mul_mat_case("Q4_K", 512, 2, 256), mul_mat_case("Q4_K", 512, 1, 256)]
    assert [r.barrier_free_us for r in time_cases(device, library, cases, ctx, 1.0, repetitions=1)] == [None, None]
    two, one = time_cases(device, library, cases, word, 1.0, repetitions=1)
    assert two.barrier_free_us is None and one.barrier_free_us is not None and one.barrier_free_us > 0 and one.passed is None
    other = DependentTiming(None, Measurement(1.0, 0.0), np.zeros(1), "other results")
    monkeypatch.setattr(DependentChain, "time", lambda self, ctx: other)
    two, one = time_cases(device, library, cases, word, 1.0, repetitions=1)
    assert two.passed is None and one.passed is False and one.time_us and "barrier-free among its neighbours: other results" in one.message


def test_overrides_are_checked_as_those_of_a_table() -> None:
    rows = override_rows("attention : wg_size=512 steps=2; gemv experts=each y=Q8_1 : wg=512 x_in_shared=true")
    assert [(r.family, dict(r.match), dict(r.set)) for r in rows] == [
        ("attention", {}, {"wg_size": 512, "steps": 2}),
        ("gemv", {"experts": "each", "y": "Q8_1"}, {"wg": 512, "x_in_shared": True}),
    ]
    assert override_rows("") == []
    with pytest.raises(TuningError, match="wg_siez"):
        override_rows("attention : wg_siez=512")


@pytest.mark.vulkan
def test_two_gemvs_of_the_same_rounds_are_timed_once(device: Device, library: ShaderLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
    word = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, WORD, "test"))
    timed: list[DependentChain] = []

    def once(self: DependentChain, ctx: LowerContext) -> DependentTiming:
        timed.append(self)
        return DependentTiming(Measurement(4.0, 0.0), Measurement(6.0, 0.0), np.zeros(1))

    monkeypatch.setattr(DependentChain, "time", once)
    cases = [mul_mat_case("Q4_K", m, 1, k) for m, k in ((512, 256), (256, 512))]
    assert [r.barrier_free_us for r in time_cases(device, library, cases, word, 1.0, repetitions=1)] == [2.0, 2.0]
    assert len(timed) == 1
