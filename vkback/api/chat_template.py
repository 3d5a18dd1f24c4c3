"""From messages to the text a model was trained on: the file's own template, rendered by jinja2 in its sandbox.

A template comes with a file that somebody made, so it is not trusted: `ImmutableSandboxedEnvironment` gives it no attribute that leads out
of the values it gets, and nothing it could change.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from vkback.errors import VkbackError, did_you_mean

if TYPE_CHECKING:
    from jinja2 import Template


class Message(TypedDict):
    """role: "system", "user" or "assistant" (a template may know others). content: text, or parts of it as OpenAI's clients write them,
    [{"type": "text", "text": ...}, ...]."""

    role: str
    content: str | Sequence[Mapping[str, Any]]


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


def named(template: str) -> str:
    """A template by its name, or given as its text. Raises ChatTemplateError for a word that is neither."""
    if not isinstance(template, str):
        raise ChatTemplateError(f"[chat] template is {template!r}, expected the text of one, or its name: {', '.join(NAMED)}")
    if template not in NAMED and "{" not in template:
        near = did_you_mean(template, NAMED)
        raise ChatTemplateError(
            f"[chat] no template is called {template!r}.{near} There are {', '.join(NAMED)}; the text of a template has a {{ at least"
        )
    return NAMED.get(template, template)


def joined(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A message with its content as one text, which may come in parts, or be null; an assistant's may be missing. Raises ChatTemplateError
    for parts that are no text."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, Mapping | bytes) or not isinstance(content, Iterable):
        raise ChatTemplateError(f"[chat] the content of {place} is {content!r}, expected a text, or a list of its parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatTemplateError(f'[chat] {place} has a part {kind!r}, expected {{"type": "text", "text": ...}}: models here read text')
        texts.append(text)
    return {**message, "content": "".join(texts)}


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    model: str,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
    **further: Any,
) -> str:
    """The text of messages. model: who the errors are about; further: variables that some templates know (`enable_thinking=False`).

    Raises ChatTemplateError naming a message that is none, or what the template said.
    """
    from jinja2 import TemplateError

    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise ChatTemplateError(f"[chat] the messages are {messages!r}, expected a list, as [{{'role': 'user', 'content': 'Hello'}}]")
    conversation = []
    for i, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or not isinstance(role := message.get("role"), str)
            or ("content" not in message and role != "assistant")
        ):
            raise ChatTemplateError(f"[chat] message {i} is {message!r}, expected a dict with role and content")
        conversation.append(joined(message, f"message {i}"))
    if not conversation:
        raise ChatTemplateError("[chat] there are no messages; give at least one, as [{'role': 'user', 'content': 'Hello'}]")
    try:
        text: str = _compiled(template).render(
            messages=conversation, bos_token=bos, eos_token=eos, add_generation_prompt=add_generation_prompt, **further
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
