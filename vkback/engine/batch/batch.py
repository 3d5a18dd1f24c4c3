"""Many texts of one model at once: what the scheduler decides (vkback/engine/batch/scheduler.py), done on the device.

A Batch works over the weights of an Engine, whose own cache holds one sequence: prompts are read into that one, piece by piece, and copied
into pages. Steps of all running texts are submitted ahead of the host, as the token loop of one text is. The Engine must not be used
otherwise while a Batch works.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback.checks import whole, wrong
from vkback.device import DeviceLost, Timeout
from vkback.engine.barrier_trial import TIMED_OUT
from vkback.engine.batch.caches import PagedCaches
from vkback.engine.batch.host_drafts import HostDrafts
from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.scheduler import (
    MAX_STEPS,
    Action,
    Bring,
    Column,
    Copy,
    Idle,
    Keep,
    Limits,
    Read,
    ScheduleError,
    Scheduler,
    State,
    Step,
    Text,
)
from vkback.engine.batch.shares import gains_of
from vkback.engine.batch.solo import Solo
from vkback.engine.batch.state import LOOP_WORDS, RING, BatchState, Edits
from vkback.engine.batch.steps import CLASSES, Flight, Kind, StepPrograms, class_of
from vkback.engine.constraint import Constraint
from vkback.engine.drafts import CLASSES as DRAFT_CLASSES
from vkback.engine.drafts import ENOUGH, DraftCounts, Drafts, Probe
from vkback.engine.engine import Engine, EngineError
from vkback.engine.host_loop import HostPicker, LogitsProcessor
from vkback.engine.sampler import Sampler, loop_state
from vkback.errors import VkbackError
from vkback.models.builder import Paging
from vkback.models.cache_range import overflow_message
from vkback.ops.sampling.chain import CHAIN_WORDS
from vkback.ops.sampling.columns import LOOP_LIMIT, STATUS_NO_PAGE
from vkback.ops.sampling.lookup import DRAFT_WORDS, FROM_TEXT, KNOWN, LEAST, MADE, MATCH, MODE, MOST
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_NAN

Floats = npt.NDArray[np.float32]

PAGE = 64
"""Rows of a page: as many as a workgroup of attention reads at once, so that a chunk of rows is in two pages at most."""

KEPT_SHARE = 1 / 8
"""Of the free memory that recurrent states may take which texts with drafts go back to."""

MEMORY_SHARE = 0.5
"""Of the free memory that pages take unless somebody says how many: activations of steps and prompts need some, and so do others."""

WAITING_WEIGHT = 16.0
"""Of texts that wait, in the share of time that prompts take. With a third of it 32 clients with 512 tokens each that want 128 got 1569 t/s
(8B Q4_K_S, H200), of 2950 that there would be with all of them in every step; with a weight of 4, 2300. On the simulated device of
tests/unit/test_batch_clients.py, which has the times of that one but not its pauses, 4 leads to 89 % (8 clients: 83 %), 16 to 91 % (90 %),
and first tokens come in half the time. The longest times between tokens are the same, for prompts are read one at a time."""

SEQUENCES = 64
"""Sequences that run at once, unless somebody asks for fewer."""

PREFILL = 64
"""Most tokens of a prompt that go through the steps of the running texts, rather than through a program of their own."""

CPU_PREFILL = 8
"""The same on a CPU driver, where a program reads a token of a prompt four times as fast as a step's column."""

PROBES = 3
"""Runs of a class of step, of which the fastest counts."""


@dataclass(frozen=True)
class Request:
    """A text to make.

    tokens       its prompt, at least one
    max_tokens   at most so many are made; 0: its prompt is read, which others may begin with
    sampler      how they are picked
    stop_at_eos  it ends at an end-of-text token, which is the last one made
    client       whose it is; clients take turns
    logits       the caller wants the logits that each token was picked from, which costs speed
    constraint   what the text must be; steps then wait for the host
    drafts       those that it may have: alone by the engine's own loop, beside others in columns that the step has left
    adapters     what each adapter of the engine is multiplied by, those behind the last off: texts with different ones share a step
    processors   functions that change its logits: its tokens are picked on the host, and steps wait for that
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    stop_at_eos: bool = True
    client: str = ""
    logits: bool = False
    constraint: Constraint | None = None
    drafts: Drafts | None = None
    adapters: tuple[float, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()


@dataclass
class Took:
    """What a text took so far.

    reused    tokens of its prompt that were in pages already
    prompt_s  seconds of its reads
    began     when its first step was submitted, by time.perf_counter(); 0: not yet
    drafts    that it had; before: until it last began to run alone
    """

    reused: int = 0
    prompt_s: float = 0.0
    began: float = 0.0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    before: DraftCounts = field(default_factory=DraftCounts)


@dataclass(frozen=True)
class Update:
    """What became of a text since it was last heard of. reason: why it ended ("eos", "length", "stop", "cancelled", "error"); "": it goes
    on. logits: of each token, F32 [n_vocab], where they were asked for. took: by the text. error: where that is the reason."""

    id: int
    tokens: tuple[int, ...]
    reason: str = ""
    logits: tuple[Floats, ...] = ()
    took: Took = field(default_factory=Took)
    error: Exception | None = None


@dataclass(eq=False)
class _Work:
    """A request, and what the device knows of it. loop: words of its loop before the ring, but for the limit. column: of its steps, -1:
    none. pages: entries of the page table that are written. seen: steps of its loop that were reported. begun: its prompt is in the
    staging cache, in part. mask: of its constraint, for the next token. chain: of its samplers, where it waited on the host. probe: what
    could have been drafted of it beside others. looked_up: its drafts, where the host has to see every token. behind: tokens that its text
    on the device may lack, which are in its loop's ring if they are few; -1: it is not there. counted: its drafts since it is. picker: of
    its tokens, where the host picks them."""

    request: Request
    text: Text
    loop: npt.NDArray[np.int32]
    column: int = -1
    pages: int = 0
    seen: int = 0
    begun: bool = False
    kept: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    kept_states: npt.NDArray[np.uint8] | None = None
    took: Took = field(default_factory=Took)
    chain: npt.NDArray[np.float32] | None = None
    mask: npt.NDArray[np.int32] | None = None
    probe: Probe | None = None
    looked_up: HostDrafts | None = None
    behind: int = -1
    counted: DraftCounts = field(default_factory=DraftCounts)
    picker: HostPicker | None = None


@dataclass(eq=False)
class _Submitted:
    """A step that the scheduler gave. flight: None where all of its texts had ended before it could be submitted. columns: of each text
    whose drafts the host looks up, those of its last token and its drafts. looked: seconds that looking them up took."""

    action: Step
    flight: Flight | None
    began: float
    columns: Mapping[int, list[int]] = field(default_factory=dict)
    looked: float = 0.0


@dataclass
class Counters:
    """steps: of all columns at once; columns: of all steps, but for drafts; tokens: made; preempted: texts; drafts: of texts alone, and of
    those beside others that have ended."""

    steps: int = 0
    columns: int = 0
    tokens: int = 0
    read: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    seconds: dict[str, float] = field(default_factory=lambda: {"steps": 0.0, "prompts": 0.0})


def _kind(sampler: Sampler, *, masked: bool = False, logits: bool = False) -> Kind:
    """Of the steps that a text needs."""
    return Kind(sampler.greedy, sampler.penalizes or masked or sampler.dries, masked, logits, sampler.dries, sampler.chained)


def pages_that_fit(engine: Engine, wanted: int, page: int = PAGE) -> int:
    """As many of the wanted pages as half of the free memory holds, and as one buffer can be bound of a cache. Raises EngineError where
    these are not two."""
    sizes, free = PagedCaches.page_bytes(engine, page), engine.device.free_memory()
    if not sizes:  # recurrent states alone
        return wanted
    fit = min(int(free * MEMORY_SHARE) // sum(sizes), engine.ctx.caps.max_storage_buffer_range // max(sizes))
    if fit < 2:
        raise EngineError(
            f"[batch] {free} bytes are free, pages of {page} rows take {sum(sizes)} bytes each; expected two; "
            "load with a smaller context (--ctx)"
        )
    return min(wanted, fit)


def kept_states(engine: Engine, sequences: int) -> int:
    """Slots of the recurrent states of each of so many sequences: as many as the engine has, so that texts can have drafts beside others,
    or as few as these need, or two where the states would take too much of the free memory."""
    if not engine.model.architecture.recurrent:
        return 2
    free = engine.device.free_memory()
    possible = [engine.max_columns + 1, DRAFT_CLASSES[0] + 1]
    fit = (n for n in possible if n <= engine.max_columns + 1 and n * sequences * engine.model.recurrent_bytes <= KEPT_SHARE * free)
    return next(fit, 2)


class Batch:
    """Use as a context manager, or `close` it. Not for several threads at once."""

    def __init__(
        self,
        engine: Engine,
        *,
        sequences: int = SEQUENCES,
        rows: int | None = None,
        max_rows: int | None = None,
        page: int = PAGE,
        prompt_share: float = 1 / 4,
        pinned: bool | None = None,
        max_step_tokens: int | None = None,
        prefill: int | None = None,
        reuse: bool = True,
    ) -> None:
        """Takes memory for the pages.

        sequences  most that run at once
        rows       of all sequences together, default: as many as each of them may have, or half of the memory that is left
        max_rows   of one sequence, default and at most: the engine's context
        prompt_share  most share of the time that prompts take while texts run
        pinned     a text has the same bits whoever else is served (docs/batch_invariance.md): all steps have max_step_tokens columns, and
                   how a prompt is read depends on its length alone; default: as the engine was loaded
        max_step_tokens  most columns of a step, which running texts and short prompts share; at least `sequences`, default: 64, with
                   `pinned` and on CPU drivers as many as `sequences`
        prefill    most tokens of a prompt that go through steps; 0: none; default: 64, on CPU drivers 8, with `pinned` max_step_tokens
        reuse      a text may begin with rows that were made for another one
        """
        sequences = whole("sequences", sequences, f"a whole number from 1 to {CLASSES[-1]}", 1, "batch")
        if sequences > CLASSES[-1]:
            raise wrong("sequences", sequences, f"a whole number from 1 to {CLASSES[-1]}", "batch")
        engine.require_one_device("a batch of texts")
        self.engine, self.device = engine, engine.device
        pinned = engine.pinned if pinned is None else pinned
        recurrent, software = engine.model.architecture.recurrent, engine.device.caps.software
        kept = kept_states(engine, sequences)
        if max_step_tokens is None:
            max_step_tokens = sequences if software or (recurrent and kept == 2) or pinned else CLASSES[-1]
        expected = f"a whole number from {sequences}, as many as sequences, to {CLASSES[-1]}"
        if whole("max_step_tokens", max_step_tokens, expected, sequences, "batch") > CLASSES[-1]:
            raise wrong("max_step_tokens", max_step_tokens, expected, "batch")
        most = class_of(max_step_tokens)
        if prefill is None:
            prefill = most if pinned else CPU_PREFILL if software else PREFILL
        self.max_rows = min(max_rows or engine.n_ctx, engine.n_ctx)
        max_pages = -(-self.max_rows // page)
        if engine.n_ctx % page:
            engine.resize(-(-engine.n_ctx // page) * page)
        n_pages = -(-rows // page) if rows else pages_that_fit(engine, sequences * max_pages, page)
        self.paging = Paging(page, n_pages, sequences, max_pages)
        self.pool = PagePool(n_pages, page)
        self.prefixes = PrefixCache(self.pool)
        self.limits = Limits(
            slots=sequences,
            page=page,
            max_rows=self.max_rows,
            max_step_tokens=most,
            piece=min(engine.ubatch, engine.n_ctx),
            prompt_share=prompt_share,
            waiting_weight=WAITING_WEIGHT,
            recurrent=recurrent,
            classes=(most,) if pinned else tuple(n for n in CLASSES if n <= most),
            prefill=0 if recurrent else prefill,
            pinned=pinned,
            reuse=reuse,
        )
        self.scheduler = Scheduler(self.limits, self.pool, self.prefixes)
        self.counters = Counters()
        self._pinned = pinned
        self._caches = PagedCaches(engine, self.paging, kept)
        try:
            self._state = BatchState(self.device, most, self.paging)
        except BaseException:
            self._caches.close()
            raise
        self._programs = StepPrograms(engine, self._caches, self._state, same_kernels=pinned)
        self._edits = Edits()
        self._penalized_slots: set[int] = set()
        self._used_slots: dict[Literal["dry", "chains"], set[int]] = {"dry": set(), "chains": set()}
        self._slot_adapters: dict[int, tuple[float, ...]] = {}
        self._roots: dict[tuple[float, ...], int] = {(): 0}
        self._works: dict[int, _Work] = {}
        self._columns: list[_Work | None] = [None] * most
        self._draft_columns: dict[int, tuple[int, int]] = {}  # slot and number of a draft, by column
        self._flying: deque[_Submitted] = deque()
        self._made: list[Update] = []
        self._ids = count()
        self._last_done = self._looked = 0.0
        self._solo: Solo | None = None
        engine.reset()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give its memory back."""
        if self._solo is not None:
            self._solo.close()
        self._programs.close()
        self._state.arena.destroy()
        self._caches.close()

    @property
    def slots(self) -> int:
        """Texts that run at once, at most."""
        return self.limits.slots

    @property
    def most_rows(self) -> int:
        """Of one text, with all pages that there are."""
        return min(self.max_rows, self.pool.n_pages * self.pool.page)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._flying or self._made or self.scheduler.texts)

    @property
    def reading(self) -> bool:
        """Whether the engine's own cache holds part of a prompt: nobody else may use the engine now."""
        return any(work.begun and work.text.state is State.READING for work in self._works.values())

    @property
    def has_engine(self) -> bool:
        """Whether the engine's own cache holds the text that runs alone: nobody else may use the engine before `give_way`."""
        return self._solo is not None

    def give_way(self) -> None:
        """Others may use the engine: the text that runs alone goes on by steps of the batch."""
        self._end_solo()

    def add(self, request: Request) -> int:
        """Put a request in work; its number. Raises EngineError for ids that are none, ScheduleError for a text that can never fit,
        SamplerError for more end-of-text ids than a loop has room for, and ConstraintError."""
        self.engine.check_ids(request.tokens)
        self.engine.check_ids([i for i, _ in request.sampler.logit_bias])
        self.engine.check_adapters(request.adapters)
        root = self._roots.setdefault(request.adapters, -len(self._roots))
        text = Text(next(self._ids), request.client, tuple(request.tokens), max(request.max_tokens, 1), root=root)
        mask = request.constraint.mask() if request.constraint is not None else None
        # Before the text is in work: a model with too many end-of-text ids is refused here.
        loop = loop_state(request.sampler, self.engine.end_ids(request.stop_at_eos))[:LOOP_RING]
        if request.sampler.dries:
            self.engine.dry_words(request.sampler, self.engine.n_ctx)
        picker = None
        if request.processors:
            picker = HostPicker(self.engine, request.tokens, request.processors, request.sampler, stop_at_eos=request.stop_at_eos)
            loop = loop_state(Sampler(), [])[:LOOP_RING]
        self.scheduler.add(text)
        self._works[text.id] = work = _Work(request, text, loop, mask=mask, picker=picker)
        self._look_up(work)
        return text.id

    def fork(self, id: int, *, sampler: Sampler | None = None, max_tokens: int | None = None) -> int:
        """Put a second text in work that begins with all that this one is so far, prompt and tokens made; its number. While the first one
        runs they share its full pages, and of the last one a copy is made on the device. The fork's first update has the tokens that it
        begins with.

        sampler     of what it makes itself, default: the same, which gives the same text
        max_tokens  most that it has in the end, those that it begins with included; default: as the first one
        Raises ScheduleError where the first one has ended or has as many tokens, EngineError where it has a constraint or processors.
        """
        self._end_solo()
        work = self._works.get(id)
        if work is None:
            raise ScheduleError(f"[batch] text {id}: is not in work, so that it cannot be forked; expected one that has not ended")
        request = work.request
        if request.constraint is not None or request.processors:
            which = "processors, which know" if request.processors else "a constraint, which knows"
            raise EngineError(f"[batch] text {id}: has {which} one text alone; expected a text without: add a request with its tokens")
        request = replace(
            request,
            sampler=request.sampler if sampler is None else sampler,
            max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        )
        self.engine.check_ids([i for i, _ in request.sampler.logit_bias])
        loop = loop_state(request.sampler, self.engine.end_ids(request.stop_at_eos))[:LOOP_RING]
        text = self.scheduler.fork(work.text, next(self._ids), max(request.max_tokens, 1))
        self._works[text.id] = _Work(request, text, loop)
        if text.made:
            self._made.append(Update(text.id, tuple(text.made)))
        return text.id

    def cancel(self, id: int, reason: str = "cancelled") -> None:
        """End a text here; its pages are free within a step."""
        work = self._works.get(id)
        self._end_solo()
        if work is not None and self.scheduler.cancel(id, reason):
            self._leave(work, reason, ())

    def advance(self) -> list[Update]:
        """Do the next thing, which may be to wait for a step, and say what came of it."""
        reads = True
        while len(self._flying) < self.limits.in_flight and not (self._flying and self._host_sees_every_step):
            self.scheduler.most_steps = 1 if self._host_sees_every_step else MAX_STEPS
            action = self.scheduler.next(reads=reads)
            if isinstance(action, Idle):
                break
            self._do(action)
            if isinstance(action, Read):
                reads = False  # so that what steps have made does not wait for more than one; and steps follow it without the caller
            elif not isinstance(action, Step) or (self._solo is not None and self._made):
                break  # a step of a text that runs alone is done when it is submitted
        if self._flying and (reads or not self._made):
            self._collect()
        made, self._made = self._made, []
        if any(update.reason for update in made):
            self.engine.after_text()
        return made

    def run(self) -> list[Update]:
        """All that comes until nothing is left to do."""
        found: list[Update] = []
        while self.busy:
            found += self.advance()
        return found

    def read_prompts(self) -> None:
        """With `prompt_share` 1: read the prompts of all texts in work, as far as there are slots, and submit their first step."""
        action: Action | None = None
        while not isinstance(action, Step | Idle):
            action = self.scheduler.next()
            if not isinstance(action, Idle):
                self._do(action)

    def prepare_prompts(self) -> None:
        """Compile and record every program of prompts, and the copies of pages, so that none is compiled while texts run. Does nothing
        while texts are in work."""
        if not self.scheduler.texts:
            self.engine.reset()
            self.engine.prepare(prompt=self.engine.prompts.sizes())
            self._caches.prepare()

    def prepare(self, columns: Sequence[int] = (), sampler: Sampler | None = None) -> None:
        """Compile and record what steps of so many columns need, default: all there may be, of which the scheduler learns how long a step
        takes. Does nothing while texts run."""
        kind = _kind(sampler or Sampler())
        if self._flying or any(self._columns):
            return
        for n in {class_of(n, self.limits.max_step_tokens) for n in columns} if columns and not self._pinned else self.limits.classes:
            if not self._programs.ready(n, kind):
                self._programs.prepare(n, kind)
                self.scheduler.probed(n, min(self._programs.seconds(n, kind) for _ in range(PROBES)))

    # What the scheduler decides

    def _do(self, action: Action) -> None:
        if isinstance(action, Step) and self._runs_alone(action):
            self._step_alone(action)
            return
        self._end_solo()
        if isinstance(action, Step):
            self._submit(action)
        elif isinstance(action, Read):
            self._read(action)
        elif isinstance(action, Keep):
            self._drain()
            work = self._works[action.text.id]
            work.kept = [self._caches.download([page]) for page in action.pages]
            work.kept_states = self._caches.download_states(action.slot)
            if work.picker is None and work.request.sampler.mirostat and work.request.sampler.chained:
                size = 4 * CHAIN_WORDS
                work.chain = self.device.download(self._programs.other_input("chains").slice(action.slot * size, size), np.float32)
            work.pages = 0
            self._take_out(work)
        elif isinstance(action, Bring):
            self._bring(action)
        elif isinstance(action, Copy):
            if action.from_page >= 0:
                self._caches.copy([action.from_page], [action.to_page])
            self._caches.copy_states(action.from_slot, action.text.slot)

    def _read(self, action: Read) -> None:
        """The device goes from the steps in flight to the read; meanwhile the host takes what the steps have made."""
        text, work = action.text, self._works[action.text.id]
        began = time.perf_counter()
        before = self.engine.compiled.seconds
        failed: list[VkbackError] = []

        def meanwhile() -> None:
            try:
                self._drain()
            except VkbackError as error:
                failed.append(error)
                raise

        if not work.begun:
            work.begun = True
            self.engine.reset()
            self.engine.use_adapters(work.request.adapters)
            work.took.reused = action.first
            if action.matched:
                self._caches.stage(action.matched, range(len(action.matched)))
                self.engine.assume(text.tokens[: action.first])
        try:
            self.engine.prompt(text.tokens[action.first : action.first + action.count], meanwhile)
        except (DeviceLost, Timeout):
            raise
        except VkbackError as error:  # of this text alone, whose rows are worth nothing
            if failed:
                raise
            self.scheduler.failed_read(action, "error")
            self._leave(work, "error", (), error=error)
            return
        if action.first + action.count == text.length - 1:
            self._caches.store_states(text.slot, text.length - 1)
        if action.store:
            self._caches.store(action.store, [text.pages[i] for i in action.store])
        seconds = time.perf_counter() - max(began, self._last_done) - (self.engine.compiled.seconds - before)
        self.counters.read += action.count
        self.counters.seconds["prompts"] += seconds
        work.took.prompt_s += seconds
        self.scheduler.done_read(action, max(seconds, 0.0))

    def _bring(self, action: Bring) -> None:
        work = self._works[action.text.id]
        for i in action.restore:
            self._caches.upload([action.text.pages[i]], work.kept[i])
        if work.kept_states is not None:
            self._caches.upload_states(action.text.slot, work.kept_states)
        work.kept, work.kept_states = [], None

    def _submit(self, action: Step) -> None:
        drafting = any(c.drafts for c in action.columns)
        if drafting and any(
            w.column >= 0 and not 0 <= w.behind <= RING // 2 for w in (self._works[c.text.id] for c in self._in(action) if c.drafts)
        ):
            self._drain()  # so that the host knows the whole text
        columns = self._in(action)
        ids = {c.text.id for c in columns}
        for i, work in enumerate(self._columns):
            if work is not None and work.text.id not in ids:  # at its limit with its last step in flight, which makes the column a hole
                self._columns[i], work.column = None, -1
        if any(self._works[c.text.id].column >= action.width for c in columns):
            # Texts move together once it is known where they are, and which have ended.
            self._drain()
            columns = self._in(action)
            for c in columns:
                self._take_out(self._works[c.text.id])
        if not columns:
            self._flying.append(_Submitted(action, None, time.perf_counter()))
            return
        kind = Kind()
        for c in columns:
            work = self._works[c.text.id]
            kind |= self._kind_of(work)
            if c.steps:
                self._place(work)
            self._give_pages(work)
            self._give_adapters(work)
        self._prefill(columns)
        kind = replace(kind, drafts=drafting)
        self._give_drafts(columns, action)
        if not self._programs.ready(action.width, kind):
            self._drain()  # whose time would hold that of compilers
            self._programs.record(action.width, kind, action.count)
            columns = self._in(action)
        given = {c.text.id: self._columns_of(self._works[c.text.id]) for c in columns if c.steps}
        if kind.masked:
            self._write_masks([(self._works[id], own) for id, own in given.items()], drafting=drafting)
        began = time.perf_counter()
        for c in columns:
            work = self._works[c.text.id]
            if c.steps and not work.took.began:
                work.took.began = began
        flight = self._programs.submit(action.width, kind, action.count, self._edits)
        self._flying.append(_Submitted(action, flight, began, given, self._looked if drafting else 0.0))
        self._looked = 0.0
        self.counters.steps += action.count
        self.counters.columns += sum(c.steps + c.tokens - 1 for c in action.columns)

    def _runs_alone(self, action: Step) -> bool:
        """Whether a step is that of the only text there is, which may draft."""
        if self._pinned or self.limits.recurrent or len(self._works) != 1 or len(action.columns) != 1:
            return False
        column, (work,) = action.columns[0], self._works.values()
        request = work.request
        drafts = request.max_tokens and request.drafts and request.drafts.most
        sampler = request.sampler
        plain = not (request.constraint or request.logits or request.processors or sampler.moves)
        return bool(drafts and column.steps and column.tokens == 1) and plain

    def _step_alone(self, action: Step) -> None:
        """A step by the engine's own loop."""
        self._drain()
        columns = self._in(action)
        if not columns:
            self.scheduler.done_step(action, {}, {}, 0.0)
            return
        column = columns[0]
        text, work = column.text, self._works[column.text.id]
        request = work.request
        began, compiled = time.perf_counter(), self.engine.compiled.seconds
        work.probe, text.gains = None, ()
        if self._solo is None:
            self._note_reused(work)
            self._take_out(work)
            self._settle(work)
            work.took.before = work.took.drafts
            self._solo = Solo(self.engine, self._caches, text, request)
        work.took.began = work.took.began or began
        made: list[int] = []
        ended: dict[int, str] = {}
        error: VkbackError | None = None
        try:
            made = self._solo.take(column.steps)
        except (DeviceLost, Timeout):
            raise
        except VkbackError as e:
            ended[text.id], error = "error", e
        seconds = max(time.perf_counter() - began - (self.engine.compiled.seconds - compiled), 0.0)
        counts = self.engine.draft_counts
        work.took.drafts = work.took.before + counts
        if made and made[-1] in self.engine.end_ids(request.stop_at_eos):
            ended[text.id] = "eos"
        elif len(text.made) + len(made) >= text.limit:
            ended.setdefault(text.id, "length")
        if ended:
            self._end_solo()
        self.counters.steps += action.count
        self.counters.columns += len(made)
        self.counters.tokens += len(made)
        self.counters.seconds["steps"] += seconds
        # How long steps of columns take is not learned from those of a text alone.
        self.scheduler.done_step(action, {text.id: made}, ended, max(seconds, self.scheduler.step_seconds(action.width) * action.count))
        if ended:
            self._leave(work, ended[text.id], made, (), error)
        else:
            self._made.append(Update(text.id, tuple(made), "", (), work.took))

    def _end_solo(self) -> None:
        """The text that runs alone, if one does, goes on by steps of the batch."""
        if self._solo is not None:
            self.counters.drafts += self.engine.draft_counts
            self._solo.leave()
            self._solo = None

    def _prefill(self, columns: Sequence[Column]) -> None:
        """Give the tokens of prompts that make no token columns that are holes before and after the step."""
        holes = (i for i, work in enumerate(self._columns) if work is None)
        for c in columns:
            work = self._works[c.text.id]
            tokens = c.text.tokens[c.first : c.first + c.tokens - (c.steps > 0)] if c.tokens > 1 or not c.steps else []
            if tokens and not work.begun:
                work.begun, work.took.reused = True, c.first
            for row, token in enumerate(tokens, c.first):
                self._put(next(holes), work.text, token, row, draws=0)
            self.counters.read += len(tokens)

    # Drafts

    def _may_draft(self, work: _Work) -> Drafts | None:
        """Those that a text may have beside others: none where its tokens are picked on the host, or each moves its sampler on; of a
        recurrent model as many as there are states to go back to."""
        request, drafts = work.request, work.request.drafts
        if drafts is not None and self.limits.recurrent:
            drafts = drafts.at_most(self._caches.kept - 2)
        if drafts is None or not drafts.most or drafts.model or not request.max_tokens:
            return None
        return None if request.processors or request.sampler.moves else drafts

    def _look_up(self, work: _Work, made: Sequence[int] = ()) -> None:
        """The host takes tokens of a text that it has to see every token of, and finds drafts for its next step, and the mask."""
        request, text = work.request, work.text
        if not request.constraint and not request.logits:
            return
        drafts = self._may_draft(work)
        if drafts is None:
            work.mask = request.constraint.mask() if request.constraint is not None else None
            return
        began = time.perf_counter()
        if work.looked_up is None:
            work.looked_up = HostDrafts(drafts, request.constraint, text.tokens)
        work.looked_up.take(made)
        few = 2 * self.scheduler.running <= self.limits.max_step_tokens
        work.looked_up.look(min(text.limit - len(text.made) - 1, self.limits.max_step_tokens - self.scheduler.running) if few else 0)
        text.gains = work.looked_up.gains
        work.mask = next(iter(work.looked_up.ahead.masks), None)
        self._looked += time.perf_counter() - began

    def _columns_of(self, work: _Work) -> list[int]:
        """Of a text in the next step: that of its last token, and those of drafts that the host has looked up."""
        own = {i: column for column, (slot, i) in self._draft_columns.items() if slot == work.text.slot}
        return [work.column, *(own[i + 1] for i in range(work.looked_up.used if work.looked_up is not None else 0))]

    def _probe(self, work: _Work, made: Sequence[int]) -> None:
        """Note tokens of a text, and what the scheduler goes by when it shares out columns."""
        text, drafts = work.text, self._may_draft(work)
        if work.looked_up is not None:
            return
        if drafts is None or 2 * self.scheduler.running > self.limits.max_step_tokens:
            text.gains, work.probe = (), None
            return
        if drafts.known is not None:
            text.gains = tuple(1.0 + i for i in range(drafts.most + 1))
            return
        if work.probe is None:
            work.probe = Probe(text.tokens[: len(text.tokens) - len(made)])
        for token in made:
            work.probe.take(token)
        text.gains = gains_of(work.probe.hits, drafts.most) if len(work.probe.hits) >= ENOUGH else ()

    def _give_drafts(self, columns: Sequence[Column], action: Step) -> None:
        """Columns of this step to drafts, and the device what it needs to find them."""
        wanted = [(c.slot, i) for c in columns for i in range(1, c.drafts + 1)]
        for column, draft in list(self._draft_columns.items()):
            if draft not in wanted or column >= action.width or self._columns[column] is not None:
                del self._draft_columns[column]
                if self._columns[column] is None:
                    self._edits.put(self._state.word("draws", column), 0)
        free = (i for i in range(action.width) if self._columns[i] is None and i not in self._draft_columns)
        there = set(self._draft_columns.values())
        for slot, i in (draft for draft in wanted if draft not in there):
            column = next(free)
            self._draft_columns[column] = slot, i
            for name, value in {"slots": slot, "draws": 1 + i, "pos": -1, "rows": -1}.items():
                self._edits.put(self._state.word(name, column), value)
        for c in columns:
            work = self._works[c.text.id]
            if c.drafts and not 0 <= work.behind <= RING // 2:
                self._give_text(work)
            if work.looked_up is not None:
                self._give_looked_up(work, c.drafts)
            if work.behind >= 0:
                # In steps with drafts the device brings its text up to what its loop has made.
                work.behind = 0 if wanted else work.behind + c.steps

    def _give_looked_up(self, work: _Work, most: int) -> None:
        """Columns the drafts that the host has found for a text, as many as it has columns and pages for."""
        assert work.looked_up is not None
        text, page = work.text, self.paging.page
        found = work.looked_up.ahead.tokens[: max(min(most, len(text.pages) * page - text.length), 0)]
        columns = {i: column for column, (slot, i) in self._draft_columns.items() if slot == text.slot}
        for i, token in enumerate(found):
            self._put(columns[i + 1], text, token, text.length + i, draws=2 + i)
        work.looked_up.used = len(found)

    def _give_text(self, work: _Work) -> None:
        """The device a text, all of whose tokens are known to the host, and what its drafts are."""
        drafts, text = self._may_draft(work), work.text
        assert drafts is not None
        self._settle(work)
        inputs, rows = self._programs.draft_inputs(), self.paging.page * self.paging.max_pages
        if work.looked_up is not None:
            drafts = Drafts(0)  # LOOKUP_COLUMNS leaves its columns as the host has written them
        words = np.full(rows, -1, np.int32)
        given = text.tokens if drafts.known is None else drafts.known[:rows]
        words[: len(given)] = given
        draft = np.zeros(DRAFT_WORDS, np.int32)
        mode = FROM_TEXT if drafts.known is None else KNOWN
        draft[[MADE, MODE, MOST, LEAST, MATCH]] = work.seen, mode, drafts.most, drafts.least, drafts.match
        for name, values in (("texts", words), ("draft", draft)):
            self.device.upload(inputs[name].slice(text.slot * values.nbytes, values.nbytes), values)
        work.behind = 0

    def _settle(self, work: _Work) -> None:
        """Count a text's drafts so far to all."""
        self.counters.drafts += work.counted
        work.took.before, work.counted = work.took.drafts, DraftCounts()
        work.behind = -1

    def _in(self, action: Step) -> list[Column]:
        """Columns of a step whose texts have not ended."""
        return [c for c in action.columns if c.text.id in self._works]

    def _kind_of(self, work: _Work) -> Kind:
        request = work.request
        if work.picker is not None:
            return Kind(logits=True)
        return _kind(request.sampler, masked=request.constraint is not None, logits=request.logits)

    @property
    def _host_sees_every_step(self) -> bool:
        """Whether the next step needs what the last one made: a constraint's mask, a token that the host picks, or logits that the next
        would overwrite."""
        return any(w.request.constraint or w.request.logits or w.picker for w in self._works.values())

    # Columns

    def _place(self, work: _Work) -> None:
        """Give a text that has none a column, and its slot a loop that begins where the text stands."""
        if work.column >= 0:
            return
        text, request = work.text, work.request
        self._note_reused(work)
        column = self._columns.index(None)
        self._columns[column], work.column = work, column
        self._put(column, text, text.tokens[-1], text.length - 1, draws=1)
        loop = work.loop.copy()
        loop[LOOP_LIMIT] = text.limit - len(text.made)
        for i, value in enumerate(loop.tolist()):
            self._edits.put(self._state.word("loops", text.slot * LOOP_WORDS + i), value)
        work.seen = work.pages = 0
        self._settle(work)
        sampler = request.sampler if work.picker is None else Sampler()
        if sampler.dries or text.slot in self._used_slots["dry"]:
            rows = self.paging.page * self.paging.max_pages
            self._give("dry", text.slot, self.engine.dry_words(sampler, rows), sampler.dries)
        if sampler.chained or text.slot in self._used_slots["chains"]:
            chain = work.chain if work.chain is not None else sampler.chain.words()
            self._give("chains", text.slot, chain.view(np.int32), sampler.chained)
        penalized = work.picker is None and (sampler.penalizes or request.constraint is not None or sampler.dries)
        if penalized or text.slot in self._penalized_slots:  # else the slot would keep those of the text before
            self._upload_penalties(work)
        (self._penalized_slots.add if penalized else self._penalized_slots.discard)(text.slot)

    def _give(self, name: Literal["dry", "chains"], slot: int, words: npt.NDArray[np.int32], used: bool) -> None:
        """A slot's words of an input that few texts need; without use, so that it keeps nothing of the text before."""
        self.device.upload(self._programs.other_input(name).slice(slot * words.nbytes, words.nbytes), words)
        (self._used_slots[name].add if used else self._used_slots[name].discard)(slot)

    def _give_adapters(self, work: _Work) -> None:
        """A slot's scales of adapters, where they are others than those of the text before."""
        lora, slot, scales = self.engine.model.lora, work.text.slot, work.request.adapters
        if lora is not None and lora.switched and self._slot_adapters.get(slot, ()) != scales:
            words = lora.switches(scales)
            self.device.upload(self._programs.adapter_scales().slice(slot * words.nbytes, words.nbytes), words)
            self._slot_adapters[slot] = scales

    def _note_reused(self, work: _Work) -> None:
        """Of a text that is about to make its first token: whether its prompt was known."""
        if not work.took.began and not work.begun and work.text.length - 1 == work.text.rows:  # nothing of its prompt had to be read
            work.took.reused = work.text.rows

    def _put(self, column: int, text: Text, token: int, row: int, *, draws: int) -> None:
        """What a column takes in the next step: a token of a text, for a row of its own. draws: 0: it picks nothing; 1: it is the last one
        of the text; 1 + i: draft i."""
        page = self.paging.page
        stored = text.pages[row // page] * page + row % page
        for name, value in {"tokens": token, "pos": row, "rows": stored, "slots": text.slot, "draws": draws}.items():
            self._edits.put(self._state.word(name, column), value)

    def _give_pages(self, work: _Work) -> None:
        """Entries of the page table that the device does not have yet."""
        first = work.text.slot * self.paging.max_pages
        for i in range(work.pages, len(work.text.pages)):
            self._edits.put(self._state.word("pages", first + i), work.text.pages[i])
        work.pages = len(work.text.pages)

    def _take_out(self, work: _Work) -> None:
        """Make a text's column a hole."""
        if work.column >= 0:
            for name in ("pos", "rows"):
                self._edits.put(self._state.word(name, work.column), -1)
            self._columns[work.column] = None
            work.column = -1

    def _leave(
        self, work: _Work, reason: str, tokens: Sequence[int], logits: Sequence[Floats] = (), error: Exception | None = None
    ) -> None:
        self._take_out(work)
        self._settle(work)
        del self._works[work.text.id]
        self._made.append(Update(work.text.id, tuple(tokens), reason, tuple(logits), work.took, error))

    def _upload_penalties(self, work: _Work) -> None:
        """Bias and counts of a text's slot."""
        vocab, slot = self.engine.model.hp.n_vocab, work.text.slot
        inputs, sampler = self._programs.penalty_inputs(), Sampler() if work.picker is not None else work.request.sampler
        rows = self.paging.page * self.paging.max_pages
        seen = sampler.penalties(rows).words(work.text.tokens[:-1], vocab, rows)
        self.device.upload(inputs["bias"].slice(4 * slot * vocab, 4 * vocab), sampler.bias(vocab))
        self.device.upload(inputs["seen"].slice(4 * slot * len(seen), 4 * len(seen)), seen)

    def _write_masks(self, works: Sequence[tuple[_Work, list[int]]], *, drafting: bool) -> None:
        """Of the next step; works: texts with their columns."""
        rows = self._programs.masks
        rows[:] = -1
        for work, columns in works:
            if not drafting and work.mask is not None:
                rows[work.text.slot] = work.mask
            elif work.looked_up is not None and work.looked_up.ahead.masks:
                rows[columns] = work.looked_up.ahead.masks[: len(columns)]
            elif work.mask is not None:
                rows[columns[0]] = work.mask

    # Results

    def _drain(self) -> None:
        """Wait for all steps in flight."""
        while self._flying:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest step in flight, and report it."""
        done = self._flying[0]
        if done.flight is None:
            self._flying.popleft()
            self.scheduler.done_step(done.action, {}, {}, 0.0)
            return
        done.flight.ticket.wait()
        now = time.perf_counter()
        if done.flight.back.timed_out:
            self._go_on_with_barriers()
            return
        self._flying.popleft()
        seconds = now - max(done.began, self._last_done)
        self._last_done = now
        self.counters.seconds["steps"] += seconds
        loops = done.flight.loops(self.paging.n_slots)
        made: dict[int, list[int]] = {}
        ended: dict[int, str] = {}
        errors: dict[int, Exception] = {}
        drafted = done.flight.drafts()
        for text, slot, steps, taken, _, drafts in done.action.columns:
            work = self._works.get(text.id)
            if work is None:
                continue
            if taken > 1 or not steps:
                work.took.prompt_s += seconds
            if not steps:  # the slot's loop may be that of the text before
                continue
            step, status = int(loops[slot, 0]), int(loops[slot, 1])
            made[text.id] = tokens = [int(loops[slot, LOOP_RING + i % RING]) for i in range(work.seen, step)]
            work.seen = step
            if drafts and drafted is not None and work.behind >= 0:
                work.counted = DraftCounts.read(drafted[slot])
                work.took.drafts = work.took.before + work.counted
            if status == STATUS_NO_PAGE:
                raise EngineError(f"[batch] text {text.id} ran out of pages on the device; expected the scheduler to assign them ahead")
            if status == STATUS_EOS:
                ended[text.id] = "eos"
            elif status == STATUS_NAN:
                ended[text.id] = "error"
                errors[text.id] = self._not_numbers(text, len(text.tokens) + len(tokens))
            elif len(text.made) + len(tokens) >= text.limit:
                ended[text.id] = "length"
        logits = self._logits_of(done.flight)
        self._pick(made, ended, errors, logits)
        self.counters.tokens += sum(map(len, made.values()))
        self.scheduler.done_step(done.action, made, ended, seconds + done.looked)
        for id, tokens in made.items():
            work = self._works[id]
            self._probe(work, tokens)
            if not work.request.max_tokens:  # its prompt is read, which is all that was wanted
                tokens = []
            columns = done.columns.get(id, [])[: len(tokens)]
            own = tuple(logits[column] for column in columns) if logits is not None and work.request.logits else ()
            reason = ""
            if work.request.constraint is not None or work.request.logits:
                try:
                    reason = self._constrain(work, tokens, last=id in ended)
                except VkbackError as error:
                    reason, errors[id] = "error", error
                if reason and ended.get(id) != "eos":
                    ended[id] = reason
                    self.scheduler.cancel(id, reason)
            if work.picker is not None:
                self._take_out(work)
            if id in ended:
                self._leave(work, ended[id], tokens, own, errors.get(id))
            elif tokens:
                self._made.append(Update(id, tuple(tokens), "", own, work.took))

    def _not_numbers(self, text: Text, position: int) -> EngineError:
        """Why logits of a text are not numbers. What its pages and those that others began with have is worth nothing."""
        self.prefixes.clear()
        who = f"[batch] {self.engine.model.file.path}: sequence {text.slot}"
        if found := self._caches.beyond_range(text.pages, position):
            return EngineError(f"{who}: {overflow_message(found)}")
        return EngineError(
            f"{who}: logits are not numbers at position {position}; the file is damaged or a kernel is wrong on this device: run "
            "`vkback test-ops`"
        )

    def _pick(self, made: dict[int, list[int]], ended: dict[int, str], errors: dict[int, Exception], logits: Floats | None) -> None:
        """Put the tokens that the host picks in the place of the device's; their texts get a column anew."""
        for id, tokens in made.items():
            work = self._works[id]
            if work.picker is None or not tokens or id in errors:
                continue
            assert logits is not None and work.column >= 0
            mask = work.mask if work.request.constraint is not None else None
            try:
                tokens[:] = [work.picker.pick(logits[work.column], mask)]
            except Exception as error:  # of somebody's function: of this text alone
                tokens.clear()
                ended[id], errors[id] = "error", error
                continue
            if work.picker.at_end:
                ended[id] = "eos"

    def _constrain(self, work: _Work, tokens: Sequence[int], *, last: bool) -> str:
        """Tell a text's constraint what came, and get its next mask, and drafts; "stop" where nothing may come any more."""
        if (constraint := work.request.constraint) is not None:
            for token in tokens:
                constraint.take(token)
            if constraint.ended:
                return "stop"
        if tokens and not last:
            self._look_up(work, tokens)
        return ""

    def _logits_of(self, flight: Flight) -> Floats | None:
        if flight.logits is None:
            return None
        vocab = self.engine.model.hp.n_vocab
        words = flight.logits.map().view(np.float32)
        return np.array(words[: flight.columns * vocab]).reshape(-1, vocab)

    def _go_on_with_barriers(self) -> None:
        """A spin-wait timed out, so that what is in flight is worth nothing: plan with barriers, and take the same steps once more from
        where the texts stand."""
        again = [s.action for s in self._flying]
        for s in self._flying:
            if s.flight is not None:
                s.flight.ticket.wait()
        self._flying.clear()
        self.engine.use_barriers(TIMED_OUT)
        self._programs.forget_plans()
        for work in self._works.values():
            self._take_out(work)
        for column in self._draft_columns:
            for name in ("pos", "rows"):
                self._edits.put(self._state.word(name, column), -1)
        for action in again:
            self._submit(action)
