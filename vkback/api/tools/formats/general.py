"""For models whose template knows no tools: the system message says what there is and how to call it, as Hermes does. A reply that is
nothing but the JSON of a call, fenced or not, is one, too."""

import json
from collections.abc import Sequence

from vkback.api.tools.call import Tool, ToolCall
from vkback.api.tools.cursor import Cursor
from vkback.api.tools.format import Spelling, Tools
from vkback.api.tools.json_calls import MarkedJson, calls_in

FENCES = ("```json", "```")


class General(MarkedJson):
    name = "general"
    opens = ("<tool_call>",)
    at_start = ("{", "[", *FENCES)
    end = ("</tool_call>",)
    spelling = Spelling("", '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "", "\n")

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        if cursor.maybe(*self.opens):
            found = calls_in(cursor.json("{["))
            cursor.close(*self.end)
            return found
        fenced = cursor.maybe(*FENCES)
        found = calls_in(cursor.json("{["), tools)
        if fenced:
            cursor.close("```")
        return found


def instructions(tools: Sequence[Tool]) -> str:
    """What the system message says of tools."""
    listed = "\n".join(json.dumps(tool.plain(), ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer the user. These are there, each with the JSON schema of its arguments:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments between <tool_call> and </tool_call>, and nothing behind it:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>\n'
        "Its result comes between <tool_response> and </tool_response>."
    )


def written_call(name: str, arguments: str) -> str:
    """A call in the text of a message."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def written_result(text: str) -> str:
    """A result in the text of a message."""
    return f"<tool_response>\n{text}\n</tool_response>"
