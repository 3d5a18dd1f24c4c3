"""Whole tokens of the built-in models against the twin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from device_kit import profile

from vkback.device import Device
from vkback.harness.token_cases import CASES, TokenCase, planned, run
from vkback.models import Model
from vkback.ops.lowering import PlanError
from vkback.paths import builtin_model
from vkback.shader import ShaderLibrary
from vkback.tuning.row import TuningError


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: TokenCase, device: Device, library: ShaderLibrary) -> None:
    verdict = run(case, device, library)
    assert verdict.ok, verdict.text


def plan_of(case: TokenCase) -> set[str]:
    """The ops of a case's plan, without a device."""
    device = cast(Device, SimpleNamespace(caps=profile("nvidia_h200_linux")))
    return {d.op for d in planned(case, Model.open(builtin_model(case.model)), device).dispatches()}


def test_each_router_is_planned() -> None:
    ops = [plan_of(case) for case in CASES if case.model == "demo-moe"]
    assert any("MOE_ROUTER" in found for found in ops)
    assert any("TOPK_MOE" in found for found in ops)
    assert any(not found & {"MOE_ROUTER", "TOPK_MOE"} for found in ops), "no case has experts chosen by the experts' GEMV"


def test_a_word_that_no_table_has_is_refused() -> None:
    says = r"the case's own parameters: schedule: router = product is not legal, expected one of gemv, experts, stage"
    with pytest.raises(TuningError, match=says):
        plan_of(TokenCase("demo-moe", 1, "f32", router="product"))


def test_a_plan_without_what_the_case_is_for_is_refused() -> None:
    case = TokenCase("demo-moe", 1, "f32", router="stage", ops=frozenset({"MOE_ROUTER"}))
    with pytest.raises(PlanError, match=r"\[token\] TOKEN\(.*\): the plan has no MOE_ROUTER"):
        plan_of(case)
