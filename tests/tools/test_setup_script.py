"""The set-up script: what it says is missing on each system, and what it installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_program

REPOSITORY = Path(__file__).resolve().parents[2]
IS_ROOT = hasattr(os, "getuid") and os.getuid() == 0

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the script is for systems with a shell; docs/install.md has the others")


def setup(goal: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = str(REPOSITORY / "tools" / "setup.sh")
    return run_program(["bash", script, goal], env={**os.environ, **environment})


def test_setup_refuses_an_unknown_goal() -> None:
    done = setup("everything")
    assert done.returncode == 1
    assert done.stderr == "setup: unknown goal 'everything': expected bench, test or dev\n"


def test_setup_says_that_python_is_missing() -> None:
    done = setup("bench", PYTHON="python-not-there")
    assert done.returncode == 1
    assert done.stderr == "setup: python-not-there not found: vkback needs Python 3.11 or newer\n"


MANAGERS = {
    "apt-get": "libvulkan1 mesa-vulkan-drivers glslc",
    "dnf": "sudo dnf install vulkan-loader mesa-vulkan-drivers glslc",
    "pacman": "sudo pacman -S vulkan-icd-loader vulkan-swrast shaderc",
    "zypper": "sudo zypper install libvulkan1 libvulkan_lvp shaderc",
    "apk": "apk add vulkan-loader mesa-vulkan-swrast shaderc",
    "brew": "brew install vulkan-loader molten-vk shaderc",
}


def bare_system(folder: Path, *programs: str) -> dict[str, str]:
    """The environment of a system without Vulkan and compiler, whose package managers are `programs`, scripts that note their arguments in
    the file `called`."""
    bin = folder / "bin"
    bin.mkdir()
    for name in ("bash", "dirname", "env", "grep", "id", "mktemp", "printf", "rm", "sed", "tail", "tr", "uniq"):
        found = shutil.which(name)
        assert found, name
        (bin / name).symlink_to(found)
    for name in programs:
        (bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/called\n[ "$1" != "$FAILS" ]\n')
    python = f'#!/bin/sh\ncase "$2" in *CDLL* | venv) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    (bin / "python3").write_text(python)
    for file in (*(bin / name for name in programs), bin / "python3"):
        file.chmod(0o755)
    gone = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VULKAN_SDK", "HOMEBREW_PREFIX", "TERMUX_VERSION"), "")
    return {"PATH": str(bin), "XDG_DATA_DIRS": str(folder), "HOME": str(folder), "VENV": str(folder / "venv"), **gone}


def has_driver_files() -> bool:
    return any(Path("/etc/vulkan/icd.d").glob("*.json")) or any(Path("/usr/local").glob("*/vulkan/icd.d/*.json"))


needs_no_driver_files = pytest.mark.skipif(has_driver_files(), reason="a driver is registered where every system looks")


@needs_no_driver_files
@pytest.mark.parametrize("manager", MANAGERS)
def test_setup_names_what_each_system_calls_its_packages(manager: str, tmp_path: Path) -> None:
    """apt is run, which then fails here; others are only named."""
    done = setup("bench", **bare_system(tmp_path, manager, "sudo"), FAILS="install" if IS_ROOT else "env")
    assert done.returncode == 1
    assert MANAGERS[manager] in done.stderr


@needs_no_driver_files
def test_setup_in_termux_names_a_way_that_works(tmp_path: Path) -> None:
    done = setup("bench", **(bare_system(tmp_path, "apt-get") | {"TERMUX_VERSION": "0.118"}))
    assert done.returncode == 1 and "proot-distro install debian" in done.stderr
    assert not (tmp_path / "called").exists()


@needs_no_driver_files
@pytest.mark.skipif(not IS_ROOT, reason="apt-get is run by root alone")
@pytest.mark.parametrize(("fails", "status"), [("update", "going on"), ("install", "could not install")])
def test_setup_installs_with_the_lists_that_are_there(fails: str, status: str, tmp_path: Path) -> None:
    done = setup("bench", **bare_system(tmp_path, "apt-get"), FAILS=fails)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[0] == "apt-get update -qq" and called[1].startswith("apt-get install") and called[1].endswith(MANAGERS["apt-get"])
    assert ("apt-get update failed; trying with the lists" in done.stderr) == (fails == "update")
    assert ("could not install" in done.stderr) == (status == "could not install")


@needs_no_driver_files
@pytest.mark.parametrize("driver", ["etc", "share"])
def test_setup_finds_what_homebrew_installed(driver: str, tmp_path: Path) -> None:
    """Its formula of MoltenVK puts the driver's file below etc; other ways put it below share."""
    brew = tmp_path / "brew"
    environment = bare_system(tmp_path, "brew", "glslc") | {"HOMEBREW_PREFIX": str(brew)}
    (brew / driver / "vulkan" / "icd.d").mkdir(parents=True)
    (brew / driver / "vulkan" / "icd.d" / "MoltenVK_icd.json").touch()
    done = setup("bench", **environment)
    assert "missing: loader. Install them with: brew install vulkan-loader" in done.stderr
    (brew / "lib").mkdir()
    (brew / "lib" / "libvulkan.1.dylib").touch()
    assert "missing:" not in setup("bench", **environment).stderr


@pytest.mark.parametrize("script", ["tools/setup.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = REPOSITORY / script
    assert os.access(path, os.X_OK)
    assert run_program(["bash", "-n", str(path)]).returncode == 0
