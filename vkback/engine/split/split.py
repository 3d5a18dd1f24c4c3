"""The devices before the last one: their layers, the borders between all of them, tokens and prompts through them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.device import BufferRange, Commands, Device, DeviceError
from vkback.engine.prompts import SMALLEST, Prompts
from vkback.engine.split.border import Border, Copies, HostStaging
from vkback.engine.split.relay import Flight, Relay, on_device
from vkback.engine.split.stage import TOKEN_SLOT, Slots, Stage
from vkback.engine.token_programs import INPUT_BYTES
from vkback.errors import VkbackError
from vkback.events import Report, Reported
from vkback.models.registry import Model
from vkback.ops.dispatch import Dispatch

Floats = npt.NDArray[np.float32]

PIECES_BETWEEN = 2
"""Pieces of a prompt that one device may be ahead of the next: one that is on its way, and one that is read."""

Pieces = Sequence[tuple[int, int]]
"""(begin, length) of each."""


class Split:
    """What the engine of the last layers needs of the devices before its own.

    stages  of these devices, in order
    last    the device of the engine
    """

    def __init__(self, model: Model, stages: Sequence[Stage], last: Device, report: Report | None, beside: Split | None = None) -> None:
        """Takes no memory yet. beside: of another text over the same devices and weights."""
        self._relays: list[Relay] = beside._relays if beside is not None else []
        self.stages, self.last = list(stages), last
        self._model, self._report = model, report
        self._borders: list[Border] = []
        self._feed: HostStaging | None = None
        self._relay: Relay | None = None
        self._slots: Slots | None = None

    @property
    def devices(self) -> list[Device]:
        """All of them, in the order of their layers."""
        return [*(stage.device for stage in self.stages), self.last]

    @property
    def shared(self) -> bool:
        """Whether every transfer is one allocation of the host that both devices see."""
        return all(border.shared for border in self._borders)

    # -- memory

    def allocate(self, ubatch: int) -> None:
        """Borders for pieces of so many tokens, and the caches of the other devices."""
        self.release()
        n_ctx = self.stages[0].plans.n_ctx
        # A prompt has programs of one token only where it has no others.
        many = 1 if min(ubatch, n_ctx) == 1 else 2
        rows = [1 if many == 1 else max(ubatch, SMALLEST)] * PIECES_BETWEEN + [1]
        token, piece = (self._model.graph(n, n_ctx, head="all") for n in (1, many))
        devices = self.devices
        for i, stage in enumerate(self.stages):
            assert stage.plans.part is not None
            self._borders.append(Border(devices[i], devices[i + 1], stage.plans.part.taken(token), stage.plans.part.taken(piece), rows))
        self._feed = HostStaging(self.last, [stage.device for stage in self.stages], "tokens that were picked", 2 * INPUT_BYTES)
        shared = self.shared and self._feed.shared
        self._relay = Relay(devices, None if shared else self._carry, self._relays)
        for i, stage in enumerate(self.stages):
            stage.allocate(self._borders[i - 1] if i else None, self._borders[i])
        self._slots = Slots(self.last, self._borders[-1], None)

    def crossing(self) -> LastCrossing:
        """What the programs of prompts on the last device read, in whatever memory it is."""
        return LastCrossing(self)

    @property
    def slots(self) -> Slots:
        """Of the last device."""
        assert self._slots is not None
        return self._slots

    def inputs(self, rows: int) -> dict[str, BufferRange]:
        """What programs of the last device read of the layers before, by name."""
        return self._borders[-1].inputs(rows)

    def release(self) -> None:
        """Give back all but weights."""
        with ExitStack() as ends:
            for border in self._borders:
                ends.callback(border.close)
            if self._feed is not None:
                ends.callback(self._feed.close)
            for stage in self.stages:
                ends.callback(stage.release)
            if self._slots is not None:
                ends.callback(self._slots.close)
            if self._relay is not None:
                ends.callback(self._relay.close)
        self._borders, self._feed, self._relay, self._slots = [], None, None, None

    def close(self) -> None:
        """Destroy everything but the devices."""
        self.release()
        for stage in self.stages:
            stage.close()

    # -- tokens, as vkback/engine/token_programs.py has them

    def loads(self) -> Copies:
        """As of `LayersBefore`."""
        return self._borders[-1].loads(TOKEN_SLOT, 0, 1)

    def feeds(self, one: BufferRange) -> Copies:
        """As of `LayersBefore`."""
        assert self._feed is not None
        return [(one, self._feed.written)]

    def mark(self, number: int) -> tuple[BufferRange, int]:
        """As of `LayersBefore`."""
        assert self._relay is not None
        return self._relay.mark(len(self.stages), number)

    def set_input(self, words: npt.NDArray[np.int32]) -> None:
        """As of `LayersBefore`."""
        assert self._feed is not None
        self._feed.written.map().view(np.int32)[:] = words.reshape(-1)
        self._feed.carry()

    def submit(self, number: int, commands: Sequence[Commands], *, barriers: bool = False) -> Flight:
        """As of `LayersBefore`."""
        assert self._relay is not None and self._feed is not None
        own = [
            [stage.token(number, read, self._relay.mark(i, number), barriers=barriers)]
            for i, (stage, read) in enumerate(zip(self.stages, self._feed.read, strict=True))
        ]
        return self._relay.submit([*own, commands], number)

    def quiet(self) -> None:
        """End what texts beside this one have in the queues, before work that is waited for at once."""
        if self._relay is not None:
            self._relay.quiet()

    def timed_out(self, number: int) -> bool:
        """As of `LayersBefore`."""
        return any(stage.timed_out for stage in self.stages)

    def forget_timeouts(self) -> None:
        """As of `LayersBefore`."""
        for stage in self.stages:
            stage.forget_timeouts()

    def _carry(self, at: int) -> None:
        """As of Relay."""
        if at < len(self._borders):
            self._borders[at].carry(TOKEN_SLOT)
        elif self._feed is not None:
            self._feed.carry()

    def use_barriers(self, why: str) -> None:
        """Plan the tokens of all devices anew, with a barrier between all stages."""
        for stage in self.stages:
            stage.use_barriers(why)

    # -- prompts

    def dispatches(self, prompts: Sequence[int]) -> list[tuple[Stage, list[Dispatch]]]:
        """What prompts of so many tokens, and a token, run on the devices before the last one."""
        return [(stage, stage.dispatches(prompts)) for stage in self.stages]

    def prompt(self, tokens: Sequence[int], n_past: int, last: Prompts, meanwhile: Callable[[], object] | None = None) -> Iterator[int]:
        """As `Prompts.run`, through all devices: while one reads a piece, the one before reads the next. last: of the last device."""
        for at, length in self._through(tokens, n_past, last, self._report):
            try:
                yield from last.run(tokens[at : at + length], n_past + at, meanwhile)
            except DeviceError as error:
                raise on_device(error, len(self.stages), len(self.devices), self.last) from error

    def logits(self, tokens: Sequence[int], n_past: int, last: Prompts) -> Iterator[Floats]:
        """As `Prompts.logits`, through all devices."""
        for at, length in self._through(tokens, n_past, last, None):
            yield from last.logits(tokens[at : at + length], n_past + at)

    def _pieces(self, count: int, last: Prompts) -> Pieces:
        """Of a prompt of so many tokens: as long as the smallest of the programs that the devices have for what is left."""
        found, at = [], 0
        while at < count:
            length = min(count - at, *(p.next_size(count - at) for p in (last, *(stage.prompts for stage in self.stages))))
            found.append((at, length))
            at += length
        return found

    def _through(self, tokens: Sequence[int], n_past: int, last: Prompts, report: Report | None) -> Iterator[tuple[int, int]]:
        """Pieces that the last device can read now. Each device has a thread of its own."""
        pieces = self._pieces(len(tokens), last)
        with Reported(report, "prompt", len(tokens)) as work, Pipeline(self.stages, self._borders, tokens, n_past, pieces) as pipeline:
            for i, (at, length) in enumerate(pieces):
                self.slots.slot = pipeline.take(i)
                yield at, length
                pipeline.free(i)
                work.advance(length)


class LastCrossing:
    """As `Crossing` of the last device's programs, over the borders that there are when it is asked."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def inputs(self, size: int) -> Mapping[str, BufferRange]:
        return self._split.inputs(size)

    def before(self, at: int, rows: int) -> Sequence[Commands]:
        return self._split.slots.before(at, rows)

    def after(self, program: Any, at: int, rows: int) -> Sequence[Commands]:
        return []


class Pipeline:
    """Pieces of a prompt on their way through the devices before the last one, each of which has a thread. Use as a context manager: to
    leave it is to wait for the threads, which stop at the next piece."""

    def __init__(self, stages: Sequence[Stage], borders: Sequence[Border], tokens: Sequence[int], n_past: int, pieces: Pieces) -> None:
        self._stages, self._borders, self._tokens, self._n_past, self._pieces = stages, borders, tokens, n_past, pieces
        self._stopping = threading.Event()
        self._ready: list[queue.Queue[BaseException | None]] = [queue.Queue() for _ in stages]
        self._free: list[queue.Queue[bool]] = [queue.Queue() for _ in stages]
        for free in self._free:
            for _ in range(PIECES_BETWEEN):
                free.put(True)
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"vkback prompt {i}", daemon=True) for i in range(len(stages))]

    def __enter__(self) -> Pipeline:
        if self._pieces:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for free, ready in zip(self._free, self._ready, strict=True):
            free.put(False)
            ready.put(_LeftError())
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def take(self, i: int) -> int:
        """The slot of the last border with piece i, when it is there. Raises what the devices before ended with."""
        self._got(len(self._stages) - 1)
        return i % PIECES_BETWEEN

    def free(self, i: int) -> None:
        """The last device has read piece i."""
        self._free[-1].put(True)

    def _got(self, border: int) -> None:
        while True:
            try:
                error = self._ready[border].get(timeout=0.1)  # Ctrl-C is heard between
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return

    def _run(self, number: int) -> None:
        """The thread of a device."""
        stage, behind = self._stages[number], self._borders[number]
        try:
            for i, (at, length) in enumerate(self._pieces):
                if number:
                    self._got(number - 1)
                if not self._free[number].get() or self._stopping.is_set():
                    return
                stage.slots.slot = i % PIECES_BETWEEN
                for _ in stage.prompts.run(self._tokens[at : at + length], self._n_past + at):
                    pass
                behind.carry(stage.slots.slot)
                if number:
                    self._free[number - 1].put(True)
                self._ready[number].put(None)
        except _LeftError:
            return
        except DeviceError as error:
            self._ready[number].put(on_device(error, number, len(self._stages) + 1, stage.device))
        except BaseException as error:
            self._ready[number].put(error)


class _LeftError(VkbackError):
    """The prompt was left."""
