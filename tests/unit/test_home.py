"""Users without a home folder, or with one that cannot be written: everything runs, nothing is kept, and no file lands elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from processes import run_program

from vkback import paths, systems

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


@pytest.mark.vulkan
@pytest.mark.skipif(sys.platform != "linux", reason="takes root's right to look into every folder away as Linux does")
def test_a_text_with_the_home_of_another_user(tmp_path: Path) -> None:
    """As `sudo` and containers leave HOME and PATH in place: neither may be looked into."""
    home = tmp_path / "home"
    (home / ".config" / "vkback" / "tuning").mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_CACHE", "XDG_CONFIG", "VKBACK_"))}
    env = kept | {"HOME": str(home), "PATH": os.pathsep.join((str(home), os.environ["PATH"])), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vkback", "run", "-m", "demo-dense", "-p", "It was", "-n", "2"]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    home.chmod(0)
    try:
        ran = run_program(command, cwd=tmp_path, env=env, timeout=600)
    finally:
        home.chmod(0o700)
    assert ran.returncode == 0 and ran.stdout.startswith("It was"), ran.stderr
    assert f"no tables are read from {home}/.config/vkback/tuning: Permission denied" in ran.stderr
    assert f"nothing can be kept in the cache {home}/.cache/vkback: Permission denied" in ran.stderr and "Traceback" not in ran.stderr


def test_a_program_in_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(file: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "is_file", forbidden)
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert paths.on_path("glslc") is None
    assert systems.mac_loaders({"HOMEBREW_PREFIX": str(tmp_path)}, tmp_path) == []
