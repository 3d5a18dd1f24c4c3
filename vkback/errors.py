"""The one base of all errors a user may see: who speaks, what was expected, what came, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar


class VkbackError(Exception):
    """Base of every error raised on bad input or a failing device. Its text is complete by itself. exit_code: of a command it ends."""

    exit_code: ClassVar[int] = 1


class ModelError(VkbackError):
    """A call that a model cannot carry out: it is closed, in use by another thread, or was given what it cannot act on."""


def nearest(name: str, known: Iterable[str], most: int = 5) -> str:
    """Of many names those that are most like it: with the same words in them first, then by spelling."""

    def words(text: str) -> set[str]:
        return set(re.split(r"[^a-z0-9]+", text.lower())) - {""}

    asked = words(name)

    def likeness(other: str) -> tuple[int, float]:
        shared = sum(any(word in own for own in words(other)) for word in asked)
        return shared, difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()

    return ", ".join(sorted(known, key=likeness, reverse=True)[:most])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean X?" for a name that is spelled almost as one of those known, whatever the case of letters; else nothing."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""
