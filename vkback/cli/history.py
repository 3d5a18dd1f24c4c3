"""vkback history: what a store of results, or a text with tables of them, tells over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import UsageError, one_of

FORMATS = ("table", "md", "csv", "html", "json")


def history(
    store: Annotated[
        Path, typer.Argument(help="File that vkbench --store or test-ops perf --store appends to; or a text with tables of speeds.")
    ],
    device: Annotated[str | None, typer.Option("--device", help="Part of the device's name.")] = None,
    driver: Annotated[str | None, typer.Option("--driver", help="Part of the driver's name and version.")] = None,
    model: Annotated[str | None, typer.Option("-m", "--model", help="Part of the model's description; of ops, of the op's name.")] = None,
    test: Annotated[str | None, typer.Option("--test", help="Part of the test's name, as tg128; of ops, of the parameters.")] = None,
    commit: Annotated[str | None, typer.Option("--commit", help="Beginning of the build's commit.")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="DAY", help="Not before this day, as 2026-11-22.")] = None,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only so many builds of each test.")] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Timed ops in place of models.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help=", ".join(FORMATS))] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    repetitions: Annotated[
        int | None, typer.Option("-r", "--repetitions", min=1, help="Of a text that does not say: the repetitions behind each speed.")
    ] = None,
) -> None:
    """Show every test of a store on every device and driver, build by build, with the change against the build before and whether it beats
    the noise. Tables of llama-bench or vkbench as pasted from a thread are read, too: builds in the order of the text."""
    from vkback.report import history as report
    from vkback.report import tables
    from vkback.report.result_table import ReportError
    from vkback.report.store import Store, is_store

    one_of(output, FORMATS, "-o")
    form = "json" if as_json else output
    if not store.is_file():
        raise UsageError(f"{store}: {'is a folder' if store.is_dir() else 'no such file'}; vkbench --store FILE makes a store")
    if is_store(store):
        if repetitions is not None:
            raise UsageError("-r is for a text with tables; a store knows its repetitions")
        with Store(store) as opened:
            points = report.of_ops(opened.ops()) if ops else report.of_bench(opened.bench())
    else:
        try:
            points = report.of_text(store.read_text(encoding="utf-8"), repetitions)
        except (ReportError, ValueError) as e:
            raise UsageError(
                f"{store}: not a store of results: {'not a text in UTF-8' if isinstance(e, UnicodeDecodeError) else e}; "
                "expected a file that vkbench --store made, or a text with tables of speeds"
            ) from e
    wanted = {"device": device, "driver": driver, "what": model, "test": test, "commit": commit}
    shown = report.select(points, wanted, since=since, last=last)
    if form == "table":
        print("\n".join(report.terminal(shown)))
    elif form == "md":
        print("\n".join(tables.markdown(report.cells(shown), (*report.LEFT, "where"))))
    elif form == "html":
        print(tables.html(report.cells(shown), (*report.LEFT, "where"), f"Results of {store.name}"))
    else:
        print(tables.machine(report.records(shown), form))
