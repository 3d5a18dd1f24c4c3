"""The scripts of bench/ start: all they import is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(p.name for p in (REPOSITORY / "bench").glob("*.py"))

pytestmark = pytest.mark.skipif(not SCRIPTS, reason="needs a checkout, not an installed package")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_used(name: str) -> None:
    command = [sys.executable, str(REPOSITORY / "bench" / name), "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
