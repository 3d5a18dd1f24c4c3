"""vkback profile: where a model's time goes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.loading import ActOption, RowsOption
from vkback.cli.shell import DeviceOption, ModelOption, UsageError, act_of, bars, model_path, one_of, output_file, write_output
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
    every: Annotated[
        int, typer.Option("--every", min=0, help="Show the course of decode, so many tokens a line: what grows with the cache. 0: not.")
    ] = 0,
    against: Annotated[
        str | None, typer.Option("--against", metavar="OTHER", help="Which kernel got slower: FILE.json, a folder with a build, a commit.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Profiles of each side, in turn, with --against a build.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Time every kernel of a prompt, of the tokens behind it and of a batch: milliseconds and share, GB/s and share of the device's read
    rate, forecast and measured, by module of the model. Barrier-free stages are timed by clocks that the kernels read."""
    import numpy as np

    from vkback.cli.profile_against import build_of, earlier, in_turns
    from vkback.device import Device
    from vkback.engine.engine import Engine
    from vkback.report import profile_text as text
    from vkback.timing.profile_model import ROOM
    from vkback.timing.profile_model import profile as measure

    endings = [one_of(path.suffix.lstrip("."), ("html", "json", "txt"), f"--save {path}, ending") for path in save or []]
    path = model_path(model)
    kept = [(output_file(each, "--save", path), "--save", ending) for each, ending in zip(save or [], endings, strict=True)]
    kept += [(output_file(each, f"--{form}", path), f"--{form}", form) for each, form in ((trace, "trace"), (html, "html")) if each]
    before: list[dict[str, Any]] = []
    if against is not None and Path(against).is_file():
        before = [earlier(Path(against))]
    elif against is not None:
        if kept:
            raise UsageError("--save, --html and --trace exclude --against with a build: each side is profiled several times")
        options = ["-m", str(path.absolute()), "-n", str(tokens), "-b", str(batch), "--act", act]
        options += (["--device", device] if device is not None else []) + ["-c", str(ctx)] * (ctx is not None)
        options += ["-p", str(prompt)] * (prompt is not None) + ["--prompt-tokens", str(prompt_tokens)] * (prompt_tokens is not None)
        with ExitStack() as stack:
            sides = in_turns(build_of(against, stack), options, rounds, as_json)
        _print_compared(*sides, against, everything, as_json)
        return
    begun = time.perf_counter()
    marks: dict[str, float] = {}
    with ExitStack() as stack:
        opened = stack.enter_context(Device.open(device))
        marks["driver"], free_before = time.perf_counter() - begun, opened.free_memory()
        engine = stack.enter_context(
            Engine.load(
                path,
                opened,
                n_ctx=ctx,
                act=act_of(act),
                progress=bars(not as_json) or False,
                meanwhile=lambda _: marks.update({"file, plans, memory": time.perf_counter() - begun - marks["driver"]}),
            )
        )
        load_s = time.perf_counter() - begun
        marks["weights"] = load_s - sum(marks.values())
        marks |= {"of it waiting for the file": engine.load_times.read_s, "for the device": engine.load_times.upload_s}
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
            found = measure(
                engine,
                load_s,
                ids,
                tokens,
                batch,
                lambda part: status.say(f"vkback: measuring {part}"),
                free_before=free_before,
                load=marks,
            )
    for file, option, form in kept:
        write_output(file, option, _form(found, form, every))
    if before:
        _print_compared(before, [text.as_data(found)], str(against), everything, as_json)
        return
    print(json.dumps(text.as_data(found, every), indent=1) if as_json else "\n".join(text.report(found, everything, every)))


def _print_compared(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], against: str, everything: bool, as_json: bool
) -> None:
    from vkback.report import profile_compare as compare

    try:
        found = compare.compared(before, after)
    except compare.ProfileFormatError as e:
        raise UsageError(f"--against {against}: {e}") from e
    print(json.dumps(compare.as_data(found), indent=1) if as_json else "\n".join(compare.text(found, (against, "this"), everything)))


def _form(found: Profile, ending: str, every: int) -> str:
    """A profile as text of the form that an option or an ending names."""
    from vkback.report import profile_text as text
    from vkback.report.profile_page import page

    if ending == "html":
        return page(found, every)
    if ending == "trace":
        return json.dumps(text.trace(found))
    return (
        json.dumps(text.as_data(found, every), indent=1) + "\n" if ending == "json" else "\n".join(text.report(found, True, every)) + "\n"
    )
