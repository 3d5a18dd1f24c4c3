"""What a store tells over time: every test on every device, build by build, with the change against the build before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from vkback.report import compare_ops, tables
from vkback.report.bench_table import speed_text
from vkback.report.compare import NOISE_LEGEND, Change, Speed, change_between, frame_of, pooled, with_sizes
from vkback.report.pasted import SIDES, columns_of, pasted_tables
from vkback.report.result_table import ReportError
from vkback.report.settings import test_names, texts, unlike

VARYING = ("act", "exact", "feed", "flash_attn", "fusion", "n_ubatch", "type_k", "type_v")
"""Settings that tell series apart, shown with the test where they are not what most results have."""


@dataclass(frozen=True)
class Point:
    """One build in a series.

    when    day of its first result
    tuning  of its tuning tables (`BenchResult.tuning`): other tables of the same build are another point
    change  against the point before of the same series; None at the first
    percent how much faster it is than that one
    """

    device: str
    driver: str
    what: str
    test: str
    when: str
    commit: str
    speed: Speed
    unit: str
    tuning: str = ""
    percent: float | None = None
    change: Change | None = None


def of_bench(rows: pd.DataFrame) -> list[Point]:
    """Points of benchmark results, series by series in the order of their first results, builds in the order of theirs."""
    if rows.empty:
        return []
    rows = with_sizes(rows)
    names = test_names(rows)
    by = [pd.Series(names, rows.index)]
    by += [texts(rows, name) for name in ("gpu_info", "driver_info", "model_type", "build_commit", "tuning", *VARYING)]
    varying = [*VARYING, *unlike([group for _, group in rows.groupby(by, sort=False)], (*VARYING, "devices"))]
    shown = rows.assign(model_filename=texts(rows, "model_filename"))
    usual = {name: shown[name].mode().iloc[0] for name in varying if name in shown and shown[name].notna().any()}
    extra = [
        "".join(f" {name} {value}" for name, value in zip(usual, values, strict=True) if pd.notna(value) and value != usual[name])
        for values in shown[list(usual)].itertuples(index=False)
    ]
    named = [t + e for t, e in zip(names, extra, strict=True)]
    keyed = rows.assign(device=rows["gpu_info"], what=rows["model_type"], test=named, unit="t/s")
    return list(_points(keyed, lambda group: pooled(group, skip_first=False)))


def of_text(text: str, repetitions: int | None = None) -> list[Point]:
    """Points of the tables of speeds that a text holds (vkback/report/pasted.py), in its order. A build is called as the text says: by its
    commit, else "before" or "after"; tables that say nothing are "table 1" and so on. Other columns, as t/s (ROCm), are devices of their
    own, and so is a second table of before and after of one device. Raises ReportError for a text without tables, ValueError for cells
    that are none.

    repetitions  behind each speed, where the text does not say
    """
    frames, seen = [], dict[tuple[str, str], list[tuple[str, int]]]()
    for number, table in enumerate(pasted_tables(text), 1):
        for name, column in columns_of(table).items():
            device = (column.device or "a device") + (f", {name}" if name and name not in SIDES else "")
            commit = column.build[0] if column.build else name if name in SIDES else f"table {number}"
            if not column.build and name:
                here = ("block", table.block) if table.side else ("table", number)
                places = seen.setdefault((device, commit if name in SIDES else ""), [])
                if here not in places:
                    places.append(here)
                device += f", table {places.index(here) + 1}" if places.index(here) else ""
                commit = name
            about = {"gpu_info": device, "driver_info": None, "build_commit": commit, "test_time": ""}
            frames.append(frame_of(column, repetitions).assign(**about))
    if not frames:
        raise ReportError("no table of llama-bench or vkbench in it")
    return of_bench(pd.concat(frames, ignore_index=True))


def of_ops(rows: pd.DataFrame) -> list[Point]:
    """Points of timed ops, likewise; microseconds a launch."""
    if rows.empty:
        return []
    keyed = rows.assign(device=rows["device_description"], what=rows["op_name"], test=compare_ops.parameters(rows), unit="us")
    return list(_points(keyed, compare_ops.pooled))


def _points(rows: pd.DataFrame, speed_of: Callable[[pd.DataFrame], Speed]) -> Iterator[Point]:
    series = ["device", "driver_info", "what", "test"]
    filled = rows.assign(driver_info=rows["driver_info"].fillna(""))
    for key, tests in filled.groupby(series, sort=False):
        device, driver, what, test = map(str, key)
        before: Speed | None = None
        builds = tests.groupby([tests["build_commit"], texts(tests, "tuning", "")], sort=False)
        for (commit, tuning), group in sorted(builds, key=lambda item: str(item[1]["test_time"].min())):
            speed, unit = speed_of(group), str(group["unit"].iloc[0])
            if before is None:
                percent = change = None
            else:
                ratio = speed.mean / before.mean if unit == "t/s" else before.mean / speed.mean
                percent, change = 100 * (ratio - 1), change_between(before, speed)
            when = str(group["test_time"].min())[:10]
            yield Point(device, driver, what, test, when, str(commit), speed, unit, str(tuning), percent, change)
            before = speed


def select(points: Sequence[Point], wanted: Mapping[str, str | None], *, since: str | None = None, last: int | None = None) -> list[Point]:
    """Points whose fields contain what is wanted of them, by the field's name, whatever the case; a commit by its beginning.

    since  day, 2026-11-22, before which nothing is shown
    last   only so many builds of each series
    Raises ReportError when nothing is left.
    """
    found = list(points)
    for name, part in wanted.items():
        if part:
            low = part.lower()
            found = [p for p in found if (p.commit.startswith(low) if name == "commit" else low in getattr(p, name).lower())]
    if since:
        found = [p for p in found if p.when >= since]
    if last:
        kept: list[Point] = []
        for point in reversed(found):
            same = sum((p.device, p.driver, p.what, p.test) == (point.device, point.driver, point.what, point.test) for p in kept)
            if same < last:
                kept.append(point)
        found = kept[::-1]
    if not found:
        asked = ", ".join(f"{name} {part}" for name, part in wanted.items() if part) + (f", since {since}" if since else "")
        raise ReportError(
            f"no result matches {asked or 'this'}; the store has {len(points)} points of "
            f"{', '.join(dict.fromkeys(p.device for p in points)) or 'no device'}"
        )
    return found


LEFT = ("date", "build", "model", "test", "device", "driver")


def cells(points: Sequence[Point]) -> pd.DataFrame:
    """The table's texts. `where` is device and driver."""
    marks = {True: " *", False: "  ", None: " ?"}
    builds = Counter((p.device, p.driver, p.what, p.test, p.commit) for p in points)

    def build(p: Point) -> str:
        return f"{p.commit} {p.tuning[:6]}".rstrip() if builds[p.device, p.driver, p.what, p.test, p.commit] > 1 else p.commit

    return pd.DataFrame(
        [
            {
                "where": ", ".join(filter(None, (p.device, p.driver))),
                "date": p.when,
                "build": build(p),
                "model": p.what,
                "test": p.test,
                p.unit: speed_text(p.speed.mean, p.speed.deviation),
                "change": "" if p.percent is None or p.change is None else f"{p.percent:+.1f}%{marks[p.change.beats_noise]}",
            }
            for p in points
        ]
    )


def terminal(points: Sequence[Point]) -> list[str]:
    """The table for a terminal: a part for each device and driver, with a heading for each model, or each case of an op."""
    lines: list[str] = []
    for where, part in cells(points).groupby("where", sort=False):
        shown = part.drop(columns="where")
        if "us" in shown:
            shown = shown.assign(model=shown["model"] + "(" + shown["test"] + ")").drop(columns="test")
        lines += [str(where), *tables.terminal(shown, LEFT, group="model"), ""]
    return [*lines, f"Change against the line before. {NOISE_LEGEND}"]


def records(points: Sequence[Point]) -> pd.DataFrame:
    """Flat records, for machines."""
    return pd.DataFrame(
        [
            {
                "date": p.when,
                "commit": p.commit,
                "device": p.device,
                "driver": p.driver,
                "what": p.what,
                "test": p.test,
                "unit": p.unit,
                "mean": p.speed.mean,
                "stddev": p.speed.deviation,
                "n": p.speed.n,
                "change_percent": p.percent,
                "beats_noise": p.change.beats_noise if p.change else None,
                "reason": p.change.reason if p.change else None,
                "tuning": p.tuning,
            }
            for p in points
        ]
    )
