"""A kind of results in the forms that commands offer: md, csv, json, jsonl, sql."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TextIO, TypeVar

from vkback.errors import VkbackError
from vkback.records import CsvRecords, JsonArray, JsonLines, RecordWriter, SqlRecords
from vkback.report.markdown import Column, head, line


class ReportError(VkbackError):
    """A result that cannot be written or read, with the file and what is wrong in it."""


class NotAResult(ReportError):  # noqa: N818  what it says is enough
    """A file that was named as a result and is none."""

    exit_code = 2


class Result(Protocol):
    """What was measured, under which settings, when and by which build."""

    def row(self) -> dict[str, Any]:
        """All fields but the samples, by name, in the order of the machine formats."""

    def samples(self) -> dict[str, list[Any]]:
        """What the repetitions gave, by name; only json and jsonl have it."""


R = TypeVar("R", bound=Result)

FORMATS = ("md", "csv", "json", "jsonl", "sql")

SQL_TYPES = {"b": "INTEGER", "i": "INTEGER", "f": "REAL"}
"""By the kind of a column."""


class Writer(ABC, Generic[R]):
    """Writes results one by one, as they are measured."""

    def header(self, device_line: str = "") -> None:
        """What comes before the first result. device_line: the device in words, for people."""

    @abstractmethod
    def row(self, result: R) -> None: ...

    def footer(self, build: tuple[str, int]) -> None:
        """What comes after the last result. build: commit and number."""


class MarkdownWriter(Writer[R]):
    """columns: how each looks and what it holds."""

    def __init__(self, out: TextIO, columns: Sequence[tuple[Column, Callable[[R], str]]]) -> None:
        self._out = out
        self.columns = [column for column, _ in columns]
        self._cells = [cell for _, cell in columns]

    def header(self, device_line: str = "") -> None:
        if device_line:
            self._print(device_line)
        for text in head(self.columns):
            self._print(text)

    def row(self, result: R) -> None:
        self._print(line(self.columns, [cell(result) for cell in self._cells]))

    def footer(self, build: tuple[str, int]) -> None:
        self._print(f"\nbuild: {build[0]} ({build[1]})")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class RecordsWriter(Writer[R]):
    """Results as records for machines. samples: with those of each repetition."""

    def __init__(self, records: RecordWriter, *, samples: bool = False) -> None:
        self._records, self._samples = records, samples

    def header(self, device_line: str = "") -> None:
        self._records.begin()

    def row(self, result: R) -> None:
        self._records.write({**result.row(), **(result.samples() if self._samples else {})})

    def footer(self, build: tuple[str, int]) -> None:
        self._records.end()


class SqlWriter(RecordsWriter[R]):
    """Statements that make and fill a table, for sqlite3."""

    def header(self, device_line: str = "") -> None:
        super().header(device_line)
        self._records.put("\n")


@dataclass(frozen=True)
class ResultTable(Generic[R]):
    """A kind of results.

    sql_table  its name in SQL statements and in stores
    columns    every column of the markdown table in its order: how it looks and what it holds
    probes     results that have between them every figure that there is: types of fields are theirs
    optional   columns that are there only where they are asked for
    """

    sql_table: str
    columns: Mapping[str, tuple[Column, Callable[[R], str]]]
    probes: Sequence[R]
    optional: Collection[str] = field(default_factory=frozenset)

    def open_writer(self, fmt: str, out: TextIO, extra_columns: Collection[str] = ()) -> Writer[R]:
        """The writer of a format. Raises ReportError naming the formats there are.

        csv   a bare header, then every value in quotes
        json  one array of objects with the samples; jsonl: one object a line, likewise
        sql   statements for sqlite3
        """
        if fmt == "md":
            return MarkdownWriter(out, [c for name, c in self.columns.items() if name not in self.optional or name in extra_columns])
        if fmt == "csv":
            return RecordsWriter(CsvRecords(out, list(self.field_types()), quote_header=False))
        if fmt == "json":
            return RecordsWriter(JsonArray(out, indent=2), samples=True)
        if fmt == "jsonl":
            return RecordsWriter(JsonLines(out), samples=True)
        if fmt == "sql":
            return SqlWriter(SqlRecords(out, self.sql_table, self.field_types()))
        raise ReportError(f"{fmt!r} is not an output format; expected one of {', '.join(FORMATS)}")

    def field_types(self) -> dict[str, str]:
        """Name and SQL type of each field of the machine formats, in order."""
        import pandas as pd

        kinds = pd.DataFrame([probe.row() for probe in self.probes]).dtypes
        return {str(name): SQL_TYPES.get(kind.kind, "TEXT") for name, kind in kinds.items()}
