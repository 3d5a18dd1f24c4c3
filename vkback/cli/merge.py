"""vkback merge: adapter files added to the weights of its model."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.loading import LoraOption, LoraScaledOption, LoraScaleOption, adapters_of
from vkback.cli.shell import JsonOption, ModelOption, UsageError, model_path, one_of, output_file
from vkback.cli.terminal import fit

TYPES = ("F32", "F16", "BF16", "Q8_0")
LITTLE = 0.3
"""Of what the adapters change: a tenth of its energy."""


def merge(
    out: Annotated[Path, typer.Option("-o", "--out", help="The GGUF file to write.")],
    model: ModelOption = None,
    type: Annotated[
        str | None, typer.Option("--type", help=f"Type of the changed weights, one of {', '.join(TYPES)} [default: as they are].")
    ] = None,
    lora: LoraOption = None,
    lora_scaled: LoraScaledOption = None,
    lora_scale: LoraScaleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add adapters to the weights. Those that keep a quantized type are quantized anew, which rounds away much of a small adapter: the
    last line says how much. A wider --type keeps it; `vkback run --lora` rounds nothing."""
    from vkback.models.adapter import merge as merged

    if type is not None:
        one_of(type, TYPES, "--type")
    path = model_path(model)
    adapters = adapters_of(lora, lora_scaled, lora_scale)
    if not adapters:
        raise UsageError("Missing option '--lora'; give the adapter file, as --lora adapter.gguf")
    output_file(out, "-o", path, *(each.path for each in adapters))
    found = merged(path, adapters, out, type)
    worst = max(found, key=lambda each: each.nmse)
    loss = statistics.median(each.loss for each in found)
    if as_json:
        print(json.dumps({"out": str(out), "weights": [dataclasses.asdict(each) for each in found]}, indent=1))
        return
    lines = [
        f"{out}: {len(found)} weights changed; NMSE of what was stored at most {worst.nmse:.1e} ({worst.name})",
        f"rounding moved the weights {loss:.2g} times as far as the adapters (median)",
    ]
    if loss > LITTLE:
        lines.append("much of the adapters is lost so: --type Q8_0 or F16 keeps it")
    print("\n".join(part for line in lines for part in fit(line)))
