"""Before and after: two results joined test by test, with the difference and whether it beats the noise.

Reads what vkbench and llama-bench write: JSON, JSONL, CSV, SQL statements, or an SQLite file with a table `llama_bench`.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from math import atan2, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from vkback.report.bench_table import SQL_TABLE, ReportError, deviation, params_text, size_text, speed_text, test_name
from vkback.report.markdown import Column, head, line

SIGNIFICANCE = 0.01
"""A difference beats the noise when chance alone would show one as large less often than this. Tables have tens of rows, so 0.05 would
flag one in twenty of them for nothing."""

SPREAD = 3.0
"""Without samples: a difference beats the noise when it exceeds this many times the two deviations taken together."""

Row = Mapping[str, Any]

REQUIRED = ("model_type", "model_size", "model_n_params", "n_prompt", "n_gen", "avg_ts", "stddev_ts")

SETTINGS = ("backends", "n_gpu_layers", "flash_attn", "type_k", "type_v", "n_batch", "n_ubatch", "devices", "gpu_info", "act", "feed")
"""Parameters that tell two rows of one file apart; those that never vary inside a file are not compared across files."""

INTEGERS = ("model_size", "model_n_params", "n_prompt", "n_gen", "n_depth", "n_gpu_layers")


@dataclass(frozen=True)
class Speed:
    """Tokens per second. n: repetitions behind mean and deviation, None where the file does not say."""

    mean: float
    deviation: float
    n: int | None


@dataclass(frozen=True)
class Verdict:
    """beats_noise is None where nothing can be said: single repetitions."""

    beats_noise: bool | None
    reason: str


@dataclass(frozen=True)
class Difference:
    """One test in both results. `settings` are the parameters that had to be told apart."""

    model: str
    size: str
    params: str
    backend: str
    ngl: str
    settings: Mapping[str, str]
    test: str
    before: Speed
    after: Speed
    verdict: Verdict

    @property
    def percent(self) -> float:
        return 100 * (self.after.mean / self.before.mean - 1)


@dataclass(frozen=True)
class Comparison:
    """differences in the order of the old file; tests found in one file only, by their description."""

    differences: list[Difference]
    only_before: list[str]
    only_after: list[str]


def load(path: str | Path) -> list[Row]:
    """The rows of a result file, numbers as numbers. Raises ReportError naming the file and what is wrong."""
    path = Path(path)
    if not path.is_file():
        raise ReportError(f"{path}: no such file; expected a result of vkbench or llama-bench (json, jsonl, csv, sql or sqlite)")
    try:
        rows = [_typed(row, number) for number, row in enumerate(_parse(path), start=1)]
    except (ValueError, sqlite3.Error, csv.Error) as e:
        raise ReportError(f"{path}: not a result of vkbench or llama-bench (json, jsonl, csv, sql or sqlite): {e}") from e
    if not rows:
        raise ReportError(f"{path}: holds no result")
    return rows


def _parse(path: Path) -> list[dict[str, Any]]:
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
    if text.startswith("["):
        rows = json.loads(text)
    elif text.startswith("{"):
        rows = [json.loads(part) for part in text.splitlines() if part.strip()]
    else:
        rows = list(csv.DictReader(text.splitlines()))
    if not all(isinstance(r, dict) for r in rows):
        raise ValueError("expected one object a result")
    return list(rows)


def _rows_of(db: sqlite3.Connection) -> list[dict[str, Any]]:
    db.row_factory = sqlite3.Row
    return [dict(r) for r in db.execute(f"SELECT * FROM {SQL_TABLE}")]


def _typed(row: Row, number: int) -> Row:
    missing = [name for name in REQUIRED if row.get(name) in (None, "")]
    if missing:
        raise ValueError(f"result {number} lacks {', '.join(missing)}")
    typed = {**row, "n_depth": row.get("n_depth") or 0}
    typed |= {name: int(typed[name]) for name in INTEGERS if typed.get(name) not in (None, "")}
    return typed | {name: float(row[name]) for name in ("avg_ts", "stddev_ts")}


def compare(before: Sequence[Row], after: Sequence[Row], *, skip_first: bool = False) -> Comparison:
    """Join two results on model and test, and on every setting that varies inside one of them.

    skip_first  leave out the first repetition of each test, which often carries what the warm-up did not warm; it needs samples
    Raises ReportError when they share no test.
    """
    told_apart = [s for s in SETTINGS if any(len({str(r.get(s)) for r in rows}) > 1 for rows in (before, after))]

    def key(row: Row) -> tuple[str, ...]:
        setting = (str(row.get(s)) for s in told_apart)
        return (row["model_type"], size_text(row["model_size"]), params_text(row["model_n_params"]), _test(row), *setting)

    old, new = _grouped(before, key), _grouped(after, key)
    differences = []
    for k in (k for k in old if k in new):
        b, a = _speed(old[k], skip_first), _speed(new[k], skip_first)
        differences.append(
            Difference(
                model=k[0],
                size=k[1],
                params=k[2],
                backend=_both(old[k][0], new[k][0], "backends"),
                ngl=_both(old[k][0], new[k][0], "n_gpu_layers"),
                settings={s: v for s, v in zip(told_apart, k[4:], strict=True) if s not in ("backends", "n_gpu_layers")},
                test=k[3],
                before=b,
                after=a,
                verdict=judge(b, a),
            )
        )
    if not differences:
        raise ReportError(
            f"the two results share no test: the first has {_few(old)}, the second {_few(new)}. "
            "They are joined on model, size, parameters and test"
        )
    return Comparison(differences, [_words(k) for k in old if k not in new], [_words(k) for k in new if k not in old])


def _test(row: Row) -> str:
    return test_name(row["n_prompt"], row["n_gen"], row["n_depth"])


def _grouped(rows: Iterable[Row], key: Any) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _both(before: Row, after: Row, name: str) -> str:
    b, a = str(before.get(name, "")), str(after.get(name, ""))
    return b if a == b else f"{b} -> {a}"


def _words(key: tuple[str, ...]) -> str:
    return " ".join((key[0], *key[3:]))


def _few(groups: Mapping[tuple[str, ...], Any]) -> str:
    words = [_words(k) for k in groups]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _speed(rows: Sequence[Row], skip_first: bool) -> Speed:
    """Rows of one test taken together: all their samples where every row has them, else their means with equal weight."""
    samples = [r.get("samples_ts") or [] for r in rows]
    if all(samples):
        kept = [s[1:] if skip_first else s for s in samples]
        flat = list(chain.from_iterable(kept))
        if not flat:
            raise ReportError(f"{rows[0]['model_type']} {_test(rows[0])}: one repetition only, none is left without the first")
        return Speed(fmean(flat), deviation(flat), len(flat))
    if skip_first:
        raise ReportError(f"{rows[0]['model_type']} {_test(rows[0])}: no samples to leave the first out of (json and jsonl have them)")
    means = [r["avg_ts"] for r in rows]
    within = fmean(r["stddev_ts"] ** 2 for r in rows)
    return Speed(fmean(means), sqrt(within + deviation(means) ** 2), None)


def judge(before: Speed, after: Speed) -> Verdict:
    """Welch's t-test where both sides say how many repetitions they had, else the difference against the two deviations."""
    difference = abs(after.mean - before.mean)
    if before.n is None or after.n is None:
        spread = sqrt(before.deviation**2 + after.deviation**2)
        if spread == 0:
            return Verdict(None, "no deviation given")
        return Verdict(difference > SPREAD * spread, f"{difference / spread:.1f} deviations")
    if before.n < 2 or after.n < 2:
        return Verdict(None, "one repetition")
    vb, va = before.deviation**2 / before.n, after.deviation**2 / after.n
    if vb + va == 0:
        return Verdict(difference > 0, "no spread")
    freedom = (vb + va) ** 2 / (vb**2 / (before.n - 1) + va**2 / (after.n - 1))
    p = two_sided_p(difference / sqrt(vb + va), freedom)
    return Verdict(p < SIGNIFICANCE, f"p = {p:.2g}")


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


_HEADERS = {"flash_attn": "fa", "devices": "dev", "gpu_info": "device"}


def _columns(comparison: Comparison) -> list[Column]:
    rows = comparison.differences
    names = {s: _HEADERS.get(s, s) for s in rows[0].settings}
    settings = [Column(name, max(len(name), *(len(d.settings[s]) for d in rows)), left=True) for s, name in names.items()]
    return [
        Column("model", 30, left=True),
        Column("size", 10),
        Column("params", 10),
        Column("backend", max(10, *(len(d.backend) for d in rows)), left=True),
        Column("ngl", max(3, *(len(d.ngl) for d in rows))),
        *settings,
        Column("test", 15),
        Column("t/s (before)", 20),
        Column("t/s (after)", 20),
        Column("diff", 8),
        Column("beats the noise", 24, left=True),
    ]


def _cells(d: Difference) -> list[str]:
    return [d.model, d.size, d.params, d.backend, d.ngl, *d.settings.values(), d.test, _speed_cell(d.before), _speed_cell(d.after),
            f"{d.percent:+.1f}%", verdict_text(d.verdict)]  # fmt: skip


def _speed_cell(speed: Speed) -> str:
    return speed_text(speed.mean, speed.deviation)


def verdict_text(verdict: Verdict) -> str:
    word = "unknown" if verdict.beats_noise is None else "yes" if verdict.beats_noise else "no"
    return f"{word} ({verdict.reason})"


def markdown(comparison: Comparison) -> str:
    """The table for people, and below it the tests that only one file has."""
    columns = _columns(comparison)
    text = head(columns) + [line(columns, _cells(d)) for d in comparison.differences]
    for where, tests in (("before", comparison.only_before), ("after", comparison.only_after)):
        if tests:
            text += ["", f"only {where}: {'; '.join(tests)}"]
    return "\n".join(text)


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """The differences as flat records, for machines."""
    return [
        {
            "model": d.model,
            "size": d.size,
            "params": d.params,
            "backend": d.backend,
            "ngl": d.ngl,
            **d.settings,
            "test": d.test,
            "before_ts": d.before.mean,
            "before_stddev_ts": d.before.deviation,
            "after_ts": d.after.mean,
            "after_stddev_ts": d.after.deviation,
            "diff_percent": d.percent,
            "beats_noise": d.verdict.beats_noise,
            "reason": d.verdict.reason,
        }
        for d in comparison.differences
    ]
