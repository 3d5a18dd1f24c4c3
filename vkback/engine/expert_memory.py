"""Which experts lie in memory of the host, where their layers are more than a device holds, and what that costs.

Kernels read them there, through pages that the device imports, so every value has the bits it has with all weights on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vkback.device import Device
from vkback.engine.weight_rows import sources
from vkback.engine.weights import device_bytes
from vkback.graph import Tensor
from vkback.plan.cost.forecast import low_costs
from vkback.plan.schedule import Schedule
from vkback.units import size_text

EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.weight$")
"""Names of tensors of a file that hold the matrices of experts, with their layer."""

HOST_GB_S = 25.0
"""A guess for forecasts: PCIe 4.0 with 16 lanes brings about as much. Two H200s read imported memory at 50."""

LANDING = 32 << 20
"""Bytes of device memory that a load takes beside the weights (CHUNK_BYTES of vkback/engine/weight_stream.py)."""

MARGIN = 0.02
"""Of a device's free memory, which small buffers take that are made later."""

HostRates = Callable[[Device], tuple[float, float]]
"""How fast a device reads its own memory, and that of the host, in GB/s."""


def layer_of(weight: Tensor) -> int | None:
    """The layer whose experts a weight holds; None: it holds none, or is none of several axes."""
    found = [EXPERTS.match(name) for name in sources(weight)] if len(weight.shape) > 2 else []
    return int(found[0][1]) if found and found[0] is not None else None


def guessed_rates(device: Device) -> tuple[float, float]:
    """As `HostRates`, without measuring."""
    own = low_costs(device.caps).read_gb_s
    return own, own if device.caps.software or device.caps.uma else min(own, HOST_GB_S)


@dataclass(frozen=True)
class ExpertMemory:
    """Where experts lie.

    layers   that have experts, in order, and
    in_host  how many of them, the first ones, have these in memory of the host
    names    of the weights there
    nbytes   of these weights
    """

    layers: tuple[int, ...] = ()
    in_host: int = 0
    names: frozenset[str] = frozenset()
    nbytes: int = 0


def expert_memory(weights: Mapping[str, Tensor], first: int, device: Device) -> ExpertMemory:
    """With the experts of the model's layers below `first` in memory of the host."""
    layers: dict[int, list[Tensor]] = {}
    for weight in weights.values():
        if (layer := layer_of(weight)) is not None:
            layers.setdefault(layer, []).append(weight)
    there = [w for layer, found in layers.items() if layer < first for w in found]
    held = sum(layer < first for layer in layers)
    return ExpertMemory(tuple(sorted(layers)), held, frozenset(w.name for w in there), sum(device_bytes(w, device) for w in there))


def fitting(weights: Mapping[str, Tensor], device: Device, schedules: Iterable[Schedule], beside: int) -> ExpertMemory:
    """As few layers' experts in memory of the host as let the rest fit what the device has free; all, where that is not enough.

    schedules  those whose activations are alive at once
    beside     bytes that further caches take
    """
    free = device.free_memory()
    needed = sum(device_bytes(w, device) for w in weights.values()) + sum(s.activation_bytes for s in schedules) + beside
    needed += int(MARGIN * free) + (0 if device.caps.software else LANDING)
    if needed <= free:
        return expert_memory(weights, 0, device)
    found = expert_memory(weights, 0, device)
    for layer in found.layers:
        found = expert_memory(weights, layer + 1, device)
        if needed - found.nbytes <= free:
            break
    return found


def share_left(schedule: Schedule, names: frozenset[str], own_gb_s: float, host_gb_s: float) -> float:
    """The share that is left of the speed of one token, by bytes: 1.0 with all weights on the device."""
    total = schedule.weight_bytes
    there = sum(d.weight_bytes for d in schedule.dispatches() if any(a.tensor.name in names for a in d.args))
    if not total:
        return 1.0
    return total / own_gb_s / ((total - there) / own_gb_s + there / min(own_gb_s, host_gb_s))


def forecast_line(memory: ExpertMemory, share: float, own_gb_s: float, host_gb_s: float, why: str) -> str:
    """What a user is told: how many layers' experts lie in memory of the host, and the speed that is left."""
    return (
        f"{why}: experts of {memory.in_host} of {len(memory.layers)} layers in host memory ({size_text(memory.nbytes)}), forecast "
        f"{100 * share:.0f} % of the speed (a token's bytes at {own_gb_s:.0f} GB/s on the device, {host_gb_s:.0f} GB/s from the host). "
        "--n-cpu-moe N chooses their number"
    )
