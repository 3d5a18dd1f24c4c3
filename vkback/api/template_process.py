"""Rendering of chat templates by jinja2 in its sandbox, and the process that does it within bounds on memory and time.

A template comes with a file that somebody made, so it is not trusted: `ImmutableSandboxedEnvironment` gives it no attribute that leads out
of the values it gets, and nothing it could change. But a sandbox does not count bytes: `{{ 'a' * 10**10 }}` takes 10 GB. So this file runs
by itself, as a process that imports nothing of vkback and is bound by the operating system.

Lines of JSON: the first on stdin is Python's path, answered by `{}` once all is imported; each further one is `{"template", "variables",
"chars"}`, answered by `{"text"}`, or by `{"why", "said"}` where a template fails: said by the template, or why it may not go on ("chars",
"memory").
"""

from __future__ import annotations

import datetime
import json
import sys
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MEMORY_BYTES = 512 << 20
"""Of address space of the process. Python and jinja2 take 60 MB of it. Only Linux and the BSDs keep to it."""

CPU_S = 60
"""Of one request; after that nobody waits for it any more, and this ends a process whose parent has been killed."""


def answer(template: str, variables: dict[str, Any], chars: int) -> dict[str, str]:
    """The line for a template. chars: of the text, at most."""
    try:
        pieces, count = [], 0
        for piece in compiled(template).generate(**variables):
            count += len(piece)
            if count > chars:
                return {"why": "chars", "said": ""}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except (MemoryError, OverflowError):
        return {"why": "memory", "said": ""}
    except Exception as e:  # whatever the template does
        return {"why": "error", "said": str(e) or type(e).__name__}


@lru_cache(maxsize=8)
def compiled(template: str) -> Template:
    return environment().from_string(template)


def environment() -> Environment:
    """What templates of transformers expect: break and continue, `generation`, `tojson` with its keywords, and two functions."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant has said, for training. Here its body is rendered; what it sets stays in it."""

        tags = {"generation"}  # noqa: RUF012  as the base class has it

        def parse(self, parser: Parser) -> Scope:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def bound_memory() -> None:
    """As far as this system can."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard < 0 else min(MEMORY_BYTES, hard), hard))


def bound_time() -> None:
    """Of what comes next."""
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_S, hard))


def main() -> None:
    given, told = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:] = json.loads(given.readline())
    environment()  # imports jinja2
    bound_memory()
    said = "{}"
    while True:
        told.write(said.encode() + b"\n")
        told.flush()
        bound_time()
        if not (line := given.readline()):
            return
        try:
            said = json.dumps(answer(**json.loads(line)))
        except MemoryError:
            said = '{"why": "memory", "said": ""}'


if __name__ == "__main__":
    main()
