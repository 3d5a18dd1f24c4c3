"""Looks for what is wrong with a model that gives wrong text: the first node whose error is more than rounding explains, the nodes whose
own kernels are wrong, and the setting that cures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.node_compare import Comparison, Row, compare, compare_steps, sides, walked, with_own
from vkback.evaluate.node_run import Batch, NodeRun, graph_of, run_nodes
from vkback.harness.common import Facts, in_common, line_of_node, of_items
from vkback.harness.doctor import SWITCHES, Switch
from vkback.models.registry import Model
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.shader import ShaderLibrary

SHOWN = 8


@dataclass(frozen=True)
class ModelDiagnosis:
    """What came of it.

    first    the first node outside the band, None: all are within
    own      nodes whose own kernels are wrong, given the device's inputs
    cures    settings under which all nodes are within the band
    common   what the nodes of `own` share that the others have not
    line     the suite's line of the first of them, to fail alone
    nodes    how many were compared
    """

    first: Row | None
    own: tuple[Row, ...]
    cures: tuple[Switch, ...]
    nodes: int
    common: str = ""
    line: str = ""

    @property
    def verdict(self) -> str:
        if self.first is None:
            return f"all {self.nodes} nodes within the band: wrong text, if any, is not the device's doing"
        cause = (
            ", ".join(f"{r.name} ({r.op})" for r in self.own[:SHOWN]) or "none by itself: a barrier may be missing, or memory overwritten"
        )
        if not self.cures:
            return f"wrong from {self.first.name} on; kernels that are wrong: {cause}; no setting cures it"
        names = " or ".join(f'"{s.name}"' for s in self.cures)
        return f"wrong from {self.first.name} on; kernels that are wrong: {cause}; {names} cures it. Meanwhile: {self.cures[0].remedy}"


def examine_model(
    model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, batch: Batch, tell: Callable[[str], None]
) -> ModelDiagnosis:
    """Compare all nodes; where one is wrong, each node by itself, and then all under each switch. `tell` gets a line an event."""
    run, found = compared(model, device, library, ctx, batch)
    alone = compare_steps(model, run, batch, device.caps.name)
    own = tuple(r for r in alone.rows if r.outside)
    found = with_own(found, alone)
    tell(found.verdict)
    if found.first is None:
        return ModelDiagnosis(None, (), (), len(found.rows))
    for row in own[:SHOWN]:
        tell(f"its own kernel is wrong: {row.line}\n  {row.outside}")
    common, line = faulty(alone, run)
    if common:
        tell(f"in common: {common}")
    if line:
        tell(f"alone: vkback test-ops '{line}'")
    cures = []
    for switch in SWITCHES:
        said, cured = _under(switch, model, device, library, ctx, batch, run.schedule)
        tell(f"{switch.name}: {said}")
        cures += [switch] if cured else []
    return ModelDiagnosis(found.first, own, tuple(cures), len(found.rows), common, line)


def faulty(alone: Comparison, run: NodeRun) -> tuple[str, str]:
    """What the nodes share whose own kernels are wrong, and the suite's line of the first that has one. alone: of `compare_steps`."""
    known = of_items(run)

    def of(row: Row) -> Facts:
        return known[row.name][1] if row.name in known else {"op": row.op}

    wrong = [row for row in alone.rows if row.outside]
    common = in_common([of(row) for row in wrong], [of(row) for row in alone.rows if not row.outside])
    return common, next((line for row in wrong if row.name in known and (line := line_of_node(known[row.name][0]))), "")


def _under(
    switch: Switch, model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, batch: Batch, before: Schedule
) -> tuple[str, bool]:
    """What a switch does to a model that is wrong, in words, and whether it cures it."""
    changed, fusion = (switch.change(ctx), "all") if switch.change else (ctx, "none")
    try:
        planned = plan(graph_of(model, batch), changed, fusion=fusion)
        if _kernels(planned) == _kernels(before):
            return "the same kernels", False
        run, found = compared(model, device, library, changed, batch, fusion)
        first = with_own(found, compare_steps(model, run, batch, device.caps.name)).first
    except VkbackError as e:
        return f"cannot be run: {e}", False
    return ("cures it", True) if first is None else (f"wrong from {first.name} on", False)


def _kernels(schedule: Schedule) -> list[object]:
    return [(d.kernel, d.groups) for d in schedule.dispatches()]


def compared(
    model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, batch: Batch, fusion: str = "all"
) -> tuple[NodeRun, Comparison]:
    """A run on the device, and its nodes beside numpy's."""
    run = run_nodes(model, device, library, ctx, batch, fusion=fusion)
    return run, compare(*sides(run, walked(model, run, batch), batch, device.caps.name, {}))
