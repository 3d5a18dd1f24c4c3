"""Llama 3.1 to 3.3: the reply is {"name": NAME, "parameters": {...}}, alone or behind <|python_tag|>; of the tools that come with the
model, <|python_tag|>NAME.call(key="value")."""

import re

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Spelling, Tools
from vkback.api.tools.json_calls import call_in
from vkback.api.tools.python_calls import call_from

TAG = "<|python_tag|>"


class Llama3(Format):
    name = "llama3"
    opens = (TAG,)
    at_start = ("{",)
    between = ";,"
    spelling = Spelling("", '{"name": "{name}", "parameters": ', "}", "", "; ")

    def is_of(self, template: str) -> bool:
        return TAG in template or ("<|start_header_id|>" in template and "ipython" in template)

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        marked = cursor.maybe(TAG)
        cursor.skip()
        if marked and not cursor.maybe("{"):
            return [self._builtin(cursor, tools)]
        if marked:
            cursor.at -= 1
        return [call_in(cursor.json(), tools)]

    def _builtin(self, cursor: Cursor, tools: Tools) -> ToolCall:
        """NAME.call(...) up to the end of its line. Other code that stands behind the tag is text."""
        line, _ = cursor.until("\n") if "\n" in cursor.text[cursor.at :] else (self._rest(cursor), "")
        if not (found := re.fullmatch(r"\s*([\w-]+)\.call(\(.*\))\s*", line)):
            raise Malformed
        return call_from(found[1] + found[2], tools)

    def _rest(self, cursor: Cursor) -> str:
        if not cursor.last:
            raise cursor.more()
        text, cursor.at = cursor.text[cursor.at :], len(cursor.text)
        return text
