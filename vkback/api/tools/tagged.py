"""Calls whose arguments stand one by one between tags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vkback.api.tools.call import Tool, ToolCall
from vkback.api.tools.cursor import Cursor
from vkback.api.tools.format import Format, Tools, call_of, value_of


@dataclass(frozen=True)
class Tags:
    """open, close: around calls; function: before a tool's name, and behind it; parameter: so of a parameter's name."""

    open: str
    function: tuple[str, str]
    parameter: tuple[str, str]
    parameter_end: str
    function_end: str
    close: str


class Tagged(Format):
    """open, function, NAME, parameter, KEY, VALUE, ..., function_end, ..., close. The last may be missing.

    lines  whether a value has a line end on both sides that is none of its own
    """

    tags: ClassVar[Tags]
    lines: ClassVar[bool] = False

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        tags = self.tags
        if not cursor.maybe(tags.open):
            cursor.take(tags.function[0])
            return [self._call(cursor, tools)]
        found: list[ToolCall] = []
        while True:
            before = cursor.at
            cursor.skip()
            mark = cursor.maybe(tags.close, tags.function[0]) if found else cursor.take(tags.function[0])
            if mark != tags.function[0]:
                cursor.at = cursor.at if mark else before
                return found
            found.append(self._call(cursor, tools))

    def _call(self, cursor: Cursor, tools: Tools) -> ToolCall:
        tags = self.tags
        name = cursor.name(tags.function[1])
        tool = tools.get(name)
        values: dict[str, Any] = {}
        while True:
            cursor.skip()
            if cursor.take(tags.parameter[0], tags.function_end) == tags.function_end:
                return call_of(name, values)
            key, _ = cursor.until(tags.parameter[1])
            value, _ = cursor.until(tags.parameter_end)
            values |= self.argument(key, value.removeprefix("\n").removesuffix("\n") if self.lines else value, tool)

    def argument(self, key: str, text: str, tool: Tool | None) -> dict[str, Any]:
        """Name and value of a parameter."""
        return {key: argument_of(key, text, tool)}


def argument_of(key: str, text: str, tool: Tool | None) -> Any:
    """What the text of a parameter stands for, by the schema of its tool."""
    schema = tool.parameters if tool is not None else {}
    return value_of(text, (schema.get("properties") or {}).get(key), schema)
