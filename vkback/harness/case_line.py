"""The line that names a case and reruns it: OP(key=value,...,seed=N)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vkback.errors import VkbackError

_LINE = re.compile(r"([A-Z0-9_]+)\((.*)\)")
_COMMA = re.compile(r",(?![^\[]*\])")
_BETWEEN_CASES = re.compile(r",(?![^(]*\))")


class CaseLineError(VkbackError):
    """A line that names no case, with what is wrong in it."""


def split_lines(text: str) -> list[str]:
    """Names of ops and whole cases, separated by commas outside of parentheses."""
    return [part.strip() for part in _BETWEEN_CASES.split(text) if part.strip()]


def parse_line(line: str) -> tuple[str, dict[str, Any]]:
    """Op and parameters of a line: whole numbers, floats, [lists] as tuples, and words. Raises CaseLineError."""
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise CaseLineError(f"{line}: not a case; a case is written OP(key=value,...), as a run prints it")
    params: dict[str, Any] = {}
    for part in _COMMA.split(match[2]) if match[2] else []:
        key, equals, value = part.partition("=")
        if not equals:
            raise CaseLineError(f"{line}: {part!r} is not key=value")
        params[key.strip()] = _value(value.strip())
    return match[1], params


def _value(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return tuple(_value(v) for v in text[1:-1].split(",")) if text != "[]" else ()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def unseeded(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters without the seed."""
    return {k: v for k, v in params.items() if k != "seed"}
