"""Text for bug reports: everything about the devices and the software between them and vkback."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import vkback
from vkback.device.capabilities import Capabilities
from vkback.device.errors import DeviceError, human_bytes
from vkback.device.instance import list_devices
from vkback.paths import cache_dir

PACKAGES = ("vulkan", "cffi", "numpy", "gguf", "tokenizers")

LISTED_APART = {"heaps", "memory_types", "cooperative_matrix_shapes", "extensions"}


def report(compiler: str = "not asked") -> str:
    """The report on all devices.

    compiler  the shader compiler's name and version
    On a machine without a usable Vulkan the report has the error in place of the devices.
    """
    lines = [
        f"vkback {vkback.__version__}",
        f"python {platform.python_version()} on {platform.platform()} ({platform.machine()}), {sys.executable}",
        "packages " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        f"shader compiler {compiler}",
        f"cache {cache_dir()}",
    ]
    try:
        found: Sequence[Capabilities] = list_devices()
    except DeviceError as error:
        return "\n".join([*lines, str(error), ""])
    for index, caps in enumerate(found):
        lines += ["", caps.summary_line(index), *describe(caps)]
    return "\n".join([*lines, ""])


def data(compiler: str = "not asked") -> dict[str, Any]:
    """The report as plain values; the error in place of the devices where there is no usable Vulkan."""
    about = {
        "version": vkback.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "executable": sys.executable,
        "packages": {name: _version(name) for name in PACKAGES},
        "shader_compiler": compiler,
        "cache": str(cache_dir()),
    }
    try:
        return {**about, "devices": [{"index": index, **caps.to_dict()} for index, caps in enumerate(list_devices())]}
    except DeviceError as error:
        return {**about, "devices": [], "error": str(error)}


def describe(caps: Capabilities) -> list[str]:
    """Every field of a device's capabilities, one per line."""
    lines = []
    for field in dataclasses.fields(caps):
        if field.name not in LISTED_APART:
            value = getattr(caps, field.name)
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            lines.append(f"  {field.name}: {shown}")
    for i, heap in enumerate(caps.heaps):
        lines.append(f"  heap {i}: {human_bytes(heap.size)}{', device-local' if heap.device_local else ''}")
    for i, kind in enumerate(caps.memory_types):
        lines.append(f"  memory type {i}: heap {kind.heap}, {', '.join(kind.flags) or 'no flags'}")
    for s in caps.cooperative_matrix_shapes:
        saturating = ", saturating" if s.saturating else ""
        lines.append(f"  cooperative matrix: {s.m}x{s.n}x{s.k} {s.a} x {s.b} + {s.c} -> {s.result}, {s.scope}{saturating}")
    lines.append("  extensions: " + " ".join(caps.extensions))
    return lines


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
