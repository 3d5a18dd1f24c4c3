"""Which tools a reply may or must call, from what callers give."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vkback.api.errors import ModelError
from vkback.api.message import MessageReader
from vkback.api.reasoning import Marks
from vkback.api.tools.call import Tool
from vkback.api.tools.format import Format
from vkback.api.tools.functions import tool_of
from vkback.api.tools.grammar import TriggeredConstraint, calls_grammar
from vkback.api.tools.known import GENERAL
from vkback.api.tools.reader import CallReader
from vkback.engine.constraint import Constraint, JsonGrammar

ToolLike = Callable[..., Any] | Mapping[str, Any]
"""A Python function, a class of pydantic, or a dict as OpenAI's clients write it."""

Choice = Literal["auto", "none", "required"]
CHOICES = ("auto", "none", "required")

TOOL_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class ToolUse:
    """tools: by name; choice: whether a reply may, must not or must call; allowed: the names that it may; parallel: several at once.

    format, begun  how the model writes calls, and what the prompt has of the first one; filled in with the prompt
    """

    tools: Mapping[str, Tool]
    choice: Choice = "auto"
    allowed: tuple[str, ...] = ()
    parallel: bool = True
    format: Format = GENERAL
    begun: str = ""

    def reader(self, marks: Marks) -> MessageReader:
        """Of a reply."""
        return MessageReader(marks, CallReader(self.format, self.tools, self.begun))

    def constraint(self, make: Callable[[], JsonGrammar], marks: Marks, schema: str | None) -> Constraint | None:
        """What a reply is held to; None where it is free: calls are then read as they come. schema: of its JSON where it calls nothing.
        Raises ConstraintError."""
        tools = [self.tools[name] for name in self.allowed]
        if self.choice == "required" or schema is not None:
            schema = None if self.choice == "required" else schema
            return (grammar := make()).of_lark(
                calls_grammar(self.format, tools, grammar, parallel=self.parallel, marks=marks, begun=self.begun, schema=schema)
            )
        if (self.parallel and not any(tool.strict for tool in tools)) or self.format.spelling is None:
            return None
        return TriggeredConstraint(self.format, tools, make(), once=not self.parallel, marks=marks)


def tool_use(tools: Iterable[ToolLike] | None, choice: Any = "auto", *, parallel: bool = True) -> ToolUse | None:
    """From what a caller gives; None where a reply calls nothing.

    choice  "auto", "none", "required", the name of a tool, which is then called once, or OpenAI's dicts for a tool or several
    Raises ModelError.
    """
    if tools is None:
        found = []
    elif isinstance(tools, Mapping | str) or not isinstance(tools, Iterable):
        raise ModelError(f"[tools] tools is {tools!r}, expected a list of functions, or of dicts as OpenAI's tools are")
    else:
        found = [_tool(each, i) for i, each in enumerate(tools)]
    by_name = {tool.name: tool for tool in found}
    if len(by_name) < len(found):
        twice = next(tool.name for i, tool in enumerate(found) if any(tool.name == other.name for other in found[:i]))
        raise ModelError(f"[tools] two tools are called {twice!r}; give each a name of its own")
    mode, names = _choice(choice, by_name)
    parallel = parallel and not (mode == "required" and len(names) == 1 and choice not in ("required", "any"))
    if not by_name and mode == "required":
        raise ModelError(f"[tools] tool_choice is {choice!r}, but there are no tools; give some, or leave it out")
    if not by_name or mode == "none":
        return None
    return ToolUse(by_name, mode, names, parallel)


def _choice(choice: Any, tools: Mapping[str, Tool]) -> tuple[Choice, tuple[str, ...]]:
    everything = tuple(tools)
    if choice is None:
        return "auto", everything
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        inner = choice.get("allowed_tools", choice) if kind == "allowed_tools" else choice.get("function", choice)
        if kind == "allowed_tools" and isinstance(inner, Mapping) and isinstance(listed := inner.get("tools"), list):
            names = [each.get("function", each).get("name") if isinstance(each, Mapping) else each for each in listed]
            return "required" if inner.get("mode") == "required" else "auto", tuple(_known(name, tools) for name in names)
        choice = inner.get("name") if isinstance(inner, Mapping) else inner
    if choice == "auto":
        return "auto", everything
    if choice == "none":
        return "none", everything
    if choice in ("required", "any"):
        return "required", everything
    return "required", (_known(choice, tools),)


def _known(name: Any, tools: Mapping[str, Tool]) -> str:
    if not isinstance(name, str) or name not in tools:
        raise ModelError(f"[tools] tool_choice: there is no tool {name!r}, expected {', '.join((*CHOICES, *tools))}")
    return name


def _tool(given: ToolLike, index: int) -> Tool:
    if not isinstance(given, Mapping):
        if not callable(given):
            raise ModelError(f"[tools] tool {index} is {given!r}, expected a function, or a dict as OpenAI's tools are")
        return tool_of(given)
    inner = given.get("function", given)
    kind = given.get("type", "function")
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if kind != "function" or not isinstance(inner, Mapping):
        raise ModelError(f"[tools] tool {index} is of type {kind!r}; models here call functions alone")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ModelError(
            f"[tools] tool {index} is called {name!r}, expected a name of letters, digits, _, - and . that begins with a letter"
        )
    schema = inner.get("parameters", inner.get("input_schema"))
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ModelError(f"[tools] tool {name}: its parameters are {schema!r}, expected a JSON schema of an object")
    if "properties" not in schema and not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {"properties": {}, "additionalProperties": True, **schema}  # any object, with the key that templates look for
    return Tool(name, str(inner.get("description") or ""), {"type": "object", **schema}, bool(inner.get("strict")))
