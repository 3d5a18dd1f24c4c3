"""Apertus: <|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>."""

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Spelling, Tools, call_of


class Apertus(Format):
    name = "apertus"
    signs = ("<|tools_prefix|>",)
    opens = ("<|tools_prefix|>",)
    spelling = Spelling("<|tools_prefix|>[", '{"{name}": ', "}", "]<|tools_suffix|>", ", ")

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(*self.opens)
        found = [call_of(*item) for each in cursor.json("[") if isinstance(each, dict) for item in each.items()]
        if not found:
            raise Malformed
        cursor.close("<|tools_suffix|>")
        return found
