"""Requests of a worker that run beside each other, over the model's batch: taken in as there is room, each with an end of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vkback.api import Chunk, Result
from vkback.api.batched import BatchedTexts, BatchText
from vkback.device import DeviceLost
from vkback.device import Timeout as DeviceTimeout
from vkback.server.errors import Unavailable
from vkback.server.queued import QueuedRequest, asked_of, require_time

if TYPE_CHECKING:
    from vkback.server.worker import Worker


class AtOnce:
    """Belongs to the worker's thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._running: dict[BatchText, QueuedRequest] = {}

    def serve(self) -> None:
        """Until the server ends."""
        worker = self._worker
        while (found := worker.take(worker.parallel - len(self._running), wait=not self._running)) is not None:
            begun = time.monotonic()
            begins: list[QueuedRequest] = []
            try:
                for request in found:
                    begins = [request]
                    self._begin(request)
                begins = []
                self._end_those_whose_time_is_over()
                self._advance()
            except (DeviceLost, DeviceTimeout) as e:
                lost = [*self._running.values(), *begins]
                self._running.clear()
                worker.lose(lost, e)
                for request in lost:
                    worker.leave(request)
            except Exception as e:  # of no request alone
                self._fail_all(e)
            worker.counts.seconds += time.monotonic() - begun

    def _texts(self) -> BatchedTexts:
        """Raises LostDevice, and what opening a batch raises."""
        model = self._worker.model_now()
        with model.using("serve", stepping=True):
            return model.batched(self._worker.parallel)

    def _begin(self, request: QueuedRequest) -> None:
        worker = self._worker
        if request.cancelled.is_set():
            worker.counts.cancelled += 1
            worker.leave(request)
            return
        try:
            require_time(request)
            if request.call is not None:
                worker.call(request, request.call)
                worker.leave(request)
                return
            texts, model = self._texts(), worker.model
            ids, options = asked_of(model, request)
            text = texts.add(ids, options, model.constraint_of(request.prompt, options), client=request.client)
        except (DeviceLost, DeviceTimeout):
            raise
        except Exception as e:  # whatever it is, the others go on
            worker.fail(request, e)
            worker.leave(request)
        else:
            self._running[text] = request

    def _end_those_whose_time_is_over(self) -> None:
        now = time.monotonic()
        for text, request in list(self._running.items()):
            late = now > request.deadline
            if late or request.cancelled.is_set():
                result = self._texts().end(text, "length" if late else "closed")
                if late and not result.tokens and not request.cancelled.is_set():
                    error = Unavailable(
                        "[server] the time of the request was over before its first token; try again later", retry_after_s=5
                    )
                    self._worker.fail(request, error)
                else:
                    self._worker.finish(request, result)
                self._left(text)

    def _advance(self) -> None:
        if not self._running:
            return
        worker, texts = self._worker, self._texts()
        if not worker.reuse:
            texts.batch.prefixes.clear()
        with worker.model.using("serve", stepping=True):
            found = texts.advance()
        worker.gave_sign()
        for text, event in found:
            request = self._running[text]
            if isinstance(event, Chunk):
                worker.piece(request, event)
                continue
            if isinstance(event, Result):
                worker.finish(request, event)
            else:
                worker.fail(request, event)
            self._left(text)

    def _left(self, text: BatchText) -> None:
        self._worker.leave(self._running.pop(text))

    def _fail_all(self, error: Exception) -> None:
        """What the batch has is worth nothing any more: those that run end with this error, and the next ones get a new batch."""
        for request in self._running.values():
            self._worker.fail(request, error)
            self._worker.leave(request)
        self._running.clear()
        self._worker.close_batch()
