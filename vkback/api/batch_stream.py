"""Texts of many prompts as they come: an iterator of pieces, each with the number of its text."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial

from vkback.api.inbox import Inbox
from vkback.api.result import Chunk, Result
from vkback.api.shared import Event, SharedTexts, TextRequest

Piece = tuple[int, Chunk]
"""The number of a text, and what comes of it."""


class BatchStream(Iterator[Piece]):
    """Iterate over it, with `for` or `async for`, for (number of the text, piece); `results` has the texts that have ended, `close` ends it
    early. The texts begin when the first piece is asked for, and then go on by themselves."""

    def __init__(self, texts: SharedTexts, wanted: Sequence[TextRequest], sequences: int) -> None:
        """Use `LoadedModel.batch_stream`. sequences: so many texts run at once, at most."""
        self.results: list[Result | None] = [None] * len(wanted)
        """By the number of the text; None: it has not ended."""
        self._texts, self._wanted, self._sequences = texts, wanted, sequences
        self._inbox: Inbox[tuple[int, Event]] = Inbox()
        self._begun = self._running = 0
        self._closed = False
        for index, asked in enumerate(wanted):
            asked.put, asked.client = partial(_put, self._inbox, index), self._inbox
        weakref.finalize(self, _leave, texts, wanted).atexit = False

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Piece:
        while self._begin():
            if (piece := self._took(*self._inbox.get())) is not None:
                return piece
        raise StopIteration

    def __aiter__(self) -> BatchStream:
        return self

    async def __anext__(self) -> Piece:
        while self._begin():
            if (piece := self._took(*await self._inbox.aget())) is not None:
                return piece
        raise StopAsyncIteration

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> BatchStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it here; `results` has the texts that had ended."""
        self._closed = True
        _leave(self._texts, self._wanted)

    def finished(self) -> list[Result]:
        """Run to the end. Raises the error of a text that fails, which ends the others."""
        self._want_no_pieces()
        try:
            for _ in self:
                pass
        finally:
            self.close()
        return [result for result in self.results if result is not None]

    async def afinished(self) -> list[Result]:
        """As `finished`, in a task of an event loop."""
        self._want_no_pieces()
        try:
            async for _ in self:
                pass
        finally:
            self.close()
        return [result for result in self.results if result is not None]

    def _want_no_pieces(self) -> None:
        for asked in self._wanted:
            asked.pieces = False

    def _begin(self) -> bool:
        """Put texts in work as long as there may be more of them. Whether anything comes yet."""
        if self._closed:
            return False
        while self._running < self._sequences and self._begun < len(self._wanted):
            self._texts.submit(self._wanted[self._begun])
            self._begun += 1
            self._running += 1
        return self._running > 0

    def _took(self, index: int, event: Event) -> Piece | None:
        """Raises the error that it is."""
        if isinstance(event, Chunk):
            return index, event
        self._running -= 1
        if isinstance(event, Result):
            self.results[index] = event
            return None
        self.close()
        raise event


def _put(inbox: Inbox[tuple[int, Event]], index: int, event: Event) -> None:
    inbox.put((index, event))


def _leave(texts: SharedTexts, wanted: Sequence[TextRequest]) -> None:
    for asked in wanted:
        texts.leave(asked)
