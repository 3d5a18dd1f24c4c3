"""The errors of a model's nodes as a picture: measured, expected, and where the band ends, along the layers. Needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vkback.evaluate.node_compare import Comparison, growth
from vkback.report.pictures import save

MIN_SHOWN = 1e-16
"""Shown in the place of no error at all: the axis is logarithmic."""

BELOW = 1e-3
"""Of the lowest end of a band: where the axis begins. What is smaller stands there."""


def draw(comparison: Comparison, file: Path, title: str) -> None:
    """Write the picture; the file's ending chooses the format (png, svg, pdf)."""
    rows = [r for r in comparison.rows if r.limit > 0.0]
    at = np.arange(len(rows))
    figure = Figure(figsize=(11.0, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    error = np.array([r.nmse for r in rows])
    finite = np.isfinite(error)
    least = max(MIN_SHOWN, BELOW * min((r.limit for r in rows), default=1.0))
    axis.plot(at, [r.limit for r in rows], color="tab:red", linewidth=0.8, label="end of the band")
    if not comparison.step:
        axis.plot(at, np.maximum([r.expected for r in rows], least), color="tab:grey", linewidth=1.0, label="expected by rounding")
    axis.plot(at[finite], np.maximum(error[finite], least), ".", color="tab:blue", markersize=4, label="measured")
    ends = {layer: max(i for i, r in enumerate(rows) if r.layer == layer) for layer, _, _ in growth(rows)}
    last = [i for i in ends.values() if finite[i]]
    if not comparison.step and len(last) > 1:
        axis.plot(last, np.maximum(error[last], least), "o-", color="tab:blue", markersize=6, linewidth=1.6, label="at the layers' ends")
    wrong = [i for i, r in enumerate(rows) if r.outside]
    if wrong:
        axis.plot(wrong, np.where(finite[wrong], np.maximum(error[wrong], least), 1.0), "x", color="tab:red", label="outside the band")
        place = (wrong[0], error[wrong[0]] if finite[wrong[0]] else 1.0)
        axis.annotate(rows[wrong[0]].name, place, xytext=(6, 6), textcoords="offset points")
    axis.set_yscale("log")
    every = max(1, len(ends) // 24)
    shown = list(ends.items())[::every]
    axis.set_xticks([i for _, i in shown], [str(layer) for layer, _ in shown])
    axis.set(xlabel="last node of layer", ylabel="NMSE", title="\n".join(textwrap.wrap(title, 100)))
    axis.grid(alpha=0.3)
    axis.set_ylim(bottom=0.5 * least)
    axis.legend(loc="best", fontsize="small")
    save(figure, file, 110)
