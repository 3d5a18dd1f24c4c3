"""vkback devices: what Vulkan offers here."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

import vkback
from vkback.errors import VkbackError
from vkback.report.build import build_info

PACKAGES = ("vulkan", "cffi", "numpy", "gguf", "pandas", "rich", "typer", "tokenizers")


def devices(
    report: Annotated[bool, typer.Option("--report", help="All that a bug report needs, as JSON.")] = False,
) -> None:
    """List the Vulkan devices with the index that --device takes."""
    if report:
        print(json.dumps(full_report(), indent=2))
        return
    from vkback.device import list_devices

    for index, caps in enumerate(list_devices()):
        print(caps.summary_line(index))


def full_report() -> dict[str, Any]:
    """Versions of everything that matters and the capabilities of every device; what fails is told in the place of its answer."""
    from vkback.device import list_devices

    found: list[dict[str, Any]] | str
    try:
        found = [caps.to_dict() for caps in list_devices()]
    except VkbackError as e:
        found = f"error: {e}"
    commit, number = build_info()
    return {
        "vkback": {"version": vkback.__version__, "commit": commit, "number": number},
        "python": sys.version,
        "system": {"platform": platform.platform(), "machine": platform.machine(), "release": _system_release()},
        "packages": {name: _version(name) for name in PACKAGES},
        "shader_compiler": _compiler(),
        "devices": found,
    }


def _system_release() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    glslc = shutil.which("glslc")
    if glslc is None:
        return "no glslc on the path"
    return subprocess.run([glslc, "--version"], capture_output=True, text=True, check=False).stdout.strip()
