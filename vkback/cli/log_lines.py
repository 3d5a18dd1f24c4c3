"""Lines of the library's log on stderr, as commands show them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vkback.events import log, progress_log


class LogLines(logging.Handler):
    """Prints each record as a line `vkback: TEXT` on what stderr is at that moment, so that bars move below it. Bars show progress."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == progress_log.name:
            return
        print(f"vkback: {'warning: ' * hasattr(record, 'to_mend')}{self.format(record)}", file=sys.stderr, flush=True)


@contextmanager
def log_lines() -> Iterator[None]:
    """Warnings and infos of vkback go to stderr meanwhile, and nowhere else twice. May overlap with another one in another thread."""
    handler = LogLines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        if not any(isinstance(other, LogLines) for other in log.handlers):
            log.setLevel(logging.NOTSET)
