"""Calls written as Python: f(a=1, b="x"), their arguments plain values. Nothing is run."""

from __future__ import annotations

import ast
from typing import Any

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Malformed
from vkback.api.tools.format import Tools, call_of


def call_from(text: str, tools: Tools) -> ToolCall:
    """One call. Raises Malformed."""
    found = calls_from(text, tools)
    if len(found) != 1:
        raise Malformed
    return found[0]


def calls_from(text: str, tools: Tools) -> list[ToolCall]:
    """A call, a list of calls, or a call a line, of these tools. Arguments by place have the names of the schema, in its order."""
    try:
        body = ast.parse(text.strip()).body
        found: list[ast.expr] = []
        for line in body:
            if not isinstance(line, ast.Expr):
                raise Malformed
            found += line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]
        return [_call(each, tools) for each in found]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise Malformed from e


def _call(node: ast.expr, tools: Tools) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise Malformed
    name = ast.unparse(node.func)
    if name not in tools:
        raise Malformed
    keys = list((tools[name].parameters.get("properties") or {}).keys())
    if len(node.args) > len(keys):
        raise Malformed
    values: dict[str, Any] = dict(zip(keys, map(_value, node.args), strict=False))
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Malformed
        values[keyword.arg] = _value(keyword.value)
    return call_of(name, values)


CONSTANTS = {"true": True, "false": False, "null": None}
"""Of JSON, which models mix in."""


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise Malformed
    return value
