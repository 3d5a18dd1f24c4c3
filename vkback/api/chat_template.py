"""From messages to the text a model was trained on: the file's own template, rendered by jinja2 (template_process.py) within bounds."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vkback.api import template_process
from vkback.api.tools.call import Tool
from vkback.api.tools.conversation import Takes, adapted, takes
from vkback.errors import VkbackError, did_you_mean


class ChatTemplateError(VkbackError):
    """A model without a template, a template that is broken, or messages that it refuses."""


class ChatTemplateWarning(UserWarning):
    """A model was opened whose own template cannot be used."""


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

GIVE_ONE = "give one: --chat-template plain, chatml or FILE; from Python template="

TIME_S = 10.0
"""That a template may take. Real ones take milliseconds."""

START_S = 60.0
"""That the process may take to begin."""

SPARE_CHARS = 1 << 20
"""That a template may make beside the messages."""

MESSAGE_TIMES = 4
"""How often it may repeat them."""


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


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes text. stops: strings that end a reply beside those requested."""

    template: str
    stops: tuple[str, ...] = ()


BUILTIN = ChatFormat(PLAIN, ("User:",))
"""Of the built-in models, which bring no template: they were trained on no conversation, and go on to write the user's next line."""


def format_of(given: str | None, own: str | None, *, model: str, builtin: bool) -> ChatFormat:
    """The template that was given, by name or as text; else the file's own; else that of the built-in models.

    Raises ChatTemplateError where there is none.
    """
    if given is not None:
        return ChatFormat(named(given))
    if own is not None:
        return ChatFormat(own)
    if builtin:
        return BUILTIN
    raise ChatTemplateError(f"[chat] {model} has no chat template; {GIVE_ONE}")


def problem(template: str) -> str:
    """What is wrong with how a template is written; "" if nothing is. Nothing of it is run."""
    from jinja2 import TemplateError

    try:
        template_process.environment().parse(template)
    except (TemplateError, RecursionError) as e:
        return str(e) or type(e).__name__
    return ""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    model: str,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of messages, as the template makes it. model: who the errors are about; variables: those that only some templates know
    (`enable_thinking=False`).

    A template has 10 s, 512 MiB, and characters for four times what it is given and 2^20 more.
    Raises ChatTemplateError naming a message that is none, or what the template said, or the bound that it met.
    """
    given = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": add_generation_prompt, **variables}
    return _render(template, conversation_of(messages), given, model)


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose content is one text. Raises ChatTemplateError naming one that is none."""
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
        conversation.append(_with_thoughts(joined(message, f"message {i}")))
    if not conversation:
        raise ChatTemplateError("[chat] there are no messages; give at least one, as [{'role': 'user', 'content': 'Hello'}]")
    return conversation


THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What clients and templates call the thoughts of a message."""


def _with_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its thoughts, if it has any, under the names that templates read."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


OWN_VARIABLES = ("messages", "bos_token", "eos_token")


def variables_given(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of a template, checked. Raises ChatTemplateError."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ChatTemplateError(f'[chat] template_kwargs is {variables!r}, expected a dict, name -> value, as {{"enable_thinking": False}}')
    if taken := [name for name in OWN_VARIABLES if name in variables]:
        raise ChatTemplateError(f"[chat] template_kwargs has {taken[0]}, which the template has from the conversation and the model")
    return dict(variables)


@dataclass(frozen=True)
class Prompt:
    """A conversation as text, up to where the assistant goes on.

    prefill       what it has of the assistant's message already
    moved_system  the system message stands in the first one of the user, since the template has no place for it
    """

    text: str
    prefill: str = ""
    moved_system: bool = False


def compose(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    model: str,
    bos: str = "",
    eos: str = "",
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
) -> Prompt:
    """The text of messages, for the assistant to go on: with its next message, or the last one where that is its own. tools: what it may
    call.

    What a template cannot have is given in another way: a system message, the role "developer", content as a text or in parts.
    Raises ChatTemplateError as `render`.
    """
    conversation = conversation_of(messages)
    given = {"bos_token": bos, "eos_token": eos, **(variables or {})}
    if tools or any(m["role"] == "tool" or m.get("tool_calls") for m in conversation):
        has = takes_of(template)
        conversation = adapted(conversation, tools, has, template)
        if tools and has.tools:
            given["tools"] = [tool.plain() for tool in tools]
    if "developer" not in template:
        conversation = [{**m, "role": "system"} if m["role"] == "developer" else m for m in conversation]
    moved = conversation[0]["role"] == "system" and not _takes_system(template)
    if moved:
        conversation = _without_system(conversation)
    last = conversation[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return Prompt(_render(template, conversation, {"add_generation_prompt": True, **given}, model), moved_system=moved)
    prefill = last["content"]
    if prefill:
        marked = [*conversation[:-1], {**last, "content": f"{prefill}{_MARK} "}]
        text = _render(template, marked, {**given, "add_generation_prompt": False}, model)
        before, found, after = text.rpartition(_MARK)
        if found:
            return Prompt(before if after.startswith(" ") else before.rstrip(), prefill, moved)
    # Templates that drop what was said, or tell the two roles apart by their turns.
    text = _render(template, conversation[:-1] or [{"role": "user", "content": ""}], {"add_generation_prompt": True, **given}, model)
    return Prompt(text + prefill, prefill, moved)


_MARK = "\u2063vkback goes on here\u2063"
"""Stands at the end of a message that is gone on with: no message has it."""


def _without_system(conversation: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system message in front of the text of the user's first one."""
    system, *rest = conversation
    at = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if at is None:
        return [{**system, "role": "user"}, *rest]
    rest[at] = {**rest[at], "content": f"{system['content']}\n{rest[at]['content']}"}
    return rest


_NEEDLE = "vkback asks for this"
_TRIED: Mapping[str, Any] = {"bos_token": "", "eos_token": "", "add_generation_prompt": True}


def _tried(template: str, conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = _TRIED) -> str | None:
    """What a template makes of messages; None where it fails."""
    try:
        return _render(template, conversation, variables, "")
    except ChatTemplateError:
        return None


@lru_cache(maxsize=32)
def _takes_system(template: str) -> bool:
    """Whether a system message comes out; so it is taken to be where not even the user's does."""
    user = {"role": "user", "content": "Hello"}
    found = _tried(template, [{"role": "system", "content": _NEEDLE}, user])
    return (found is not None and _NEEDLE in found) or _tried(template, [user]) is None


@lru_cache(maxsize=32)
def _takes_parts_alone(template: str) -> bool:
    """Whether content comes out in parts, and as a text does not."""
    text = _tried_text(template, _NEEDLE)
    if text is not None and _NEEDLE in text:
        return False
    parts = _tried_text(template, [{"type": "text", "text": _NEEDLE}])
    return parts is not None and _NEEDLE in parts


@lru_cache(maxsize=32)
def takes_of(template: str) -> Takes:
    """What of tools a template has a place for."""
    return takes(lambda messages, variables: _tried(template, messages, {**_TRIED, **variables}))


def _tried_text(template: str, content: Any) -> str | None:
    found = _answer(template, [{"role": "user", "content": content}], _TRIED, SPARE_CHARS)
    return found.get("text")


def _render(template: str, conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], model: str) -> str:
    if "content" in template and _takes_parts_alone(template):
        conversation = [{**m, "content": m["content"] and [{"type": "text", "text": m["content"]}]} for m in conversation]
    try:
        length = sum(_length(m) for m in conversation) + _length({k: v for k, v in variables.items() if k not in _TRIED})
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatTemplateError(f"[chat] messages are text, numbers, lists and dicts, as JSON has them: {e}") from e
    chars = MESSAGE_TIMES * length + SPARE_CHARS
    found = _answer(template, conversation, variables, chars)
    if "text" in found:
        return found["text"]
    why = {
        "chars": f"makes more than {chars} characters of messages that have {length}; {GIVE_ONE}",
        "memory": f"needs more than {template_process.MEMORY_BYTES >> 20} MiB of memory; {GIVE_ONE}",
        "time": f"takes more than {TIME_S:g} s; {GIVE_ONE}",
    }.get(found["why"], f"fails: {found.get('said')}")
    raise ChatTemplateError(f"[chat] {model}: its chat template {why}")


def _length(given: Mapping[str, Any]) -> int:
    """Characters of a message's content, and of all else as JSON. Raises what json does."""
    content = given.get("content") or ""
    rest = {k: v for k, v in given.items() if k not in ("role", "content")}
    return (len(content) if isinstance(content, str) else len(json.dumps(content))) + (len(json.dumps(rest)) if rest else 0)


def _answer(template: str, conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], chars: int) -> dict[str, str]:
    given = {"tools": None, "documents": None, **variables, "messages": conversation}
    return _renderer.answer(json.dumps({"template": template, "variables": given, "chars": chars}))


class _Renderer:
    """The process, begun when it is first needed, for all models and threads in turn. It is begun anew where it has ended, and by a process
    that was forked from this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._of_parent: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def answer(self, request: str) -> dict[str, str]:
        """The process's answer to a request, or {"why": "time"} and the like where it has none."""
        if getattr(sys, "frozen", False) or not sys.executable:  # there is no Python to be run
            return template_process.answer(**json.loads(request))
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._begin()
            line, late = self._exchange(process, request.encode(), TIME_S)
        if line:
            found: dict[str, str] = json.loads(line)
            return found
        return {"why": "time"} if late else {"why": "error", "said": f"its process has ended with status {process.returncode}"}

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _begin(self) -> subprocess.Popen[bytes]:
        """Also waits until it has imported what it needs, for that is no template's time."""
        self._end()
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(Path(template_process.__file__))]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=sys.platform != "win32"
            )
        except OSError as e:
            raise ChatTemplateError(f"[chat] a process for the chat template cannot be begun: {sys.executable}: {e.strerror}") from e
        process = self._process
        if not self._exchange(process, json.dumps([str(part) for part in sys.path]).encode(), START_S)[0]:
            said = f"{' '.join(command)} ended with status {process.returncode}"
            raise ChatTemplateError(f"[chat] a process for the chat template cannot be begun: {said}")
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> tuple[bytes, bool]:
        """The line that answers a line; b"" where the process has ended, and whether that is since it was late."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        found = b""
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(line + b"\n")
                process.stdin.flush()
            found = process.stdout.readline()
        finally:
            timer.cancel()
            if not found.endswith(b"\n"):  # it was late, or killed, or here came Ctrl-C: what it says next would be of this line
                found = b""
                self._end()
        return found, late.is_set()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()

    def _forked(self) -> None:
        """The process is the parent's: it is kept, so that nobody waits for it here."""
        self._lock, self._process, self._of_parent = threading.Lock(), None, self._process


_renderer = _Renderer()
