"""Ops of training: gradients against finite differences, equal bits in every run, and what no case of one op shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.cases import find_case, quick_cases
from vkback.harness.grad import BOUND, differences, graded, is_gradient
from vkback.harness.result import CaseResult
from vkback.harness.runner import Array, Workbench, prepare, run_problem
from vkback.ops.case import Case, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.rope.angles import DEFAULTS
from vkback.ops.training.glu_back import SiluBack
from vkback.ops.training.optimizers import adamw_params
from vkback.shader import ShaderLibrary

GRADIENTS = [case for case in quick_cases() if is_gradient(case)]


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.line)
def test_a_reference_is_the_gradient_of_its_scalar(case: Case) -> None:
    for d in differences(case):
        assert d.error <= BOUND, d.text


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the device agrees with it."""
    right = SiluBack.reference

    def wrong(self: SiluBack, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [1.01 * right(self, inputs, params)[0]]

    monkeypatch.setattr(SiluBack, "reference", wrong)
    case = find_case("SILU_BACK(type=f32,ne=[37,3,1,1],eps=0.000001)")
    (result,) = graded([CaseResult(op=case.op, line=case.line, mode="test", passed=True)], [case])
    assert not result.passed
    assert "dx: finite differences off by" in result.message


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "line",
    [
        "FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nr=3,n=67)",
        "GET_ROWS_BACK(type=f32,n=37,m=7,r=41,b=1,v=0)",
        "MUL_MAT_BACK(type_a=f32,m=1040,n=3,k=40,plain=1)",
        "RMS_NORM_WEIGHT_BACK(ne=[64,67,1,1])",
    ],
)
def test_reruns_have_equal_bits(line: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Of kernels whose sums come in parts."""
    with Workbench(device, library) as bench:
        prepared = prepare(find_case(line).build(), ctx)
        first = bench.run(prepared)
        for _ in range(3):
            again = bench.run(prepared)
            assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.vulkan
def test_rope_back_turns_rope_back(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """The node of a model's graph: [n, heads, head_dim] and the params of ROPE; attn_factor is applied twice."""
    params = {**DEFAULTS, "mode": "neox", "n_dims": 24, "attn_factor": 1.25}
    dy, pos = Tensor("dy", "F32", (5, 3, 32), "input"), Tensor("pos", "I32", (5,), "input")
    x = np.random.default_rng(1).uniform(-1, 1, dy.shape)
    (turned,) = OPS["ROPE"].reference([x, np.array([0, 7, 2, 500, 31])], params)
    problem = Problem(
        Node("ROPE_BACK", (dy, pos), (Tensor("dx", "F32", dy.shape),), params),
        {"dy": turned.astype(np.float32), "pos": np.array([0, 7, 2, 500, 31], np.int32)},
    )
    got = run_problem(device, library, problem, ctx)["dx"]
    want = x.copy()
    want[..., :24] *= 1.25**2
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.vulkan
def test_no_target_no_loss(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Rows that are all padding: a loss and a gradient of 0, not NaN."""
    logits, targets = Tensor("logits", "F32", (7, 1000), "input"), Tensor("targets", "I32", (7,), "input")
    values = {"logits": np.ones((7, 1000), np.float32), "targets": np.full(7, -1, np.int32), "dloss": np.ones(1, np.float32)}
    outputs = (Tensor("loss", "F32", (1,)), Tensor("lse", "F32", (7,)))
    loss = run_problem(device, library, Problem(Node("CROSS_ENTROPY_LOSS", (logits, targets), outputs), values), ctx)
    assert loss["loss"][0] == 0.0
    dloss, lse = (Tensor(name, "F32", shape, "input") for name, shape in (("dloss", (1,)), ("lse", (7,))))
    node = Node("CROSS_ENTROPY_LOSS_BACK", (dloss, logits, targets, lse), (logits,))
    got = run_problem(device, library, Problem(node, {**values, "lse": loss["lse"]}), ctx)["logits"]
    np.testing.assert_array_equal(got, np.zeros((7, 1000)))


def test_adamw_corrects_by_the_betas_that_the_device_has() -> None:
    """After the first step the corrected means are the gradient and its square to F32's precision, though 1 - 0.999 is not."""
    _, beta1, beta2, _, _, c1, c2 = adamw_params(1, 1e-3).astype(np.float64)
    assert abs((1 - beta1) * c1 - 1) < 1e-7
    assert abs((1 - beta2) * c2 - 1) < 1e-7


def test_a_stored_weight_in_shards_is_changed_by_rows() -> None:
    """Dispatches that touch other rows are no hazard to each other."""
    ctx = planned_for("nvidia_h200_linux")
    ctx = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_storage_buffer_range=1 << 20))
    w, dw = Tensor("w", "F32", (5000, 576), "weight"), Tensor("dw", "F32", (5000, 576))
    node = Node("OPT_STEP_SGD", (w, dw, Tensor("params", "F32", (2,), "input")), (w,))
    dispatches = OPS["OPT_STEP_SGD"].lower(node, ctx)
    assert len(dispatches) > 2
    assert len({part for d in dispatches for name, part in d.writes if name == "w"}) == 1
    assert sum(d.flops for d in dispatches) == 12 * w.elements


Shaped = tuple[int, ...]


def node_of(op: str, inputs: Sequence[Shaped], out: Shaped, ids: Sequence[int] = (), **params: Any) -> Node:
    """A node of F32 operands, but for those with these numbers, which are ids."""
    operands = tuple(Tensor(f"x{i}", "I32" if i in ids else "F32", shape) for i, shape in enumerate(inputs))
    return Node(op, operands, (Tensor("y", "F32", out),), params)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (node_of("MUL_MAT_BACK", ((3, 5), (4, 8)), (3, 8)), "expected dy [n, m]"),
        (node_of("FLASH_ATTN_LSE", ((6, 2, 8),) * 3, (6, 2, 8), sequences=4), "n of the sequences"),
        (node_of("CROSS_ENTROPY_LOSS", ((3, 5), (4,)), (1,), ids=[1], lse=False), "expected I32[3]"),
        (node_of("GET_ROWS_BACK", ((3, 5), (3,)), (9, 5), ids=[1], rows=8), "rows=9"),
    ],
)
def test_operands_that_do_not_fit_are_named(node: Node, says: str) -> None:
    if node.op == "FLASH_ATTN_LSE":
        node = dataclasses.replace(node, outputs=(*node.outputs, Tensor("lse", "F32", (6, 2))))
    with pytest.raises(PlanError, match="expected") as error:
        OPS[node.op].lower(node, planned_for("nvidia_h200_linux"))
    assert says in str(error.value)
