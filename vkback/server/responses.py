"""POST /v1/responses, OpenAI's newer endpoint: its request as that of a chat, and the reply in its form. Replies are kept for
`previous_response_id`, up to a number and a size."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vkback.api import Chunk, Result
from vkback.api.message import MessageReader, Piece
from vkback.api.tools.call import ToolCall
from vkback.server import replies
from vkback.server.errors import BadRequest, ServerError
from vkback.server.schema import ChatRequest, JsonFields, StopText, TextPart

MAX_KEPT, MAX_KEPT_CHARS = 512, 64 << 20
"""Replies that are kept, and characters of their conversations."""


class ItemText(TextPart):
    """A piece of text in an item. Its annotations and logprobs change nothing."""

    type: Literal["text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"] = Field(  # type: ignore[assignment]
        default="text", description='"input_text", "output_text" or "reasoning_text"'
    )
    annotations: list[Any] | None = Field(default=None, description="a list")
    logprobs: list[Any] | None = Field(default=None, description="a list")


class InputItem(JsonFields):
    """What a conversation is made of: messages, calls of functions, their results, and what the model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = Field(
        default="message", description='"message", "function_call", "function_call_output" or "reasoning"'
    )
    role: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(default=None, description='a text, as "user"')
    content: str | list[ItemText] | None = Field(
        default=None, description='a text, or a list of parts, as {"type": "input_text", "text": "Hello"}'
    )
    name: str | None = Field(default=None, description="a text")
    arguments: str | None = Field(default=None, description="a text of JSON")
    call_id: str | None = Field(default=None, description="the id of a call, a text")
    output: str | list[ItemText] | None = Field(default=None, description="a text, or a list of parts")
    summary: list[ItemText] | None = Field(default=None, description="a list of texts")
    encrypted_content: str | None = Field(default=None, description="a text")
    id: str | None = Field(default=None, description="a text")
    status: str | None = Field(default=None, description="a text")
    phase: str | None = Field(default=None, description="a text")

    @model_validator(mode="after")
    def _check(self) -> InputItem:
        need = {
            "message": ("role", "content"),
            "function_call": ("name", "call_id", "arguments"),
            "function_call_output": ("call_id", "output"),
        }.get(self.type, ())
        for name in need:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing in an item of the type {self.type}")
        return self


class TextFormat(JsonFields):
    """text; json_object; json_schema with its schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description='"text", "json_object" or "json_schema"')
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema", description="a JSON schema, as an object, true or false")
    name: str | None = Field(default=None, description="a text")
    description: str | None = Field(default=None, description="a text")
    strict: bool | None = Field(default=None, description="true or false")


class TextOptions(JsonFields):
    """Of the text of a reply."""

    format: TextFormat | None = Field(default=None, description='{"type": "text"}, "json_object" or "json_schema"')
    verbosity: str | None = Field(default=None, description="a text")


class Reasoning(JsonFields):
    """effort goes to the template."""

    effort: str | None = Field(default=None, description='a text, as "low"')
    summary: str | None = Field(default=None, description="a text")
    generate_summary: str | None = Field(default=None, description="a text")


class ResponseRequest(JsonFields):
    """POST /v1/responses. The fields of _SAME are those of a chat. include, truncation, user, metadata, service_tier and the like change
    nothing."""

    input: str | Annotated[list[InputItem], Field(min_length=1)] = Field(description="a text, or a list of items")
    model: str | None = Field(default=None, description="the name of the model, a text")
    instructions: str | None = Field(default=None, description="a text")
    previous_response_id: str | None = Field(default=None, description="the id of a response, a text")
    store: bool | None = Field(default=None, description="true or false")
    stream: bool | None = Field(default=None, description="true or false")
    stream_options: dict[str, Any] | None = Field(default=None, description="an object")
    background: Literal[False] | None = Field(default=None, description="false: responses are made while the client waits")
    tools: list[dict[str, Any]] | None = Field(default=None, description='a list of tools, as {"type": "function", "name": ...}')
    tool_choice: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = Field(
        default=None, description='"auto", "none", "required", or {"type": "function", "name": ...}'
    )
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")
    text: TextOptions | None = Field(default=None, description='{"format": {"type": ...}}')
    reasoning: Reasoning | None = Field(default=None, description='{"effort": "low"}')
    max_output_tokens: int | None = Field(default=None, description="a whole number; below 0: as many as there may be")
    temperature: Annotated[float, Field(ge=0)] | None = Field(default=None, description="a number of at least 0")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="a number from 0 to 1")
    top_k: Annotated[int, Field(lt=2**31)] | None = Field(default=None, description="a whole number up to 2147483647; 0 or below: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="a number from 0 to 1")
    seed: int | None = Field(default=None, description="a whole number; below 0: any")
    stop: StopText | list[StopText] | None = Field(default=None, description="a text, or a list of texts")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description='an object, as {"enable_thinking": false}')
    include: list[str] | None = Field(default=None, description="a list of texts")
    truncation: str | None = Field(default=None, description="a text")
    user: str | None = Field(default=None, description="a text")
    metadata: dict[str, Any] | None = Field(default=None, description="an object")
    service_tier: str | None = Field(default=None, description="a text")
    safety_identifier: str | None = Field(default=None, description="a text")
    prompt_cache_key: str | None = Field(default=None, description="a text")

    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the input."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        thoughts = ""
        for item in self.input:
            if item.type == "reasoning":
                parts = item.content if isinstance(item.content, list) else item.summary or []
                thoughts += "\n\n".join(part.text for part in parts)
            elif item.type == "function_call":
                call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
                if not (found and found[-1]["role"] == "assistant"):
                    found.append({"role": "assistant", "content": ""} | ({"reasoning_content": thoughts} if thoughts else {}))
                    thoughts = ""
                found[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text_of(item.output)})
            else:
                message = {"role": item.role, "content": _text_of(item.content)}
                if thoughts and item.role == "assistant":
                    message["reasoning_content"], thoughts = thoughts, ""
                found.append(message)
        return found

    def as_chat(self, before: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """The same as a request of a chat, behind what was said before."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body: dict[str, Any] = {
            "messages": [*system, *before, *self.conversation()],
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            **{name: getattr(self, name) for name in _SAME},
        }
        if self.text is not None and (form := self.text.format) is not None:
            body["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                body["response_format"]["json_schema"] = {"schema": form.schema_}
        return ChatRequest.model_validate({key: value for key, value in body.items() if value is not None})


_SAME = (
    "model",
    "stream",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "chat_template_kwargs",
)


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class KeptResponses:
    """Replies by their ids, with the conversations that they end. The oldest go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = OrderedDict()
        self._chars = 0

    def keep(self, body: dict[str, Any], conversation: list[dict[str, Any]]) -> None:
        """conversation: up to the reply and with it, without instructions."""
        size = len(json.dumps([body, conversation]))
        self._kept[body["id"]] = (body, conversation, size)
        self._chars += size
        while len(self._kept) > MAX_KEPT or (self._chars > MAX_KEPT_CHARS and len(self._kept) > 1):
            self._chars -= self._kept.popitem(last=False)[1][2]

    def body(self, id: str) -> dict[str, Any]:
        """Raises NoResponse."""
        return self._of(id)[0]

    def conversation(self, id: str) -> list[dict[str, Any]]:
        """Raises NoResponse."""
        return self._of(id)[1]

    def forget(self, id: str) -> None:
        """Raises NoResponse."""
        self._chars -= self._of(id)[2]
        del self._kept[id]

    def _of(self, id: str) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
        if id not in self._kept:
            raise NoResponse(
                f"[server] no response {id!r} is kept here; the last {MAX_KEPT} are, unless they had store: false", "previous_response_id"
            )
        return self._kept[id]


class NoResponse(BadRequest):
    """A reply that is not kept, or not any more."""

    status = 404
    code = "response_not_found"


def new_id(kind: str) -> str:
    """Of a response or an item."""
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass
class ResponseShape:
    """The reply as an object, and as events. on_end: gets the object and the reply as a message."""

    asked: ResponseRequest
    model: str
    reader: Callable[[], MessageReader]
    on_end: Callable[[dict[str, Any], dict[str, Any]], None]
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._reader = self.reader()
        self._items: list[dict[str, Any]] = []
        self._open = ""  # the type of the item that grows
        self._number = -1
        self._results: list[Result] = []

    def choice(self, index: int) -> ResponseShape:
        """There is one alone."""
        return self

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> dict[str, Any]:
        self._take(self._reader.feed(results[0].text))
        self._take(self._reader.flush())
        self._close()
        self._results = list(results)
        return self._ended(usage)

    def first(self) -> str:
        started = self._body("in_progress", None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def piece(self, chunk: Chunk) -> str:
        return self._take(self._reader.feed(chunk.text))

    def last(self, result: Result) -> str:
        self._results = [result]
        return self._take(self._reader.flush()) + self._close()

    def usage(self, usage: dict[str, Any]) -> str:
        """It is in the last event."""
        return ""

    def done(self, usage: dict[str, Any]) -> str:
        body = self._ended(usage)
        return self._event(f"response.{body['status']}", response=body)

    def error(self, error: ServerError) -> str:
        failed = self._body("failed", None) | {"error": {"code": "server_error", "message": str(error)}}
        return self._event("error", code=error.code, message=str(error), param=error.param) + self._event(
            "response.failed", response=failed
        )

    def _take(self, piece: Piece) -> str:
        """Events of a piece, which goes into the items."""
        lines = ""
        if piece.thoughts:
            lines += self._grow("reasoning", piece.thoughts)
        if piece.text:
            lines += self._grow("message", piece.text)
        for call in piece.calls:
            lines += self._close() + self._call(call)
        return lines

    def _grow(self, kind: str, text: str) -> str:
        reasoning = kind == "reasoning"
        lines = ""
        if self._open != kind:
            lines = self._close()
            item: dict[str, Any] = {"id": new_id("rs" if reasoning else "msg"), "type": kind, "status": "in_progress", "content": []}
            more: dict[str, Any] = {"summary": []} if reasoning else {"role": "assistant"}
            item |= more
            self._items.append(item)
            self._open = kind
            lines += self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item, content=[]))
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if not reasoning:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            lines += self._event("response.content_part.added", **self._place(), part=dict(part))
            item["content"] = [part]
        self._items[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {} if reasoning else {"logprobs": []}
        return lines + self._event(f"response.{_text_kind(kind)}.delta", **self._place(), delta=text, **logprobs)

    def _close(self) -> str:
        """The item that grows is whole."""
        if not self._open:
            return ""
        item, kind = self._items[-1], self._open
        self._open = ""
        item["status"] = "completed"
        part = item["content"][0]
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        lines = self._event(f"response.{_text_kind(kind)}.done", **self._place(), text=part["text"], **more)
        lines += self._event("response.content_part.done", **self._place(), part=part)
        return lines + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: ToolCall) -> str:
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._items.append(item)
        at: dict[str, Any] = {"output_index": len(self._items) - 1}
        lines = self._event("response.output_item.added", **at, item=dict(item))
        item |= {"status": "completed", "arguments": call.arguments}
        lines += self._event("response.function_call_arguments.delta", **at, item_id=item["id"], delta=call.arguments)
        lines += self._event("response.function_call_arguments.done", **at, item_id=item["id"], name=call.name, arguments=call.arguments)
        return lines + self._event("response.output_item.done", **at, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **body: Any) -> str:
        self._number += 1
        told = json.dumps({"type": kind, "sequence_number": self._number, **body}, ensure_ascii=False)
        return f"event: {kind}\ndata: {told}\n\n"

    def _ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        cut = replies.finish_reason(self._results[0]) == "length"
        if cut and self._items and self._items[-1]["type"] != "function_call":
            self._items[-1]["status"] = "incomplete"
        body = self._body("incomplete" if cut else "completed", usage)
        message: dict[str, Any] = {"role": "assistant", "content": self._reader.text}
        if self._reader.thoughts:
            message["reasoning_content"] = self._reader.thoughts
        if self._reader.calls:
            message["tool_calls"] = [call.plain() for call in self._reader.calls]
        self.on_end(body, message)
        return body

    def _body(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        asked = self.asked
        form = asked.text.format if asked.text is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning is not None else None, "summary": None},
            "store": asked.store is not False,
            "temperature": asked.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form is not None else {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [{"strict": False, "parameters": {}, **tool} for tool in asked.tools or []],
            "top_p": asked.top_p,
            "truncation": asked.truncation or "disabled",
            "user": asked.user,
            "metadata": asked.metadata or {},
            "usage": _usage(usage) if usage is not None else None,
        }


def _text_kind(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _usage(used: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": used["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }
