"""What clients may ask for, and how that becomes options of a generation. A field that is not here is left out and named in the log, or,
by a strict server, refused.

A field's description says what it takes: it is what an error tells.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from vkback.api import GenerateOptions, ModelError
from vkback.api.options import Options
from vkback.api.tools.use import ToolUse, tool_use
from vkback.engine.gbnf import GbnfError, to_lark
from vkback.engine.sampler import SAMPLERS, ChainSettings
from vkback.errors import did_you_mean
from vkback.server.errors import BadRequest

SEED_BITS = 31
MAX_CHOICES = 128
"""OpenAI's, of `n`."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's for /v1/completions."""

SHOWN_CHARS = 60
"""Of a wrong value, in an error."""

MAX_STOP_CHARS, MAX_STOPS = 4096, 256
MAX_GRAMMAR_CHARS = 1 << 16

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
PromptText = Annotated[str, Field(min_length=1)]


def nothing_but(*allowed: Any, why: str) -> BeforeValidator:
    """A field that clients send with a value that means nothing: null, empty, or one of `allowed`. Any other is refused, saying why."""

    def check(value: Any) -> None:
        if value not in (None, "", [], {}, *allowed):
            raise ValueError(why)

    return BeforeValidator(check)


class JsonFields(BaseModel):
    """Fields of a JSON object, checked as they came: a text is no number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    MAY_BE_EMPTY: ClassVar[tuple[str, ...]] = ()
    """Fields of which an empty value means nothing, too."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """Null is "not given", also of fields that this server does not know."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None and not (k in cls.MAY_BE_EMPTY and v in ("", [], {}))}


def _without_empty_stops(value: Any) -> Any:
    """Clients send those of an empty form."""
    if isinstance(value, list):
        return [each for each in value if each not in ("", None)]
    return None if value == "" else value


class StreamOptions(JsonFields):
    """include_usage: a last event with the number of tokens."""

    include_usage: bool = Field(default=False, description="true or false")
    include_obfuscation: bool = Field(default=False, description="true or false")


class JsonSchema(JsonFields):
    """schema: what the reply is held to; without it any object. name, description and strict change nothing: a reply never differs from
    its schema."""

    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema", description="a JSON schema, as an object, true or false")
    name: str | None = Field(default=None, description="a text")
    description: str | None = Field(default=None, description="a text")
    strict: bool | None = Field(default=None, description="true or false")


class ResponseFormat(JsonFields):
    """text; json_object, any JSON object, or one of `schema`; json_schema, JSON of the schema in the field of that name."""

    type: Literal["text", "json_object", "json_schema"] = Field(description='"text", "json_object" or "json_schema"')
    json_schema: JsonSchema | None = Field(default=None, description='{"schema": ...}')
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="a JSON schema")

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with the type json_schema, and only then")
        return self

    def schema_of_text(self) -> str | None:
        """The schema as JSON; None for plain text."""
        if self.type == "text":
            return None
        found = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        return json.dumps({"type": "object"} if found is None else found)


CHAIN_SETTINGS = tuple(field.name for field in fields(ChainSettings))

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]


class AdapterScale(JsonFields):
    """An adapter of the server, and what it is multiplied by."""

    id: Annotated[int, Field(ge=0)] = Field(description="the number of an adapter, as GET /lora-adapters lists them")
    scale: float = Field(default=1.0, description="a number, 0 for off")


AdapterScales = Annotated[list[AdapterScale], Field(max_length=1024)]


class AdapterRequest(RootModel[AdapterScales]):
    """POST /lora-adapters: what adapters are multiplied by in requests that do not say; those that are left out are off."""

    root: AdapterScales = Field(description='a list of adapters, as [{"id": 0, "scale": 0.5}]')


def _samplers(given: list[str] | str) -> list[str] | str:
    """Raises ValueError for names that there are not."""
    try:
        Options.of({"samplers": given})
    except ModelError:
        raise ValueError(f"{given!r}: expected names, each once, of {', '.join(SAMPLERS)}, or their letters") from None
    return given


class Sampling(JsonFields):
    """What both endpoints take. top_k, min_p, repeat_penalty, samplers with what they need, ignore_eos and speculative.n_max are not
    OpenAI's. user,
    safety_identifier, prompt_cache_key, metadata, store and service_tier change nothing."""

    model: str | None = Field(default=None, description="the name of the model, a text")
    stream: bool | None = Field(default=None, description="true or false")
    stream_options: StreamOptions | None = Field(default=None, description='{"include_usage": true or false}')
    max_tokens: int | None = Field(default=None, description="a whole number; below 0: as many as there may be")
    temperature: Annotated[float, Field(ge=0)] | None = Field(default=None, description="a number of at least 0")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="a number from 0 to 1")
    top_k: Annotated[int, Field(lt=2**31)] | None = Field(default=None, description="a whole number up to 2147483647; 0 or below: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="a number from 0 to 1")
    seed: int | None = Field(default=None, description="a whole number; below 0: any")
    stop: Annotated[StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None, BeforeValidator(_without_empty_stops)] = (
        Field(default=None, description=f"a text of at most {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS} of them")
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(default=None, description="a number from -2 to 2")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(default=None, description="a number from -2 to 2")
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(default=None, description="a number from 0.01 to 100")
    typical_p: Share | None = Field(default=None, description="a number from 0 to 1")
    top_n_sigma: float | None = Field(default=None, description="a number; 0 or below: off")
    xtc_probability: Share | None = Field(default=None, description="a number from 0 to 1")
    xtc_threshold: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="a number above 0, up to 1")
    dynatemp_range: Positive | None = Field(default=None, description="a number of at least 0")
    dynatemp_exponent: Positive | None = Field(default=None, description="a number of at least 0")
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = Field(default=None, description="0, 1 or 2")
    mirostat_tau: Positive | None = Field(default=None, description="a number of at least 0")
    mirostat_eta: Positive | None = Field(default=None, description="a number of at least 0")
    dry_multiplier: Positive | None = Field(default=None, description="a number of at least 0")
    dry_base: Annotated[float, Field(ge=1)] | None = Field(default=None, description="a number of at least 1")
    dry_allowed_length: Annotated[int, Field(ge=1)] | None = Field(default=None, description="a whole number of at least 1")
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="a whole number of at least -1")
    dry_sequence_breakers: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description=f"a list of at most {MAX_STOPS} texts"
    )
    samplers: Annotated[list[str] | str, AfterValidator(_samplers)] | None = Field(
        default=None, description=f"a list of names, each once, of {', '.join(SAMPLERS)}, or their letters"
    )
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = Field(
        default=None, description=f"a grammar in llama.cpp's language, of at most {MAX_GRAMMAR_CHARS} characters"
    )
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = Field(
        default=None, description='at most 1024 token ids, each with a number from -100 to 100, as {"50": -100}'
    )
    ignore_eos: bool | None = Field(default=None, description="true or false")
    speculative_n_max: Annotated[int, Field(ge=0)] | None = Field(
        default=None, alias="speculative.n_max", description="a whole number of at least 0"
    )
    lora: AdapterScales | None = Field(default=None, description='a list of adapters, as [{"id": 0, "scale": 0.5}]; [] for none')
    response_format: ResponseFormat | None = Field(default=None, description='{"type": "text"}, "json_object" or "json_schema"')
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="a whole number from 1 to 128")
    user: str | None = Field(default=None, description="a text")
    safety_identifier: str | None = Field(default=None, description="a text")
    prompt_cache_key: str | None = Field(default=None, description="a text")
    metadata: dict[str, Any] | None = Field(default=None, description="an object")
    store: bool | None = Field(default=None, description="true or false")
    service_tier: str | None = Field(default=None, description="a text")

    def generate_options(self, n_vocab: int, limit: int, default: int, wanted: int | None) -> GenerateOptions:
        """limit: tokens that a reply has at most, whatever is wanted; default: without a number. Raises BadRequest."""
        wanted = default if wanted is None else limit if wanted < 0 else wanted
        options: GenerateOptions = {
            "max_tokens": min(wanted, limit),
            "seed": secrets.randbits(SEED_BITS) if self.seed is None or self.seed < 0 else self.seed & 0xFFFFFFFF,
            "logit_bias": _bias(self.logit_bias or {}, n_vocab),
        }
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.top_p is not None:
            options["top_p"] = self.top_p
        if self.top_k is not None:
            options["top_k"] = max(0, self.top_k)
        if self.min_p is not None:
            options["min_p"] = self.min_p
        named = {name: getattr(self, name) for name in CHAIN_SETTINGS}
        options |= cast(GenerateOptions, {name: value for name, value in named.items() if value is not None})
        if self.speculative_n_max is not None:
            options["draft_max"] = self.speculative_n_max
        if self.lora is not None:
            options["lora"] = [(each.id, each.scale) for each in self.lora]
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
        if self.grammar:
            if options.get("json_schema") is not None:
                raise BadRequest("[server] grammar: expected none beside response_format, for each says what the text is", "grammar")
            try:
                to_lark(self.grammar)
            except GbnfError as e:
                raise BadRequest(str(e), "grammar") from e
            options["grammar"] = self.grammar
        if self.ignore_eos:
            if options.get("grammar") is not None:
                raise BadRequest("[server] ignore_eos: expected false with grammar, which says where the text ends", "ignore_eos")
            if options.get("json_schema") is not None:
                raise BadRequest("[server] ignore_eos: expected false with response_format, which says where the text ends", "ignore_eos")
            options["ignore_eos"] = True
        return options


class CompletionRequest(Sampling):
    """POST /v1/completions.

    prompt    one, or several, each of which gets n choices
    logprobs  how many of the likeliest tokens to tell at each step
    best_of   texts that are made for a prompt; the n whose tokens are the likeliest on average are its choices
    suffix    what stands behind the text that is made, for models that were trained to fill in
    echo      the prompt stands in front of the text
    """

    prompt: PromptText | TokenIds | Annotated[list[PromptText], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)] = (
        Field(description="a text or a list of token ids, neither of them empty, or a list of such")
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="a whole number from 0 to 20")
    echo: bool | None = Field(default=None, description="true or false")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="a whole number from 1 to 128")
    suffix: str | None = Field(default=None, description="a text")

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of is {self.best_of}, expected at least n, which is {self.n or 1}")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("best_of above n needs stream: false, for the best are known at the end alone")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported, for those of the prompt are not known; leave one of them out")
        if self.suffix and not (isinstance(self.prompt, str) or isinstance(self.prompt[0], str)):
            raise ValueError("suffix needs a prompt that is a text")
        return self

    @property
    def texts(self) -> int:
        """That are made for a prompt."""
        return self.best_of or self.n or 1

    def prompts(self) -> list[str] | list[list[int]]:
        """Those of the request."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def options(self, n_vocab: int, limit: int) -> GenerateOptions:
        options = self.generate_options(n_vocab, limit, DEFAULT_COMPLETION_TOKENS, self.max_tokens)
        options["logprobs"] = self.logprobs
        return options


PARTS_OF_OTHERS = {
    "image_url": "images are",
    "input_image": "images are",
    "image": "images are",
    "input_audio": "audio is",
    "audio": "audio is",
    "video_url": "video is",
    "file": "files are",
    "input_file": "files are",
}


class TextPart(JsonFields):
    """A piece of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal"] = Field(default="text", description='"text"')
    text: str = Field(description="a text")

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind in PARTS_OF_OTHERS:
            raise ValueError(f"{PARTS_OF_OTHERS[kind]} not supported, messages are of text alone")
        if kind == "refusal" and "refusal" in data:
            return {"type": kind, "text": data["refusal"]}
        return data


class CalledFunction(JsonFields):
    """What a call of a message calls. arguments: JSON, or the object that it stands for."""

    name: Annotated[str, Field(min_length=1)] = Field(description="the name of a function, a text")
    arguments: str | dict[str, Any] = Field(default="{}", description='a text of JSON, as "{\\"city\\": \\"Oslo\\"}"')


class MessageCall(JsonFields):
    """A call of an assistant's message, as its reply had it."""

    id: str | None = Field(default=None, description="a text")
    type: Literal["function"] = Field(default="function", description='"function"')
    function: CalledFunction = Field(description='{"name": ..., "arguments": ...}')
    index: int | None = Field(default=None, description="a whole number")

    def plain(self, place: int) -> dict[str, Any]:
        """As templates take it."""
        return {"id": self.id or f"call_{place}", "type": "function", "function": self.function.model_dump()}


FUNCTION_CALL_ID = "call_function"
"""Of calls and results in the form that OpenAI had before tools, which have none."""


class ChatMessage(JsonFields):
    """role: a template says which it knows. What replies have, also those of others, may come back; audio may not.

    reasoning_content, reasoning  given to the template
    refusal                       the content, where there is no other
    function_call                 a call in the form before tools; role "function" is its result
    parsed, annotations           of replies; change nothing
    """

    MAY_BE_EMPTY = ("tool_calls", "tool_call_id", "function_call", "refusal", "annotations", "reasoning")

    role: Annotated[str, Field(min_length=1, max_length=64)] = Field(description='a text of 1 to 64 characters, as "user"')
    content: str | list[TextPart] = Field(default="", description='a text, or a list of parts, as {"type": "text", "text": "Hello"}')
    name: str | None = Field(default=None, description="a text")
    reasoning_content: str | None = Field(default=None, description="a text")
    reasoning: str | None = Field(default=None, description="a text")
    parsed: Any = None
    tool_calls: list[MessageCall] | None = Field(
        default=None, description='a list of calls, as {"id": "1", "type": "function", "function": {"name": ..., "arguments": ...}}'
    )
    tool_call_id: str | None = Field(default=None, description="the id of a call, a text")
    function_call: CalledFunction | None = Field(default=None, description='{"name": ..., "arguments": ...}')
    refusal: str | None = Field(default=None, description="a text")
    audio: Annotated[None, nothing_but(why="audio is not supported, messages are of text alone")] = None
    annotations: list[Any] | None = Field(default=None, description="a list")

    @model_validator(mode="before")
    @classmethod
    def _need_content(cls, data: Any) -> Any:
        """Before nulls are dropped: a content of null is an empty one. An assistant's message may do without."""
        if isinstance(data, dict) and "content" not in data and data.get("role") != "assistant":
            raise ValueError('content is missing; expected a message as {"role": "user", "content": "Hello"}')
        return data

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are in a message of the role assistant; this one is of {self.role}")
        return self

    def plain(self) -> dict[str, Any]:
        """As templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        calls = [call.plain(i) for i, call in enumerate(self.tool_calls or [])]
        if self.function_call is not None:
            calls.append({"id": FUNCTION_CALL_ID, "type": "function", "function": self.function_call.model_dump()})
        role, id = ("tool", FUNCTION_CALL_ID) if self.role == "function" else (self.role, self.tool_call_id)
        optional = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "tool_calls": calls or None,
            "tool_call_id": id,
        }
        return {"role": role, "content": content or self.refusal or ""} | {k: v for k, v in optional.items() if v is not None}


class ChatRequest(Sampling):
    """POST /v1/chat/completions. functions and function_call are tools as OpenAI had them before. What goes to the template:
    chat_template_kwargs, and by names of their own enable_thinking, reasoning_effort, documents and add_generation_prompt.
    continue_final_message is what happens anyway.

    reasoning_format  none: what a model thinks stays in the content, with its marks
    """

    MAY_BE_EMPTY = ("tools", "tool_choice", "functions", "function_call")

    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(
        description='at least one message, as {"role": "user", "content": "Hello"}'
    )
    max_completion_tokens: int | None = Field(default=None, description="a whole number; below 0: as many as there may be")
    logprobs: bool | None = Field(default=None, description="true or false")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="a whole number from 0 to 20")
    tools: list[dict[str, Any]] | None = Field(
        default=None, description='a list of tools, as {"type": "function", "function": {"name": ..., "parameters": ...}}'
    )
    tool_choice: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = Field(
        default=None, description='"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = Field(default=None, description="true or false")
    functions: list[dict[str, Any]] | None = Field(default=None, description='a list of functions, as {"name": ..., "parameters": ...}')
    function_call: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = Field(
        default=None, description='"auto", "none", or {"name": ...}'
    )

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description='an object, as {"enable_thinking": false}')
    enable_thinking: bool | None = Field(default=None, description="true or false")
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(default=None, description='a text, as "low"')
    documents: list[dict[str, Any]] | None = Field(default=None, description="a list of objects")
    add_generation_prompt: bool | None = Field(default=None, description="true or false")
    continue_final_message: bool | None = Field(default=None, description="true or false")
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = Field(
        default=None, description='"auto", "none", "deepseek" or "deepseek-legacy"'
    )

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def reads_thoughts(self) -> bool:
        """Whether what the model thinks is told apart from its answer: not of JSON, which is all of the reply, unless it may be a call."""
        json_alone = self.response_format is not None and self.response_format.type != "text" and not self.tools
        return self.reasoning_format != "none" and not json_alone

    def use(self) -> ToolUse | None:
        """The tools that the reply may call. Raises BadRequest."""
        tools = self.tools or [{"type": "function", "function": each} for each in self.functions or []]
        choice, field = (self.tool_choice, "tool_choice") if self.tools or not self.functions else (self.function_call, "function_call")
        try:
            return tool_use(tools or None, choice, parallel=self.parallel_tool_calls is not False and not self.functions)
        except ModelError as e:
            raise BadRequest(f"[server] {str(e).removeprefix('[tools] ')}", field if field in str(e) else "tools") from e

    def variables(self) -> dict[str, Any]:
        """Of the template."""
        found = {
            "enable_thinking": self.enable_thinking,
            "reasoning_effort": self.reasoning_effort,
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt,
        }
        if self.reasoning_effort == "none":  # OpenAI's word for no thinking
            found |= {"reasoning_effort": None, "enable_thinking": False}
        return {name: value for name, value in found.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def texts(self) -> int:
        """That are made for the conversation."""
        return self.n or 1

    def options(self, n_vocab: int, limit: int) -> GenerateOptions:
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options = self.generate_options(n_vocab, limit, limit, wanted)
        options["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return options


class TokenizeRequest(JsonFields):
    """POST /tokenize. add_special: what the model puts around a text; parse_special: names of special tokens are those; with_pieces: the
    text of each token, too."""

    content: str = Field(description="a text")
    add_special: bool = Field(default=False, description="true or false")
    parse_special: bool = Field(default=True, description="true or false")
    with_pieces: bool = Field(default=False, description="true or false")


class DetokenizeRequest(JsonFields):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(description="a list of token ids")


MAX_TEXTS = 2048
"""OpenAI's, of a request for embeddings."""


class EmbeddingRequest(JsonFields):
    """POST /v1/embeddings."""

    model: str | None = Field(default=None, description="a text")
    input: PromptText | TokenIds | Annotated[list[PromptText | TokenIds], Field(min_length=1, max_length=MAX_TEXTS)] = Field(
        description=f"a text, token ids, or a list of these, none of them empty, at most {MAX_TEXTS}"
    )
    encoding_format: Literal["float", "base64"] = Field(default="float", description='"float" or "base64"')
    dimensions: int | None = Field(default=None, ge=1, description="a whole number, 1 or more: vectors are cut to as many values")
    user: str | None = Field(default=None, description="a text")

    def texts(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        ids = [each for each in self.input if isinstance(each, int)]
        return [ids] if ids else [each for each in self.input if not isinstance(each, int)]


class ContentEmbedding(JsonFields):
    """POST /embedding, in llama-server's form. embd_normalize: -1 as the model gives them, 2 (default) of length 1."""

    content: PromptText | TokenIds | Annotated[list[PromptText | TokenIds], Field(min_length=1, max_length=MAX_TEXTS)] = Field(
        description=f"a text, token ids, or a list of these, none of them empty, at most {MAX_TEXTS}"
    )
    embd_normalize: Literal[-1, 2] = Field(default=2, description="-1 (not at all) or 2 (to length 1)")

    def texts(self) -> list[str | list[int]]:
        return EmbeddingRequest(input=self.content).texts()


class DocumentText(JsonFields):
    """A document of a rerank request."""

    text: str = Field(description="a text")


class RerankRequest(JsonFields):
    """POST /v1/rerank."""

    model: str | None = Field(default=None, description="a text")
    query: PromptText = Field(description="a text that is not empty")
    documents: Annotated[list[str | DocumentText], Field(min_length=1, max_length=MAX_TEXTS)] = Field(
        description=f'a list of 1 to {MAX_TEXTS} texts, or of {{"text": ...}}'
    )
    top_n: int | None = Field(default=None, ge=1, description="a whole number, 1 or more")
    return_documents: bool = Field(default=False, description="true or false")

    def plain(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse(kind: type[RequestT], body: bytes, unknown: Callable[[str], None] | None = None) -> RequestT:
    """unknown: gets the names of fields that there are not, which are left out; without it they are refused.

    Raises BadRequest naming a field that is wrong, what was expected, and what came.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        if errors[0]["type"] == "json_invalid":
            raise BadRequest(f"[server] the body is no JSON: {errors[0]['msg'].removeprefix('Invalid JSON: ')}") from e
        places = {tuple(_place(kind, error)[0]) for error in errors if error["type"] == "extra_forbidden"}
        if unknown is not None and places:
            return parse(kind, json.dumps(_without(from_json(body), places, unknown)).encode(), unknown)
        first = errors[0]["loc"][:1]
        path, expected, error = max((_place(kind, error) for error in errors if error["loc"][:1] == first), key=lambda found: len(found[0]))
        where = ".".join(map(str, path))
        raise BadRequest(f"[server] {where or 'the body'}: {_said(kind, expected, error, from_json(body), path)}", where or None) from e


def _without(body: Any, places: set[tuple[str | int, ...]], unknown: Callable[[str], None]) -> Any:
    """A body without the fields at these places."""
    for *path, name in places:
        owner = body
        for part in path:
            owner = owner[part]
        del owner[name]
        unknown(".".join(str(part) for part in (*path, name) if isinstance(part, str)))
    return body


Place = tuple[list[str | int], str, ErrorDetails]


def _place(kind: type[BaseModel], error: ErrorDetails) -> Place:
    """The path of what is wrong and what is expected there. Names that pydantic gives to members of a union are no part of it."""
    path: list[str | int] = []
    model: type[BaseModel] | None = kind
    expected = "an object"
    if issubclass(kind, RootModel):
        root = kind.model_fields["root"]
        model, expected = next(_models(root.annotation), None), root.description or expected
    for part in error["loc"]:
        if model is None:
            break  # within a value that is reported whole
        field = _fields(model).get(part)
        if field is not None:
            path.append(part)
            expected = field.description or "nothing"
            model = next(_models(field.annotation), None)
        elif isinstance(part, int) or (error["type"] == "extra_forbidden" and part == error["loc"][-1]):
            path.append(part)
    return path, expected, error


def _fields(model: type[BaseModel]) -> dict[str | int, FieldInfo]:
    """Those of an object, by the names that they have in JSON."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _said(kind: type[BaseModel], expected: str, error: ErrorDetails, body: Any, path: Sequence[str | int]) -> str:
    if error["type"] == "extra_forbidden":
        near = did_you_mean(str(path[-1]), map(str, _fields(kind))) if len(path) == 1 else ""
        return f"is no field of this endpoint{near and '.' + near}"
    if error["type"] == "missing":
        return f"is missing; expected {expected}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    value = body
    for part in path:
        value = value[part]
    shown = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
    return f"expected {expected}; got {shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + ' ...'}"


def _bias(given: dict[str, float], n_vocab: int) -> dict[int, float]:
    """-100 bans a token, as with OpenAI."""
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < n_vocab):
            raise BadRequest(f"[server] logit_bias: {key!r} is no token id, expected 0..{n_vocab - 1}", "logit_bias")
        found[int(key)] = float("-inf") if value == -100 else value
    return found
