"""A generation as it comes: an iterator of pieces of text, with the whole at its end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.api.errors import ModelError
from vkback.api.options import Options
from vkback.api.reasoning import NO_MARKS, ReplyReader
from vkback.api.result import Chunk, FinishReason, Result, Timings, TokenLogprob
from vkback.engine.constraint import Constraint
from vkback.engine.engine import Engine
from vkback.engine.stop_strings import StopStrings

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
        reader: ReplyReader | None = None,
    ) -> None:
        """text: all tokens so far, of which the engine has taken n_past; tokens that are made are added to it. warm: kinds of sampler whose
        kernels have run. constraint: what the text must be. reader: of a reply that has thoughts beside the answer."""
        self._reader = reader or ReplyReader(NO_MARKS)
        self._warm = warm
        self._constraint = constraint
        self._engine, self._text, self._options, self._using = engine, text, options, using
        self._stops = StopStrings(options.stops)
        self._decoder = engine.tokenizer.stream()
        self._made: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._told = 0  # tokens that chunks have had
        self._finish: FinishReason | None = None
        self._cut_off = ""
        self._reused = reused
        self._timings = Timings(reused_tokens=reused)
        self._pieces = self._run()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._cut_off:
            raise ModelError(f"[model] this stream was ended by a later call, {self._cut_off}; take all of it before another call")
        if self._finish is not None:
            raise StopIteration
        with self._using("stream"):
            return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it here, with the finish_reason "closed"; what was made stays in the session."""
        if self._finish is None:
            self._finish = "closed"
        self._pieces.close()

    def cut_off(self, by: str) -> None:
        """End it, since another call needs the model."""
        if self._finish is None:
            self._cut_off = by
        self._pieces.close()

    @property
    def ended(self) -> bool:
        """Whether its last piece was taken, or `close` called."""
        return self._finish is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those made so far."""
        return tuple(self._made)

    @property
    def result(self) -> Result:
        """All so far; finish_reason of a stream that has not come to its end is "closed"."""
        seed = self._options.seed
        made, logprobs = tuple(self._made), tuple(self._logprobs)
        return self._reader.result(Result("", made, self._finish or "closed", self._timings, logprobs, seed))

    def finished(self) -> Result:
        """Run to the end."""
        for _ in self:
            pass
        return self.result

    def _run(self) -> Generator[Chunk, None, None]:
        engine, options = self._engine, self._options
        sampler = options.sampler
        fed = self._text[engine.n_past :]
        room = engine.n_ctx - len(self._text) + 1
        n = room if options.max_tokens is None else min(room, options.max_tokens)
        before = engine.compiled
        constraint = self._constraint
        kind = (sampler.greedy, sampler.penalizes, constraint is not None)
        engine.prepare(prompt=len(fed) - 1, sampler=None if kind in self._warm or not n else sampler, constrained=constraint is not None)
        if n:
            self._warm.add(kind)
        prepared = engine.compiled
        start = time.perf_counter()
        engine.prompt(fed[:-1])
        prompted = time.perf_counter()
        if not n:
            self._timings = Timings((prepared - before).seconds, self._reused, len(fed), prompted - start)
            self._finish = "length"
            return
        logits: list[npt.NDArray[np.float32]] = []
        on_logits = logits.append if options.logprobs is not None else None
        tokens = engine.generate(
            fed[-1], n, sampler=sampler, stop_at_eos=not options.ignore_eos, on_logits=on_logits, constraint=constraint
        )
        ends = frozenset() if options.ignore_eos or not engine.model.has_text else engine.tokenizer.eos_ids
        decode_s = 0.0
        with contextlib.closing(tokens):  # here: what an iterator raises where it is thrown away, Ctrl-C for one, is printed as ignored
            while True:
                begun = time.perf_counter()
                token = next(tokens, None)
                decode_s += time.perf_counter() - begun
                again = engine.compiled - prepared  # barrier-free stages that fail are planned and compiled anew
                self._timings = Timings(
                    (prepared - before).seconds + again.seconds,
                    self._reused,
                    len(fed),
                    prompted - start,
                    len(self._made) + (token is not None),
                    decode_s - again.seconds,
                )
                if token is None:
                    whole = constraint is not None and constraint.ended
                    self._finish = "stop" if whole else "context" if n == room and n != options.max_tokens else "length"
                    break
                self._text.append(token)
                self._made.append(token)
                if options.logprobs is not None:
                    self._logprobs.append(self._logprob(token, logits.pop(), options.logprobs))
                if token in ends or token in options.stop_ids:
                    self._finish = "eos" if token in ends else "stop"
                    break
                text = self._stops.feed(self._decoder.feed(token))
                if self._stops.found:
                    self._finish = "stop"
                    tokens.close()
                    yield from self._chunk(text, last=True)
                    return
                if text or not engine.model.has_text:
                    yield from self._chunk(text)
        rest = self._stops.feed(self._decoder.flush())
        if not self._stops.found:
            rest += self._stops.flush()
        if rest or self._told < len(self._made) or self._reader.holds:
            yield from self._chunk(rest, last=True)

    def _chunk(self, text: str, *, last: bool = False) -> Iterator[Chunk]:
        """None where the reader holds the text back."""
        reasoning, answer = self._reader.feed(text)
        if last:
            more = self._reader.flush()
            reasoning, answer = reasoning + more[0], answer + more[1]
        elif text and not reasoning and not answer:
            return
        first, self._told = self._told, len(self._made)
        yield Chunk(answer, tuple(self._made[first:]), tuple(self._logprobs[first:]), reasoning)

    def _logprob(self, token: int, logits: npt.NDArray[np.float32], count: int) -> TokenLogprob:
        x = logits.astype(np.float64)
        log_sum = float(x.max()) + math.log(float(np.exp(x - x.max()).sum()))
        best = np.argsort(-x, kind="stable")[:count]
        top = tuple((int(i), self._spelled(int(i)), float(x[i]) - log_sum) for i in best)
        return TokenLogprob(token, self._spelled(token), float(x[token]) - log_sum, top)

    def _spelled(self, token: int) -> str:
        return self._engine.tokenizer.token_bytes(token, special=True).decode("utf-8", "replace") if self._engine.model.has_text else ""
