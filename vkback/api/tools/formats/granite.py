"""Granite 3 and Phi-4 mini: <|tool_call|> and a list of {"name": NAME, "arguments": {...}}."""

from vkback.api.tools.format import Spelling
from vkback.api.tools.json_calls import MarkedJson


class Granite(MarkedJson):
    name = "granite"
    signs = ("<|tool_call|>",)
    opens = ("<|tool_call|>",)
    end = ("<|/tool_call|>",)
    spelling = Spelling("<|tool_call|>[", '{"name": "{name}", "arguments": ', "}", "]", ", ")
