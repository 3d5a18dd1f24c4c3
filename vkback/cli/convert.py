"""vkback convert: a published model's folder as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import JsonOption, UsageError, output_file
from vkback.cli.terminal import progress_bar
from vkback.units import params_text, size_text


def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and *.safetensors.")],
    out: Annotated[Path | None, typer.Argument(help="The GGUF file to write [default: DIR/NAME-TYPE.gguf].")] = None,
    outtype: Annotated[str, typer.Option("--outtype", help="Type of the matrices: auto (as stored), f32, f16, bf16, q8_0.")] = "auto",
    pre: Annotated[str, typer.Option("--pre", help="How text is cut before BPE, by name [default: as tokenizer.json says].")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a model of safetensors as GGUF, with its tokenizer and chat template, for vkback and llama.cpp."""

    from vkback.gguf.pre_tokenizers import PRE_TOKENIZERS
    from vkback.gguf.safetensors import read_folder
    from vkback.models.convert import OUT_TYPES
    from vkback.models.convert import convert as converted

    kind = outtype if outtype == "auto" else outtype.upper()
    if kind not in OUT_TYPES:
        raise UsageError(f"--outtype {outtype}: expected {', '.join(OUT_TYPES)}; other types come from vkback quantize")
    if pre and pre not in PRE_TOKENIZERS:
        raise UsageError(f"--pre {pre}: no such way of cutting text; known are {', '.join(PRE_TOKENIZERS)}")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give one with config.json and *.safetensors")
    target = out or folder / f"{folder.resolve().name}-{'model' if kind == 'auto' else kind}.gguf"
    output_file(target, "OUT")
    total = sum(t.raw.size // (4 if t.type == "F32" else 2) for t in read_folder(folder).values())
    with progress_bar(share=True) as bar:
        task = bar.add_task("convert", total=total)
        made, size, params = converted(folder, target, kind, pre=pre, on_weights=lambda weights: bar.advance(task, weights))
    if as_json:
        print(json.dumps({"out": str(target), "type": made, "bytes": size, "params": params}, indent=1))
        return
    print(f"{target}: {made}, {params_text(params)} parameters, {size_text(size)}")
