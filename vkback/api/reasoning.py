"""What a model thinks before it answers, told apart from the answer, by the marks that its chat template has.

Most models put thoughts between two marks in front of the answer; some templates write the first mark themselves. gpt-oss writes a reply as
messages of channels: `analysis` is thought, all others are the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkback.api.result import Chunk, Result

PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Marks of the families: Qwen, DeepSeek, GLM and most others; Mistral; Cohere; Seed; Apertus; Gemma 4; Kimi-VL."""

CHANNEL, MESSAGE, REPLY = "<|channel|>", "<|message|>", "<|start|>assistant"
MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")
THOUGHTS = "analysis"
"""The channel."""

TO_TOOL = " to="
"""In the head of a message to a tool."""


@dataclass(frozen=True)
class Marks:
    """How a reply is to be read.

    pairs     marks around thoughts that may come first in it
    inside    the end mark of the thoughts that the prompt has begun; "" where it has not
    channels  the reply has channels as gpt-oss writes them; `header` is what the prompt has of the first one's
    calls     its messages to tools are passed on with their marks, for who reads those
    """

    pairs: tuple[tuple[str, str], ...] = PAIRS[:1]
    inside: str = ""
    channels: bool = False
    header: str = ""
    calls: bool = False

    @property
    def none(self) -> bool:
        return not self.pairs and not self.channels


NO_MARKS = Marks(())
"""The whole reply is answer."""


def marks_of(template: str, prompt: str, prefill: str = "") -> Marks:
    """Of a template and the prompt that it made. prefill: what of the reply stands in the prompt already."""
    if CHANNEL in template and MESSAGE in template:
        head, found, _ = prompt.rpartition(REPLY)[2].partition(MESSAGE)
        return Marks((), channels=True, header=head + found)
    pairs = tuple(pair for i, pair in enumerate(PAIRS) if i == 0 or any(mark in template for mark in pair))
    for begin, end in pairs:
        if prompt.rstrip().endswith(begin) or prefill.rfind(begin) > prefill.rfind(end):
            return Marks(pairs, inside=end)
    return Marks(() if prefill.strip() else pairs)


class ReplyReader:
    """Tells the text of one reply apart as it comes: `feed` and `flush` give (thoughts, answer). White space around thoughts is dropped."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._held = marks.header
        self._end = marks.inside
        self._read = self._start
        if marks.channels:
            self._read = self._header
        elif marks.inside:
            self._read = self._thoughts
        self._gap = ""  # white space that is told once something follows
        self.thoughts, self.answer = "", ""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        return self._run(last=False)

    def flush(self) -> tuple[str, str]:
        """What was held back since a mark could have begun in it."""
        return self._run(last=True)

    @property
    def holds(self) -> bool:
        """Whether `flush` may give something."""
        return bool(self._held)

    def chunk(self, chunk: Chunk) -> Chunk:
        """A piece of a stream, told apart."""
        thoughts, answer = self.feed(chunk.text)
        return replace(chunk, text=answer, reasoning=thoughts)

    def result(self, result: Result) -> Result:
        """The whole, as far as it has been told."""
        return replace(result, text=self.answer, reasoning=self.thoughts)

    def _run(self, *, last: bool) -> tuple[str, str]:
        before = len(self.thoughts), len(self.answer)
        while self._read(last):
            pass
        return self.thoughts[before[0] :], self.answer[before[1] :]

    # Each state reads what is held, and says whether another has now the rest.

    def _start(self, last: bool) -> bool:
        text = self._held.lstrip()
        for begin, end in self._marks.pairs:
            if text.startswith(begin):
                self._held, self._end, self._read = text[len(begin) :], end, self._thoughts
                return True
            if begin.startswith(text) and not last:
                return False
        self._read = self._answer
        return True

    def _thoughts(self, last: bool) -> bool:
        text, ended = self._before((self._end,), last)
        self._think(text)
        if ended:
            self._gap, self._read = "", self._gap_before_answer
        return ended

    def _gap_before_answer(self, last: bool) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._answer
        return bool(self._held)

    def _answer(self, last: bool) -> bool:
        self.answer += self._held
        self._held = ""
        return False

    def _header(self, last: bool) -> bool:
        """Of a message: <|start|>assistant<|channel|>NAME<|message|>, the first without its beginning."""
        head, found, rest = self._held.partition(MESSAGE)
        if found:
            if self._marks.calls and TO_TOOL in head:
                self.answer += f"{REPLY}{head.rpartition(REPLY)[2]}{MESSAGE}"
                self._held, self._read = rest, self._call
                return True
            channel = head.rpartition(CHANNEL)[2].split()[:1]
            self._held, self._read = rest, self._channel_thoughts if channel == [THOUGHTS] else self._channel_answer
            told = self.thoughts if channel == [THOUGHTS] else self.answer
            self._gap = "\n\n" if told else ""
        elif head.strip() and not (head.lstrip().startswith("<|") or "<|".startswith(head.lstrip())):
            self._read = self._channel_answer  # a model that does without
        else:
            if last:
                self._held = ""
            return False
        return True

    def _channel_thoughts(self, last: bool) -> bool:
        text, ended = self._before(MESSAGE_ENDS, last)
        self._think(text)
        if ended:
            self._read = self._header
        return ended

    def _channel_answer(self, last: bool) -> bool:
        text, ended = self._before(MESSAGE_ENDS, last)
        if text:
            self.answer += self._gap + text
            self._gap = ""
        if ended:
            self._read = self._header
        return ended

    def _call(self, last: bool) -> bool:
        found = min(((at, mark) for mark in MESSAGE_ENDS if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            text, _ = self._before(MESSAGE_ENDS, last)
            self.answer += text
            return False
        end = found[0] + len(found[1])
        self.answer += self._held[:end]
        self._held, self._read = self._held[end:], self._header
        return True

    def _before(self, marks: tuple[str, ...], last: bool) -> tuple[str, bool]:
        """Take what stands before the first of these marks, and the mark. Without one, all but what may be the beginning of one."""
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            return text, True
        cut = len(self._held) - (0 if last else max(_overlap(self._held, mark) for mark in marks))
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _think(self, text: str) -> None:
        body = text.strip() if not self.thoughts else text.rstrip()
        if body:
            self.thoughts += self._gap + body
            self._gap = ""
        if self.thoughts:
            self._gap += text[len(text.rstrip()) :] if body else text


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
