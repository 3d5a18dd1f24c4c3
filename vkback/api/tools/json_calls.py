"""Calls written as JSON objects, or a list of them."""

from __future__ import annotations

from typing import Any

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Tools, call_of

NAMES = ("name", "function", "tool_name")
ARGUMENTS = ("arguments", "parameters", "input")
IDS = ("id", "tool_call_id")


def call_in(value: Any, tools: Tools | None = None) -> ToolCall:
    """The call that an object is, by the keys that models use. tools: those that it must be one of. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed
    if isinstance(inner := value.get("function"), dict):
        return call_in({**inner, **{key: value[key] for key in IDS if key in value}}, tools)
    name, arguments, id = (next((value[key] for key in keys if key in value), None) for keys in (NAMES, ARGUMENTS, IDS))
    return call_of(name, arguments, tools, id if isinstance(id, str) and not id.isdigit() else None)


def calls_in(value: Any, tools: Tools | None = None) -> list[ToolCall]:
    """Those of an object, or of a list of them, which has one at least. Raises Malformed."""
    found = [call_in(each, tools) for each in (value if isinstance(value, list) else [value])]
    if not found:
        raise Malformed
    return found


class MarkedJson(Format):
    """A mark, JSON of one call or a list of them, and an end mark, which may be missing."""

    end: tuple[str, ...] = ()

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(*self.opens)
        found = calls_in(cursor.json("{["))
        if self.end:
            cursor.close(*self.end)
        return found
