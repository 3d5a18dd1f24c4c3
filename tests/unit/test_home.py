"""Users without a home folder, or with one that cannot be written: everything runs, nothing is kept, and no file lands elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from processes import run_program

from vkback import paths

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VKBACK_CACHE", "VKBACK_TUNING", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "APPDATA", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("why", ["HOME is empty", "the system does not know the user"])
def test_without_a_home_nothing_is_kept(why: str, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    if why == "HOME is empty":
        monkeypatch.setenv("HOME", "")
    else:
        monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(sys, "platform", system)
    for folder in (paths.cache_dir(), paths.user_tuning_root()):
        assert Path(os.devnull) in folder.parents and not folder.exists()
        with pytest.raises(OSError):
            folder.mkdir(parents=True)


@pytest.mark.vulkan
@pytest.mark.skipif(sys.platform == "win32", reason="HOME is not asked for there")
@pytest.mark.parametrize("home", ["", "/proc"])
def test_a_text_without_a_home_that_can_be_written(home: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_CACHE", "XDG_CONFIG", "VKBACK_"))}
    env = kept | {"HOME": home, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vkback", "run", "-m", "demo-dense", "-p", "It was", "-n", "2"]
    ran = run_program(command, cwd=tmp_path, env=env, timeout=600)
    assert ran.returncode == 0 and ran.stdout.startswith("It was"), ran.stderr
    assert "nothing can be kept in the cache" in ran.stderr and "Traceback" not in ran.stderr
    assert not list(tmp_path.iterdir())
