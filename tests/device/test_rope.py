"""RoPE, plain and fused with norms and cache stores."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.cases import find_case
from vkback.harness.runner import run_case, run_problem
from vkback.ops.case import Case, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.rope.angles import DEFAULTS
from vkback.shader import ShaderLibrary

CASES = [c for name in ("ROPE", "QKV_ROPE_SET_ROWS") for c in OPS[name].cases()]
NORMED = [find_case(c.line.replace("head_dim=256", "head_dim=128")) for c in CASES if c.params.get("norm")]
"""In test_ops.py heads of 256 values run as the tables say. Where a thread has several slots of those a CPU driver compiles for 8 s; with
heads of 128 for 1."""
PLAIN = [c for c in CASES if c.op != "ROPE" and not c.params["norm"] and not c.params["packed"]]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", NORMED, ids=lambda c: c.line)
@pytest.mark.parametrize(("wg_size", "heads"), [(16, 3), (64, 8)])
def test_several_heads_and_subgroups(
    case: Case, wg_size: int, heads: int, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size, heads_per_group=heads))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", NORMED, ids=lambda c: c.line)
def test_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(with_params(ctx, wg_size=16, heads_per_group=2)))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.line)
def test_fused_and_alone_give_the_same_bits(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    fused = case.build()
    q, pos = fused.node.inputs[0], fused.node.inputs[3]
    factors = [t for t in fused.node.inputs[6:] if t.name != "rows"]
    alone = Node("ROPE", (q, pos, *factors), fused.node.outputs[:1], fused.node.params)
    want = run_problem(device, library, Problem(alone, {t.name: fused.values[t.name] for t in alone.inputs}), ctx)["q_out"]
    got = run_problem(device, library, fused, ctx)["q_out"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("dim", "n_dims"), [(64, 30), (62, 32), (64, 128)])
def test_sizes_that_are_refused(dim: int, n_dims: int) -> None:
    x = Tensor("x", "F32", (1, 2, dim))
    node = Node("ROPE", (x, Tensor("pos", "I32", (1,))), (Tensor("y", "F32", x.shape),), {**DEFAULTS, "n_dims": n_dims})
    with pytest.raises(PlanError) as error:
        OPS["ROPE"].lower(node, planned_for("nvidia_h200_linux"))
    assert str(error.value) == (
        f"[ROPE] y: head size {dim} with n_dims {n_dims}: both must be multiples of 4, and 0 <= n_dims <= head size"
    )


def test_too_few_factors() -> None:
    x = Tensor("x", "F32", (1, 2, 64))
    inputs = (x, Tensor("pos", "I32", (1,)), Tensor("f", "F32", (16,)))
    node = Node("ROPE", inputs, (Tensor("y", "F32", x.shape),), {**DEFAULTS, "n_dims": 64})
    with pytest.raises(PlanError, match=r"\[ROPE\] y: frequency factors f F32\[16\]: expected n_dims / 2 = 32 values"):
        OPS["ROPE"].lower(node, planned_for("nvidia_h200_linux"))
