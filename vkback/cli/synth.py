"""vkback synth: a model file of a real model's shape and types, with made-up weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import UsageError, output_file
from vkback.errors import did_you_mean
from vkback.units import params_text, size_text


def synth(
    name: Annotated[
        str | None,
        typer.Argument(help="A shape and a type, as llama-8b-Q4_K_M, or llama-8b-eagle3-Q4_K_M for an EAGLE-3 head; --list names all."),
    ] = None,
    out: Annotated[Path | None, typer.Argument(help="The GGUF file to write.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first so many layers.")] = None,
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, help="Of the random weights.")] = 0,
    list_names: Annotated[
        bool, typer.Option("--list", help="List the names with size and parameters; with NAME, those it is a part of.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """Write a model that times like a real one: its shape, the type of every tensor, random weights, a made-up vocabulary."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from vkback.models import synth as models

    if list_names:
        names = [*models.synthetic_names(), *models.head_names()]
        wanted = [known for known in names if name is None or name.lower() in known.lower()]
        if not wanted:
            raise UsageError(f"synth --list {name}: no name has that in it.{did_you_mean(name or '', names)} --list alone shows all")
        sizes = {known: models.synthetic_size(known, layers=layers) for known in wanted}
        if as_json:
            print(json.dumps([{"name": known, "bytes": size, "params": params} for known, (size, params) in sizes.items()], indent=1))
            return
        for known, (size, params) in sizes.items():
            print(f"{known:30} {size_text(size):>10} {params_text(params):>10}")
        return
    if name is None or out is None:
        raise UsageError("synth needs a name and a file, as vkback synth llama-1b-Q4_K_M model.gguf; --list shows the names")
    size, _ = models.synthetic_size(name, layers=layers)
    output_file(out, "OUT")
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=size)
        models.synthesize(name, out, layers=layers, seed=seed, on_bytes=lambda n: progress.advance(task, n))
    print(f"{out}: {name}, {size_text(size)} of tensors")
