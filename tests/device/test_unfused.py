"""Fusions and the chains of plain nodes that they stand for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.graph import Node
from vkback.harness.cases import full_cases, make_case
from vkback.harness.result import CaseResult
from vkback.harness.runner import prepare
from vkback.harness.suite import Suite
from vkback.harness.unfused import unfused_tolerance
from vkback.ops.case import Case, Problem
from vkback.ops.case_line import parse_line
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_cases import mul_mat_case
from vkback.ops.op import OPS, Op
from vkback.shader import ShaderLibrary

FULL = list(full_cases())
H200 = planned_for("nvidia_h200_linux")


FUSIONS = sorted(name for name, op in OPS.items() if type(op).unfused is not Op.unfused)


@pytest.mark.parametrize("op", FUSIONS)
def test_chains_make_the_outputs_of_the_fused_op_and_can_be_planned(op: str) -> None:
    """Every seventh case, and further ones of an op until one is a fusion."""
    chains, cases = 0, [c for c in FULL if c.op == op]
    for number, case in enumerate([*cases[::7], *cases]):
        if number >= len(cases[::7]) and chains:
            break
        problem = case.build()
        nodes = OPS[op].unfused(problem.node)
        chains += bool(nodes)
        if nodes:
            made = {t.name: t for n in nodes for t in n.outputs}
            assert all(made[t.name].type == t.type and made[t.name].shape == t.shape for t in problem.node.outputs)
            assert all(n.op != op or not OPS[op].unfused(n) for n in nodes)
            assert prepare(problem, H200, nodes).outputs == problem.node.outputs
    assert chains


def test_fused_and_unfused_must_agree_better_than_eight_bits() -> None:
    node = make_case("LINEAR", parse_line("X(type_a=Q4_K,m=64,n=1,k=256,fused=residual)")[1]).build().node
    eight = dataclasses.replace(H200, act="q8_1")
    assert unfused_tolerance(node, OPS["LINEAR"].unfused(node), eight).nmse < OPS["LINEAR"].tolerance(node, eight).nmse / 10


def test_plain_ops_have_no_chain() -> None:
    assert OPS["MUL_MAT"].unfused(mul_mat_case("Q4_K", 8, 1, 256).build().node) == []


def outcome(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> CaseResult:
    with Suite(device, library, ctx) as opened:
        return opened.run_one(case).result


@pytest.mark.vulkan
def test_a_fusion_that_differs_from_its_chain_within_the_op_s_tolerance(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that leaves out the addition of a small residual: 8-bit tolerance against numpy would hide it."""
    usual = make_case("LINEAR", parse_line("X(type_a=Q8_0,m=64,n=1,k=2048,fused=residual,act=q8_1)")[1])

    def small(rng: np.random.Generator) -> Problem:
        problem = usual.make(rng)
        return Problem(problem.node, {**problem.values, "residual": np.float32(0.1) * problem.values["residual"]})

    case = dataclasses.replace(usual, make=small)
    assert outcome(case, device, library, ctx).passed

    def without_residual(node: Node) -> list[Node]:
        by = dict(zip(node.params["roles"], node.inputs, strict=True))
        return [Node("MUL_MAT", (by["w"], by["x"]), node.outputs)]

    monkeypatch.setattr(OPS["LINEAR"], "unfused", without_residual)
    result = outcome(case, device, library, ctx)
    assert result.passed is False
    assert result.message.startswith("[LINEAR] y against the unfused run: NMSE ")
    assert "y: NMSE" in result.detail and "<=" in result.detail
