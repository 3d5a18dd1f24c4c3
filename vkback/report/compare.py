"""Before and after: two results joined test by test, with the change of each and whether it beats the noise.

Reads what vkbench and llama-bench write: markdown tables, JSON, JSONL, CSV, SQL statements, or an SQLite file with a table `llama_bench`, a
store of vkbench (vkback/report/store.py) among them. `FILE@COMMIT` stands for the results of one build.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain
from math import atan2, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import pandas as pd

from vkback.records import read_objects
from vkback.report import tables
from vkback.report.batch_rows import bench_rows, is_batch, of_markdown, with_model
from vkback.report.batch_table import BATCH
from vkback.report.bench_table import BENCH, deviation, speed_text
from vkback.report.markdown import Column, head, line, tables_of
from vkback.report.pasted import PastedTable, pairs_of, pasted_tables
from vkback.report.result_table import NotAResult, ReportError
from vkback.report.settings import test_names, texts, unlike
from vkback.report.store import Store, is_store
from vkback.units import params_text, size_text, with_size

SIGNIFICANCE = 0.01
"""A difference beats the noise when chance alone would show one as large less often than this. Tables have tens of rows, so 0.05 would
flag one in twenty of them for nothing."""

ENOUGH_ROWS = 3
"""Of one test without samples: so many rows on both sides are samples themselves, which know what changes between runs, too."""

USUAL = 5
"""Repetitions of llama-bench, unless it is told otherwise."""

REQUIRED = ("model_type", "model_size", "model_n_params", "n_prompt", "n_gen", "avg_ts", "stddev_ts")

SETTINGS = (
    "backends",
    "n_gpu_layers",
    "flash_attn",
    "type_k",
    "type_v",
    "n_batch",
    "n_ubatch",
    "devices",
    "gpu_info",
    "act",
    "exact",
    "feed",
    "fusion",
)
"""Parameters that tell two rows of one file apart; those that never vary inside a file are not compared across files."""

PLACES = ("backends", "devices", "gpu_info")
"""Settings that results beside may have otherwise."""

INTEGERS = ("model_size", "model_n_params", "n_prompt", "n_gen", "n_depth", "n_gpu_layers", "pl", "is_pp_shared")


@dataclass(frozen=True)
class Speed:
    """Tokens per second. n: repetitions behind mean and deviation, None where the file does not say; rows: means of several rows without
    samples that were taken together."""

    mean: float
    deviation: float
    n: int | None
    rows: tuple[float, ...] = ()


@dataclass(frozen=True)
class Change:
    """Whether a speed has changed. beats_noise is None where nothing is known: single repetitions."""

    beats_noise: bool | None
    reason: str


@dataclass(frozen=True)
class Difference:
    """One test in both results. `settings` are the parameters in which tests differ; `beside` has other results for the same test, by
    what they are called, None where they lack it."""

    model: str
    size: str
    params: str
    backend: str
    ngl: str
    settings: Mapping[str, str]
    test: str
    before: Speed
    after: Speed
    change: Change
    beside: Mapping[str, Speed | None] = field(default_factory=dict)
    ratio: float | None = None
    """Of the speeds, where more is known than their means."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for machines."""

    @property
    def percent(self) -> float:
        return 100 * ((self.ratio or self.after.mean / self.before.mean) - 1)


@dataclass(frozen=True)
class Comparison:
    """differences in the order of the old file; tests found in one file only, by their description. labels: what both are called."""

    differences: list[Difference]
    only_before: list[str]
    only_after: list[str]
    labels: tuple[str, str] = ("before", "after")


def load(path: str | Path) -> pd.DataFrame:
    """The rows of a result file, numbers as numbers. Raises ReportError naming the file and what is wrong."""
    path, commit = located(path)
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "no such file"
        raise NotAResult(f"{path}: {wrong}; expected a result of vkbench or llama-bench (md, json, jsonl, csv, sql or sqlite)")
    try:
        rows = _typed(_parse_tests(path))
    except (ValueError, OverflowError, sqlite3.Error) as e:
        raise NotAResult(f"{path}: not a result of vkbench or llama-bench (md, json, jsonl, csv, sql or sqlite): {str(e).strip()}") from e
    if rows.empty:
        raise NotAResult(f"{path}: holds no result")
    return of_commit(rows, path, commit)


def located(path: str | Path) -> tuple[Path, str]:
    """The file and the commit of `FILE@COMMIT`, of `FILE@COMMIT@TUNING` both behind it, or of a plain name nothing."""
    if Path(path).is_file() or "@" not in str(path):
        return Path(path), ""
    name, _, build = str(path).rpartition("@")
    whole, at, commit = name.rpartition("@")
    return (Path(whole), f"{commit}@{build}") if at and not Path(name).is_file() and Path(whole).is_file() else (Path(name), build)


def of_commit(rows: pd.DataFrame, path: Path, build: str) -> pd.DataFrame:
    """The rows of one build and of one set of tuning tables. Raises ReportError where it is in doubt which: for one that is not there, and
    where there are several and none is named."""
    commit, _, tuning = build.partition("@")
    rows = _one(rows, path, "build_commit", ("build", "builds"), commit, "")
    of_build = str(rows["build_commit"].iloc[0]) if "build_commit" in rows and len(rows) else ""
    return _one(rows, path, "tuning", ("set of tuning tables", "sets of tuning tables"), tuning, of_build)


def _one(rows: pd.DataFrame, path: Path, column: str, what: tuple[str, str], named: str, before: str) -> pd.DataFrame:
    """The rows with a value of a column; before: what stands between the file and it in a name."""
    values = texts(rows, column, "")
    known = [value for value in values.unique() if value]
    if not named:
        if len(known) > 1:
            which = f"{'@'.join(filter(None, (path.name, before)))}@{known[-1]} (there are {', '.join(known)})"
            raise ReportError(f"{path}: holds results of {len(known)} {what[1]}; say which, as {which}")
        return rows
    found = [c for c in known if c.startswith(named)]
    if len(found) != 1:
        count = "more than one" if found else "no"
        raise ReportError(f"{path}: {count} {what[0]} is called {named}; there are {', '.join(known) or 'none'}")
    chosen: pd.DataFrame = rows[values == found[0]]
    return chosen


def _parse_tests(path: Path) -> pd.DataFrame:
    rows = _parse(path)
    return bench_rows(rows) if is_batch(rows.columns) else rows


def _parse(path: Path) -> pd.DataFrame:
    if is_store(path):
        with Store(path) as store:
            return store.bench()
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3\0"):
        with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as db:
            return _rows_of(db)
    text = data.decode("utf-8-sig").strip()
    if text.upper().startswith("CREATE TABLE"):
        with closing(sqlite3.connect(":memory:")) as db:
            db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # a result file has no business with other files
            db.executescript(text)
            return _rows_of(db)
    if tables_of(text):
        return _of_markdown(text)
    if not text.startswith(("[", "{")):
        return pd.read_csv(StringIO(text), dtype=object, keep_default_na=False, index_col=False) if text else pd.DataFrame()
    return pd.DataFrame(read_objects(text), dtype=object)


def pasted(text: str, name: str, repetitions: int | None = None) -> dict[str, Comparison]:
    """The comparisons that a text holds, by device (vkback/report/pasted.py). name: of the text in errors.

    repetitions  behind each speed, where the text does not say
    """
    found: dict[str, Comparison] = {}
    for device, columns in pairs_of(pasted_tables(text)):
        if "before" not in columns or "after" not in columns:
            continue
        frames = {side: pd.concat([frame_of(table, repetitions) for table in each]) for side, each in columns.items()}
        made = compare(frames.pop("before"), frames.pop("after"), beside=frames)
        title = device or "a device"
        number = sum(known == title or known.startswith(f"{title}, table ") for known in found) + 1
        found[title if number == 1 else f"{title}, table {number}"] = made
    if not found:
        raise NotAResult(
            f"{name}: no table with t/s (before) and t/s (after), and no tables below lines that say before: and after:; "
            "give a second result to compare with"
        )
    return found


def frame_of(table: PastedTable, repetitions: int | None = None) -> pd.DataFrame:
    """The rows of a pasted table with one column of speeds. Raises ValueError for cells that are none."""
    n = table.repetitions or repetitions
    known = {"repetitions": n} if n else {}
    return _typed(pd.DataFrame([{**_bench_row(row), **known} for row in table.rows], dtype=object))


def with_repetitions(rows: pd.DataFrame, repetitions: int | None) -> pd.DataFrame:
    """Rows that say how many repetitions are behind them, unless they do already."""
    return rows if repetitions is None or "repetitions" in rows else rows.assign(repetitions=repetitions)


def _bench_row(row: Mapping[str, str]) -> dict[str, Any]:
    """A row as the other formats have it. Raises ValueError."""
    if lacks := [name for name in ("model", "size", "params", "test", "t/s") if name not in row]:
        raise ValueError(f"a markdown table without the columns {', '.join(lacks)} of vkbench and llama-bench")
    speed, sizes = SPEED.fullmatch(row["t/s"]), TEST.fullmatch(row["test"])
    if speed is None or sizes is None:
        raise ValueError(f"{row['test']}: {row['t/s']}: expected a test as pp512 or tg128, and its speed as 288.00 ± 45.25")
    settings = {FROM_HEADERS.get(name, name): value for name, value in row.items() if name not in NO_SETTINGS}
    return {
        **settings,
        "model_type": row["model"],
        "model_size": _bytes(row["size"]),
        "model_n_params": _count(row["params"]),
        "n_prompt": sizes["pp"] or 0,
        "n_gen": sizes["tg"] or 0,
        "n_depth": sizes["d"] or 0,
        "avg_ts": speed[1],
        "stddev_ts": speed[2],
    }


def _of_markdown(text: str) -> pd.DataFrame:
    """The rows of tables as vkbench and llama-bench print them, and the build that they name. Raises ValueError for other tables."""
    found: list[dict[str, Any]] = []
    for table in tables_of(text):
        for row in table:
            if (batch := of_markdown(row)) is not None:
                found.append(batch)
                continue
            found.append(_bench_row(row))
    if build := BUILD.search(text):
        found = [{**row, "build_commit": build[1], "build_number": build[2]} for row in found]
    return pd.DataFrame(found, dtype=object)


SPEED = re.compile(r"([\d.]+)\s*(?:±|\+-|\+/-)\s*([\d.]+)")
TEST = re.compile(r"(?:pp(?P<pp>\d+))?\+?(?:tg(?P<tg>\d+))?(?:\s*@\s*d(?P<d>\d+))?")
BUILD = re.compile(r"^build: (\S+) \((\d+)\)", re.MULTILINE)
FROM_HEADERS = {
    "backend": "backends",
    "ngl": "n_gpu_layers",
    "fa": "flash_attn",
    "dev": "devices",
    "threads": "n_threads",
    "sm": "split_mode",
}
"""What columns of these tables are called in other formats."""
NO_SETTINGS = ("model", "size", "params", "test", "t/s", "GB/s", "% read", "TFLOPS", "% math")


def _bytes(text: str) -> int:
    """Of "4.58 GiB"."""
    number, unit = text.split()
    return round(float(number) * 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit))


def _count(text: str) -> int:
    """Of "8.03 B", in thousands, millions, billions or trillions."""
    number, _, unit = text.partition(" ")
    return round(float(number) * 1000.0 ** ("", "K", "M", "B", "T").index(unit))


def _rows_of(db: sqlite3.Connection) -> pd.DataFrame:
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    cursor = db.execute(f"SELECT * FROM {BATCH.sql_table if BATCH.sql_table in there else BENCH.sql_table}")
    return pd.DataFrame(cursor.fetchall(), columns=[name for name, *_ in cursor.description], dtype=object)


def _typed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with their numbers as numbers. Raises ValueError naming what one lacks."""
    if rows.empty:
        return rows
    rows = rows.reindex(columns=rows.columns.union([*REQUIRED, "n_depth"], sort=False))
    known = rows.notna() & (rows != "")
    for number, row in enumerate(known[list(REQUIRED)].itertuples(index=False), start=1):
        missing = [name for name, there in zip(REQUIRED, row, strict=True) if not there]
        if missing:
            raise ValueError(f"result {number} lacks {', '.join(missing)}")
    rows["n_depth"] = rows["n_depth"].where(known["n_depth"], 0)
    for names, number_of in ((INTEGERS, int), (("avg_ts", "stddev_ts"), float)):
        for name in filter(rows.columns.__contains__, names):
            rows[name] = pd.Series([number_of(v) if k else v for v, k in zip(rows[name], known[name], strict=True)], dtype=object)
    return with_sizes(rows)


def with_sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose models are called by their number of parameters where llama-bench says `?B`, as tables of vkbench have it."""
    named = [with_size(str(name), int(n)) for name, n in zip(rows["model_type"], rows["model_n_params"], strict=True)]
    return rows.assign(model_type=pd.Series(named, rows.index, dtype=object))


def compare(
    before: pd.DataFrame, after: pd.DataFrame, *, skip_first: bool = False, beside: Mapping[str, pd.DataFrame] | None = None
) -> Comparison:
    """Join two results on model and test, and on every setting that varies inside one of them.

    skip_first  leave out the first repetition of each test, which often carries what the warm-up did not warm; it needs samples
    beside      further results of the same tests, by what they are called; devices and backends may be others
    Raises ReportError when they share no test.
    """
    before, after = with_model(before, after), with_model(after, before)
    told_apart = [s for s in SETTINGS if any(texts(rows, s).nunique() > 1 for rows in (before, after))]
    told_apart += unlike([group for rows in (before, after) for group in _tests(rows, told_apart).values()], told_apart)
    old, new = (_tests(rows, told_apart) for rows in (before, after))
    alike = [s for s in told_apart if s not in PLACES]
    others = {name: _tests(_like(rows, name, (before, after), alike), alike) for name, rows in (beside or {}).items()}
    differences = []
    for k in (k for k in old if k in new):
        b, a = pooled(old[k], skip_first), pooled(new[k], skip_first)
        same = (*k[:4], *(v for s, v in zip(told_apart, k[4:], strict=True) if s not in PLACES))
        differences.append(
            Difference(
                model=k[0],
                size=k[1],
                params=k[2],
                backend=_both(old[k], new[k], "backends"),
                ngl=_both(old[k], new[k], "n_gpu_layers"),
                settings={s: v for s, v in zip(told_apart, k[4:], strict=True) if s not in ("backends", "n_gpu_layers")},
                test=k[3],
                before=b,
                after=a,
                change=change_between(b, a),
                beside={name: pooled(tests[same], skip_first) if same in tests else None for name, tests in others.items()},
            )
        )
    if not differences:
        raise ReportError(
            f"the two results share no test: the first has {_few(old)}, the second {_few(new)}. "
            "They are joined on model, size, parameters and test"
        )
    return Comparison(differences, [_words(k) for k in old if k not in new], [_words(k) for k in new if k not in old])


def _like(rows: pd.DataFrame, name: str, compared: Sequence[pd.DataFrame], told_apart: Sequence[str]) -> pd.DataFrame:
    """Of a result beside, the rows with the settings of those that are compared. Raises ReportError naming a setting in which several are
    left of one test."""
    for setting in unlike(_tests(rows, told_apart).values(), told_apart):
        found = texts(rows, setting)
        wanted = {value for other in compared for value in texts(other, setting)}
        if setting in PLACES or len(wanted) != 1 or not wanted <= set(found):
            raise ReportError(
                f"--beside {name}: results of one test differ in {setting} ({', '.join(found.unique())}), which the others do not tell "
                "apart; keep those of one"
            )
        rows = rows[found == wanted.pop()]
    return rows


def _tests(rows: pd.DataFrame, told_apart: Sequence[str]) -> dict[tuple[str, ...], pd.DataFrame]:
    """The rows of each test by model, size, parameters, test and settings, in the order of the file."""
    test = pd.Series(test_names(rows), rows.index)
    key = [rows["model_type"].map(str), rows["model_size"].map(size_text), rows["model_n_params"].map(params_text), test]
    key += [texts(rows, s) for s in told_apart]
    return {cast(tuple[str, ...], k): group for k, group in rows.groupby(key, sort=False)}


def _both(before: pd.DataFrame, after: pd.DataFrame, name: str) -> str:
    b, a = (texts(rows, name, "").iloc[0] for rows in (before, after))
    return b if a == b else f"{b} -> {a}"


def _words(key: tuple[str, ...]) -> str:
    return " ".join((key[0], *key[3:]))


def _few(groups: Mapping[tuple[str, ...], Any]) -> str:
    words = [_words(k) for k in groups]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def pooled(rows: pd.DataFrame, skip_first: bool) -> Speed:
    """Rows of one test taken together: all their samples where every row has them, else their means with equal weight."""
    first = rows.iloc[0]
    name = f"{first['model_type']} {test_names(rows)[0]}"
    samples = list(rows["samples_ts"]) if "samples_ts" in rows else []
    if samples and all(isinstance(s, list) and s for s in samples):
        flat = list(chain.from_iterable(s[1:] if skip_first else s for s in samples))
        if not flat:
            raise ReportError(f"{name}: one repetition only, none is left without the first")
        return Speed(fmean(flat), deviation(flat), len(flat))
    if skip_first:
        raise ReportError(f"{name}: no samples to leave the first out of (json and jsonl have them)")
    means = [float(mean) for mean in rows["avg_ts"]]
    within = fmean(d**2 for d in rows["stddev_ts"])
    known = [int(n) for n in rows["repetitions"] if pd.notna(n)] if "repetitions" in rows else []
    n = sum(known) if len(known) == len(rows) else None
    return Speed(fmean(means), sqrt(within + deviation(means) ** 2), n, tuple(means))


def change_between(before: Speed, after: Speed) -> Change:
    """Welch's t-test on what the two are known by: on rows of one test, where there are enough of them, else on their repetitions. Where
    nobody says how many these were, what holds for any number."""
    if min(len(before.rows), len(after.rows)) >= ENOUGH_ROWS:
        return _of_rows(before.rows, after.rows)
    if before.n is not None and after.n is not None:
        return _welch(before, after)
    if before.deviation == after.deviation == 0:
        return Change(None, "no deviation given")
    if before.mean == after.mean:
        return Change(False, "no difference")
    least, usual = (_welch(*(replace(each, n=each.n or n) for each in (before, after))) for n in (2, USUAL))
    return Change(True, "from 2 repetitions on") if least.beats_noise else Change(None, f"{usual.reason} if r = {USUAL}")


def _of_rows(before: Sequence[float], after: Sequence[float]) -> Change:
    """Never "no" where all rows of one side are above all of the other: so few then tell nothing."""
    speeds = (Speed(fmean(means), deviation(means), len(means)) for means in (before, after))
    found = _welch(*speeds)
    apart = max(before) < min(after) or max(after) < min(before)
    return Change(found.beats_noise or (None if apart else False), f"{found.reason} of {len(before)} and {len(after)} rows")


def _welch(before: Speed, after: Speed) -> Change:
    """Of two that say how many repetitions they had."""
    difference = abs(after.mean - before.mean)
    assert before.n is not None and after.n is not None
    if before.n < 2 or after.n < 2:
        return Change(None, "one repetition")
    vb, va = before.deviation**2 / before.n, after.deviation**2 / after.n
    if vb + va == 0:
        return Change(difference > 0, "no spread")
    freedom = (vb + va) ** 2 / (vb**2 / (before.n - 1) + va**2 / (after.n - 1))
    p = two_sided_p(difference / sqrt(vb + va), freedom)
    return Change(p < SIGNIFICANCE, f"p = {p:.2g}")


def two_sided_p(t: float, freedom: float) -> float:
    """Chance that Student's t with `freedom` degrees of freedom is at least |t| from zero; freedom >= 1.

    With t = sqrt(freedom) * tan(angle) the density becomes cos(angle)^(freedom - 1) on a finite interval, which a sum handles at once.
    Beyond 1000 degrees the distribution no longer changes to three digits, while the peak would grow too narrow for the sum.
    """
    freedom = min(freedom, 1000.0)

    def area(start: float) -> float:
        angle = np.linspace(start, np.pi / 2, 4097)
        return float(np.trapezoid(np.cos(angle).clip(0) ** (freedom - 1), angle))

    return area(atan2(abs(t), sqrt(freedom))) / area(0.0)


HEADERS = {"flash_attn": "fa", "devices": "dev", "gpu_info": "device"}
"""What settings are called in tables, where that is not their name."""

_WIDTHS = {"model": 30, "size": 10, "params": 10, "backend": 10, "ngl": 3, "test": 15, "diff": 8, "beats the noise": 24}
"""Columns of the markdown table with their least widths; settings stand before the test. Others are aligned left."""

_RIGHT = ("size", "params", "ngl", "test", "diff")
_GROWING = ("backend", "ngl", "test", "beats the noise")


def _cells(comparison: Comparison) -> pd.DataFrame:
    """The markdown table's cells."""
    return pd.DataFrame(
        [
            {
                "model": d.model,
                "size": d.size,
                "params": d.params,
                "backend": d.backend,
                "ngl": d.ngl,
                **{HEADERS.get(s, s): value for s, value in d.settings.items()},
                "test": d.test,
                **{f"t/s ({name})": _text(s) for name, s in d.beside.items()},
                **{f"t/s ({name})": _text(s) for name, s in zip(comparison.labels, (d.before, d.after), strict=True)},
                "diff": f"{d.percent:+.1f}%",
                "beats the noise": change_text(d.change),
            }
            for d in comparison.differences
        ]
    )


def _text(speed: Speed | None) -> str:
    return "" if speed is None else speed_text(speed.mean, speed.deviation)


def terminal(comparison: Comparison) -> list[str]:
    """The table for a terminal: models as headings, settings that tell rows apart, and a mark at what beats the noise; below it the tests
    that only one file has."""
    marks = {True: " *", False: "  ", None: " ?"}
    cells = pd.DataFrame(
        [
            {
                "model": f"{d.model}, {d.size}, {d.params}",
                **{HEADERS.get(s, s): value for s, value in d.settings.items()},
                "test": d.test,
                **{name: _text(s) for name, s in d.beside.items()},
                "before": _text(d.before),
                "after": _text(d.after),
                "diff": f"{d.percent:+.1f}%{marks[d.change.beats_noise]}",
            }
            for d in comparison.differences
        ]
    )
    numbers = ("test", "before", "after", "diff", *comparison.differences[0].beside)
    found = tables.terminal(cells, [str(c) for c in cells if c not in numbers], group="model")
    found += ["", f"Tokens per second. {NOISE_LEGEND}"]
    return found + list(_only(comparison))


NOISE_LEGEND = "* beats the noise, ? unknown: one run or unsaid."


def _only(comparison: Comparison) -> Iterator[str]:
    for where, tests in (("before", comparison.only_before), ("after", comparison.only_after)):
        if tests:
            yield ""
            yield f"only {where}: {'; '.join(tests)}"


def html(comparison: Comparison, title: str) -> str:
    """The markdown table as a page."""
    return html_of({"": comparison}, title)


def html_of(found: Mapping[str, Comparison], title: str) -> str:
    """The markdown tables of several comparisons as one page, each with its heading."""
    parts = []
    for heading, comparison in found.items():
        cells = _cells(comparison)
        parts.append((heading, cells, [name for name in map(str, cells) if name not in _RIGHT and not name.startswith("t/s")]))
    return tables.page(parts, title)


def _column(cells: pd.Series[str]) -> Column:
    name = str(cells.name)
    width = 20 if name.startswith("t/s") else _WIDTHS.get(name, len(name))
    if name in _GROWING or name not in _WIDTHS:
        width = max(width, int(cells.str.len().max()))
    return Column(name, width, left=name not in _RIGHT and not name.startswith("t/s"))


def change_text(change: Change) -> str:
    word = "unknown" if change.beats_noise is None else "yes" if change.beats_noise else "no"
    return f"{word} ({change.reason})"


def markdown(comparison: Comparison) -> str:
    """The table for people, and below it the tests that only one file has."""
    cells = _cells(comparison)
    columns = [_column(cells[name]) for name in cells]
    text = head(columns) + [line(columns, row) for row in cells.itertuples(index=False)]
    return "\n".join([*text, *_only(comparison)])


def records(comparison: Comparison) -> pd.DataFrame:
    """The differences as flat records, for machines."""
    return pd.DataFrame(
        [
            {
                "model": d.model,
                "size": d.size,
                "params": d.params,
                "backend": d.backend,
                "ngl": d.ngl,
                **d.settings,
                "test": d.test,
                **{f"{name}_ts": s and s.mean for name, s in d.beside.items()},
                "before_ts": d.before.mean,
                "before_stddev_ts": d.before.deviation,
                "after_ts": d.after.mean,
                "after_stddev_ts": d.after.deviation,
                "diff_percent": d.percent,
                "beats_noise": d.change.beats_noise,
                "reason": d.change.reason,
                **d.detail,
            }
            for d in comparison.differences
        ]
    )
