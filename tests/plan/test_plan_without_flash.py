"""Plans with attention as nodes of its own."""

from __future__ import annotations

import dataclasses

import pytest
from kernel_paths import planned_for
from tiny_models import TINY

from vkback.models import Model
from vkback.models.synth import outline
from vkback.ops.lowering import PlanError
from vkback.plan.planner import fused_nodes, plan

CHAIN = ("kq", "kq_soft_max", "kqv", "kqv_out")
"""As llama.cpp names them."""


@pytest.mark.parametrize("fusion", ["all", "none"])
@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("name", TINY)
def test_every_attention_is_three_nodes(name: str, n: int, fusion: str) -> None:
    ctx = dataclasses.replace(planned_for("nvidia_h200_linux"), flash=False)
    graph = Model.of(outline(f"{name}-Q8_0")).graph(n, 64, head="all")
    layers = [node.name.removeprefix("kqv_out") for node in graph.nodes if node.op == "FLASH_ATTN_EXT"]
    made = {t.name: node for node in fused_nodes(graph, ctx, fusion=fusion)[0] for t in node.outputs}
    assert not {"FLASH_ATTN_EXT", "ATTN_DECODE"} & {node.op for node in made.values()}
    for layer in layers:
        assert [made[f"{part}{layer}"].op for part in CHAIN] == ["MUL_MAT_KQ", "SOFT_MAX_KQ", "MUL_MAT_KQV", "CONT"]
    assert {f"{part}{layer}" for part in CHAIN for layer in layers} <= {d.label for d in plan(graph, ctx, fusion=fusion).dispatches()}


def test_scores_that_a_device_cannot_bind_say_what_to_do() -> None:
    ctx = planned_for("nvidia_h200_linux")
    small = dataclasses.replace(ctx, flash=False, caps=dataclasses.replace(ctx.caps, max_storage_buffer_range=1 << 16))
    graph = Model.of(outline("tiny-llama-Q8_0")).graph(64, 512, head="all")
    with pytest.raises(
        PlanError, match=r"kq-0 F32\[3, 64, 512\]: 393216 bytes, .* binds at most 65536 at once.*fewer tokens at once \(-ub"
    ):
        plan(graph, small, fusion="none")
