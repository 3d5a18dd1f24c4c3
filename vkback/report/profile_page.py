"""A profile as one HTML page that needs nothing else: tree of modules, timeline, roofline, heatmap and a table of all kernels, by phase.

Pictures are SVG inside the page; titles of their parts show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from vkback.report.profile_text import gap_text, overhead_text, totals
from vkback.timing.modules import Module
from vkback.timing.profile import KernelCost, Phase
from vkback.timing.profile_model import Profile

COLORS = {
    "attn": "#3b6fb6", "ffn": "#d9822b", "ssm": "#7a52a3", "norm": "#8a8a8a", "output": "#2f8f5b", "token_embd": "#5aa9a2",
    "sample": "#b04a6a", "other": "#6b7280",
}  # fmt: skip
"""By group of modules."""

STYLE = """
:root { color-scheme: light; font: 14px/1.45 system-ui, sans-serif; color: #1c2330; background: #f6f7f9; }
body { margin: 0 auto; max-width: 1180px; padding: 20px 24px 60px; }
h1 { font-size: 21px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 22px 0 8px; }
p { margin: 2px 0; color: #475063; } .cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.card { background: #fff; border: 1px solid #dde1e8; border-radius: 8px; padding: 8px 14px; min-width: 118px; }
.card b { display: block; font-size: 18px; } .card span { color: #5b6475; font-size: 12px; }
nav { display: flex; gap: 6px; border-bottom: 2px solid #d5dae3; margin-top: 18px; }
nav button { font: inherit; border: 0; background: none; padding: 7px 14px; cursor: pointer; color: #475063; }
nav button.on { color: #1c2330; font-weight: 600; border-bottom: 3px solid #3b6fb6; margin-bottom: -2px; }
section { display: none; } section.on { display: block; }
.panel { background: #fff; border: 1px solid #dde1e8; border-radius: 8px; padding: 12px; overflow-x: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 14px; font-size: 12px; color: #475063; margin-bottom: 6px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 8px; white-space: nowrap; } th { position: sticky; top: 0; background: #fff; color: #5b6475; }
th:first-child, td:first-child, .left { text-align: left; } tbody tr:hover { background: #eef2f8; }
.scroll { max-height: 420px; overflow-y: auto; padding: 0 12px; }
.tree summary, .tree .leaf { display: grid; grid-template-columns: minmax(220px, 1fr) 170px repeat(4, 88px) 62px; gap: 6px; }
.tree summary { cursor: pointer; } .tree summary:hover, .tree .leaf:hover { background: #eef2f8; }
.tree summary span:first-child::before { content: "\\25b8"; margin: 0 4px 0 -13px; color: #8a93a3; }
.tree details[open] > summary span:first-child::before { content: "\\25be"; } .tree summary { list-style: none; }
.tree span { text-align: right; font-variant-numeric: tabular-nums; font-size: 12.5px; } .tree span:first-child { text-align: left; }
.tree .head { font-weight: 600; color: #5b6475; } .bar { background: #e8ecf3; height: 9px; margin-top: 6px; border-radius: 2px; }
.bar div { height: 9px; border-radius: 2px; background: #3b6fb6; } svg text { font: 11px system-ui, sans-serif; fill: #475063; }
input[type=range] { width: 220px; vertical-align: middle; }
"""

SCRIPT = """
function show(n) {
  document.querySelectorAll('section').forEach((s, i) => s.classList.toggle('on', i === n));
  document.querySelectorAll('nav button').forEach((b, i) => b.classList.toggle('on', i === n));
}
document.querySelectorAll('nav button').forEach((b, i) => b.addEventListener('click', () => show(i)));
document.querySelectorAll('input[type=range]').forEach(r => r.addEventListener('input', () => {
  r.closest('.panel').querySelector('svg').style.width = (100 * r.value) + '%';
}));
show(document.querySelectorAll('section').length > 1 ? +document.body.dataset.first : 0);
"""


def page(profile: Profile) -> str:
    """The whole page."""
    first = next((i for i, p in enumerate(profile.phases) if p.name.startswith("decode")), 0)
    tabs = "".join(f"<button>{escape(p.name)}</button>" for p in profile.phases)
    sections = "".join(f"<section>{''.join(_phase(p, profile))}</section>" for p in profile.phases)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(profile.model)} on {escape(profile.device)}</title><style>{STYLE}</style></head>"
        f'<body data-first="{first}">{_head(profile)}<nav>{tabs}</nav>{sections}<script>{SCRIPT}</script></body></html>\n'
    )


def _head(profile: Profile) -> str:
    s = profile.speeds
    cards = [
        (f"{s.decode_rate:.1f} t/s", "decode"), (f"{s.prefill_rate:.0f} t/s", f"prefill of {s.prompt_tokens}"),
        (f"{1e3 * s.ttft_s:.1f} ms", "to the first token"), (f"{s.load_s:.2f} s", f"load, {profile.model_bytes / 2**30:.2f} GiB"),
        (f"{s.compile_s:.1f} s", f"{s.kernels} kernels, {s.compiled} compiled"), (f"{profile.costs.read_gb_s:.1f} GB/s", "read rate"),
    ]  # fmt: skip
    if profile.math:
        cards.append((f"{profile.math.tflops:.2f} TFLOPS", f"math rate, {profile.math.way}"))
    shown = "".join(f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in cards)
    shape = f"{profile.n_layer} layers of {profile.n_embd}, {profile.n_ctx} rows of cache, act {profile.act}"
    about = f"{profile.device}, {profile.driver}; {shape}"
    return f'<h1>{escape(profile.model)}</h1><p>{escape(about)}</p><div class="cards">{shown}</div>'


def _phase(phase: Phase, profile: Profile) -> Iterator[str]:
    yield f"<h2>{escape(phase.name)}: {phase.gpu_us / phase.runs / 1e3:.3f} ms a run on the GPU, by {escape(phase.method)}</h2>"
    wall = f"{phase.wall_us / phase.runs / 1e3:.3f} ms wall of the same replays: {gap_text(phase)}"
    for line in (wall, overhead_text(phase), f"forecast {phase.predicted_us / phase.runs / 1e3:.3f} ms a run", *phase.notes):
        yield f"<p>{escape(line)}</p>"
    yield f'<h2>Timeline of the last run</h2><div class="panel">{_legend(phase)}{timeline(phase)}</div>'
    yield f'<h2>Roofline</h2><div class="panel">{roofline(phase, profile)}</div>'
    yield f'<h2>Microseconds a run by layer and module</h2><div class="panel">{heatmap(phase)}</div>'
    yield f'<h2>Modules</h2><div class="panel tree">{_tree(phase.tree(profile.model.split()[0]), phase)}</div>'
    yield f'<h2>Kernels, forecast and measured</h2><div class="panel scroll">{_table(phase, profile)}</div>'


def group_of(path: Sequence[str]) -> str:
    """The group of a module, for its colour."""
    if path[0] == "blk":
        leaf = path[2] if len(path) > 2 else "other"
        return leaf if leaf in COLORS else "norm" if "norm" in leaf else "other"
    return path[0] if path[0] in COLORS else "norm" if "norm" in path[0] else "other"


def _legend(phase: Phase) -> str:
    used = dict.fromkeys(group_of(k.modules[0].path) for k in phase.kernels)
    items = "".join(f'<span><i style="background:{COLORS[g]}"></i>{g}</span>' for g in used)
    return f'<div class="legend">{items}<label>zoom <input type="range" min="1" max="24" step="0.5" value="1"></label></div>'


WIDTH = 1120


def timeline(phase: Phase) -> str:
    """Kernels of the last run as bars; those of one stage below each other."""
    end = max((k.start_us + k.took_us for k in phase.kernels), default=1.0) or 1.0
    row: dict[int, int] = {}
    bars = []
    for k in phase.kernels:
        lane = row[k.stage] = row.get(k.stage, -1) + 1
        x, width = WIDTH * k.start_us / end, max(0.4, WIDTH * k.took_us / end - 0.3)
        bars.append(
            f'<rect x="{x:.2f}" y="{4 + 30 * lane}" width="{width:.2f}" height="26" fill="{COLORS[group_of(k.modules[0].path)]}">'
            f"<title>{escape(_title(k))}</title></rect>"
        )
    height = 30 * (1 + max(row.values(), default=0)) + 26
    step = _nice(end / 8)
    ticks = "".join(
        f'<line x1="{WIDTH * t / end:.1f}" x2="{WIDTH * t / end:.1f}" y1="0" y2="{height - 20}" stroke="#e3e7ee"/>'
        for t in _steps(0.0, end, step)
    )
    labels = "".join(
        f'<span style="position:absolute;left:{100 * t / end:.2f}%;font-size:11px;color:#5b6475">{t:g} us</span>'
        for t in _steps(0.0, end * 0.97, step)
    )
    return (
        f'<div style="overflow-x:auto"><svg viewBox="0 0 {WIDTH} {height - 18}" preserveAspectRatio="none" role="img" '
        f'aria-label="timeline" style="width:100%;height:{height - 18}px;display:block">{ticks}{"".join(bars)}</svg></div>'
        f'<div style="position:relative;height:16px">{labels}</div>'
    )


def _title(k: KernelCost) -> str:
    return (
        f"{k.name} ({k.label}, stage {k.stage})\n{k.took_us:.2f} us, {k.gb_s:.1f} GB/s, {k.gflops:.1f} GFLOPS\n"
        f"forecast {k.predicted_us / k.runs:.2f} us\n{k.dispatch.reason}"
    )


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= step * 0.999)


def _steps(begin: float, end: float, step: float) -> list[float]:
    return [begin + i * step for i in range(int((end - begin) / step) + 1)]


def roofline(phase: Phase, profile: Profile) -> str:
    """Kernels by name, all layers together: operations a byte against operations a second, below the roof of read rate and math rate; a
    circle's area is its part of the time."""
    found = [t for t in totals(phase.kernels, layers=False) if t.flops > 0 and t.gpu_us > 0 and t.nbytes > 0]
    if not found:
        return "<p>no kernel of this phase counts operations</p>"
    rate, peak = profile.costs.read_gb_s, profile.math.flops_per_second / 1e9 if profile.math else math.inf
    xs = [t.flops / t.nbytes for t in found]
    ys = [t.flops / t.gpu_us / 1e3 for t in found]
    ridge = peak / rate if math.isfinite(peak) else max(xs)
    x0, x1 = math.floor(math.log10(min(xs)) - 0.2), math.ceil(math.log10(max(*xs, 2 * ridge)) + 0.05)
    top = max(*ys, peak if math.isfinite(peak) else 0.0, min(rate * 10.0**x1, 4 * max(ys)))
    y0, y1 = math.floor(math.log10(min(ys)) - 0.1), math.ceil(math.log10(top) + 0.05)
    left, right, upper, lower = 62, 1100, 14, 350

    def at_x(v: float) -> float:
        return left + (right - left) * (math.log10(v) - x0) / (x1 - x0)

    def at_y(v: float) -> float:
        return lower - (lower - upper) * (math.log10(v) - y0) / (y1 - y0)

    parts = []
    for e in range(x0, x1 + 1):
        x = at_x(10.0**e)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{upper}" y2="{lower}" stroke="#e3e7ee"/>')
        parts.append(f'<text x="{x:.1f}" y="{lower + 16}" text-anchor="middle">{10.0**e:g}</text>')
    for e in range(y0, y1 + 1):
        y = at_y(10.0**e)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e7ee"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**e:g}</text>')
    begin_x = max(10.0**x0, 10.0**y0 / rate)
    turn = min(ridge if math.isfinite(peak) else math.inf, 10.0**x1, 10.0**y1 / rate)
    roof = [(begin_x, rate * begin_x), (turn, rate * turn)]
    if math.isfinite(peak):
        roof.append((10.0**x1, peak))
    points = " ".join(f"{at_x(x):.1f},{at_y(min(y, 10.0**y1)):.1f}" for x, y in roof)
    parts.append(f'<polyline points="{points}" fill="none" stroke="#b3261e" stroke-width="2"/>')
    near = begin_x**0.15 * turn**0.85
    parts.append(f'<text x="{at_x(near) + 8:.1f}" y="{at_y(rate * near) + 16:.1f}">{rate:.4g} GB/s</text>')
    if math.isfinite(peak):
        parts.append(f'<text x="{right - 4}" y="{at_y(peak) - 6:.1f}" text-anchor="end">{peak:.4g} GFLOPS</text>')
    groups = {k.kind: group_of(k.modules[0].path) for k in phase.kernels}
    whole = phase.gpu_us
    named = {t.name for t in found[:4]}
    for t, x, y in zip(found, xs, ys, strict=True):
        radius = 3 + 26 * math.sqrt(t.gpu_us / whole)
        title = f"{t.name}\n{t.gpu_us / whole:.1%} of the time, {t.gb_s:.1f} GB/s, {y:.1f} GFLOPS, {x:.3g} operations a byte"
        parts.append(
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="{radius:.1f}" fill="{COLORS[groups[t.name]]}" fill-opacity="0.45" '
            f'stroke="{COLORS[groups[t.name]]}"><title>{escape(title)}</title></circle>'
        )
    taken: list[float] = []
    for t, x, y in zip(found, xs, ys, strict=True):
        if t.name in named:
            down = at_y(y) + 4
            while any(abs(down - other) < 13 for other in taken):
                down += 13
            taken.append(down)
            parts.append(f'<text x="{at_x(x) + 8 + 26 * math.sqrt(t.gpu_us / whole):.1f}" y="{down:.1f}">{escape(t.name)}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{lower + 34}" text-anchor="middle">operations a byte of memory</text>')
    parts.append(
        f'<text x="14" y="{(upper + lower) / 2}" transform="rotate(-90 14 {(upper + lower) / 2})" text-anchor="middle">GFLOPS</text>'
    )
    return f'<svg viewBox="0 0 1120 392" width="100%" role="img" aria-label="roofline">{"".join(parts)}</svg>'


def heatmap(phase: Phase) -> str:
    """Time by layer (columns) and module (rows)."""
    cells: dict[tuple[str, str], float] = {}
    layers: dict[str, None] = {}
    rows: dict[str, None] = {}
    for k in phase.kernels:
        for s in k.modules:
            if s.path[0] == "blk":
                row = ".".join(s.path[2:]) or "other"
                row = "attention" if row == "attn" else row
                layers[s.path[1]] = rows[row] = None
                cells[row, s.path[1]] = cells.get((row, s.path[1]), 0.0) + s.part * k.gpu_us / phase.runs
    if not cells:
        return "<p>no kernel belongs to a layer</p>"
    most = max(cells.values())
    left, size, height = 130, min(34.0, 920 / len(layers)), 22
    parts = []
    for r, row in enumerate(sorted(rows)):
        y = 4 + r * height
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(row)}</text>')
        for c, layer in enumerate(sorted(layers, key=int)):
            value = cells.get((row, layer))
            if value is None:
                continue
            title = f"layer {layer}, {row}: {value:.2f} us"
            parts.append(
                f'<rect x="{left + c * size:.1f}" y="{y}" width="{size - 1:.1f}" height="{height - 2}" fill="{_heat(value / most)}">'
                f"<title>{escape(title)}</title></rect>"
            )
    bottom = 4 + len(rows) * height
    every = max(1, -(-len(layers) // 24))
    for c, layer in enumerate(sorted(layers, key=int)):
        if c % every == 0:
            parts.append(f'<text x="{left + (c + 0.5) * size:.1f}" y="{bottom + 14}" text-anchor="middle">{layer}</text>')
    x = left + len(layers) * size + 24
    for i in range(20):
        parts.append(f'<rect x="{x:.1f}" y="{4 + (bottom - 8) * i / 20:.1f}" width="12" height="{(bottom - 8) / 20 + 0.6:.1f}" '
                     f'fill="{_heat(1 - i / 19)}"/>')  # fmt: skip
    parts.append(f'<text x="{x + 17:.1f}" y="14">{most:.1f} us</text><text x="{x + 17:.1f}" y="{bottom - 4}">0</text>')
    return (
        f'<svg viewBox="0 0 {max(x + 96, 700):.0f} {bottom + 22}" width="{max(x + 96, 700):.0f}" role="img" aria-label="heatmap">'
        f"{''.join(parts)}</svg>"
    )


HEAT = ((246, 248, 252), (158, 199, 226), (62, 132, 189), (30, 72, 138), (13, 30, 76))
"""Colours from 0 to the most."""


def _heat(share: float) -> str:
    at = max(0.0, min(1.0, share)) * (len(HEAT) - 1)
    i = min(int(at), len(HEAT) - 2)
    mixed = [round(a + (b - a) * (at - i)) for a, b in zip(HEAT[i], HEAT[i + 1], strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


def _tree(top: Module, phase: Phase) -> str:
    head = "".join(f"<span>{h}</span>" for h in ("Module", "", "Self GPU", "GPU total", "Self CPU", "CPU total", "Calls"))
    return f'<div class="leaf head">{head}</div>{_branch(top, top.total_gpu_us or 1.0, 0)}'


def _branch(m: Module, whole: float, depth: int) -> str:
    own = m.own_calls > 0
    if not own and not m.parts:
        cells = ["fused", "", "", "", ""]
    else:
        cells = [_us(m.gpu_us) if own else "", _us(m.total_gpu_us), _us(m.cpu_us) if own else "", _us(m.total_cpu_us), str(m.calls)]
    hint = f' title="fused into {escape(m.fused_into)}"' if m.fused_into and not own else ""
    row = (
        f'<span style="padding-left:{16 * depth + 14}px"{hint}>{escape(m.name)}</span>'
        f'<div class="bar"><div style="width:{100 * m.total_gpu_us / whole:.2f}%"></div></div>'
        + "".join(f"<span>{c}</span>" for c in cells)
    )
    if not m.parts:
        return f'<div class="leaf">{row}</div>'
    inside = "".join(_branch(part, whole, depth + 1) for part in m.parts.values())
    return f"<details{' open' if depth < 2 else ''}><summary>{row}</summary>{inside}</details>"


def _us(us: float) -> str:
    return f"{us / 1e3:.3f} ms"


def _table(phase: Phase, profile: Profile) -> str:
    """A line a kernel, in their order."""
    rows = []
    for k in phase.kernels:
        measured, forecast = k.gpu_us / k.runs, k.predicted_us / k.runs
        cells = (
            f"{k.stage}", f"{measured:.2f}", f"{forecast:.2f}", f"{measured / forecast:.2f}" if forecast else "", f"{k.nbytes / 1e3:.1f}",
            f"{k.gb_s:.1f}", f"{100 * k.gb_s / profile.costs.read_gb_s:.1f}",
        )  # fmt: skip
        rows.append(
            f"<tr><td>{escape(k.label)}</td><td class='left'>{escape(k.name)}</td>"
            + "".join(f"<td>{c}</td>" for c in cells)
            + f"<td class='left'>{escape(k.dispatch.reason)}</td></tr>"
        )
    heads = ("node", "kernel", "stage", "us", "forecast", "x", "kB", "GB/s", "% of rate", "why this variant")
    head = "".join(f"<th{' class=left' if h in ('kernel', 'why this variant') else ''}>{h}</th>" for h in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
