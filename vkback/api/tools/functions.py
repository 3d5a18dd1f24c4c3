"""Python functions as tools: their schema from type hints and docstring, through pydantic, and their call."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from vkback.api.errors import ModelError
from vkback.api.tools.call import Tool, ToolCall

SECTIONS = re.compile(r"^\s*(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?)\s*:?\s*$", re.IGNORECASE)
PARAMETER = re.compile(r"^\s*(?::param\s+(?:[\w\[\], ]+\s+)?)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*(?::|  )\s*(\S.*)$")


def tool_of(function: Any) -> Tool:
    """A function, or a class of pydantic, as a tool. Raises ModelError for one whose arguments cannot be told."""
    description, told = _docstring(inspect.getdoc(function) or "")
    if isinstance(function, type):
        if not hasattr(function, "model_json_schema"):
            raise ModelError(f"[tools] {function!r} is a class, expected a function, a class of pydantic, or a dict as OpenAI's tools are")
        return Tool(function.__name__, description, _trimmed(function.model_json_schema()))
    schema = _trimmed(_arguments(function).model_json_schema())
    for name, own in (schema.get("properties") or {}).items():
        if name in told and "description" not in own:
            own["description"] = told[name]
    return Tool(function.__name__, description, schema)


def run(functions: Mapping[str, Callable[..., Any]], call: ToolCall) -> str:
    """The result of a call, as a text: JSON, unless it is one. What is wrong with a call is a result, too, which the model reads; what the
    function itself raises is raised."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    function = functions.get(call.name)
    if function is None:
        return f"error: there is no function {call.name!r}; there are {', '.join(functions)}"
    try:
        given = _arguments(function).model_validate_json(call.arguments)
    except ValidationError as e:
        said = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors(include_url=False))
        return f"error: the arguments do not fit: {said}"
    found = function(**{name: getattr(given, name) for name in type(given).model_fields})
    return found if isinstance(found, str) else to_json(found, fallback=str).decode()


def _arguments(function: Any) -> Any:
    """A class of pydantic whose fields are the function's parameters."""
    try:
        from pydantic import ConfigDict, Field, create_model
    except ImportError as e:
        raise ModelError("[tools] Python functions as tools need pydantic, which is not installed: pip install 'vkback[serve]'") from e
    name = getattr(function, "__name__", repr(function))
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as e:
        raise ModelError(f"[tools] {name}: its parameters cannot be read: {e}") from e
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ModelError(f"[tools] {name}: parameter {parameter} cannot be a tool's; give each one by its name")
        hint = hints.get(parameter.name, Any)
        if isinstance(note := getattr(hint, "__metadata__", (None,))[0], str):
            hint = hint.__origin__
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hint, Field(default, description=note))
        else:
            fields[parameter.name] = (hint, ... if parameter.default is parameter.empty else parameter.default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
    except Exception as e:  # whatever pydantic says of a type
        raise ModelError(f"[tools] {name}: no schema can be made of its type hints: {' '.join(str(e).split())[:200]}") from e


def _trimmed(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the titles that pydantic makes of names."""

    def without(value: Any, *, names: bool = False) -> Any:
        if isinstance(value, dict):
            return {k: without(v, names=k in ("properties", "$defs") and not names) for k, v in value.items() if names or k != "title"}
        return [without(each) for each in value] if isinstance(value, list) else value

    found: dict[str, Any] = without(schema)
    found.pop("description", None)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says in front of its sections, and of parameters."""
    lines = text.splitlines()
    told: dict[str, str] = {}
    end = len(lines)
    for i, line in enumerate(lines):
        if SECTIONS.match(line) or line.lstrip().startswith(":"):
            end = min(end, i)
        found = PARAMETER.match(line) if i >= end or line.startswith((" ", ":")) else None
        if found:
            told[found[1]] = found[2].strip()
    return " ".join(" ".join(lines[:end]).split()), told
