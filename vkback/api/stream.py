"""A generation as it comes: an iterator of pieces of text, with the whole at its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.api.errors import ModelError
from vkback.api.message import MessageReader
from vkback.api.options import Options
from vkback.api.result import Chunk, Result, Timings
from vkback.api.text import GeneratedText
from vkback.engine.constraint import Constraint
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.host_loop import generate_on_host

Using = Callable[[str], AbstractContextManager[Any]]
"""Takes the engine for one step of a call of this name."""


class Stream(Iterator[Chunk]):
    """Iterate over it for pieces of text; `result` is the whole so far, `close` ends it early. It runs only while it is iterated.

    Another call to the same model ends it; going on with it is then an error.
    """

    def __init__(
        self,
        engine: Engine,
        text: list[int],
        reused: int,
        options: Options,
        using: Using,
        warm: set[tuple[bool, ...]],
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
        self._cut_off = ""
        self._reused = reused
        self._pieces = self._run()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._cut_off:
            raise ModelError(f"[model] this stream was ended by a later call, {self._cut_off}; take all of it before another call")
        if self._out.finish is not None:
            raise StopIteration
        with self._using("stream"):
            return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it here, with the finish_reason "closed"; what was made stays in the session."""
        self._out.end("closed")
        self._pieces.close()

    def cut_off(self, by: str) -> None:
        """End it, since another call needs the model."""
        if self._out.finish is None:
            self._cut_off = by
        self._pieces.close()

    @property
    def ended(self) -> bool:
        """Whether its last piece was taken, or `close` called."""
        return self._out.finish is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those made so far."""
        return tuple(self._out.made)

    @property
    def result(self) -> Result:
        """All so far; finish_reason of a stream that has not come to its end is "closed"."""
        return self._out.result

    def finished(self) -> Result:
        """Run to the end."""
        for _ in self:
            pass
        return self.result

    def _run(self) -> Generator[Chunk, None, None]:
        engine, options, out = self._engine, self._options, self._out
        sampler = options.sampler
        fed = self._text[engine.n_past :]
        room = engine.n_ctx - len(self._text) + 1
        n = room if options.max_tokens is None else min(room, options.max_tokens)
        before = engine.compiled
        constraint = self._constraint
        processors = options.logits_processor
        kind = (sampler.greedy, sampler.penalizes, constraint is not None)
        if processors:
            engine.prepare(prompt=len(fed) - 1, logits=True)
        else:
            warm = kind in self._warm or not n
            engine.prepare(prompt=len(fed) - 1, sampler=None if warm else sampler, constrained=constraint is not None)
            if n:
                self._warm.add(kind)
        prepared = engine.compiled
        start = time.perf_counter()
        engine.prompt(fed[:-1])
        prompted = time.perf_counter()
        if not n:
            out.timings = Timings((prepared - before).seconds, self._reused, len(fed), prompted - start)
            out.end("length")
            return
        logits: list[npt.NDArray[np.float32]] = []
        on_logits = logits.append if options.logprobs is not None else None
        stop_at_eos = not options.ignore_eos
        if processors:
            tokens = generate_on_host(
                engine, self._text, n, processors, sampler=sampler, stop_at_eos=stop_at_eos, on_logits=on_logits, constraint=constraint
            )
        else:
            tokens = engine.generate(
                fed[-1], n, sampler=sampler, stop_at_eos=stop_at_eos, on_logits=on_logits, constraint=constraint, drafts=self._drafts
            )
        decode_s = 0.0
        with contextlib.closing(tokens):  # here: what an iterator raises where it is thrown away, Ctrl-C for one, is printed as ignored
            while out.finish is None:
                begun = time.perf_counter()
                token = next(tokens, None)
                decode_s += time.perf_counter() - begun
                again = engine.compiled - prepared  # barrier-free stages that fail are planned and compiled anew
                out.timings = Timings(
                    (prepared - before).seconds + again.seconds,
                    self._reused,
                    len(fed),
                    prompted - start,
                    len(out.made) + (token is not None),
                    decode_s - again.seconds,
                    engine.draft_counts.drafted,
                    engine.draft_counts.accepted,
                )
                if token is None:
                    whole = constraint is not None and constraint.ended
                    out.end("stop" if whole else "context" if n == room and n != options.max_tokens else "length")
                    piece = out.rest()
                else:
                    self._text.append(token)
                    piece = out.take(token, logits.pop() if logits else None)
                if piece is not None and out.finish is None:
                    yield piece
        if piece is not None:
            yield piece
