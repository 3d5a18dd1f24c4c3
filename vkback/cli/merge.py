"""vkback merge: an adapter file added to the weights of its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import JsonOption, LoraScaleOption, UsageError, model_path
from vkback.cli.terminal import fit


def merge(
    lora: Annotated[Path, typer.Option("--lora", help="The adapter file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The GGUF file to write.")],
    model: Annotated[str | None, typer.Option("-m", "--model", help="GGUF file or built-in model [default: demo-dense].")] = None,
    lora_scale: LoraScaleOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Add an adapter to the weights, which keep their types: a quantized weight is quantized anew, which rounds away a part of a small
    adapter. The last line says how much; `vkback run --lora` rounds nothing."""
    from vkback.models.adapter import merge as merged

    path = model_path(model)
    if out.resolve() in (path.resolve(), lora.resolve()):
        raise UsageError(f"-o {out}: the model and the adapter are not overwritten; give another name")
    found = merged(path, lora, out, lora_scale)
    worst = max(found, key=lambda each: each[1])
    if as_json:
        print(json.dumps({"out": str(out), "weights": [{"name": name, "nmse": float(error)} for name, error in found]}, indent=1))
        return
    print("\n".join(fit(f"{out}: {len(found)} weights changed; NMSE of what was stored at most {worst[1]:.1e} ({worst[0]})")))
