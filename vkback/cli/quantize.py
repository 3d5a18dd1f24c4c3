"""vkback quantize: a model file in another type, with the mix of types that llama-quantize chooses."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.loading import load_options
from vkback.cli.shell import DeviceOption, JsonOption, UsageError, bars, load_model, model_path, output_file
from vkback.cli.terminal import fit, progress_bar
from vkback.units import counted, params_text, size_text

if TYPE_CHECKING:
    from vkback.evaluate.kl import Divergence
    from vkback.models.quantize import QuantizePlan

SMALL, SMALL_ON_CPU = 1_000_000_000, 20_000_000
"""Parameters up to which a model is compared with its source without being asked: seconds, on a GPU and on a CPU driver."""

KL_CHUNK, KL_CHUNKS = 256, 8


def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="GGUF file of F32, F16 or BF16; of a split model the first.")],
    words: Annotated[list[str], typer.Argument(metavar="[OUT] TYPE", help="The file to write, and the type: Q4_K_M, Q8_0 ...")],
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Importances: of vkback imatrix or llama-imatrix.")
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option("--tensor-type", metavar="PATTERN=TYPE", help="Type of tensors by a regular expression; may be repeated."),
    ] = None,
    output_tensor_type: Annotated[str, typer.Option("--output-tensor-type", metavar="TYPE", help="Type of the output.")] = "",
    token_embedding_type: Annotated[str, typer.Option("--token-embedding-type", metavar="TYPE", help="Of the token embeddings.")] = "",
    leave_output_tensor: Annotated[bool, typer.Option("--leave-output-tensor", help="The output keeps its type.")] = False,
    pure: Annotated[bool, typer.Option("--pure", help="Every matrix in the one type.")] = False,
    allow_requantize: Annotated[bool, typer.Option("--allow-requantize", help="Take a source that is quantized already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say the types and the size, and write nothing.")] = False,
    kl: Annotated[
        bool | None, typer.Option("--kl/--no-kl", help="Compare with the source on a text [default: models that take seconds].")
    ] = None,
    encode: Annotated[str, typer.Option("--encode", help="Where types with a search are encoded: host, device, or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Processes on the host [default: one a core].")] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model in another type. Which tensor gets which type follows llama-quantize; so does the size, to the byte. `auto` encodes on
    a GPU where there is one and no --imatrix, else on all cores. With --kl, how far the new file's probabilities are from the source's."""
    from vkback.gguf.file import GgufFile
    from vkback.gguf.imatrix import read_imatrix
    from vkback.models.quantize import Recipe, plan_quantize

    if len(words) > 2:
        raise UsageError(f"quantize takes IN, OUT and TYPE, got {' '.join((source, *words))}; more types are files of their own")
    if encode not in ("auto", "host", "device"):
        raise UsageError(f"--encode {encode}: expected auto, host or device")
    if encode == "device" and imatrix is not None:
        raise UsageError("--encode device has no importances; leave it out, or --imatrix")
    path = model_path(source)
    recipe = Recipe(
        words[-1], pure, output_tensor_type, token_embedding_type, tuple(_pairs(tensor_type)), leave_output_tensor, allow_requantize
    )
    f = GgufFile.open(path)
    plan = plan_quantize(f, recipe, read_imatrix(imatrix) if imatrix is not None else None)
    out = Path(words[0]) if len(words) == 2 else path.with_name(f"{_stem(path, f)}-{plan.type}.gguf")
    if dry_run:
        _tell(plan, None, "", None, as_json, listed=True)
        return
    output_file(out, "OUT", path, *([imatrix] if imatrix is not None else []))
    how = _write(plan, out, encode, device, threads)
    found = None
    if kl or (kl is None and plan.elements <= _small()):
        found = _compared(path, out, device, asked=bool(kl))
    _tell(plan, out, how, found, as_json, listed=False)


def _small() -> int:
    from vkback.device import NoDevice, list_devices

    try:
        return SMALL if any(not caps.software for caps in list_devices()) else SMALL_ON_CPU
    except NoDevice:
        return 0


def _pairs(given: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for text in given or []:
        pattern, equals, kind = text.rpartition("=")
        if not equals or not pattern or not kind:
            raise UsageError(f"--tensor-type {text}: expected PATTERN=TYPE, as attn_v=Q6_K")
        pairs.append((pattern, kind))
    return pairs


def _stem(path: Path, f: Any) -> str:
    """The name of a model's file without its type and its number among others."""
    from vkback.gguf.file import SPLIT_NAME
    from vkback.models.type_choice import BASE

    split = SPLIT_NAME.fullmatch(path.name)
    stem = split["stem"] if split else path.stem
    head, dash, last = stem.rpartition("-")
    return head if dash and last.upper() in BASE else stem


def _write(plan: QuantizePlan, out: Path, encode: str, device: str | None, threads: int | None) -> str:
    """Writes the file; says where it was encoded."""

    from vkback.models.quantize import quantize as written

    with ExitStack() as stack:
        encoder, where = _encoder(plan, encode, device)
        if encoder is not None:
            stack.enter_context(encoder)
        bar = stack.enter_context(progress_bar(share=True))
        task = bar.add_task(f"{plan.type} on {where}", total=plan.elements)
        advance: Callable[[int], object] = lambda weights: bar.advance(task, weights)  # noqa: E731
        written(plan, out, threads=threads, encoder=encoder, on_weights=advance)
    return where


def _encoder(plan: QuantizePlan, encode: str, selector: str | None) -> tuple[Any, str]:
    """A device's encoder, or None; and where it encodes."""
    from vkback.device import NoDevice

    if encode == "host" or plan.imatrix is not None:
        return None, "the host"
    from vkback.api.device import Device
    from vkback.api.encoder import DeviceEncoder

    try:
        device = Device(selector)
    except NoDevice:
        if encode == "device" or selector is not None:
            raise
        return None, "the host"
    if encode == "auto" and device.caps.software:
        device.close()
        return None, "the host"
    return DeviceEncoder(device), device.name


def _compared(source: Path, made: Path, device: str | None, *, asked: bool) -> Divergence | str:
    """How far the new file's probabilities are from the source's on the text that comes with vkback; or why that is not known, unless
    somebody has asked for it."""
    from vkback.errors import VkbackError
    from vkback.evaluate.kl import BaseReader, BaseWriter, Divergences, describe_text
    from vkback.evaluate.perplexity import count_chunks
    from vkback.evaluate.text import text_of_novel

    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            base = Path(folder) / "base.kl"
            options = load_options(ctx=KL_CHUNK, progress=bars())
            with load_model(source, device, options) as model:
                ids = model.ids(text_of_novel(), start=True)
                count = count_chunks(ids, KL_CHUNK, KL_CHUNKS)
                about = {"model": model.description, "file": model.name, "act": "auto", "cache": "f16"}
                with BaseWriter(base, describe_text(ids, KL_CHUNK, count, model.n_vocab), about) as writer:
                    model.perplexity(ids, chunk=KL_CHUNK, n_chunks=count, on_scored=lambda logits, _: writer.add(logits))
            reader, found = stack.enter_context(BaseReader(base)), Divergences()
            with load_model(made, device, options) as model:
                model.perplexity(
                    ids,
                    chunk=KL_CHUNK,
                    n_chunks=count,
                    on_scored=lambda logits, targets: found.add(reader.rows(len(targets)), logits, targets),
                )
            return found.result()
    except VkbackError as e:
        if asked:
            raise
        return str(e)


def _tell(plan: QuantizePlan, out: Path | None, where: str, found: Divergence | str | None, as_json: bool, *, listed: bool) -> None:
    import dataclasses

    f = plan.file
    source_bits = 8 * f.size_bytes / plan.elements
    types = Counter(step.type for step in plan.steps)
    if as_json:
        made = {
            "out": str(out) if out is not None else None,
            "type": plan.type,
            "bytes": plan.size_bytes,
            "bits_per_weight": plan.bits_per_weight,
            "source_bytes": f.size_bytes,
            "params": plan.elements,
            "encoded_on": where or None,
            "tensors": {step.source.name: step.type for step in plan.steps},
            "notes": plan.notes,
            "kl": dataclasses.asdict(found) if found is not None and not isinstance(found, str) else None,
        }
        print(json.dumps(made, indent=1))
        return
    lines = []
    if listed:
        width = max(len(step.source.name) for step in plan.steps)
        for step in plan.steps:
            kept = f"{step.source.type} -> {step.type}" if step.changes else step.type
            print(f"{step.source.name:{width}}  {'x'.join(map(str, step.source.shape)):>14}  {kept}")
    lines += [
        f"{f.path.name}: {params_text(plan.elements)} parameters, {size_text(f.size_bytes)}, {source_bits:.2f} bits per weight",
        f"{out or plan.type}: {size_text(plan.size_bytes)}, {plan.bits_per_weight:.2f} bits per weight"
        + (f", encoded on {where}" if where else ""),
        ", ".join(f"{counted(n, 'tensor')} {type}" for type, n in types.most_common()),
        *plan.notes,
    ]
    if isinstance(found, str):
        lines.append(f"not compared with the source: {found}")
    elif found is not None:
        lines += [
            f"against {f.path.name}, {counted(found.tokens, 'token')}: KL divergence {found.mean:.6f} +- {found.error:.6f} nats, same "
            f"likeliest token {100 * found.same_top:.2f} %"
        ]
    print("\n".join(part for line in lines for part in fit(line)))
