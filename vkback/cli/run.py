"""vkback run: continue a text with a model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.loading import ADAPTERS, ARITHMETIC, DRAFTS, PLACES, load_options, with_loading
from vkback.cli.sampling import (
    BiasOption,
    FrequencyOption,
    LastNOption,
    MinPOption,
    PresenceOption,
    RepeatOption,
    SeedOption,
    StopOption,
    TempOption,
    TopKOption,
    TopPOption,
    check_bias,
    generate_options,
    logit_bias,
    with_samplers,
)
from vkback.cli.shell import DevicesOption, JsonOption, ModelOption, UsageError, bars, load_model, model_path, read_text, unicode_text
from vkback.cli.token_ids import TokensOption, check_ids, token_ids

if TYPE_CHECKING:
    from vkback.engine.engine import Engine

DEFAULT_TOKENS = 128


@with_samplers
@with_loading("ctx", *ARITHMETIC, "exact", *PLACES, *ADAPTERS, *DRAFTS, "spec_pinned")
def generate(
    words: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="The text to continue.", show_default=False)] = None,
    given: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The same as an option; - reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="A file with it, in UTF-8; - reads stdin.")] = None,
    given_ids: TokensOption = None,
    escapes: Annotated[
        bool, typer.Option("-e", "--escape/--no-escape", help="In a text, \\n, \\t, \\xHH, ... stand for characters, as in llama.cpp.")
    ] = False,
    display: Annotated[bool, typer.Option("--display-prompt/--no-display-prompt", help="Begin with the text that was given.")] = True,
    model: ModelOption = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n", "--n-predict", "--predict", min=-2, help="Tokens to generate at most; -1: as fit the context [default: 128, or as fit]."
        ),
    ] = None,
    temp: TempOption = 0.8,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    seed: SeedOption = 0,
    repeat_penalty: RepeatOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    repeat_last_n: LastNOption = 64,
    bias: BiasOption = None,
    stop: StopOption = None,
    device: DevicesOption = None,
    fusion: Annotated[str, typer.Option(help="all or none: each op by itself, as plan, vkbench and compare have it.")] = "all",
    as_json: JsonOption = False,
    *,
    loading: Mapping[str, Any],
    samplers: Mapping[str, Any],
) -> None:
    """Continue a text. The text, or its token ids where the model has no vocabulary, goes to stdout as it is generated; to stderr go the
    compile time, and speeds without it. With --json one object with text, tokens and times is all there is."""
    ids: list[int] = []
    if given_ids is None:
        prompt = prompt_text(words or (), given, file)
        prompt = unescaped(prompt) if escapes else prompt
    elif words or given is not None or file is not None:
        raise UsageError("--tokens and a text exclude each other: each is what to continue")
    else:
        prompt, ids = "", token_ids(given_ids)
    added = logit_bias(bias)
    asked = {
        "max_tokens": DEFAULT_TOKENS if n is None else n if n >= 0 else None,
        "temperature": temp,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": None if seed < 0 else seed,
        "stop": stop or [],
        "repeat_penalty": repeat_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "penalty_last_n": repeat_last_n,
        "logit_bias": dict(added),
        **samplers,
    }
    options = generate_options(asked)
    how = load_options(**loading, fusion=fusion, progress=bars(prompts=True))

    # Errors of the prompt show before a long load ends, and kernels compile beside it.
    def while_weights_come(engine: Engine) -> None:
        check_ids(ids, engine.model.hp.n_vocab)
        if given_ids is None:
            ids.extend(engine.tokenizer.encode(prompt, add_end=False))
        if not ids:
            raise UsageError(f"-p {prompt!r} has no token in the vocabulary of {engine.description}; give another text")
        check_bias(added, engine.model.hp.n_vocab)
        room = engine.n_ctx - len(ids) + 1
        if n is not None and n > room >= 1:
            raise UsageError(
                f"-n {n}: a prompt of {len(ids)} tokens leaves room for {room} in the context of {engine.n_ctx}; give a smaller -n, or a "
                "larger --ctx"
            )
        from vkback.api.options import Options

        engine.compile(prompt=len(ids) - 1, sampler=Options.of(options, engine.model.hp.n_vocab).sampler)

    with load_model(model_path(model), device, how, meanwhile=while_weights_come) as loaded:
        engine = loaded.engine
        decoder, only_ids = engine.tokenizer.stream(), not engine.model.has_text
        shown = ",".join(map(str, ids)) if only_ids else prompt or "".join(map(decoder.feed, ids))
        shown = shown if display else ""
        with loaded.stream(ids, **options) as stream:
            for chunk in stream:
                if not as_json:
                    print(shown + "".join(f",{token}" for token in chunk.tokens * only_ids) + chunk.text, end="", flush=True)
                shown = ""
        if not as_json:
            print(shown, flush=True)  # what closing has to say stands on a line of its own
        result, ready = stream.result, engine.compiled
    timings = replace(result.timings, compile_s=ready.seconds)
    if as_json:
        from vkback.report.build import build_info

        rates = {"prompt_tokens_per_s": timings.prompt_tokens_per_s, "decode_tokens_per_s": timings.decode_tokens_per_s}
        commit, number = build_info()
        print(
            json.dumps(
                {
                    "model": engine.description,
                    "device": ", ".join(device.caps.name for device in engine.devices),
                    "build_commit": commit,
                    "build_number": number,
                    "seed": result.seed,
                    "prompt": prompt if given_ids is None else None,
                    "prompt_tokens": ids,
                    "text": result.text,
                    "tokens": result.tokens,
                    "finish_reason": result.finish_reason,
                    "stopped": result.finish_reason == "stop",
                    "compile_s": timings.compile_s,
                    "prompt_s": timings.prompt_s,
                    "generation_s": timings.decode_s,
                    "timings": {**asdict(timings), **rates},
                },
                indent=1,
            )
        )
        return
    if ready.kernels:
        print(ready, file=sys.stderr)
    print(f"prompt     {speed(len(ids), timings.prompt_s, len(ids) - 1)}", file=sys.stderr)
    print(f"generation {speed(timings.decode_tokens, timings.decode_s)}", file=sys.stderr)
    if timings.draft_tokens:
        share = timings.draft_accepted / timings.draft_tokens
        print(f"drafts     {timings.draft_tokens:5} tokens, {timings.draft_accepted} accepted ({share:.0%})", file=sys.stderr)
    if timings.experts_wanted:
        share = timings.experts_found / timings.experts_wanted
        print(f"experts    {timings.experts_wanted:5} wanted, {timings.experts_found} in the cache ({share:.0%})", file=sys.stderr)
    if loaded.template is not None and sys.stderr.isatty():
        print("vkback: this model was trained on conversations; vkback chat talks to it by its template", file=sys.stderr)


def prompt_text(words: Sequence[str], given: str | None, file: Path | None) -> str:
    """The text to continue, by whichever way it came. One line end at its end is dropped of a file's and of stdin's: editors put it there.
    Raises UsageError where there is none, or more than one."""
    inputs = [*(["TEXT"] if words else []), *([] if given is None else ["-p"]), *([] if file is None else ["-f"])]
    if len(inputs) > 1:
        raise UsageError(f"{' and '.join(inputs)} exclude each other: each gives the text to continue")
    if not inputs:
        raise UsageError("no text to continue; give one, as vkback run 'Once upon a time', -p TEXT, -f FILE, or -p - for stdin")
    if given == "-" or file == Path("-"):
        text, named = unicode_text(sys.stdin.read(), "stdin").removesuffix("\n"), "stdin"
    elif file is not None:
        text, named = read_text(file, "-f").removesuffix("\n"), f"-f {file}"
    else:
        text, named = unicode_text(" ".join(words) if given is None else given, "-p"), "TEXT" if given is None else "-p"
    if not text:
        raise UsageError(f"{named} is empty; give a text to continue, as -p 'Once upon a time'")
    return text


ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescaped(text: str) -> str:
    """A text in which \\n, \\r, \\t, \\', \\", \\\\ and \\xHH stand for characters, as of llama.cpp's --escape; bytes of \\x are UTF-8."""

    def character(found: re.Match[bytes]) -> bytes:
        if found[1][:1] == b"x":
            return bytes([int(found[1][1:], 16)])
        return ESCAPES[found[1].decode()].encode()

    said = re.sub(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])", character, text.encode())
    return unicode_text(said.decode("utf-8", "surrogateescape"), "with --escape, the text")


def speed(tokens: int, seconds: float, timed: int | None = None) -> str:
    """Tokens and their rate. timed: how many went through the model in this time; the last of a prompt goes with the first one made."""
    if timed == 0:
        return f"{tokens:5} {'token ' if tokens == 1 else 'tokens'} read with the first one made"
    rate = (tokens if timed is None else timed) / seconds if seconds else 0.0
    return f"{tokens:5} {'token ' if tokens == 1 else 'tokens'} in {seconds:7.2f} s, {rate:8.2f} t/s"
