"""Endpoints in llama-server's form: /completion, /infill, /slots."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vkback.api import Chunk, GenerateOptions, Result
from vkback.gguf.tokenizer import Tokenizer
from vkback.server import replies
from vkback.server.errors import BadRequest, ServerError
from vkback.server.schema import MAX_STOPS, JsonFields, PromptText, Sampling, StopText, TokenId

MAX_BIASES = 1024


class NativeFields(Sampling):
    """What both take. n_probs: how many of the likeliest tokens to tell at each step. cache_prompt, id_slot, samplers and others of
    llama-server's that change nothing are left out."""

    n_predict: int | None = Field(default=None, description="a whole number; below 0: as many as there may be")
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="a whole number from 0 to 20")
    logit_bias: Any = Field(default=None, description="a list of pairs, as [[50, -1.5], [51, false]]")
    json_schema: dict[str, Any] | bool | None = Field(default=None, description="a JSON schema, an object, true or false")
    return_tokens: bool | None = Field(default=None, description="true or false")
    response_fields: list[str] | None = Field(default=None, description="a list of names, with / between a field and one of its own")
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="a whole number of at least -1")
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="a text, or a list of texts"
    )

    def options(self, n_vocab: int, limit: int, spell: Callable[[str], list[int]] = lambda _: []) -> GenerateOptions:
        """spell: the tokens of a text, of which logit_bias may have some."""
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        biases, self.logit_bias = self.logit_bias, None
        options = self.generate_options(n_vocab, limit, limit, wanted)
        options["logit_bias"] = _biases(biases, n_vocab, spell)
        if self.json_schema is not None:
            if options.get("grammar") is not None:
                raise BadRequest("[server] grammar: expected none beside json_schema, for each says what the text is", "grammar")
            options["json_schema"] = json.dumps(self.json_schema)
        if self.repeat_last_n is not None:
            options["penalty_last_n"] = self.repeat_last_n
        options["logprobs"] = self.n_probs or None
        return options

    @property
    def texts(self) -> int:
        """That are made for a prompt."""
        return self.n or 1


class TextPrompt(JsonFields):
    """A prompt as an object."""

    prompt_string: PromptText = Field(description="a text")


OnePrompt = PromptText | TextPrompt | Annotated[list[TokenId | PromptText], Field(min_length=1)]


class NativeCompletion(NativeFields):
    """POST /completion. prompt: a text, token ids, or both in turn; or several of these, as a list of texts is, too."""

    prompt: OnePrompt | Annotated[list[OnePrompt], Field(min_length=1)] = Field(
        description="a text, or a list of token ids and texts, not empty, or a list of such"
    )

    def prompts(self) -> list[str | list[int | str]]:
        """Each by itself."""
        several = isinstance(self.prompt, list) and not any(isinstance(part, int) for part in self.prompt)
        found: list[Any] = list(self.prompt) if several else [self.prompt]
        return [each.prompt_string if isinstance(each, TextPrompt) else each for each in found]


class InputFile(JsonFields):
    """A file beside the one that is filled in."""

    text: str = Field(description="a text")
    filename: str | None = Field(default=None, description="a text")


class InfillRequest(NativeFields):
    """POST /infill: the text between a prefix and a suffix, by a model that was trained for it. prompt: what of it stands already."""

    input_prefix: str = Field(default="", description="a text")
    input_suffix: str = Field(default="", description="a text")
    input_extra: list[InputFile] | None = Field(default=None, description='a list of files, as {"filename": ..., "text": ...}')
    prompt: str | None = Field(default=None, description="a text")


def _biases(given: Any, n_vocab: int, spell: Callable[[str], list[int]]) -> dict[int, float]:
    """[[token, bias], ...], where false bans it; or an object. A text stands for each of its tokens."""
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    found: dict[int, float] = {}
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise BadRequest(f"[server] logit_bias: expected a list of at most {MAX_BIASES} pairs, as [[50, -1.5], [51, false]]", "logit_bias")
    for pair in pairs:
        token, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        token = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token
        tokens: list[Any] = spell(token) if isinstance(token, str) else [token]
        if not tokens or not all(_is_token(each, n_vocab) for each in tokens) or not isinstance(bias, int | float):
            raise BadRequest(
                f"[server] logit_bias: {pair!r} is no pair of a text or a token id in 0..{n_vocab - 1} and a number or false", "logit_bias"
            )
        found |= dict.fromkeys(tokens, float("-inf") if bias is False else float(bias))
    return found


def _is_token(id: Any, n_vocab: int) -> bool:
    return isinstance(id, int) and not isinstance(id, bool) and 0 <= id < n_vocab


def prompt_ids(prompt: str | Sequence[int | str], tokenizer: Tokenizer) -> str | list[int]:
    """A text as it is, ids and texts in turn as ids."""
    if isinstance(prompt, str):
        return prompt
    found: list[int] = []
    for i, part in enumerate(prompt):
        found += tokenizer.encode(part, add_bos=None if i == 0 else False, add_end=False) if isinstance(part, str) else [part]
    return found


FILL_NAMES = {
    "pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
        "[PREFIX]",
        "<\uff5cfim\u2581begin\uff5c>",
    ),
    "suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
        "[SUFFIX]",
        "<\uff5cfim\u2581hole\uff5c>",
    ),
    "mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
        "[MIDDLE]",
        "<\uff5cfim\u2581end\uff5c>",
    ),
    "sep": ("<|file_sep|>",),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}
"""Of tokens that models of code have for it."""


@dataclass(frozen=True)
class Fill:
    """Token ids around the texts of a request for what is between two texts. sep, rep: before other files, and the repository."""

    pre: int
    suf: int
    mid: int | None
    sep: int | None = None
    rep: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, metadata: Any) -> Fill | None:
        """None: the model was not trained for it."""
        ids: dict[str, int | None] = {}
        for key, names in FILL_NAMES.items():
            given = metadata.get(f"tokenizer.ggml.fim_{key}_token_id")
            ids[key] = int(given) if given is not None else next((tokenizer.special[n] for n in names if n in tokenizer.special), None)
        if ids["pre"] is None or ids["suf"] is None:
            return None
        return cls(ids["pre"], ids["suf"], ids["mid"], ids["sep"], ids["rep"])

    def ids(self, tokenizer: Tokenizer, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """files: name and text of others."""

        def spelled(text: str) -> list[int]:
            return tokenizer.encode(text, add_bos=False, add_end=False)

        found: list[int] = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        if files and self.sep is not None:
            if self.rep is not None:
                found += [self.rep, *spelled("repository\n")]
            for name, text in files:
                found += [self.sep, *spelled(f"{name}\n{text}")]
            found += [self.sep, *spelled("file\n")]
        elif files:
            found += spelled("".join(f"{text}\n" for _, text in files))
        if self.mid is None:
            return [*found, self.suf, *spelled(suffix), self.pre, *spelled(prefix)]
        return [*found, self.pre, *spelled(prefix), self.suf, *spelled(suffix), self.mid]


def require_fill(fill: Fill | None, field: str) -> Fill:
    """Raises BadRequest."""
    if fill is None:
        raise BadRequest(
            "[server] this model has no tokens to fill in a text between two others; take a model of code that was trained for it", field
        )
    return fill


@dataclass
class NativeShape:
    """The reply in llama-server's form. asked: what the request said, as it came. prompts: texts and their numbers of tokens, each of which
    has so many texts. fields: of the reply, if not all."""

    model: str
    asked: dict[str, Any]
    prompts: Sequence[tuple[str, int]]
    texts: int
    fields: Sequence[str]
    stops: tuple[str, ...]
    spell: Callable[[int], bytes]
    whole_text: Callable[[Result], str]
    probs: bool
    return_tokens: bool
    index: int = 0

    def __post_init__(self) -> None:
        self._made = 0
        self._result: Result | None = None

    def choice(self, index: int) -> NativeShape:
        return self if index == 0 else NativeShape(**{**self._fields(), "index": index})

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).__dataclass_fields__}

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> Any:
        found = [self._end(result, i, result.text) for i, result in enumerate(results)]
        return found[0] if len(found) == 1 else found

    def first(self) -> str:
        return ""

    def piece(self, chunk: Chunk) -> str:
        self._made += len(chunk.tokens)
        body = {
            "index": self.index,
            "content": chunk.text,
            "tokens": list(chunk.tokens),
            "stop": False,
            "id_slot": self.index,
            "tokens_predicted": self._made,
            "tokens_evaluated": self.prompts[self.index // self.texts][1],
        }
        return replies.event(body | self._probabilities(chunk.logprobs))

    def last(self, result: Result) -> str:
        return replies.event(self._end(result, self.index, ""))

    def usage(self, usage: dict[str, Any]) -> str:
        return ""

    def done(self, usage: dict[str, Any]) -> str:
        return ""

    def error(self, error: ServerError) -> str:
        return replies.event(replies.error_body(error))

    def _end(self, result: Result, index: int, text: str) -> dict[str, Any]:
        whole = self.whole_text(result)
        word = min((s for s in self.stops if s in whole), key=whole.find, default="") if result.finish_reason == "stop" else ""
        prompt, tokens = self.prompts[index // self.texts]
        kind = {"eos": "eos", "stop": "word" if word else "eos"}.get(result.finish_reason, "limit")
        body = {
            "index": index,
            "content": text,
            "tokens": list(result.tokens) if self.return_tokens else [],
            "id_slot": index,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": tokens,
            "generation_settings": self.asked | {"seed": result.seed},
            "prompt": prompt,
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": result.timings.reused_tokens,
            "timings": replies.timings([result]),
        } | self._probabilities(result.logprobs if text else ())
        return _chosen(body, self.fields) if self.fields else body

    def _probabilities(self, logprobs: Sequence[Any]) -> dict[str, Any]:
        if not self.probs or not logprobs:
            return {}

        def entry(token: int, text: str, logprob: float) -> dict[str, Any]:
            return {"id": token, "token": text, "bytes": list(self.spell(token)), "logprob": max(logprob, replies.MIN_LOGPROB)}

        told = [entry(t.token, t.text, t.logprob) | {"top_logprobs": [entry(*each) for each in t.top]} for t in logprobs]
        return {"completion_probabilities": told}


def _chosen(body: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields that there are of those named; one within another has its own name alone."""
    found = {}
    for name in fields:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name.rpartition("/")[2]] = value
    return found


class Native:
    """The endpoints."""

    def __init__(self, server: Any) -> None:
        """server: authorizes, checks bodies, and answers."""
        self._server = server
        worker = server.worker
        self.fill = Fill.of(worker.tokenizer, worker.model.engine.model.file.metadata)

    async def completion(self, request: Request) -> Response:
        asked: NativeCompletion = await self._server.parsed(request, NativeCompletion)
        return await self._answer(request, asked, [prompt_ids(prompt, self._server.worker.tokenizer) for prompt in asked.prompts()])

    async def infill(self, request: Request) -> Response:
        asked: InfillRequest = await self._server.parsed(request, InfillRequest)
        files = [(each.filename or "file", each.text) for each in asked.input_extra or []]
        fill = require_fill(self.fill, "input_prefix")
        ids = fill.ids(self._server.worker.tokenizer, asked.input_prefix, asked.input_suffix, files)
        if asked.prompt:
            ids += self._server.worker.tokenizer.encode(asked.prompt, add_bos=False, add_end=False)
        return await self._answer(request, asked, [ids])

    async def slots(self, request: Request) -> Response:
        """How many requests run at once, and which of their places are taken."""
        self._server.authorize(request)
        worker = self._server.worker
        return JSONResponse([{"id": i, "n_ctx": worker.n_ctx, "is_processing": i < worker.running} for i in range(worker.parallel)])

    async def _answer(self, request: Request, asked: NativeFields, prompts: Sequence[str | list[int]]) -> Response:
        server, tokenizer = self._server, self._server.worker.tokenizer
        told = asked.model_dump(exclude_none=True, exclude={"prompt", "input_prefix", "input_suffix", "input_extra"})
        options = asked.options(server.worker.n_vocab, server.token_limit, partial(tokenizer.encode, add_bos=False, add_end=False))
        stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        shape = NativeShape(
            server.worker.model_name,
            told,
            [self._counted(prompt) for prompt in prompts],
            asked.texts,
            asked.response_fields or (),
            stops,
            lambda token: bytes(tokenizer.token_bytes(token, special=True)),
            lambda result: str(tokenizer.decode(result.tokens, special=True)),
            bool(asked.n_probs),
            bool(asked.return_tokens),
        )
        return await server.answer(request, asked, prompts, options, shape, chat=False)  # type: ignore[no-any-return]

    def _counted(self, prompt: str | list[int]) -> tuple[str, int]:
        """A prompt as text, and how many tokens it has."""
        worker = self._server.worker
        if isinstance(prompt, str):
            return prompt, len(worker.tokenizer.encode(prompt, add_end=False)) if worker.has_text else len(prompt)
        return worker.tokenizer.decode(prompt, special=True), len(prompt)
