"""vkback run: continue a text with a model."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Annotated

import typer

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
    logit_bias,
)
from vkback.cli.shell import (
    ActOption,
    CacheTypeKOption,
    CacheTypeVOption,
    ContextOption,
    DeviceOption,
    EngineLike,
    ExactOption,
    JsonOption,
    LoraOption,
    LoraScaledOption,
    LoraScaleOption,
    ModelOption,
    UbatchOption,
    UsageError,
    adapters_of,
    load_engine,
    make_sampler,
    model_path,
)


def generate(
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The text to continue.")],
    model: ModelOption = None,
    n: Annotated[int, typer.Option("-n", "--n-predict", min=1, help="Tokens to generate at most.")] = 128,
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
    device: DeviceOption = None,
    ctx: ContextOption = None,
    ubatch: UbatchOption = None,
    act: ActOption = "auto",
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    lora: LoraOption = None,
    lora_scaled: LoraScaledOption = None,
    lora_scale: LoraScaleOption = None,
    exact: ExactOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text. The text goes to stdout as it is generated; to stderr go the compile time, and speeds without it. With --json
    one object with text, tokens and times is all there is."""
    from vkback.models.stop_strings import StopStrings

    if not prompt:
        raise UsageError("-p is empty; give a text to continue, as -p 'Once upon a time'")
    sampler = make_sampler(
        temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, repeat_penalty=repeat_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, penalty_last_n=repeat_last_n, logit_bias=logit_bias(bias),
    )  # fmt: skip
    stops = StopStrings(stop or ())
    adapters = adapters_of(lora, lora_scaled, lora_scale)
    ids: list[int] = []

    def while_weights_come(engine: EngineLike) -> None:
        ids.extend(engine.tokenizer.encode(prompt))
        if not ids:
            raise UsageError(f"-p {prompt!r} has no token in the vocabulary of {engine.description}; give another text")
        engine.compile(prompt=len(ids) - 1, sampler=sampler)

    with load_engine(
        model_path(model), device, n_ctx=ctx, act=act, ubatch=ubatch, cache=(cache_type_k, cache_type_v), exact=exact,
        lora=adapters, meanwhile=while_weights_come,
    ) as engine:  # fmt: skip
        engine.prepare(prompt=len(ids) - 1, sampler=sampler)
        ready = engine.compiled
        start = time.perf_counter()
        engine.prompt(ids[:-1], progress=True)
        prompted = time.perf_counter()
        pieces: list[str] = []

        def say(text: str) -> None:
            pieces.append(text)
            if not as_json:
                print(text, end="", flush=True)

        if not as_json:
            print(prompt, end="", flush=True)
        decoder = engine.tokenizer.stream()
        ids_made: list[int] = []
        with contextlib.closing(engine.generate(ids[-1], n, sampler=sampler, stop_at_eos=True)) as tokens:
            for token in tokens:
                ids_made.append(token)
                say(stops.feed(decoder.feed(token)))
                if stops.found:
                    break
        say(stops.feed(decoder.flush()) + stops.flush())
        end = time.perf_counter() - (engine.compiled - ready).seconds  # barrier-free stages that fail are planned and compiled anew
    if as_json:
        times = {"compile_s": ready.seconds, "prompt_s": prompted - start, "generation_s": end - prompted}
        asked = {"model": engine.description, "device": engine.device.caps.name, "prompt": prompt, "prompt_tokens": ids}
        print(json.dumps({**asked, "text": "".join(pieces), "tokens": ids_made, "stopped": stops.found, **times}, indent=1))
        return
    print()
    if ready.kernels:
        print(ready, file=sys.stderr)
    print(f"prompt     {speed(len(ids) - 1, prompted - start)}", file=sys.stderr)
    print(f"generation {speed(len(ids_made), end - prompted)}", file=sys.stderr)


def speed(tokens: int, seconds: float) -> str:
    return f"{tokens:5} tokens in {seconds:7.2f} s, {tokens / seconds if seconds else 0.0:8.2f} t/s"
