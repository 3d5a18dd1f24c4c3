"""ARGMAX and the router of a mixture of experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.moe.topk import Argmax, TopkMoe
from vkback.shader import ShaderLibrary

CASES = [*Argmax().cases(), *TopkMoe().cases()]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [c for c in CASES if c.op == "ARGMAX" and c.params["ne"][0] < 5000], ids=lambda c: c.line)
@pytest.mark.parametrize(("wg_size", "per_thread"), [(16, 1), (128, 4)])
def test_argmax_over_many_workgroups(
    case: Case, wg_size: int, per_thread: int, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size, per_thread=per_thread))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [c for c in CASES if c.op == "TOPK_MOE"], ids=lambda c: c.line)
@pytest.mark.parametrize(("wg_size", "block"), [(32, 16), (128, 64)])
def test_router_in_blocks(case: Case, wg_size: int, block: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size, block=block))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [CASES[2], CASES[8], CASES[10]], ids=lambda c: c.line)
def test_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(with_params(ctx, wg_size=32)))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
def test_a_router_fed_nan_chooses_different_experts_and_shows_it(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    problem = TopkMoe().build_case(1, 16, 4, True, "softmax", 1.0, False, 1).build()
    problem.values["ffn_moe_logits"][0, 5:12] = np.nan
    got = run_problem(device, library, problem, ctx)
    assert len(set(got["ffn_moe_topk"][0])) == 4
    assert all(0 <= i < 16 for i in got["ffn_moe_topk"][0])
    assert np.isnan(got["ffn_moe_weights"]).any()


def router(n_expert: int, n_used: int, gating: str = "softmax") -> Node:
    outs = (Tensor("weights", "F32", (1, n_used)), Tensor("ids", "I32", (1, n_used)))
    params = {"n_used": n_used, "norm": True, "gating": gating, "scale": 1.0}
    return Node("TOPK_MOE", (Tensor("logits", "F32", (1, n_expert)),), outs, params)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (router(8, 9), "9 of 8 experts; expected at least 1"),
        (router(8, 2, "sqrtsoftplus"), "unknown gating 'sqrtsoftplus', expected one of sigmoid, softmax, softmax_weight"),
        (router(1 << 14, 8), "16384 experts need .* bytes of shared memory, .* has 49152"),
    ],
)
def test_what_is_refused(wrong: Node, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        TopkMoe().lower(wrong, planned_for("nvidia_h200_linux"))


def test_argmax_of_a_large_vocabulary_uses_many_workgroups() -> None:
    node = Argmax().build_case(ne=(262144,), seed=1).build().node
    ctx = planned_for("nvidia_h200_linux")
    (d,) = Argmax().lower(node, ctx)
    assert d.groups[0] >= 64
    (few,) = Argmax().lower(node, dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_workgroup_invocations=128)))
    assert few.groups[0] == 2 * d.groups[0]
