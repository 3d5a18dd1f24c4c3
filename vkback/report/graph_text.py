"""The listing of a graph as text: every node with operands, costs and the temporary storage alive, lifelines of values in the margin.

| <-------norm-0: rms_norm(x)              a value begins; its line goes down to its last use
| |         49152, [12288, 1]              bytes and shape, contiguous axis first (ggml's ne)
| |         costs: {'fmul': 24576, ...}    by kind (vkback/ops/cost.py); tempsize: bytes of temporary storage alive
>---------  x: inp_embd, 49152, [12288, 1] an operand, with the lifeline it comes from
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vkback.graph import Node, Tensor
from vkback.ops.cost import KINDS, Cost
from vkback.ops.op import Reshape, cost_rule
from vkback.ops.storage import nbytes
from vkback.plan.cost.liveness import Line, Listing

OPERANDS = "xyzuvwabcdefgh"


def ne(tensor: Tensor) -> list[int]:
    """A shape as ggml has it: contiguous axis first, at least two axes, no further ones of length 1."""
    shape = list(reversed(tensor.shape))
    while len(shape) > 2 and shape[-1] == 1:
        shape.pop()
    return shape + [1] * (2 - len(shape))


def formula(node: Node) -> str:
    """What a node does to its operands: "rms_norm(x)", "X*Y (MUL_MAT)"."""
    rule = cost_rule(node)
    if isinstance(rule, Reshape):
        return rule.shown(node)
    shown = rule.formula or f"{node.op.lower()}({', '.join(OPERANDS[: len(node.inputs)])})"
    return shown if shown.startswith(node.op.lower()) else f"{shown} ({node.op})"


def totals(peak: int, cost: Cost) -> list[str]:
    """What stands above the listing."""
    lines = [f"Size of temporary storage is up to {peak} bytes.", "Total cost:"]
    for kind in KINDS:
        if n := cost.get(kind, 0):
            lines.append(f"  {kind}: {_size(n)} ({n} bytes)" if kind in ("read", "write") else f"  {kind}: {n:g}")
    return lines


def text(whole: Listing, shown: Listing | None = None) -> Iterator[str]:
    """The lines of a listing: totals of the whole, then those of `shown` (by default the whole), then its nodes."""
    yield from totals(whole.peak, whole.cost)
    if shown is not None:
        layers = sorted({line.layer for line in shown.lines if line.layer is not None})
        yield f"Listed are layers {layers[0]} to {layers[-1]}:" if layers else "Listed is nothing."
        yield from (f"  {line}" for line in totals(shown.peak, shown.cost))
    yield from nodes(whole if shown is None else shown)


def nodes(listing: Listing) -> Iterator[str]:
    """The nodes alone."""
    width = 2 * listing.n_lanes
    layer: int | None = None
    for line in listing.lines:
        yield _margin(line.before, width)
        if line.layer is not None and line.layer != layer:
            layer = line.layer
            yield _margin(line.before, width) + f"== layer {layer} =="
            yield _margin(line.before, width)
        yield from _node(line, width)


def _node(line: Line, width: int) -> Iterator[str]:
    node, taken = line.node, list(line.before)
    used = [(t, lane) for t, lane in zip(node.outputs, line.lanes, strict=True)]
    shown = [used[0], *(u for u in used[1:] if u[1] is not None)]
    for number, (t, lane) in enumerate(shown):
        title = f"{t.name}: {formula(node)}" if number == 0 else f"{t.name}: {formula(node)}, output {node.outputs.index(t)}"
        if lane is None:
            yield _margin(taken, width) + title
        else:
            yield _arrow("<", lane, width, taken) + title
            taken.append(lane)
        yield _margin(taken, width) + f"  {nbytes(t)}, {ne(t)}"
    yield _margin(taken, width) + f"  costs: {dict(line.cost) | {'tempsize': line.alive}}"
    if not any(lane is not None for _, lane in used):
        yield _margin(taken, width) + "  not used by other computations"
    for at, (t, (lane, last)) in enumerate(zip(node.inputs, line.sources, strict=True)):
        about = f"  {OPERANDS[at]}: {t.name}, {nbytes(t)}, {ne(t)}" + (f", {t.type}" if t.kind == "weight" else "")
        if lane is None:
            yield _margin(taken, width) + about
            continue
        yield _arrow(">", lane, width, [other for other in taken if other < lane]) + about
        if last and not any(later == t for later in node.inputs[at + 1 :]):
            taken.remove(lane)


def _margin(taken: Sequence[int], width: int) -> str:
    return "".join("| " if lane in taken else "  " for lane in range(width // 2))


def _arrow(head: str, lane: int, width: int, taken: Sequence[int] = ()) -> str:
    """A lifeline's beginning or use: the lanes left of it, its head, and dashes to the text, which cross the lanes of `taken`."""
    left = "".join("| " if other in taken else "  " for other in range(lane))
    right = "".join("|-" if other in taken else "--" for other in range(lane + 1, width // 2))
    return left + head + "-" + right


def _size(nbytes: int) -> str:
    """In the unit that leaves digits to read."""
    unit, scale = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if nbytes >= s), ("GiB", 2**30))
    return f"{nbytes / scale:.3f} {unit}"
