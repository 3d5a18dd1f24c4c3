"""KV caches of a batch, in pages, and the copies of whole pages between them and the cache of one sequence that prompts are read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import BufferRange, Commands, Ticket
from vkback.engine.device_state import ring_parts
from vkback.engine.engine import Engine
from vkback.graph import Graph, Tensor
from vkback.models.builder import Paging, StateSlots
from vkback.models.cache_range import Found, beyond_range, judge
from vkback.ops.copies.pages import planes
from vkback.ops.storage import nbytes
from vkback.plan.planner import plan
from vkback.plan.schedule import aligned
from vkback.program import Program

PAIRS = 64
"""Pages that one dispatch of COPY_PAGES copies."""

STAGED = "staged."
"""In front of the name of a cache of one sequence, where its namesake in pages is meant as well."""


CopyKind = Literal["store", "stage", "copy"]
"""From the one-sequence cache, into it, or within the pages."""

COPY_KINDS: tuple[CopyKind, ...] = ("store", "stage", "copy")


def copy_graph(kind: CopyKind, caches: Mapping[str, Tensor], n_ctx: int, page: int) -> Graph:
    """COPY_PAGES of every cache. n_ctx: rows of the one-sequence cache."""
    graph = Graph()
    pairs = Tensor("which", "I32", (PAIRS, 2), "input")
    for name, paged in caches.items():
        heads, _, dim = paged.shape
        one = Tensor(f"{STAGED}{name}", paged.type, (heads, n_ctx, dim), "state")
        source, target = {"store": (one, paged), "stage": (paged, one), "copy": (paged, paged)}[kind]
        graph.add("COPY_PAGES", (pairs, source, target), (target,), page=page)
    return graph


def cache_tensors(graph: Graph) -> dict[str, Tensor]:
    """KV caches of a graph, by name."""
    return {t.name: t for node in graph.nodes if node.op == "SET_ROWS" for t in node.outputs}


class PagedCaches:
    """Caches of all layers, [heads, paging.rows, head_dim] each. Page p of the batch is page p of every cache."""

    def __init__(self, engine: Engine, paging: Paging, kept: int = 2) -> None:
        """kept: slots of the recurrent states of a sequence (`StateSlots`). Raises OutOfDeviceMemory where the pages do not fit."""
        self.paging, self.kept = paging, kept
        self._engine, self._device = engine, engine.device
        n_ctx, slots = paging.page * paging.max_pages, StateSlots(kept)
        graph = engine.model.graph(1, n_ctx, head="none", cache=engine.cache_types, paging=paging, kept=slots)
        found = cache_tensors(graph)
        self.tensors: Mapping[str, Tensor] = found
        self._states = {t.name: t for node in graph.nodes for t in node.outputs if t.kind == "state" and t.name not in found}
        """Recurrent states, [n_slots, ...]."""
        found = found | self._states
        self._arena = self._device.arena("KV cache in pages", sum(aligned(nbytes(t)) for t in found.values()), "device")
        self.ranges: dict[str, BufferRange] = {name: self._arena.alloc(nbytes(t), name) for name, t in found.items()}
        self._pairs_arena = self._device.arena("pages to copy", aligned(8 * PAIRS), "upload")
        self._pairs = self._pairs_arena.alloc(8 * PAIRS, "pages to copy")
        self._programs: dict[str, tuple[Program, Commands]] = {}
        self._copying: Ticket | None = None

    @staticmethod
    def page_bytes(engine: Engine, page: int) -> list[int]:
        """Of one page, in each cache."""
        paging = Paging(page, 1, 1, 1)
        graph = engine.model.graph(1, page, head="none", cache=engine.cache_types, paging=paging)
        return [nbytes(t) for t in cache_tensors(graph).values()]

    def store(self, staged: Sequence[int], pages: Sequence[int]) -> None:
        """Copy pages of the one-sequence cache (page i: its rows i * page ..) into pages of the batch."""
        self._copy("store", staged, pages)

    def stage(self, pages: Sequence[int], staged: Sequence[int]) -> None:
        """The opposite of `store`."""
        self._copy("stage", pages, staged)

    def copy(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages within the batch."""
        self._copy("copy", pages, to)

    def _copy(self, kind: CopyKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        pairs = list(zip(sources, targets, strict=True))
        words = self._pairs.map().view(np.int32).reshape(-1, 2)
        _, commands = self._program(kind)
        for first in range(0, len(pairs), PAIRS):
            if self._copying is not None:
                self._copying.wait()  # it reads the same words
            part = pairs[first : first + PAIRS]
            words[:] = -1
            words[: len(part)] = part
            self._copying = self._device.submit(commands)  # what follows is behind it in the queue

    def prepare(self) -> None:
        """Compile and record the copies of pages."""
        if self.tensors:
            for kind in COPY_KINDS:
                self._program(kind)

    def _program(self, kind: CopyKind) -> tuple[Program, Commands]:
        if kind not in self._programs:
            inputs: dict[str, BufferRange] = {"which": self._pairs, **self.ranges}
            inputs |= {f"{STAGED}{name}": self._engine.state[name] for name in self.tensors}
            graph = copy_graph(kind, self.tensors, self._engine.n_ctx, self.paging.page)
            program = self._engine.bind(plan(graph, self._engine.ctx), inputs)
            self._programs[kind] = program, program.record(f"{kind} pages")
        return self._programs[kind]

    def store_states(self, slot: int, rows: int) -> None:
        """Copy the recurrent states of the one-sequence engine after so many tokens into a slot. Either may keep more of them."""
        copies: list[tuple[BufferRange, BufferRange]] = []
        own, spare = self._engine.max_columns - 1, self.kept - 2
        for name, state in self._states.items():
            source, target, ring = self._engine.state[name], self._slot_of(name, slot), state.shape[1]
            if own == spare:
                copies.append((source, target))
                continue
            count = ring - spare
            parts = [ring_parts(source, count + own, own, rows), ring_parts(target, ring, spare, rows)]
            for i, of_one in enumerate(parts):
                if len(of_one) == 1:
                    size = of_one[0].size // count
                    parts[i] = [of_one[0].slice(at * size, size) for at in range(count)]
            copies += zip(*parts, strict=True)
        self._copy_states(copies)

    def copy_states(self, slot: int, to: int) -> None:
        """Copy recurrent states from slot to slot."""
        self._copy_states([(self._slot_of(name, slot), self._slot_of(name, to)) for name in self._states])

    def download_states(self, slot: int) -> npt.NDArray[np.uint8]:
        """All bytes of a slot's recurrent states."""
        return self._device.download_many([self._slot_of(name, slot) for name in self._states])

    def upload_states(self, slot: int, raw: npt.NDArray[np.uint8]) -> None:
        """Bring back what `download_states` gave."""
        at = 0
        for name in self._states:
            memory = self._slot_of(name, slot)
            self._device.upload(memory, raw[at : at + memory.size])
            at += memory.size

    def _slot_of(self, name: str, slot: int) -> BufferRange:
        size = nbytes(self._states[name]) // self.paging.n_slots
        return self.ranges[name].slice(slot * size, size)

    def _copy_states(self, copies: Sequence[tuple[BufferRange, BufferRange]]) -> None:
        if copies:
            rec = self._device.recorder("recurrent states")
            rec.barrier()
            for source, target in copies:
                rec.copy(source, target)
            self._device.run(rec)

    def download(self, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """All bytes of pages, in the order that `upload` takes them."""
        return self._device.download_many(self._parts(pages))

    def upload(self, pages: Sequence[int], raw: npt.NDArray[np.uint8]) -> None:
        """Bring back what `download` gave, into as many pages."""
        uploader, at = self._device.uploader(), 0
        try:
            for part in self._parts(pages):
                uploader.write(part, 0, raw[at : at + part.size])
                at += part.size
        finally:
            uploader.finish()

    def _parts(self, pages: Sequence[int]) -> list[BufferRange]:
        page, rows = self.paging.page, self.paging.rows
        return [
            self.ranges[name].slice(offset + (head * rows + p * page) * row_bytes, page * row_bytes)
            for name, cache in self.tensors.items()
            for offset, row_bytes in planes(cache)
            for head in range(cache.shape[0])
            for p in pages
        ]

    def beyond_range(self, pages: Sequence[int], rows: int) -> list[tuple[str, str]]:
        """Name and type of each cache where the first rows of these pages, at most all, hold what is beyond the range of its type."""
        names = beyond_range(list(self.tensors), lambda name: self._judge(self.tensors[name], pages, rows))
        return [(name, self.tensors[name].type) for name in names]

    def _judge(self, cache: Tensor, pages: Sequence[int], rows: int) -> Found:
        heads, all_rows, dim = cache.shape
        found = planes(cache)
        if cache.type not in ("F32", "F16"):
            found = [(p.offset, p.row_bytes) for p in quants.layout(cache.type, heads * all_rows, dim).planes if p.name == "d"]
        page = self.paging.page
        parts = [
            self.ranges[cache.name].slice(offset + (head * all_rows + p * page) * row_bytes, min(rows - i * page, page) * row_bytes)
            for offset, row_bytes in found
            for head in range(heads)
            for i, p in enumerate(pages)
            if i * page < rows
        ]
        raw = self._device.download_many(parts)
        if cache.type == "F32":
            return "numbers" if np.isfinite(raw.view(np.float32)).all() else "nan"
        return judge(raw.view(np.uint16))

    def close(self) -> None:
        if self._copying is not None:
            self._copying.wait()
        for program, _ in self._programs.values():
            program.close()
        self._programs.clear()
        self._pairs_arena.destroy()
        self._arena.destroy()
