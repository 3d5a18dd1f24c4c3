"""Host memory that submits copy their results to, and recordings of several generated tokens that do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vkback.device import BufferRange, Commands, Recorder
from vkback.program import Program


@dataclass(frozen=True)
class Readback:
    """Host memory for a submit's result, and for the state word (Program.state) of the spin-waits that led to it."""

    result: BufferRange
    state: BufferRange

    def copies(self, program: Program, result: BufferRange) -> list[tuple[BufferRange, BufferRange]]:
        """What a recording of a program must copy at its end."""
        copies = [(result, self.result.slice(0, result.size))]
        return copies if program.state is None else [*copies, (program.state, self.state)]

    @property
    def timed_out(self) -> bool:
        """Whether a spin-wait timed out, so that the result is worth nothing."""
        return bool(self.state.map().view(np.int32)[0])

    def forget(self) -> None:
        """As if none had."""
        self.state.map()[:] = 0


class TokenLoop:
    """A recording of `tokens` generated tokens (of steps, with drafts), as many copies as may be in flight, each with its own read-back of
    the loop state."""

    def __init__(
        self,
        program: Program,
        name: str,
        tokens: int,
        loop: BufferRange,
        readback: Sequence[Readback],
        copies: Sequence[Sequence[tuple[BufferRange, BufferRange]]],
        loads: Sequence[tuple[BufferRange, BufferRange]] = (),
        marks: Sequence[tuple[BufferRange, int]] = (),
        before: Callable[[Recorder], object] | None = None,
    ) -> None:
        """copies: for each read-back (source, target) copied at the end beside it. loads: (source, target) copied at the beginning.
        marks: of each, as of `Program.record`; none without any. before: as of `Program.record`."""
        self.tokens = tokens
        ends: Sequence[tuple[BufferRange, int] | None] = marks or [None] * len(readback)
        self._copies = [
            program.record(
                f"{name} x{tokens}", repeat=tokens, loads=loads, copies=[*back.copies(program, loop), *others], mark=mark, before=before
            )
            for back, others, mark in zip(readback, copies, ends, strict=True)
        ]

    def commands(self, back: int) -> Commands:
        """The copy with this read-back, which nothing in flight may use."""
        return self._copies[back]

    def destroy(self) -> None:
        """Give the recordings back, once none is in flight."""
        for commands in self._copies:
            commands.destroy()
