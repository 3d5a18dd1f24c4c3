"""Nemotron 2: <TOOLCALL>[{"name": NAME, "arguments": {...}}]</TOOLCALL>."""

from vkback.api.tools.format import Spelling
from vkback.api.tools.json_calls import MarkedJson


class Nemotron(MarkedJson):
    name = "nemotron"
    signs = ("<TOOLCALL>",)
    opens = ("<TOOLCALL>",)
    end = ("</TOOLCALL>",)
    spelling = Spelling("<TOOLCALL>[", '{"name": "{name}", "arguments": ', "}", "]</TOOLCALL>", ", ")
