"""What one thread sends and another, or a task of an event loop, takes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Any thread puts, one thread or task at a time takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._wake: Callable[[], object] | None = None

    def put(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def get(self) -> Item:
        """The first one; waits for it."""
        while True:
            come = threading.Event()
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._wake = come.set
            come.wait()

    async def aget(self) -> Item:
        """As `get`, without keeping the event loop from its other tasks."""
        loop = asyncio.get_running_loop()
        while True:
            come = asyncio.Event()
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._wake = _waker(loop, come)
            await come.wait()


def _waker(loop: asyncio.AbstractEventLoop, come: asyncio.Event) -> Callable[[], object]:
    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(come.set)

    return wake
