"""The errors of a model's nodes as a picture: measured, expected, and where the band ends, along the layers. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vkback.harness.node_compare import Comparison, growth

LEAST = 1e-16
"""Shown in the place of no error at all: the axis is logarithmic."""


def draw(comparison: Comparison, file: Path, title: str) -> None:
    """Write the picture; the file's ending chooses the format (png, svg, pdf)."""
    rows = [r for r in comparison.rows if r.limit > 0.0]
    at = np.arange(len(rows))
    figure = Figure(figsize=(11.0, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    error = np.array([r.nmse for r in rows])
    finite = np.isfinite(error)
    axis.plot(at, np.maximum([r.limit for r in rows], LEAST), color="tab:red", linewidth=0.8, label="end of the band")
    if not comparison.step:
        axis.plot(at, np.maximum([r.expected for r in rows], LEAST), color="tab:grey", linewidth=1.0, label="expected by rounding")
    axis.plot(at[finite], np.maximum(error[finite], LEAST), ".", color="tab:blue", markersize=4, label="measured")
    ends = {layer: max(i for i, r in enumerate(rows) if r.layer == layer) for layer, _, _ in growth(rows)}
    wrong = [i for i, r in enumerate(rows) if r.outside]
    if wrong:
        axis.plot(wrong, np.where(finite[wrong], np.maximum(error[wrong], LEAST), 1.0), "x", color="tab:red", label="outside the band")
        place = (wrong[0], error[wrong[0]] if finite[wrong[0]] else 1.0)
        axis.annotate(rows[wrong[0]].name, place, xytext=(6, 6), textcoords="offset points")
    axis.set_yscale("log")
    every = max(1, len(ends) // 24)
    shown = list(ends.items())[::every]
    axis.set_xticks([i for _, i in shown], [str(layer) for layer, _ in shown])
    axis.set(xlabel="last node of layer", ylabel="NMSE", title=title)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(loc="best", fontsize="small")
    figure.savefig(file, dpi=110)
