"""Programs of one token: bound and recorded when they are first used, with what the host writes for them and reads of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Commands, Device, Recorder
from vkback.engine.prompts import LONGEST_SUBMIT_US
from vkback.engine.readback import Readback, TokenLoop
from vkback.engine.sampler import DRIED, PENALIZED, RING
from vkback.ops.sampling.chain import CHAIN_WORDS
from vkback.ops.sampling.dry import dry_words
from vkback.ops.sampling.lookup import MAX_COLUMNS
from vkback.ops.sampling.penalties import SEEN_COUNTS, mask_words
from vkback.ops.sampling.sample import LOOP_RING
from vkback.plan.cost.forecast import low_costs, repeats
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program

Floats = npt.NDArray[np.float32]

INPUT_BYTES = aligned(4 * MAX_COLUMNS)  # from the tokens of a step to their positions in memory

SUBMITS_IN_FLIGHT = 2

SPIN_S = 0.005
"""How long the host stays awake for the logits of one token: longer than a fast GPU takes for them."""


class TokenPlans(Protocol):
    """Schedules of one token, over caches of so many rows."""

    @property
    def n_ctx(self) -> int: ...

    def token(self, kind: str) -> Schedule: ...


class Waits(Protocol):
    """What was submitted: a Ticket, or what several devices do one after another."""

    def wait(self) -> None:
        """Until it is done. Raises DeviceLost, Timeout."""


class LayersBefore(Protocol):
    """What other devices do of each token before this one does the rest (vkback/engine/split/)."""

    def loads(self) -> Sequence[tuple[BufferRange, BufferRange]]:
        """What a recording of one token copies at its beginning."""

    def feeds(self, one: BufferRange) -> Sequence[tuple[BufferRange, BufferRange]]:
        """What it copies at its end, so that the others have the next token. one: that and its position."""

    def mark(self, number: int) -> tuple[BufferRange, int]:
        """What a recording with this number ends with (`Program.record`)."""

    def set_input(self, words: npt.NDArray[np.int32]) -> None:
        """The token and its position, as `one` has them, that the others begin with."""

    def submit(self, number: int, commands: Sequence[Commands], *, barriers: bool = False) -> Waits:
        """A token through all devices, this one last. number: of its read-back. barriers: with all of them on the others."""

    def timed_out(self, number: int) -> bool:
        """Whether a spin-wait of another device timed out, in the last submit with this number."""

    def forget_timeouts(self) -> None:
        """As if none had."""


class TokenPrograms:
    """Programs of one token over one KV cache at a time. Kinds are "logits" and those of `loop_kind` (vkback/engine/sampler.py).

    bind  (schedule, inputs by name) -> program

    inputs  by name, what the host writes: "one" (a token and its position), "loop" (state of the token loop), "mask" (of a constraint),
            "chain" (of samplers)
    """

    def __init__(
        self,
        device: Device,
        n_vocab: int,
        plans: TokenPlans,
        bind: Callable[[Schedule, dict[str, BufferRange]], Program],
        before: LayersBefore | None = None,
    ) -> None:
        """Takes no memory yet: see `allocate`. before: where other devices have the first layers; recordings are of one token then."""
        self._before = before
        self._device, self.n_vocab, self._plans, self._bind = device, n_vocab, plans, bind
        self._programs: dict[str, Program] = {}
        self._loops: dict[tuple[str, int], TokenLoop] = {}
        self._recordings: dict[str, Commands] = {}
        self._arenas: list[Arena] = []
        self._penalties: dict[str, BufferRange] = {}
        self._dry: BufferRange | None = None
        self._turn = 0
        self._costs = low_costs(device.caps)
        self._most: dict[tuple[str, int], int] = {}

    def allocate(self) -> None:
        """Take memory for inputs and what is read back."""
        self.inputs = self._allocate_inputs()
        self._logits_back, self._loop_backs = self._allocate_readbacks()

    def _allocate_inputs(self) -> dict[str, BufferRange]:
        """Inputs of the programs, in memory of the device."""
        sizes = {"one": 2 * INPUT_BYTES, "loop": 4 * (LOOP_RING + RING), "mask": 4 * mask_words(self.n_vocab), "chain": 4 * CHAIN_WORDS}
        caps = self._device.caps
        device = self._device.arena(
            "inputs", sum(map(aligned, sizes.values())), "host_visible_device" if caps.rebar or caps.uma else "device"
        )
        self._arenas.append(device)
        return {n: device.alloc(s, n) for n, s in sizes.items()}

    def _allocate_readbacks(self) -> tuple[Readback, list[Readback]]:
        """Memory of the host for the logits of one token, and for the loop's state after each submit in flight."""
        loops = [self.inputs["loop"].size] * (SUBMITS_IN_FLIGHT + 1)
        sizes = [aligned(4 * self.n_vocab), *loops]
        arena = self._device.arena("readback", sum(aligned(size) + aligned(4) for size in sizes), "readback")
        self._arenas.append(arena)
        logits, *rest = (Readback(arena.alloc(size, "readback"), arena.alloc(4, "state of spin-waits")) for size in sizes)
        for back in (logits, *rest):
            back.forget()
        return logits, rest

    def penalty_inputs(self) -> dict[str, BufferRange]:
        """Inputs of PENALTIES, in memory that is taken when they are first used."""
        if not self._penalties:
            sizes = {"bias": 4 * self.n_vocab, "seen": 4 * (SEEN_COUNTS + self.n_vocab + self._plans.n_ctx)}
            arena = self._device.arena("penalties", sum(map(aligned, sizes.values())), "device")
            self._arenas.append(arena)
            self._penalties = {n: arena.alloc(size, n) for n, size in sizes.items()}
        return self._penalties

    def dry_input(self) -> BufferRange:
        """That of DRY, in memory that is taken when it is first used."""
        if self._dry is None:
            words = np.zeros(dry_words(self.n_vocab), np.int32)
            self._arenas.append(self._device.arena("dry", aligned(words.nbytes), "device"))
            self._dry = self._arenas[-1].alloc(words.nbytes, "dry")
            self._device.upload(self._dry, words)
        return self._dry

    def program(self, kind: str) -> Program:
        """The program of a kind."""
        if kind not in self._programs:
            inputs = self.columns(1)
            if PENALIZED in kind:
                inputs |= self.penalty_inputs()
            if DRIED in kind:
                inputs["dry"] = self.dry_input()
            self._programs[kind] = self._bind(self._plans.token(kind), inputs)
        return self._programs[kind]

    def recording(self, kind: str) -> Commands:
        """One token of a kind, and its logits to the host."""
        if kind not in self._recordings:
            program = self.program(kind)
            copies = self._logits_back.copies(program, program.range("result_output"))
            self._recordings[kind] = program.record(kind, loads=self._loads(), copies=copies, mark=self._mark())
        return self._recordings[kind]

    def with_barriers(self) -> Commands:
        """The recording of "logits" with all barriers, for once."""
        program = self.program("logits")
        copies = self._logits_back.copies(program, program.range("result_output"))
        return program.record("logits, all barriers", barriers=True, loads=self._loads(), copies=copies, mark=self._mark())

    def _mark(self) -> tuple[BufferRange, int] | None:
        return self._before.mark(0) if self._before is not None else None

    def _loads(self) -> Sequence[tuple[BufferRange, BufferRange]]:
        return self._before.loads() if self._before is not None else ()

    def loop(self, kind: str, size: int, *, logits: bool = False) -> TokenLoop:
        """The recording of `size` tokens of a kind; logits: it copies those of the last one."""
        key = (f"{kind}, logits" if logits else kind, size)
        if key not in self._loops:
            program = self.program(kind)
            copies = [(found := program.range("result_output"), self._logits_back.result.slice(0, found.size))] if logits else []
            copies += self._before.feeds(self.inputs["one"]) if self._before is not None else []
            self._loops[key] = self.token_loop(program, kind, size, [copies] * len(self._loop_backs))
        return self._loops[key]

    def most_at_once(self, kind: str, most: int) -> int:
        """Tokens of a submit: `most`, or fewer where a token is predicted to take so long that a driver might take a submit for a hang; one
        where other devices have the first layers."""
        if self._before is not None:
            return 1
        key = (kind, most)
        if key not in self._most:
            self._most[key] = repeats(self._plans.token(kind), self._costs, LONGEST_SUBMIT_US, most)
        return self._most[key]

    def token_loop(
        self,
        program: Program,
        name: str,
        steps: int,
        copies: Sequence[Sequence[tuple[BufferRange, BufferRange]]],
        before: Callable[[Recorder], object] | None = None,
    ) -> TokenLoop:
        """The recording of so many steps of a program over this loop; copies: for each read-back, (source, target) copied at the end.
        before: records what runs ahead of each step."""
        marks = [self._before.mark(i) for i in range(len(self._loop_backs))] if self._before is not None else []
        return TokenLoop(program, name, steps, self.inputs["loop"], self._loop_backs, copies, self._loads(), marks, before)

    def submit(self, loop: TokenLoop) -> tuple[Waits, int]:
        """Run a recording; the ticket, and the number of the read-back. At most SUBMITS_IN_FLIGHT may be in flight, of all loops."""
        back = self._turn
        self._turn = (self._turn + 1) % len(self._loop_backs)
        commands = loop.commands(back)
        return self._before.submit(back, [commands]) if self._before is not None else self._device.submit(commands), back

    def timed_out(self, number: int) -> bool:
        """Whether a spin-wait of a submit timed out, so that its results are worth nothing."""
        return self.back(number).timed_out or (self._before is not None and self._before.timed_out(number))

    def back(self, number: int) -> Readback:
        """Where a submit's results are."""
        return self._loop_backs[number]

    def columns(self, count: int) -> dict[str, BufferRange]:
        """Inputs of a program of so many tokens, the first of which is that of the programs of one."""
        one = self.inputs["one"]
        return {"tokens": one.slice(0, 4 * count), "pos": one.slice(INPUT_BYTES, 4 * count)} | {
            n: self.inputs[n] for n in ("loop", "mask", "chain")
        }

    def set_input(self, token: int, position: int) -> None:
        """The token of the next submit."""
        words = np.zeros((2, INPUT_BYTES // 4), np.int32)
        words[:, 0] = token, position
        self._device.upload(self.inputs["one"], words)
        if self._before is not None:
            self._before.set_input(words)

    def decode(self, token: int, position: int, commands: Commands, *, barriers: bool = False) -> tuple[Floats, bool]:
        """Logits of a token, and whether they are worth nothing because a spin-wait timed out. barriers: the recording has all of them."""
        self.set_input(token, position)
        if self._before is not None:
            self._before.submit(0, [commands], barriers=barriers).wait()
            return self.logits(), self._logits_back.timed_out or self._before.timed_out(0)
        # A driver on the CPU needs the cores itself.
        self._device.submit(commands).wait(spin_s=0.0 if self._device.caps.software else SPIN_S)
        return self.logits(), self._logits_back.timed_out

    def logits(self) -> Floats:
        """Those that the last submit copied."""
        return np.array(self._logits_back.result.map().view(np.float32)[: self.n_vocab])

    def forget_timeouts(self) -> None:
        """As if no spin-wait had timed out."""
        for back in (self._logits_back, *self._loop_backs):
            back.forget()
        if self._before is not None:
            self._before.forget_timeouts()

    def forget_programs(self) -> None:
        """Make them anew when they are next used."""
        for program in self._programs.values():
            program.close()
        for cache in (self._programs, self._loops, self._recordings, self._most):
            cache.clear()

    def forget_penalties(self) -> None:
        """Give back the memory of `penalty_inputs`, whose size depends on the cache; no program may use it any more."""
        if self._penalties:
            arena = self._penalties.pop("seen").arena
            self._penalties.clear()
            self._arenas.remove(arena)
            arena.destroy()

    def close(self) -> None:
        """Destroy everything; twice is once."""
        self.forget_programs()
        for arena in reversed(self._arenas):
            arena.destroy()
        self._arenas.clear()
