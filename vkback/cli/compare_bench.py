"""vkback compare-bench: two benchmark results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkback.cli.shell import UsageError, one_of, picture_file

if TYPE_CHECKING:
    from vkback.report.bench_plot import Bar

FORMATS = ("table", "md", "csv", "html", "json")


def compare(
    old: Annotated[str, typer.Argument(help="Before: a result of vkbench, llama-bench or test-ops perf, or a store; FILE@COMMIT.")],
    new: Annotated[
        str | None, typer.Argument(help="After, likewise. Left out: the first is a text with tables of before and after.")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help=", ".join(FORMATS))] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", metavar="NAME=FILE", help="Another result in a column of its own. Repeat for several.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw bars with their deviations, too.")] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Of stores: the timed ops, not the models.")] = False,
    skip_first: Annotated[bool, typer.Option("--skip-first", help="Leave out the first repetition of each test.")] = False,
    repetitions: Annotated[
        int | None, typer.Option("-r", "--repetitions", min=1, help="Of results without samples: the repetitions behind each speed.")
    ] = None,
) -> None:
    """Compare two benchmark results test by test, and say which differences beat the noise: Welch's t-test at 1 %.

    Results without samples (md, csv, sql) do not say how many repetitions they are of; -r does. Without it only what holds for any number
    is said. One file alone, as pasted from a thread, is read for tables of before and after, and gives a table for each device.
    """
    one_of(output, FORMATS, "-o")
    form = "json" if as_json else output
    if plot is not None:
        picture_file(plot, "--plot")
    if new is None:
        if beside or plot or ops or skip_first:
            raise UsageError("--beside, --plot, --ops and --skip-first need two results; give the second, too")
        _pasted(old, form, repetitions)
        return
    from vkback.report.compare_ops import has_ops

    if ops or (has_ops(old) and has_ops(new)):
        if beside or skip_first:
            raise UsageError("--beside and --skip-first are for benchmarks of models, not of ops")
        bars = _ops(old, new, form)
    else:
        bars = _models(old, new, form, beside or [], skip_first, repetitions)
    if plot is not None:
        from vkback.report.bench_plot import draw

        draw(bars, plot, f"{_label(old)} and {_label(new)}")


def _models(old: str, new: str, form: str, beside: list[str], skip_first: bool, repetitions: int | None) -> list[Bar]:
    from vkback.report import compare as report
    from vkback.report import tables
    from vkback.report.bench_plot import of_models

    others = {}
    for text in beside:
        name, equals, file = text.partition("=")
        if not equals or not name or not file:
            raise UsageError(f"--beside {text}: expected a name and a file, as CUDA=cuda.json")
        others[name] = report.load(file)
    before, after = (report.with_repetitions(report.load(file), repetitions) for file in (old, new))
    comparison = report.compare(before, after, skip_first=skip_first, beside=others)
    if form == "table":
        print("\n".join(report.terminal(comparison)))
    elif form == "md":
        print(report.markdown(comparison))
    elif form == "html":
        print(report.html(comparison, f"{_label(old)} and {_label(new)}"))
    else:
        print(tables.machine(report.records(comparison), form))
    return of_models(comparison)


def _pasted(file: str, form: str, repetitions: int | None) -> None:
    """A table for each device of a text."""
    from vkback.report import compare as report
    from vkback.report import tables
    from vkback.report.result_table import NotAResult

    path = Path(file)
    if not path.is_file():
        raise UsageError(f"{file}: {'is a folder' if path.is_dir() else 'no such file'}; expected a text with tables of before and after")
    try:
        found = report.pasted(path.read_text(encoding="utf-8"), file, repetitions)
    except ValueError as e:
        raise NotAResult(f"{file}: {e}") from e
    if form in ("table", "md"):
        made = {device: report.markdown(c) if form == "md" else "\n".join(report.terminal(c)) for device, c in found.items()}
        print("\n\n".join(f"## {device}\n\n{table}" for device, table in made.items()))
    elif form == "html":
        print(report.html_of(found, _label(file)))
    else:
        import pandas as pd

        rows = [report.records(c).assign(device=device) for device, c in found.items()]
        print(tables.machine(pd.concat(rows, ignore_index=True), form))


def _lines(lines: list[str]) -> str:
    return "\n".join(lines)


def _ops(old: str, new: str, form: str) -> list[Bar]:
    from vkback.report import compare_ops as report
    from vkback.report import tables
    from vkback.report.bench_plot import of_ops

    found = report.compare(report.load(old), report.load(new))
    if form == "table":
        print("\n".join(report.terminal(found)))
    elif form == "md":
        print("\n".join(report.markdown(found)))
    elif form == "html":
        print(report.html(found, f"{_label(old)} and {_label(new)}"))
    else:
        print(tables.machine(report.records(found), form))
    return of_ops(found)


def _label(file: str) -> str:
    """A result as titles call it: without its folders."""
    return Path(file).name
