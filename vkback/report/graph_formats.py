"""A listing (vkback/plan/cost/liveness.py) as lines, JSON, Graphviz and HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from vkback.graph import Tensor
from vkback.ops.cost import KINDS, total
from vkback.ops.storage import nbytes
from vkback.plan.cost.liveness import Line, Listing
from vkback.report.graph_text import formula, ne, nodes
from vkback.units import size_text

Facts = Mapping[str, Any]
"""About the model and the batch, by name: what stands at the top of a JSON or HTML listing."""


def brief(listing: Listing) -> Iterator[str]:
    """A line a node: op, results, operands; shapes as in vkback's graphs, contiguous axis last."""
    for number, line in enumerate(listing.lines):
        node = line.node
        yield f"{number:4} {node.op:16} {', '.join(map(str, node.outputs)):40} <- {', '.join(map(str, node.inputs))}"


def as_data(facts: Facts, whole: Listing, shown: Listing) -> dict[str, Any]:
    """The listing as plain values. ne: shape, contiguous axis first; bytes of temporary storage alive as temporary_bytes."""
    return {
        **facts,
        "peak_temporary_bytes": whole.peak,
        "total": whole.cost,
        "nodes": [
            {
                "name": line.node.name,
                "op": line.node.op,
                "formula": formula(line.node),
                "layer": line.layer,
                "cost": dict(line.cost),
                "temporary_bytes": line.alive,
                "outputs": [_tensor(t) for t in line.node.outputs],
                "operands": [{**_tensor(t), "last_use": last} for t, (_, last) in zip(line.node.inputs, line.sources, strict=True)],
            }
            for line in shown.lines
        ],
    }


def _tensor(t: Tensor) -> dict[str, Any]:
    return {"name": t.name, "kind": t.kind, "type": t.type, "ne": ne(t), "bytes": nbytes(t)}


def dot(facts: Facts, listing: Listing) -> Iterator[str]:
    """For Graphviz: a box a node, a frame a layer, an arrow for each value with its bytes, dashed to and from caches. Weights are named in
    the box of the node that reads them."""
    yield "digraph model {"
    yield f'  label="{facts["description"]}, {_tokens(facts)}"; labelloc=t; node [shape=box, fontname="monospace", fontsize=10];'
    numbers: dict[str, int] = {}
    arrows: list[str] = []
    states: dict[str, Tensor] = {}
    layer: int | None = None
    for number, line in enumerate(listing.lines):
        if line.layer != layer:
            if layer is not None:
                yield "  }"
            if line.layer is not None:
                yield f'  subgraph cluster_{number} {{ label="layer {line.layer}";'
            layer = line.layer
        node = line.node
        label = [node.name, formula(node), *(f"{t.name} {t.type}" for t in node.inputs if t.kind == "weight")]
        label.append(", ".join(f"{kind} {n}" for kind, n in line.cost.items()) or "no cost")
        yield f"  n{number} [label={_quoted(label)}];"
        for t in node.inputs:
            if t.kind == "node" and t.name in numbers:
                arrows.append(f'  n{numbers[t.name]} -> n{number} [label="{nbytes(t)}"];')
            elif t.kind == "state":
                states[t.name] = t
                arrows.append(f"  {_quoted([t.name])} -> n{number} [style=dashed];")
        for t in node.outputs:
            if t.kind == "state":
                states[t.name] = t
                arrows.append(f"  n{number} -> {_quoted([t.name])} [style=dashed];")
            else:
                numbers[t.name] = number
    if layer is not None:
        yield "  }"
    for name in states:
        yield f"  {_quoted([name])} [shape=cylinder];"
    yield from arrows
    yield "}"


def _tokens(facts: Facts) -> str:
    return "1 token" if facts["n_tokens"] == 1 else f"{facts['n_tokens']} tokens"


def _quoted(lines: list[str]) -> str:
    """Lines of text as a Graphviz string."""
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'


def shares(listing: Listing) -> list[tuple[str, dict[str, int]]]:
    """Costs summed over layers, by name without the layer's number, most bytes read first."""
    groups: dict[str, list[Line]] = {}
    for line in listing.lines:
        groups.setdefault(re.sub(r"-\d+\b|_l\d+\b", "", line.node.name), []).append(line)
    sums = {name: total(line.cost for line in lines) for name, lines in groups.items()}
    return sorted(((n, c) for n, c in sums.items() if c), key=lambda item: (-item[1].get("read", 0), -item[1].get("fmul", 0)))


STYLE = """
:root { color-scheme: light dark; --line: #8888; --bar: #4c78a8; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.bar { display: inline-block; height: .7em; background: var(--bar); vertical-align: baseline; }
pre { font: 12px/1.25 ui-monospace, monospace; overflow-x: auto; }
svg { width: 100%; min-width: 640px; height: auto; }
.wide { overflow-x: auto; } td { white-space: nowrap; }
summary { cursor: pointer; }
"""


def html(facts: Facts, whole: Listing, shown: Listing) -> Iterator[str]:
    """One page that needs nothing else: totals, where reads and products go, temporary storage as a picture, and the listing by layers."""
    title = escape(f"{facts['description']}, {_tokens(facts)}, {facts['n_kv']} rows of cache in use")
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    yield f"<title>{title}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield f"<p>Peak of temporary storage: {whole.peak} bytes. Read: {size_text(whole.cost.get('read', 0))}.</p>"
    heads = "".join(f"<th>{kind}</th>" for kind in KINDS)
    yield f'<h2>Where it goes</h2><div class="wide"><table><tr><th>node</th>{heads}<th>share of reads</th></tr>'
    most = max(whole.cost.get("read", 0), 1)
    rows = [("all", whole.cost), *shares(whole)]
    for name, cost in rows:
        share = cost.get("read", 0) / most
        bar = f'<td style="text-align:left"><span class="bar" style="width:{8 * share:.2f}rem"></span> {100 * share:.1f} %</td>'
        yield f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{_grouped(cost.get(kind, 0))}</td>" for kind in KINDS) + f"{bar}</tr>"
    parts: dict[int | None, list[Line]] = {}
    for line in shown.lines:
        parts.setdefault(line.layer, []).append(line)
    peak = max(parts.values(), key=lambda lines: max(line.alive for line in lines), default=[])
    where = "outside the layers" if not peak or peak[0].layer is None else f"of layer {peak[0].layer}"
    yield f"</table></div><h2>Temporary storage alive at the nodes {where}, where it is largest</h2>"
    yield f'<div class="wide">{_picture(peak)}</div>'
    yield "<h2>Nodes</h2>"
    for layer, lines in parts.items():
        part = Listing(tuple(lines), shown.n_lanes)
        name = "outside the layers" if layer is None else f"layer {layer}"
        cost = part.cost
        opened = " open" if layer in (None, min((x for x in parts if x is not None), default=None)) else ""
        yield (
            f"<details{opened}><summary>{name}: {len(lines)} nodes, {size_text(cost.get('read', 0))} read, "
            f"fmul {cost.get('fmul', 0):g}, at most {part.peak} bytes alive</summary>"
        )
        yield "<pre>" + escape("\n".join(nodes(part))) + "</pre></details>"
    yield "</body></html>"


def _grouped(n: int) -> str:
    """A count with narrow spaces between thousands; nothing for 0."""
    return f"{n:,}".replace(",", "&#8239;") if n else ""


WIDTH, HEIGHT, LEFT, BOTTOM = 1000, 330, 90, 110


def _picture(lines: Sequence[Line]) -> str:
    """Bytes of temporary storage alive at some nodes, as SVG: a bar a node, its name below."""
    step, peak = (WIDTH - LEFT - 10) / max(len(lines), 1), max((line.alive for line in lines), default=0) or 1

    def y(nbytes: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 12) * nbytes / peak

    ticks = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(n):.1f}" y2="{y(n):.1f}" stroke="#8888" stroke-width=".5"/>'
        f'<text x="{LEFT - 6}" y="{y(n) + 4:.1f}" text-anchor="end">{n / 1024:.1f} KiB</text>'
        for n in (0, peak / 2, peak)
    )
    bars = "".join(
        f'<rect x="{LEFT + i * step + 1:.1f}" y="{y(line.alive):.1f}" width="{step - 2:.1f}" height="{y(0) - y(line.alive):.1f}" '
        f'fill="#4c78a8"><title>{escape(line.node.name)}: {line.alive} bytes</title></rect>'
        f'<text text-anchor="end" transform="translate({LEFT + (i + 0.65) * step:.1f},{y(0) + 10:.1f}) rotate(-55)">'
        f"{escape(line.node.name)}</text>"
        for i, line in enumerate(lines)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" font-size="10" fill="currentColor" role="img" aria-label="temporary storage alive by node">'
        f"{ticks}{bars}</svg>"
    )
