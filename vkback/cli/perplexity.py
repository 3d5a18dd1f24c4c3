"""vkback perplexity: how well a model predicts a text, and how far it is from another one."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.hosts import DevicesOption, workers_of
from vkback.cli.loading import ADAPTERS, ARITHMETIC, load_options, with_loading
from vkback.cli.shell import JsonOption, ModelOption, UsageError, bars, load_model, model_path, output_file, read_text
from vkback.cli.terminal import fit, progress_bar
from vkback.cli.token_ids import TokensOption, check_ids, token_ids

if TYPE_CHECKING:
    from vkback.cli.hosts import Where
    from vkback.evaluate.kl import Divergence


@with_loading(*ARITHMETIC, "exact", "n_gpu_layers", *ADAPTERS)
def perplexity(
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The text, UTF-8.")] = None,
    tokens: TokensOption = None,
    model: ModelOption = None,
    chunk: Annotated[int, typer.Option("-c", "--ctx", "--ctx-size", min=4, help="Tokens of a chunk; its second half is scored.")] = 512,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Chunks at most [default: all of the text].")] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            "-np", "--parallel", min=1, help="Chunks read side by side [default: as many as pay and fit into memory; with --exact 1]."
        ),
    ] = None,
    device: DevicesOption = None,
    save_kl_base: Annotated[
        Path | None, typer.Option("--save-kl-base", help="Write the log probabilities, for --kl-base of a later run.")
    ] = None,
    kl_base: Annotated[Path | None, typer.Option("--kl-base", help="Compare with the log probabilities that another run wrote.")] = None,
    as_json: JsonOption = False,
    *,
    loading: Mapping[str, Any],
) -> None:
    """Perplexity of a text by the rule of llama-perplexity, with its standard error. With --kl-base also how far the probabilities are from
    those of another file or setting: Kullback-Leibler divergence, and how often both find the same token likeliest."""
    from rich.console import Console

    from vkback.evaluate.kl import BaseReader, BaseWriter, Divergences, describe_text
    from vkback.evaluate.perplexity import count_chunks

    if (file is None) == (tokens is None):
        raise UsageError("perplexity needs a text, as -f FILE, or token ids, as --tokens FILE, and not both")
    text = read_text(file, "-f") if file is not None else token_ids(tokens or "")
    if not text:
        raise UsageError(f"-f {file}: the file is empty, expected a text")
    path = model_path(model)
    adapters = loading["lora"]
    if save_kl_base is not None:
        inputs = (file, path, kl_base, *(each.path for each in adapters))
        output_file(save_kl_base, "--save-kl-base", *(given for given in inputs if given is not None))
    options = load_options(ctx=chunk, **loading, progress=bars())
    how = f"{loading['act']}, exact" if loading["exact"] else loading["act"]
    caches = f"{loading['cache_type_k']}, {loading['cache_type_v']}"
    where = workers_of(device, None, None, None)
    if where is not None:
        if adapters or save_kl_base is not None or kl_base is not None:
            raise UsageError("--lora, --save-kl-base and --kl-base are of one device; expected one with --device")
        options_of = {"ctx": chunk, "n_gpu_layers": options.n_gpu_layers}
        options_of |= {name: loading[name] for name in ("act", "ubatch", "cache_type_k", "cache_type_v", "exact")}
        plain = text if isinstance(text, str) else list(text)
        args = {"path": str(path.absolute()), "text": plain, "chunk": chunk, "chunks": chunks, "sequences": parallel, "options": options_of}
        _by_workers(where, args, how, caches, as_json)
        return
    console = Console(stderr=True)
    # The base is opened first: a file that is none is refused before a model loads for minutes.
    with ExitStack() as stack:
        reader = stack.enter_context(BaseReader(kl_base)) if kl_base is not None else None
        loaded = stack.enter_context(load_model(path, device, options))
        if not isinstance(text, str):
            check_ids(text, loaded.n_vocab)
        ids = loaded.ids(text, start=True)
        count = count_chunks(ids, chunk, chunks)
        same = describe_text(ids, chunk, count, loaded.n_vocab)
        name = f"{loaded.name} with {', '.join(map(str, adapters))}" if adapters else loaded.name
        about = {"model": loaded.description, "file": name, "act": how, "cache": caches}
        if reader is not None:
            reader.check(same)
        # Without a chunk there is nothing to write, and the scoring below says so.
        writer = stack.enter_context(BaseWriter(save_kl_base, same, about)) if save_kl_base is not None and count else None
        found = Divergences()

        def on_scored(logits: Any, targets: Any) -> None:
            if writer is not None:
                writer.add(logits)
            if reader is not None:
                found.add(reader.rows(len(targets)), logits, targets)

        begun = time.perf_counter()
        with progress_bar() as bar:
            task = bar.add_task("perplexity", total=count)

            def on_chunk(so_far: float) -> None:
                bar.update(task, advance=1, description=f"perplexity {so_far:.4f}")

            result = loaded.perplexity(ids, chunk=chunk, n_chunks=chunks, sequences=parallel, on_chunk=on_chunk, on_scored=on_scored)
        seconds = time.perf_counter() - begun
        if as_json:
            score = {"perplexity": result.value, "error": result.error, "tokens": result.tokens, "chunks": count, "chunk": chunk}
            base = {"about": reader.header["about"], **dataclasses.asdict(found.result())} if reader is not None else None
            made = {**about, "device": loaded.engine.device.caps.name, **score, "seconds": seconds, "against": base}
            print(json.dumps(made, indent=1))
            return
        lines = [
            f"{settings_text(about)}, on {loaded.engine.device.caps.name}",
            f"perplexity {result.value:.4f} +- {result.error:.4f}, {result.tokens} tokens scored in {count} chunks of {chunk}",
        ]
        if reader is not None:
            lines += [f"against {settings_text(reader.header['about'])}", *table(found.result()).splitlines()]
        print("\n".join(part for line in lines for part in fit(line)))
        print(f"{count * chunk / seconds:.1f} t/s with compile time", file=console.file)


def _by_workers(where: Where, args: Mapping[str, Any], act: str, cache: str, as_json: bool) -> None:
    """Score by a worker a device, and print what each kind of device has found."""
    from vkback.cli.perplexity_hosts import perplexity_by_workers

    begun = time.perf_counter()
    found = perplexity_by_workers(where, len(where.devices or ()) or 1, args)
    seconds, chunk = time.perf_counter() - begun, args["chunk"]
    made = []
    for each in found:
        about: dict[str, str] = {"model": each.model, "file": each.file, "act": act, "cache": cache}
        result = each.perplexity
        score = {"perplexity": result.value, "error": result.error, "tokens": result.tokens, "chunks": each.chunks, "chunk": chunk}
        made.append({**about, "device": each.device, **score, "seconds": seconds, "against": None})
        if not as_json:
            lines = [
                f"{settings_text(about)}, on {each.device}",
                f"perplexity {result.value:.4f} +- {result.error:.4f}, {result.tokens} tokens scored in {each.chunks} chunks of {chunk}",
            ]
            print("\n".join(part for line in lines for part in fit(line)))
    if as_json:
        print(json.dumps(made[0] if len(made) == 1 else made, indent=1))


def settings_text(about: Mapping[str, str]) -> str:
    """A model and how it was run, in words."""
    return f"{about['model']}, {about['file']}, act {about['act']}, cache {about['cache']}"


def table(d: Divergence) -> str:
    """A Divergence in lines."""
    ratio = math.exp(d.log_ratio)
    return "\n".join(
        (
            f"perplexity / base      {ratio:.6f} +- {ratio * d.log_ratio_error:.6f}",
            f"KL divergence          {d.mean:.6f} +- {d.error:.6f} nats (median {d.median:.6f}, 99 % {d.p99:.6f}, most {d.most:.6f})",
            f"same likeliest token   {100 * d.same_top:.3f} %",
        )
    )
