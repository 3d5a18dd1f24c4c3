"""The thread that has the model: a bounded queue of requests, one at a time, clients in turn.

A request's events go to the event loop that waits for them. Between two pieces of text the thread looks whether the client has left and
whether the time is over. A lost device is opened anew: the request that found it lost gets an error, those that wait are run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from vkback.api import ChatTemplateError, Chunk, GenerateOptions, LoadedModel, ModelError, Result, Session
from vkback.api.errors import ContextLengthError
from vkback.api.options import Options
from vkback.device import DeviceError, DeviceLost
from vkback.device import Timeout as DeviceTimeout
from vkback.engine.constraint import ConstraintError
from vkback.errors import VkbackError
from vkback.gguf.vocabularies import TokenizerError
from vkback.server.errors import BadRequest, ContextTooLong, LostDevice, QueueFull, ServerError, Unavailable

log = logging.getLogger("vkback.server")

JOIN_S = 15.0
"""How long the end of the server waits for the device."""

REFUSALS = (ModelError, ChatTemplateError, ConstraintError, TokenizerError)
"""What is wrong with a request. All other errors are of the model, the device or the server, and no request cures them."""

Event = Chunk | Result | ServerError
"""Pieces of text, then the whole; or an error, after which nothing comes."""

State = Literal["idle", "busy", "device_lost", "stopped"]


@dataclass(eq=False)
class QueuedRequest:
    """A request for text.

    prompt    text, token ids, or messages of a chat
    template  of the chat, in the place of the model's own
    client    whom to take turns with
    deadline  by time.monotonic(); what is made until then is the answer
    put       takes events, called in the thread of the worker
    """

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    chat: bool
    options: GenerateOptions
    client: str
    deadline: float
    put: Callable[[Event], None]
    template: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass
class Counts:
    """What has happened since the start. seconds: that requests ran."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    lost: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0


class Worker:
    """Runs requests on a model, which it closes at its end."""

    def __init__(self, load: Callable[[], LoadedModel], *, max_queue: int = 32, reuse: bool = True, alias: str | None = None) -> None:
        """load: opens the model, now and after the device was lost. reuse: keep what a prompt shares with the one before. alias: what
        clients may call the model beside its file's name; replies give it, too."""
        self._load, self._max_queue, self._reuse = load, max_queue, reuse
        self._model: LoadedModel | None = load()
        file_name = self._model.name.removesuffix(".gguf")
        self.model_name = alias or file_name
        self.model_names = {self.model_name, file_name}
        self.description, self.title = self._model.description, self._model.title
        self.n_ctx, self.n_vocab = self._model.n_ctx, self._model.n_vocab
        self.tokenizer = self._model.tokenizer
        self.has_text = self._model.engine.model.has_text
        self.device_name = self._model.engine.device.caps.name
        self._session = self._model.session()
        self._waiting: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()
        self._changed = threading.Condition()
        self._running: QueuedRequest | None = None
        self._stopping = False
        self._step_begun = 0.0
        self.state: State = "idle"
        self.counts = Counts()
        self._thread = threading.Thread(target=self._run, name="vkback-worker", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        with self._changed:
            return self._length()

    @property
    def step_s(self) -> float:
        """Seconds since the running request last gave a sign; 0 if none is running."""
        return time.monotonic() - self._step_begun if self._running else 0.0

    @property
    def model(self) -> LoadedModel:
        """What requests run on; not to be used but to ask for facts. Raises LostDevice."""
        if self._model is None:
            raise LostDevice("[server] the device was lost and could not be opened again; the server's log says why", retry_after_s=5)
        return self._model

    def chat_problem(self, template: str | None) -> str:
        """Why no conversation can be answered by a template, or without one by the model's own; "" if one can."""
        try:
            self.model.chat_ids([{"role": "user", "content": "Hello"}], template)
        except (ChatTemplateError, ModelError) as e:
            return str(e)
        return ""

    def submit(self, request: QueuedRequest) -> None:
        """Put a request at the end of its client's queue. Raises QueueFull and Unavailable."""
        with self._changed:
            if self._stopping:
                raise _ending()
            if self._length() >= self._max_queue:
                self.counts.refused += 1
                ended = self.counts.finished + self.counts.cancelled + self.counts.failed
                mean_s = self.counts.seconds / ended if ended else 1.0
                raise QueueFull(
                    f"[server] {self._max_queue} requests wait already, which is the limit; try again later",
                    retry_after_s=min(60, max(1, round(mean_s))),
                )
            self._waiting.setdefault(request.client, deque()).append(request)
            self._changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """The client has left: a request that waits is dropped, one that runs ends at its next piece."""
        request.cancelled.set()
        with self._changed:
            queue = self._waiting.get(request.client)
            if queue and request in queue:
                queue.remove(request)
                self.counts.cancelled += 1
                if not queue:
                    del self._waiting[request.client]

    def end(self) -> None:
        """Take no more requests. Those that run and wait get an error at once; the one that runs leaves the device at its next piece."""
        with self._changed:
            self._stopping = True
            left = [request for queue in self._waiting.values() for request in queue]
            self._waiting.clear()
            if self._running and not self._running.cancelled.is_set():
                self._running.cancelled.set()
                left.append(self._running)
            self._changed.notify()
        for request in left:
            request.put(_ending())

    def close(self) -> None:
        """End the thread, and close the model."""
        self.end()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.error("the device has not ended its work within %g s; it is left as it is", JOIN_S)

    def _length(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def _next(self) -> QueuedRequest | None:
        """The first request of the client whose turn it is; None at the end."""
        with self._changed:
            self._running = None
            if self.state == "busy":
                self.state = "idle"
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            client, queue = self._waiting.popitem(last=False)
            request = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the other clients
            self._running = request
            self._step_begun = time.monotonic()
            return request

    def _run(self) -> None:
        while (request := self._next()) is not None:
            begun = time.monotonic()
            try:
                self._answer(request)
            except (DeviceLost, DeviceTimeout) as e:
                self.counts.failed += 1
                self.counts.lost += 1
                self.state = "device_lost"
                log.error("%s", e)
                request.put(LostDevice(f"[server] the device was lost while this request ran, and is opened anew: try again. {e}"))
                self._reopen()
            except ServerError as e:
                self.counts.failed += 1
                request.put(e)
            except DeviceError as e:
                self._failed(request, Unavailable(str(e)))
            except ContextLengthError as e:
                self._failed(request, ContextTooLong(e.tokens, e.n_ctx, request.chat))
            except REFUSALS as e:
                self._failed(request, BadRequest(str(e)))
            except VkbackError as e:
                log.error("%s", e)
                self._failed(request, ServerError(str(e)))
            except Exception as e:
                log.exception("a request failed")
                self._failed(request, ServerError(f"[server] the request failed inside the server: {type(e).__name__}; its log says more"))
            self.counts.seconds += time.monotonic() - begun
        self.state = "stopped"
        if self._model is not None:
            with suppress(VkbackError):
                self._model.close()

    def _failed(self, request: QueuedRequest, error: ServerError) -> None:
        self.counts.failed += 1
        if self._model is not None:
            self._session = self._model.session()
        request.put(error)

    def _answer(self, request: QueuedRequest) -> None:
        if request.cancelled.is_set():
            self.counts.cancelled += 1
            return
        if time.monotonic() > request.deadline:
            raise Unavailable("[server] the request waited for its turn until its time was over; try again later", retry_after_s=5)
        if self._model is None:
            self._reopen()
        model = self.model
        self.state = "busy"
        if not self._reuse:
            self._session = model.session()
        session: Session = self._session
        options = request.options
        if request.chat:
            ids = model.chat_ids(request.prompt, request.template)  # type: ignore[arg-type]
            if stops := model.chat_format(request.template).stops:
                options = options.copy()
                options["stop"] = (*Options.of(options, model.n_vocab).stop, *stops)
        else:
            model.require_room(request.prompt)  # type: ignore[arg-type]
            ids = model.ids(request.prompt, start=True)  # type: ignore[arg-type]
        with session.stream_from(ids, **options) as stream:
            for piece in stream:
                self._step_begun = time.monotonic()
                if request.cancelled.is_set():
                    break
                request.put(piece)
                if self._step_begun > request.deadline:
                    break
            over = self._step_begun > request.deadline
            ended = stream.ended
        result = stream.result
        if over and not ended:
            result = Result(result.text, result.tokens, "length", result.timings, result.logprobs)
        timings = result.timings
        self.counts.prompt_tokens += timings.prompt_tokens
        self.counts.reused_tokens += timings.reused_tokens
        self.counts.generated_tokens += len(result.tokens)
        if request.cancelled.is_set():
            self.counts.cancelled += 1
            request.put(Unavailable("[server] the request was cancelled"))
        else:
            self.counts.finished += 1
            request.put(result)

    def _reopen(self) -> None:
        """Close what is left of the model and open it again; without success the next request tries once more."""
        if self._model is not None:
            with suppress(Exception):  # of a lost device nothing more can be asked
                self._model.close()
            self._model = None
        try:
            self._model = self._load()
            self._session = self._model.session()
        except Exception as e:  # whatever it is, the thread must go on
            log.error("the device could not be opened again: %s", e, exc_info=not isinstance(e, VkbackError))
            return
        self.state = "idle"


def _ending() -> Unavailable:
    return Unavailable("[server] the server is ending")
