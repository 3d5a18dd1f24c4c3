"""Where benchmarks write their results: stdout, stderr, files and a store, by the same options."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Generic

import typer

from vkback.cli.shell import one_of, output_file, write_output
from vkback.report.result_table import FORMATS, R, ResultTable, Writer

OutputOption = Annotated[str, typer.Option("-o", "--output", help=f"On stdout: {', '.join(FORMATS)}.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="The same as -o json.")]
OutputErrOption = Annotated[str, typer.Option("-oe", "--output-err", help="On stderr: none or a format.")]
SaveOption = Annotated[list[Path] | None, typer.Option(help="Into a file too; its ending names the format. Repeat for several.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", metavar="FILE.sqlite", help="Append to a store, for vkback history and compare-bench.")
]


class Outputs(Generic[R]):
    """Writes results of a kind as they are measured, as a context manager. A run that ends early keeps what it has measured, whole.

    extra  optional columns of the markdown table
    build  commit and number
    inputs files that are not overwritten
    Raises UsageError for options that name no format, or a file that cannot be written.
    """

    def __init__(
        self,
        table: ResultTable[R],
        output: str,
        as_json: bool,
        output_err: str,
        save: Sequence[Path] | None,
        store: Path | None,
        *,
        extra: Collection[str],
        build: tuple[str, int],
        inputs: Sequence[Path] = (),
    ) -> None:
        self._table, self._extra, self._build = table, extra, build
        self._open_files = ExitStack()
        self._shown: list[Writer[R]] = [table.open_writer("json" if as_json else one_of(output, FORMATS, "-o"), sys.stdout, extra)]
        if output_err != "none":
            self._shown.append(table.open_writer(one_of(output_err, ("none", *FORMATS), "-oe"), sys.stderr, extra))
        self._kept = [
            (output_file(path, "--save", *inputs), one_of(path.suffix.lstrip("."), FORMATS, f"--save {path}, ending"))
            for path in save or []
        ]
        if store is not None:
            from vkback.report.store import Store, StoreWriter

            output_file(store, "--store", *inputs)
            self._shown.append(StoreWriter(self._open_files.enter_context(Store(store)), table))
        self._head = ""
        self._results: list[R] = []

    def begin(self, line: str, command: str, where: str) -> None:
        """Once, before the first result.

        line   above the table: the device, and what else all results share
        where  the device in a few words; a table that is kept has it above itself with the day and the command
        """
        for writer in self._shown:
            writer.header(line)
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        self._head = f"    {command}\n\n{today}, {where}\n\n{line}"

    @property
    def results(self) -> Sequence[R]:
        """What came so far."""
        return self._results

    def row(self, result: R) -> None:
        self._results.append(result)
        for writer in self._shown:
            writer.row(result)

    def __enter__(self) -> Outputs[R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with self._open_files:
            for path, form in self._kept if self._results else ():
                text = StringIO()
                writer = self._table.open_writer(form, text, self._extra)
                writer.header(self._head)
                for result in self._results:
                    writer.row(result)
                writer.footer(self._build)
                write_output(path, "--save", text.getvalue())
            if self._head:  # what was printed is whole, too
                for writer in self._shown:
                    writer.footer(self._build)
