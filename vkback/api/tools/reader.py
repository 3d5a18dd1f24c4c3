"""Tells the calls in a reply from its text, as it comes in pieces."""

from __future__ import annotations

import string

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed, Unfinished
from vkback.api.tools.format import Format, Tools

WAKES = frozenset("}])>\n")
"""Characters of which one is in whatever ends a call or shows that there is none: other text is held without being read again."""

Told = tuple[str, list[ToolCall]]
"""Text that is no call, and calls that have become whole."""


class CallReader:
    """`feed` and `flush` give text and whole calls. What looks like a call and is none is text, in full; white space around calls is not.

    calls  all so far
    """

    def __init__(self, format: Format, tools: Tools, begun: str = "") -> None:
        """begun: what the prompt has of the first call."""
        self._format, self._tools = format, tools
        self._held, self._gap = begun, ""  # text that may be of a call; white space before it
        self._begun = False  # whether the held text begins with a mark
        self._start = True  # whether nothing but calls has come
        self.calls: list[ToolCall] = []

    @property
    def holds(self) -> bool:
        """Whether `flush` may give something."""
        return bool(self._held or self._gap)

    def feed(self, text: str) -> Told:
        if self._begun and WAKES.isdisjoint(text):
            self._held += text
            return "", []
        return self._run(text, last=False)

    def flush(self) -> Told:
        """What was held back."""
        return self._run("", last=True)

    def _run(self, new: str, *, last: bool) -> Told:
        self._held += new
        text, known = "", len(self.calls)
        while self._held:
            if not self._begun:
                at, mark = self._opening(last=last)
                text += self._content(at)
                if not mark:
                    break
                self._begun = True
            cursor = Cursor(self._held, last=last)
            try:
                found = self._format.read(cursor, self._tools)
            except Unfinished:
                break
            except Malformed:
                text += self._content(1)  # what begins it is text; another may begin behind
            else:
                self._held = self._held[cursor.at :]
                if found:
                    self.calls += found
                    self._gap, self._start = "", True
            self._begun = False
        if last:
            text += "" if self.calls and self._start else self._gap
            self._gap = ""
        return text, self.calls[known:]

    def _content(self, count: int) -> str:
        """So many characters of the held text are no call. White space at their end waits for what comes."""
        taken, self._held = self._gap + self._held[:count], self._held[count:]
        kept = len(taken.rstrip()) if taken.strip(self._white) else 0
        self._gap = taken[kept:]
        if kept:
            self._start = False
        return taken[:kept]

    @property
    def _white(self) -> str | None:
        """What may stand before a call; None: white space alone."""
        return string.whitespace + self._format.between if self._format.between and self.calls and self._start else None

    def _opening(self, *, last: bool) -> tuple[int, str]:
        """Where a mark begins in the held text, and the mark; "" where none does: then how much of it none can begin in."""
        found = [(at, mark) for mark in self._format.opens if (at := self._held.find(mark)) >= 0]
        cut = len(self._held)
        if not last:
            cut -= max((_overlap(self._held, mark) for mark in self._format.opens), default=0)
        if self._start and self._format.at_start:
            white = len(self._held) - len(self._held.lstrip(self._white))
            rest = self._held[white:]
            found += [(white, mark) for mark in self._format.at_start if rest.startswith(mark)]
            if not last and any(mark.startswith(rest) for mark in self._format.at_start):
                cut = min(cut, white)
        at, mark = min(found, key=lambda each: (each[0], -len(each[1])), default=(cut, ""))
        return (at, mark) if at <= cut else (cut, "")


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
