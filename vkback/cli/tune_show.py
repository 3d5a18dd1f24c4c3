"""What `vkback tune` prints and draws: a bar while it runs, tables and heatmaps at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from vkback.autotune.device_table import DeviceTable
    from vkback.autotune.driver import Watcher
    from vkback.autotune.gemm_points import GemmPoint, GemmTask
    from vkback.autotune.points import Point
    from vkback.autotune.tunable import Setting, Tuned, TuneResult
    from vkback.device import Device


class watched:  # noqa: N801  used as a function
    """A progress bar fed by a sweep, as long as the block lasts."""

    def __init__(self, verbose: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        said = TextColumn("{task.fields[said]}")
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), said, transient=True)
        self._row = self._bar.add_task("tune", total=None, said="")
        self._verbose = verbose
        self._points = 0

    def __enter__(self) -> Watcher:
        from vkback.autotune.driver import Watcher

        self._bar.start()
        return Watcher(self._begin, self._point, self._end)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _begin(self, task: Tuned, number: int, total: int) -> None:
        self._points = 0
        self._bar.update(self._row, description=task.line, completed=number, total=total, said="")

    def _point(self, task: Tuned, point: Setting, said: str) -> None:
        self._points += not said.startswith("refused")
        self._bar.update(self._row, said=f"{self._points} points")
        if self._verbose or said.startswith("WRONG"):
            self._bar.console.print(f"  {task.line} [{point.text}] {said}", markup=False, highlight=False, soft_wrap=True)

    def _end(self, result: TuneResult[Any]) -> None:
        self._bar.update(self._row, advance=1)
        if not self._bar.console.is_terminal:
            print(f"  {result.line}: {result.tried} points, {result.latency_before:.2f} -> {result.latency:.2f} us", flush=True)


def show_gemvs(results: Sequence[TuneResult[Point]], own: DeviceTable) -> None:
    """Before and after, a line a GEMV, all in a token's program or none; nothing where there is no GEMV."""
    import pandas as pd

    if not results:
        return
    alone = results[0].match["sync"] == "barrier"
    shown = pd.DataFrame(
        [
            {
                "product": _heading(r, _difference(r.before, r.after)),
                "latency us" if alone else "us a token": f"{r.latency:.2f}",
                "was": f"{r.latency_before:.2f}",
                "change": f"{r.percent:+.1f} %" if r.kept else "",
                "noise": f"{r.noise:.2f}",
                "back to back": f"{r.throughput:.2f}",
                "before": f"{r.throughput_before:.2f}",
                "% of read rate": f"{100 * r.read_share:.0f}",
            }
            for r in results
        ]
    )
    _print_table(shown if alone else shown.drop(columns=["back to back", "before"]))


def _heading(result: TuneResult[Any], change: str) -> str:
    """What was tuned, the setting that it had, and what became of that."""
    return f"{result.line}: {result.before.text}; {change if result.kept else 'nothing better'}"


def _print_table(shown: pd.DataFrame) -> None:
    """A table of strings that fits a terminal, what was tuned above its figures."""
    from vkback.report.tables import terminal

    print("\n" + "\n".join(terminal(shown, (), group="product")))


def _difference(before: Point, after: Point) -> str:
    from vkback.ops.family import table_word

    return ", ".join(f"{name} {table_word(a)}->{table_word(b)}" for name, a, b in zip(before._fields, before, after, strict=True) if a != b)


def show_gemms(results: Sequence[TuneResult[GemmPoint]], quickest: Mapping[str, Mapping[Any, float]], device: Device) -> None:
    """Before and after, a line a product, with the share of the math rate and the shortest time of every kernel tried."""
    import pandas as pd

    from vkback.autotune.gemm_rows import math_share, tflops
    from vkback.shader import ShaderLibrary
    from vkback.timing.math_rate import MathRates

    if not results:
        return
    rates = MathRates(device, ShaderLibrary())
    shown = pd.DataFrame(
        [
            {
                "product": f"{_heading(r, r.after.text)}; kernels' best us: {_each_kernel(quickest.get(r.key, {})) or 'none'}",
                "latency us": f"{r.latency:.2f}",
                "was": f"{r.latency_before:.2f}",
                "change": f"{r.percent:+.1f} %" if r.kept else "",
                "noise": f"{r.noise:.2f}",
                "TFLOPS": f"{tflops(r, r.latency):.4g}",
                "% of math rate": f"{100 * math_share(r, rates):.0f}",
            }
            for r in results
        ]
    )
    _print_table(shown)


def _each_kernel(quickest: Mapping[str, float]) -> str:
    """Kernels with their shortest times, the quickest first."""
    return ", ".join(f"{name} {us:.2f}" for name, us in sorted(quickest.items(), key=lambda item: item[1]))


def show_crossings(own: DeviceTable, tasks: Sequence[GemmTask]) -> None:
    """For each weight that was timed with several numbers of tokens, which kernel was best at which."""
    from vkback.autotune.gemm_points import GemmPoint

    asked = {task.key for task in tasks}
    by_weight: dict[str, list[tuple[int, str]]] = {}
    for r in own.results("gemm", lambda values: GemmPoint(*values)):
        if r.key in asked:
            of = "" if r.match["experts"] == "none" else f", experts {r.match['experts']}"
            name = f"{r.match['quant']} {r.sizes['m']}x{r.sizes['k']}{of}"
            by_weight.setdefault(name, []).append((r.sizes["n"], r.after.kernel))
    for name, found in by_weight.items():
        if len(found) > 1:
            runs = [(kernel, [str(n) for n, _ in run]) for kernel, run in groupby(sorted(found), key=lambda pair: pair[1])]
            print(f"{name}: " + "; ".join(f"{kernel} for {', '.join(ns)} tokens" for kernel, ns in runs))


def nothing(results: Sequence[TuneResult[Any]], own: DeviceTable) -> None:
    """Results of attention are printed as they come."""


def printing(watcher: Watcher, unit: str) -> Watcher:
    """Prints what each task came to when it is done."""

    def begin(task: Any, number: int, total: int) -> None:
        watcher.begin(task, number, total)
        print(task.line)

    return dataclasses.replace(watcher, begin=begin, end=partial(_print_result, unit=unit), fault=print)


def _print_result(result: TuneResult[Setting], unit: str) -> None:
    change = f"{result.percent:+.1f} %" if result.kept else "nothing better"
    print(f"  before: {result.before.text}: {result.latency_before:.2f} {unit} ({result.source})")
    print(f"  after:  {result.after.text}: {result.latency:.2f} {unit}, {change}, of {result.tried} points")


def pictures(own: DeviceTable, device: Device, ops: Sequence[str], file: Path | None) -> Iterator[str]:
    """Heatmaps of all that was timed in chains so far, one a family that was tuned now, or why there is none."""
    try:
        import vkback.report.heatmap  # noqa: F401
    except ImportError:
        yield "no picture: matplotlib is missing, pip install vkback[pictures]"
        return
    if "gemv" in ops:
        yield from _draw_gemvs(own, device, file or own.path.with_suffix(".png"))
    if "gemm" in ops:
        own_file = own.path.with_name(f"{own.path.stem}_gemm.png")
        yield from _draw_gemms(own, device, own_file if file is None or "gemv" in ops else file)


def _draw_gemvs(own: DeviceTable, device: Device, file: Path) -> Iterator[str]:
    from vkback.autotune.points import Point
    from vkback.autotune.tunable import results_table
    from vkback.report.heatmap import draw

    chains = [r for r in own.results("gemv", lambda values: Point(*values)) if r.match["sync"] == "barrier"]
    if not chains:
        yield "no picture: no GEMV was timed by itself"
        return
    draw(results_table(chains), file, f"{device.caps.name}: share of the read rate, launches back to back")
    yield f"picture {file}"
    yield from _draw_search(device, file, [(r, r.nbytes / 1e3 / r.read_rate, "read rate") for r in chains])


def _draw_gemms(own: DeviceTable, device: Device, file: Path) -> Iterator[str]:
    from vkback.autotune.gemm_points import GemmPoint
    from vkback.autotune.gemm_rows import math_share
    from vkback.autotune.tunable import results_table
    from vkback.report.heatmap import Axes, draw
    from vkback.shader import ShaderLibrary
    from vkback.timing.math_rate import MathRates

    results = own.results("gemm", lambda values: GemmPoint(*values))
    if not results:
        yield "no picture: no product of several tokens was timed"
        return
    rates = MathRates(device, ShaderLibrary())
    table = results_table(results)
    table["share"] = [math_share(r, rates) for r in results]
    table["weight"] = [f"{r.sizes['m']}x{r.sizes['k']}" for r in results]
    named = Axes("weight", "weight m x k", "n", "tokens n", "share", "share of math rate")
    draw(table, file, f"{device.caps.name}: share of the math rate, launches that wait for each other", named)
    yield f"picture {file}"
    yield from _draw_search(device, file, [(r, math_share(r, rates) * r.latency, "math rate") for r in results])


def _draw_search(device: Device, beside: Path, results: Sequence[tuple[TuneResult[Any], float, str]]) -> Iterator[str]:
    """A picture of what the last tasks searched, those of an earlier vkback left out, whose points were not kept. results: each with the
    microseconds that it cannot go below, and why."""
    from vkback.report.search_picture import Searched, draw

    tasks = [
        Searched(r.line, tuple(r.after._asdict()), r.timed, tuple(r.after), tuple(r.before), r.noise, roof, name)
        for r, roof, name in results
        if r.timed
    ]
    if tasks:
        file = beside.with_name(f"{beside.stem}_search.png")
        draw(tasks, file, f"{device.caps.name}: latency of the points that were tried; red: the point chosen, dashed: that of the tables")
        yield f"picture {file}"
