"""Programs of a step of a batch: one token of many sequences, or several of one. Planned, bound and recorded once per class of step; which
sequences are in it is data on the device (vkback/engine/batch/state.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Commands, Ticket
from vkback.engine.batch.caches import PagedCaches
from vkback.engine.batch.state import LOOP_WORDS, RING, BatchState, EditQueue, Edits
from vkback.engine.engine import Engine
from vkback.engine.prompts import with_barriers
from vkback.engine.readback import Readback
from vkback.graph import Graph, Tensor
from vkback.models.builder import TWO_SLOTS, CacheTypes, Paging, StateSlots
from vkback.models.registry import Model
from vkback.ops.sampling.chain import CHAIN_WORDS
from vkback.ops.sampling.dry import dry_words
from vkback.ops.sampling.lookup import DRAFT_WORDS
from vkback.ops.sampling.penalties import SEEN_COUNTS, mask_words
from vkback.plan.passes.lora import SCALES
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program

CLASSES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Columns of a step. One with holes takes the time of a full one."""

IN_FLIGHT = 2


def class_of(columns: int, most: int = CLASSES[-1]) -> int:
    """The smallest class with so many columns."""
    return next((n for n in CLASSES if columns <= n <= most), most)


@dataclass(frozen=True)
class Kind:
    """What a step does with logits.

    greedy     every sequence takes the largest logit
    penalties  some change logits before
    dry        some have DRY, which needs the former
    chained    some have chains of samplers
    masked     some take tokens out
    logits     the host gets them
    drafts     some have drafts
    """

    greedy: bool = True
    penalties: bool = False
    masked: bool = False
    logits: bool = False
    dry: bool = False
    chained: bool = False
    drafts: bool = False

    def __or__(self, other: Kind) -> Kind:
        """What serves both."""
        either = {f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)}
        return Kind(**{**either, "greedy": self.greedy and other.greedy})

    def __str__(self) -> str:
        said = "greedy" if self.greedy else "sample"
        others = {"penalties": self.penalties, "mask": self.masked, "logits": self.logits, "dry": self.dry, "chain": self.chained}
        others["drafts"] = self.drafts
        return ", ".join([said, *(name for name, there in others.items() if there)])


def step_graph(model: Model, cache: CacheTypes, columns: int, kind: Kind, paging: Paging, kept: StateSlots = TWO_SLOTS) -> Graph:
    """One step of so many columns, from their tokens to their next ones."""
    n_ctx = paging.page * paging.max_pages
    graph = model.graph(columns, n_ctx, head="all", cache=cache, paging=paging, kept=kept)
    tokens, pos, rows, slots, draws = (Tensor(n, "I32", (columns,), "input") for n in ("tokens", "pos", "rows", "slots", "draws"))
    pages = Tensor("pages", "I32", (paging.n_slots, paging.max_pages), "input")
    loops = Tensor("loops", "I32", (paging.n_slots, LOOP_WORDS), "input")
    logits = graph.outputs[0]
    vocab = logits.shape[-1]
    counted: tuple[Tensor, ...] = ()
    if kind.penalties or kind.masked:
        bias = Tensor("bias", "F32", (paging.n_slots, vocab), "input")
        seen = Tensor("seen", "I32", (paging.n_slots, SEEN_COUNTS + vocab + n_ctx), "input")
        penalized = Tensor("result_penalized", "F32", logits.shape)
        dry = Tensor("dry", "I32", (paging.n_slots, dry_words(vocab)), "input")
        given = (logits, bias, seen, loops, tokens, pos, slots, draws)
        if kind.drafts:
            masks = (Tensor("masks", "I32", (columns, mask_words(vocab)), "input"),) if kind.masked else ()
            graph.add("PENALTIES_DRAFTS_COLUMNS", (*given, *masks), (penalized,))
            if kind.dry:
                graph.add("DRY_DRAFTS_COLUMNS", (penalized, seen, loops, pos, dry, slots, draws, tokens), (penalized,))
            counted = (seen,)
        else:
            mask = (Tensor("mask", "I32", (paging.n_slots, mask_words(vocab)), "input"),) if kind.masked else ()
            graph.add("PENALTIES_COLUMNS", (*given, *mask), (penalized, seen))
            if kind.dry:
                graph.add("DRY_COLUMNS", (penalized, seen, loops, pos, dry, slots, draws), (penalized, dry))
        logits = penalized
    chains = (Tensor("chains", "F32", (paging.n_slots, CHAIN_WORDS), "input"),) if kind.chained and not kind.greedy else ()
    state, which, how = (loops, tokens, pos, rows), (slots, draws, pages), {"capacity": RING, "page": paging.page}
    if not kind.drafts:
        graph.add("SAMPLE_COLUMNS", (logits, *state, *which, *chains), (*state, *chains), **how, greedy=kind.greedy)
        return graph
    texts = Tensor("texts", "I32", (paging.n_slots, n_ctx), "input")
    draft = Tensor("draft", "I32", (paging.n_slots, DRAFT_WORDS), "input")
    graph.add("LOOKUP_COLUMNS", (texts, draft, *state, *which), (texts, draft, tokens, pos, rows), **how)
    graph.nodes.insert(0, graph.nodes.pop())
    changed = (*state, draft, *counted, *chains)
    given = (logits, *state, *which, draft, *counted, *chains)
    graph.add("SAMPLE_DRAFTS_COLUMNS", given, changed, **how, greedy=kind.greedy, penalized=bool(counted))
    return graph


@dataclass
class Flight:
    """A submit: its ticket, and where its results are. logits: F32 [columns, n_vocab] of the last step, where the kind has them. draft: the
    words of `draft` after it, where the kind has drafts."""

    ticket: Ticket
    back: Readback
    columns: int
    logits: BufferRange | None = None
    draft: BufferRange | None = None

    def loops(self, n_slots: int) -> npt.NDArray[np.int32]:
        """Loops of all sequences after the submit: [n_slots, LOOP_WORDS]."""
        return np.array(self.back.result.map().view(np.int32)[: n_slots * LOOP_WORDS]).reshape(n_slots, LOOP_WORDS)

    def drafts(self) -> npt.NDArray[np.int32] | None:
        """The words of `draft` after the submit, [n_slots, 96]; None where there were no drafts."""
        return None if self.draft is None else np.array(self.draft.map().view(np.int32)).reshape(-1, DRAFT_WORDS)


class StepPrograms:
    """Programs over the caches and the state of one batch."""

    def __init__(self, engine: Engine, caches: PagedCaches, state: BatchState, *, same_kernels: bool = False) -> None:
        """same_kernels: recurrences are computed by the same kernels in steps with drafts and without."""
        self._same_kernels = same_kernels
        self._engine, self._caches, self._state = engine, caches, state
        self.paging = caches.paging
        self._edits = EditQueue(engine, state)
        self._programs: dict[tuple[int, Kind], Program] = {}
        self._schedules: dict[tuple[int, Kind], Schedule] = {}
        self._recordings: dict[tuple[int, Kind, int], list[Commands]] = {}
        self._block: tuple[Arena, BufferRange] | None = None
        self._logits: tuple[Arena, BufferRange] | None = None
        self._penalties: tuple[Arena, dict[str, BufferRange]] | None = None
        self._masks: tuple[list[Arena], BufferRange, BufferRange] | None = None
        self._others: dict[str, tuple[Arena, BufferRange]] = {}
        self._drafts: tuple[Arena, dict[str, BufferRange]] | None = None
        self._draft_backs: tuple[Arena, list[BufferRange]] | None = None
        size = 4 * self.paging.n_slots * LOOP_WORDS
        self._back_arena = engine.device.arena("read-back of a batch", (IN_FLIGHT + 1) * (aligned(size) + aligned(4)), "readback")
        self._backs = [
            Readback(self._back_arena.alloc(size, "loops"), self._back_arena.alloc(4, "state of spin-waits")) for _ in range(IN_FLIGHT + 1)
        ]
        for back in self._backs:
            back.forget()
        self._next = 0

    def schedule(self, columns: int, kind: Kind) -> Schedule:
        """The plan of a class of step."""
        key = columns, kind
        if key not in self._schedules:
            kept = StateSlots(self._caches.kept, each=kind.drafts or (self._same_kernels and self._caches.kept > 2))
            graph = step_graph(self._engine.model, self._engine.cache_types, columns, kind, self.paging, kept)
            ctx = self._engine.ctx
            if self._engine.model.architecture.recurrent:
                # A step whose spin-wait timed out runs again, which recurrent states do not survive.
                ctx = with_barriers(ctx, "recurrent states")
            self._schedules[key] = plan(graph, ctx, fusion=self._engine.fusion)
        return self._schedules[key]

    def prepare(self, columns: int, kind: Kind) -> None:
        """Plan, compile and record a class of step, and run it once with nothing but holes, in which drivers compile what they put off. No
        step may be in flight, and the first columns must be holes."""
        self._recorded(columns, kind, 1)
        self.submit(columns, kind, 1, Edits()).ticket.wait()

    def seconds(self, columns: int, kind: Kind) -> float:
        """How long a step of nothing but holes takes, which is also what it takes to submit and wait for it. As `prepare`."""
        begun = time.perf_counter()
        self.submit(columns, kind, 1, Edits()).ticket.wait()
        return time.perf_counter() - begun

    def record(self, columns: int, kind: Kind, steps: int) -> None:
        """As `prepare`, and run nothing."""
        self._recorded(columns, kind, steps)

    def ready(self, columns: int, kind: Kind) -> bool:
        return (columns, kind) in self._programs

    def submit(self, columns: int, kind: Kind, steps: int, edits: Edits) -> Flight:
        """So many steps, after the edits."""
        commands = self._recorded(columns, kind, steps)[self._next]
        back = self._backs[self._next]
        draft = self._draft_backs[1][self._next] if kind.drafts and self._draft_backs is not None else None
        self._next = (self._next + 1) % len(self._backs)
        before = self._edits.commands(edits)
        ticket = self._engine.device.submit([*(b.commands for b in before), commands])
        for b in before:
            b.ticket = ticket
        return Flight(ticket, back, columns, self._logits[1] if kind.logits and self._logits else None, draft)

    def penalty_inputs(self) -> dict[str, BufferRange]:
        """Memory of bias [n_slots, vocab] and seen [n_slots, ...], taken when it is first used."""
        if self._penalties is None:
            vocab, slots = self._engine.model.hp.n_vocab, self.paging.n_slots
            words = {"bias": vocab, "seen": SEEN_COUNTS + vocab + self.paging.page * self.paging.max_pages}
            arena = self._engine.device.arena("penalties of a batch", sum(aligned(4 * slots * w) for w in words.values()), "device")
            ranges = {name: arena.alloc(4 * slots * w, name) for name, w in words.items()}
            for memory in ranges.values():
                self._engine.device.upload(memory, np.zeros(memory.size // 4, np.int32))
            self._penalties = arena, ranges
        return self._penalties[1]

    @property
    def masks(self) -> npt.NDArray[np.int32]:
        """Those of the next step with masks, which the host writes while nothing is in flight: I32 [., mask_words], of a step with drafts
        one a column, else one a slot. The step takes them along."""
        return self._mask_ranges()[0].map().view(np.int32).reshape(-1, mask_words(self._engine.model.hp.n_vocab))

    def _mask_ranges(self) -> tuple[BufferRange, BufferRange]:
        """Memory of masks that the host writes, and of those that kernels read, taken when it is first used."""
        if self._masks is None:
            size = 4 * max(self._state.columns, self.paging.n_slots) * mask_words(self._engine.model.hp.n_vocab)
            arenas = [self._engine.device.arena("masks of a batch", aligned(size), kind) for kind in ("upload", "device")]
            self._masks = arenas, arenas[0].alloc(size, "masks of the host"), arenas[1].alloc(size, "masks")
            self.masks[:] = -1
        return self._masks[1], self._masks[2]

    def _mask_parts(self, columns: int, kind: Kind) -> tuple[BufferRange, BufferRange]:
        """The part of them that a kind of step reads."""
        size = 4 * (columns if kind.drafts else self.paging.n_slots) * mask_words(self._engine.model.hp.n_vocab)
        written, read = self._mask_ranges()
        return written.slice(0, size), read.slice(0, size)

    def other_input(self, name: Literal["dry", "chains"]) -> BufferRange:
        """Memory of DRY's words, or of chains: [n_slots, ...], taken when it is first used."""
        if name not in self._others:
            each = dry_words(self._engine.model.hp.n_vocab) if name == "dry" else CHAIN_WORDS
            words = np.zeros(self.paging.n_slots * each, np.int32)
            arena = self._engine.device.arena(f"{name} of a batch", aligned(words.nbytes), "device")
            self._others[name] = arena, arena.alloc(words.nbytes, name)
            self._engine.device.upload(self._others[name][1], words)
        return self._others[name][1]

    def draft_inputs(self) -> dict[str, BufferRange]:
        """Memory of `texts` [n_slots, n_ctx] and `draft` [n_slots, 96], taken when it is first used."""
        if self._drafts is None:
            slots, rows = self.paging.n_slots, self.paging.page * self.paging.max_pages
            sizes = {"texts": 4 * slots * rows, "draft": 4 * slots * DRAFT_WORDS}
            arena = self._engine.device.arena("drafts of a batch", sum(map(aligned, sizes.values())), "device")
            ranges = {name: arena.alloc(size, name) for name, size in sizes.items()}
            self._engine.device.upload(ranges["draft"], np.zeros(slots * DRAFT_WORDS, np.int32))
            self._drafts = arena, ranges
            back = self._engine.device.arena("read-back of drafts of a batch", len(self._backs) * aligned(sizes["draft"]), "readback")
            self._draft_backs = back, [back.alloc(sizes["draft"], "draft") for _ in self._backs]
        return self._drafts[1]

    def adapter_scales(self) -> BufferRange:
        """Memory of the scales of adapters, F32 [n_slots, rank], which are off at first."""
        if SCALES not in self._others:
            lora = self._engine.model.lora
            assert lora is not None
            words = np.zeros((self.paging.n_slots, sum(lora.widths)), np.float32)
            arena = self._engine.device.arena("adapters of a batch", aligned(words.nbytes), "device")
            self._others[SCALES] = arena, arena.alloc(words.nbytes, SCALES)
            self._engine.device.upload(self._others[SCALES][1], words)
        return self._others[SCALES][1]

    def _recorded(self, columns: int, kind: Kind, steps: int) -> list[Commands]:
        """One recording for each submit that may be in flight, with a read-back of its own."""
        key = columns, kind, steps
        if key not in self._recordings:
            program = self._program(columns, kind)
            loops = self._state.range("loops", self.paging.n_slots * LOOP_WORDS)
            copies: list[tuple[BufferRange, BufferRange]] = []
            if kind.logits and self._logits is not None:
                found = program.range("result_output")
                copies.append((found, self._logits[1].slice(0, found.size)))
            others = [list(copies) for _ in self._backs]
            if kind.drafts and self._draft_backs is not None:
                for of_one, memory in zip(others, self._draft_backs[1], strict=True):
                    of_one.append((self.draft_inputs()["draft"], memory))
            loads = [self._mask_parts(columns, kind)] if kind.masked else []
            self._recordings[key] = [
                program.record(
                    f"{columns} columns, {kind}, x{steps}", repeat=steps, loads=loads, copies=[*back.copies(program, loops), *more]
                )
                for back, more in zip(self._backs, others, strict=True)
            ]
        return self._recordings[key]

    def _program(self, columns: int, kind: Kind) -> Program:
        key = columns, kind
        if key not in self._programs:
            schedule = self.schedule(columns, kind)
            self._make_room(schedule.activation_bytes)
            inputs = self._caches.ranges | self._state.inputs(columns)
            if kind.penalties or kind.masked:
                inputs |= self.penalty_inputs()
            if kind.masked:
                inputs["masks" if kind.drafts else "mask"] = self._mask_parts(columns, kind)[1]
            if (lora := self._engine.model.lora) is not None and lora.switched:
                inputs[SCALES] = self.adapter_scales()
            if kind.dry:
                inputs["dry"] = self.other_input("dry")
            if kind.chained:
                inputs["chains"] = self.other_input("chains")
            if kind.drafts:
                inputs |= self.draft_inputs()
            if kind.logits and self._logits is None:
                size = aligned(4 * self._state.columns * self._engine.model.hp.n_vocab)
                arena = self._engine.device.arena("logits of a batch", size, "readback")
                self._logits = arena, arena.alloc(size, "logits of a batch")
            self._programs[key] = self._engine.bind(schedule, inputs, self._block[1] if self._block else None)
        return self._programs[key]

    def _make_room(self, size: int) -> None:
        """Memory for activations, which all programs share; where it must grow, they are bound anew."""
        if self._block is not None and self._block[1].size >= size:
            return
        self.forget()
        arena = self._engine.device.arena("activations of a batch", aligned(size), "device")
        self._block = arena, arena.alloc(aligned(size), "activations of a batch")

    def forget(self) -> None:
        """Bind everything anew when it is next used. Waits for what is in flight."""
        self._engine.device.wait_idle()
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self._recordings.clear()
        if self._block is not None:
            self._block[0].destroy()
            self._block = None

    def forget_plans(self) -> None:
        """Plan everything anew."""
        self.forget()
        self._schedules.clear()
        for back in self._backs:
            back.forget()

    def close(self) -> None:
        self.forget()
        self._edits.close()
        for held in (self._logits, self._penalties, self._drafts, self._draft_backs, *self._others.values()):
            if held is not None:
                held[0].destroy()
        for arena in self._masks[0] if self._masks is not None else ():
            arena.destroy()
        self._back_arena.destroy()
