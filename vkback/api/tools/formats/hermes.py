"""Hermes 2 Pro, Qwen 2.5 and 3, and many others: <tool_call>{"name": NAME, "arguments": {...}}</tool_call>, once for each call."""

from vkback.api.tools.format import Spelling
from vkback.api.tools.json_calls import MarkedJson


class Hermes(MarkedJson):
    name = "hermes"
    signs = ("<tool_call>",)
    opens = ("<tool_call>",)
    end = ("</tool_call>",)
    spelling = Spelling("", '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "", "\n")
