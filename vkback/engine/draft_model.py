"""Models whose picks are the drafts of another: a second, smaller one, the MTP block of the target's own file, or an EAGLE-3 head. Their
tokens go to the target's next step without the host.

Ahead of each step of the target, in the same recording, its last token and position are copied to the drafter, which makes as many greedy
tokens as there are drafts; its ids are copied to where LOOKUP takes them (mode MODEL). So a submit may have several steps. A draft model
takes in the last of its tokens, too, so that its cache has a row for each draft. Rows of drafts that were not accepted are written over by
those of the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from vkback.device import Arena, BufferRange, Device, Recorder
from vkback.engine.drafts import CLASSES, DraftError
from vkback.engine.sampler import Sampler, loop_state, sure_kind
from vkback.engine.token_programs import INPUT_BYTES, TokenPrograms
from vkback.models.registry import Model
from vkback.ops.sampling.sample import LOOP_RING
from vkback.program import Program

DRAFTS = 3
"""Of a step, unless somebody asks for others; llama.cpp's number."""

ROOM = CLASSES[-1] + 1
"""Rows that the draft model's cache has beside the target's context: its drafts lie before the text."""


class DraftEngine(Protocol):
    """What a draft model is run by: an Engine of its own."""

    @property
    def model(self) -> Model: ...

    @property
    def device(self) -> Device: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def token_programs(self) -> TokenPrograms: ...

    def rewind(self, n: int) -> bool: ...

    def prompt(self, tokens: Sequence[int]) -> None: ...

    def assume(self, tokens: Sequence[int]) -> None: ...

    def resize(self, n_ctx: int) -> None: ...

    def use_barriers(self, why: str) -> None: ...

    def close(self) -> None: ...


def check_draft_model(target: Model, draft: Model) -> None:
    """Raises DraftError, naming what differs, for a model whose tokens are not the target's, or that cannot draft."""
    name = draft.file.path.name
    if draft.architecture.recurrent:
        raise DraftError(f"[drafts] {name}: has recurrent states, which cannot go back; expected a draft model of attention alone")
    sizes = draft.hp.n_vocab, target.hp.n_vocab
    if sizes[0] != sizes[1]:
        raise DraftError(f"[drafts] {name}: {sizes[0]} tokens, {target.file.path.name} has {sizes[1]}; expected one of its family")
    if not (target.has_text and draft.has_text):
        return
    mine, other = target.tokenizer, draft.tokenizer
    for what, one, two in (("bos", other.bos, mine.bos), ("end-of-text", sorted(other.eos_ids), sorted(mine.eos_ids))):
        if one != two:
            raise DraftError(f"[drafts] {name}: {what} is {one}, {target.file.path.name} has {two}; expected one of its family")
    for i in range(min(mine.n_vocab, other.n_vocab)):
        if mine.token_bytes(i, special=True) != other.token_bytes(i, special=True):
            one_text, two_text = other.token_bytes(i, special=True), mine.token_bytes(i, special=True)
            raise DraftError(
                f"[drafts] {name}: token {i} is {one_text!r}, {target.file.path.name} has {two_text!r}; expected one of its family"
            )


class Drafter(ABC):
    """Makes the drafts of one target.

    count   drafts of a step
    p_min   probability that it must give to a token, which ends the drafts of a step otherwise; 0: any
    """

    def __init__(self, device: Device, target: TokenPrograms, text: Callable[[], BufferRange]) -> None:
        """text: LOOKUP's."""
        self.count, self.p_min = 0, 0.0
        self._device, self._target, self._text = device, target, text
        self._arena: Arena | None = None
        self._zero: BufferRange | None = None

    @property
    @abstractmethod
    def programs(self) -> TokenPrograms:
        """Its own."""

    @property
    @abstractmethod
    def tokens_per_step(self) -> int:
        """That it takes in."""

    @abstractmethod
    def read(self, before: Sequence[int]) -> None:
        """See that its caches hold these tokens, all but the last of a text."""

    @abstractmethod
    def accepted(self, tokens: Sequence[int]) -> None:
        """Its caches have the rows of these tokens, which the target took."""

    @abstractmethod
    def use_barriers(self, why: str) -> None:
        """A spin-wait of its own has timed out."""

    @abstractmethod
    def resize(self, n_ctx: int) -> None:
        """The target's context has so many rows from here on."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def begin(self, text: Sequence[int], count: int, p_min: float = 0.0) -> None:
        """Be ready for so many drafts of a step of a text, whose last token no one has read."""
        self.count, self.p_min = count, p_min
        self.read(text[:-1])
        self._device.upload(self.programs.inputs["loop"], loop_state(Sampler(), []))

    @property
    def program(self) -> Program:
        """Of one of its tokens."""
        return self.programs.program(sure_kind("greedy", self.p_min))

    def write(self, rec: Recorder) -> None:
        """Record the drafts of one step of the target."""
        own, other = self.programs.inputs, self._target.inputs
        rec.barrier()
        for at in (0, INPUT_BYTES):
            rec.copy(other["one"].slice(at, 4), own["one"].slice(at, 4))
        rec.copy(self._step_0(), own["loop"].slice(0, 4))
        rec.copy(other["loop"].slice(4, 4), own["loop"].slice(4, 4))  # a target that has stopped makes no drafts
        for _ in range(self.tokens_per_step):
            self.program.write(rec)
        rec.barrier()
        rec.copy(own["loop"].slice(4 * LOOP_RING, 4 * self.count), self._text().slice(0, 4 * self.count))

    def copies(self, back: int) -> list[tuple[BufferRange, BufferRange]]:
        """What a recording with its drafts copies at its end, for `timed_out`."""
        state = self.program.state
        return [] if state is None else [(state, self.programs.back(back).state)]

    def timed_out(self, back: int) -> bool:
        """Whether a spin-wait timed out in that submit: its drafts and rows are worth nothing."""
        return self.programs.back(back).timed_out

    def _step_0(self) -> BufferRange:
        """A word of zero."""
        if self._zero is None:
            self._arena = self._device.arena("step of a draft model", 256, "device")
            self._zero = self._arena.alloc(4, "step 0")
            self._device.upload(self._zero, np.zeros(1, np.int32))
        return self._zero

    def give_back(self) -> None:
        """Its own memory."""
        if self._arena is not None:
            self._arena.destroy()
            self._arena = self._zero = None


class DraftModel(Drafter):
    """A model of its own."""

    def __init__(self, engine: DraftEngine, target: TokenPrograms, text: Callable[[], BufferRange]) -> None:
        super().__init__(engine.device, target, text)
        self._engine = engine

    @property
    def programs(self) -> TokenPrograms:
        return self._engine.token_programs

    @property
    def tokens_per_step(self) -> int:
        return self.count + 1

    def read(self, before: Sequence[int]) -> None:
        known = self._engine.tokens
        common = next((i for i, (a, b) in enumerate(zip(known, before, strict=False)) if a != b), min(len(known), len(before)))
        self._engine.rewind(common)
        if rest := list(before[common:]):
            self._engine.prompt(rest)

    def accepted(self, tokens: Sequence[int]) -> None:
        self._engine.assume(tokens)

    def use_barriers(self, why: str) -> None:
        self._engine.use_barriers(why)

    def resize(self, n_ctx: int) -> None:
        self._engine.resize(n_ctx + ROOM)

    def close(self) -> None:
        self.give_back()
        self._engine.close()


class DraftHead(Drafter):
    """The MTP block of the target's own file (vkback/models/mtp.py), or an EAGLE-3 head beside it (vkback/models/eagle3.py). The target's
    steps keep all that it has of a text; it makes rows for drafts alone, which the next step writes over."""

    def __init__(
        self,
        device: Device,
        programs: TokenPrograms,
        target: TokenPrograms,
        text: Callable[[], BufferRange],
        use_barriers: Callable[[str], None],
    ) -> None:
        """programs: of a token of the block or head. use_barriers: the target's, whose plans they are of."""
        super().__init__(device, target, text)
        self._programs, self._use_barriers = programs, use_barriers

    @property
    def programs(self) -> TokenPrograms:
        return self._programs

    @property
    def tokens_per_step(self) -> int:
        return self.count

    def read(self, before: Sequence[int]) -> None:
        pass

    def accepted(self, tokens: Sequence[int]) -> None:
        pass

    def use_barriers(self, why: str) -> None:
        self._use_barriers(why)

    def resize(self, n_ctx: int) -> None:
        self.forget_programs()

    def forget_programs(self) -> None:
        """Make them anew when they are next used."""
        self._programs.forget_programs()
        self._programs.forget_timeouts()

    def close(self) -> None:
        self.give_back()
        self._programs.close()
