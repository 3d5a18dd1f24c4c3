"""vkback run: continue a text with a model."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from vkback.cli.shell import ActOption, DeviceOption, UsageError, load_engine, make_sampler, model_path


def generate(
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The text to continue.")],
    model: Annotated[str | None, typer.Option("-m", "--model", help="GGUF file or built-in model [default: demo-dense].")] = None,
    n: Annotated[int, typer.Option("-n", "--n-predict", min=1, help="Tokens to generate at most.")] = 128,
    temp: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many; 0 for all.")] = 40,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest that make up this share.")] = 0.95,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Drop tokens less likely than this share of the likeliest.")] = 0.05,
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, help="The same seed gives the same text.")] = 0,
    device: DeviceOption = None,
    ctx: Annotated[int | None, typer.Option("-c", "--ctx", min=1, help="Context in tokens [default: the model's own].")] = None,
    ubatch: Annotated[
        int | None, typer.Option("-ub", "--ubatch", min=1, help="Prompt tokens processed at once [default: 512, on CPU drivers 32].")
    ] = None,
    act: ActOption = "auto",
) -> None:
    """Continue a text. The text goes to stdout as it is generated; to stderr go the compile time, and speeds without it."""
    if not prompt:
        raise UsageError("-p is empty; give a text to continue, as -p 'Once upon a time'")
    sampler = make_sampler(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    with load_engine(model_path(model), device, n_ctx=ctx, act=act, ubatch=ubatch) as engine:
        ids = engine.tokenizer.encode(prompt)
        if not ids:
            raise UsageError(f"-p {prompt!r} has no token in the vocabulary of {engine.description}; give another text")
        engine.prepare(prompt=len(ids) - 1, sampler=sampler)
        ready = engine.compiled
        start = time.perf_counter()
        engine.prompt(ids[:-1], progress=True)
        prompted = time.perf_counter()
        print(prompt, end="", flush=True)
        decoder = engine.tokenizer.stream()
        made = 0
        for token in engine.generate(ids[-1], n, sampler=sampler, stop_at_eos=True):
            made += 1
            print(decoder.feed(token), end="", flush=True)
        print(decoder.flush())
        end = time.perf_counter() - (engine.compiled - ready).seconds  # barrier-free stages that fail are planned and compiled anew
    if ready.kernels:
        print(ready, file=sys.stderr)
    print(f"prompt     {speed(len(ids) - 1, prompted - start)}", file=sys.stderr)
    print(f"generation {speed(made, end - prompted)}", file=sys.stderr)


def speed(tokens: int, seconds: float) -> str:
    return f"{tokens:5} tokens in {seconds:7.2f} s, {tokens / seconds if seconds else 0.0:8.2f} t/s"
