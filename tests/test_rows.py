"""Rows out of tables and into caches."""

from __future__ import annotations

import dataclasses

import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.base import OPS, LowerContext, PlanError
from vkback.ops.rows import GetRows
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
