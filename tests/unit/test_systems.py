"""What errors say of how to get a driver or a compiler, and where a Mac's loader is looked for."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from processes import run_program

from vkback.systems import ELSEWHERE, PACKAGES, WANTED, how_to_get, mac_loaders, this_system

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("system", [*PACKAGES, *ELSEWHERE])
def test_every_system_has_a_way_for_every_part(system: str) -> None:
    for part, wanted in WANTED.items():
        assert how_to_get(part, system).startswith(f"{wanted} (")


def test_packages_are_those_of_the_setup() -> None:
    script = (ROOT / "tools/setup.sh").read_text(encoding="utf-8")
    for manager, (_, packages) in PACKAGES.items():
        for part, names in packages.items():
            for kind, name in zip(("loader", "driver") if part == "driver" else (part,), names.split(), strict=True):
                assert f"{manager.removesuffix('-get')}:{kind}) echo {name} ;;" in script


@pytest.mark.parametrize(
    ("platform", "programs", "environment", "system"),
    [
        ("linux", ("apt-get",), {}, "apt-get"),
        ("linux", ("apt-get",), {"TERMUX_VERSION": "0.118"}, "termux"),
        ("linux", (), {}, ""),
        ("linux", ("zypper",), {}, "zypper"),
        ("linux", ("apk",), {}, "apk"),
        ("win32", (), {}, "windows"),
        ("darwin", (), {}, "macos"),
        ("darwin", ("brew",), {}, "brew"),
    ],
)
def test_which_system_this_is(
    platform: str, programs: tuple[str, ...], environment: dict[str, str], system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERMUX_VERSION", raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
    assert this_system() == system


def test_loaders_of_a_mac(tmp_path: Path) -> None:
    sdk, brew, home = tmp_path / "sdk", tmp_path / "brew", tmp_path / "home"
    older, newer = (home / "VulkanSDK" / version / "macOS" for version in ("1.3.275.0", "1.4.309.0"))
    files = [folder / "lib" / "libvulkan.1.dylib" for folder in (sdk, brew, newer, older)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    named = {"VULKAN_SDK": str(sdk), "HOMEBREW_PREFIX": str(brew)}
    assert [f for f in mac_loaders(named, home) if tmp_path in f.parents] == files
    assert [f for f in mac_loaders({}, home) if tmp_path in f.parents] == files[2:]


BINDING = """
from vulkan._vulkancache import ffi
for name in ("libvulkan.so.1", "vulkan-1.dll", "libvulkan.dylib"):
    try:
        lib = ffi.dlopen(name)
        break
    except OSError:
        pass
else:
    raise OSError("Cannot find Vulkan SDK version.")
"""
"""How the binding opens the loader."""

CACHE = """
class FFI:
    def new(self): return "made"
    def dlopen(self, name):
        if name != {there!r}: raise OSError(name)
        return name
ffi = FFI()
"""


@pytest.mark.parametrize(
    ("there", "paths", "said"),
    [
        ("libvulkan.dylib", ["/opt/homebrew/lib/libvulkan.1.dylib"], "libvulkan.dylib FFI made"),
        (
            "/opt/homebrew/lib/libvulkan.1.dylib",
            ["/sdk/lib/libvulkan.1.dylib", "/opt/homebrew/lib/libvulkan.1.dylib"],
            "/opt/homebrew/lib/libvulkan.1.dylib FFI made",
        ),
        ("libvulkan.so.1", [], "libvulkan.so.1 FFI made"),
        ("nowhere", ["/sdk/lib/libvulkan.1.dylib"], "Cannot find Vulkan SDK version."),
    ],
)
def test_a_loader_that_the_system_does_not_find_is_opened_by_its_path(there: str, paths: list[str], said: str, tmp_path: Path) -> None:
    package = tmp_path / "vulkan"
    package.mkdir()
    (package / "__init__.py").write_text("from vulkan._vulkan import *\n")
    (package / "_vulkan.py").write_text(BINDING)
    (package / "_vulkancache.py").write_text(CACHE.format(there=there))
    program = f"""
from pathlib import PurePosixPath
import sys
from vkback.device.driver import binding
for name in [name for name in sys.modules if name.startswith("vulkan")]:
    del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
try:
    opened = binding([PurePosixPath(p) for p in {paths!r}])
    print(opened.lib, type(opened.ffi).__name__, opened.ffi.new())
except OSError as e:
    print(e)
"""
    ran = run_program([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ran.stdout.strip() == said, ran.stderr
