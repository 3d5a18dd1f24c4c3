"""Records as csv, sql and json, written one by one as they come: for readers of llama-bench and of test-backend-ops alike."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, TextIO

Record = Mapping[str, Any]


class RecordWriter(ABC):
    """Writes records to a text stream: `begin`, a `write` each, `end`."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def begin(self) -> None:  # noqa: B027  a format without a beginning is a format
        """What comes before the first record."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """One record. Fields that a format does not know are left out."""

    def end(self) -> None:  # noqa: B027
        """What comes after the last record."""

    def put(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


class CsvRecords(RecordWriter):
    """A header, then a line a record with every value in quotes; nothing for None. quote_header: quotes around the names, too."""

    def __init__(self, out: TextIO, fields: Sequence[str], *, quote_header: bool) -> None:
        super().__init__(out)
        self._fields, self._quote_header = list(fields), quote_header

    def begin(self) -> None:
        self._put([], header=True, quoting=csv.QUOTE_ALL if self._quote_header else csv.QUOTE_MINIMAL)

    def write(self, record: Record) -> None:
        values = ["" if record[name] is None else plain(record[name]) for name in self._fields]
        self._put([values], header=False, quoting=csv.QUOTE_ALL)

    def _put(self, rows: list[list[str]], *, header: bool, quoting: Any) -> None:
        import pandas as pd

        self.put(pd.DataFrame(rows, columns=self._fields).to_csv(header=header, index=False, quoting=quoting, lineterminator="\n"))


class SqlRecords(RecordWriter):
    """Statements for sqlite3 that make a table and fill it. types: the SQL type of each field, in their order."""

    def __init__(self, out: TextIO, table: str, types: Mapping[str, str]) -> None:
        super().__init__(out)
        self._table, self._types = table, types

    def begin(self) -> None:
        columns = ",\n".join(f"  {name} {kind}" for name, kind in self._types.items())
        self.put(f"CREATE TABLE IF NOT EXISTS {self._table} (\n{columns}\n);\n")

    def write(self, record: Record) -> None:
        literals = ", ".join(sql_literal(record[name]) for name in self._types)
        self.put(f"INSERT INTO {self._table} ({', '.join(self._types)}) VALUES ({literals});\n")


class JsonLines(RecordWriter):
    """One object a line."""

    def write(self, record: Record) -> None:
        self.put(json.dumps(record) + "\n")


class JsonArray(RecordWriter):
    """One array of objects. indent: spaces a level."""

    def __init__(self, out: TextIO, *, indent: int) -> None:
        super().__init__(out)
        self._indent = indent
        self._first = True

    def begin(self) -> None:
        self.put("[")

    def write(self, record: Record) -> None:
        body = "\n".join(" " * self._indent + text for text in json.dumps(record, indent=self._indent).splitlines())
        self.put(("\n" if self._first else ",\n") + body)
        self._first = False

    def end(self) -> None:
        self.put("\n]\n")


def read_objects(text: str) -> list[dict[str, Any]]:
    """Records of a JSON array, or of lines with an object each, whoever wrote them: `samples_...` are lists of numbers above 0, other
    values text, numbers, truth or None; other lists and objects become their JSON. Raises ValueError naming what is none of it."""
    try:
        found = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    if not all(isinstance(o, dict) for o in found):
        raise ValueError("expected one object a result")
    return [{name: _value(number, name, value) for name, value in o.items()} for number, o in enumerate(found, start=1)]


def _value(number: int, name: str, value: Any) -> Any:
    if not name.startswith("samples_"):
        return json.dumps(value) if isinstance(value, (list, dict)) else value
    if value is None or (isinstance(value, list) and all(isinstance(v, (int, float)) and 0 < v < inf for v in value)):
        return value
    raise ValueError(f"result {number}: {name} is {value!r}, expected a list of numbers above 0")


def plain(value: Any) -> str:
    """A value as text; True and False as 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def sql_literal(value: Any) -> str:
    """A value in a statement: NULL for None and NaN, a number beyond all others for infinity."""
    if value is None or (isinstance(value, float) and value != value):
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if value == float("inf"):
        return "9e999"
    return plain(value)
