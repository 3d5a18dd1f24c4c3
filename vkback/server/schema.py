"""What clients may ask for, and how that becomes options of a generation. A field that is not here is refused by its name."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vkback.api import GenerateOptions
from vkback.server.errors import BadRequest

SEED_BITS = 31
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's for /v1/completions."""

StopText = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """include_usage: a last event with the number of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Strict):
    """schema: what the reply is held to; without it any object. name, description and strict change nothing: a reply never differs from
    its schema."""

    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """text; json_object, any JSON object; json_schema, JSON of the schema in the field of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with the type json_schema, and only then")
        return self

    def schema_of_text(self) -> str | None:
        """The schema as JSON; None for plain text."""
        if self.type == "text":
            return None
        found = self.json_schema.schema_ if self.json_schema is not None else None
        return json.dumps({"type": "object"} if found is None else found)


class _Sampling(_Strict):
    """What both endpoints take. top_k, min_p and repeat_penalty are not OpenAI's. user, metadata, store and service_tier change nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**SEED_BITS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    n: Literal[1] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def generate_options(self, n_vocab: int, limit: int, default: int, wanted: int | None) -> GenerateOptions:
        """limit: tokens that may be asked for; default: without a number. Raises BadRequest."""
        if wanted is not None and wanted > limit:
            raise BadRequest(f"[server] max_tokens is {wanted}, this server makes at most {limit}", "max_tokens")
        options: GenerateOptions = {
            "max_tokens": min(default, limit) if wanted is None else wanted,
            "seed": secrets.randbits(SEED_BITS) if self.seed is None else self.seed,
            "logit_bias": _bias(self.logit_bias or {}, n_vocab),
        }
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.top_k is not None:
            options["top_k"] = self.top_k
        if self.min_p is not None:
            options["min_p"] = self.min_p
        if self.stop is not None:
            options["stop"] = self.stop
        if self.presence_penalty is not None:
            options["presence_penalty"] = self.presence_penalty
        if self.frequency_penalty is not None:
            options["frequency_penalty"] = self.frequency_penalty
        if self.repeat_penalty is not None:
            options["repeat_penalty"] = self.repeat_penalty
        if self.response_format is not None:
            options["json_schema"] = self.response_format.schema_of_text()
        return options


class CompletionRequest(_Sampling):
    """POST /v1/completions. logprobs: how many of the likeliest tokens to tell at each step."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def options(self, n_vocab: int, limit: int) -> GenerateOptions:
        options = self.generate_options(n_vocab, limit, DEFAULT_COMPLETION_TOKENS, self.max_tokens)
        options["logprobs"] = self.logprobs
        return options


class TextPart(_Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """role: a template says which it knows."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def options(self, n_vocab: int, limit: int) -> GenerateOptions:
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options = self.generate_options(n_vocab, limit, limit, wanted)
        options["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return options


Asked = TypeVar("Asked", bound=BaseModel)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """Raises BadRequest naming the first field that is wrong, what was expected, and what came."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        text = "is no field of this endpoint" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadRequest(f"[server] {param or 'the body'}: {text}", param) from e


def _bias(given: dict[str, float], n_vocab: int) -> dict[int, float]:
    """-100 bans a token, as with OpenAI."""
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < n_vocab):
            raise BadRequest(f"[server] logit_bias: {key!r} is no token id, expected 0..{n_vocab - 1}", "logit_bias")
        found[int(key)] = float("-inf") if value == -100 else value
    return found
