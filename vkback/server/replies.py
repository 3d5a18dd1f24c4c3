"""The JSON of replies, as OpenAI's API has it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vkback.api import Chunk, Result, TokenLogprob
from vkback.api.reasoning import NO_MARKS, Marks, ReplyReader
from vkback.server.errors import ServerError

Spell = Callable[[int], bytes]
"""The bytes of a token."""

MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON has not."""


def error_body(error: ServerError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def event(body: dict[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"

WAITING = ": waiting\n\n"
"""A comment, which clients skip: it keeps those between them and the server from ending a connection without traffic."""


def finish_reason(result: Result) -> str:
    return "stop" if result.finish_reason in ("eos", "stop") else "length"


def best(results: Sequence[Result], n: int) -> list[Result]:
    """Those n of a prompt's texts whose tokens are the likeliest on average, the best first; all in their order where there are n."""
    if len(results) <= n:
        return list(results)

    def likely(result: Result) -> float:
        return sum(t.logprob for t in result.logprobs) / max(1, len(result.logprobs))

    return sorted(results, key=likely, reverse=True)[:n]


def usage(results: Sequence[Result], texts: int = 1) -> dict[str, Any]:
    """Tokens of prompts and texts; cached: of the prompts, not read again. texts: of each prompt, which counts once."""
    reused = sum(result.timings.reused_tokens for result in results[::texts])
    prompt = reused + sum(result.timings.prompt_tokens for result in results[::texts])
    made = sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """As llama-server has them: tokens of prompts known before (cache_n) and read, and tokens made, with their times."""
    cached = sum(r.timings.reused_tokens for r in results)
    read, read_s = sum(r.timings.prompt_tokens for r in results), sum(r.timings.prompt_s for r in results)
    made, made_s = sum(r.timings.decode_tokens for r in results), sum(r.timings.decode_s for r in results)
    return {"cache_n": cached, **_timed("prompt", read, read_s), **_timed("predicted", made, made_s)}


def _timed(what: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": count,
        f"{what}_ms": round(seconds * 1e3, 3),
        f"{what}_per_token_ms": round(seconds * 1e3 / count, 3) if count else 0.0,
        f"{what}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }


@dataclass
class Shape:
    """What all bodies of one choice share.

    offset  characters of the text so far, for `text_offset`
    ids     choices have `token_ids`, for the model has no vocabulary and the text is empty
    marks   how to tell what the model thinks from its answer
    """

    id: str
    model: str
    chat: bool
    spell: Spell
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    index: int = 0
    offset: int = 0
    ids: bool = False
    marks: Marks = NO_MARKS

    def __post_init__(self) -> None:
        self._reader = ReplyReader(self.marks)

    def choice(self, index: int) -> Shape:
        """The same for another choice of the reply."""
        return replace(self, index=index, offset=0)

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> dict[str, Any]:
        """Of a reply that is not streamed: a choice for each result."""
        choices = [self.choice(index)._whole_choice(result) for index, result in enumerate(results)]
        return self._head("chat.completion") | {"choices": choices, "usage": usage, "timings": timings(results)}

    def _whole_choice(self, result: Result) -> dict[str, Any]:
        if self.chat:
            self._reader.feed(result.text)
            self._reader.flush()
            thoughts = {"reasoning_content": self._reader.thoughts} if self._reader.thoughts else {}
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": self._reader.answer, **thoughts, "refusal": None}}
        else:
            choice = {"text": result.text} | self._ids(result.tokens)
        return self._choice(choice, result.logprobs, finish_reason(result))

    def _ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.ids else {}

    def first(self) -> dict[str, Any]:
        """Of a chat: who speaks."""
        return self._body("chat.completion.chunk", {"delta": {"role": "assistant", "content": ""}}, (), None)

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        choice = {"delta": _delta(*self._reader.feed(chunk.text))} if self.chat else {"text": chunk.text} | self._ids(chunk.tokens)
        return self._body("chat.completion.chunk", choice, chunk.logprobs, None)

    def last(self, result: Result) -> dict[str, Any]:
        """Why the text ends."""
        rest = self._reader.flush()
        choice: dict[str, Any] = {"delta": _delta(*rest) if any(rest) else {}} if self.chat else {"text": ""}
        return self._body("chat.completion.chunk", choice, (), finish_reason(result)) | {"timings": timings([result])}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event that `include_usage` asks for."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind if self.chat else "text_completion", "created": self.created, "model": self.model}

    def _body(self, kind: str, choice: dict[str, Any], logprobs: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
        return self._head(kind) | {"choices": [self._choice(choice, logprobs, finish)]}

    def _choice(self, choice: dict[str, Any], logprobs: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
        told = None
        if self.logprobs and (logprobs or finish is None or "message" in choice):
            told = {"content": [self._chat_token(t) for t in logprobs], "refusal": None} if self.chat else self._text_tokens(logprobs)
        return {"index": self.index, **choice, "logprobs": told, "finish_reason": finish}

    def _chat_token(self, t: TokenLogprob) -> dict[str, Any]:
        return self._chat_entry(t.token, t.text, t.logprob) | {"top_logprobs": [self._chat_entry(*entry) for entry in t.top]}

    def _chat_entry(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": _number(logprob), "bytes": list(self.spell(token))}

    def _text_tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for t in tokens:
            offsets.append(self.offset)
            self.offset += len(t.text)
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [_number(t.logprob) for t in tokens],
            "top_logprobs": [{text: _number(logprob) for _, text, logprob in t.top} for t in tokens],
            "text_offset": offsets,
        }


def _delta(thoughts: str, answer: str) -> dict[str, str]:
    return {"reasoning_content": thoughts, **({"content": answer} if answer else {})} if thoughts else {"content": answer}


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
