"""Whose turn it is to use a model: threads wait for each other, the first that came goes first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from vkback.api.errors import ModelError

SLICE_S = 0.25
"""So long a stream may keep its turn from piece to piece while others wait: when another text takes over, the state of this one goes to the
host, which may take as long as some tokens."""

NEXT_PIECE_S = 0.005
"""Within so long a stream that keeps its turn must ask for its next piece."""


class Turns:
    """One thread at a time, first come, first served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Condition] = deque()
        self._user: tuple[int, str] | None = None
        self._keeper = 0
        """Thread of the stream that keeps its turn; until when, and since when it has had it, by time.monotonic()."""
        self._kept_until = self._since = 0.0

    @contextmanager
    def take(self, what: str, *, piece: bool = False) -> Iterator[None]:
        """Wait for the turn, and have it. what: the call, for errors. piece: of a stream, which will ask for the next one soon.

        Raises ModelError where this thread has the turn: it would wait for itself.
        """
        self._begin(what, piece)
        try:
            yield
        finally:
            self._end(piece)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def _begin(self, what: str, piece: bool) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._user is not None and self._user[0] == me:
                raise ModelError(
                    f"[model] {what} was called inside {self._user[1]}, by a function that this one calls; expected a call that waits for "
                    "nothing: let the outer call end first, or load the model twice"
                )
            keeps = piece and me == self._keeper and time.monotonic() < self._kept_until
            mine = threading.Condition(self._lock)
            (self._waiting.appendleft if keeps else self._waiting.append)(mine)
            try:
                while self._user is not None or self._waiting[0] is not mine or (not keeps and self._kept > 0):
                    mine.wait(self._kept if self._user is None and self._waiting[0] is mine else None)
            except BaseException:  # Ctrl-C
                self._waiting.remove(mine)
                self._wake()
                raise
            self._waiting.popleft()
            self._user = me, what
            if not keeps:
                self._since = time.monotonic()
            self._keeper = me if piece else 0
            self._kept_until = 0.0

    def _end(self, piece: bool) -> None:
        with self._lock:
            self._user = None
            if piece:
                self._kept_until = min(time.monotonic() + NEXT_PIECE_S, self._since + SLICE_S)
            self._wake()

    @property
    def _kept(self) -> float:
        """Seconds that a stream may still keep the turn."""
        return self._kept_until - time.monotonic()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].notify()
