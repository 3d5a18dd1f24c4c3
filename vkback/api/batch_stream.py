"""Texts of many prompts as they come: an iterator of pieces, each with the number of its text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vkback.api.batched import BatchedTexts, BatchText
from vkback.api.errors import ModelError
from vkback.api.options import Options
from vkback.api.result import Chunk, Result
from vkback.engine.constraint import Constraint

Piece = tuple[int, Chunk]
"""The number of a text, and what comes of it."""


@dataclass(frozen=True)
class Wanted:
    """A text to make. prompt: its tokens. constraint: makes what it is held to, None without."""

    prompt: list[int]
    options: Options
    constraint: Callable[[], Constraint | None]


class BatchStream(Iterator[Piece]):
    """Iterate over it for (number of the text, piece); `results` has the texts that have ended, `close` ends it early. It runs only while
    it is iterated.

    Another call to the same model ends it; going on with it is then an error.
    """

    def __init__(self, wanted: Sequence[Wanted], pieces: Callable[[BatchStream], Generator[Piece, None, None]]) -> None:
        """Use `LoadedModel.batch_stream`. pieces: makes them."""
        self.wanted = wanted
        self.results: list[Result | None] = [None] * len(wanted)
        """By the number of the text; None: it has not ended."""
        self._cut_off = ""
        self._pieces = pieces(self)

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Piece:
        if self._cut_off:
            raise ModelError(f"[model] this batch was ended by a later call, {self._cut_off}; take all of it before another call")
        return next(self._pieces)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it here; `results` has the texts that had ended."""
        self._pieces.close()

    def cut_off(self, by: str) -> None:
        """End it, since another call needs the model."""
        if any(result is None for result in self.results):
            self._cut_off = by
        self._pieces.close()

    def finished(self) -> list[Result]:
        """Run to the end."""
        for _ in self:
            pass
        return [result for result in self.results if result is not None]


def at_once(
    texts: BatchedTexts, sequences: int, using: Callable[[], AbstractContextManager[Any]], own: BatchStream
) -> Generator[Piece, None, None]:
    """Pieces of texts that run beside each other. sequences: so many at most. using: takes the model for one step."""
    waiting = iter(enumerate(own.wanted))
    running: dict[BatchText, int] = {}
    try:
        while True:
            with using():
                for index, wanted in islice(waiting, sequences - len(running)):
                    running[texts.add(wanted.prompt, wanted.options, wanted.constraint())] = index
                if not running:
                    return
                found = texts.advance()
            for text, event in found:
                if isinstance(event, Chunk):
                    yield running[text], event
                    continue
                index = running.pop(text)
                if not isinstance(event, Result):
                    raise event
                own.results[index] = event
    finally:
        for text in running:
            texts.end(text)
