"""How a phase goes on, run by run: what grows with the rows of the cache, and what is flat. As text, plain values and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from vkback.report.roles import totals
from vkback.timing.profile import Phase

COLUMNS = 5
"""Kernels of all layers that have a column of their own, the longest; then one of all others."""

OTHERS = "all others"

PENS = ("#3b6fb6", "#d9822b", "#2f8f5b", "#b04a6a", "#7a52a3", "#6b7280")


@dataclass(frozen=True)
class Course:
    """Milliseconds of `every` runs together.

    names   what has a column
    rows    of the cache in use behind each part
    total   of each part; by_name: of each column
    every   runs of a part; the last may have fewer, and is left out then
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    total: tuple[float, ...]
    by_name: tuple[tuple[float, ...], ...]
    every: int

    @property
    def growth(self) -> tuple[float, ...]:
        """The last part over the first, of the total and of each column."""
        return tuple(each[-1] / each[0] if each[0] > 0 else float("nan") for each in (self.total, *self.by_name))


def course(phase: Phase, every: int) -> Course | None:
    """The course of a phase; None where it has not two parts."""
    parts = phase.runs // every
    if parts < 2 or not phase.kernels or not phase.kernels[0].each_us:
        return None

    def summed(us: Any) -> tuple[float, ...]:
        return tuple((np.asarray(us)[: parts * every].reshape(parts, every).sum(axis=1) / 1e3).tolist())

    whole = np.sum([k.each_us for k in phase.kernels], axis=0)
    longest = [t.name for t in totals(phase.kernels, layers=False)[:COLUMNS]]
    own = {name: np.sum([k.each_us for k in phase.kernels if k.kind == name], axis=0) for name in longest}
    rest = whole - np.sum(list(own.values()), axis=0)
    named = {**own, OTHERS: rest} if len({k.kind for k in phase.kernels}) > COLUMNS else own
    rows = tuple(phase.rows[every - 1 : parts * every : every])
    return Course(tuple(named), rows, summed(whole), tuple(map(summed, named.values())), every)


def text(found: Course, name: str) -> Iterator[str]:
    """A line a part."""
    yield f"Course of {name}: ms of {found.every} {'run' if found.every == 1 else 'runs'} together, behind so many rows of the cache"
    yield from (f"  {number}: {each}" for number, each in enumerate(found.names, 1))
    yield f"{'rows':>7} {'total':>10} " + " ".join(f"{number:>9}" for number in range(1, len(found.names) + 1))
    for i, rows in enumerate(found.rows):
        yield f"{rows:>7} {found.total[i]:>10.3f} " + " ".join(f"{each[i]:>9.3f}" for each in found.by_name)
    whole, *each_growth = found.growth
    yield f"{'growth':>7} {f'x{whole:.2f}':>10} " + " ".join(f"{f'x{g:.2f}':>9}" for g in each_growth)


def as_data(found: Course) -> dict[str, Any]:
    """The same as plain values, milliseconds."""
    return {
        "every": found.every,
        "rows": list(found.rows),
        "total_ms": list(found.total),
        "kernels_ms": {name: list(each) for name, each in zip(found.names, found.by_name, strict=True)},
    }


def picture(found: Course) -> str:
    """Lines over the rows of the cache: one for each column of the table, and the total."""
    left, right, upper, lower = 62, 1100, 14, 250
    most = max(found.total) or 1.0

    def x(i: int) -> float:
        return left + (right - left) * i / (len(found.rows) - 1)

    def y(ms: float) -> float:
        return lower - (lower - upper) * ms / most

    parts = []
    for step in range(5):
        value = most * step / 4
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e3e7ee"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    shown = range(0, len(found.rows), max(1, -(-len(found.rows) // 8)))
    parts += [f'<text x="{x(i):.1f}" y="{lower + 16}" text-anchor="middle">{found.rows[i]}</text>' for i in shown]
    lines = [("total", found.total, "#1c2330"), *zip(found.names, found.by_name, PENS, strict=False)]
    for name, each, pen in lines:
        points = " ".join(f"{x(i):.1f},{y(ms):.1f}" for i, ms in enumerate(each))
        title = f"{name}: {each[0]:.3f} to {each[-1]:.3f} ms"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{pen}" stroke-width="2"><title>{escape(title)}</title></polyline>')
    parts.append(f'<text x="{(left + right) / 2}" y="{lower + 34}" text-anchor="middle">rows of the cache</text>')
    legend = "".join(
        f'<span><i style="background:{pen}"></i>{escape(name)} x{growth:.2f}</span>'
        for (name, _, pen), growth in zip(lines, found.growth, strict=True)
    )
    return (
        f'<div class="legend">{legend}</div><div class="zoom"><svg viewBox="0 0 1120 290" width="100%" role="img" '
        f'aria-label="milliseconds over rows of the cache">{"".join(parts)}</svg></div>'
    )
