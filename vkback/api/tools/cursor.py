"""Reads a text that is still growing. A reader of a format says what must come; the cursor says whether that has come (it goes on), cannot
come any more (Malformed), or may still come (Unfinished).

What is decided of a text holds for every longer text that begins with it: so pieces may be cut anywhere.
"""

from __future__ import annotations

import json
import re
from typing import Any

JSON_SYNTAX = re.compile(r'"(?:[^"\\]|\\.)*+"|["\[\]{}]', re.DOTALL)
"""A whole string, one that is not, or a bracket."""

NAME = re.compile(r"[A-Za-z_][\w.\-/]{0,255}\Z", re.ASCII)
"""Of a tool."""


class Malformed(Exception):  # noqa: N818  no error: the text is content
    """This is no call."""


class Unfinished(Exception):  # noqa: N818
    """It may become one."""


class Cursor:
    """A place in a text. last: nothing comes behind it."""

    def __init__(self, text: str, at: int = 0, *, last: bool) -> None:
        self.text, self.at, self.last = text, at, last

    @property
    def ended(self) -> bool:
        """Whether the text ends here, and nothing will come."""
        return self.last and self.at >= len(self.text)

    def more(self) -> Exception:
        """What to raise where the text ends too early."""
        return Malformed() if self.last else Unfinished()

    def skip(self, chars: str | None = None) -> None:
        """White space, or these characters. Whether more come is open while the text ends here."""
        rest = self.text[self.at :]
        self.at += len(rest) - len(rest.lstrip(chars))

    def maybe(self, *marks: str) -> str:
        """One of these marks, if it stands here. A mark that another begins with stands behind that."""
        rest = self.text[self.at :]
        for mark in marks:
            if rest.startswith(mark):
                self.at += len(mark)
                return mark
            if not self.last and mark.startswith(rest):
                raise Unfinished
        return ""

    def take(self, *marks: str) -> str:
        """One of these marks, which must stand here."""
        found = self.maybe(*marks)
        if not found:
            raise Malformed
        return found

    def close(self, *marks: str) -> str:
        """A mark at the end of a call, which models leave out: white space before it is no part of what follows."""
        before = self.at
        self.skip()
        found = self.maybe(*marks)
        if not found:
            self.at = before
        return found

    def until(self, *marks: str) -> tuple[str, str]:
        """The text before the first of these marks, and the mark."""
        found = min(((at, mark) for mark in marks if (at := self.text.find(mark, self.at)) >= 0), default=None)
        if found is None:
            raise self.more()
        text = self.text[self.at : found[0]]
        self.at = found[0] + len(found[1])
        return text, found[1]

    def name(self, end: str) -> str:
        """The name of a tool, before this mark, which is taken."""
        return self.named(end)[0]

    def named(self, *ends: str) -> tuple[str, str]:
        """The name of a tool, before one of these marks, and the mark, which is taken."""
        text, mark = self.until(*ends)
        if not NAME.match(name := text.strip()):
            raise Malformed
        return name, mark

    def json(self, begins: str = "{") -> Any:
        """A JSON object, or another value that begins with one of these brackets. Line ends may stand in its strings as they are."""
        self.skip()
        if self.at >= len(self.text):
            raise self.more()
        if self.text[self.at] not in begins:
            raise Malformed
        end = self._json_end()
        try:
            value = json.loads(self.text[self.at : end], strict=False)
        except (ValueError, RecursionError) as e:
            raise Malformed from e
        self.at = end
        return value

    def _json_end(self) -> int:
        depth = 0
        for found in JSON_SYNTAX.finditer(self.text, self.at):
            mark = found[0]
            if mark == '"':
                break  # a string that has not ended
            if mark in "[{":
                depth += 1
            elif mark in "]}":
                depth -= 1
            if depth == 0:
                return found.end()
        raise self.more()
