"""A picture of how much of a device's read rate its mat-vec kernels reach: rows x columns for each weight type. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Measured(Protocol):
    """What the picture needs of a result."""

    @property
    def m(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def match(self) -> object: ...

    @property
    def read_share(self) -> float: ...


def draw(results: Sequence[Measured], file: Path, device: str) -> None:
    """Write the PNG. One panel a weight type and path, the best form of each size; colour: throughput over read rate, 0 to 1."""
    panels: dict[str, dict[tuple[int, int], float]] = {}
    for r in results:
        match = r.match
        assert isinstance(match, dict)
        cells = panels.setdefault(f"{match['quant']} {match['path']}", {})
        cells[r.m, r.k] = max(r.read_share, cells.get((r.m, r.k), 0.0))
    columns = min(4, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.4 * columns + 1.2, 2.6 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{device}: share of the read rate, launches back to back")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.axis("off")
    shown = None
    for axis, (title, cells) in zip(axes, sorted(panels.items()), strict=False):
        ms, ks = sorted({m for m, _ in cells}), sorted({k for _, k in cells})
        grid = np.array([[cells.get((m, k), np.nan) for k in ks] for m in ms])
        shown = axis.imshow(grid, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto", origin="lower")
        axis.set(title=title, xlabel="columns k", ylabel="rows m")
        axis.set_xticks(range(len(ks)), [str(k) for k in ks])
        axis.set_yticks(range(len(ms)), [str(m) for m in ms])
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                axis.text(column, row, f"{100 * value:.0f} %", ha="center", va="center", color="white" if value < 0.6 else "black")
    if shown is not None:
        figure.colorbar(shown, ax=list(axes), label="share of read rate")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
