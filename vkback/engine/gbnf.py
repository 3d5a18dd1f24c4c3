"""llama.cpp's grammars, GBNF, in the language of llguidance.

GBNF knows characters alone. llguidance reads a text by lexemes, the longest that fits, so that what follows one could be swallowed by it:
here each lexeme is one character, and all else are rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vkback.errors import VkbackError


class GbnfError(VkbackError):
    """A grammar that is not written as GBNF is."""


NAME = re.compile(r"[A-Za-z0-9_-]+")
SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
REPEATED = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
TOKEN = re.compile(r"<\[\d+\]>|<[^<>\s\[\]]+>")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}

MAX_REPEATED = 2000
"""Times that a part may be repeated by a number."""


def to_lark(grammar: str) -> str:
    """The same grammar for `llguidance.LLMatcher.grammar_from_lark`. Raises GbnfError naming the line."""
    return _Reader(grammar).lark()


class _Reader:
    """Reads a grammar from its beginning to its end; `at` is how far it is."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.rules: dict[str, str] = {}
        self.used: dict[str, int] = {}  # with where it was first used

    def lark(self) -> str:
        self._skip(SPACE_AND_LINES)
        while self.at < len(self.text):
            self._rule()
            self._skip(SPACE_AND_LINES)
        if "root" not in self.rules:
            raise GbnfError("[grammar] there is no rule called root; expected one, as root ::= ...; with it a text begins")
        for name, at in self.used.items():
            if name not in self.rules:
                self.at = at
                raise self._wrong(f"there is no rule called {name}", "a rule of that name")
        numbers = {name: f"r{i}" for i, name in enumerate(self.rules)} | {"root": "start"}
        named: Callable[[re.Match[str]], str] = lambda m: numbers[m[1]]  # noqa: E731
        lines = [f"{numbers[name]}: " + re.sub("\0([^\0]+)\0", named, body) for name, body in self.rules.items()]
        return "\n".join(["%llguidance {}", *lines, ""])

    def _wrong(self, what: str, expected: str) -> GbnfError:
        line = self.text.count("\n", 0, self.at) + 1
        rest = self.text[self.at :].partition("\n")[0][:30]
        return GbnfError(f"[grammar] line {line}, at {rest!r}: {what}; expected {expected}")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _takes(self, word: str) -> bool:
        there = self.text.startswith(word, self.at)
        self.at += len(word) if there else 0
        return there

    def _rule(self) -> None:
        begun = self.at
        name = self._take(NAME)
        self._skip(SPACE)
        if name is None or not self._takes("::="):
            raise self._wrong("no rule begins here", "a name, ::= and what it stands for")
        if name[0] in self.rules:
            self.at = begun
            raise self._wrong(f"the rule {name[0]} is there already", "each name once")
        self._skip(SPACE_AND_LINES)
        self.rules[name[0]] = self._alternatives(nested=False)
        if self.at < len(self.text) and self.text[self.at] not in "\r\n":
            raise self._wrong("the rule does not end here", "the end of the line, |, or more of the rule")

    def _alternatives(self, *, nested: bool) -> str:
        found = [self._sequence(nested=nested)]
        while self._takes("|"):
            self._skip(SPACE_AND_LINES)
            found.append(self._sequence(nested=nested))
        return " | ".join(found)

    def _sequence(self, *, nested: bool) -> str:
        parts: list[str] = []
        space = SPACE_AND_LINES if nested else SPACE
        while (part := self._part()) is not None:
            self._skip(space)
            parts.append(part + self._repeated(space))
            if not nested and self._goes_on():
                self._skip(SPACE_AND_LINES)
        return " ".join(parts) or '""'

    def _goes_on(self) -> bool:
        """Whether the rule goes on in the next line, with another alternative."""
        ahead = SPACE_AND_LINES.match(self.text, self.at)
        return ahead is not None and self.text.startswith("|", ahead.end())

    def _part(self) -> str | None:
        begun = self.at
        if self._takes('"'):
            return self._literal()
        if self._takes("["):
            return self._characters()
        if self._takes("("):
            self._skip(SPACE_AND_LINES)
            inner = self._alternatives(nested=True)
            if not self._takes(")"):
                raise self._wrong("a group is open", ")")
            return f"({inner})"
        if self._takes("."):
            return r"/(?s:.)/"
        if (token := self._take(TOKEN)) is not None:
            return token[0]
        if (name := self._take(NAME)) is not None:
            ahead = SPACE.match(self.text, self.at)
            if ahead is not None and self.text.startswith("::=", ahead.end()):
                self.at = begun  # the next rule
                return None
            self.used.setdefault(name[0], begun)
            return f"\0{name[0]}\0"
        return None

    def _repeated(self, space: re.Pattern[str]) -> str:
        times = ""
        for sign in "*+?":
            if self._takes(sign):
                times = sign
        if not times and self.text.startswith("{", self.at):
            found = self._take(REPEATED)
            least, most = (int(found[1]), int(found[3] or found[1])) if found else (0, 0)
            if found is None or most > MAX_REPEATED or (found[3] and most < least):
                raise self._wrong("no number of times", f"{{n}}, {{n,}} or {{n,m}}, at most {MAX_REPEATED}")
            times = f"{{{least},{'' if found[2] and not found[3] else most}}}"
        self._skip(space)
        return times

    def _character(self, what: str) -> str:
        if self.at >= len(self.text) or self.text[self.at] == "\n":
            raise self._wrong(f"{what} is open", "its end")
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return char
        kind = self.text[self.at : self.at + 1]
        self.at += 1
        if kind in ESCAPES:
            return ESCAPES[kind]
        digits = self.text[self.at : self.at + HEX_DIGITS.get(kind, 0)]
        if kind in HEX_DIGITS and re.fullmatch(f"[0-9A-Fa-f]{{{HEX_DIGITS[kind]}}}", digits) and int(digits, 16) <= 0x10FFFF:
            self.at += len(digits)
            return chr(int(digits, 16))
        self.at -= 2
        raise self._wrong("no escape", r"\n, \r, \t, \\, \", \[, \], \xHH, \uHHHH or \UHHHHHHHH")

    def _literal(self) -> str:
        chars = []
        while not self._takes('"'):
            chars.append(self._character("a text"))
        return "(" + " ".join(f"/{_spelled(char)}/" for char in chars) + ")" if chars else '""'

    def _characters(self) -> str:
        excluded = "^" if self._takes("^") else ""
        ranges = []
        while not self._takes("]"):
            first = last = self._character("a class of characters")
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self._character("a class of characters")
                if last < first:
                    raise self._wrong(f"the range {first!r} to {last!r} is empty", "the lower character first")
            ranges.append(_spelled(first) if first == last else f"{_spelled(first)}-{_spelled(last)}")
        if not ranges:
            if excluded:
                return r"/(?s:.)/"
            raise self._wrong("a class of no characters", "characters between [ and ]")
        return f"/[{excluded}{''.join(ranges)}]/"


def _spelled(char: str) -> str:
    """A character in a regular expression."""
    return char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}"
