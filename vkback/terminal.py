"""What a stream that leads to a terminal may be sent."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO


def colours_wanted(stream: TextIO) -> bool:
    """Whether colours may be written: to a terminal that knows them, and whose user has not said otherwise (https://no-color.org)."""
    return redraws(stream) and not os.environ.get("NO_COLOR")


def redraws(stream: TextIO) -> bool:
    """Whether lines can be rewritten in place, as bars do: on a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


NARROWEST = 80
"""Columns of the narrowest terminal that tables are made for."""

UNBOUNDED = 10_000
"""Columns of what is no terminal: lines stay whole there, for grep and for other programs."""


def columns() -> int:
    """Columns that lines of stdout have: those of its terminal, or of the variable COLUMNS; any number where it leads to a file or a
    pipe."""
    if os.environ.get("COLUMNS", "").isdigit() or (sys.stdout is not None and sys.stdout.isatty()):
        return max(NARROWEST, shutil.get_terminal_size().columns)
    return UNBOUNDED


def dim(text: str, stream: TextIO) -> str:
    """A text in a faint colour, where colours are wanted."""
    return f"\x1b[2m{text}\x1b[22m" if colours_wanted(stream) else text
