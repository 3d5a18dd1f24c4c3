"""Rows out of tables and into caches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback import quants
from vkback.device import Device
from vkback.evaluate.judge import nmse
from vkback.graph import Node, Tensor
from vkback.harness.cases import find_case
from vkback.harness.runner import run_case, run_problem
from vkback.ops.copies.rows import GetRows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.plan.schedule import into_stages
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
def test_a_table_in_shards(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """A binding of 64 KiB at most cuts the table into parts; ids lie in each of them."""
    small = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_storage_buffer_range=65536))
    case = GetRows().build_case("q8_0", 512, 500, 8, ids="spread")
    dispatches = OPS["GET_ROWS"].lower(case.build().node, small)
    assert len(dispatches) > 3
    assert len(into_stages(dispatches)) == 1
    outcome = run_case(device, library, case, small)
    assert outcome.ok, outcome.text


def test_a_cache_of_another_type_is_refused() -> None:
    cache = Tensor("cache", "I32", (2, 16, 64), "state")
    node = Node("SET_ROWS", (Tensor("x", "F32", (1, 2, 64)), Tensor("pos", "I32", (1,)), cache), (cache,))
    with pytest.raises(PlanError) as error:
        OPS["SET_ROWS"].lower(node, planned_for("nvidia_h200_linux"))
    assert str(error.value) == (
        "[SET_ROWS] cache: x F32[1, 2, 64] into cache I32[2, 16, 64]: expected a F16 or F32 cache of even rows, 1 tokens of its heads"
    )


@pytest.mark.vulkan
@pytest.mark.parametrize("kind", [name for name, t in quants.QUANTS.items() if t.codebook])
def test_rows_that_a_codebook_has_are_found_on_the_device(kind: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Values that blocks decode to: their scales, deltas, signs and indices vary as those of uniform values do not, and nearly all are
    found."""
    problem = find_case(f"SET_ROWS(type_src=f32,type_dst={kind.lower()},type_idx=i64,ne=[512,3,1,1],r=3)").build()
    x = quants.decode(kind, quants.random_blocks(kind, 3, 512, np.random.default_rng(8), std=1.0)).reshape(problem.values["x"].shape)
    stored = run_problem(device, library, dataclasses.replace(problem, values={**problem.values, "x": x}), ctx)["cache"]
    found = stored[:, :, problem.values["ids"].reshape(-1)]
    host = quants.decode(kind, quants.encode(kind, x.reshape(-1, 512))).reshape(x.shape)
    assert nmse(found, x) <= 2 * nmse(host, x), f"{nmse(found, x):.1e}, on the host {nmse(host, x):.1e}"
