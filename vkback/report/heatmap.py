"""A heatmap of the part of a device's read rate that its mat-vec kernels reach: rows x columns of each weight type. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(results: pd.DataFrame, file: Path, device: str) -> None:
    """Write the PNG. One panel a weight type and path, of each size the best; colour: throughput over read rate, 0 to 1.

    results  a row a result, with columns quant, path, m, k, read_share
    """
    panels = {} if results.empty else dict(list(results.groupby(results["quant"] + " " + results["path"])))
    columns = min(4, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.4 * columns + 1.2, 2.6 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{device}: share of the read rate, launches back to back")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.axis("off")
    shown = None
    for axis, (title, panel) in zip(axes, panels.items(), strict=False):
        table = panel.pivot_table(index="m", columns="k", values="read_share", aggfunc="max")
        grid = table.to_numpy()
        shown = axis.imshow(grid, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto", origin="lower")
        axis.set(title=title, xlabel="columns k", ylabel="rows m")
        axis.set_xticks(range(len(table.columns)), table.columns.map(str))
        axis.set_yticks(range(len(table.index)), table.index.map(str))
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                axis.text(column, row, f"{100 * value:.0f} %", ha="center", va="center", color="white" if value < 0.6 else "black")
    if shown is not None:
        figure.colorbar(shown, ax=list(axes), label="share of read rate")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
