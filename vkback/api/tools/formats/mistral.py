"""Mistral. [TOOL_CALLS] and a list [{"name": NAME, "arguments": {...}, "id": ID}], or, of newer models, for each call
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}, where the last two marks may be missing."""

import re

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Spelling, Tools, call_of
from vkback.api.tools.json_calls import calls_in

OPEN = "[TOOL_CALLS]"
HEAD = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*(?:\[CALL_ID\]\s*(\w+))?\s*(?:\[ARGS\])?\s*", re.ASCII)


class Mistral(Format):
    name = "mistral"
    signs = (OPEN,)
    opens = (OPEN,)
    spelling = Spelling(f"{OPEN}[", '{"name": "{name}", "arguments": ', "}", "]", ", ")

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(OPEN)
        cursor.skip()
        if cursor.maybe("["):
            cursor.at -= 1
            return calls_in(cursor.json("["))
        head, _ = cursor.until("{")
        if not (found := HEAD.fullmatch(head)):
            raise Malformed
        cursor.at -= 1
        return [call_of(found[1], cursor.json(), id=found[2])]


class MistralArgs(Mistral):
    """Newer ones."""

    name = "mistral-args"
    signs = ("[ARGS]",)
    spelling = Spelling("", f"{OPEN}{{name}}[ARGS]", "", "")
