"""Schedules of models for devices that are not here, and what holds for each."""

from __future__ import annotations

from typing import Literal

from vkback.device import Capabilities
from vkback.engine.sampler import add_sampler
from vkback.models import Model
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import bound_bytes, plan
from vkback.plan.schedule import Schedule

LARGE = ("llama-8b-Q4_K_S", "qwen3moe-30b-a3b-Q4_K_S")


Kind = Literal["greedy", "sample", "prompt"]


N_CTX = 4096


def schedule(model: Model, ctx: LowerContext, kind: Kind, *, n_ctx: int = N_CTX, fusion: str = "all") -> Schedule:
    """What the engine plans for one generated token, or for a piece of a prompt."""
    if kind == "prompt":
        return plan(model.graph(16, n_ctx, head="none"), ctx, fusion=fusion)
    graph = model.graph(1, n_ctx, head="last")
    add_sampler(graph, greedy=kind == "greedy")
    return plan(graph, ctx, fusion=fusion)


def check_device_limits(s: Schedule, caps: Capabilities) -> None:
    for d in s.dispatches():
        assert len(d.push) <= min(128, caps.max_push_constants), d.label
        assert len(d.args) <= caps.max_storage_bindings, d.label
        assert all(0 < g <= most for g, most in zip(d.groups, caps.max_workgroup_count, strict=True)), d.label
        for arg in d.args:
            assert bound_bytes(arg, caps) <= min(caps.max_storage_buffer_range, caps.max_buffer_size, caps.max_allocation_size), d.label
        size = d.kernel.subgroup_size
        if size is not None:
            assert caps.subgroup_required_size and caps.subgroup_min <= size <= caps.subgroup_max, d.label
