"""A request for text as it waits and runs, and what a generation takes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vkback.api import Chunk, GenerateOptions, LoadedModel, Result
from vkback.api.model import ChatPrompt
from vkback.api.options import Options
from vkback.api.vectors import Vectors
from vkback.server.errors import ServerError, Unavailable


@dataclass(frozen=True)
class Called:
    """What a request for vectors or scores gets, and the tokens of its texts."""

    vectors: Vectors
    tokens: int


Event = Chunk | Result | Called | ServerError
"""Pieces of text, then the whole; vectors; or an error, after which nothing comes."""


@dataclass(eq=False)
class QueuedRequest:
    """A request for text.

    prompt    text, token ids, or that of a chat
    client    whom to take turns with
    deadline  by time.monotonic(); what is made until then is the answer
    put       takes events, called in the thread of the worker
    pieces    whether it wants pieces of text, or the whole alone
    call      makes what it wants in the place of text, all at once, with the tokens that took; the rest is then of no meaning
    asked     when it came, by time.monotonic(); told: when its last piece went, 0: none has; tokens: of its pieces so far
    """

    prompt: str | Sequence[int] | ChatPrompt
    chat: bool
    options: GenerateOptions
    client: str
    deadline: float
    put: Callable[[Event], None]
    pieces: bool = True
    call: Callable[[LoadedModel], tuple[Vectors, int]] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    asked: float = field(default_factory=time.monotonic)
    told: float = 0.0
    tokens: int = 0


def asked_of(model: LoadedModel, request: QueuedRequest) -> tuple[list[int], Options]:
    """Token ids of a request's prompt, and its options, checked. Raises what is wrong with them."""
    options, prompt = Options.of(request.options, model.n_vocab), request.prompt
    if isinstance(prompt, ChatPrompt):
        return list(prompt.ids), replace(options, stop=(*options.stop, *prompt.stops))
    model.require_room(prompt)
    return model.ids(prompt, start=True), options


def require_time(request: QueuedRequest) -> None:
    """Raises Unavailable where a request's time was over before its turn."""
    if time.monotonic() > request.deadline:
        raise Unavailable("[server] the request waited for its turn until its time was over; try again later", retry_after_s=5)
