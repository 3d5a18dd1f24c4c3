"""What vkback reports while it works. The library prints nothing: lines go to Python's `logging`, and who wants them configures it; how far
a load, a compile or a prompt is goes to a function that the caller gives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

log = logging.getLogger("vkback")
"""Warnings for what changes results or speed, infos for what a user may like to know."""

log.addHandler(logging.NullHandler())  # else Python prints warnings on stderr where nothing is configured

progress_log = log.getChild("progress")
"""An info at the beginning of what takes seconds. Commands draw bars instead."""

TO_MEND = {"to_mend": True}
"""extra= of a warning whose cause the user can remove. Commands begin its line with `warning:`."""

Work = Literal["load", "compile", "prompt"]


@dataclass(frozen=True)
class Progress:
    """How far a work is. The events of a work come in order, from any thread; the last one has `ended`.

    work   "load": bytes of weights; "compile": kernels made ready; "prompt": tokens read
    total  0: not known yet, since kernels are still being chosen
    waits_for  of a load, what its weights wait for: "reading", "uploading" or "repacking"
    """

    work: Work
    done: float
    total: int
    waits_for: str = ""
    ended: bool = False


Report = Callable[[Progress], object]
"""Called with each event, in the thread that does the work, which waits: it has to be quick."""


class Reported:
    """One work that is reported to a function, or to nobody. Use as a context manager; methods may be called from any thread."""

    def __init__(self, report: Report | None, work: Work, total: int = 0, waits_for: str = "") -> None:
        self._report, self._work, self._total, self._waits_for = report, work, total, waits_for
        self._done = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._send()
        return self

    def __exit__(self, *_: object) -> None:
        self._send(ended=True)

    def expect(self, total: int) -> None:
        """The total, where it was not known at the start."""
        self._total = total
        self._send()

    def advance(self, count: float = 1) -> None:
        """So much more is done; less, if it must be done again."""
        with self._lock:
            self._done += count
            self._send()

    def waits_for(self, what: str) -> None:
        with self._lock:
            self._waits_for = what
            self._send()

    def _send(self, *, ended: bool = False) -> None:
        if self._report is not None:
            self._report(Progress(self._work, self._done, self._total, self._waits_for, ended))
