"""Which layers each of several devices has: by how fast it reads its memory and how much of it is free, or as somebody asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vkback.device import Device
from vkback.engine.host_weights import HostRule, lookup_tables, slot_bytes
from vkback.engine.load_options import LoadOptions
from vkback.engine.weights import device_bytes
from vkback.errors import VkbackError
from vkback.graph import Graph, Node, Part, cuttable
from vkback.graph.cut import border
from vkback.models.builder import CacheTypes
from vkback.models.registry import Model
from vkback.ops.storage import nbytes
from vkback.plan.cost.forecast import low_costs

Rates = Callable[[Sequence[Device]], Sequence[float]]
"""How fast devices read their memory, in GB/s."""

RESERVE = 1.08
"""Memory that a device needs over its weights and caches: activations of prompts, staging, read-backs."""

TRANSFER_S = 50e-6
"""From one device to the next, for forecasts: two H200s take 47 us by two copies and two waits of the host."""


class SplitError(VkbackError):
    """A model that cannot be cut as asked, or a cut that would only be slower."""

    exit_code = 2


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model on a device. layers: weights and caches of each; first, last: what comes before the layers, and behind them."""

    layers: tuple[int, ...]
    first: int
    last: int

    @property
    def total(self) -> int:
        return self.first + sum(self.layers) + self.last

    def of(self, part: Part) -> int:
        """Those of a part."""
        return self.first * part.begins + sum(self.layers[part.first : part.end]) + self.last * part.ends


def sizes_of(model: Model, device: Device, n_ctx: int, cache: CacheTypes, there: HostRule | None = None, slots: int = 0) -> Sizes:
    """Of a context of so many rows, as this device stores weights. What cannot be cut counts to the layer before. there: weights in memory
    of the host, of which only so many slots of a cache of experts count."""
    there = there or HostRule(model.hp.n_layer)
    graph, n = model.graph(1, n_ctx, head="all", cache=cache), model.hp.n_layer
    places = [layer for layer in range(n) if any(t.name == f"l_out-{layer}" for node in graph.nodes for t in node.outputs)]
    ends = {layer: border(graph, layer + 1) for layer in places}
    bounds = [ends.get(layer, 0) for layer in range(n)]
    seen: set[str] = set()
    layers, at = [], 0
    for bound in bounds:
        layers.append(_bytes(graph.nodes[at : max(bound, at)], device, there, seen, slots))
        at = max(bound, at)
    first = _embedding(graph, device, there)
    layers[0] = max(layers[0] - first, 0)
    return Sizes(tuple(layers), first, _bytes(graph.nodes[at:], device, there, set()))


def _bytes(nodes: Sequence[Node], device: Device, there: HostRule, seen: set[str], slots: int = 0) -> int:
    """Of weights and states that nodes use. there, slots: as of `sizes_of`; seen: those that count already."""
    found = {t.name: t for node in nodes for t in (*node.inputs, *node.outputs) if t.kind in ("weight", "state") and t.name not in seen}
    seen |= found.keys()
    weights = {name: t for name, t in found.items() if t.kind == "weight" and t in there}
    cached = slot_bytes(weights, weights, slots, device.caps)
    found = {name: t for name, t in found.items() if name not in weights}
    return cached + sum(device_bytes(t, device.caps) if t.kind == "weight" else nbytes(t) for t in found.values())


def _embedding(graph: Graph, device: Device, there: HostRule) -> int:
    """Bytes of the tables that tokens are looked up in."""
    tables = {t.name: t for node in graph.nodes if node.op == "GET_ROWS" for t in node.inputs if t.kind == "weight"}
    read = {t.name for node in graph.nodes if node.op == "GET_ROWS" for t in node.inputs if t.name == "tokens"}
    return sum(device_bytes(t, device.caps) for t in tables.values() if t not in there) if read else 0


def layer_parts(model: Model, devices: Sequence[Device], options: LoadOptions, cache: CacheTypes, rates: Rates | None) -> list[Part]:
    """The layers of each device, in order. Raises SplitError for a model that cannot be cut, one that does not fit, and, unless shares were
    asked for, one that one of the devices would run faster alone."""
    name, layers, count = model.file.path.name, model.hp.n_layer, len(devices)
    _check(model, options, name)
    n_ctx = model.context(options.ctx)
    places = cuttable(model.graph(2, n_ctx, head="all", cache=cache), layers, 2)
    if len(places) < count - 1:
        raise SplitError(
            f"[split] {name}: {model.architecture.name} with {layers} layers can be cut in {len(places) + 1} parts, for {count} devices; "
            f"expected at most {len(places) + 1}: name fewer with --device"
        )
    there = options.placement.rule(HostRule(layers, lookup_tables(model.whole_graphs())))
    sizes = [sizes_of(model, device, n_ctx, cache, there, options.expert_cache) for device in devices]
    free = [device.free_memory() for device in devices]
    if options.tensor_split is not None:
        if len(options.tensor_split) != count:
            raise SplitError(
                f"[split] -ts {','.join(f'{s:g}' for s in options.tensor_split)} has {len(options.tensor_split)} shares for {count} "
                "devices; expected one for each (tensor_split in Python)"
            )
        return _cut(sizes[0], options.tensor_split, places)
    alone = [i for i in range(count) if sizes[i].total * RESERVE <= free[i]]
    alike = len({device.caps.name for device in devices}) == 1
    fast = [1.0] * count if alike and not alone else _rates(devices, rates)
    if alone:
        raise _slower(model, devices, sizes, fast, max(alone, key=lambda i: fast[i]))
    return _cut(sizes[0], _shares(name, sizes, devices, free, fast), places)


def _check(model: Model, options: LoadOptions, name: str) -> None:
    """Raises SplitError for what needs all layers on one device."""
    if not model.architecture.causal:
        raise SplitError(f"[split] {name}: {model.architecture.name} makes vectors of whole texts, on one device; name one with --device")
    for option, asked in (("--spec-type", options.spec_type not in (None, "none")), ("--spec-pinned", bool(options.spec_pinned))):
        if asked:
            raise SplitError(f"[split] {option}: drafts are made on one device; leave it out, or name one device with --device")


def _rates(devices: Sequence[Device], rates: Rates | None) -> list[float]:
    """GB/s of each."""
    return list(rates(devices)) if rates is not None else [low_costs(device.caps).read_gb_s for device in devices]


def _slower(model: Model, devices: Sequence[Device], sizes: Sequence[Sizes], fast: Sequence[float], best: int) -> SplitError:
    """Why a model should not be cut that one device holds."""
    share = 1.0 / len(devices)
    read = sizes[best].total - sizes[best].first
    one = read / fast[best] / 1e9
    all_of_them = sum(share * read / rate / 1e9 for rate in fast) + len(devices) * TRANSFER_S
    return SplitError(
        f"[split] {model.file.path.name}: {sizes[best].total / 1e9:.1f} GB fit device {best + 1} of {len(devices)}, "
        f"{devices[best].caps.name}, and a token takes less time there (forecast: {one * 1e3:.2f} ms, over all "
        f"{all_of_them * 1e3:.2f} ms); name it alone with --device, or ask for shares with -ts "
        f"{','.join('1' * len(devices))} (tensor_split in Python), which long prompts gain by"
    )


def _shares(name: str, sizes: Sequence[Sizes], devices: Sequence[Device], free: Sequence[int], fast: Sequence[float]) -> list[float]:
    """Bytes of layers for each device: as fast as it reads, within what is free. Raises SplitError where all together are too small."""
    last = len(devices) - 1
    room = [
        max(memory / RESERVE - (s.first if i == 0 else 0) - (s.last if i == last else 0), 0.0)
        for i, (memory, s) in enumerate(zip(free, sizes, strict=True))
    ]
    need = float(sum(sizes[0].layers))
    if sum(room) < need:
        told = ", ".join(f"{device.caps.name}: {memory / 1e9:.1f} GB" for device, memory in zip(devices, free, strict=True))
        raise SplitError(
            f"[split] {name}: weights and caches take {sizes[0].total / 1e9:.1f} GB, which these devices do not have free ({told}); "
            "expected more devices, a smaller --ctx, a smaller file, or -ngl N: weights of N layers stay there, others in host memory"
        )
    given = [0.0] * len(devices)
    open_ = set(range(len(devices)))
    while need > 1.0 and open_:
        rate = sum(fast[i] for i in open_)
        full = {i for i in open_ if given[i] + need * fast[i] / rate >= room[i]}
        if not full:
            for i in open_:
                given[i] += need * fast[i] / rate
            break
        for i in full:
            need -= room[i] - given[i]
            given[i] = room[i]
        open_ -= full
    return given


def _cut(sizes: Sizes, shares: Sequence[float], places: Sequence[int]) -> list[Part]:
    """Parts whose layers are nearest to these shares, each with one at least; places: where one may begin."""
    total, n = sum(sizes.layers), len(sizes.layers)
    begins, least = [0], 0
    for i in range(1, len(shares)):
        wanted = sum(shares[:i]) / sum(shares) * total
        left = len(shares) - 1 - i  # cuts behind this one
        fits = [p for j, p in enumerate(places) if p > begins[-1] and j >= least and j < len(places) - left]
        chosen = min(fits, key=lambda p: abs(sum(sizes.layers[:p]) - wanted))
        least = list(places).index(chosen) + 1
        begins.append(chosen)
    return [Part(a, b, n) for a, b in zip(begins, [*begins[1:], n], strict=True)]
