"""What ends a command from outside: Ctrl-C, and the signals TERM and HUP."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from vkback.paths import remove_parts

PATIENCE_S = 4.0
"""How long a command that was interrupted may take to close what it has open. A CPU driver may run one kernel for minutes."""

FLUSH_S = 0.5

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """The first of SIGNALS raises KeyboardInterrupt, and its number stands in the list. Further ones change nothing, so that what was
    measured is still written. After PATIENCE_S the process ends wherever it is. Signals that the caller has ignored stay so."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not came:
            came.append(number)
            stop_compilers()
            raise KeyboardInterrupt

    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) in usual}
    reader, writer = os.pipe()
    if hasattr(os, "set_blocking"):
        os.set_blocking(writer, False)
    left = threading.Event()
    # The thread learns of a signal while the main thread is in a call of the driver and handles none.
    watching = threading.Thread(target=_end_at_last, args=(reader, left), daemon=True)
    watching.start()
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        for number in before:
            signal.signal(number, note)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        left.set()
        os.close(writer)
        watching.join()
        os.close(reader)


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Meanwhile Ctrl-C raises KeyboardInterrupt each time, and the process goes on if that is caught."""
    before, woken = signal.signal(signal.SIGINT, signal.default_int_handler), signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken)


class NotedInterrupts:
    """Ctrl-C in a conversation, as a context manager: KeyboardInterrupt while `waiting` for the user, else noted, since what runs on the
    device has to come to its end. The first one is answered on stderr; one that comes PATIENCE_S after it ends the process."""

    def __init__(self) -> None:
        self._waits = False
        self._first: float | None = None

    def __enter__(self) -> Self:
        self._before, self._woken = signal.signal(signal.SIGINT, self._note), signal.set_wakeup_fd(-1)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        signal.set_wakeup_fd(self._woken)

    @property
    def came(self) -> bool:
        """Whether there was one since the user was last waited for."""
        return self._first is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The user has the word."""
        self._first = None
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            raise KeyboardInterrupt
        if self._first is None:
            self._first = time.monotonic()
            with suppress(OSError, ValueError):  # by the system: what is printed may have been interrupted by this
                os.write(sys.stderr.fileno(), b"\nvkback: ending the reply\n")
        elif time.monotonic() - self._first > PATIENCE_S:
            _end(number)


def stop_compilers() -> None:
    """End compilers that run, if any was started: their shaders are not wanted any more."""
    compiler = sys.modules.get("vkback.shader.compiler")
    getattr(compiler, "stop_programs", lambda: None)()  # it may be half imported


def _end_at_last(reader: int, left: threading.Event) -> None:
    """Wait for a signal's number to be read, and then for the command to end; else end the process."""
    while number := os.read(reader, 1):
        if number[0] not in SIGNALS or left.wait(PATIENCE_S):
            continue
        _end(number[0])


def _end(number: int) -> None:
    """End the process wherever it is, as by a signal."""
    stop_compilers()
    remove_parts()
    flushing = threading.Thread(target=_flush, daemon=True)  # its lock may be held
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(128 + number)


def _flush() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
