"""Options that several commands have: a decorator adds them to a command, which gets them as one mapping."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

Declared = tuple[Any, Any]
"""An option's annotation for typer, and its default."""


def gathered(
    into: str, options: Mapping[str, Declared], made: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command has these options, too.

    into  the parameter of the command that gets what `made` makes of their values, by name
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)

        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            asked = {name: kwargs.pop(name, default) for name, (_, default) in options.items()}
            command(*args, **kwargs, **{into: made(asked)})

        added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=v, annotation=kind) for n, (kind, v) in options.items()]
        before = [parameter for parameter in own.parameters.values() if parameter.name != into]
        run.__signature__ = own.replace(parameters=[*before, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*before, *added)}
        return run

    return decorate
