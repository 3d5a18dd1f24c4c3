"""Bars of a comparison: each test before and after, and results beside them, as parts of the speed before, with deviations. Drawing needs
matplotlib."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vkback.report.compare import HEADERS, Comparison, Speed
from vkback.report.compare_ops import OpDifference
from vkback.report.pictures import save

BEFORE, UNCHANGED, FASTER, SLOWER = "#b8bcc4", "#7f8794", "#2a7fb8", "#c8553d"
"""Colours of what was before, and of what came after: within the noise, beyond it."""

BESIDE = ("#8d6bb3", "#d49a3a", "#4c9a7d", "#a3586d")
"""Of results beside them, in turn."""

LABEL = 60
"""Characters of a label in one line; longer ones take more lines."""


@dataclass(frozen=True)
class Bar:
    """One test. Its speed before is 100 %, and `after` what it has become, both with a deviation, in percent; `text` has the figures,
    `beside` other results by what they are called."""

    label: str
    before: tuple[float, float]
    after: tuple[float, float]
    beats_noise: bool | None
    text: str
    beside: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def of_models(comparison: Comparison) -> list[Bar]:
    bars = []
    for d in comparison.differences:
        settings = "".join(f" {HEADERS.get(name, name)} {value}" for name, value in d.settings.items())
        text = f"{_figure(d.before)} → {_figure(d.after)} t/s, {d.percent:+.1f} %"
        text += "".join(f"\n{name}: {_figure(speed)} t/s" for name, speed in d.beside.items() if speed)
        after = (100 + d.percent, (100 + d.percent) * _part(d.after))
        beside = {name: (percent := 100 * speed.mean / d.before.mean, percent * _part(speed)) for name, speed in d.beside.items() if speed}
        bars.append(Bar(f"{d.model} {d.test}{settings}", (100.0, 100 * _part(d.before)), after, d.change.beats_noise, text, beside))
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


def _breakable(label: str) -> str:
    """With places where lines may end behind the commas of a case."""
    return re.sub(r",(?=[a-z_]+=)", ", ", label)


def draw(bars: Sequence[Bar], file: Path, title: str) -> None:
    """Write the picture, in the form that the file's ending names. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for bar in bars for name in bar.beside))
    labels = [textwrap.wrap(_breakable(bar.label), LABEL) for bar in bars]
    lines = max(2 + len(names), *map(len, labels))
    figure = Figure(figsize=(11, 1.6 + 0.26 * lines * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    most = max(length + spread for b in bars for length, spread in (b.before, b.after, *b.beside.values()))
    height = 0.76 / (2 + len(names))
    for at, bar in enumerate(bars):
        colour = UNCHANGED if not bar.beats_noise else FASTER if bar.after[0] > 100 else SLOWER
        others = [(bar.beside.get(name), BESIDE[i % len(BESIDE)]) for i, name in enumerate(names)]
        for place, (speed, shade) in enumerate([(bar.before, BEFORE), (bar.after, colour), *others]):
            if speed is not None:
                offset = (place - 0.5 * (1 + len(names))) * (height + 0.02)
                axis.barh(at + offset, speed[0], height, color=shade, xerr=speed[1], error_kw={"capsize": 2.5, "elinewidth": 1.0})
        axis.text(1.01, at, bar.text, va="center", fontsize=9, transform=axis.get_yaxis_transform())  # right of the axes
    axis.axvline(100, color="#444", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(bars)), ["\n".join(label) for label in labels])
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.02 * most)
    axis.set(xlabel="speed, % of that before; error bars: deviation of the repetitions")
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), x=0.01, ha="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    others_named = [(name, BESIDE[i % len(BESIDE)]) for i, name in enumerate(names)]
    known = (
        ("before", BEFORE),
        ("after: faster", FASTER),
        ("after: slower", SLOWER),
        ("after: within the noise", UNCHANGED),
        *others_named,
    )
    figure.legend(handles=[Patch(color=colour, label=name) for name, colour in known], loc="outside lower left", ncols=4, frameon=False)
    save(figure, file, 120)
