"""A tool, a call of one, and pieces of calls as a stream has them."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ID_CHARS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Of ids of calls, without the prefix: templates of Mistral take no other."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    parameters  JSON schema of its arguments, an object
    strict      arguments never differ from it; else only where a call is forced, as far as a grammar knows its keywords
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def plain(self) -> dict[str, Any]:
        """As templates take it."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written. arguments: JSON, an object."""

    name: str
    arguments: str
    id: str

    @property
    def values(self) -> dict[str, Any]:
        """Arguments by name."""
        found: dict[str, Any] = json.loads(self.arguments)
        return found

    def plain(self) -> dict[str, Any]:
        """As a message has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def new_id() -> str:
    """Of a call."""
    return "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))


def written(value: Any) -> str:
    """JSON of arguments."""
    return json.dumps(value, ensure_ascii=False)
