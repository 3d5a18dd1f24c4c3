"""vkback perplexity by workers: each reads chunks of the text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vkback.cli.hosts import Where, journal_of
from vkback.cli.listed_work import ListedWork
from vkback.evaluate.perplexity import Perplexity, PerplexityError, count_chunks, token_losses

if TYPE_CHECKING:
    from vkback.api import LoadedModel
    from vkback.cluster.worker import Station, Tell

PIECES = 4
"""Units a worker gets on average: enough that all end together."""


def _loaded(station: Station, args: Mapping[str, Any]) -> tuple[LoadedModel, list[int]]:
    """The model, and the tokens of the whole text: made once by a worker."""
    from vkback.cli.loading import load_options
    from vkback.cli.shell import load_model

    def make(stack: ExitStack) -> tuple[LoadedModel, list[int]]:
        model = stack.enter_context(load_model(Path(args["path"]), station.device or None, load_options(**args["options"])))
        return model, list(model.ids(args["text"], start=True))

    return station.kept(("perplexity", args["path"], repr(args["options"]), hash(str(args["text"]))), make)


def count_of(station: Station, args: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """On a worker: how many chunks the text has, and what the model is."""
    model, ids = _loaded(station, args)
    chunks = count_chunks(ids, args["chunk"], args["chunks"])
    return {"chunks": chunks, "tokens": len(ids), "model": model.description, "file": model.name}


def losses_of(station: Station, args: Mapping[str, Any], tell: Tell) -> list[float]:
    """On a worker: losses of the scored tokens of chunks args["first"] to args["last"], not included."""
    model, ids = _loaded(station, args)
    size, losses = args["chunk"], list[float]()

    def scored(logits: Any, targets: Any) -> None:
        losses.extend(token_losses(logits, targets).tolist())

    model.perplexity(ids[args["first"] * size : args["last"] * size], chunk=size, sequences=args["sequences"], on_scored=scored)
    return losses


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a kind of device has found. model, file, device: what it was."""

    perplexity: Perplexity
    chunks: int
    model: str
    file: str
    device: str


def perplexity_by_workers(where: Where, workers: int, args: Mapping[str, Any]) -> list[Scored]:
    """args: path, text (or token ids), chunk, chunks, sequences, and options of loading. Raises PerplexityError for a text of no chunk."""
    from vkback.cluster.pull import Unit

    def units(counted: Mapping[str, Any]) -> Sequence[Unit]:
        count = counted["chunks"]
        if not count:
            raise PerplexityError(
                f"[perplexity] the text has {counted['tokens']} tokens, one chunk takes {args['chunk']}; give a longer text or a smaller "
                "context"
            )
        size = max(1, math.ceil(count / (PIECES * workers)))
        ends = [(first, min(first + size, count)) for first in range(0, count, size)]
        return [Unit(f"chunks {a} to {b - 1}", f"{__name__}:losses_of", {**args, "first": a, "last": b}) for a, b in ends]

    work = ListedWork(
        units, journal_of(None, command="perplexity"), "pieces", Unit("the count of chunks", f"{__name__}:count_of", dict(args))
    )
    work.run(where)
    found = []
    for kind, results in work.kinds.items():
        counted = work.firsts[kind]
        losses = np.concatenate([np.asarray(results.values[unit.key]) for unit in units(counted)])
        value = math.exp(float(losses.mean()))
        error = value * float(losses.std(ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
        about = counted["model"], counted["file"], str(results.about["device"])
        found.append(Scored(Perplexity(value, error, len(losses)), counted["chunks"], *about))
    return found
