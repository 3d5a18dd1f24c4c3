"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, holding back an end that may be the beginning of one.

    found  whether a stop string has come; the text then ends before it
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is safe to show."""
        if self.found:
            return ""
        self._held += text
        at = min((i for s in self._stops if (i := self._held.find(s)) >= 0), default=-1)
        if at >= 0:
            self.found = True
            out, self._held = self._held[:at], ""
            return out
        keep = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        out, self._held = self._held, ""
        return out
