"""Results that last: an SQLite file to which vkbench and vkback test-ops append, for `vkback history` and `vkback compare-bench`.

Tables and fields are those of llama-bench's and test-backend-ops' SQL output, `llama_bench` and `test_backend_ops`, with fields of
vkback's own and the samples of each result as a JSON list: readers of these programs' databases take the file. `llama_batched_bench` has
the fields of llama-batched-bench's JSON likewise.

PRAGMA user_version is the version of the schema. A later vkback adds fields that are missing, which is no new version; what changes the
meaning of a field, or moves it, is one, with a step in MIGRATIONS.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from vkback.harness import output as op_output
from vkback.paths import unwritable
from vkback.report.batch_rows import bench_rows
from vkback.report.batch_table import BATCH
from vkback.report.bench_table import BENCH, BenchResult
from vkback.report.result_table import R, ReportError, Result, ResultTable, Writer

BENCH_TABLE = BENCH.sql_table
BATCH_TABLE = BATCH.sql_table
OPS_TABLE = op_output.SQL_TABLE

APPLICATION_ID = 0x766B6273
"""PRAGMA application_id of a store: "vkbs" in ASCII."""

SAMPLES = {BENCH_TABLE: ("samples_ns",), BATCH_TABLE: ("samples_t_pp", "samples_t_tg"), OPS_TABLE: ("samples_us",)}
"""The fields of each table that hold the times of the repetitions, as JSON lists."""

WAIT_S = 30.0
"""How long to wait for another process that is appending."""


def _first(db: sqlite3.Connection) -> None:
    """Version 1: both tables; their fields come with `_complete`."""
    for table in (BENCH_TABLE, OPS_TABLE):
        db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY)")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_first,)
"""Step n brings a store of version n to n + 1."""

VERSION = len(MIGRATIONS)


def is_store(path: Path) -> bool:
    """Whether a file says of itself that it is a store."""
    try:
        with path.open("rb") as f:
            head = f.read(72)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\0") and head[68:72] == APPLICATION_ID.to_bytes(4, "big")


class Store:
    """An open store. Each result is on disk when `add_bench` or `add_op` returns, so that a run that is cut short keeps what it measured.

    Raises ReportError for a file that is no store, that a newer vkback wrote, or that cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        existing = path.exists() and path.stat().st_size > 0
        if existing and not is_store(path):
            raise ReportError(f"{path}: not a store of results; expected a file that vkbench --store made, or a new name")
        if not existing and (why := unwritable(path)):
            raise ReportError(f"{path}: {why}")
        self._copy = existing and not os.access(path, os.W_OK)
        """Of a store that may only be read: it is brought up to date in memory."""
        db: sqlite3.Connection | None = None
        try:
            db = self._db = sqlite3.connect(":memory:" if self._copy else path, timeout=WAIT_S, isolation_level=None)
            if self._copy:
                with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, timeout=WAIT_S)) as stored:
                    stored.backup(self._db)
            self._db.row_factory = sqlite3.Row
            self._upgrade()
        except sqlite3.Error as e:
            if db is not None:
                db.close()  # Windows removes no file that is open
            if not existing and path.is_file() and not path.stat().st_size:
                path.unlink()  # sqlite makes a file before it knows that there is no room in it
            raise ReportError(f"{path}: cannot be used as a store of results: {e}") from e

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._db.close()

    def add(self, table: str, result: Result) -> None:
        """table: of SAMPLES."""
        samples = result.samples()
        self._insert(table, {**result.row(), **{name: json.dumps(samples[name]) for name in SAMPLES[table]}})

    def add_bench(self, result: BenchResult) -> None:
        self.add(BENCH_TABLE, result)

    def add_op(self, record: Mapping[str, Any], samples_us: Sequence[float]) -> None:
        """record: `vkback.harness.output.fields_of` a timed case."""
        self._insert(OPS_TABLE, {**record, "samples_us": json.dumps(list(samples_us))})

    def bench(self) -> pd.DataFrame:
        """All benchmark results in the order of their coming, then those of many sequences at once as tests; samples_ts as lists."""
        alone, batches = self._bench(), self._batches()
        return alone if batches.empty else batches if alone.empty else pd.concat([alone, batches], ignore_index=True)

    def _batches(self) -> pd.DataFrame:
        rows = self._rows(BATCH_TABLE)
        for name in SAMPLES[BATCH_TABLE]:
            rows[name] = [json.loads(text) for text in rows[name]]
        return bench_rows(rows)

    def _bench(self) -> pd.DataFrame:
        rows = self._rows(BENCH_TABLE)
        rows["exact"] = rows["exact"].fillna(0)  # results from before there was the setting
        rows["fusion"] = rows["fusion"].fillna("all")
        tokens = rows["n_prompt"] + rows["n_gen"]
        rows["samples_ts"] = [[1e9 * n / ns for ns in json.loads(text)] for n, text in zip(tokens, rows["samples_ns"], strict=True)]
        return rows

    def ops(self) -> pd.DataFrame:
        """All timed cases of ops in the order of their coming, samples_us as lists."""
        rows = self._rows(OPS_TABLE)
        rows["samples_us"] = [json.loads(text) for text in rows["samples_us"]]
        return rows

    def _rows(self, table: str) -> pd.DataFrame:
        cursor = self._db.execute(f"SELECT * FROM {table} ORDER BY id")
        return pd.DataFrame(cursor.fetchall(), columns=[name for name, *_ in cursor.description], dtype=object)

    def _insert(self, table: str, record: Mapping[str, Any]) -> None:
        if self._copy:
            raise ReportError(f"{self.path}: the result could not be stored: the file may only be read")
        names = ", ".join(record)
        marks = ", ".join("?" * len(record))
        try:
            self._db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(record.values()))
        except sqlite3.Error as e:
            raise ReportError(f"{self.path}: the result could not be stored: {e}") from e

    def _upgrade(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise ReportError(f"{self.path}: a newer vkback wrote it (schema {version}, this one knows {VERSION}); use that one")
            for step in MIGRATIONS[version:]:
                step(self._db)
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {BATCH_TABLE} (id INTEGER PRIMARY KEY)")
            for kind in (BENCH, BATCH):
                self._complete(kind.sql_table, {**kind.field_types(), **dict.fromkeys(SAMPLES[kind.sql_table], "TEXT")})
            self._complete(OPS_TABLE, {**op_output.SQL_FIELDS, "samples_us": "TEXT"})
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _complete(self, table: str, wanted: Mapping[str, str]) -> None:
        """Add the fields that a table lacks."""
        there = {row["name"] for row in self._db.execute(f"PRAGMA table_info({table})")}
        for name, kind in wanted.items():
            if name not in there:
                self._db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")


class StoreWriter(Writer[R]):
    """Appends results to a store as they are measured."""

    def __init__(self, store: Store, table: ResultTable[R]) -> None:
        self._store, self._table = store, table.sql_table

    def row(self, result: R) -> None:
        self._store.add(self._table, result)
