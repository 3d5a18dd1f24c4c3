"""Texts that several threads and tasks of a program want of one model at once: they share the steps of its batch, which one thread runs."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vkback.api.at_once import AtOnce, Queues
from vkback.api.batched import BatchedTexts, BatchText
from vkback.api.errors import ModelError
from vkback.api.inbox import Inbox
from vkback.api.message import MessageReader
from vkback.api.options import Options
from vkback.api.result import Chunk, FinishReason, Result, Timings
from vkback.device import DeviceLost
from vkback.device import Timeout as DeviceTimeout
from vkback.engine.constraint import Constraint
from vkback.errors import VkbackError

if TYPE_CHECKING:
    from vkback.api.model import LoadedModel

Event = Chunk | Result | Exception
"""Pieces of a text, then the whole; or the error that ended it."""


def _nobody(event: Event) -> None:
    """Takes nothing."""


@dataclass(eq=False)
class TextRequest:
    """A text that somebody waits for.

    prompt      its tokens
    constraint  makes what it is held to, None without
    reader      makes what tells thoughts, answer and calls of a reply apart, None without
    sequences   texts of its call that run at once, at most; None: as the model was loaded
    put         takes what comes of it, in the thread of the batch
    client      whose it is; clients take turns
    pieces      whether pieces are wanted, or the whole alone
    left        nobody waits any more
    """

    prompt: list[int]
    options: Options
    constraint: Callable[[], Constraint | None]
    reader: Callable[[], MessageReader | None] = lambda: None
    sequences: int | None = None
    put: Callable[[Event], None] = _nobody
    client: object = None
    pieces: bool = True
    left: threading.Event = field(default_factory=threading.Event)


class SharedTexts:
    """Any thread may `submit` and `leave`. The thread that runs texts begins with the first and ends with the last of them."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._waiting: Queues[TextRequest] = Queues()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._wanted = 0
        _LIVE.add(self)

    def submit(self, asked: TextRequest) -> None:
        """Raises ModelError where the model is closed."""
        with self._lock:
            if self._stopped:
                raise self._closed()
            self._waiting.put(asked.client, asked)
            if self._thread is None:
                self._thread = threading.Thread(target=AtOnce(self).serve, name="vkback-batch", daemon=True)
                self._thread.start()

    def leave(self, asked: TextRequest) -> None:
        """Nobody waits for a text any more: its pages are free within a step."""
        asked.left.set()

    def stop(self) -> None:
        """All texts end with an error, and so does the thread."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _closed(self) -> ModelError:
        return ModelError(f"[model] {self._model.name} is closed: this text needs an open one; load it again")

    # What AtOnce asks, in its thread

    def take(self, running: int) -> Sequence[TextRequest] | None:
        model = self._model
        with self._lock:
            if self._stopped:
                for asked in self._waiting.take_all():
                    asked.put(self._closed())
            if not running and not self._waiting:
                self._thread = None
                return None
            slots = model.opened.sequences if model.opened is not None and running else model.sequences
            found = self._waiting.take(max(slots - running, 0))
        self._wanted = max((asked.sequences or model.sequences for asked in found), default=0)
        return found

    def turn(self) -> AbstractContextManager[Any]:
        return self._model.stepping("batch")

    def waited_for(self) -> bool:
        return self._model.waiting > 0

    def texts(self) -> BatchedTexts:
        opened = self._model.opened
        if opened is not None and opened.busy:
            return opened
        return self._model.batched(self._wanted or None)

    def add(self, asked: TextRequest, texts: BatchedTexts) -> BatchText | None:
        if asked.left.is_set():
            return None
        client = str(id(asked.client))
        adapters = self._model.adapter_scales(asked.options)
        return texts.add(asked.prompt, asked.options, asked.constraint(), reader=asked.reader(), client=client, adapters=adapters)

    def over(self, asked: TextRequest) -> FinishReason | None:
        if self._stopped:
            return "closed"
        return "closed" if asked.left.is_set() else None

    def piece(self, asked: TextRequest, chunk: Chunk) -> None:
        if asked.pieces:
            asked.put(chunk)

    def ended(self, asked: TextRequest, end: Result | Exception, early: FinishReason | None = None) -> None:
        asked.put(self._closed() if self._stopped and early else end)

    def lost(self, requests: Sequence[TextRequest], error: DeviceLost | DeviceTimeout) -> None:
        for asked in requests:
            asked.put(error)

    def broken(self) -> None:
        with suppress(VkbackError):  # the texts have been told
            self._model.close_batch()

    def worked(self, seconds: float) -> None:
        pass


_LIVE: weakref.WeakSet[SharedTexts] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for texts in list(_LIVE):
        texts.stop()


class SharedText:
    """The source of a stream over the batch. The text is put in work when the first piece is asked for, and then goes on by itself."""

    def __init__(self, texts: SharedTexts, asked: TextRequest, text: list[int]) -> None:
        """text: takes the tokens, as their pieces are taken."""
        self._texts, self._asked, self._text = texts, asked, text
        self._inbox: Inbox[Event] = Inbox()
        asked.put, asked.client = self._inbox.put, self._inbox
        self._begun = False
        self._pieces: list[Chunk] = []
        self._whole: Result | None = None
        self._error: Exception | None = None
        self._closed = False
        weakref.finalize(self, texts.leave, asked).atexit = False

    @property
    def ended(self) -> bool:
        return self._closed or self._whole is not None or self._error is not None

    @property
    def result(self) -> Result:
        if self._whole is not None:
            return self._whole
        pieces = self._pieces
        return Result(
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.tokens),
            "closed",
            Timings(prompt_tokens=len(self._asked.prompt)),
            tuple(each for piece in pieces for each in piece.logprobs),
            self._asked.options.seed,
            "".join(piece.reasoning for piece in pieces),
            tuple(call for piece in pieces for call in piece.tool_calls),
        )

    def take(self) -> Chunk | None:
        if self.ended:
            return None
        self._begin()
        return self._took(self._inbox.get())

    async def atake(self) -> Chunk | None:
        if self.ended:
            return None
        self._begin()
        return self._took(await self._inbox.aget())

    def finish(self) -> None:
        self._asked.pieces = False
        try:
            while not self.ended:
                self.take()
        except BaseException:
            self.close()
            raise

    async def afinish(self) -> None:
        self._asked.pieces = False
        try:
            while not self.ended:
                await self.atake()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        self._texts.leave(self._asked)

    def cut_off(self) -> None:
        self.close()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._texts.submit(self._asked)

    def _took(self, event: Event) -> Chunk | None:
        """Raises the error that it is."""
        if isinstance(event, Chunk):
            self._pieces.append(event)
            self._text += event.tokens
            return event
        if isinstance(event, Result):
            told = sum(len(piece.tokens) for piece in self._pieces)
            self._whole = event
            self._text += event.tokens[told:]
            return None
        self._error = event
        raise event
