"""Cohere. Command R7B, A: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": NAME, "parameters": {...}}]<|END_ACTION|>. Command R, R+: the
list stands behind "Action:", fenced, and `directly-answer` stands for no call."""

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Spelling, Tools
from vkback.api.tools.json_calls import MarkedJson, calls_in


class CommandR7B(MarkedJson):
    name = "command-r7b"
    signs = ("<|START_ACTION|>",)
    opens = ("<|START_ACTION|>",)
    end = ("<|END_ACTION|>",)
    spelling = Spelling(
        "<|START_ACTION|>[\n", '    {"tool_call_id": "0", "tool_name": "{name}", "parameters": ', "}", "\n]<|END_ACTION|>", ",\n"
    )


class CommandR(Format):
    name = "command-r"
    signs = ("Action: ```json", "'Action:'", '"Action:"', "Action:```json")
    opens = ("Action:",)
    spelling = Spelling("Action: ```json\n[\n", '    {\n        "tool_name": "{name}",\n        "parameters": ', "\n    }", "\n]```", ",\n")

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(*self.opens)
        cursor.skip()
        fenced = cursor.maybe("```json", "```")
        found = calls_in(cursor.json("{["))
        if any(call.name not in tools and call.name not in DIRECT for call in found):
            raise Malformed
        if fenced:
            cursor.close("```")
        return [call for call in found if call.name not in DIRECT]


DIRECT = ("directly-answer", "directly_answer")
