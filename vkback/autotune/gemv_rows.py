"""Rows of the GEMV families that say what sweeps have found."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from vkback.autotune.points import Point
from vkback.autotune.tunable import TuneResult, results_table
from vkback.tuning.table import row_lines

if TYPE_CHECKING:
    import pandas as pd

Range = tuple[int, int]

PLAIN_SHAPE = ["experts", "n", "quant", "m", "k"]
"""What a row of [[gemv_path]] tells apart, its sizes last."""


def edges(values: Iterable[int]) -> dict[int, Range]:
    """For each of some sizes the range that a row about it covers: to the geometric mean with its neighbours, at the ends to a factor
    of 2."""
    ordered = sorted({int(v) for v in values})
    cuts = [math.ceil(math.sqrt(a * b)) for a, b in itertools.pairwise(ordered)]
    lows = [max(1, ordered[0] // 2), *cuts]
    highs = [*(c - 1 for c in cuts), 2 * ordered[-1]]
    return {v: (low, high) for v, low, high in zip(ordered, lows, highs, strict=True)}


def gemv_rows(results: Sequence[TuneResult[Point]], card: str) -> list[list[str]]:
    """The lines of each row: one for each result that beat the shipped tables, for the sizes around its own, and those that choose the
    path. card: device and driver, for the evidence."""
    if not results:
        return []
    table = results_table(results)
    forms = [json.dumps(r.match, sort_keys=True) for r in results]
    found = []
    for _, form in table.groupby(forms):
        for cell, m, k in _cells(form):
            (result,) = cell["result"]
            if result.kept:
                found.append(_result_lines(result, m, k, card))
    return found + list(_path_rows(table[table["sync"] == "barrier"], card))


def _cells(form: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, Range, Range]]:
    """What a table has of each size, by k and m, with the ranges of m and k that it speaks for."""
    ks = edges(form["k"])
    for k, column in form.groupby("k"):
        ms = edges(column["m"])
        for m, cell in column.groupby("m"):
            yield cell, ms[cast(int, m)], ks[cast(int, k)]


def _result_lines(result: TuneResult[Point], m: Range, k: Range, card: str) -> list[str]:
    if result.match["sync"] == "sentinel":
        times = f"{result.latency:.2f} us a token, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f})"
    else:
        times = (
            f"latency {result.latency:.2f} us, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f}); "
            f"throughput {result.throughput:.2f} us, was {result.throughput_before:.2f}"
        )
    evidence = f"{result.date} {card}, {result.line}: {times}, {100 * result.read_share:.0f} % of the read rate"
    return row_lines("gemv", {**result.match, "m": _range(m), "k": _range(k)}, result.after._asdict(), evidence)


def _range(ends: Range) -> Mapping[str, Any]:
    return {"min": ends[0], "max": ends[1]}


def _path_rows(table: pd.DataFrame, card: str) -> Iterator[list[str]]:
    """Rows that choose the path, for GEMVs that were tuned on both. Fused forms take the choice of the plain one, if that was tuned."""
    if table.empty:
        return
    fused = ["prologue", "glu", "y"]
    both = table.pivot_table(index=PLAIN_SHAPE + fused, columns="path", values="result", aggfunc="last").dropna()
    if set(both.columns) != {"int", "float"} or both.empty:
        return
    plainest = both.groupby(level=PLAIN_SHAPE).first().reset_index()
    for _, form in plainest.groupby(["experts", "n", "quant"]):
        for cell, m, k in _cells(form):
            pair = {path: cell[path].iloc[0] for path in ("int", "float")}
            first = min(pair, key=lambda path: pair[path].latency)
            match, sizes = pair[first].match, pair[first].sizes
            evidence = (
                f"{pair[first].date} {card}, {match['quant']} {sizes['m']}x{sizes['k']}: latency {pair['int'].latency:.2f} us in integers, "
                f"{pair['float'].latency:.2f} in floats"
            )
            keys = {**{name: match[name] for name in ("experts", "n", "quant")}, "m": _range(m), "k": _range(k)}
            yield row_lines("gemv_path", keys, {"path": first}, evidence)
