"""The scripts of bench/ start: all they import is there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(p.name for p in (REPOSITORY / "bench").glob("*.py"))

pytestmark = pytest.mark.skipif(not SCRIPTS, reason="needs a checkout, not an installed package")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = REPOSITORY / "bench" / name
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code
    assert capsys.readouterr().out.startswith("usage: ")
