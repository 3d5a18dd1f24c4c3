"""The JSON of replies, as OpenAI's API has it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vkback.api import Chunk, Result, TokenLogprob
from vkback.api.message import MessageReader, Piece
from vkback.api.tools.call import ToolCall
from vkback.server.errors import ServerError

Spell = Callable[[int], bytes]
"""The bytes of a token."""

MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON has not."""


def error_body(error: ServerError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code, **error.more}}


def event(body: dict[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"

WAITING = ": waiting\n\n"
"""A comment, which clients skip: it keeps those between them and the server from ending a connection without traffic."""


def finish_reason(result: Result) -> str:
    return "stop" if result.finish_reason in ("eos", "stop") else "length"


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
    drafted, accepted = sum(r.timings.draft_tokens for r in results), sum(r.timings.draft_accepted for r in results)
    drafts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    wanted, found = sum(r.timings.experts_wanted for r in results), sum(r.timings.experts_found for r in results)
    experts = {"experts_wanted": wanted, "experts_found": found} if wanted else {}
    return {"cache_n": cached, **_timed("prompt", read, read_s), **_timed("predicted", made, made_s), **drafts, **experts}


def _timed(what: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": count,
        f"{what}_ms": round(seconds * 1e3, 3),
        f"{what}_per_token_ms": round(seconds * 1e3 / count, 3) if count else 0.0,
        f"{what}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }


class ReplyShape(Protocol):
    """The JSON of a reply in the form of one API: `whole` as one object, the rest as text of events. `choice` gives the same for another
    choice of the reply."""

    def choice(self, index: int) -> ReplyShape: ...

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> Any: ...

    def first(self) -> str: ...

    def piece(self, chunk: Chunk) -> str: ...

    def last(self, result: Result) -> str: ...

    def usage(self, usage: dict[str, Any]) -> str: ...

    def done(self, usage: dict[str, Any]) -> str: ...

    def error(self, error: ServerError) -> str: ...


@dataclass
class Shape:
    """What all bodies of one choice share.

    offset  characters of the text so far, for `text_offset`
    fingerprint  what the bits of a text depend on, beside the request
    ids     choices have `token_ids`, for the model has no vocabulary and the text is empty
    reader  makes what tells thoughts, answer and calls apart
    legacy  a call is a `function_call`, as before there were tools
    echo    the prompts, where they stand in front of their texts, of which each has so many
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
    fingerprint: str = ""
    reader: Callable[[], MessageReader] = MessageReader
    legacy: bool = False
    echo: Sequence[str] = ()
    texts: int = 1

    def __post_init__(self) -> None:
        self._reader = self.reader()
        self._calls = 0

    def choice(self, index: int) -> Shape:
        """The same for another choice of the reply."""
        return replace(self, index=index, offset=0)

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> dict[str, Any]:
        """Of a reply that is not streamed: a choice for each result."""
        choices = [self.choice(index)._whole_choice(result) for index, result in enumerate(results)]
        return self._head("chat.completion") | {"choices": choices, "usage": usage, "timings": timings(results)}

    def _whole_choice(self, result: Result) -> dict[str, Any]:
        finish = finish_reason(result)
        if self.chat:
            self._reader.feed(result.text)
            self._reader.flush()
            message: dict[str, Any] = {"role": "assistant", "content": self._reader.text, "refusal": None}
            if self._reader.thoughts:
                message["reasoning_content"] = self._reader.thoughts
            if calls := self._reader.calls:
                message["content"] = self._reader.text or None
                message |= {"function_call": _function(calls[0])} if self.legacy else {"tool_calls": [call.plain() for call in calls]}
            choice: dict[str, Any] = {"message": message}
        else:
            choice = {"text": self._echoed() + result.text} | self._ids(result.tokens)
        return self._choice(choice, result.logprobs, self._finish(finish))

    def _finish(self, finish: str) -> str:
        """A reply that ends with calls says so."""
        if finish == "stop" and self._reader.calls:
            return "function_call" if self.legacy else "tool_calls"
        return finish

    def _ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.ids else {}

    def _echoed(self) -> str:
        """What stands in front of a choice's text."""
        return self.echo[self.index // self.texts] if self.echo else ""

    def first(self) -> str:
        """Of a chat who speaks; else what is repeated of the prompt."""
        if self.chat:
            return self._event({"delta": {"role": "assistant", "content": ""}})
        return self._event({"text": echo}) if (echo := self._echoed()) else ""

    def piece(self, chunk: Chunk) -> str:
        if not self.chat:
            return self._event({"text": chunk.text} | self._ids(chunk.tokens), chunk.logprobs)
        deltas = self._deltas(self._reader.feed(chunk.text)) or [{"content": ""}]
        return "".join(self._event({"delta": delta}, chunk.logprobs if i == 0 else ()) for i, delta in enumerate(deltas))

    def last(self, result: Result) -> str:
        """Why the text ends."""
        if not self.chat:
            return event(self._body({"text": ""}, (), finish_reason(result)) | {"timings": timings([result])})
        lines = [self._event({"delta": delta}) for delta in self._deltas(self._reader.flush())]
        end = self._body({"delta": {}}, (), self._finish(finish_reason(result))) | {"timings": timings([result])}
        return "".join([*lines, event(end)])

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """Of a call first its name, then its arguments."""
        found: list[dict[str, Any]] = [_delta(piece.thoughts, piece.text)] if piece.thoughts or piece.text else []
        for call in piece.calls:
            if self.legacy:
                found.append({"function_call": _function(call)})
                continue
            head = {"index": self._calls, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            found += [{"tool_calls": [head]}, {"tool_calls": [{"index": self._calls, "function": {"arguments": call.arguments}}]}]
            self._calls += 1
        return found

    def usage(self, usage: dict[str, Any]) -> str:
        """The event that `include_usage` asks for."""
        return event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage})

    def done(self, usage: dict[str, Any]) -> str:
        """The end of a stream, with what all of it used."""
        return DONE

    def error(self, error: ServerError) -> str:
        """As the last event of a stream."""
        return event(error_body(error))

    def _event(self, choice: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> str:
        return event(self._body(choice, logprobs, None))

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}

    def _body(self, choice: dict[str, Any], logprobs: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [self._choice(choice, logprobs, finish)]}

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


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _delta(thoughts: str, answer: str) -> dict[str, str]:
    return {"reasoning_content": thoughts, **({"content": answer} if answer else {})} if thoughts else {"content": answer}


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
