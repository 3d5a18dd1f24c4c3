"""Before and after of timed ops: two results of `vkback test-ops perf`, joined case by case.

Reads its json and csv, SQL statements, and SQLite files with a table `test_backend_ops`, stores among them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from vkback.harness.output import SQL_TABLE
from vkback.records import read_objects
from vkback.report import tables
from vkback.report.bench_table import deviation
from vkback.report.compare import NOISE_LEGEND, Change, Speed, change_between, change_text, located, of_commit
from vkback.report.result_table import NotAResult, ReportError
from vkback.report.settings import texts
from vkback.report.store import Store, is_store

SEED = r",?seed=[^,)]*"
"""Of a case's parameters: other values, same work."""


@dataclass(frozen=True)
class OpDifference:
    """A case in both results: microseconds a launch. `percent`: how much more of it runs in the same time."""

    op: str
    params: str
    before: Speed
    after: Speed
    change: Change

    @property
    def percent(self) -> float:
        return 100 * (self.before.mean / self.after.mean - 1)


def load(path: str | Path) -> pd.DataFrame:
    """Timed cases of a file. Raises ReportError naming the file and what is wrong."""
    path, commit = located(path)
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "no such file"
        raise NotAResult(f"{path}: {wrong}; expected a result of vkback test-ops perf (json, csv, sql or sqlite)")
    try:
        rows = _typed(_parse(path))
    except (ValueError, OverflowError, sqlite3.Error) as e:
        raise NotAResult(f"{path}: not a result of vkback test-ops perf (json, csv, sql or sqlite): {str(e).strip()}") from e
    if rows.empty:
        raise NotAResult(f"{path}: holds no timed case")
    return of_commit(rows, path, commit)


def has_ops(path: str | Path) -> bool:
    """Whether a file holds timed ops and no benchmark of a model."""
    path, _ = located(path)
    if not path.is_file():
        return False
    if is_store(path):
        with Store(path) as store:
            return store.bench().empty and not store.ops().empty
    with path.open("rb") as f:
        start = f.read(4096)
    return b"op_name" in start or SQL_TABLE.encode() in start


def _parse(path: Path) -> pd.DataFrame:
    if is_store(path):
        with Store(path) as store:
            return store.ops()
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3\0"):
        with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as db:
            return pd.read_sql_query(f"SELECT * FROM {SQL_TABLE}", db)
    text = data.decode("utf-8-sig").strip()
    if text.upper().startswith("CREATE TABLE"):
        with closing(sqlite3.connect(":memory:")) as db:
            db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # a result file has no business with other files
            db.executescript(text)
            return pd.read_sql_query(f"SELECT * FROM {SQL_TABLE}", db)
    if text.startswith("["):
        return pd.DataFrame(read_objects(text), dtype=object)
    return pd.read_csv(StringIO(text), dtype=object, keep_default_na=False, index_col=False)


def _typed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a time, with times as numbers. Raises ValueError naming what they lack."""
    if missing := [name for name in ("op_name", "op_params", "time_us") if name not in rows] if len(rows) else []:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name in filter(rows.columns.__contains__, ("time_us", "spread_us")):
        rows[name] = [float(v) if v not in (None, "") and v == v else None for v in rows[name]]
    rows = rows[rows["time_us"].notna()] if len(rows) else rows
    if len(rows) and not (rows["time_us"] > 0).all():
        raise ValueError("a time is not above 0")
    return rows


def compare(before: pd.DataFrame, after: pd.DataFrame) -> list[OpDifference]:
    """Cases of both in the order of the first; their seeds may differ. Raises ReportError when they share none."""
    acts = any(texts(rows, "act", "auto").nunique() > 1 for rows in (before, after))
    old, new = _cases(before, acts), _cases(after, acts)
    found = []
    for key in (k for k in old if k in new):
        b, a = pooled(old[key]), pooled(new[key])
        found.append(OpDifference(*key, b, a, change_between(b, a)))
    if not found:
        raise ReportError(
            f"the two results share no case: the first has {len(old)}, the second {len(new)}; they are joined on op and parameters"
        )
    return found


def _cases(rows: pd.DataFrame, acts: bool) -> dict[tuple[str, str], pd.DataFrame]:
    """Rows by op and parameters; acts: and by how activations entered, where a file has several."""
    params = parameters(rows, acts)
    return {(str(op), str(p)): group for (op, p), group in rows.groupby([rows["op_name"], params], sort=False)}


def parameters(rows: pd.DataFrame, acts: bool = True) -> pd.Series[str]:
    """Those of each row without its seed; acts: with how activations entered, where that was chosen."""
    params = rows["op_params"].map(str).str.replace(SEED, "", regex=True)
    given = texts(rows, "act", "auto")
    return params + given.where(given != "auto", "").map(lambda act: act and f",act={act}") if acts else params


def pooled(rows: pd.DataFrame) -> Speed:
    """Rows of a case together: all their samples where every row has them, else means, and the range of each for its deviation."""
    samples = list(rows["samples_us"]) if "samples_us" in rows else []
    if samples and all(isinstance(s, (list, tuple)) and s for s in samples):
        flat: Sequence[float] = [value for s in samples for value in s]
        return Speed(fmean(flat), deviation(flat), len(flat))
    spread: list[Any] = [s for s in rows.get("spread_us", ()) if s not in (None, "")]
    return Speed(fmean(rows["time_us"]), max(map(float, spread), default=0.0), None)


def _cells(found: Sequence[OpDifference]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "case": f"{d.op}({d.params})",
                "us (before)": _text(d.before),
                "us (after)": _text(d.after),
                "speed": f"{d.percent:+.1f}%",
                "beats the noise": change_text(d.change),
            }
            for d in found
        ]
    )


def _text(speed: Speed) -> str:
    return f"{speed.mean:.2f} ± {speed.deviation:.2f}"


def terminal(found: Sequence[OpDifference]) -> list[str]:
    """The table for a terminal, each case a heading; a mark at what beats the noise."""
    marks = {True: " *", False: "  ", None: " ?"}
    cells = pd.DataFrame(
        [
            {
                "case": f"{d.op}({d.params})",
                "us before": _text(d.before),
                "us after": _text(d.after),
                "speed": f"{d.percent:+.1f}%{marks[d.change.beats_noise]}",
            }
            for d in found
        ]
    )
    return [*tables.terminal(cells, ["case"]), "", f"Microseconds a launch. {NOISE_LEGEND}"]


def markdown(found: Sequence[OpDifference]) -> list[str]:
    return tables.markdown(_cells(found), ["case", "beats the noise"])


def html(found: Sequence[OpDifference], title: str) -> str:
    return tables.html(_cells(found), ["case", "beats the noise"], title)


def records(found: Sequence[OpDifference]) -> pd.DataFrame:
    """Flat records, for machines."""
    return pd.DataFrame(
        [
            {
                "op": d.op,
                "params": d.params,
                "before_us": d.before.mean,
                "before_stddev_us": d.before.deviation,
                "after_us": d.after.mean,
                "after_stddev_us": d.after.deviation,
                "speed_percent": d.percent,
                "beats_noise": d.change.beats_noise,
                "reason": d.change.reason,
            }
            for d in found
        ]
    )
