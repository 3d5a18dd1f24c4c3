"""What the steps of a batch read and write beside weights and caches: columns, page table, and the loop of each sequence, in one piece of
the device's memory. The host changes words of it between submits (`Edits`) without waiting for those in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vkback.device import BufferRange, Commands, Device, Ticket
from vkback.engine.engine import Engine
from vkback.graph import Graph, Tensor
from vkback.models.builder import Paging
from vkback.ops.sampling.sample import LOOP_RING
from vkback.plan.planner import plan
from vkback.plan.schedule import aligned
from vkback.program import Program

RING = 64
"""Token ids that a sequence's loop keeps: more than all submits in flight can make."""

LOOP_WORDS = LOOP_RING + RING

COLUMN_FIELDS = ("tokens", "pos", "rows", "slots", "draws")

EDITS = 4096
"""Words that one dispatch of WRITE_WORDS writes."""

EDIT_BUFFERS = 4
"""Lists of edits that may be in flight."""


class BatchState:
    """Memory of the device, as one range and by fields.

    tokens, pos, rows, slots, draws  I32 [columns]; a class of n columns uses the first n
    pages                            I32 [n_slots, max_pages]
    loops                            I32 [n_slots, LOOP_WORDS]
    """

    def __init__(self, device: Device, columns: int, paging: Paging) -> None:
        self.columns, self.paging = columns, paging
        words = dict.fromkeys(COLUMN_FIELDS, columns)
        words |= {"pages": paging.n_slots * paging.max_pages, "loops": paging.n_slots * LOOP_WORDS}
        self._first: dict[str, int] = {}
        at = 0
        for name, count in words.items():
            self._first[name] = at
            at += aligned(4 * count) // 4
        self.words = at
        self.arena = device.arena("columns of a batch", 4 * at, "device")
        self.all = self.arena.alloc(4 * at, "columns of a batch")
        empty = np.zeros(at, np.int32)
        for name in ("pos", "rows"):
            empty[self._first[name] :][:columns] = -1
        empty[self._first["pages"] :][: words["pages"]] = -1
        device.upload(self.all, empty)

    def range(self, name: str, words: int) -> BufferRange:
        """The first words of a field."""
        return self.all.slice(4 * self._first[name], 4 * words)

    def word(self, name: str, index: int) -> int:
        """The number of a field's word, for an edit."""
        return self._first[name] + index

    def inputs(self, columns: int) -> dict[str, BufferRange]:
        """Memory of the inputs of a step's graph."""
        table = {name: self.range(name, columns) for name in COLUMN_FIELDS}
        pages = self.paging.n_slots * self.paging.max_pages
        return table | {"pages": self.range("pages", pages), "loops": self.range("loops", self.paging.n_slots * LOOP_WORDS)}


@dataclass
class _EditBuffer:
    pairs: npt.NDArray[np.int32]
    commands: Commands
    ticket: Ticket | None = None


@dataclass
class Edits:
    """Words of a BatchState that the host changes, collected until the next submit. A word that is set twice has the last value."""

    pending: dict[int, int] = field(default_factory=dict)

    def put(self, word: int, value: int) -> None:
        self.pending[word] = value


def edit_graph(words: int) -> Graph:
    """EDITS words of a state of so many."""
    target, pairs = Tensor("batch_state", "I32", (words,), "input"), Tensor("edits", "I32", (EDITS, 2), "input")
    graph = Graph()
    graph.add("WRITE_WORDS", (pairs, target), (target,))
    return graph


class EditQueue:
    """Writes edits by a dispatch in front of a submit."""

    def __init__(self, engine: Engine, state: BatchState) -> None:
        self._device = engine.device
        schedule = plan(edit_graph(state.words), engine.ctx)
        self._arena = engine.device.arena("edits of a batch", EDIT_BUFFERS * aligned(8 * EDITS), "upload")
        self._programs: list[Program] = []
        self._free: deque[_EditBuffer] = deque()
        for i in range(EDIT_BUFFERS):
            memory = self._arena.alloc(8 * EDITS, f"edits {i}")
            program = engine.bind(schedule, {"batch_state": state.all, "edits": memory})
            self._programs.append(program)
            self._free.append(_EditBuffer(memory.map().view(np.int32).reshape(-1, 2), program.record(f"edits {i}")))

    def commands(self, edits: Edits) -> list[_EditBuffer]:
        """Buffers with all pending edits, to be submitted in front of what needs them; nothing is pending then."""
        found = []
        items = list(edits.pending.items())
        edits.pending.clear()
        for first in range(0, len(items), EDITS):
            buffer = self._free.popleft()
            if buffer.ticket is not None:
                buffer.ticket.wait()
            part = items[first : first + EDITS]
            buffer.pairs[:, 0] = -1
            buffer.pairs[: len(part)] = part
            self._free.append(buffer)
            found.append(buffer)
            if len(found) == EDIT_BUFFERS and first + EDITS < len(items):
                # More than all buffers hold: these go ahead.
                ticket = self._device.submit([b.commands for b in found])
                for b in found:
                    b.ticket = ticket
                found = []
        return found

    def close(self) -> None:
        for program in self._programs:
            program.close()
        self._arena.destroy()
