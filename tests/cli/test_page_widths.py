"""Pages in a headless browser at 1400, 1000 and 420 pixels: nothing sticks out of the window, no name or day is broken."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from browser import Browser, find_browser
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.report import tables

WIDTHS = (1400, 1000, 420)


def test_pages_fit_the_window(tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here to show pages: apt install chromium")
    row = {"where": "a driver " * 12, "date": "2026-11-27", "model": "qwen3moe 30B.A3B Q2_K - Medium", "t/s": "153.52 ± 12.40"}
    (tmp_path / "table.html").write_text(tables.html(pd.DataFrame([row] * 3), ["where", "date", "model"], "Results"), encoding="utf-8")
    out = CliRunner().invoke(cli.app, ["graph", "-m", "demo-dense", "-f", "html"]).stdout
    (tmp_path / "graph.html").write_text(out, encoding="utf-8")
    with Browser(program, tmp_path / "profile") as browser:
        for width in WIDTHS:
            browser.size(width, 900)
            for name in ("table", "graph"):
                browser.open((tmp_path / f"{name}.html").as_uri())
                assert browser.run("innerWidth") == width
                assert browser.run("document.documentElement.scrollWidth") <= width, f"{name} at {width}"
            browser.open((tmp_path / "table.html").as_uri())
            lines = browser.run(
                "[...document.querySelectorAll('td:not(.long)')].map(cell => { const r = document.createRange();"
                " r.selectNodeContents(cell); return r.getClientRects().length; })"
            )
            assert lines == [1] * 9, f"cells in several lines at {width}"
        assert not browser.problems
