"""Norm, router product and the choice of experts in one launch."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.cli.tune_families import of_model
from vkback.device import Device
from vkback.graph import Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.models.registry import Model
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.moe.router import MoeRouter, router_case
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
@pytest.mark.parametrize("shared", [False, True], ids=["subgroup", "shared"])
@pytest.mark.parametrize(("wg", "lanes", "rows"), [(8, 8, 1), (64, 8, 2), (32, 32, 4)])
def test_any_number_of_workgroups(
    wg: int, lanes: int, rows: int, shared: bool, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    shape = {"wg": wg, "lanes": lanes, "rows": rows, "unroll": 1, "prefetch": "none", "groups": "per_tile", "block": 16}
    fixed = with_params(without_subgroups(ctx) if shared else ctx, **shape)
    outcome = run_case(device, library, router_case(60, 512, 4, True, "softmax", True, 3), fixed)
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
def test_the_largest_logit_is_found_in_every_workgroup_s_rows(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Also shows that the last to arrive sees what every other workgroup wrote."""
    problem = router_case(40, 256, 1, True, "softmax", True, 5).build()
    for best in range(0, 40, 3):
        bias = np.full(40, -50.0, np.float32)
        bias[best] = 50.0
        chosen = run_problem(device, library, dataclasses.replace(problem, values={**problem.values, "bias": bias}), ctx)["ids"]
        assert chosen.tolist() == [[best]]


def test_it_takes_a_stage_less(model: Model) -> None:
    found, moved, weights = {}, {}, {}
    for router in ("gemv", "stage"):
        ctx = with_params(planned_for("amd_rx_7900_xtx_radv"), router=router)
        s = plan(model.graph(1, 512, head="last"), ctx)
        found[router] = len(s.stages), Counter(d.op for d in s.dispatches())
        moved[router] = sum(d.nbytes for d in s.dispatches() if d.weight_bytes)
        weights[router] = s.weight_bytes
    layers = model.hp.n_layer
    assert found["stage"][0] - found["gemv"][0] == layers
    assert found["gemv"][1]["MOE_ROUTER"] == found["stage"][1]["TOPK_MOE"] == layers
    assert "TOPK_MOE" not in found["gemv"][1]
    chosen = 8 * model.hp.n_expert_used  # weights and ids, which then belong to the launch that reads the router
    assert moved["gemv"] == moved["stage"] + layers * chosen
    assert weights["gemv"] == weights["stage"]


def test_its_product_is_tuned_like_any_other() -> None:
    found = {r: dict(of_model("demo-moe", 1, with_params(planned_for("amd_rx_7900_xtx_radv"), router=r))) for r in ("gemv", "stage")}
    assert found["gemv"] == found["stage"]
    assert any(p.quant == "F32" and "norm" in p.roles for p in found["gemv"])


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.open(builtin_model("demo-moe"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w, x: (w, dataclasses.replace(x, shape=(2, *x.shape[1:]))), "it takes one token, got 2"),
        (lambda w, x: (dataclasses.replace(w, type="Q8_0"), x), "logits of Q8_0 weights are rounded to 8 bits"),
    ],
)
def test_what_it_does_not_take_is_said(change: object, text: str) -> None:
    node = router_case(8, 256, 2, True, "softmax", False, 1).build().node
    w, x = change(*node.inputs[:2])  # type: ignore[operator]
    with pytest.raises(PlanError, match=text):
        MoeRouter().lower(dataclasses.replace(node, inputs=(w, x, *node.inputs[2:])), planned_for("nvidia_h200_linux"))


def test_too_many_experts_for_the_device(ctx: LowerContext) -> None:
    h200 = planned_for("nvidia_h200_linux")
    small = dataclasses.replace(h200, caps=dataclasses.replace(h200.caps, max_shared_memory=10 << 10))
    node = router_case(512, 2048, 8, True, "softmax", False, 1).build().node
    assert isinstance(node.inputs[0], Tensor)
    with pytest.raises(PlanError, match=r"512 experts need .* bytes of shared memory"):
        MoeRouter().lower(node, small)
