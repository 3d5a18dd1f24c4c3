"""Vectors of texts on a device, or their logits: whole texts side by side through one program of several tokens (vkback/models/texts.py).

Programs have as many tokens as those of prompts, and beyond those whole multiples of the largest: a text goes through in one piece. As many
texts share a program as have room; what is left of it is padding. A program is planned, compiled and recorded when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Commands, Device
from vkback.engine.prompts import LONGEST_SUBMIT_US, SMALLEST
from vkback.graph import Graph
from vkback.models.texts import Pooling, Texts
from vkback.ops.storage import nbytes
from vkback.plan.cost.forecast import cuts, low_costs
from vkback.plan.passes.lora import SCALES
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program
from vkback.program.program import overflow_bytes

Floats = npt.NDArray[np.float32]

TEXTS = 64
"""Texts of a program, at most: a pass of 512 tokens has room for as many of eight."""

Inputs = Callable[[Graph, Sequence[Sequence[int]], int, Pooling, Sequence[Sequence[int]] | None], Mapping[str, npt.NDArray[np.generic]]]


@dataclass
class Recorded:
    """A program, its command buffers, and what the host writes and reads."""

    graph: Graph
    program: Program
    parts: list[Commands]
    inputs: dict[str, BufferRange]
    result: BufferRange
    overflow: BufferRange | None


class TextVectors:
    """Programs of texts of one model, with keys and values of their own: whatever text is in its caches stays there.

    graph   (tokens, texts) -> graph
    plan    graph -> schedule
    bind    (schedule, inputs by name, memory for activations) -> program
    inputs  (graph, texts, tokens, pooling, segments) -> what goes in, by name
    rescale  (overflow words with what they hold, filled rows of the caches): plans have smaller f16 scales from then on
    """

    def __init__(
        self,
        device: Device,
        *,
        graph: Callable[[int, Texts], Graph],
        plan: Callable[[Graph], Schedule],
        bind: Callable[[Schedule, dict[str, BufferRange], BufferRange | None], Program],
        inputs: Inputs,
        rescale: Callable[[dict[str, float], int], object],
    ) -> None:
        self._device = device
        self._graph, self._plan, self._bind, self._inputs, self._rescale = graph, plan, bind, inputs, rescale
        self._recorded: dict[tuple[int, Texts], Recorded] = {}
        self._blocks: dict[str, tuple[Arena, BufferRange]] = {}
        self._costs = low_costs(device.caps)

    def close(self) -> None:
        """Give programs and memory back; later calls make them anew."""
        self._forget_programs()
        for arena, _ in self._blocks.values():
            arena.destroy()
        self._blocks.clear()

    def run(
        self,
        texts: Sequence[Sequence[int]],
        pooling: Pooling,
        *,
        ubatch: int,
        n_ctx: int,
        alone: bool = False,
        segments: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[Floats]:
        """The vector of each text, float32 [width]; with the pooling "none" [tokens, n_embd].

        ubatch, n_ctx  tokens of a program, and of one that a longer text needs, at most
        alone   a text has a program for itself, so that its vector does not depend on the others
        """
        for first, last in passes([len(text) for text in texts], min(ubatch, n_ctx), 1 if alone else TEXTS):
            own = texts[first:last]
            n = program_tokens(sum(map(len, own)), ubatch)
            kind = Texts(1 if len(own) == 1 else TEXTS, pooling)
            vectors = self._pass(own, n, kind, segments[first:last] if segments else None)
            if pooling != "none":
                yield from vectors[: len(own)]
                continue
            at = 0
            for text in own:
                yield vectors[at : at + len(text)]
                at += len(text)

    def logits(self, texts: Sequence[Sequence[int]], first: int, *, at_once: int, ubatch: int) -> Iterator[Floats]:
        """Logits of tokens first.. of each text, float32 [length - first, n_vocab]. The texts are equally long; at_once of them share a
        program, whose tokens are a multiple of ubatch, or a power of two below it."""
        length = len(texts[0])
        n, kind = self.kind_of_logits(length, first, at_once, ubatch)
        ids = np.arange(at_once)[:, None] * length + np.arange(first, length)  # of texts that are not there: of padding
        for i in range(0, len(texts), at_once):
            own = texts[i : i + at_once]
            yield from self._pass(own, n, kind, None, ids.reshape(-1)).reshape(at_once, length - first, -1)[: len(own)]

    def kind_of_logits(self, length: int, first: int, at_once: int, ubatch: int) -> tuple[int, Texts]:
        """Tokens of the program that `logits` runs, and what it makes."""
        return program_tokens(at_once * length, ubatch), Texts(at_once, "none", at_once * (length - first))

    def bytes_of(self, n: int, kind: Texts) -> tuple[int, int]:
        """Memory that a program of n tokens takes: on the device, and for what the host reads."""
        graph = self._graph(n, kind)
        states = sum(aligned(nbytes(t)) for t in graph.tensors().values() if t.kind == "state")
        return self._plan(graph).activation_bytes + states, 4 * graph.outputs[0].elements

    def _pass(
        self,
        texts: Sequence[Sequence[int]],
        n: int,
        kind: Texts,
        segments: Sequence[Sequence[int]] | None,
        out_ids: npt.NDArray[np.int_] | None = None,
    ) -> Floats:
        while True:
            found = self._ready(n, kind)
            given = dict(self._inputs(found.graph, texts, n, kind.pooling, segments))
            if out_ids is not None:
                given["out_ids"] = out_ids.astype(np.int32)
            for name, memory in found.inputs.items():
                self._device.upload(memory, given[name])
            for ticket in [self._device.submit(part) for part in found.parts]:
                ticket.wait()
            if overflowed := self._overflowed(found):
                self._forget_programs()
                self._rescale(overflowed, 0)
                continue
            (output,) = found.graph.outputs
            made = found.result.map()[: 4 * output.elements].view(np.float32)
            return np.array(made).reshape(output.shape)

    def _overflowed(self, found: Recorded) -> dict[str, float]:
        if found.overflow is None:
            return {}
        held = found.overflow.map().view(np.uint32)
        return found.program.overflowed(held) if held.any() else {}

    def _ready(self, n: int, kind: Texts) -> Recorded:
        if (n, kind) not in self._recorded:
            self._recorded[n, kind] = self._record(n, kind)
        return self._recorded[n, kind]

    def _record(self, n: int, kind: Texts) -> Recorded:
        graph = self._graph(n, kind)
        schedule = self._plan(graph)
        tensors = graph.tensors().values()
        wanted = {t.name: nbytes(t) for t in tensors if t.kind == "input" and t.name != SCALES}  # which is the engine's
        states = {t.name: nbytes(t) for t in tensors if t.kind == "state"}
        (output,) = graph.outputs
        words = overflow_bytes(schedule)
        caps = self._device.caps
        need = schedule.activation_bytes
        blocks = [  # before any part of them is bound: one that grows takes all programs with it
            self._block("inputs of texts", wanted.values(), "host_visible_device" if caps.rebar or caps.uma else "device"),
            self._block("keys and values of texts", states.values(), "device"),
            self._block("activations of texts", [need], "device"),
            self._block("vectors of texts", [4 * output.elements, words], "readback"),
        ]
        inputs, caches = (slices(block, sizes) for block, sizes in zip(blocks, (wanted, states), strict=False))
        program = self._bind(schedule, {**inputs, **caches}, blocks[2] if need else None)
        made = program.range(output.name)
        result = blocks[3].slice(0, made.size)
        overflow = blocks[3].slice(aligned(4 * output.elements), words) if words else None
        copies = [(made, result)]
        copies += [(program.overflow.slice(0, words), overflow)] if program.overflow and overflow else []
        submits = cuts(schedule, self._costs, LONGEST_SUBMIT_US)
        parts = program.record_parts(f"texts x{n}", submits, copies=copies)
        return Recorded(graph, program, parts, inputs, result, overflow)

    def _block(self, purpose: str, sizes: Iterable[int], kind: Literal["device", "readback", "host_visible_device"]) -> BufferRange:
        """Memory for a purpose with room for these, which all programs share. Where it must grow, they are forgotten."""
        size = max(sum(map(aligned, sizes)), aligned(1))
        found = self._blocks.get(purpose)
        if found is not None and found[1].size >= size:
            return found[1]
        if found is not None:
            self._forget_programs()
            found[0].destroy()
            del self._blocks[purpose]
        arena = self._device.arena(purpose, size, kind)
        self._blocks[purpose] = arena, arena.alloc(size, purpose)
        return self._blocks[purpose][1]

    def _forget_programs(self) -> None:
        for found in self._recorded.values():
            found.program.close()
        self._recorded.clear()


def slices(block: BufferRange, sizes: Mapping[str, int]) -> dict[str, BufferRange]:
    """Parts of a block one after another, by name."""
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = block.slice(at, size)
        at += aligned(size)
    return found


def passes(lengths: Sequence[int], ubatch: int, most: int) -> Iterator[tuple[int, int]]:
    """(first, end) of the texts that go through together, in order: as many as ubatch tokens have room for, at most `most`; a longer one by
    itself."""
    first = used = 0
    for i, length in enumerate(lengths):
        if i > first and (used + length > ubatch or i - first == most):
            yield first, i
            first, used = i, 0
        used += length
    if lengths:
        yield first, len(lengths)


def program_tokens(count: int, ubatch: int) -> int:
    """Tokens of the program for so many: a power of two up to ubatch, then a multiple of it."""
    if count > ubatch:
        return -(-count // ubatch) * ubatch
    return min(max(SMALLEST, 1 << (count - 1).bit_length()), max(ubatch, SMALLEST))
