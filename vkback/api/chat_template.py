"""From messages to the text a model was trained on: the file's own template, rendered by jinja2 in its sandbox.

A template comes with a file that somebody made, so it is not trusted: `ImmutableSandboxedEnvironment` gives it no attribute that leads out
of the values it gets, and nothing it could change.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from vkback.errors import VkbackError

if TYPE_CHECKING:
    from jinja2 import Template


class Message(TypedDict):
    """role: "system", "user" or "assistant" (a template may know others)."""

    role: str
    content: str


class ChatTemplateError(VkbackError):
    """A model without a template, a template that is broken, or messages that it refuses."""


PLAIN = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models that were trained on no conversation: one line a message."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NAMED = {"plain": PLAIN, "chatml": CHATML}
"""Templates one may ask for by name."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, model: str, bos: str = "", eos: str = "", add_generation_prompt: bool = True,
    **further: Any,
) -> str:  # fmt: skip
    """The text of messages. model: who the errors are about; further: variables that some templates know (`enable_thinking=False`).

    Raises ChatTemplateError naming a message that is none, or what the template said.
    """
    from jinja2 import TemplateError

    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ChatTemplateError(f"[chat] message {i} is {message!r}, expected a dict with role and content")
    if not messages:
        raise ChatTemplateError("[chat] there are no messages; give at least one, as [{'role': 'user', 'content': 'Hello'}]")
    try:
        text: str = _compiled(template).render(
            messages=list(messages), bos_token=bos, eos_token=eos, add_generation_prompt=add_generation_prompt, **further
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as e:
        raise ChatTemplateError(f"[chat] {model}: its chat template fails: {e or type(e).__name__}") from e
    return text


@cache
def _compiled(template: str) -> Template:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
