"""vkback embed: vectors of texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkback.cli.loading import ADAPTERS, ARITHMETIC, load_options, with_loading
from vkback.cli.shell import DeviceOption, JsonOption, ModelOption, UsageError, bars, load_model, model_path, read_text, unicode_text

if TYPE_CHECKING:
    from vkback.models.texts import Pooling

PoolingOption = Annotated[
    str | None, typer.Option("--pooling", help="How a text becomes a vector: mean, cls or last [default: as the file says].")
]

SHOWN_VALUES = 3
"""Values at either end of a vector that is shown as text."""


def pooling_named(word: str | None) -> Pooling | None:
    """Raises UsageError."""
    from vkback.api.vectors import EMBEDS

    if word is None:
        return None
    found = next((pooling for pooling in EMBEDS if pooling == word), None)
    if found is None:
        raise UsageError(f"--pooling {word}: expected {', '.join(EMBEDS)}")
    return found


@with_loading("ctx", *ARITHMETIC, "exact", *ADAPTERS)
def embed(
    words: Annotated[list[str] | None, typer.Argument(metavar="TEXT...", help="Texts, each of them one.", show_default=False)] = None,
    given: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Texts in one, apart by the separator.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="A file with them, in UTF-8; - reads stdin.")] = None,
    separator: Annotated[str, typer.Option("--embd-separator", help="Between texts of -p and -f [default: a line's end].")] = "\n",
    model: ModelOption = None,
    pooling: PoolingOption = None,
    normalize: Annotated[int, typer.Option("--embd-normalize", min=-1, max=2, help="2: vectors of length 1; -1: as they come.")] = 2,
    form: Annotated[
        str, typer.Option("--embd-output-format", metavar="FORMAT", help="text, json (as OpenAI's API), json+ (with cosines), array.")
    ] = "text",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    *,
    loading: Mapping[str, Any],
) -> None:
    """Vectors of texts, to stdout; as text with the cosines between them. Options are named as llama-embedding names them."""
    texts = texts_given(words or [], given, file, separator)
    kind = pooling_named(pooling)
    forms: tuple[Literal["text", "json", "json+", "array"], ...] = ("text", "json", "json+", "array")
    if as_json:
        form = "json"
    if form not in forms:
        raise UsageError(f"--embd-output-format {form}: expected {', '.join(forms)}")
    if normalize not in (-1, 2):
        raise UsageError(f"--embd-normalize {normalize}: expected 2, vectors of length 1, or -1, as they come")
    options = load_options(**loading, progress=bars())
    with load_model(model_path(model), device, options) as loaded:
        rows = loaded.embed(texts, normalize=normalize == 2, pooling=kind)
        lengths = (rows**2).sum(axis=1) ** 0.5
        cosines = rows @ rows.T / (lengths[:, None] * lengths[None, :]).clip(min=1e-30)
        name = loaded.name
    if form == "array":
        print(json.dumps(rows.tolist()))
    elif form == "text":
        for i, row in enumerate(rows):
            begin, end = (" ".join(f"{value:9.6f}" for value in part) for part in (row[:SHOWN_VALUES], row[-SHOWN_VALUES:]))
            print(f"embedding {i}: {begin} ... {end}")
        if len(rows) > 1:
            print("\ncosine similarity matrix:\n")
            print("\n".join(" ".join(f"{value:6.2f}" for value in line) for line in cosines))
    else:
        data = [{"object": "embedding", "index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
        more = {"cosineSimilarity": cosines.tolist()} if form == "json+" else {}
        print(json.dumps({"object": "list", "model": name, "data": data, **more}))


def texts_given(words: list[str], given: str | None, file: Path | None, separator: str) -> list[str]:
    """The texts of the command line. Raises UsageError for none, for one without a character, and for more ways to give them than one."""
    if sum((bool(words), given is not None, file is not None)) != 1:
        raise UsageError('embed needs texts: vkback embed "a text" "another", or -p TEXTS, or -f FILE, one of these')
    if not separator:
        raise UsageError("--embd-separator is empty; give what stands between texts")
    if words:
        texts = words
    else:
        read = unicode_text(sys.stdin.read(), "stdin") if str(file) == "-" else None
        whole = given if given is not None else read if read is not None else read_text(file or Path(), "-f")
        texts = [text for text in whole.split(separator) if text]
    if not texts or not all(texts):
        raise UsageError("embed: a text is empty; give each at least a character")
    return texts
