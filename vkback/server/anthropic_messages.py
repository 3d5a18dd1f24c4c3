"""POST /v1/messages, Anthropic's endpoint: its request as that of a chat, and the reply in its form."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vkback.api import Chunk, Result
from vkback.api.message import MessageReader, Piece
from vkback.server.errors import ServerError
from vkback.server.schema import PARTS_OF_OTHERS, ChatRequest, JsonFields, StopText

KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""Of errors, by their status."""


class TextBlock(JsonFields):
    """A piece of text."""

    type: Literal["text"] = Field(default="text", description='"text"')
    text: str = Field(description="a text")
    cache_control: dict[str, Any] | None = Field(default=None, description="an object")
    citations: list[Any] | None = Field(default=None, description="a list")


class Block(JsonFields):
    """A piece of a message: text, thinking, tool_use or tool_result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"] = Field(
        description='"text", "thinking", "tool_use" or "tool_result"'
    )
    text: str | None = Field(default=None, description="a text")
    thinking: str | None = Field(default=None, description="a text")
    signature: str | None = Field(default=None, description="a text")
    data: str | None = Field(default=None, description="a text")
    id: str | None = Field(default=None, description="the id of a call, a text")
    name: str | None = Field(default=None, description="the name of a tool, a text")
    input: dict[str, Any] | None = Field(default=None, description="an object")
    tool_use_id: str | None = Field(default=None, description="the id of a call, a text")
    content: str | list[TextBlock] | None = Field(default=None, description="a text, or a list of texts")
    is_error: bool | None = Field(default=None, description="true or false")
    cache_control: dict[str, Any] | None = Field(default=None, description="an object")
    citations: list[Any] | None = Field(default=None, description="a list")
    caller: Any = None

    @model_validator(mode="before")
    @classmethod
    def _of_others(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and (kind in PARTS_OF_OTHERS or kind == "document"):
            raise ValueError(f"{PARTS_OF_OTHERS.get(kind, 'documents are')} not supported, messages are of text alone")
        return data

    @model_validator(mode="after")
    def _check(self) -> Block:
        need = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
        for name in need.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing in a block of the type {self.type}")
        return self


class InputMessage(JsonFields):
    """A message."""

    role: Literal["user", "assistant", "system"] = Field(description='"user" or "assistant"')
    content: str | list[Block] = Field(description='a text, or a list of blocks, as {"type": "text", "text": "Hello"}')

    def plain(self) -> list[dict[str, Any]]:
        """As messages of a chat: results of tools come first, each by itself."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        found: list[dict[str, Any]] = []
        message: dict[str, Any] = {"role": self.role, "content": ""}
        for block in self.content:
            if block.type == "tool_result":
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text_of(block.content)})
            elif block.type == "text":
                message["content"] += block.text or ""
            elif block.type == "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + (block.thinking or "")
            elif block.type == "tool_use":
                call = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": call})
        return [*found, message] if len(message) > 2 or message["content"] or not found else found


class ToolChoice(JsonFields):
    """auto; any: one at least; tool: that of the name; none."""

    type: Literal["auto", "any", "tool", "none"] = Field(description='"auto", "any", "tool" or "none"')
    name: str | None = Field(default=None, description="the name of a tool, a text")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true or false")


class Thinking(JsonFields):
    """Whether the model thinks first, for templates that know enable_thinking."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description='"enabled" or "disabled"')
    budget_tokens: int | None = Field(default=None, description="a whole number")
    display: str | None = Field(default=None, description="a text")


class OutputFormat(JsonFields):
    """JSON of a schema."""

    type: Literal["json_schema"] = Field(description='"json_schema"')
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema, an object")


class OutputConfig(JsonFields):
    """format: of the text; effort goes to the template."""

    format: OutputFormat | None = Field(default=None, description='{"type": "json_schema", "schema": ...}')
    effort: str | None = Field(default=None, description='a text, as "low"')


class CountRequest(JsonFields):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Field(min_length=1)] = Field(
        description='at least one message, as {"role": "user", "content": "Hello"}'
    )
    model: str | None = Field(default=None, description="the name of the model, a text")
    system: str | list[TextBlock] | None = Field(default=None, description="a text, or a list of texts")
    tools: list[dict[str, Any]] | None = Field(default=None, description='a list of tools, as {"name": ..., "input_schema": ...}')
    tool_choice: ToolChoice | None = Field(default=None, description='{"type": "auto"}, "any", "tool" with a name, or "none"')
    thinking: Thinking | None = Field(default=None, description='{"type": "enabled"} or "disabled"')
    output_config: OutputConfig | None = Field(default=None, description='{"format": ...}')
    output_format: OutputFormat | None = Field(default=None, description='{"type": "json_schema", "schema": ...}')

    def body(self) -> dict[str, Any]:
        """The same as a request of a chat."""
        system = [{"role": "system", "content": _text_of(self.system)}] if self.system else []
        found: dict[str, Any] = {"messages": [*system, *(m for said in self.messages for m in said.plain())]}
        if self.tools:
            found["tools"] = [
                {"type": "function", "function": tool} if tool.get("type", "custom") == "custom" else tool for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            found["tool_choice"] = (
                choice.name if choice.type == "tool" and choice.name else {"any": "required"}.get(choice.type, choice.type)
            )
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None and self.thinking.type != "adaptive":
            found["enable_thinking"] = self.thinking.type == "enabled"
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            found["reasoning_effort"] = config.effort
        if (form := self.output_format or config.format) is not None:
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return found


class MessagesRequest(CountRequest):
    """POST /v1/messages. metadata, service_tier and the like change nothing."""

    max_tokens: int = Field(description="a whole number")
    stream: bool | None = Field(default=None, description="true or false")
    stop_sequences: list[StopText] | None = Field(default=None, description="a list of texts")
    temperature: Annotated[float, Field(ge=0)] | None = Field(default=None, description="a number of at least 0")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="a number from 0 to 1")
    top_k: Annotated[int, Field(lt=2**31)] | None = Field(default=None, description="a whole number up to 2147483647; 0 or below: all")
    seed: int | None = Field(default=None, description="a whole number; below 0: any")
    metadata: dict[str, Any] | None = Field(default=None, description="an object")
    service_tier: str | None = Field(default=None, description="a text")

    def as_chat(self) -> ChatRequest:
        body = self.body() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            **{name: getattr(self, name) for name in ("model", "stream", "temperature", "top_p", "top_k", "seed")},
        }
        return ChatRequest.model_validate({key: value for key, value in body.items() if value is not None})


def _text_of(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def error_body(error: ServerError) -> dict[str, Any]:
    """As Anthropic's API has it."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


@dataclass
class MessageShape:
    """The reply as an object, and as events.

    prompt_tokens  of the conversation
    ended_by       the stop string that ended a text, if one did
    """

    model: str
    prompt_tokens: int
    reader: Callable[[], MessageReader]
    ended_by: Callable[[Result], str | None]
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        self._reader = self.reader()
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        self._result: Result | None = None

    def choice(self, index: int) -> MessageShape:
        """There is one alone."""
        return self

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> dict[str, Any]:
        self._take(self._reader.feed(results[0].text))
        self._take(self._reader.flush())
        self._close()
        return self._body(self._blocks, self._end(results[0]), _usage(usage))

    def first(self) -> str:
        used = {"input_tokens": self.prompt_tokens, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        started = self._body([], {"stop_reason": None, "stop_sequence": None}, used)
        return _event("message_start", message=started) + _event("ping")

    def piece(self, chunk: Chunk) -> str:
        return self._take(self._reader.feed(chunk.text))

    def last(self, result: Result) -> str:
        self._result = result
        return self._take(self._reader.flush()) + self._close()

    def usage(self, usage: dict[str, Any]) -> str:
        """It is in the events."""
        return ""

    def done(self, usage: dict[str, Any]) -> str:
        assert self._result is not None
        return _event("message_delta", delta=self._end(self._result), usage=_usage(usage)) + _event("message_stop")

    def error(self, error: ServerError) -> str:
        return _event("error", **{k: v for k, v in error_body(error).items() if k != "type"})

    def _take(self, piece: Piece) -> str:
        """Events of a piece, which goes into the blocks."""
        lines = ""
        if piece.thoughts:
            lines += self._grow("thinking", piece.thoughts)
        if piece.text:
            lines += self._grow("text", piece.text)
        for call in piece.calls:
            lines += self._close()
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.values}
            self._blocks.append(block)
            self._open = "tool_use"
            lines += _event("content_block_start", index=len(self._blocks) - 1, content_block={**block, "input": {}})
            lines += self._delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._close()
        return lines

    def _grow(self, kind: str, text: str) -> str:
        lines = ""
        if self._open != kind:
            lines = self._close()
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            self._blocks.append(block)
            self._open = kind
            lines += _event("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))
        self._blocks[-1][kind] += text
        return lines + self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> str:
        if not self._open:
            return ""
        self._open = ""
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def _end(self, result: Result) -> dict[str, Any]:
        """Why it ended."""
        stop = self.ended_by(result) if result.finish_reason == "stop" else None
        reason = "end_turn" if result.finish_reason in ("eos", "stop") else "max_tokens"
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._reader.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _body(self, content: Sequence[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": list(content), **end, "usage": usage}


def _usage(used: dict[str, Any]) -> dict[str, Any]:
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "output_tokens": used["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _event(kind: str, **body: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body}, ensure_ascii=False)}\n\n"
