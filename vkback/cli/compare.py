"""vkback compare: two benchmark results side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import one_of

FORMATS = ("md", "csv", "json")


def compare(
    old: Annotated[Path, typer.Argument(help="Result before: json, jsonl, csv, sql or sqlite, of vkbench or llama-bench.")],
    new: Annotated[Path, typer.Argument(help="Result after.")],
    output: Annotated[str, typer.Option("-o", "--output", help=", ".join(FORMATS))] = "md",
    skip_first: Annotated[bool, typer.Option("--skip-first", help="Leave out the first repetition of each test.")] = False,
) -> None:
    """Compare two benchmark results test by test, and say which differences beat the noise.

    With the samples of json and jsonl this is Welch's t-test at 1 %, else three deviations.
    """
    from vkback.report import compare as report

    one_of(output, FORMATS, "-o")
    comparison = report.compare(report.load(old), report.load(new), skip_first=skip_first)
    if output == "md":
        print(report.markdown(comparison))
        return
    records = report.records(comparison)
    if output == "json":
        print(json.dumps(records.to_dict("records"), indent=2))
    else:
        print(records.to_csv(index=False, lineterminator="\n"), end="")
