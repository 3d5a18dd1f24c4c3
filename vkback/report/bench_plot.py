"""Bars of a comparison: each test before and after, as a part of the speed before, with deviations. Drawing needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vkback.report.compare import HEADERS, Comparison, Speed
from vkback.report.compare_ops import OpDifference
from vkback.report.pictures import save

BEFORE, UNCHANGED, FASTER, SLOWER = "#b8bcc4", "#7f8794", "#2a7fb8", "#c8553d"
"""Colours of what was before, and of what came after: within the noise, beyond it."""


@dataclass(frozen=True)
class Bar:
    """One test. Its speed before is 100 %, and `after` what it has become, both with a deviation, in percent; `text` has the figures."""

    label: str
    before: tuple[float, float]
    after: tuple[float, float]
    beats_noise: bool | None
    text: str


def of_models(comparison: Comparison) -> list[Bar]:
    bars = []
    for d in comparison.differences:
        settings = "".join(f" {HEADERS.get(name, name)} {value}" for name, value in d.settings.items())
        text = f"{_figure(d.before)} → {_figure(d.after)} t/s, {d.percent:+.1f} %"
        after = (100 + d.percent, (100 + d.percent) * _part(d.after))
        bars.append(Bar(f"{d.model} {d.test}{settings}", (100.0, 100 * _part(d.before)), after, d.change.beats_noise, text))
    return bars


def of_ops(found: Sequence[OpDifference]) -> list[Bar]:
    bars = []
    for d in found:
        text = f"{_figure(d.before)} → {_figure(d.after)} µs, {d.percent:+.1f} %"
        after = (100 + d.percent, (100 + d.percent) * _part(d.after))
        bars.append(Bar(f"{d.op}({d.params})", (100.0, 100 * _part(d.before)), after, d.change.beats_noise, text))
    return bars


def _part(speed: Speed) -> float:
    return speed.deviation / speed.mean if speed.mean else 0.0


def _figure(speed: Speed) -> str:
    digits = 2 if speed.mean < 100 else 1 if speed.mean < 10000 else 0
    return f"{speed.mean:.{digits}f} ± {speed.deviation:.{digits}f}"


def draw(bars: Sequence[Bar], file: Path, title: str) -> None:
    """Write the picture, in the form that the file's ending names. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.6 + 0.52 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    most = max(max(b.before[0] + b.before[1], b.after[0] + b.after[1]) for b in bars)
    for at, bar in enumerate(bars):
        colour = UNCHANGED if not bar.beats_noise else FASTER if bar.after[0] > 100 else SLOWER
        for (length, spread), offset, shade in ((bar.before, -0.2, BEFORE), (bar.after, 0.2, colour)):
            axis.barh(at + offset, length, 0.38, color=shade, xerr=spread, error_kw={"capsize": 2.5, "elinewidth": 1.0})
        axis.text(1.01, at, bar.text, va="center", fontsize=9, transform=axis.get_yaxis_transform())  # right of the axes
    axis.axvline(100, color="#444", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(bars)), [b.label if len(b.label) <= 60 else b.label[:59] + "…" for b in bars])
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.02 * most)
    axis.set(xlabel="speed, % of that before; error bars: deviation of the repetitions")
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), x=0.01, ha="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    known = (("before", BEFORE), ("after: faster", FASTER), ("after: slower", SLOWER), ("after: within the noise", UNCHANGED))
    figure.legend(handles=[Patch(color=colour, label=name) for name, colour in known], loc="outside lower left", ncols=4, frameon=False)
    save(figure, file, 120)
