"""Many texts of a model at once, from prompts and options to pieces of text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from vkback.api.errors import too_long
from vkback.api.message import MessageReader
from vkback.api.options import Options
from vkback.api.result import Chunk, FinishReason, Result, Timings
from vkback.api.text import GeneratedText
from vkback.engine.batch.batch import Batch, Request, Took, Update
from vkback.engine.constraint import Constraint
from vkback.engine.drafts import Drafts
from vkback.engine.split.side_by_side import ManyTexts

Event = Chunk | Result | Exception
"""Pieces of a text, then the whole; or the error that ended it."""


@dataclass(eq=False)
class BatchText:
    """A text of a batch. id: the batch's. prompt: its tokens. most: that are made at most. compiled: seconds of
    compilers before its first token."""

    id: int
    out: GeneratedText
    options: Options
    prompt: int
    most: int
    took: Took = field(default_factory=Took)
    compiled: float = 0.0


class BatchedTexts:
    """Texts over a batch. As that, for one thread at a time."""

    def __init__(self, batch: ManyTexts, drafts: Drafts | None = None) -> None:
        """drafts: those that a text may have while it runs alone."""
        self.batch, self._drafts = batch, drafts
        self._texts: dict[int, BatchText] = {}

    @property
    def paged(self) -> Batch:
        """The batch, of layers on one device."""
        assert isinstance(self.batch, Batch)
        return self.batch

    @property
    def sequences(self) -> int:
        """Texts that run at once, at most."""
        return self.batch.slots

    @property
    def busy(self) -> bool:
        """Whether any text has not ended."""
        return bool(self._texts)

    def add(
        self,
        ids: Sequence[int],
        options: Options,
        constraint: Constraint | None = None,
        *,
        reader: MessageReader | None = None,
        client: str = "",
        adapters: tuple[float, ...] = (),
    ) -> BatchText:
        """Put a text in work. reader: of a reply that has thoughts beside the answer. client: whose it is; clients take turns. adapters:
        what each is multiplied by. Raises ContextLengthError, and what `Batch.add` raises."""
        batch, engine = self.batch, self.batch.engine
        if len(ids) > batch.max_rows:
            raise too_long(len(ids), batch.max_rows)
        room = max(batch.most_rows - len(ids) + 1, 1)
        most = room if options.max_tokens is None else min(room, options.max_tokens)
        out = GeneratedText(engine.model, options, reader=reader)
        request = Request(tuple(ids), most, options.sampler, not options.ignore_eos, client, options.logprobs is not None, constraint)
        request = replace(request, adapters=adapters, processors=options.logits_processor)
        if self._drafts is not None:
            request = replace(request, drafts=self._drafts.at_most(options.draft_max))
        text = BatchText(batch.add(request), out, options, len(ids), most)
        self._texts[text.id] = text
        return text

    def end(self, text: BatchText, reason: FinishReason = "closed") -> Result:
        """End a text here, unless it has ended: what it has so far. Its pages are free within a step."""
        text.out.end(reason)
        if self._texts.pop(text.id, None) is not None:
            self.batch.cancel(text.id)
        took, made = text.took, len(text.out.made)
        compiled = self.batch.engine.compiled.seconds - text.compiled
        decode_s = time.perf_counter() - took.began - compiled if made else 0.0
        text.out.timings = Timings(
            compiled if made else 0.0,
            took.reused,
            text.prompt - took.reused,
            took.prompt_s,
            made,
            decode_s,
            took.drafts.drafted,
            took.drafts.accepted,
        )
        return text.out.result

    def advance(self) -> list[tuple[BatchText, Event]]:
        """Do the next thing, which may be to wait for a step, and say what came of it."""
        found: list[tuple[BatchText, Event]] = []
        if self._texts:
            for made in self.batch.advance():
                if (text := self._texts.get(made.id)) is not None:
                    found += ((text, event) for event in self._events(text, made))
        return found

    def settle(self) -> None:
        """Wait for what is in flight of texts that have ended, so that their pages are free. While none is in work."""
        while self.batch.busy and not self.busy:
            self.batch.advance()

    def close(self) -> None:
        """Give the batch's memory back."""
        self.batch.close()

    def _events(self, text: BatchText, made: Update) -> Iterator[Event]:
        out = text.out
        text.took = made.took
        if made.tokens and not out.made:
            text.compiled = self.batch.engine.compiled.seconds
        for i, token in enumerate(made.tokens):
            piece = out.take(token, made.logits[i] if made.logits else None)
            if piece is not None:
                yield piece
            if out.finish is not None:
                break
        if out.finish is None and made.error is not None:
            self.end(text)
            yield made.error
        elif out.finish is not None or made.reason:
            if out.finish is None:
                out.end("stop" if made.reason == "stop" else "length" if text.most == text.options.max_tokens else "context")
                if (piece := out.rest()) is not None:
                    yield piece
            yield self.end(text)
