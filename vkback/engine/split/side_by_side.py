"""Several texts over layers on several devices: each has a cache of its own, and while one device works for one text, another does for the
next.

To those who put texts in work it is as `Batch` (vkback/engine/batch/batch.py), which needs all layers on one device: there a step makes a
token of each text, here texts take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vkback.device import DeviceLost, OutOfDeviceMemory, Timeout
from vkback.engine.batch.batch import Request, Took, Update
from vkback.engine.engine import Engine
from vkback.engine.host_loop import generate_on_host
from vkback.errors import VkbackError
from vkback.events import log

Floats = npt.NDArray[np.float32]


class ManyTexts(Protocol):
    """What is asked of a Batch by those who put texts in work."""

    @property
    def engine(self) -> Engine: ...

    @property
    def slots(self) -> int:
        """Texts that run at once, at most."""

    @property
    def max_rows(self) -> int:
        """Of one text."""

    @property
    def most_rows(self) -> int:
        """Of one text, with all memory that there is."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""

    @property
    def reading(self) -> bool:
        """Whether the engine's own cache holds part of a prompt: nobody else may use the engine now."""

    @property
    def has_engine(self) -> bool:
        """Whether it holds a text that runs, which `give_way` takes out."""

    def give_way(self) -> None: ...

    def add(self, request: Request) -> int: ...

    def cancel(self, id: int) -> None: ...

    def advance(self) -> list[Update]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Text:
    """A request in work. logits: of the tokens that were made since it was last told of."""

    id: int
    request: Request
    engine: Engine
    tokens: Generator[int, None, None]
    took: Took
    made: int = 0
    logits: list[Floats] = field(default_factory=list)


class SideBySide:
    """Texts over an engine of several devices, as many at once as there are devices. Use as a context manager, or `close` it. Not for
    several threads at once; nobody else may use the engine while texts are in work."""

    def __init__(self, engine: Engine, sequences: int) -> None:
        """Takes memory for the caches of the other texts: where there is none, fewer run at once."""
        self.engine = engine
        self._undo = ExitStack()
        self._free = [engine]
        for _ in range(min(sequences, len(engine.devices)) - 1):
            try:
                self._free.append(self._undo.enter_context(engine.beside()))
            except OutOfDeviceMemory as error:
                log.warning("no memory for the cache of another text (%s); going on with %d at once", error, len(self._free))
                break
        self._slots = len(self._free)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[_Text] = []
        self._ids = count()

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all texts, and give the memory back."""
        for text in self._running:
            text.tokens.close()
        self._running.clear()
        self._waiting.clear()
        self._undo.close()

    @property
    def slots(self) -> int:
        """Texts that run at once, at most."""
        return self._slots

    @property
    def max_rows(self) -> int:
        """Of one text."""
        return self.engine.n_ctx

    @property
    def most_rows(self) -> int:
        """As `max_rows`."""
        return self.engine.n_ctx

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._running)

    @property
    def reading(self) -> bool:
        """Whether texts run: nobody else may use the engine then."""
        return bool(self._running)

    @property
    def has_engine(self) -> bool:
        """As of Batch; a text that runs does not give way."""
        return False

    def give_way(self) -> None:
        """As of Batch."""

    def add(self, request: Request) -> int:
        """Put a request in work; its number. Raises EngineError for ids that are none, and for adapters, which are
        switched on one device alone."""
        self.engine.check_ids(request.tokens)
        self.engine.check_ids([id for id, _ in request.sampler.logit_bias])
        self.engine.check_adapters(request.adapters)
        id = next(self._ids)
        self._waiting.append((id, request))
        return id

    def cancel(self, id: int) -> None:
        """End a text here."""
        self._waiting = deque(each for each in self._waiting if each[0] != id)
        for text in [text for text in self._running if text.id == id]:
            self._leave(text)

    def advance(self) -> list[Update]:
        """Begin what has room, and make a token of each text that runs."""
        found: list[Update] = []
        while self._waiting and self._free:
            id, request = self._waiting.popleft()
            if (ended := self._begin(id, request)) is not None:
                found.append(ended)
        for text in list(self._running):
            found.append(self._next(text))
        return found

    def _begin(self, id: int, request: Request) -> Update | None:
        """Read a prompt. What it is told of at once: a text that ends with it."""
        engine, took, begun = self._free[-1], Took(), time.perf_counter()
        before = engine.compiled.seconds
        engine.reset()
        try:
            engine.prompt(request.tokens[:-1])
        except (DeviceLost, Timeout):
            raise
        except VkbackError as error:
            return Update(id, (), "error", (), took, error)
        took.prompt_s = max(time.perf_counter() - begun - (engine.compiled.seconds - before), 0.0)
        if not request.max_tokens:
            return Update(id, (), "length", (), took)
        logits: list[Floats] = []
        on_logits = logits.append if request.logits else None
        how: dict[str, Any] = {"sampler": request.sampler, "stop_at_eos": request.stop_at_eos, "on_logits": on_logits}
        how["constraint"] = request.constraint
        if request.processors:
            tokens = generate_on_host(engine, request.tokens, request.max_tokens, request.processors, **how)
        else:
            tokens = engine.generate(request.tokens[-1], request.max_tokens, **how)
        self._running.append(_Text(id, request, self._free.pop(), tokens, took, logits=logits))
        return None

    def _next(self, text: _Text) -> Update:
        request, reason, error = text.request, "", None
        text.took.began = text.took.began or time.perf_counter()
        made: tuple[int, ...] = ()
        try:
            made = (next(text.tokens),)
        except StopIteration:
            reason = "stop"
        except (DeviceLost, Timeout):
            raise
        except VkbackError as e:
            reason, error = "error", e
        text.made += len(made)
        logits = tuple(text.logits)
        text.logits.clear()
        if made and request.stop_at_eos and made[0] in self.engine.end_ids(True):
            reason = "eos"
        elif text.made >= request.max_tokens:
            reason = reason or "length"
        elif request.constraint is not None and request.constraint.ended:
            reason = reason or "stop"
        if reason:
            self._leave(text)
        return Update(text.id, made, reason, logits, text.took, error)

    def _leave(self, text: _Text) -> None:
        text.tokens.close()
        self._running.remove(text)
        self._free.append(text.engine)
