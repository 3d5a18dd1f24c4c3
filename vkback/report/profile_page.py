"""A profile as one HTML page that needs nothing else: tree of modules, timeline, roofline, heatmap and a table of all kernels, by phase.

Its script draws the pictures as SVG from figures that it holds once; titles of their parts show on hover.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vkback.report.profile_course import course, picture
from vkback.report.profile_text import decoding, gap_text, memory_text, overhead_text
from vkback.report.roles import totals
from vkback.timing.modules import Module
from vkback.timing.profile import Phase
from vkback.timing.profile_model import Profile
from vkback.units import size_text

COLORS = {
    "attn": "#3b6fb6",
    "ffn": "#d9822b",
    "ssm": "#7a52a3",
    "norm": "#8a8a8a",
    "output": "#2f8f5b",
    "token_embd": "#5aa9a2",
    "sample": "#b04a6a",
    "other": "#6b7280",
}
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
.legend i, .legends i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
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
input[type=range] { width: 220px; vertical-align: middle; } .zoom { overflow-x: auto; }
.zoom .wide, .zoom > svg { min-width: 640px; }
.ticks { position: relative; height: 16px; font-size: 11px; color: #5b6475; }
"""

SCRIPT = r"""
const D = JSON.parse(document.getElementById('data').textContent), S = D.strings;
const esc = t => String(t).replace(/[&<>"]/g, c => ({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'}[c]));
const ms = us => us == null ? '' : (us / 1e3).toFixed(3) + ' ms';
const nice = step => { const p = 10 ** Math.floor(Math.log10(step || 1)); return p * [1, 2, 5, 10].find(f => f * p >= step * 0.999); };
const rate = (n, us) => us > 0 ? n / us / 1e3 : 0;
const heat = x => {
  const c = D.heat, at = Math.min(1, Math.max(0, x)) * (c.length - 1), i = Math.min(Math.floor(at), c.length - 2);
  return 'rgb(' + c[i].map((v, n) => Math.round(v + (c[i + 1][n] - v) * (at - i))) + ')';
};
const rect = (x, y, w, h, fill, title) =>
  `<rect x="${x.toFixed(1)}" y="${y}" width="${w.toFixed(1)}" height="${h}" fill="${fill}"><title>${esc(title)}</title></rect>`;
const text = (x, y, anchor, t) => `<text x="${x.toFixed(1)}" y="${y}" text-anchor="${anchor}">${esc(t)}</text>`;

// A kernel: [stage, node, name, reason, group, us a run, forecast, bytes, flops, start, took]; texts by their place in S.
function timeline(p) {
  const W = 1120, end = Math.max(1e-9, ...p.kernels.map(k => k[9] + k[10])), lanes = {};
  let out = '', lines = '', labels = '';
  for (const k of p.kernels) {
    const lane = lanes[k[0]] = (lanes[k[0]] ?? -1) + 1;
    const title = `${S[k[2]]} (${S[k[1]]}, stage ${k[0]})\n${k[10].toFixed(2)} us, ${rate(k[7], k[5]).toFixed(1)} GB/s, ` +
      `${rate(k[8], k[5]).toFixed(1)} GFLOPS\nforecast ${k[6].toFixed(2)} us\n${S[k[3]]}`;
    out += rect(W * k[9] / end, 4 + 30 * lane, Math.max(0.4, W * k[10] / end - 0.3), 26, D.colors[k[4]], title);
  }
  const height = 30 * (1 + Math.max(0, ...Object.values(lanes))) + 8, step = nice(end / 8);
  for (let t = 0; t <= end; t += step) {
    const x = (W * t / end).toFixed(1), us = +t.toPrecision(6);
    lines += `<line x1="${x}" x2="${x}" y1="0" y2="${height - 2}" stroke="#e3e7ee"/>`;
    if (t < 0.97 * end) labels += `<span style="position:absolute;left:${(100 * t / end).toFixed(2)}%">${us} us</span>`;
  }
  const used = [...new Set(p.kernels.map(k => k[4]))].map(g => `<span><i style="background:${D.colors[g]}"></i>${g}</span>`).join('');
  return `<div class="legend">${used}<label>zoom <input type="range" min="1" max="24" step="0.5" value="1"></label></div>` +
    `<div class="zoom"><div class="wide"><svg viewBox="0 0 ${W} ${height}" preserveAspectRatio="none" role="img" aria-label="timeline" ` +
    `style="width:100%;height:${height}px;display:block">${lines}${out}</svg><div class="ticks">${labels}</div></div></div>`;
}
function heatmap(p) {
  const names = Object.keys(p.layers).sort();
  if (!names.length) return '<p>no kernel belongs to a layer</p>';
  const count = Math.max(...names.map(n => p.layers[n].length)), most = Math.max(...names.flatMap(n => p.layers[n]));
  const left = 8 + 7 * Math.max(...names.map(n => n.length)), size = Math.min(34, 900 / count), bottom = 4 + 22 * names.length;
  let out = '';
  names.forEach((name, r) => {
    out += text(left - 6, 19 + 22 * r, 'end', name);
    p.layers[name].forEach((us, c) => {
      if (us != null) out += rect(left + c * size, 4 + 22 * r, size - 1, 20, heat(us / most), `layer ${c}, ${name}: ${us.toFixed(2)} us`);
    });
  });
  for (let c = 0; c < count; c += Math.ceil(count / 24)) out += text(left + (c + 0.5) * size, bottom + 14, 'middle', c);
  const x = left + count * size + 24, h = (bottom - 8) / 20;
  for (let i = 0; i < 20; i++)
    out += `<rect x="${x}" y="${(4 + h * i).toFixed(1)}" width="12" height="${(h + 0.6).toFixed(1)}" fill="${heat(1 - i / 19)}"/>`;
  out += text(x + 17, 14, 'start', most.toFixed(1) + ' us') + text(x + 17, bottom - 4, 'start', '0');
  const width = Math.max(x + 96, 700).toFixed(0);
  return `<svg viewBox="0 0 ${width} ${bottom + 22}" width="${width}" role="img" aria-label="heatmap">${out}</svg>`;
}
// A module: [name, own GPU us, with its parts, own CPU us, with its parts, calls, fused into, parts]
function branch(m, whole, depth) {
  const [name, gpu, gpus, cpu, cpus, calls, fused, parts] = m, gone = gpu == null && !parts.length;
  const cells = gone ? ['fused', '', '', '', ''] : [ms(gpu), ms(gpus), ms(cpu), ms(cpus), calls];
  const row = `<span style="padding-left:${16 * depth + 14}px"${gone && fused >= 0 ? ` title="fused into ${esc(S[fused])}"` : ''}>` +
    `${esc(name)}</span><div class="bar"><div style="width:${(100 * gpus / whole).toFixed(2)}%"></div></div>` +
    cells.map(c => `<span>${c}</span>`).join('');
  if (!parts.length) return `<div class="leaf">${row}</div>`;
  const inside = parts.map(part => branch(part, whole, depth + 1)).join('');
  return `<details${depth < 2 ? ' open' : ''}><summary>${row}</summary>${inside}</details>`;
}
function tree(p) {
  const head = ['Module', '', 'Self GPU', 'GPU total', 'Self CPU', 'CPU total', 'Calls'].map(h => `<span>${h}</span>`).join('');
  return `<div class="leaf head">${head}</div>${branch(p.tree, p.tree[2] || 1, 0)}`;
}
function table(p) {
  const left = ['kernel', 'why this variant'];
  const heads = ['node', 'kernel', 'stage', 'us', 'forecast', 'x', 'kB', 'GB/s', '% of rate', 'why this variant'];
  const rows = p.kernels.map(k => {
    const gbs = rate(k[7], k[5]), nums = [k[0], k[5].toFixed(2), k[6].toFixed(2), k[6] ? (k[5] / k[6]).toFixed(2) : '',
      (k[7] / 1e3).toFixed(1), gbs.toFixed(1), (100 * gbs / D.rate).toFixed(1)];
    return `<tr><td>${esc(S[k[1]])}</td><td class="left">${esc(S[k[2]])}</td>${nums.map(n => `<td>${n}</td>`).join('')}` +
      `<td class="left">${esc(S[k[3]])}</td></tr>`;
  });
  return `<table><thead><tr>${heads.map(h => `<th${left.includes(h) ? ' class="left"' : ''}>${h}</th>`).join('')}</tr></thead>` +
    `<tbody>${rows.join('')}</tbody></table>`;
}
const drawn = {timeline, heatmap, tree, table};
const sections = document.querySelectorAll('section'), tabs = document.querySelectorAll('nav button');
function show(n) {
  sections.forEach((s, i) => s.classList.toggle('on', i === n));
  tabs.forEach((b, i) => b.classList.toggle('on', i === n));
  sections[n].querySelectorAll('[data-draw]:empty').forEach(e => { e.innerHTML = drawn[e.dataset.draw](D.phases[n]); });
  sections[n].querySelectorAll('input[type=range]').forEach(r => {
    r.oninput = () => { r.closest('.panel').querySelector('.wide').style.width = (100 * r.value) + '%'; };
  });
}
tabs.forEach((b, i) => b.addEventListener('click', () => show(i)));
show(D.first);
"""


PARTS = 64
"""Parts of the course of a decode, where none were asked for."""


def page(profile: Profile, every: int = 0) -> str:
    """The whole page. Figures are in it once, as JSON; its script draws them but for the roofline."""
    tabs = "".join(f"<button>{escape(p.name)}</button>" for p in profile.phases)
    sections = "".join(f"<section>{''.join(_phase(p, profile, every))}</section>\n" for p in profile.phases)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(profile.model)} on {escape(profile.device)}</title><style>{STYLE}</style></head>"
        f"<body>{_head(profile)}<nav>{tabs}</nav>{sections}"
        f'<script type="application/json" id="data">{_json(data(profile))}</script><script>{SCRIPT}</script></body></html>\n'
    )


def data(profile: Profile) -> dict[str, Any]:
    """What the page's script draws; each text is in `strings` once. Microseconds are a run's."""
    strings: dict[str, int] = {}

    def place(text: str) -> int:
        return strings.setdefault(text, len(strings))

    phases = [
        {
            "kernels": [
                [
                    k.stage,
                    place(k.label),
                    place(k.name),
                    place(k.dispatch.reason),
                    group_of(k.modules[0].path),
                    *map(_short, (k.gpu_us / k.runs, k.predicted_us / k.runs)),
                    k.nbytes,
                    k.flops,
                    _short(k.start_us),
                    _short(k.took_us),
                ]
                for k in phase.kernels
            ],
            "layers": by_layer(phase),
            "tree": _module(phase.tree(profile.model.split()[0]), place),
        }
        for phase in profile.phases
    ]
    first = next((i for i, p in enumerate(profile.phases) if p.name.startswith("decode")), 0)
    return {"first": first, "rate": profile.costs.read_gb_s, "colors": COLORS, "heat": HEAT, "strings": list(strings), "phases": phases}


def _json(values: dict[str, Any]) -> str:
    """JSON that may stand in a page: nothing in it ends its element."""
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _short(us: float) -> float:
    """Five digits, which no eye tells from all; of more than 0.1 s whole microseconds, which the tree prints."""
    return float(f"{us:.5g}") if abs(us) < 1e5 else float(round(us))


def _module(m: Module, place: Callable[[str], int]) -> list[Any]:
    """A module with its parts: name, GPU and CPU time of its own kernels (None: it has none) and with its parts', calls, what it is
    fused into (a place, -1: nothing), parts."""
    own = m.own_calls > 0
    return [
        m.name,
        _short(m.gpu_us) if own else None,
        _short(m.total_gpu_us),
        _short(m.cpu_us) if own else None,
        _short(m.total_cpu_us),
        m.calls,
        place(m.fused_into) if m.fused_into else -1,
        [_module(part, place) for part in m.parts.values()],
    ]


def _head(profile: Profile) -> str:
    s = profile.speeds
    cards = [
        (f"{s.decode_rate:.1f} t/s", "decode"),
        (f"{s.prefill_rate:.0f} t/s", f"prefill of {s.prompt_tokens}"),
        (f"{1e3 * s.ttft_s:.1f} ms", "to the first token"),
        (f"{s.load_s:.2f} s", f"load, {size_text(profile.model_bytes)}"),
        (f"{s.compile_s:.1f} s", f"{s.kernels} kernels, {s.compiled} compiled"),
        (f"{profile.costs.read_gb_s:.1f} GB/s", "read rate"),
        *([(size_text(profile.memory.use.peak), "memory at most")] if profile.memory else []),
    ]
    if profile.math:
        cards.append((f"{profile.math.tflops:.2f} TFLOPS", f"math rate, {profile.math.kernel}"))
    shown = "".join(f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in cards)
    shape = f"{profile.n_layer} layers of {profile.n_embd}, {profile.n_ctx} rows of cache, act {profile.act}"
    memory = "".join(f"<p>{escape(line)}</p>" for line in memory_text(profile.memory)) if profile.memory else ""
    about = f"{profile.device}, {profile.driver}; {shape}"
    return f'<h1>{escape(profile.model)}</h1><p>{escape(about)}</p><div class="cards">{shown}</div>{memory}'


def _phase(phase: Phase, profile: Profile, every: int) -> Iterator[str]:
    yield f"<h2>{escape(phase.name)}: {phase.gpu_us / phase.runs / 1e3:.3f} ms a run on the GPU, by {escape(phase.method)}</h2>"
    wall = f"{phase.wall_us / phase.runs / 1e3:.3f} ms wall of the same replays: {gap_text(phase)}"
    for line in (wall, overhead_text(phase), f"forecast {phase.predicted_us / phase.runs / 1e3:.3f} ms a run", *phase.notes):
        yield f"<p>{escape(line)}</p>"
    yield '<h2>Timeline of the last run</h2><div class="panel" data-draw="timeline"></div>'
    if phase is decoding(profile) and (found := course(phase, every or max(1, phase.runs // PARTS))):
        yield f'<h2>Course: milliseconds of {found.every} runs together</h2><div class="panel">{picture(found)}</div>'
    yield f'<h2>Roofline</h2><div class="panel">{roofline(phase, profile)}</div>'
    yield '<h2>Microseconds a run by layer and module</h2><div class="panel" data-draw="heatmap"></div>'
    yield '<h2>Modules, milliseconds of all runs</h2><div class="panel tree" data-draw="tree"></div>'
    yield '<h2>Kernels, forecast and measured</h2><div class="panel scroll" data-draw="table"></div>'


def group_of(path: Sequence[str]) -> str:
    """The group of a module, for its colour."""
    if path[0] == "blk":
        leaf = path[2] if len(path) > 2 else "other"
        return leaf if leaf in COLORS else "norm" if "norm" in leaf else "other"
    return path[0] if path[0] in COLORS else "norm" if "norm" in path[0] else "other"


@dataclass(frozen=True)
class LogAxes:
    """Two axes by powers of ten, from 10^x0 to 10^x1 and from 10^y0 to 10^y1, in the pixels of a picture."""

    x0: int
    x1: int
    y0: int
    y1: int
    left: int = 62
    right: int = 1100
    upper: int = 14
    lower: int = 350

    def x(self, v: float) -> float:
        return self.left + (self.right - self.left) * (math.log10(v) - self.x0) / (self.x1 - self.x0)

    def y(self, v: float) -> float:
        return self.lower - (self.lower - self.upper) * (math.log10(v) - self.y0) / (self.y1 - self.y0)

    def grid(self) -> Iterator[str]:
        """A line and a number for each power of ten."""
        for e in range(self.x0, self.x1 + 1):
            x = self.x(10.0**e)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.upper}" y2="{self.lower}" stroke="#e3e7ee"/>'
            yield f'<text x="{x:.1f}" y="{self.lower + 16}" text-anchor="middle">{10.0**e:g}</text>'
        for e in range(self.y0, self.y1 + 1):
            y = self.y(10.0**e)
            yield f'<line x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e7ee"/>'
            yield f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**e:g}</text>'

    def names(self, x: str, y: str) -> Iterator[str]:
        middle = (self.upper + self.lower) / 2
        yield f'<text x="{(self.left + self.right) / 2}" y="{self.lower + 34}" text-anchor="middle">{x}</text>'
        yield f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">{y}</text>'


def roofline(phase: Phase, profile: Profile) -> str:
    """Kernels by name, all layers together: operations a byte against operations a second, below the roof of read rate and math rate; a
    circle's area is its part of the time. Below it a table: where the time goes, and how near the roof."""
    found = [t for t in totals(phase.kernels, layers=False) if t.flops > 0 and t.gpu_us > 0 and t.nbytes > 0]
    if not found:
        return "<p>no kernel of this phase counts operations</p>"
    rate, peak = profile.costs.read_gb_s, profile.math.flops_per_second / 1e9 if profile.math else math.inf
    xs = [t.flops / t.nbytes for t in found]
    ys = [t.flops / t.gpu_us / 1e3 for t in found]
    axes = _roofline_axes(xs, ys, rate, peak)
    parts = [*axes.grid(), *_roof(axes, rate, peak)]
    groups = {k.kind: group_of(k.modules[0].path) for k in phase.kernels}
    whole = phase.gpu_us
    circles = [(axes.x(x), axes.y(y), 3 + 26 * math.sqrt(t.gpu_us / whole)) for t, x, y in zip(found, xs, ys, strict=True)]
    rows = []
    for number, (t, x, y, (cx, cy, radius)) in enumerate(zip(found, xs, ys, circles, strict=True), 1):
        color = COLORS[groups[t.name]]
        share, roof_there = t.gpu_us / whole, min(rate * x, peak)
        title = f"{number}: {t.name}\n{share:.1%} of the time, {t.gb_s:.1f} GB/s, {y:.1f} GFLOPS, {x:.3g} operations a byte"
        parts.append(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:.1f}" fill="{color}" fill-opacity="0.45" stroke="{color}">'
            f"<title>{escape(title)}</title></circle>"
        )
        cells = (f"{share:.1%}", f"{t.gb_s:.1f}", f"{100 * t.gb_s / rate:.1f}", f"{y:.1f}", f"{x:.3g}", f"{100 * y / roof_there:.1f}")
        rows.append(f'<tr><td>{number} <i style="background:{color}"></i>{escape(t.name)}</td>' + "".join(f"<td>{c}</td>" for c in cells))
    for number, (x, y) in enumerate(_numbers(circles), 1):
        parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" style="font-weight:600;fill:#1c2330">{number}</text>')
    parts += axes.names("operations a byte of memory", "GFLOPS")
    heads = ("kernels of all layers", "of the time", "GB/s", "% of read rate", "GFLOPS", "operations a byte", "% of the roof")
    head = "".join(f"<th>{h}</th>" for h in heads)
    return (
        f'<div class="zoom"><svg viewBox="0 0 1120 392" width="100%" role="img" aria-label="roofline">{"".join(parts)}</svg></div>'
        f'<div class="scroll legends"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(f'{row}</tr>' for row in rows)}</tbody></table></div>"
    )


def _roofline_axes(xs: Sequence[float], ys: Sequence[float], rate: float, peak: float) -> LogAxes:
    """Axes that hold all kernels and the ridge of the roof. rate: GB/s; peak: GFLOPS, infinite where none was measured."""
    ridge = peak / rate if math.isfinite(peak) else max(xs)
    x0, x1 = math.floor(math.log10(min(xs)) - 0.2), math.ceil(math.log10(max(*xs, 2 * ridge)) + 0.05)
    top = max(*ys, peak if math.isfinite(peak) else 0.0, min(rate * 10.0**x1, 4 * max(ys)))
    return LogAxes(x0, x1, math.floor(math.log10(min(ys)) - 0.1), math.ceil(math.log10(top) + 0.05))


def _roof(axes: LogAxes, rate: float, peak: float) -> Iterator[str]:
    """What bounds a kernel: the read rate up to the ridge, the math rate behind it."""
    right, high = 10.0**axes.x1, 10.0**axes.y1
    begin_x = max(10.0**axes.x0, 10.0**axes.y0 / rate)
    turn = min(peak / rate, right, high / rate)
    roof = [(begin_x, rate * begin_x), (turn, rate * turn)]
    if math.isfinite(peak):
        roof.append((right, peak))
    points = " ".join(f"{axes.x(x):.1f},{axes.y(min(y, high)):.1f}" for x, y in roof)
    yield f'<polyline points="{points}" fill="none" stroke="#b3261e" stroke-width="2"/>'
    near = begin_x**0.15 * turn**0.85
    yield f'<text x="{axes.x(near) + 8:.1f}" y="{axes.y(rate * near) + 16:.1f}">{rate:.4g} GB/s</text>'
    if math.isfinite(peak):
        yield f'<text x="{axes.right - 4}" y="{axes.y(peak) - 6:.1f}" text-anchor="end">{peak:.4g} GFLOPS</text>'


def _numbers(circles: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Where the number of each circle (x, y, radius) stands: in it, or beside it where it would cover another number."""
    found: list[tuple[float, float]] = []
    for x, y, radius in circles:
        beside = [(x + f * (radius + 8) * math.cos(a), y + f * (radius + 8) * math.sin(a)) for f in (1, 2, 3) for a in _ANGLES]
        free = (at for at in [(x, y), *beside] if all(abs(at[0] - u) > 15 or abs(at[1] - v) > 12 for u, v in found))
        found.append(next(free, (x, y)))
    return found


_ANGLES = tuple(i * math.pi / 4 for i in range(8))


def by_layer(phase: Phase) -> dict[str, list[float | None]]:
    """Microseconds of a run by module of a layer, then by layer; None where a layer has no such kernel."""
    found: dict[str, dict[int, float]] = {}
    for k in phase.kernels:
        for s in k.modules:
            if s.path[0] == "blk":
                row = ".".join(s.path[2:]) or "other"
                own = found.setdefault("attention" if row == "attn" else row, {})
                own[int(s.path[1])] = own.get(int(s.path[1]), 0.0) + s.part * k.gpu_us / phase.runs
    count = 1 + max((layer for own in found.values() for layer in own), default=0)
    return {row: [_short(own[i]) if i in own else None for i in range(count)] for row, own in found.items()}


HEAT = ((246, 248, 252), (158, 199, 226), (62, 132, 189), (30, 72, 138), (13, 30, 76))
"""Colours from 0 to the most."""
