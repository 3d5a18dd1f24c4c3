"""FireFunction 2: functools[{"name": NAME, "arguments": {...}}]."""

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor
from vkback.api.tools.format import Format, Spelling, Tools
from vkback.api.tools.json_calls import calls_in


class FireFunction(Format):
    name = "firefunction"
    signs = ("functools[",)
    opens = ("functools[",)
    spelling = Spelling("functools[", '{"name": "{name}", "arguments": ', "}", "]", ", ")

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take("functools")
        return calls_in(cursor.json("["))
