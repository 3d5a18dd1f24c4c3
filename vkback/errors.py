"""The one base of all errors a user may see: who speaks, what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class VkbackError(Exception):
    """Base of every error raised on bad input or a failing device. Its text is complete by itself. exit_code: of a command it ends."""

    exit_code: ClassVar[int] = 1


class ModelError(VkbackError):
    """A call that a model cannot carry out: it is closed, in use by another thread, or was given what it cannot act on."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean X?" for a name that is spelled almost as one of those known, whatever the case of letters; else nothing."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""
