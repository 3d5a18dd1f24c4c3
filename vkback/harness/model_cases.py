"""A model's own nodes as cases: each kind of node (op, types, shape, kernel) is judged by its reference, on the inputs that it has in the
model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vkback.device import Device
from vkback.evaluate.node_compare import Row, compare_steps
from vkback.evaluate.node_run import Batch, NodeRun, run_nodes
from vkback.harness.common import line_of_node, of_items
from vkback.harness.result import CaseResult
from vkback.models.registry import Model
from vkback.ops.lowering import LowerContext
from vkback.shader import ShaderLibrary


@dataclass(frozen=True)
class NodeCase:
    """Nodes of one kind. names: of their outputs; the worst of them gives the figures."""

    text: str
    names: tuple[str, ...]
    worst: Row
    kernel: str
    line: str

    @property
    def result(self) -> CaseResult:
        """As the result of a case. Its line names the first node that is wrong, else the first."""
        row = self.worst
        return CaseResult(
            op=row.op,
            line=self.text,
            mode="test",
            passed=not row.outside,
            message=f"{row.name}: {row.outside}" if row.outside else "",
            detail=f"NMSE {row.nmse:.2e} of {row.limit:.0e}, worst {row.worst:.2g} rms of {row.worst_limit:.2g}, in {row.name}",
            nmse=row.nmse,
            worst=row.worst,
            tolerance_nmse=row.limit,
            tolerance_worst=row.worst_limit,
            kernel=self.kernel,
        )


def model_cases(model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, batch: Batch) -> Iterator[NodeCase]:
    """Run a batch on the device, and judge its nodes by kind, in the order of the model."""
    run = run_nodes(model, device, library, ctx, batch)
    yield from by_kind(compare_steps(model, run, batch, device.caps.name).rows, run, batch.n)


def by_kind(rows: list[Row], run: NodeRun, tokens: int) -> Iterator[NodeCase]:
    """rows: of each node by itself."""
    known = of_items(run)
    kinds: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        own = known[row.name][1] if row.name in known else {"op": row.op}
        kinds.setdefault(tuple(own.items()), []).append(row)
    badness: Callable[[Row], tuple[bool, float]] = lambda r: (bool(r.outside), r.nmse / r.limit if r.limit else r.nmse)  # noqa: E731
    for kind, own_rows in kinds.items():
        told = dict(kind)
        worst = max(own_rows, key=badness)
        shown = ",".join(f"{key}={told[key].replace(' ', '')}" for key in ("type_a", "weights", "output") if key in told)
        first = worst if worst.outside else own_rows[0]
        text = f"{told['op']}({shown}{',' * bool(shown)}n={tokens},node={first.name.partition(' ')[0]},nodes={len(own_rows)})"
        yield NodeCase(
            text,
            tuple(r.name for r in own_rows),
            worst,
            told.get("kernel", ""),
            line_of_node(known[worst.name][0]) if worst.name in known else "",
        )
