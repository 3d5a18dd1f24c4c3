"""How to get on each system what pip cannot bring: the way that an error names."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Part = Literal["driver", "compiler", "validation"]

WANTED: Mapping[Part, str] = {
    "driver": "Install a Vulkan loader and a driver",
    "compiler": "Install wasmtime with pip, which runs the compiler that comes with vkback, or glslc",
    "validation": "Install the validation layers",
}

PACKAGES: Mapping[str, tuple[str, Mapping[Part, str]]] = {
    "apt-get": ("apt install", {"driver": "libvulkan1 mesa-vulkan-drivers", "compiler": "glslc", "validation": "vulkan-validationlayers"}),
    "dnf": ("dnf install", {"driver": "vulkan-loader mesa-vulkan-drivers", "compiler": "glslc", "validation": "vulkan-validation-layers"}),
    "zypper": ("zypper install", {"driver": "libvulkan1 libvulkan_lvp", "compiler": "shaderc", "validation": "vulkan-validationlayers"}),
    "pacman": ("pacman -S", {"driver": "vulkan-icd-loader vulkan-swrast", "compiler": "shaderc", "validation": "vulkan-validation-layers"}),
    "apk": ("apk add", {"driver": "vulkan-loader mesa-vulkan-swrast", "compiler": "shaderc", "validation": "vulkan-validation-layers"}),
    "brew": ("brew install", {"driver": "vulkan-loader molten-vk", "compiler": "shaderc", "validation": "vulkan-validationlayers"}),
}
"""By the program that installs: how it is called, and packages. tools/setup.sh has the same."""

ELSEWHERE: Mapping[str, Mapping[Part, str]] = {
    "windows": {
        "driver": "the graphics driver of the card's maker brings both",
        "compiler": "the Vulkan SDK has both, and puts them in PATH",
        "validation": "the Vulkan SDK has them",
    },
    "macos": {
        "driver": "the Vulkan SDK has both; with Homebrew: brew install vulkan-loader molten-vk",
        "compiler": "the Vulkan SDK has both; with Homebrew: brew install shaderc",
        "validation": "the Vulkan SDK has them",
    },
    "termux": {
        "driver": "in Termux: pkg install vulkan-loader-android",
        "compiler": "in Termux: pkg install shaderc",
        "validation": "in Termux: pkg install vulkan-validation-layers",
    },
    "": {
        "driver": "the system's packages of the Vulkan loader and of Mesa, or the driver of the card's maker",
        "compiler": "the system's package of shaderc, or the Vulkan SDK",
        "validation": "the system's package of them, or the Vulkan SDK",
    },
}


def this_system() -> str:
    """A key of PACKAGES or ELSEWHERE."""
    if sys.platform == "win32":
        return "windows"
    if "TERMUX_VERSION" in os.environ:  # has an apt-get with packages of its own
        return "termux"
    if sys.platform == "darwin":
        return "brew" if shutil.which("brew") else "macos"
    return next((manager for manager in PACKAGES if shutil.which(manager)), "")


def how_to_get(part: Part, system: str | None = None) -> str:
    """A sentence without its end: what to install, and on this system how."""
    system = this_system() if system is None else system
    if system not in PACKAGES:
        return f"{WANTED[part]} ({ELSEWHERE[system][part]})"
    command, packages = PACKAGES[system]
    own = "; NVIDIA: its driver package" if part == "driver" and system != "brew" else ""
    return f"{WANTED[part]} ({command} {packages[part]}{own})"


def mac_loaders(environment: Mapping[str, str], home: Path) -> list[Path]:
    """Vulkan loaders of a Mac that are there, best first: of the SDK, of Homebrew on either processor, of SDKs in the home folder. By
    itself macOS looks in /usr/local/lib alone, where only Homebrew for Intel and an SDK installed for all users put theirs."""
    sdk, brew = environment.get("VULKAN_SDK"), environment.get("HOMEBREW_PREFIX")
    folders = [Path(sdk) / "lib"] if sdk else []
    folders += [Path(prefix) / "lib" for prefix in dict.fromkeys((*([brew] if brew else []), "/opt/homebrew", "/usr/local"))]
    folders += sorted(home.glob("VulkanSDK/*/macOS/lib"), reverse=True)
    files = (folder / name for folder in folders for name in ("libvulkan.1.dylib", "libvulkan.dylib"))
    return [file for file in files if os.access(file, os.R_OK) and file.is_file()]
