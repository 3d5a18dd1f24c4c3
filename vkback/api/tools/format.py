"""How a family of models writes calls: its marks, how they are read, and what a grammar forces."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vkback.api.tools.call import Tool, ToolCall, new_id, written
from vkback.api.tools.cursor import Cursor, Malformed

Tools = Mapping[str, Tool]
"""By name."""


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one: begin, value, end. "{key}" in begin is the parameter's name, "{is_text}" true or false. A
    value that may be a text is written as it is, all others as JSON."""

    begin: str
    end: str


@dataclass(frozen=True)
class Spelling:
    """How a grammar writes calls: begin, call, separator, call, ..., end. A call is call_begin, arguments, call_end, where "{name}" is the
    tool's name. arguments: one by one; None: as JSON."""

    begin: str
    call_begin: str
    call_end: str
    end: str
    separator: str = ""
    arguments: Parameters | None = None


class Format(ABC):
    """Of a family.

    signs     texts of which one is in the family's templates, and in no other's
    opens     marks that begin a section of calls in a reply
    at_start  marks that do so only where a reply begins
    begun     what the end of a prompt has of a reply already
    between   characters that may stand between two calls, beside white space
    spelling  None: calls cannot be forced
    trigger   the part of a spelled call by which its grammar begins to hold where a reply may be text, too; "": its opening mark
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]] = ()
    opens: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    between: str = ""
    spelling: Spelling | None = None
    trigger: str = ""

    @abstractmethod
    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        """The calls of a section, which begins with one of the marks here. Raises Malformed and Unfinished."""

    def is_of(self, template: str) -> bool:
        """Whether a template is of this family."""
        return any(sign in template for sign in self.signs)


def call_of(name: Any, arguments: Any, tools: Tools | None = None, id: Any = None) -> ToolCall:
    """A call, checked. tools: those that it must be one of. Raises Malformed."""
    if not isinstance(name, str) or not name or (tools is not None and name not in tools):
        raise Malformed
    if isinstance(arguments, str):
        arguments = Cursor(arguments, last=True).json() if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed
    return ToolCall(name, written(arguments), id if isinstance(id, str) and id else new_id())


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """What a parameter's text stands for: itself where its schema has a text, else JSON, or itself where it is none."""
    if takes_text(schema, root):
        return text
    try:
        return Cursor(text.strip(), last=True).json('"[{') if text.strip()[:1] in ('"', "[", "{") else _scalar(text.strip())
    except Malformed:
        return text


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def takes_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value may be a text. A parameter that no schema knows may be anything: JSON where it is that."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(name := schema.get("$ref"), str):
        return takes_text(root.get("$defs", {}).get(name.rpartition("/")[2]), root)
    kinds = schema.get("type", [])
    if "string" in ([kinds] if isinstance(kinds, str) else kinds):
        return True
    if not kinds and isinstance(values := schema.get("enum", [schema.get("const")]), Sequence) and any(isinstance(v, str) for v in values):
        return True
    return any(takes_text(each, root) for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ()))
