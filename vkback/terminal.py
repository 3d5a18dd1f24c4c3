"""What a stream that leads to a terminal may be sent."""

from __future__ import annotations

import os
from typing import TextIO


def colours_wanted(stream: TextIO) -> bool:
    """Whether colours may be written: to a terminal that knows them, and whose user has not said otherwise (https://no-color.org)."""
    return redraws(stream) and not os.environ.get("NO_COLOR")


def redraws(stream: TextIO) -> bool:
    """Whether lines can be rewritten in place, as bars do: on a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def dim(text: str, stream: TextIO) -> str:
    """A text in a faint colour, where colours are wanted."""
    return f"\x1b[2m{text}\x1b[22m" if colours_wanted(stream) else text
