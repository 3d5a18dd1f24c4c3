"""Texts of a model that run beside each other: taken in as there is room, each with an end of its own. One thread runs them; the texts are
somebody else's, an `Owner`'s: a server's (vkback/server/worker.py), or those of the threads and tasks that use a model
(vkback/api/shared.py)."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, Protocol, TypeVar

from vkback.api.batched import BatchedTexts, BatchText
from vkback.api.result import Chunk, FinishReason, Result
from vkback.device import DeviceLost
from vkback.device import Timeout as DeviceTimeout

RequestT = TypeVar("RequestT")


class Owner(Protocol[RequestT]):
    """Who wants texts. All is called in the thread of `AtOnce.serve`."""

    def take(self, running: int) -> Sequence[RequestT] | None:
        """Those that may begin now, while so many run; waits for one where none runs. None: there will be no more."""

    def turn(self) -> AbstractContextManager[Any]:
        """The model, for this thread alone."""

    def waited_for(self) -> bool:
        """Whether others wait for the model. Within a turn."""

    def texts(self) -> BatchedTexts:
        """What runs texts, opened where it is not. Within a turn."""

    def add(self, request: RequestT, texts: BatchedTexts) -> BatchText | None:
        """Put a text in work. None: it is not wanted any more. Raises what is wrong with it."""

    def over(self, request: RequestT) -> FinishReason | None:
        """Why a text ends here; None: it goes on."""

    def piece(self, request: RequestT, chunk: Chunk) -> None:
        """A piece of its text."""

    def ended(self, request: RequestT, end: Result | Exception, early: FinishReason | None = None) -> None:
        """It is whole, or why it failed: nothing comes of it any more. early: what `over` said."""

    def lost(self, requests: Sequence[RequestT], error: DeviceLost | DeviceTimeout) -> None:
        """The device is lost, and with it all that ran. Not within a turn."""

    def broken(self) -> None:
        """What the batch has is worth nothing any more: the next texts need another one. Within a turn."""

    def worked(self, seconds: float) -> None:
        """So long a round took."""


class AtOnce(Generic[RequestT]):
    """Belongs to one thread."""

    def __init__(self, owner: Owner[RequestT]) -> None:
        self._owner = owner
        self._running: dict[BatchText, RequestT] = {}

    def serve(self) -> None:
        """Until no more texts will come, and those that run have ended."""
        owner = self._owner
        with ExitStack() as turn:
            held = False
            while (found := owner.take(len(self._running))) is not None:
                begun, begins = time.monotonic(), deque(found)
                try:
                    if not held:
                        turn.enter_context(owner.turn())
                        held = True
                    texts = owner.texts()
                    while begins:
                        self._begin(begins[0], texts)
                        begins.popleft()
                    self._end_those_that_are_over(texts)
                    self._advance(texts)
                    held = self._keeps(texts)
                except (DeviceLost, DeviceTimeout) as error:
                    held = False
                    turn.close()
                    requests = [*self._running.values(), *begins]
                    self._running.clear()
                    owner.lost(requests, error)
                except Exception as error:  # of no text alone
                    held = False
                    self._fail_all(error, begins)
                if not held:
                    turn.close()
                owner.worked(time.monotonic() - begun)

    def _keeps(self, texts: BatchedTexts) -> bool:
        """Whether nobody else may have the engine now, since its own cache has part of a prompt, or of a text that runs alone."""
        batch = texts.batch
        if batch.has_engine and self._owner.waited_for():
            batch.give_way()
        return batch.reading or batch.has_engine

    def _begin(self, request: RequestT, texts: BatchedTexts) -> None:
        try:
            text = self._owner.add(request, texts)
        except (DeviceLost, DeviceTimeout):
            raise
        except Exception as error:  # whatever it is, the others go on
            self._owner.ended(request, error)
        else:
            if text is not None:
                self._running[text] = request

    def _end_those_that_are_over(self, texts: BatchedTexts) -> None:
        for text, request in list(self._running.items()):
            if (reason := self._owner.over(request)) is not None:
                del self._running[text]
                self._owner.ended(request, texts.end(text, reason), reason)

    def _advance(self, texts: BatchedTexts) -> None:
        if not self._running:
            texts.settle()  # nobody may come for long
        for text, event in texts.advance():
            if isinstance(event, Chunk):
                self._owner.piece(self._running[text], event)
            else:
                self._owner.ended(self._running.pop(text), event)

    def _fail_all(self, error: Exception, begins: Sequence[RequestT]) -> None:
        """All end with this error, and the next ones get a new batch."""
        requests = [*self._running.values(), *begins]
        self._running.clear()
        for request in requests:
            self._owner.ended(request, error)
        self._owner.broken()


class Queues(Generic[RequestT]):
    """Texts that wait, by client; clients take turns."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Any, deque[RequestT]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def put(self, client: Any, request: RequestT) -> None:
        """At the end of its client's queue."""
        self._waiting.setdefault(client, deque()).append(request)

    def remove(self, client: Any, request: RequestT) -> bool:
        """Whether it waited."""
        queue = self._waiting.get(client)
        if queue is None or request not in queue:
            return False
        queue.remove(request)
        if not queue:
            del self._waiting[client]
        return True

    def take(self, most: int) -> list[RequestT]:
        """Up to so many, of the client whose turn it is first."""
        found: list[RequestT] = []
        while self._waiting and len(found) < most:
            client, queue = self._waiting.popitem(last=False)
            found.append(queue.popleft())
            if queue:
                self._waiting[client] = queue  # behind the other clients
        return found

    def take_all(self) -> list[RequestT]:
        """Nobody waits any more."""
        return self.take(len(self))
