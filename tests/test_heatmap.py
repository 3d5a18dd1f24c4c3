"""The picture of a sweep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib", reason="the heatmap is an optional extra: pip install vkback[pictures]")

from matplotlib.image import imread

from vkback.report.heatmap import Axes, draw


def measured(*rows: tuple[str, int, int, float]) -> pd.DataFrame:
    return pd.DataFrame(
        [{"quant": quant, "path": "int", "m": m, "k": k, "read_share": share} for quant, m, k, share in rows],
    )


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


def test_nothing_measured_is_an_empty_picture(tmp_path: Path) -> None:
    draw(measured(), tmp_path / "map.png", "Card")
    assert (tmp_path / "map.png").stat().st_size > 0
