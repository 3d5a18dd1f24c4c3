"""What a device draws while it works, where the driver tells: NVIDIA's library (NVML, by the package nvidia-ml-py), or Linux' hwmon.

A counter of energy is read before and after; where there is only a power, a thread reads it meanwhile. A CPU driver has no card of its own.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vkback.device import Capabilities

HWMON = Path("/sys/class/hwmon")

EVERY_S = 0.02
"""Between two readings of a power."""

MIN_S = 0.2
"""Shorter runs get no figure: counters of energy move on in steps of up to a tenth of a second."""


@dataclass(frozen=True)
class PowerSource:
    """Where a device's energy is read: joules() a counter that only grows, or watts() the power of now. name: for people."""

    name: str
    joules: Callable[[], float] | None = None
    watts: Callable[[], float] | None = None


def power_source(caps: Capabilities, hwmon: Path = HWMON) -> tuple[PowerSource | None, str]:
    """Where the power of a device is read, and else why it is not."""
    if caps.software:
        return None, f"{caps.name} is a CPU driver: nothing tells what it draws by itself"
    if caps.vendor == "nvidia":
        return _nvml(caps)
    return _hwmon(caps, hwmon)


def _nvml(caps: Capabilities) -> tuple[PowerSource | None, str]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "NVIDIA's power needs nvidia-ml-py: pip install 'vkback[power]'"
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(nvml, caps))
    except nvml.NVMLError as e:
        return None, f"NVML tells nothing of {caps.name}: {e}"
    with suppress(nvml.NVMLError):
        nvml.nvmlDeviceGetTotalEnergyConsumption(card)
        return PowerSource("NVML, counter of energy", joules=lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3), ""
    try:
        nvml.nvmlDeviceGetPowerUsage(card)
    except nvml.NVMLError as e:
        return None, f"NVML tells no power of {caps.name}: {e}"
    return PowerSource("NVML, power", watts=lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1e3), ""


def _nvml_uuid(nvml: Any, caps: Capabilities) -> str:
    """NVML's name of the card with Vulkan's UUID; of a part of a card (MIG) the only card that there is."""
    wanted = f"GPU-{caps.uuid.lower()}"
    cards = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [each.decode() if isinstance(each, bytes) else str(each) for each in map(nvml.nvmlDeviceGetUUID, cards)]
    return wanted if wanted in uuids or len(uuids) != 1 else uuids[0]


def _hwmon(caps: Capabilities, root: Path) -> tuple[PowerSource | None, str]:
    """The card's sensors: those of a PCI device with its ids. Two equal cards cannot be told apart."""
    cards = [folder for folder in sorted(root.glob("hwmon*")) if _ids(folder / "device") == (caps.vendor_id, caps.device_id)]
    if len(cards) > 1:
        return None, f"{len(cards)} cards like {caps.name} have sensors: which one is meant cannot be told"
    for folder in cards:
        if (energy := folder / "energy1_input").is_file() and _number(energy) is not None:
            return PowerSource(f"hwmon, {energy.name}", joules=lambda: (_number(energy) or 0) / 1e6), ""
        for name in ("power1_average", "power1_input"):
            if (power := folder / name).is_file() and _number(power) is not None:
                return PowerSource(f"hwmon, {name}", watts=lambda: (_number(power) or 0) / 1e6), ""
    return None, f"no sensor of {caps.name} in {root}"


def _ids(device: Path) -> tuple[int, int] | None:
    try:
        return int((device / "vendor").read_text(encoding="utf-8"), 16), int((device / "device").read_text(encoding="utf-8"), 16)
    except (OSError, ValueError):
        return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class Meter:
    """A context manager that measures what is drawn within it. watts: the mean; None where that was too short, or nothing could be read."""

    def __init__(self, source: PowerSource | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.watts: float | None = None
        self._source, self._clock = source, clock
        self._seen: list[float] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._source is not None:
            self._begun = self._clock()
            if self._source.joules is not None:
                self._before = self._source.joules()
            else:
                self._look()
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        return self

    def _look(self) -> None:
        if self._source is not None and self._source.watts is not None:
            self._seen.append(self._source.watts())

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()

    def __exit__(self, *_: object) -> None:
        if self._source is None:
            return
        took = self._clock() - self._begun
        if self._source.joules is not None:
            joules = self._source.joules() - self._before
            self.watts = joules / took if took >= MIN_S and joules > 0 else None
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.watts = sum(self._seen) / len(self._seen) if took >= MIN_S and any(self._seen) else None
