"""A reply of the assistant as it comes, told apart: what it thinks, what it says, which tools it calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkback.api.reasoning import NO_MARKS, Marks, ReplyReader
from vkback.api.result import Result
from vkback.api.tools.call import ToolCall
from vkback.api.tools.reader import CallReader


@dataclass(frozen=True)
class Piece:
    """What a piece of text has come to. calls: those that have become whole."""

    thoughts: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.thoughts or self.text or self.calls)


class MessageReader:
    """Of one reply. thoughts, text, calls: all so far."""

    def __init__(self, marks: Marks = NO_MARKS, calls: CallReader | None = None) -> None:
        """calls: reads those of the model's format; None: there are no tools."""
        self._reply, self._calls = ReplyReader(marks), calls
        self.text = ""

    @property
    def thoughts(self) -> str:
        return self._reply.thoughts

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls.calls) if self._calls is not None else ()

    @property
    def holds(self) -> bool:
        """Whether `flush` may give something."""
        return self._reply.holds or (self._calls is not None and self._calls.holds)

    def feed(self, text: str) -> Piece:
        return self._piece(*self._reply.feed(text))

    def flush(self) -> Piece:
        """What was held back since a mark could have begun in it."""
        piece = self._piece(*self._reply.flush())
        if self._calls is None:
            return piece
        text, calls = self._calls.flush()
        self.text += text
        return Piece(piece.thoughts, piece.text + text, (*piece.calls, *calls))

    def result(self, result: Result) -> Result:
        """The whole, as far as it has been told."""
        return replace(result, text=self.text, reasoning=self.thoughts, tool_calls=self.calls)

    def _piece(self, thoughts: str, answer: str) -> Piece:
        text, calls = self._calls.feed(answer) if self._calls is not None and answer else (answer, [])
        self.text += text
        return Piece(thoughts, text, tuple(calls))
