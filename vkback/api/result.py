"""What a generation gives: text, tokens, log probabilities, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkback.api.messages import Message
from vkback.api.tools.call import ToolCall

FinishReason = Literal["eos", "stop", "length", "context", "closed"]
"""An end-of-text token; a stop string or token, or JSON that is whole; max_tokens; the context is full; the stream was left before any of
these."""


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens. Compile time is separate and is in no speed.

    compile_s      kernels made ready
    reused_tokens  of the prompt that were in the KV cache already
    prompt_tokens  of the prompt that were not; all but the last went through the model in prompt_s, the last with the first one generated
    decode_tokens  generated, in decode_s
    draft_tokens, draft_accepted  drafts that went through the model with them, and those that it picked itself
    experts_wanted, experts_found  experts of layers with a cache of them that steps wanted, prompts' included, and those that lay in it
    """

    compile_s: float = 0.0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    draft_tokens: int = 0
    draft_accepted: int = 0
    experts_wanted: int = 0
    experts_found: int = 0

    @property
    def prompt_tokens_per_s(self) -> float:
        return (self.prompt_tokens - 1) / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities of one step by the model's own logits, before penalties, temperature and filters.

    top  (token, text, log probability) of the likeliest tokens, the likeliest first
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream: text, and the tokens since the last piece. Part of a character, or of a possible stop string, is held back.

    reasoning   of a chat: a piece of what the model thinks before it answers
    tool_calls  of a chat with tools: calls that have become whole
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Result:
    """A whole generation.

    text        of the tokens; empty where the model's file has no vocabulary
    tokens      all that were made, an end-of-text token included, of which `text` has nothing
    seed        gives it again
    reasoning   of a chat: what the model thought before it answered with `text`, without the marks around it
    tool_calls  of a chat with tools: those that the model calls; they are not in `text`
    messages    of a chat: what it adds to the conversation, this reply and, with max_rounds, the calls and results before it
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    messages: tuple[Message, ...] = ()

    def __str__(self) -> str:
        return self.text
