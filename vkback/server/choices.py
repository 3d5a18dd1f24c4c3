"""The choices of one reply: each is a request to the worker. Their events come through one queue of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from vkback.api import Chunk, Result
from vkback.server.queued import Event, QueuedRequest
from vkback.server.worker import Worker

Told = tuple[int, Event]
"""The number of a choice, and what comes of it."""


class Mail:
    """Brings events of the worker's thread to queues of an event loop, which is woken once for all that has come since the last time: a
    wake costs more than an event."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._sent: deque[tuple[asyncio.Queue[Told], Told]] = deque()
        self._woken = False

    def sender(self, queue: asyncio.Queue[Told], index: int) -> Callable[[Event], None]:
        """Puts events of a choice into a queue, called in any thread; without effect once the loop is closed."""

        def send(event: Event) -> None:
            self._sent.append((queue, (index, event)))
            if not self._woken:
                self._woken = True
                with suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(self._deliver)

        return send

    def _deliver(self) -> None:
        self._woken = False  # first: what is sent from here on wakes again
        while self._sent:
            queue, told = self._sent.popleft()
            queue.put_nowait(told)


class Choices:
    """Requests of one reply, as many at once as the worker runs. events: what comes of them."""

    def __init__(self, worker: Worker, mail: Mail, requests: Callable[[int, Callable[[Event], None]], QueuedRequest], count: int) -> None:
        """requests: makes the request of a choice, from its number and what takes its events."""
        self.events: asyncio.Queue[Told] = asyncio.Queue()
        self.results: list[Result | None] = [None] * count
        self._worker, self._mail, self._requests = worker, mail, requests
        self._running: dict[int, QueuedRequest] = {}
        self._begun = 0
        self._begin()

    @property
    def left(self) -> int:
        """Choices that have not ended."""
        return self.results.count(None)

    def whole(self) -> list[Result]:
        """All results, once none is left."""
        return [result for result in self.results if result is not None]

    @property
    def deadline(self) -> float:
        """Of those that run, by time.monotonic()."""
        return next(iter(self._running.values())).deadline

    def waiting(self) -> list[Told]:
        """What has come already, pieces of a choice in one."""
        found: list[Told] = []
        with suppress(asyncio.QueueEmpty):
            while True:
                found.append(self.events.get_nowait())
        return found

    def ended(self, index: int, result: Result) -> None:
        """A choice is whole: the next one begins."""
        self.results[index] = result
        del self._running[index]
        self._begin()

    def cancel(self) -> None:
        """The client has left, or a choice has failed."""
        for request in self._running.values():
            self._worker.cancel(request)

    def _begin(self) -> None:
        """Put requests in the worker's queue. While that has no room, those that are left wait here for the others. Raises QueueFull and
        Unavailable."""
        while self._begun < len(self.results) and len(self._running) < self._worker.parallel and not (self._running and self._worker.full):
            index = self._begun
            request = self._requests(index, self._mail.sender(self.events, index))
            try:
                self._worker.submit(request)
            except BaseException:
                self.cancel()
                raise
            self._running[index] = request
            self._begun += 1


def joined(told: Sequence[Told]) -> list[Told]:
    """The same with the pieces of each choice in one: a client that takes them slowly gets fewer and larger ones."""
    pieces: dict[int, list[Chunk]] = {}
    found: list[Told] = []
    for index, event in told:
        if isinstance(event, Chunk):
            pieces.setdefault(index, []).append(event)
            continue
        if parts := pieces.pop(index, None):
            found.append((index, _joined(parts)))
        found.append((index, event))
    return found + [(index, _joined(parts)) for index, parts in pieces.items()]


def _joined(parts: Sequence[Chunk]) -> Chunk:
    if len(parts) == 1:
        return parts[0]
    return Chunk("".join(p.text for p in parts), tuple(t for p in parts for t in p.tokens), tuple(t for p in parts for t in p.logprobs))
