"""The picture of a sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib", reason="the heatmap is an optional extra: pip install vkback[pictures]")

from matplotlib.image import imread

from vkback.report.heatmap import Axes, draw
from vkback.report.search_picture import Searched, axes_of, grid_of
from vkback.report.search_picture import draw as draw_search


def measured(*rows: tuple[str, int, int, float]) -> pd.DataFrame:
    return pd.DataFrame([{"quant": quant, "path": "int", "m": m, "k": k, "read_share": share} for quant, m, k, share in rows])


def test_a_panel_a_type_and_a_colour_a_size(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "map.png"
    draw(measured(("Q4_K", 4096, 4096, 0.05), ("Q4_K", 14336, 4096, 0.95), ("Q8_0", 4096, 4096, 0.5)), file, "Card")
    two = imread(file)
    assert len(np.unique(two.reshape(-1, two.shape[-1]), axis=0)) > 10
    draw(measured(("Q4_K", 4096, 4096, 0.05)), file, "Card")
    assert imread(file).shape[1] < two.shape[1]


def test_other_axes_can_be_named(tmp_path: Path) -> None:
    sizes = [(weight, n) for weight in ("4096x4096", "64x64") for n in (2, 64)]
    table = pd.DataFrame([{"quant": "Q4_K", "path": "int", "weight": weight, "n": n, "share": n / 64} for weight, n in sizes])
    file = tmp_path / "tokens.png"
    draw(table, file, "Card", Axes("weight", "weight m x k", "n", "tokens n", "share", "share of math rate"))
    picture = imread(file)
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 10


def test_a_long_title_is_not_clipped(tmp_path: Path) -> None:
    file = tmp_path / "map.png"
    draw(measured(("Q4_K", 4096, 4096, 0.5)), file, "A card with a long name (and a driver): share of the read rate, launches back to back")
    picture = imread(file)
    assert (picture[:, :3] == 1.0).all() and (picture[:, -3:] == 1.0).all()


SEARCHED = Searched(
    "LINEAR(type_a=Q4_K,m=4096,n=1,k=4096)",
    ("wg", "lanes", "prefetch", "subgroup"),
    tuple(
        ((wg, lanes, prefetch, "default"), 10.0 + wg / 64 + lanes / 8, 0.1)
        for wg in (64, 128, 256)
        for lanes in (8, 32)
        for prefetch in ("none", "weights")
    ),
    (64, 8, "none", "default"),
    (128, 8, "none", "default"),
    0.2,
    6.5,
    "read rate",
)


def test_what_was_searched_is_shown_by_the_parameters_that_varied_most() -> None:
    column, line = axes_of(SEARCHED)
    assert (SEARCHED.names[column], SEARCHED.names[line]) == ("wg", "lanes")
    columns, lines, best = grid_of(SEARCHED, column, line)
    assert (columns, lines) == ([64, 128, 256], [8, 32])
    assert best[0, 0] == 12.0 and best[2, 1] == 18.0 and len(best) == 6
    mixed = replace(SEARCHED, points=tuple(((1, 1, p, s), 1.0, 0.0) for p, s in (("none", 8), ("none", "default"), ("weights", 16))))
    column, line = axes_of(mixed)
    assert grid_of(mixed, column, line)[0] == [8, 16, "default"]


def test_a_picture_of_a_search_has_a_line_a_task(tmp_path: Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    draw_search([SEARCHED], one, "Card")
    draw_search([SEARCHED, SEARCHED], two, "Card")
    assert imread(one).shape[0] < imread(two).shape[0]
    picture = imread(two)
    assert (picture[:, :2] == 1.0).all() and (picture[:, -2:] == 1.0).all()


def test_nothing_measured_is_an_empty_picture(tmp_path: Path) -> None:
    draw(measured(), tmp_path / "map.png", "Card")
    assert (tmp_path / "map.png").stat().st_size > 0
