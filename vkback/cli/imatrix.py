"""vkback imatrix: importances of a model's weights over a text, for vkback quantize --imatrix."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import DeviceOption, JsonOption, ModelOption, UsageError, bars, model_path, output_file, read_text
from vkback.cli.terminal import fit, progress_bar
from vkback.cli.token_ids import TokensOption, check_ids, token_ids
from vkback.units import counted


def imatrix(
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The text, UTF-8.")] = None,
    tokens: TokensOption = None,
    model: ModelOption = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", "--output-file", help="The GGUF file to write [default: imatrix.gguf].")
    ] = None,
    in_file: Annotated[list[Path] | None, typer.Option("--in-file", help="Add what another file holds; may be repeated.")] = None,
    chunk: Annotated[int, typer.Option("-c", "--ctx", min=2, help="Tokens of a chunk.")] = 512,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Chunks at most [default: all of the text].")] = None,
    process_output: Annotated[bool, typer.Option("--process-output", help="Gather those of the output, too.")] = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Gather importances: of every matrix the mean squares of the activations that its columns meet, of experts for each expert. Without a
    text, --in-file alone joins files."""
    from rich.console import Console

    from vkback.gguf.imatrix import read_imatrix, write_imatrix

    others = [read_imatrix(path) for path in in_file or []]
    if file is not None and tokens is not None:
        raise UsageError("imatrix takes a text as -f FILE, or token ids as --tokens FILE, and not both")
    if file is None and tokens is None and not others:
        raise UsageError("imatrix needs a text, as -f FILE, or files to join, as --in-file FILE")
    text = None if file is None and tokens is None else read_text(file, "-f") if file is not None else token_ids(tokens or "")
    path = model_path(model) if text is not None else None
    target = out or Path("imatrix.gguf")
    output_file(target, "-o", *(p for p in (path, file, *(in_file or [])) if p is not None))
    found = others[0] if others and text is None else None
    rest = others[1:] if found is not None else others
    if text is not None and path is not None:
        from vkback.device import Device
        from vkback.evaluate.importances import chunks_of, gather_importances
        from vkback.models.registry import Model

        opened = Model.open(path)
        tokenizer = opened.tokenizer if isinstance(text, str) else None
        if isinstance(text, str) and tokenizer is not None:
            ids = tokenizer.encode(text)
        else:
            check_ids(list(text), opened.hp.n_vocab)  # type: ignore[arg-type]
            ids = list(text)  # type: ignore[arg-type]
        bos = tokenizer.bos if tokenizer is not None and tokenizer.add_bos else None
        parts = chunks_of(ids, chunk, chunks, bos)
        console = Console(stderr=True)
        with ExitStack() as stack:
            opened_device = stack.enter_context(Device.open(device))
            bar = stack.enter_context(progress_bar())
            task = bar.add_task("importances", total=len(parts))
            found = gather_importances(
                opened,
                opened_device,
                parts,
                out=target,
                text=file.name if file is not None else "tokens",
                with_output=process_output,
                on_chunk=lambda number: bar.update(task, completed=number),
                progress=bars() if not console.is_terminal else None,
            )
    assert found is not None
    for other in rest:
        found = found.joined(other)
    write_imatrix(target, found)
    few = [name for name, each in found.weights.items() if (each.counts == 0).any()]
    if as_json:
        about = {"out": str(target), "weights": len(found.weights), "chunks": found.chunks, "ctx": found.chunk_size, "experts_unmet": few}
        print(json.dumps(about | {"datasets": found.datasets}, indent=1))
        return
    lines = [f"{target}: {counted(len(found.weights), 'weight')}, {counted(found.chunks, 'chunk')} of {found.chunk_size} tokens"]
    if few:
        lines.append(f"{counted(len(few), 'weight')} with experts that no token met, {few[0]} the first: they count as even; add text")
    print("\n".join(part for line in lines for part in fit(line)))
