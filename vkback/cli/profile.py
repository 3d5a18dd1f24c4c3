"""vkback profile: where a model's time goes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkback.cli.shell import (
    ActOption,
    DeviceOption,
    ModelOption,
    RowsOption,
    UsageError,
    act_of,
    bars,
    model_path,
    one_of,
    output_file,
    write_output,
)
from vkback.cli.terminal import StatusLine

if TYPE_CHECKING:
    from vkback.timing.profile_model import Profile

DEFAULT_PROMPT = 64


def profile(
    model: ModelOption = None,
    device: DeviceOption = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Text of the prompt [default: random tokens].")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=2, help="How many random tokens, without -p [default: 64, or as fit the context].")
    ] = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Tokens behind the prompt, each profiled.")] = 16,
    batch: Annotated[int, typer.Option("-b", "--batch", min=0, help="Tokens of a batch to profile, too; 0: none.")] = 4,
    ctx: RowsOption = None,
    act: ActOption = "auto",
    everything: Annotated[bool, typer.Option("-v", "--verbose", "--all", help="All kernels and all layers.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, for ui.perfetto.dev.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with tree, timeline, roofline and heatmap.")] = None,
    save: Annotated[
        list[Path] | None, typer.Option(help="Into a file too: .html, .json or .txt (with all kernels). Repeat for several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Time every kernel of a prompt, of the tokens behind it and of a batch: milliseconds and share, GB/s and share of the device's read
    rate, forecast and measured, by module of the model. Barrier-free stages are timed by clocks that the kernels read."""
    import numpy as np

    from vkback.engine.engine import Engine
    from vkback.report import profile_text as text
    from vkback.timing.profile_model import ROOM
    from vkback.timing.profile_model import profile as measure

    endings = [one_of(path.suffix.lstrip("."), ("html", "json", "txt"), f"--save {path}, ending") for path in save or []]
    path = model_path(model)
    kept = [(output_file(each, "--save", path), "--save", ending) for each, ending in zip(save or [], endings, strict=True)]
    kept += [(output_file(each, f"--{form}", path), f"--{form}", form) for each, form in ((trace, "trace"), (html, "html")) if each]
    begun = time.perf_counter()
    with Engine.load(path, device, n_ctx=ctx, act=act_of(act), progress=bars(not as_json) or False) as engine:
        load_s = time.perf_counter() - begun
        ids = engine.tokenizer.encode(prompt) if prompt else []
        if len(ids) < 2:
            room = engine.n_ctx - max(tokens + 1, batch) - ROOM
            prompt_tokens = max(min(DEFAULT_PROMPT, room), 2) if prompt_tokens is None else prompt_tokens
            ids += np.random.default_rng(1).integers(0, engine.model.hp.n_vocab, prompt_tokens - len(ids)).tolist()
        needed = len(ids) + max(tokens + 1, batch) + ROOM
        if needed > engine.n_ctx:
            raise UsageError(
                f"--ctx {engine.n_ctx}: {len(ids)} tokens of a prompt and {max(tokens, batch)} behind it need {needed} rows; raise "
                "--ctx, or give fewer tokens"
            )
        with StatusLine(wanted=not as_json) as status:
            found = measure(engine, load_s, ids, tokens, batch, lambda part: status.say(f"vkback: measuring {part}"))
    for file, option, form in kept:
        write_output(file, option, _form(found, form))
    print(json.dumps(text.as_data(found), indent=1) if as_json else "\n".join(text.report(found, everything)))


def _form(found: Profile, ending: str) -> str:
    """A profile as text of the form that an option or an ending names."""
    from vkback.report import profile_text as text
    from vkback.report.profile_page import page

    if ending == "html":
        return page(found)
    if ending == "trace":
        return json.dumps(text.trace(found))
    return json.dumps(text.as_data(found), indent=1) + "\n" if ending == "json" else "\n".join(text.report(found, True)) + "\n"
