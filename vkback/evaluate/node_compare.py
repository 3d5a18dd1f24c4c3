"""Compares the nodes of two runs of a model and names the first whose error is more than rounding explains (docs/comparing_nodes.md)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vkback.arrays import read_arrays
from vkback.errors import VkbackError
from vkback.evaluate.judge import judge, nmse, steps_of
from vkback.evaluate.node_run import Batch, NodeRun
from vkback.evaluate.node_walk import Item, Swap, Walk, WalkValues, Weights, evaluate, ids_of, items_of, own_tolerance
from vkback.evaluate.twin import FLOAT
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.paths import new_file_or

BAND = 4.0
"""NMSE over the expected one that is still within the band, of many values: errors twice as large. Both are sums over the same thousands of
roundings, with other signs. In 60 runs of built-in and tiny models, of 3000 nodes, the quotient was at most 3.5."""

FEW = 64
"""Values of a node whose own expected NMSE is a poor estimate: the mean over the layers counts, if that is more."""

DEVIATIONS = 4.75
"""Standard deviations of the normal distribution that one value in 10^6 is beyond."""

WORST_DEVIATIONS = 8.0
"""Expected rms errors by which one value may be off: of Gaussian errors one in 10^15 is beyond, but rows of a weight differ in length."""

WORST_TIMES = 4.0
"""And times the largest error expected of one value: that of another, as large, may be the one that is off."""

SAVED_FORMAT = 1


class CompareError(VkbackError):
    """Runs that cannot be compared."""


class NotARun(CompareError):  # noqa: N818  what it says is enough
    """A file that was named as a saved run and is none."""

    exit_code = 2


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    values    by name of the item
    expected  (NMSE, rms and largest error) that its own roundings should make, by name; none for an exact run
    """

    label: str
    items: dict[str, Item]
    values: dict[str, Array]
    expected: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    swaps: dict[str, Swap] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A node of both runs.

    nmse      error energy over the reference's energy; of ids the share that differs
    expected  NMSE by the roundings alone; limit: where the band ends, by NMSE; worst, worst_limit: the same of the largest error
    outside   why it is outside the band, "" where it is within
    """

    name: str
    op: str
    sources: tuple[str, ...]
    layer: int | None
    nmse: float
    expected: float
    limit: float
    worst: float
    worst_limit: float
    outside: str = ""

    @property
    def line(self) -> str:
        """As node comparisons of other projects print it."""
        return f"nmse = {self.nmse:.12f} tensor '{self.name}[{', '.join(self.sources)}]' op = {self.op}"


@dataclass(frozen=True)
class Comparison:
    """All rows in the order of the nodes. step: each node was given the device's own inputs."""

    device: str
    against: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    step: bool = False

    @property
    def first(self) -> Row | None:
        """The first node outside the band."""
        return next((r for r in self.rows if r.outside), None)

    @property
    def verdict(self) -> str:
        first = self.first
        if first is None:
            return f"all {len(self.rows)} nodes are within the band"
        made, count = f"{first.op}({', '.join(first.sources)})", sum(bool(r.outside) for r in self.rows)
        return f"first outside the band: {first.name} = {made}: {first.outside}; {count} of {len(self.rows)} nodes are"

    def as_data(self) -> dict[str, Any]:
        first = self.first
        return {
            "device": self.device,
            "against": self.against,
            "step": self.step,
            "verdict": self.verdict,
            "notes": self.notes,
            "first_outside": first.name if first else None,
            "nodes": [asdict(r) for r in self.rows],
        }


def layer_of(name: str) -> int | None:
    """The layer in a node's name: Qcur-3, cache_k_l3."""
    found = re.search(r"-(\d+)(?:\.|$|\s)|_l(\d+)$", name)
    return int(found[1] or found[2]) if found else None


def walked(model: Model, run: NodeRun, batch: Batch, on_node: Callable[[], object] | None = None) -> WalkValues:
    """The nodes of a run in float64, exactly and rounded, with the experts that the device chose."""
    walk = Walk(model, run.nodes, run.ctx)
    for step, device in zip(batch.steps, [*run.earlier, run.values], strict=True):
        made = walk.run(batch.inputs(step), device, on_node)
    return made


def sides(run: NodeRun, made: WalkValues, batch: Batch, label: str, about: Mapping[str, Any]) -> tuple[Side, Side]:
    """The device's run and the exact one, with what roundings should make of the first."""
    items = {i.name: i for i in items_of(run.nodes, run.graph) if i.tensor.name in run.values}
    used = len(batch.tokens)
    got = {name: in_use(i, i.of(run.values), used) for name, i in items.items()}
    want = {name: in_use(i, i.of(made.exact), used) for name, i in items.items()}
    near = {name: in_use(i, i.of(made.rounded), used) for name, i in items.items()}
    expected = {name: _errors(near[name], want[name]) for name in items if want[name].dtype.kind == "f"}
    swaps = {name: swap for name, swap in made.swaps.items() if name in items}
    return Side(label, items, got, expected, swaps, dict(about)), Side("numpy, float64", items, want)


def in_use(item: Item, value: Array, rows: int) -> Array:
    """Of a KV cache [heads, n_ctx, head_dim] the rows that hold tokens."""
    return value[:, :rows] if item.tensor.kind == "state" and value.ndim == 3 and item.tensor.type == "F16" else value


def _errors(got: Array, want: Array) -> tuple[float, float, float]:
    """(NMSE, rms error, largest error)."""
    off = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return nmse(got, want), float(np.sqrt(np.mean(np.square(off)))), float(off.max(initial=0.0))


def compare(a: Side, b: Side) -> Comparison:
    """The nodes that both runs have. Raises CompareError where they have none."""
    rows: list[Row] = []
    notes: list[str] = []
    pooled = _by_kind(a, b)
    for name, item in a.items.items():
        if name not in b.values or a.values[name].size != b.values[name].size:
            continue
        got, want = a.values[name], b.values[name].reshape(a.values[name].shape)
        row = _row(item, name, got, want, a, b, pooled.get(_kind(name), 0.0))
        rows.append(row)
        if want.dtype.kind != "f" and row.nmse and not row.outside:
            notes.append(f"{name}: {row.nmse:.0%} of the choices differ by near ties")
    if not rows:
        raise CompareError(f"[compare] {a.label} and {b.label} have no node in common: are they runs of one model?")
    return Comparison(a.label, b.label, rows, notes)


def band(values: int) -> float:
    """NMSE over the expected one at the end of the band, of a node of so many values: BAND times what chance alone makes of the mean of
    that many squared errors once in 10^6. That is a chi-square over their number; Wilson and Hilferty give its quantile: 1.1 for 4096
    values, 1.8 for 96, 8.8 for 4."""
    spread = 2 / (9 * max(1, values))
    return float(BAND * (1 - spread + DEVIATIONS * spread**0.5) ** 3)


def _kind(name: str) -> str:
    """A node's name without its layer."""
    return re.sub(r"-\d+|_l\d+$", "", name)


def _by_kind(a: Side, b: Side) -> dict[str, float]:
    """The expected NMSE of nodes of one kind, both runs together: the mean over the layers."""
    found: dict[str, list[float]] = {}
    for name in a.items:
        both = [side.expected[name][0] for side in (a, b) if name in side.expected]
        if both:
            found.setdefault(_kind(name), []).append(sum(both))
    return {kind: float(np.mean(errors)) for kind, errors in found.items()}


def _row(item: Item, name: str, got: Array, want: Array, a: Side, b: Side, pooled: float) -> Row:
    layer = layer_of(name)
    if want.dtype.kind != "f":
        swap = a.swaps.get(name)
        differs = float(np.mean(got != want)) if swap is None else 1.0
        outside = ""
        if swap is not None and swap.distance > swap.allowed:
            outside = f"it chose experts {swap.distance:.2g} behind the best, near ties are up to {swap.allowed:.2g}"
        elif swap is None and differs:
            outside = f"{differs:.0%} of the numbers differ"
        return Row(name, item.op, item.sources, layer, differs, 0.0, 0.0, 0.0, 0.0, outside)
    error, _, worst = _errors(got, want)
    energy = float(np.sqrt(np.mean(np.square(want.astype(np.float64))))) if want.size else 0.0
    both = [side.expected[name] for side in (a, b) if name in side.expected]
    expected = sum(e[0] for e in both)
    rms, largest = math.hypot(*(e[1] for e in both)) if both else 0.0, max((e[2] for e in both), default=0.0)
    limit = band(want.size) * (expected if want.size >= FEW else max(expected, pooled)) + FLOAT.nmse
    worst_limit = max(WORST_DEVIATIONS * rms, WORST_TIMES * largest) + FLOAT.worst * energy
    outside = ""
    if not np.isfinite(got).all():
        outside = f"{np.count_nonzero(~np.isfinite(got))} of {got.size} values are not numbers"
        error = worst = math.nan
    elif error > limit:
        outside = f"NMSE {error:.2g}, {expected:.2g} expected, {limit:.2g} at most"
    elif worst > worst_limit:
        place = [int(i) for i in np.unravel_index(int(np.argmax(np.abs(got - want))), got.shape)]
        outside = f"the value at {place} is off by {worst:.2g}, {worst_limit:.2g} at most"
    return Row(name, item.op, item.sources, layer, error, expected, limit, worst, worst_limit, outside)


def compare_steps(model: Model, run: NodeRun, batch: Batch, label: str, on_node: Callable[[], object] | None = None) -> Comparison:
    """Each node alone: its reference, of activations as its kernel rounds them, from the inputs that the device had. Limits are the ops'
    own tolerances; half a step of a Q8_1 output is no error."""
    items = items_of(run.nodes, run.graph)
    step = batch.steps[-1]
    values: dict[str, Array] = {**batch.inputs(step), **run.values}
    rows: list[Row] = []
    packed: list[str] = []
    for number, node in enumerate(run.nodes):
        mine = [i for i in items if i.node == number and i.tensor.name in run.values]
        missing = [t.name for t in node.inputs if t.kind == "node" and t.name not in values]
        if on_node is not None:
            on_node()
        # A packed tensor cannot be read back as values, and neither can a node be judged whose inputs are such.
        if missing or not mine:
            packed.append(node.name)
            continue
        weights = Weights(model, node)
        ids = ids_of(node)
        results = evaluate(node, values, weights, run.ctx, run.values.get(ids.name) if ids else None)
        tolerance = own_tolerance(node, values, weights, run.ctx)
        made = {t.name: r for t, r in zip(node.outputs, results, strict=True)}
        for item in mine:
            want = made[item.tensor.name]
            # The reference has the rows of this node alone, an item counts those of the whole output.
            if item.columns and "rows_total" in node.params:
                first = int(node.params["row0"])
                want = want[..., item.columns[0] - first : item.columns[1] - first]
            got = in_use(item, item.of(run.values), len(batch.tokens))
            want = in_use(item, want.reshape(item.tensor.shape if not item.columns else got.shape), len(batch.tokens))
            steps = steps_of(want) if item.tensor.type == "Q8_1" else None
            verdict = judge(got, want if want.dtype.kind != "f" else want.astype(np.float64), tolerance, steps)
            rows.append(
                Row(
                    item.name,
                    item.op,
                    item.sources,
                    layer_of(item.name),
                    verdict.nmse,
                    0.0,
                    tolerance.nmse,
                    verdict.worst,
                    tolerance.worst,
                    "" if verdict.ok else verdict.text,
                )
            )
    what = "not compared by themselves: their inputs or outputs are packed in an order of the kernels' own"
    notes = [f"{len(packed)} nodes are {what} ({', '.join(packed[:3])}{', ...' if len(packed) > 3 else ''})"] if packed else []
    return Comparison(label, "each node's own reference", rows, notes, True)


def with_own(comparison: Comparison, steps: Comparison) -> Comparison:
    """A comparison in which nodes are outside, too, whose own error is: along the residual stream a fault of one value in thousands is less
    than what rounding has added up before."""
    own = {r.name: r.outside for r in steps.rows if r.outside}
    rows = [
        replace(r, outside="; ".join(filter(None, (r.outside, own[r.name] and f"by itself: {own[r.name]}")))) if r.name in own else r
        for r in comparison.rows
    ]
    return replace(comparison, rows=rows, notes=[*comparison.notes, *(n for n in steps.notes if n not in comparison.notes)])


def growth(rows: Sequence[Row]) -> list[tuple[int, float, float]]:
    """(layer, NMSE, expected NMSE) of the last float node of each layer: how the error grows along the residual stream."""
    last: dict[int, Row] = {}
    for row in rows:
        if row.layer is not None and row.limit > 0.0 and not row.name.startswith("cache"):
            last[row.layer] = row
    return [(layer, row.nmse, row.expected or row.limit) for layer, row in sorted(last.items())]


def growth_lines(rows: Sequence[Row]) -> list[str]:
    """The growth by layer as bars on a logarithmic scale: # what was measured, | what is expected."""
    points, width = growth(rows), 48
    sizes = [v for _, *pair in points for v in pair if v > 0.0 and math.isfinite(v)]
    if not points or not sizes:
        return []
    low = math.floor(math.log10(min(sizes)))
    high = max(math.ceil(math.log10(max(sizes))), low + 1)

    def at(value: float) -> int:
        return 0 if not value > 0.0 else round((math.log10(value) - low) / (high - low) * (width - 1)) + 1

    lines = [f"{'layer':>5} {'nmse':>9} {'expected':>9}  1e{low:+03d}{'1e' + format(high, '+03d'):>{width - 5}}"]
    for layer, measured, expected in points:
        bar = ["#"] * min(at(measured), width) if math.isfinite(measured) else list("not a number")
        bar += [" "] * (width - len(bar))
        bar[max(0, min(at(expected), width) - 1)] = "|"
        lines.append(f"{layer:5} {measured:9.2e} {expected:9.2e}  {''.join(bar).rstrip()}")
    return lines


def save(path: Path, side: Side) -> None:
    """Write a run: values as float32 or int32, what roundings should do to them, and what it is a run of. Raises CompareError where it
    cannot be written."""
    about = {**side.about, "format": SAVED_FORMAT, "label": side.label}
    items = {
        name: [i.op, list(i.sources), i.tensor.type, i.tensor.kind, list(i.tensor.shape), i.node, i.columns]
        for name, i in side.items.items()
    }
    arrays = {f"value {name}": v.astype(np.float32) if v.dtype.kind == "f" else v for name, v in side.values.items()}
    with new_file_or(CompareError, f"[compare] {path}:", path) as part, part.open("wb") as f:
        np.savez_compressed(
            f,
            about=json.dumps(about),
            items=json.dumps(items),
            expected=json.dumps(side.expected),
            **arrays,  # type: ignore[arg-type]
        )


def load(path: Path, about: Mapping[str, Any]) -> Side:
    """Read a saved run. about: what this one is a run of. Raises CompareError where the file is no run, or one of something else."""
    from vkback.graph import Tensor

    try:
        arrays = read_arrays(path)
        saved = dict(json.loads(str(arrays["about"])))
        raw, expected = json.loads(str(arrays["items"])), json.loads(str(arrays["expected"]))
        values = {name: arrays[f"value {name}"] for name in raw}
    except (KeyError, TypeError, ValueError) as e:
        raise NotARun(f"[compare] {path}: no saved run of vkback compare ({e}); write one with --save") from e
    if saved.get("format") != SAVED_FORMAT:
        raise CompareError(f"[compare] {path}: saved in format {saved.get('format')}, expected {SAVED_FORMAT}; save it anew")
    for key, value in about.items():
        if saved.get(key) != value:
            raise CompareError(f"[compare] {path}: its {key} is {saved.get(key)}, this run's is {value}; give both the same")
    items = {
        name: Item(name, op, tuple(sources), Tensor(name, type, tuple(shape), kind), node, tuple(columns) if columns else None)
        for name, (op, sources, type, kind, shape, node, columns) in raw.items()
    }
    return Side(f"{path.name}: {saved['label']}", items, values, {k: (v[0], v[1], v[2]) for k, v in expected.items()}, {}, saved)
