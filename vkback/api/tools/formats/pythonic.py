"""Calls as Python. LFM2: <|tool_call_start|>[f(a=1)]<|tool_call_end|>. Llama 4, and others after it: the reply is [f(a=1), g()]. Olmo 3:
<function_calls>f(a=1)</function_calls>, a call a line. Gemma 3 by its documents: fenced as tool_code."""

from typing import ClassVar

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Tools
from vkback.api.tools.python_calls import calls_from


class Pythonic(Format):
    """Between a mark and an end mark."""

    end: ClassVar[str]

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(*self.opens)
        text, _ = cursor.until(self.end)
        found = calls_from(text, tools)
        if not found:
            raise Malformed
        return found


class Lfm2(Pythonic):
    name = "lfm2"
    signs = ("<|tool_call_start|>",)
    opens = ("<|tool_call_start|>",)
    end = "<|tool_call_end|>"


class Olmo3(Pythonic):
    name = "olmo3"
    signs = ("<function_calls>",)
    opens = ("<function_calls>",)
    end = "</function_calls>"


class Gemma3(Pythonic):
    name = "gemma3"
    signs = ("```tool_code",)
    opens = ("```tool_code",)
    end = "```"


class Llama4(Format):
    name = "llama4"
    signs = ("<|header_start|>",)
    opens = ("<|python_start|>",)
    at_start = ("[",)

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        """The list ends with a bracket that makes it whole."""
        marked = cursor.maybe(*self.opens)
        cursor.skip()
        begun = cursor.at
        while True:
            cursor.until("]")
            try:
                found = calls_from(cursor.text[begun : cursor.at], tools)
            except Malformed:
                continue
            break
        if marked:
            cursor.close("<|python_end|>")
        if not found:
            raise Malformed
        return found
