"""What a message of a conversation has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict


class Message(TypedDict, total=False):
    """role: "system", "user" or "assistant" (a template may know others). content: text, None, or parts of it as OpenAI's clients write
    them, [{"type": "text", "text": ...}, ...]. A template may know further keys."""

    role: Required[str]
    content: str | Sequence[Mapping[str, Any]] | None
    name: str
    reasoning_content: str
    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str
