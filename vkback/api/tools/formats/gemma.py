"""Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>. FunctionGemma the same with <start_function_call>,
<end_function_call> and <escape> around texts."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Tools, call_of

KEY = re.compile(r'\s*"?([^:,{}\[\]"]+)"?\s*')
SCALAR = re.compile(r"[^,}\]]*[,}\]]")


class Gemma4(Format):
    name = "gemma4"
    signs = ("<|tool_call>",)
    opens = ("<|tool_call>",)
    end: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(*self.opens)
        cursor.skip()
        cursor.take("call:")
        name = cursor.name("{")
        call = call_of(name, self._object(cursor))
        cursor.close(self.end)
        return [call]

    def _object(self, cursor: Cursor) -> dict[str, Any]:
        """Behind its bracket."""
        found: dict[str, Any] = {}
        cursor.skip()
        while not cursor.maybe("}"):
            if found:
                cursor.take(",")
            key, _ = cursor.until(":")
            key = key.strip().removeprefix(self.quote).removesuffix(self.quote)
            if not (named := KEY.fullmatch(key)):
                raise Malformed
            found[named[1].strip()] = self._value(cursor)
            cursor.skip()
        return found

    def _list(self, cursor: Cursor) -> list[Any]:
        found: list[Any] = []
        cursor.skip()
        while not cursor.maybe("]"):
            if found:
                cursor.take(",")
            found.append(self._value(cursor))
            cursor.skip()
        return found

    def _value(self, cursor: Cursor) -> Any:
        cursor.skip()
        mark = cursor.maybe(self.quote, "{", "[", '"')
        if mark == self.quote:
            return cursor.until(self.quote)[0]
        if mark == "{":
            return self._object(cursor)
        if mark == "[":
            return self._list(cursor)
        if mark:
            cursor.at -= 1
            return cursor.json('"')
        if not (found := SCALAR.match(cursor.text, cursor.at)):
            raise cursor.more()
        cursor.at = found.end() - 1
        text = found[0][:-1].strip()
        try:
            return json.loads(text)
        except ValueError:
            return text


class FunctionGemma(Gemma4):
    name = "functiongemma"
    signs = ("<start_function_call>",)
    opens = ("<start_function_call>",)
    end = "<end_function_call>"
    quote = "<escape>"
