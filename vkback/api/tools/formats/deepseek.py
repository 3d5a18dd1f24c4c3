"""DeepSeek. V3 and R1, between marks: `function`, a mark, NAME, and fenced JSON; V3.1: NAME, a mark, JSON. V3.2, in its DSML: parameters
one by one, of which each says whether it is a text. Kimi K2 writes as V3.1 with marks of its own, and its names are ids:
functions.NAME:0."""

import re
from typing import Any

from vkback.api.tools.call import Tool, ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Parameters, Spelling, Tools, call_of
from vkback.api.tools.tagged import Tagged, Tags, argument_of


def mark(words: str) -> str:
    """A mark of DeepSeek."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


CALLS, CALLS_END, CALL, CALL_END, SEP = (
    mark(words) for words in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
FUNCTION, FENCE = "function", "```json"


class DeepSeek(Format):
    """V3.1."""

    name = "deepseek-v3.1"
    signs = (CALLS,)
    opens = (CALLS, CALL)
    spelling = Spelling(CALLS, f"{CALL}{{name}}{SEP}", CALL_END, CALLS_END)

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        if not cursor.maybe(CALLS):
            return [self._call(cursor)]
        found: list[ToolCall] = []
        while True:
            before = cursor.at
            cursor.skip()
            end = cursor.maybe(CALLS_END, CALL) if found else cursor.take(CALL)
            if end != CALL:
                cursor.at = cursor.at if end else before
                return found
            cursor.at -= len(CALL)
            found.append(self._call(cursor))

    def _call(self, cursor: Cursor) -> ToolCall:
        cursor.take(CALL)
        name = cursor.name(SEP)
        if name == FUNCTION:
            name = cursor.name("\n")
            cursor.skip()
            cursor.take(FENCE)
        call = call_of(name, cursor.json())
        cursor.skip()
        cursor.maybe("```")
        cursor.close(CALL_END)
        return call


class DeepSeekV3(DeepSeek):
    """V3 and R1."""

    name = "deepseek-v3"
    spelling = Spelling(CALLS, f"{CALL}{FUNCTION}{SEP}{{name}}\n{FENCE}\n", f"\n```{CALL_END}", CALLS_END, "\n")

    def is_of(self, template: str) -> bool:
        return CALLS in template and FENCE in template


DSML = "\uff5cDSML\uff5c"
PARAMETER = re.compile(r'([^"]*)"(?:\s+string="(true|false)")?\s*')


class DeepSeekDsml(Tagged):
    """V3.2."""

    name = "deepseek-v3.2"
    signs = (DSML,)
    tags = Tags(
        f"<{DSML}function_calls>",
        (f'<{DSML}invoke name="', '">'),
        (f'<{DSML}parameter name="', ">"),
        f"</{DSML}parameter>",
        f"</{DSML}invoke>",
        f"</{DSML}function_calls>",
    )
    opens = (f"<{DSML}function_calls>",)
    spelling = Spelling(
        f"<{DSML}function_calls>\n",
        f'<{DSML}invoke name="{{name}}">\n',
        f"</{DSML}invoke>\n",
        f"</{DSML}function_calls>",
        "",
        Parameters(f'<{DSML}parameter name="{{key}}" string="{{is_text}}">', f"</{DSML}parameter>\n"),
    )

    def argument(self, key: str, text: str, tool: Tool | None) -> dict[str, Any]:
        found = PARAMETER.fullmatch(key)
        if found is None:
            raise Malformed
        return {found[1]: text if found[2] == "true" else argument_of(found[1], text, tool)}


class KimiK2(Format):
    name = "kimi-k2"
    signs = ("<|tool_calls_section_begin|>",)
    opens = ("<|tool_calls_section_begin|>",)
    spelling = Spelling(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(*self.opens)
        found: list[ToolCall] = []
        while True:
            before = cursor.at
            cursor.skip()
            ends = ("<|tool_calls_section_end|>", "<|tool_call_begin|>")
            end = cursor.maybe(*ends) if found else cursor.take(ends[1])
            if end != ends[1]:
                cursor.at = cursor.at if end else before
                return found
            id = cursor.until("<|tool_call_argument_begin|>")[0].strip()
            name = re.fullmatch(r"(?:functions\.)?([\w.\-]+?)(?::\d+)?", id, re.ASCII)
            if name is None:
                raise Malformed
            found.append(call_of(name[1], cursor.json(), id=id))
            cursor.close("<|tool_call_end|>")
