"""The thread that has the model: a bounded queue of requests, clients in turn. One runs at a time, or several at once
(vkback/api/at_once.py).

A request's events go to the event loop that waits for them. Between two pieces of text the thread looks whether the client has left and
whether the time is over. A lost device is opened anew: the requests that ran get an error, those that wait are run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from vkback.api import ChatTemplateError, Chunk, FinishReason, LoadedModel, ModelError, Result, Session
from vkback.api.at_once import AtOnce, Queues
from vkback.api.batched import BatchedTexts, BatchText
from vkback.api.errors import ContextLengthError
from vkback.api.options import Options
from vkback.api.vectors import Vectors
from vkback.device import DeviceError, DeviceLost
from vkback.device import Timeout as DeviceTimeout
from vkback.engine.batch.batch import PAGE, Batch, pages_that_fit
from vkback.engine.batch.steps import CLASSES
from vkback.engine.constraint import ConstraintError
from vkback.engine.engine import Engine, EngineError
from vkback.engine.expert_cache import ExpertCounts
from vkback.engine.sampler import Sampler
from vkback.errors import VkbackError
from vkback.gguf.vocabularies import TokenizerError
from vkback.server.errors import BadRequest, ContextTooLong, LostDevice, QueueFull, ServerError, Unavailable
from vkback.server.latencies import Latencies
from vkback.server.queued import Called, QueuedRequest, asked_of, require_time

log = logging.getLogger("vkback.server")

PARALLEL, CPU_PARALLEL = CLASSES[-1], 8
"""Requests that run at once, at most, unless somebody says how many; on a CPU driver more take as much longer, and with pinned steps one
takes as long as all."""

CTX_PER_SEQUENCE = 1024
"""So many rows of the KV cache there are for each of them, or the context where it has fewer, unless somebody says how many."""

NO_TEXT = "[server] this model makes vectors of texts and no text; expected a request for /v1/embeddings or /v1/rerank"

JOIN_S = 15.0
"""How long the end of the server waits for the device."""

REFUSALS = (ModelError, ChatTemplateError, ConstraintError, TokenizerError)
"""What is wrong with a request. All other errors are of the model, the device or the server, and no request cures them."""

State = Literal["idle", "busy", "device_lost", "stopped"]


@dataclass
class Counts:
    """What has happened since the start. seconds: in which any request ran."""

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

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        *,
        parallel: int | None = 1,
        max_queue: int = 32,
        reuse: bool = True,
        alias: str | None = None,
        ctx_per_sequence: int | None = None,
    ) -> None:
        """load: opens the model, now and after the device was lost. parallel: requests that run at once, at most; None: as many as there
        is memory for, up to 8 on CPU drivers and with exact="requests", else 64. ctx_per_sequence: rows of the KV cache for each of them,
        of which one may take more while others take fewer; None: as many as there is memory for. Raises EngineError where they do not
        fit. reuse: keep what a prompt shares with those before. alias: what clients may call the
        model beside its file's name; replies give it, too."""
        self._load, self._max_queue, self.reuse = load, max_queue, reuse
        self._model: LoadedModel | None = load()
        self.facts = self._model
        """The model, also while its device is lost: for what needs none, as tokens of a text."""
        engine = self._model.engine
        few = engine.device.caps.software or engine.pinned
        self.makes_text = engine.model.architecture.causal
        self.parallel = parallel or 1 if self.makes_text else 1
        self._rows: int | None = None
        if self.makes_text and len(engine.devices) > 1:
            self.parallel = min(parallel or len(engine.devices), len(engine.devices))
        elif self.makes_text and parallel != 1:
            self.parallel, self._rows = sequences_of(engine, parallel, CPU_PARALLEL if few else PARALLEL, ctx_per_sequence)
        if engine.pinned and self.parallel == 1:
            self.reuse = False  # it may be rows that steps made, which a request alone reads
        file_name = self._model.name.removesuffix(".gguf")
        self.model_name = alias or file_name
        self.model_names = {self.model_name, file_name}
        self.description, self.title = self._model.description, self._model.title
        self.n_ctx, self.n_vocab = self._model.n_ctx, self._model.n_vocab
        self.tokenizer = self._model.tokenizer
        self.has_text = self._model.engine.model.has_text
        self.device_name = self._model.engine.device.caps.name
        self._session = Session(self._model, shared=False)
        self._open_batch()
        self._waiting: Queues[QueuedRequest] = Queues()
        self._changed = threading.Condition()
        self._running: list[QueuedRequest] = []
        self._stopping = self._broken = False
        self._step_begun = 0.0
        self.state: State = "idle"
        self.counts = Counts()
        self.latencies = Latencies()
        self._thread = threading.Thread(target=self._run, name="vkback-worker", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        with self._changed:
            return len(self._waiting)

    @property
    def step_s(self) -> float:
        """Seconds since the running requests last gave a sign; 0 if none is running."""
        return time.monotonic() - self._step_begun if self._running else 0.0

    @property
    def model(self) -> LoadedModel:
        """What requests run on; not to be used but to ask for facts. Raises LostDevice."""
        if self._model is None:
            raise LostDevice("[server] the device was lost and could not be opened again; the server's log says why", retry_after_s=5)
        return self._model

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def full(self) -> bool:
        """Whether no more requests may wait."""
        return self.queued >= self._max_queue

    @property
    def batch(self) -> Batch | None:
        """Of the requests that run at once; not to be used but to read its counters."""
        batched = self._model.opened if self._model is not None else None
        return batched.paged if batched is not None and isinstance(batched.batch, Batch) else None

    @property
    def experts(self) -> ExpertCounts | None:
        """What the cache of experts had counted when a text ended last; None: there is no such cache."""
        engine = self._model.engine if self._model is not None else None
        return engine.expert_counts if engine is not None and engine.caches_experts else None

    def chat_problem(self, template: str | None) -> str:
        """Why no conversation can be answered by a template, or without one by the model's own; "" if one can."""
        if not self.makes_text:
            return NO_TEXT
        try:
            self.facts.chat_ids([{"role": "user", "content": "Hello"}], template)
        except (ChatTemplateError, ModelError) as e:
            return str(e)
        return ""

    def set_adapters(self, scales: Mapping[int, float]) -> None:
        """What requests from here on multiply adapters by that do not say; those left out are off. Raises BadRequest for one that there is
        not."""
        adapters = self.facts.adapters
        for id in scales:
            if id >= len(adapters):
                raise BadRequest(
                    f"[server] there is no adapter {id}; expected a number below {len(adapters)}, see GET /lora-adapters", "id"
                )
        for adapter in adapters:
            adapter.scale = scales.get(adapter.id, 0.0)

    def submit(self, request: QueuedRequest) -> None:
        """Put a request at the end of its client's queue. Raises QueueFull and Unavailable."""
        with self._changed:
            if self._stopping:
                raise _ending()
            if len(self._waiting) >= self._max_queue:
                self.counts.refused += 1
                ended = self.counts.finished + self.counts.cancelled + self.counts.failed
                mean_s = self.counts.seconds / ended if ended else 1.0
                raise QueueFull(
                    f"[server] {self._max_queue} requests wait already, which is the limit; try again later",
                    retry_after_s=min(60, max(1, round(mean_s))),
                )
            self._waiting.put(request.client, request)
            self._changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """The client has left: a request that waits is dropped, one that runs ends at its next piece."""
        request.cancelled.set()
        with self._changed:
            if self._waiting.remove(request.client, request):
                self.counts.cancelled += 1

    def end(self) -> None:
        """Take no more requests. Those that run and wait get an error at once; the one that runs leaves the device at its next piece."""
        with self._changed:
            self._stopping = True
            left = self._waiting.take_all()
            for request in self._running:
                if not request.cancelled.is_set():
                    request.cancelled.set()
                    left.append(request)
            self._changed.notify()
        for request in left:
            request.put(_ending())

    def close(self) -> None:
        """End the thread, and close the model."""
        self.end()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.error("the device has not ended its work within %g s; it is left as it is", JOIN_S)

    # -- for the thread: an Owner of what runs at once (vkback/api/at_once.py)

    def take(self, running: int) -> Sequence[QueuedRequest] | None:
        with self._changed:
            while not running and not self._waiting and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            found = self._waiting.take(self.parallel - running)
            self._running += found
            if found:
                self.gave_sign()
            return found

    def turn(self) -> AbstractContextManager[Any]:
        return self.model_now().stepping("serve")

    def waited_for(self) -> bool:
        return self.model.waiting > 0

    def texts(self) -> BatchedTexts:
        self.gave_sign()
        return self.model.batched(self.parallel, rows=self._rows, reuse=self.reuse)

    def add(self, request: QueuedRequest, texts: BatchedTexts) -> BatchText | None:
        if request.cancelled.is_set():
            self.counts.cancelled += 1
            self.leave(request)
            return None
        require_time(request)
        if request.call is not None:
            self.call(request, request.call)
            self.leave(request)
            return None
        ids, options = asked_of(self.model, request)
        adapters = self.model.adapter_scales(options)
        return texts.add(ids, options, self.model.constraint_of(request.prompt, options), client=request.client, adapters=adapters)

    def over(self, request: QueuedRequest) -> FinishReason | None:
        if time.monotonic() > request.deadline:
            return "length"
        return "closed" if request.cancelled.is_set() else None

    def ended(self, request: QueuedRequest, end: Result | Exception, early: FinishReason | None = None) -> None:
        if isinstance(end, Exception):
            self.fail(request, end)
        elif early == "length" and not end.tokens and not request.cancelled.is_set():
            self.fail(
                request, Unavailable("[server] the time of the request was over before its first token; try again later", retry_after_s=5)
            )
        else:
            self.finish(request, end)
        self.leave(request)

    def lost(self, requests: Sequence[QueuedRequest], error: DeviceLost | DeviceTimeout) -> None:
        self.lose(requests, error)
        for request in requests:
            self.leave(request)

    def broken(self) -> None:
        if self._model is not None:
            try:
                self._model.close_batch()
            except Exception as e:  # whatever it is, the thread must go on
                log.error("the batch could not be closed, the device is opened anew: %s", e)
                self._broken = True

    def worked(self, seconds: float) -> None:
        self.counts.seconds += seconds
        if self._broken:
            self._broken = False
            self._reopen()

    def gave_sign(self) -> float:
        """Note that the device answers; the time, by time.monotonic()."""
        self._step_begun = time.monotonic()
        return self._step_begun

    def leave(self, request: QueuedRequest) -> None:
        """It runs no longer."""
        with self._changed:
            self._running.remove(request)
            if not self._running and self.state == "busy":
                self.state = "idle"

    def piece(self, request: QueuedRequest, chunk: Chunk) -> None:
        now, count = time.monotonic(), len(chunk.tokens)
        if not request.told:
            self.latencies.first.observe(now - request.asked)
        elif count:
            for _ in range(count):
                self.latencies.between.observe((now - request.told) / count)
        request.told = now
        request.tokens += count
        self.counts.generated_tokens += count
        if request.pieces:
            request.put(chunk)

    def finish(self, request: QueuedRequest, result: Result) -> None:
        """Its text is whole."""
        self.counts.prompt_tokens += result.timings.prompt_tokens
        self.counts.reused_tokens += result.timings.reused_tokens
        self.counts.generated_tokens += len(result.tokens) - request.tokens
        if request.cancelled.is_set():
            self.counts.cancelled += 1
            request.put(Unavailable("[server] the request was cancelled"))
        else:
            self.counts.finished += 1
            request.put(result)

    def call(self, request: QueuedRequest, make: Callable[[LoadedModel], tuple[Vectors, int]]) -> None:
        """Make the vectors or scores that it wants; texts that run go on from where they are. Within a turn."""
        with self.model.own_adapters():
            found = Called(*make(self.model))
        self.gave_sign()
        self.counts.prompt_tokens += found.tokens
        self.counts.finished += 1
        request.put(found)

    def fail(self, request: QueuedRequest, error: Exception) -> None:
        """It ends with an error of its own."""
        self.counts.failed += 1
        request.put(as_server_error(error, request))

    def lose(self, requests: Sequence[QueuedRequest], error: Exception) -> None:
        """The device was lost while these ran: open it anew."""
        self.counts.failed += len(requests)
        self.counts.lost += 1
        self.state = "device_lost"
        log.error("%s", error)
        for request in requests:
            request.put(LostDevice(f"[server] the device was lost while this request ran, and is opened anew: try again. {error}"))
        self._reopen()

    def model_now(self) -> LoadedModel:
        """The model, opened again where it was lost. Raises LostDevice."""
        if self._model is None:
            self._reopen()
        model = self.model
        self.state = "busy"
        return model

    def _run(self) -> None:
        if self.parallel > 1:
            AtOnce(self).serve()
        else:
            self._one_by_one()
        self.state = "stopped"
        if self._model is not None:
            with suppress(VkbackError):
                self._model.close()

    def _one_by_one(self) -> None:
        while found := self.take(0):
            begun = time.monotonic()
            (request,) = found
            try:
                self._answer(request)
            except (DeviceLost, DeviceTimeout) as e:
                self.lose(found, e)
            except Exception as e:  # whatever it is, the thread must go on
                if self._model is not None and not isinstance(e, ServerError):
                    self._session = Session(self._model, shared=False)
                self.fail(request, e)
            self.counts.seconds += time.monotonic() - begun
            self.leave(request)

    def _answer(self, request: QueuedRequest) -> None:
        if request.cancelled.is_set():
            self.counts.cancelled += 1
            return
        require_time(request)
        if request.call is not None:
            with self.model_now().using("serve", keep=True):
                self.call(request, request.call)
            return
        model = self.model_now()
        if not self.reuse:
            self._session = Session(model, shared=False)
        ids, options = asked_of(model, request)
        now = 0.0
        with self._session.stream_of("serve", ids, options, model.constraint_of(request.prompt, options)) as stream:
            for piece in stream:
                now = self.gave_sign()
                if request.cancelled.is_set():
                    break
                self.piece(request, piece)
                if now > request.deadline:
                    break
            ended = stream.ended
        result = stream.result
        self.finish(request, result if ended or now <= request.deadline else replace(result, finish_reason="length"))

    def _open_batch(self) -> None:
        """Memory for the requests that run at once, and, where compiling takes little of the machine, what their steps run."""
        if self._model is None or self.parallel == 1:
            return
        with self._model.using("serve"):
            batch = self._model.batched(self.parallel, rows=self._rows, reuse=self.reuse).batch
            if not isinstance(batch, Batch):
                return
            if not self._model.engine.device.caps.software:
                batch.prepare_prompts()
                for sampler in (Sampler(), Options().sampler):
                    batch.prepare(sampler=sampler)

    def _reopen(self) -> None:
        """Close what is left of the model and open it again; without success the next request tries once more."""
        if self._model is not None:
            with suppress(Exception):  # of a lost device nothing more can be asked
                self._model.close()
            self._model = None
        scales = [adapter.scale for adapter in self.facts.adapters]
        try:
            self._model = self.facts = self._load()
            for adapter, scale in zip(self._model.adapters, scales, strict=True):
                adapter.scale = scale
            self._open_batch()
            self._session = Session(self._model, shared=False)
        except Exception as e:  # whatever it is, the thread must go on
            log.error("the device could not be opened again: %s", e, exc_info=not isinstance(e, VkbackError))
            return
        self.state = "idle"


def sequences_of(engine: Engine, parallel: int | None, most: int, ctx_per_sequence: int | None) -> tuple[int, int | None]:
    """How many requests run at once, and rows of the KV cache for all of them, None for as many as there is memory for. parallel, most: as
    many as were asked for, or at most. Raises EngineError where so many rows do not fit."""
    rows = ctx_per_sequence or min(engine.n_ctx, CTX_PER_SEQUENCE)
    pages = -(-rows // PAGE)
    fit = pages_that_fit(engine, (parallel or most) * pages)
    found = parallel or max(1, fit // pages)
    if ctx_per_sequence is not None and found * pages > fit:
        raise EngineError(
            f"[server] {found} requests of {ctx_per_sequence} rows take {found * pages} pages of the KV cache, memory has room for {fit}; "
            "expected fewer: give a smaller --ctx-per-sequence or --parallel, or a smaller type of cache"
        )
    return found, found * pages * PAGE if ctx_per_sequence is not None else None


def as_server_error(error: Exception, request: QueuedRequest) -> ServerError:
    """What a client is told of an error."""
    if isinstance(error, ServerError):
        return error
    if isinstance(error, DeviceError):
        return Unavailable(str(error))
    if isinstance(error, ContextLengthError):
        return ContextTooLong(error.tokens, error.n_ctx, request.chat)
    if isinstance(error, REFUSALS):
        return BadRequest(str(error))
    if isinstance(error, VkbackError):
        log.error("%s", error)
        return ServerError(str(error))
    log.error("a request failed", exc_info=error)
    return ServerError(f"[server] the request failed inside the server: {type(error).__name__}; its log says more")


def _ending() -> Unavailable:
    return Unavailable("[server] the server is ending")
