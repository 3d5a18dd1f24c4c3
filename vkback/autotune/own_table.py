"""A device's own tuning table: made from what sweeps have found, and kept beside the journal of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkback.autotune.journal import Journal, kernel_identity
from vkback.autotune.points import Point
from vkback.autotune.search import SweepError
from vkback.device import Device
from vkback.paths import tuning_root, write_atomic
from vkback.plan.tuning import Row, Tuning, device_table, load_table, parse_table, row_lines
from vkback.shader import ShaderLibrary


@dataclass(frozen=True)
class TuneResult:
    """What a job came to. Times are microseconds a launch: `latency` of one that waits for the one before, `throughput` back to back; of a
    job in a program both are microseconds a token, and `nbytes` what a token reads.

    before, after  the tables' point and the one to use; the same where nothing beats it
    source         the row that the first came from
    refused, wrong, tried  how many points were not compiled, gave wrong results, were timed
    """

    key: str
    line: str
    match: Mapping[str, Any]
    m: int
    k: int
    before: Point
    source: str
    latency_before: float
    throughput_before: float
    after: Point
    latency: float
    throughput: float
    noise: float
    nbytes: int
    read_rate: float
    tried: int
    refused: int
    wrong: tuple[str, ...]
    date: str

    @property
    def kept(self) -> bool:
        return self.after != self.before

    @property
    def read_share(self) -> float:
        """Bytes a second back to back over the device's read rate."""
        return self.nbytes / self.throughput / 1e3 / self.read_rate

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TuneResult:
        return cls(**{**values, "before": Point(*values["before"]), "after": Point(*values["after"]), "wrong": tuple(values["wrong"])})


class OwnTable:
    """The device's own table and journal.

    folder  where both are, the user's own
    driver  as rows name it, by default the device's
    """

    def __init__(self, device: Device, library: ShaderLibrary, folder: Path, driver: str = "") -> None:
        caps = device.caps
        self._caps, self._folder = caps, folder
        self.driver = driver or f"{caps.driver_name} {caps.driver_info}".strip()
        self.path = folder / device_table(caps)
        self.journal = Journal(
            self.path.with_suffix(".journal"), {"device": caps.name, "driver": self.driver, "kernels": kernel_identity(library)}
        )

    @property
    def results(self) -> list[TuneResult]:
        """Of products, as the journal has them."""
        return [TuneResult.from_json(values) for values in self.journal.results("mat_vec").values()]

    def tables(self) -> Tuning:
        """The tables that come with vkback, this one before them."""
        return Tuning.for_device(self._caps, tuning_root(), user=self._folder)

    def keep(self, result: TuneResult) -> None:
        """Write down what a product came to."""
        self.journal.finish("mat_vec", result.key, result.to_json())
        self.write()

    def write(self, rows: Sequence[Row] = ()) -> None:
        """The table from the journal, checked as any table before it takes the old one's place.

        rows  of other families, in the place of those that speak of the same
        """
        mine = [(r.family, r.match) for r in rows]
        kept = [r for r in load_table(self.path) if r.family not in ("mat_vec", "mat_vec_path") and (r.family, r.match) not in mine]
        text = table_text(self.results, self._caps.name, self.driver, [*kept, *rows])
        parse_table(text, self.path.name)
        if not write_atomic(self.path, text.encode()):
            raise SweepError(f"[tune] {self.path} cannot be written: choose another folder with VKBACK_TUNING")


def edges(values: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each of some sizes the range it speaks for: to the geometric mean with its neighbours, and to a factor of 2 at the ends."""
    ordered = sorted(set(values))
    cuts = [math.ceil(math.sqrt(a * b)) for a, b in itertools.pairwise(ordered)]
    lows = [max(1, ordered[0] // 2), *cuts]
    highs = [*(c - 1 for c in cuts), 2 * ordered[-1]]
    return {v: (low, high) for v, low, high in zip(ordered, lows, highs, strict=True)}


def table_text(results: Iterable[TuneResult], device: str, driver: str, others: Iterable[Row] = ()) -> str:
    """The table of a device: a row for each result that beat the shipped tables, for the sizes around its own; and rows that no sweep
    makes, as they were."""
    lines = [
        f"# {device}, {driver}. Made by `vkback tune`: each row it made beat the tables that come with vkback, beyond the noise.",
        "# Latency: a launch that waits for the one before; throughput: launches back to back. Edit or delete at will.",
    ]
    for row in others:
        lines += ["", *row_lines(row.family, row.match, row.set, row.measured)]
    forms: dict[str, list[TuneResult]] = {}
    for result in results:
        forms.setdefault(json.dumps(result.match, sort_keys=True), []).append(result)
    for _, form in sorted(forms.items()):
        ks = edges([r.k for r in form])
        for k, k_range in sorted(ks.items()):
            ms = edges([r.m for r in form if r.k == k])
            for result in sorted((r for r in form if r.k == k), key=lambda r: r.m):
                if result.kept:
                    lines += ["", *_result_lines(result, ms[result.m], k_range, device, driver)]
    for form_text in _path_rows(forms, device, driver):
        lines += ["", *form_text]
    return "\n".join(lines) + "\n"


def _result_lines(result: TuneResult, m: tuple[int, int], k: tuple[int, int], device: str, driver: str) -> list[str]:
    if result.match["sync"] == "sentinel":
        times = f"{result.latency:.2f} us a token, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f})"
    else:
        times = (
            f"latency {result.latency:.2f} us, was {result.latency_before:.2f} ({result.source}, noise {result.noise:.2f}); "
            f"throughput {result.throughput:.2f} us, was {result.throughput_before:.2f}"
        )
    evidence = f"{result.date} {device}, {driver}, {result.line}: {times}, {100 * result.read_share:.0f} % of the read rate"
    match = {**result.match, "m": _range(m), "k": _range(k)}
    return row_lines("mat_vec", match, result.after._asdict(), evidence)


def _range(ends: tuple[int, int]) -> dict[str, int]:
    return {"min": ends[0], "max": ends[1]}


def _path_rows(forms: Mapping[str, Sequence[TuneResult]], device: str, driver: str) -> Iterator[list[str]]:
    """Rows that choose the path, for products that were tuned on both. Fused forms share the choice of the plain one, if that was tuned."""
    pairs: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, TuneResult]]] = {}
    for result in (r for form in forms.values() for r in form if r.match["sync"] == "barrier"):
        match = result.match
        fused = (match["prologue"], match["glu"], match["y"])
        product = pairs.setdefault((match["ids"], match["n"], match["quant"], result.m, result.k), {})
        product.setdefault(fused, {})[match["path"]] = result
    both = {}
    for key, by_form in pairs.items():
        found = [by_form[fused] for fused in sorted(by_form) if len(by_form[fused]) == 2]
        if found:
            both[key] = found[0]
    for ids, n, quant in sorted({key[:3] for key in both}):
        mine = {key[3:]: pair for key, pair in both.items() if key[:3] == (ids, n, quant)}
        ks = edges([k for _, k in mine])
        for k, k_range in sorted(ks.items()):
            ms = edges([m for m, other in mine if other == k])
            for m, m_range in sorted(ms.items()):
                pair = mine[m, k]
                first = min(pair, key=lambda path: pair[path].latency)
                evidence = (
                    f"{pair[first].date} {device}, {driver}, {quant} {m}x{k}: latency {pair['int'].latency:.2f} us in integers, "
                    f"{pair['float'].latency:.2f} in floats"
                )
                keys = {"ids": ids, "n": n, "quant": quant, "m": _range(m_range), "k": _range(k_range)}
                yield row_lines("mat_vec_path", keys, {"path": first}, evidence)
