"""What a sweep searched, as a picture: for each task a heatmap of latency over the two parameters that varied most, with the point chosen,
and all points in order of their latency beside the roofline and the noise. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vkback.report.pictures import save

SLOWEST = 3.0
"""Times of the quickest beyond which all points have one colour."""

MAX_TASKS = 8
"""Tasks in one picture."""

CHOSEN, INCUMBENT = "#d62728", "#111111"


@dataclass(frozen=True)
class Searched:
    """A task that was searched.

    names      of the parameters
    points     values of the parameters, microseconds and their spread, of every point that was timed
    chosen, incumbent   of these the one to use, and the one that the tables had
    noise      microseconds within which two points count as equal
    roof       microseconds that the device cannot go below, and why: "read rate"
    """

    title: str
    names: tuple[str, ...]
    points: tuple[tuple[tuple[Any, ...], float, float], ...]
    chosen: tuple[Any, ...]
    incumbent: tuple[Any, ...]
    noise: float
    roof: float
    roof_name: str


def draw(tasks: Sequence[Searched], file: Path, title: str) -> None:
    """Write the PNG: a line a task, the last MAX_TASKS of them."""
    shown = list(tasks)[-MAX_TASKS:]
    figure = Figure(figsize=(13, 0.9 + 3.9 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title, 120)))
    figure.get_layout_engine().set(hspace=0.06, wspace=0.03)
    axes = figure.subplots(len(shown), 2, squeeze=False, gridspec_kw={"width_ratios": [1.45, 1.0]})
    for (left, right), task in zip(axes, shown, strict=True):
        _heatmap(figure, left, task)
        _ranking(right, task)
    save(figure, file, 100)


def axes_of(task: Searched) -> tuple[int, int]:
    """The two parameters of which most pairs of values were tried: for columns, with more values, and for lines."""
    values = [[str(values[i]) for values, _, _ in task.points] for i in range(len(task.names))]
    pairs = combinations(range(len(values)), 2)
    one, other = max(pairs, key=lambda p: len(set(zip(values[p[0]], values[p[1]], strict=True))), default=(0, 0))
    return (one, other) if len(set(values[one])) >= len(set(values[other])) else (other, one)


def grid_of(task: Searched, column: int, line: int) -> tuple[list[Any], list[Any], dict[tuple[int, int], float]]:
    """The values of both parameters, and by their places the quickest point's microseconds, whatever the other parameters."""
    columns, lines = (_sorted({values[i] for values, _, _ in task.points}) for i in (column, line))
    best: dict[tuple[int, int], float] = {}
    for values, us, _ in task.points:
        at = columns.index(values[column]), lines.index(values[line])
        best[at] = min(us, best.get(at, math.inf))
    return columns, lines, best


def _sorted(values: set[Any]) -> list[Any]:
    """Numbers first, in their order, then words."""
    return sorted(values, key=lambda v: (isinstance(v, str), v if not isinstance(v, str) else 0, str(v)))


def _heatmap(figure: Figure, axis: Axes, task: Searched) -> None:
    column, line = axes_of(task)
    columns, lines, best = grid_of(task, column, line)
    quickest = min(best.values())
    grid = [[best.get((c, r), math.nan) / quickest for c in range(len(columns))] for r in range(len(lines))]
    image = axis.imshow(grid, norm=LogNorm(1.0, SLOWEST), cmap="viridis_r", aspect="auto", origin="lower")
    for (c, r), us in best.items():
        weight = "bold" if us <= quickest + task.noise else "normal"
        axis.text(c, r, _us(us), ha="center", va="center", fontsize=9, weight=weight, color="white" if us > 1.5 * quickest else "black")
    for values, colour, style in ((task.incumbent, INCUMBENT, "--"), (task.chosen, CHOSEN, "-")):
        at = columns.index(values[column]) - 0.5, lines.index(values[line]) - 0.5
        axis.add_patch(Rectangle(at, 1, 1, fill=False, edgecolor=colour, linestyle=style, linewidth=2.4, clip_on=False, zorder=3))
    axis.set_xticks(range(len(columns)), [str(v) for v in columns])
    axis.set_yticks(range(len(lines)), [str(v) for v in lines])
    axis.set(xlabel=task.names[column], ylabel=task.names[line])
    axis.set_title("\n".join(textwrap.wrap(task.title.replace(",", ", "), 88)), fontsize=9, loc="left")
    bar = figure.colorbar(image, ax=axis, label="times the quickest", ticks=[1, 1.25, 1.5, 2, 2.5, 3])
    bar.ax.set_yticklabels(["1", "1.25", "1.5", "2", "2.5", "3 +"])
    bar.ax.minorticks_off()


def _ranking(axis: Axes, task: Searched) -> None:
    ranked = sorted(task.points, key=lambda p: p[1])
    chosen, incumbent = (next(p for p in ranked if p[0] == values) for values in (task.chosen, task.incumbent))
    axis.axhspan(
        chosen[1] - task.noise, chosen[1] + task.noise, color=CHOSEN, alpha=0.13, linewidth=0, label=f"noise: ± {_us(task.noise)} µs"
    )
    axis.errorbar(
        range(1, len(ranked) + 1),
        [p[1] for p in ranked],
        [p[2] for p in ranked],
        fmt="o",
        markersize=3,
        color="#4c78a8",
        elinewidth=0.8,
        capsize=1.5,
        label=f"{len(ranked)} points, spread of repetitions",
        zorder=2,
    )
    axis.plot(
        ranked.index(incumbent) + 1,
        incumbent[1],
        "s",
        color=INCUMBENT,
        markersize=7,
        fillstyle="none",
        zorder=3,
        label=f"tables: {_us(incumbent[1])} µs",
    )
    axis.plot(ranked.index(chosen) + 1, chosen[1], "D", color=CHOSEN, markersize=6, zorder=4, label=f"chosen: {_us(chosen[1])} µs")
    axis.axhline(
        task.roof,
        color="#2ca02c",
        linestyle=":",
        linewidth=1.6,
        label=f"roof, {task.roof_name}: {_us(task.roof)} µs ({100 * task.roof / chosen[1]:.0f} % reached)",
    )
    top = max(min(ranked[-1][1], SLOWEST * ranked[0][1]), chosen[1], incumbent[1])
    axis.set(xlabel="points by latency", ylabel="latency, µs", ylim=(0, 1.08 * top))
    axis.set_xlim(0, len(ranked) + 1)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8, loc="best", framealpha=0.85)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
