"""The line that names a case and reruns it, OP(key=value,...,seed=N): its parser, and the call of the function that makes its case."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from vkback.errors import VkbackError

CaseT = TypeVar("CaseT")

_LINE = re.compile(r"([A-Za-z]\w*)\s*\(([^()]*)\)", re.ASCII)
_COMMA = re.compile(r",(?![^\[]*\])")
_BETWEEN_CASES = re.compile(r",(?![^(]*\))")
_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INT = re.compile(r"[+-]?[0-9]{1,15}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?|[+-]?inf")


NO_CASE = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError, MemoryError)
"""What Python raises of values that an op did not reckon with."""


class Bare:
    """The value of a key that a line has without one, as `split` of a GLU. A flag may be written so."""

    def __repr__(self) -> str:
        return "BARE"


BARE = Bare()


class CaseLineError(VkbackError):
    """A line that names no case, with what is wrong in it."""

    exit_code = 2


FORMER_NAMES = {"MAT_VEC": "LINEAR", "MAT_VEC_HEADS": "LINEAR_HEADS", "MAT_VEC_ROPE_SET_ROWS": "LINEAR_ROPE_SET_ROWS"}
"""Names of ops in lines that older builds printed."""


def split_lines(text: str) -> list[str]:
    """Names of ops and whole cases, separated by commas outside of parentheses."""
    return [part.strip() for part in _BETWEEN_CASES.split(text) if part.strip()]


def parse_line(line: str) -> tuple[str, dict[str, Any]]:
    """Op and parameters of a line: whole numbers, floats, [lists] as tuples, words, and BARE for a key without a value. Raises
    CaseLineError."""
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise CaseLineError(f"{line}: not a case; a case is written OP(key=value,...), as a run prints it")
    params: dict[str, Any] = {}
    for part in _COMMA.split(match[2]) if match[2].strip() else ():
        key, equals, value = (p.strip() for p in part.partition("="))
        if _KEY.fullmatch(key) is None or (equals and not value):
            raise CaseLineError(f"{line}: {part.strip()!r} is not key=value")
        if key in params:
            raise CaseLineError(f"{line}: {key} stands there twice")
        try:
            params[key] = _value(value) if equals else BARE
        except ValueError as e:
            raise CaseLineError(f"{line}: {key}={value}: {e}") from e
    op = match[1].upper()
    return FORMER_NAMES.get(op, op), params


def _value(text: str) -> Any:
    """Raises ValueError with what is wrong."""
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:]:
        inner = text[1:-1]
        return tuple(_value(v.strip()) for v in inner.split(",")) if inner.strip() else ()
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if not text or any(c in "[]=\"'" for c in text):
        raise ValueError("expected a number, a word, or a list as [1,2]")
    return text


def shown(value: Any) -> str:
    """A value as a line has it: floats with six places, where that says all of them."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(shown, value)) + "]"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        short = f"{value:.6f}"
        return short if float(short) == value else repr(value)
    return str(value)


def line_of(op: str, params: Mapping[str, Any]) -> str:
    """The line that `parse_line` reads."""
    return f"{op}({','.join(k if v is BARE else f'{k}={shown(v)}' for k, v in params.items())})"


def unseeded(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters without the seed."""
    return {k: v for k, v in params.items() if k != "seed"}


@cache
def _hints(function: Callable[..., object]) -> dict[str, Any]:
    return get_type_hints(function)


@cache
def _signature(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def call_with(
    build: Callable[..., CaseT],
    params: Mapping[str, Any],
    *,
    op: str,
    extra_keys: Collection[str],
    only: Collection[str] = (),
    example: Callable[[], str],
) -> CaseT:
    """build(**params), each parameter checked against its annotation: int, float, bool, str, a Literal or a tuple.

    extra_keys  names that `build` takes as **keywords
    only     names that a line may have, in their order; empty: all that `build` takes
    example  a whole line of the op, for messages

    Raises CaseLineError for a parameter that is unknown, missing or of another kind, and where `build` refuses the values.
    """
    signature = {n: p for n, p in _signature(build).items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    known = [*only] if only else [*signature, *extra_keys]
    hint = f"known are {', '.join(known)}; a whole case is {{}}"
    for name in params:
        if name not in known:
            raise CaseLineError(f"{op}: no parameter is called {name}; {hint.format(example())}")
    for name, parameter in signature.items():
        if name not in params and parameter.default is inspect.Parameter.empty:
            raise CaseLineError(f"{op}: parameter {name} is missing; {hint.format(example())}")
    # What ends in **keywords is checked by the annotation of these.
    kinds = _hints(getattr(build, "__func__", build))
    rest = next((n for n, p in _signature(build).items() if p.kind is inspect.Parameter.VAR_KEYWORD), "")
    given: dict[str, Any] = {}
    for name, value in params.items():
        try:
            if name == "seed" and isinstance(value, int) and value < 0:
                raise ValueError("a whole number from 0")
            if name not in signature and not isinstance(value, (int, float)):
                raise ValueError("a number")
            given[name] = _as(kinds.get(name if name in signature else rest), value)
        except ValueError as e:
            said = name if value is BARE else f"{name}={value}"
            raise CaseLineError(f"{op}: {said}: expected {e}; a whole case is {example()}") from e
    try:
        return build(**given)
    except NO_CASE as e:
        raise CaseLineError(f"{op}: these parameters make no case: {e}") from e


def _as(kind: Any, value: Any) -> Any:
    """The value as an annotation says. Raises ValueError with what was expected."""
    if isinstance(kind, UnionType):  # a parameter that may be left out
        kind = get_args(kind)[0]
    number = isinstance(value, (int, float))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"one of {', '.join(get_args(kind))}")
        return value
    if kind is bool and value is BARE:
        return True
    if value is BARE:
        raise ValueError(f"a value, as {'[1,2]' if get_origin(kind) is tuple else '1'}")
    if kind is bool:
        if not (number and value in (0, 1)):
            raise ValueError("0 or 1")
        return bool(value)
    if kind is int:
        if not isinstance(value, int):
            raise ValueError("a whole number")
        return int(value)
    if kind is float:
        if not number:
            raise ValueError("a number")
        return float(value)
    if kind is str:
        if isinstance(value, (tuple, list)):
            raise ValueError("a word")
        return str(value)
    if get_origin(kind) is tuple:
        return _as_tuple(get_args(kind), value)
    return value


def _as_tuple(elements: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    length = None if elements[-1] is ... else len(elements)
    many = "numbers" if length is None else f"{length} numbers"
    if not isinstance(value, (tuple, list)) or (length is not None and len(value) != length):
        raise ValueError(f"a list of {many}, as [1,2]")
    if elements[0] is int and any(not isinstance(v, int) for v in value):
        raise ValueError(f"a list of whole {many}, as [1,2]")
    return tuple(value)
