"""How much memory of the host is left, and the limit that a user sets on a device's own."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

from vkback.device.errors import DeviceError

LIMIT = "VKBACK_DEVICE_MB"


class LimitError(DeviceError):
    """VKBACK_DEVICE_MB is no number."""

    exit_code = 2


def device_limit() -> int | None:
    """Bytes of a device's own memory that may be used, by VKBACK_DEVICE_MB; None: all. Raises LimitError."""
    asked = os.environ.get(LIMIT, "")
    if not asked:
        return None
    try:
        limit = float(asked)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise LimitError(f"[memory] {LIMIT} is {asked!r}; expected a number of megabytes above 0, or leave it out to use all memory")
    return int(limit * 1e6)


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [(name, ctypes.c_uint64) for name in "abcdefg"]


def available_bytes() -> int | None:
    """Memory of the host that programs can still take without swapping; None where the system does not tell."""
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        return int(status.b) if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
