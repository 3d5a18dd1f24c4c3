"""A generation as it comes: an iterator of pieces of text, with the whole at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vkback.api.errors import ModelError
from vkback.api.message import MessageReader
from vkback.api.options import Options
from vkback.api.result import Chunk, Result, Timings
from vkback.api.text import GeneratedText
from vkback.engine.constraint import Constraint
from vkback.engine.drafts import DraftCounts, Drafts
from vkback.engine.engine import Engine
from vkback.engine.host_loop import generate_on_host
from vkback.engine.sampler import loop_kind

Using = Callable[[bool], AbstractContextManager[Any]]
"""Takes the engine for one step, with the state of this text, or (True) with the state that it has."""


class Source(Protocol):
    """Where the pieces of a stream come from. result: all so far. ended: whether nothing more comes."""

    @property
    def result(self) -> Result: ...

    @property
    def ended(self) -> bool: ...

    def take(self) -> Chunk | None:
        """The next piece; None at the end."""

    async def atake(self) -> Chunk | None:
        """As `take`, in a task of an event loop."""

    def finish(self) -> None:
        """Run to the end; pieces are not wanted any more."""

    async def afinish(self) -> None:
        """As `finish`, in a task of an event loop."""

    def close(self) -> None:
        """End here. Any thread may ask for it."""

    def cut_off(self) -> None:
        """End, since its session goes another way. The engine is the caller's."""


class Stream(Iterator[Chunk]):
    """Iterate over it, with `for` or `async for`, for pieces of text; `result` is the whole so far, `close` ends it early.

    Other calls to the same model do not end it, but those that change the text of its session: going on with it is then an error.
    """

    def __init__(self, source: Source) -> None:
        """Use `LoadedModel.stream` or a session's."""
        self._source = source
        self._cut_off = ""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        self._require_whole()
        if (piece := self._source.take()) is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        self._require_whole()
        if (piece := await self._source.atake()) is None:
            raise StopAsyncIteration
        return piece

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def close(self) -> None:
        """End it here, with the finish_reason "closed"; what was taken of it stays in the session."""
        self._source.close()

    async def aclose(self) -> None:
        """As `close`, in a task of an event loop."""
        await asyncio.to_thread(self.close)

    def cut_off(self, by: str) -> None:
        """End it, since another call changes the text of its session."""
        if not self._source.ended:
            self._cut_off = by
        self._source.cut_off()

    @property
    def ended(self) -> bool:
        """Whether its last piece was taken, or `close` called."""
        return self._source.ended

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those made so far."""
        return self._source.result.tokens

    @property
    def result(self) -> Result:
        """All so far; finish_reason of a stream that has not come to its end is "closed"."""
        return self._source.result

    def finished(self) -> Result:
        """Run to the end."""
        self._require_whole()
        self._source.finish()
        return self.result

    async def afinished(self) -> Result:
        """As `finished`, in a task of an event loop."""
        self._require_whole()
        await self._source.afinish()
        return self.result

    def _require_whole(self) -> None:
        if self._cut_off:
            raise ModelError(f"[model] this stream was ended by a later call, {self._cut_off}; take all of it before that call")


class EngineText:
    """A text that the engine makes alone, a step for each piece that is taken. It may be paused between two pieces, so that others can use
    the engine; it then goes on with the same bits, once its session's state is back on the device."""

    def __init__(
        self,
        engine: Engine,
        text: list[int],
        reused: int,
        options: Options,
        using: Using,
        warm: set[str],
        constraint: Constraint | None = None,
        reader: MessageReader | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """text: all tokens so far, of which the engine has taken n_past; tokens that are made are added to it. warm: kinds of sampler whose
        kernels have run. constraint: what the text must be. reader: of a reply that has thoughts beside the answer.
        drafts: those that it may have."""
        self._warm, self._drafts = warm, drafts
        self._constraint = constraint
        self._engine, self._text, self._options, self._using = engine, text, options, using
        self._out = GeneratedText(engine.model, options, reused, reader)
        self._reused = reused
        self._tokens: Generator[int, None, None] | None = None
        self._logits: list[npt.NDArray[np.float32]] = []
        self._counts = DraftCounts()
        self._pieces = self._run()

    @property
    def ended(self) -> bool:
        return self._out.finish is not None

    @property
    def result(self) -> Result:
        return self._out.result

    def take(self) -> Chunk | None:
        if self.ended:
            return None
        with self._using(False):
            return next(self._pieces, None)

    async def atake(self) -> Chunk | None:
        return await asyncio.to_thread(self.take)

    def finish(self) -> None:
        if not self.ended:
            with self._using(False):
                for _ in self._pieces:
                    pass

    async def afinish(self) -> None:
        await asyncio.to_thread(self.finish)

    def close(self) -> None:
        if self._engine.device.forked:  # what is in flight is the other process's
            self._out.end("closed")
        if not self.ended:
            with suppress(ModelError), self._using(True):  # of a model that is closed nothing is left to end
                self.cut_off()

    def cut_off(self) -> None:
        self._out.end("closed")
        self._pieces.close()
        self.pause()

    def pause(self) -> None:
        """Nothing is in flight any more. The engine is the caller's."""
        if self._tokens is not None:
            self._tokens.close()
            self._tokens = None
            self._counts = self._drafted

    @property
    def _drafted(self) -> DraftCounts:
        """Of the text, with those of the run that is going on."""
        return self._counts if self._options.logits_processor else self._counts + self._engine.draft_counts

    def _begin(self, fed: int, n: int) -> Generator[int, None, None]:
        """At most n tokens behind the last one, `fed`; all before it have gone through the model."""
        engine, options = self._engine, self._options
        on_logits = self._logits.append if options.logprobs is not None else None
        how: dict[str, Any] = {"sampler": options.sampler, "stop_at_eos": not options.ignore_eos, "on_logits": on_logits}
        if options.logits_processor:
            return generate_on_host(engine, self._text, n, options.logits_processor, constraint=self._constraint, **how)
        return engine.generate(fed, n, constraint=self._constraint, drafts=self._drafts, **how)

    def _run(self) -> Generator[Chunk, None, None]:
        engine, options, out = self._engine, self._options, self._out
        sampler = options.sampler
        fed = self._text[engine.n_past :]
        room = engine.n_ctx - len(self._text) + 1
        n = room if options.max_tokens is None else min(room, options.max_tokens)
        before = engine.compiled
        constraint = self._constraint
        kind = loop_kind(sampler, constraint is not None)
        if options.logits_processor:
            engine.prepare(prompt=len(fed) - 1, logits=True)
        else:
            warm = kind in self._warm or not n
            engine.prepare(prompt=len(fed) - 1, sampler=None if warm else sampler, constrained=constraint is not None)
            if n:
                self._warm.add(kind)
        prepared = engine.compiled
        experts_before = engine.count_experts()
        start = time.perf_counter()
        engine.prompt(fed[:-1])
        prompted = time.perf_counter()
        if not n:
            out.timings = Timings((prepared - before).seconds, self._reused, len(fed), prompted - start)
            out.end("length")
            return
        decode_s = 0.0
        self._tokens = self._begin(fed[-1], n)
        try:
            while out.finish is None:
                begun = time.perf_counter()
                if self._tokens is None:  # it was paused: the state is back, and all but the last token have gone through the model
                    *unread, last = self._text[engine.n_past :]
                    engine.prompt(unread)
                    self._tokens = self._begin(last, n - len(out.made))
                token = next(self._tokens, None)
                decode_s += time.perf_counter() - begun
                counts = self._drafted
                again = engine.compiled - prepared  # barrier-free stages that fail are planned and compiled anew
                out.timings = Timings(
                    (prepared - before).seconds + again.seconds,
                    self._reused,
                    len(fed),
                    prompted - start,
                    len(out.made) + (token is not None),
                    decode_s - again.seconds,
                    counts.drafted,
                    counts.accepted,
                )
                if token is None:
                    whole = constraint is not None and constraint.ended
                    out.end("stop" if whole else "context" if n == room and n != options.max_tokens else "length")
                    piece = out.rest()
                else:
                    self._text.append(token)
                    piece = out.take(token, self._logits.pop() if self._logits else None)
                if piece is not None and out.finish is None:
                    yield piece
                if out.finish is not None:
                    engine.after_text()
                    experts = engine.expert_counts - experts_before
                    out.timings = replace(out.timings, experts_wanted=experts.wanted, experts_found=experts.found)
        finally:  # here: what an iterator raises where it is thrown away, Ctrl-C for one, is printed as ignored
            self.pause()
        if piece is not None:
            yield piece
