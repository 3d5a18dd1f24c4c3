"""Which experts lie in memory of the host, where their layers are more than a device holds, and what that costs.

Kernels read them there, through pages that the device imports, so every value has the bits it has with all weights on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vkback.device import Device
from vkback.engine.weights import device_bytes
from vkback.graph import Tensor
from vkback.ops.moe.expert_cache import cached_tensor
from vkback.plan.cost.forecast import low_costs
from vkback.plan.passes.experts import layer_of
from vkback.plan.schedule import Schedule
from vkback.units import size_text

HOST_GB_S = 25.0
"""A guess for forecasts: PCIe 4.0 with 16 lanes brings about as much. Two H200s read imported memory at 50."""

LANDING = 32 << 20
"""Bytes of device memory that a load takes beside the weights (CHUNK_BYTES of vkback/engine/weight_stream.py)."""

MARGIN = 0.02
"""Of a device's free memory, which small buffers take that are made later."""

HostRates = Callable[[Device], tuple[float, float]]
"""How fast a device reads its own memory, and that of the host, in GB/s."""


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
    below    layers below this one are meant
    """

    layers: tuple[int, ...] = ()
    in_host: int = 0
    names: frozenset[str] = frozenset()
    nbytes: int = 0
    below: int = 0


def expert_memory(weights: Mapping[str, Tensor], first: int, device: Device) -> ExpertMemory:
    """With the experts of the model's layers below `first` in memory of the host."""
    layers: dict[int, list[Tensor]] = {}
    for weight in weights.values():
        if (layer := layer_of(weight)) is not None:
            layers.setdefault(layer, []).append(weight)
    there = [w for layer, found in layers.items() if layer < first for w in found]
    held = sum(layer < first for layer in layers)
    return ExpertMemory(tuple(sorted(layers)), held, frozenset(w.name for w in there), sum(device_bytes(w, device) for w in there), first)


def slot_bytes(weights: Mapping[str, Tensor], memory: ExpertMemory, slots: int, device: Device) -> int:
    """Bytes of a cache with so many slots for each layer in memory of the host."""
    held = [weights[name] for name in memory.names] if slots else []
    return sum(device_bytes(cached_tensor(w, w.shape[0], min(slots, w.shape[0]), w.name), device) for w in held)


def fitting(weights: Mapping[str, Tensor], device: Device, schedules: Iterable[Schedule], beside: int, slots: int = 0) -> ExpertMemory:
    """As few layers' experts in memory of the host as let the rest fit what the device has free; all, where that is not enough.

    schedules  those whose activations are alive at once
    beside     bytes that further caches take
    slots      of a cache of experts, for each of those layers
    """
    free = device.free_memory()
    needed = sum(device_bytes(w, device) for w in weights.values()) + sum(s.activation_bytes for s in schedules) + beside
    needed += int(MARGIN * free) + (0 if device.caps.software else LANDING)
    if needed <= free:
        return expert_memory(weights, 0, device)
    found = expert_memory(weights, 0, device)
    for layer in found.layers:
        found = expert_memory(weights, layer + 1, device)
        if needed - found.nbytes + slot_bytes(weights, found, slots, device) <= free:
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
