"""From a graph to a schedule: fuse, drop what nobody reads, lower, check limits, group into stages, lay out memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vkback.device import Capabilities
from vkback.graph import Graph, Node, live
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext, PlanError, Sync
from vkback.ops.matmul.pack_nodes import LOWER
from vkback.ops.op import OPS
from vkback.ops.rope.rope import ANGLES
from vkback.ops.storage import nbytes, shards
from vkback.plan.exact import arithmetic_as_written
from vkback.plan.passes.choose import choices_of
from vkback.plan.passes.fuse import fuse
from vkback.plan.passes.heads import store_by_products
from vkback.plan.passes.pack import pack_activations
from vkback.plan.passes.training import PACKING, fuse_training
from vkback.plan.schedule import (
    Schedule,
    Slot,
    allocate,
    allocate_unaliased,
    in_one_block,
    into_stages,
    with_side_results_late,
    without_repeats,
)
from vkback.plan.schedule_choice import schedule_choice
from vkback.plan.sync import without_barriers


def plan(graph: Graph, ctx: LowerContext, *, fusion: str = "all", ahead: int | None = None, crossing: Collection[str] = ()) -> Schedule:
    """The schedule of a graph on one device: a pure function of its arguments.

    fusion    "all", "none" (each op by itself) or "training" (vkback/plan/passes/training.py)
    ahead     a node runs at most so many stages before the nodes that precede it in the graph, even if it could run earlier: a training
              step needs the least memory with 0
    crossing  names of inputs that layers on another device make, and of outputs that they read: what reads such inputs is planned as if
              stage 0 made them, with the kernels that it would have with all layers on one device, those that spin-wait on them, too
    Raises PlanError naming the node when an op is unknown or cannot run on the device.
    """
    nodes, ctx = fused_nodes(graph, ctx, fusion=fusion)
    if fusion == "all":
        nodes = store_by_products(pack_activations(nodes, graph.outputs, ctx), ctx)
    dispatches: list[Dispatch] = []
    for node in nodes:
        op = OPS.get(node.op)
        lower = LOWER.get(node.op) or (op.lower if op else None)
        if lower is None:
            raise PlanError(f"[plan] {node.name}: op {node.op} has no kernel; known are {', '.join(sorted(OPS))}")
        dispatches.extend(lower(node, ctx))
    dispatches = without_repeats(dispatches, {ANGLES, PACKING} if fusion == "training" else {ANGLES})
    if ctx.exact:
        dispatches = arithmetic_as_written(dispatches)
    spins = ctx.sync == "sentinel"
    schedule = Schedule(into_stages(dispatches, ahead=ahead, given=crossing if spins else ()))
    if spins:
        # Angles cannot spin-wait: they stay in front, where barriers are.
        late = with_side_results_late(schedule.stages, [t.name for t in graph.outputs], {ANGLES})
        ways = [schedule.stages] if late == schedule.stages else [schedule.stages, late]
        tried = [without_barriers(Schedule(stages), ctx.caps.max_storage_bindings, crossing) for stages in ways]
        schedule = max(tried, key=lambda s: len(s.barrier_free))
    for dispatch in schedule.dispatches():
        check_limits(dispatch, ctx.caps)
    block = ctx.caps.largest_buffer
    own = schedule.sentinel_tensors | schedule.counted_tensors
    slots, size = allocate(schedule.stages, [t.name for t in graph.outputs], own, block, schedule.barrier_free)
    counted, size, _ = _unaliased_in_a_block(schedule, schedule.counted_tensors, size, block)
    spun_on, end, first = _unaliased_in_a_block(schedule, schedule.sentinel_tensors, size, block)
    return dataclasses.replace(
        schedule,
        choices=tuple(choices_of(nodes)),
        slots=slots | counted | spun_on,
        activation_bytes=end,
        sentinel_range=Slot(first, end - first),
        block_bytes=block,
    )


def _unaliased_in_a_block(schedule: Schedule, names: frozenset[str], start: int, block: int) -> tuple[dict[str, Slot], int, int]:
    """Slots for tensors that share memory with no other, all in one block; where they end and where they begin."""
    slots, end = allocate_unaliased(schedule.stages, names, start)
    if (first := in_one_block(start, max(1, end - start), block)) != start:
        slots, end = allocate_unaliased(schedule.stages, names, first)
    return slots, end, first


def fused_nodes(graph: Graph, ctx: LowerContext, *, fusion: str = "all") -> tuple[list[Node], LowerContext]:
    """The nodes that `plan` lowers, before activations of prompts are packed, and the context with the synchronization that the tables
    choose. Every node has a reference."""
    sync: Sync = schedule_choice(graph.nodes, ctx)["sync"] if fusion == "all" else "barrier"
    ctx = dataclasses.replace(ctx, sync=sync)
    if fusion == "training":
        nodes = fuse_training(fuse(graph, ctx, level="none"), [t.name for t in graph.outputs], ctx)
    else:
        nodes = fuse(graph, ctx, level=fusion)
    return live(nodes, graph.outputs), ctx


def check_limits(dispatch: Dispatch, caps: Capabilities) -> None:
    """Raises PlanError naming node, limit and values if a dispatch needs more than the device has.

    Checked here, before anything is loaded. A shader's threads and features are known only once it is compiled;
    the kernel cache checks those.
    """
    where = f"[plan] {dispatch.label} ({dispatch.op}) on {caps.name}"
    if any(g > most for g, most in zip(dispatch.groups, caps.max_workgroup_count, strict=True)):
        raise PlanError(
            f"{where}: {dispatch.groups} workgroups, the device takes {caps.max_workgroup_count} (maxComputeWorkGroupCount); take fewer "
            "tokens at once"
        )
    if len(dispatch.push) > caps.max_push_constants:
        raise PlanError(f"{where}: {len(dispatch.push)} bytes of push constants, the device takes {caps.max_push_constants}")
    if len(dispatch.args) > caps.max_storage_bindings:
        raise PlanError(
            f"{where}: {len(dispatch.args)} storage buffers, the device takes {caps.max_storage_bindings} "
            "(maxPerStageDescriptorStorageBuffers)"
        )
    for arg in dispatch.args:
        size = bound_bytes(arg, caps)
        if size > caps.max_storage_buffer_range:
            cure = ". Use a smaller context (--ctx)" if arg.tensor.kind == "state" else ""
            raise PlanError(
                f"{where}: {arg.tensor} takes {size} bytes, the device binds at most {caps.max_storage_buffer_range} at once "
                f"(maxStorageBufferRange){cure}"
            )


def bound_bytes(arg: Arg, caps: Capabilities) -> int:
    """Bytes of the buffer range that an argument is bound to."""
    if arg.tensor.kind == "weight" and len(arg.tensor.shape) > 1:
        return shards(arg.tensor, caps)[arg.shard].layout.nbytes
    return nbytes(arg.tensor)
