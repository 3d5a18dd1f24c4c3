"""Heatmaps of the part of a device's read rate that its GEMV kernels reach, rows x columns of each weight type, and of the part of its
math rate that products of several tokens reach, weight x tokens. Needs matplotlib."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vkback.report.pictures import save


@dataclass(frozen=True)
class Axes:
    """Columns of the results that make the picture's lines, columns and colours, and what they are called."""

    line: str = "m"
    line_label: str = "rows m"
    column: str = "k"
    column_label: str = "columns k"
    value: str = "read_share"
    value_label: str = "share of read rate"


GEMV_AXES = Axes()

CELL = 0.55
"""Inches that a cell needs for its text."""

WIDEST = 15.0
"""Inches of the widest picture, colour bar left out."""


def draw(results: pd.DataFrame, file: Path, title: str, named: Axes = GEMV_AXES) -> None:
    """Write the PNG. One panel a weight type and path, of each size the best; colour: a share, 0 to 1.

    results  a row a result, with columns quant, path and those that `named` names
    """
    panels = {} if results.empty else dict(list(results.groupby(results["quant"] + " " + results["path"])))
    cells = max((panel[named.column].nunique() for panel in panels.values()), default=1)
    width = max(3.4, 1.6 + CELL * cells)
    columns = max(1, min(4, len(panels), int(WIDEST / width)))
    lines = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(width * columns + 1.2, 2.6 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title, max(24, int(10.5 * figure.get_figwidth())))))
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.axis("off")
    shown = None
    for axis, (name, panel) in zip(axes, panels.items(), strict=False):
        table = panel.pivot_table(index=named.line, columns=named.column, values=named.value, aggfunc="max")
        grid = table.to_numpy()
        shown = axis.imshow(grid, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto", origin="lower")
        axis.set(title=name, xlabel=named.column_label, ylabel=named.line_label)
        axis.set_xticks(range(len(table.columns)), table.columns.map(str))
        axis.set_yticks(range(len(table.index)), table.index.map(str))
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                axis.text(column, row, f"{100 * value:.0f} %", ha="center", va="center", color="white" if value < 0.6 else "black")
    if shown is not None:
        figure.colorbar(shown, ax=list(axes), label=named.value_label)
    save(figure, file, 120)
