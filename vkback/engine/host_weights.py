"""Which weights lie in memory of the host, where a model is more than a device holds, and what that costs.

Kernels read them there, through pages that the device imports, so every value has the bits it has with all weights on the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vkback.device import Capabilities, Device
from vkback.engine.weights import device_bytes
from vkback.graph import Graph, Tensor
from vkback.ops.moe.expert_cache import cached_tensor
from vkback.plan.cost.forecast import low_costs
from vkback.plan.passes.experts import layer_of
from vkback.plan.passes.lora import is_adapter_tensor
from vkback.plan.schedule import Schedule
from vkback.units import size_text

HOST_GB_S = 25.0
"""A guess for forecasts: PCIe 4.0 with 16 lanes brings about as much. Two H200s read imported memory at 50."""

LANDING = 32 << 20
"""Bytes of device memory that a load takes beside the weights (CHUNK_BYTES of vkback/engine/weight_stream.py)."""

MARGIN = 0.02
"""Of a device's free memory, which small buffers take that are made later."""

BLOCK = re.compile(r"blk\.(\d+)\.")
"""What names of a layer's tensors begin with."""

ALL_SHOWN = 99
"""What is typed, and stands in tables, for all layers."""

HostRates = Callable[[Device], tuple[float, float]]
"""How fast a device reads its own memory, and that of the host, in GB/s."""

LayersOnDevice = int | Literal["auto", "all"]
"""How many layers keep their weights on the device, counted from the output layer backwards."""


def guessed_rates(caps: Capabilities, own: float | None = None) -> tuple[float, float]:
    """As `HostRates`, without measuring. own: where that of a device's own memory is known."""
    own = low_costs(caps).read_gb_s if own is None else own
    return own, own if caps.software or caps.uma else min(own, HOST_GB_S)


def lookup_tables(graphs: Iterable[Graph]) -> frozenset[str]:
    """Names of weights of no layer of which tokens read single rows, and nothing else: an embedding that is the output weight too is
    none."""
    read: dict[str, set[str]] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        for tensor in node.inputs:
            if tensor.kind == "weight" and not BLOCK.match(tensor.name):
                read.setdefault(tensor.name, set()).add(node.op)
    return frozenset(name for name, ops in read.items() if ops == {"GET_ROWS"})


@dataclass(frozen=True)
class HostRule:
    """Which weights of a model lie in memory of the host.

    n_layer  layers of the model; the output layer comes behind them
    tables   names of its `lookup_tables`
    layers   so many layers, from the first on, have all their matrices there; n_layer + 1: those of the output layer, too
    experts  so many have their experts there
    lookups  the tables lie there; they do anyway where a layer does
    """

    n_layer: int
    tables: frozenset[str] = frozenset()
    layers: int = 0
    experts: int = 0
    lookups: bool = False

    def __contains__(self, weight: Tensor) -> bool:
        """Vectors stay on the device: they are small, and read by many workgroups each. So do adapters."""
        if len(weight.shape) == 1 or is_adapter_tensor(weight.name):
            return False
        if weight.name in self.tables:
            return self.lookups or self.layers > 0
        expert = layer_of(weight)
        return self._layer(weight) < self.layers or (expert is not None and expert < self.experts)

    def _layer(self, weight: Tensor) -> int:
        """The layer of a weight; n_layer for those of none, and for blocks behind the layers."""
        names = weight.recipe.sources if weight.recipe else (weight.name,)
        found = [BLOCK.match(name) for name in names]
        return min((min(int(m[1]), self.n_layer) for m in found if m is not None), default=self.n_layer)

    @property
    def cached(self) -> int:
        """Layers below this one have their experts in memory of the host."""
        return max(self.layers, self.experts)

    @property
    def on_device(self) -> int:
        """Layers with all weights on the device but experts, counted as `LayersOnDevice`."""
        return self.n_layer + 1 - self.layers


@dataclass(frozen=True)
class HostWeights:
    """What lies in memory of the host: by which rule, names and bytes of the weights; and the layers of the model that have experts, in
    order."""

    rule: HostRule
    names: frozenset[str] = frozenset()
    nbytes: int = 0
    with_experts: tuple[int, ...] = ()

    @property
    def shown_layers(self) -> int:
        """Layers with all weights on the device but experts, as tables of llama-bench have them: 99 where those are all."""
        return self.rule.on_device if self.rule.layers else ALL_SHOWN

    @property
    def expert_layers(self) -> int:
        """How many layers have their experts there, whether the others of their weights are there or not."""
        return sum(layer < self.rule.experts for layer in self.with_experts)


def host_weights(weights: Mapping[str, Tensor], rule: HostRule, caps: Capabilities) -> HostWeights:
    """Those of these weights that lie there by a rule."""
    there = [w for w in weights.values() if w in rule]
    experts = {layer for w in weights.values() if (layer := layer_of(w)) is not None}
    return HostWeights(rule, frozenset(w.name for w in there), sum(device_bytes(w, caps) for w in there), tuple(sorted(experts)))


@dataclass(frozen=True)
class Placement:
    """What was asked for; None, "auto": as many as must.

    n_gpu_layers  layers that keep their weights on the device
    experts       layers, from the first on, whose experts lie in memory of the host
    """

    n_gpu_layers: LayersOnDevice = "auto"
    experts: int | None = None

    def rule(self, rule: HostRule) -> HostRule:
        """One for the same model, by what was asked for alone."""
        on_device = rule.n_layer + 1 if isinstance(self.n_gpu_layers, str) else self.n_gpu_layers
        return replace(rule, layers=max(rule.n_layer + 1 - on_device, 0), experts=self.experts or 0)

    def choices(self, rule: HostRule, with_experts: Iterable[int]) -> Iterator[HostRule]:
        """That one, and those that may come in its place, each with more in memory of the host: tables, of which a token reads a row each;
        then experts, of which it reads some; then whole layers."""
        found = self.rule(rule)
        yield found
        layers = self.n_gpu_layers == "auto"
        if layers and rule.tables:
            yield (found := replace(found, lookups=True))
        for layer in with_experts if self.experts is None else ():
            yield (found := replace(found, experts=layer + 1))
        for layer in range(rule.n_layer + 1) if layers else ():
            yield replace(found, layers=layer + 1)


def slot_bytes(weights: Mapping[str, Tensor], there: Iterable[str], slots: int, caps: Capabilities) -> int:
    """Bytes of a cache with so many slots for each layer whose experts are there, in memory of the host. there: names."""
    held = [w for name in there if layer_of(w := weights[name]) is not None] if slots else []
    return sum(device_bytes(cached_tensor(w, w.shape[0], min(slots, w.shape[0]), w.name), caps) for w in held)


def fitting(
    weights: Mapping[str, Tensor],
    rule: HostRule,
    asked: Placement,
    caps: Capabilities,
    free: int,
    schedules: Iterable[Schedule],
    beside: int,
    slots: int = 0,
) -> HostWeights:
    """As little in memory of the host as lets the rest fit; all that may, where that is not enough.

    free       bytes that the device has
    schedules  those whose activations are alive at once
    beside     bytes that further caches take
    slots      of a cache of experts, for each of those layers
    """
    needed = sum(device_bytes(w, caps) for w in weights.values()) + sum(s.activation_bytes for s in schedules) + beside
    needed += int(MARGIN * free) + (0 if caps.software else LANDING)
    found = host_weights(weights, rule, caps)
    for each in asked.choices(rule, found.with_experts):
        found = host_weights(weights, each, caps)
        if needed - found.nbytes + slot_bytes(weights, found.names, slots, caps) <= free:
            break
    return found


@dataclass(frozen=True)
class Forecast:
    """How fast generation can be, by the bytes of weights that a token reads. An H200 reached 86 to 95 % of it with weights
    in memory of the host (bench/results/2026-11-28_h200_580-159-04_experts-in-host-memory.md).

    own, host            bytes of the device's memory, and of the host's
    own_gb_s, host_gb_s  how fast the device reads them
    """

    own: int
    host: int
    own_gb_s: float
    host_gb_s: float

    @classmethod
    def of(cls, schedule: Schedule, names: frozenset[str], own_gb_s: float, host_gb_s: float) -> Forecast:
        """schedule: of one token; names: of the weights in memory of the host, which is no faster than the device's own."""
        host = sum(d.weight_bytes for d in schedule.dispatches() if any(a.tensor.name in names for a in d.args))
        return cls(schedule.weight_bytes - host, host, own_gb_s, min(own_gb_s, host_gb_s))

    @property
    def tokens_per_s(self) -> float:
        """Infinite where nothing is read."""
        seconds = self.own / self.own_gb_s + self.host / self.host_gb_s
        return 1e9 / seconds if seconds else math.inf

    @property
    def text(self) -> str:
        read = f"{size_text(self.own)} of its own memory at {self.own_gb_s:.0f} GB/s"
        there = f" and {size_text(self.host)} of the host's at {self.host_gb_s:.0f}" if self.host else ""
        speed = f"{self.tokens_per_s:.0f}" if self.tokens_per_s >= 100 else f"{self.tokens_per_s:.3g}"
        return f"about {speed} t/s (a token reads {read}{there})"


def named(there: HostWeights) -> str:
    """What lies in memory of the host, in words; "" for nothing."""
    rule, what = there.rule, []
    if not there.names:
        return ""
    if rule.layers:
        layers = f"the first {rule.layers} of {rule.n_layer} layers" if rule.layers <= rule.n_layer else f"all {rule.n_layer} layers"
        what.append(layers + " and the output layer" * (rule.layers > rule.n_layer))
    if rule.experts > rule.layers:
        what.append(f"experts of {there.expert_layers} of {len(there.with_experts)} layers")
    return f"{' and '.join(what) or 'embedding tables'} in host memory ({size_text(there.nbytes)})"


def forecast_line(there: HostWeights, forecast: Forecast, why: str) -> str:
    """What a user is told: what lies in memory of the host, and how fast that can be."""
    layers, experts = there.rule.layers, there.rule.experts
    how = ". -ngl N keeps N layers on the device" if layers else ". --n-cpu-moe N chooses their number" if experts else ""
    return f"{why}: {named(there)}, forecast {forecast.text}{how}"
