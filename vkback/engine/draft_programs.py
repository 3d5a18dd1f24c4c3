"""Programs of a step with drafts over the caches of one context: planned, bound and recorded by class of step, and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Device
from vkback.engine.draft_model import Drafter
from vkback.engine.drafts import CLASSES, DraftCounts, Drafts, StepTimes, steps_at_once
from vkback.engine.plans import Plans
from vkback.engine.readback import TokenLoop
from vkback.engine.sampler import CONSTRAINED, DRIED, PENALIZED, draft_words
from vkback.engine.token_programs import SUBMITS_IN_FLIGHT, TokenPrograms
from vkback.ops.sampling.lookup import DRAFT_WORDS, FIRST, FROM_TEXT, KNOWN, LEAST, MATCH, MODE, MODEL, MOST
from vkback.ops.sampling.penalties import mask_words
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program
from vkback.program.program import overflow_bytes


class DraftPrograms:
    """Beside TokenPrograms, whose token, position and loop they share: steps of either kind may follow each other.

    bind  (schedule, inputs by name) -> program
    """

    def __init__(
        self, device: Device, plans: Plans, tokens: TokenPrograms, bind: Callable[[Schedule, dict[str, BufferRange]], Program]
    ) -> None:
        """Takes no memory until something is used."""
        self._device, self._plans, self._tokens, self._bind = device, plans, tokens, bind
        self._programs: dict[tuple[int, str], Program] = {}
        self._loops: dict[tuple[int, str, int], TokenLoop] = {}
        self._with_drafter: dict[tuple[int, str, int], TokenLoop] = {}
        self._drafter: tuple[Program, int] | None = None  # of which those are
        self._arenas: list[Arena] = []
        self._inputs: dict[str, BufferRange] = {}
        self._backs: list[BufferRange] = []
        self._overflows: list[BufferRange] = []
        self._masks: BufferRange | None = None
        self._logits: BufferRange | None = None
        self.times: dict[str, StepTimes] = {}

    @property
    def before(self) -> int:
        """Words of `text` before the context's own."""
        return draft_words(self._plans.n_ctx)

    def inputs(self) -> dict[str, BufferRange]:
        """`text` and `draft`, in memory that is taken when it is first used."""
        if not self._inputs:
            sizes = {"text": 4 * (self.before + self._plans.n_ctx), "draft": 4 * DRAFT_WORDS}
            arena = self._device.arena("drafts", sum(map(aligned, sizes.values())), "device")
            self._arenas.append(arena)
            self._inputs = {name: arena.alloc(size, name) for name, size in sizes.items()}
            count = SUBMITS_IN_FLIGHT + 1
            back = self._device.arena("read-back of drafts", count * aligned(4 * DRAFT_WORDS), "readback")
            self._arenas.append(back)
            self._backs = [back.alloc(4 * DRAFT_WORDS, "draft") for _ in range(count)]
        return self._inputs

    def begin(self, text: Sequence[int], drafts: Drafts, earlier: Sequence[int]) -> None:
        """The next step belongs to this text, whose last token has not gone through the model. earlier: of other texts, each with -1 behind
        it."""
        words = np.full(self.before + self._plans.n_ctx, -1, np.int32)
        draft = np.zeros(DRAFT_WORDS, np.int32)
        draft[[FIRST, MODE, MOST, LEAST, MATCH]] = self.before, FROM_TEXT, drafts.most, drafts.least, drafts.match
        if drafts.known is not None:
            draft[MODE] = KNOWN
            known = np.array(drafts.known[: self.before], np.int32)
            words[: len(known)] = known
        elif drafts.model:
            draft[MODE] = MODEL
        elif kept := list(earlier[-(self.before - 1) :]) if self.before > 1 else []:
            draft[FIRST] = self.before - 1 - len(kept)
            words[draft[FIRST] : self.before - 1] = kept
        end = self.before + min(len(text), self._plans.n_ctx)
        words[self.before : end] = text[: self._plans.n_ctx]
        inputs = self.inputs()
        self._device.upload_many([(inputs["text"], words[:end]), (inputs["draft"], draft)])

    def give(self, at: int, tokens: Sequence[int], columns: int, masks: Sequence[npt.NDArray[np.int32]] = ()) -> None:
        """The next step, of a text whose drafts are known and which `begin` has begun, has these behind position `at`. masks: of a text
        with a constraint those of its first columns; the others have no draft. One upload, as of a step without drafts."""
        uploads = []
        words = np.full(CLASSES[-1], -1, np.int32)
        words[: len(tokens)] = tokens
        words = words[: max(self.before - at - 1, 0)]
        if len(words):
            uploads.append((self.inputs()["text"].slice(4 * (at + 1), words.nbytes), words))
        if masks:
            rows = np.full((columns, mask_words(self._tokens.n_vocab)), -1, np.int32)
            rows[: len(masks)] = masks[:columns]
            uploads.append((self.masks().slice(0, rows.nbytes), rows.reshape(-1)))
        if uploads:
            self._device.upload_many(uploads)

    def give_no_masks(self) -> None:
        """All columns of the next step may have any token."""
        masks = self.masks()
        self._device.upload(masks, np.full(masks.size // 4, -1, np.int32))

    def masks(self) -> BufferRange:
        """Those of a constraint, one a column, in memory that is taken when it is first used."""
        if self._masks is None:
            size = 4 * CLASSES[-1] * mask_words(self._tokens.n_vocab)
            arena = self._device.arena("masks of drafts", aligned(size), "device")
            self._arenas.append(arena)
            self._masks = arena.alloc(size, "masks")
        return self._masks

    def logits(self, columns: int) -> npt.NDArray[np.float32]:
        """Those of each column that the last submit copied, [columns, n_vocab]."""
        assert self._logits is not None
        vocab = self._tokens.n_vocab
        return np.array(self._logits.map().view(np.float32)[: columns * vocab]).reshape(columns, vocab)

    def program(self, columns: int, kind: str) -> Program:
        key = columns, kind
        if key not in self._programs:
            schedule = self._plans.drafts(columns, kind)
            inputs = self._tokens.columns(columns) | self.inputs()
            if PENALIZED in kind:
                inputs |= self._tokens.penalty_inputs()
            if DRIED in kind:
                inputs["dry"] = self._tokens.dry_input()
            if CONSTRAINED in kind:
                masks = self.masks()
                inputs["masks"] = masks.slice(0, masks.size // CLASSES[-1] * columns)
            if size := overflow_bytes(schedule):
                self._make_room(size)
            self._programs[key] = self._bind(schedule, inputs)
        return self._programs[key]

    def _make_room(self, size: int) -> None:
        if self._overflows and self._overflows[0].size >= size:
            return
        count = SUBMITS_IN_FLIGHT + 1
        arena = self._device.arena("overflow words of drafts", count * aligned(size), "readback")
        self._arenas.append(arena)
        self._overflows = [arena.alloc(aligned(size), "overflow words") for _ in range(count)]
        for memory in self._overflows:
            memory.map()[:] = 0

    def loop(self, columns: int, kind: str, steps: int, *, logits: bool = False, drafter: Drafter | None = None) -> TokenLoop:
        """The recording of so many steps; logits: it copies those of all columns of the last one. drafter: makes the drafts of each."""
        key = columns, f"{kind}, logits" if logits else kind, steps
        loops = self._loops
        if drafter is not None:
            loops = self._with_drafter
            if self._drafter != (of := (drafter.program, drafter.count)):
                for loop in loops.values():
                    loop.destroy()
                loops.clear()
                self._drafter = of
        if key not in loops:
            program = self.program(columns, kind)
            draft = self.inputs()["draft"]
            copies = [[(draft, back), *(drafter.copies(i) if drafter is not None else ())] for i, back in enumerate(self._backs)]
            if logits:
                found = program.range("result_output")
                if self._logits is None:
                    size = aligned(4 * CLASSES[-1] * self._tokens.n_vocab)
                    self._arenas.append(self._device.arena("logits of drafts", size, "readback"))
                    self._logits = self._arenas[-1].alloc(size, "logits of drafts")
                for of_one in copies:
                    of_one.append((found, self._logits.slice(0, found.size)))
            if (overflow := program.overflow) is not None:
                for of_one, memory in zip(copies, self._overflows, strict=True):
                    of_one.append((overflow, memory.slice(0, overflow.size)))
            before = drafter.write if drafter is not None else None
            loops[key] = self._tokens.token_loop(program, f"{columns} columns, {kind}", steps, copies, before)
        return loops[key]

    def counts(self, back: int) -> DraftCounts:
        """Of the text so far, after the submit with this read-back."""
        return DraftCounts.read(self._backs[back].map().view(np.int32))

    def overflowed(self, back: int) -> bool:
        """Whether activations were beyond the range of f16 in the submit with this read-back, so that it is worth nothing."""
        return bool(self._overflows) and bool(self._overflows[back].map().any())

    def measure(self, kind: str, classes: Sequence[int], at_once: int, seconds: Callable[[int, int], float]) -> None:
        """Find out the times of steps. at_once: tokens of a submit; seconds: (columns, steps) -> how long they take."""
        runs = [(1, at_once), *((columns, steps_at_once(at_once)) for columns in classes)]
        took = {columns: min(seconds(columns, steps) for _ in range(3)) / steps for columns, steps in runs}
        self.times[kind] = StepTimes.of_seconds(took.pop(1), took)

    def forget_programs(self) -> None:
        """Make them anew when they are next used, and measure them again."""
        for program in self._programs.values():
            program.close()
        for cache in (self._programs, self._loops, self._with_drafter, self.times):
            cache.clear()
        self._drafter = None

    def close(self) -> None:
        """Give everything back; what is used later is made anew."""
        self.forget_programs()
        for arena in reversed(self._arenas):
            arena.destroy()
        self._arenas.clear()
        self._inputs = {}
        self._backs, self._overflows = [], []
        self._masks = self._logits = None
