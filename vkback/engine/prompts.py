"""Prompts on a device: recorded programs of several tokens (micro-batches), and how a prompt is cut into them.

Programs have `ubatch` tokens, the powers of two below, and at least SMALLEST. A prompt goes through programs of decreasing size; what the
last one has too many is padding (pos = -1), which no result shows. A program is planned, compiled and recorded when it is first used. One
whose predicted time is too long for one submit is recorded in several command buffers, so that no driver takes it for a hang.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Capabilities, Commands, Device, OutOfDeviceMemory, Ticket
from vkback.engine.barrier_trial import TIMED_OUT, BarrierTrial, Values
from vkback.events import Report, Reported, log
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.plan.cost.forecast import cuts, dispatch_us, low_costs
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program
from vkback.program.program import overflow_bytes
from vkback.tuning.lookup import Overrides

Floats = npt.NDArray[np.float32]

PromptHead = Literal["none", "all"]
"""Logits that a program of a prompt makes: none, or those of every token."""

UBATCH = 512
"""Tokens of a program on GPUs, as in llama.cpp."""

SOFTWARE_UBATCH = 64
"""The same on a CPU driver. t/s of pp512 on llvmpipe, dense and MoE built-in model, two busy cores: in programs of 32 tokens 1528
and 1035, of 64 1615 and 1596, of 128 1530 and 1566, of 512 1526 and 1896; through the GEMV kernels, 16 at a time, 315 and 372.
Larger programs take the driver seconds longer to compile."""

SMALLEST = 16
"""Tokens of the smallest program, unless `ubatch` or the context is smaller."""

PADDED = 32
"""Programs up to so many tokens mostly wait for weights: one with padding is faster than two."""

LOGITS_BYTES = 64 << 20
"""Most memory for the logits of a program's tokens; the smallest program may have more."""

LONGEST_SUBMIT_US = 0.5e6
"""Predicted time of one submit, at most. Drivers reset a GPU after 2 to 10 s in one submit."""


def with_barriers(ctx: LowerContext, why: str) -> LowerContext:
    """The same, with barriers between all stages; why: what plans name as the source of that choice."""
    return replace(ctx, tuning=Overrides(ctx.tuning, {"schedule": {"sync": "barrier"}}, why))


def default_ubatch(caps: Capabilities) -> int:
    return SOFTWARE_UBATCH if caps.software else UBATCH


def program_sizes(ubatch: int, n_ctx: int) -> list[int]:
    """Tokens of the programs there may be, the largest first."""
    largest = min(ubatch, n_ctx)
    size = 1 << (largest - 1).bit_length()
    sizes = [largest]
    while (size := size // 2) >= SMALLEST:
        if size < largest:
            sizes.append(size)
    return sizes


def next_size(left: int, sizes: Sequence[int]) -> int:
    """Tokens of the program that `left` tokens of a prompt begin with; sizes: those there are, the largest first.

    The smallest program that takes them all, if at most a quarter of it is padding or it has at most PADDED tokens; else the largest that
    they fill.
    """
    enough = [size for size in sizes if size >= left]
    filled = [size for size in sizes if size <= left]
    if not enough:
        return filled[0]
    padding = enough[-1] - left
    if not filled or enough[-1] <= PADDED or 4 * padding <= enough[-1]:
        return enough[-1]
    return filled[0]


@dataclass
class Recording:
    """A program recorded for submits of limited length.

    program       what it is a recording of
    parts         command buffers, submitted one after the other
    predicted_us  of each
    slowness      as known when the program was cut
    runs          of the program so far: the first may hold compile time of the driver
    last          measured over predicted time of the last run, of later ones than the first
    """

    size: int
    program: Program
    parts: list[Commands]
    predicted_us: list[float]
    slowness: float
    runs: int = 0
    last: float = 0.0


class Crossing(Protocol):
    """What programs read of other devices' layers, and write for them (vkback/engine/split/)."""

    def inputs(self, size: int) -> Mapping[str, BufferRange]:
        """What a program of so many tokens reads, by name."""

    def before(self, at: int, rows: int) -> Sequence[Commands]:
        """What brings it there, for the tokens `at` to at + rows - 1 of a call."""

    def after(self, program: Program, at: int, rows: int) -> Sequence[Commands]:
        """What takes the program's own values from there, for the same tokens."""


class Prompts:
    """Runs prompts of one model over one KV cache at a time.

    plan  (tokens, head) -> schedule of a program
    bind  (schedule, inputs by name, memory for activations) -> program; may raise OutOfDeviceMemory
    rescale  (overflow words with what they hold, filled rows of the caches) -> plans with smaller f16 scales from now on; returns how many
             tokens to recompute first, from row 0 on
    use_barriers  (why) -> from then on `plan` gives barriers between all stages
    All programs share one block of memory for activations, as large as the largest used so far needs.

    longest_submit_s  of all so far, on the host's clock
    """

    def __init__(
        self,
        device: Device,
        n_vocab: int,
        ubatch: int | None,
        plan: Callable[[int, PromptHead], Schedule],
        bind: Callable[[Schedule, dict[str, BufferRange], BufferRange | None], Program],
        rescale: Callable[[dict[str, float], int], Sequence[int]],
        use_barriers: Callable[[str], None],
        report: Report | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        """ubatch: tokens of the largest program, None for the device's default. report: told how far `run` is. crossing: where other
        devices have layers before or behind these."""
        self._crossing = crossing
        self.device = device
        self._n_vocab = n_vocab
        self._plan, self._bind, self._rescale, self._use_barriers = plan, bind, rescale, use_barriers
        self._report = report
        self._trial = BarrierTrial()
        self._asked = ubatch
        self._most = ubatch or default_ubatch(device.caps)
        self._fitting = sys.maxsize  # tokens of the largest program within the limits of device and submit
        self._n_ctx = sys.maxsize
        self._costs = low_costs(device.caps)
        self.longest_submit_s = 0.0
        self.slowness = 1.0  # measured over predicted time, up to a power of two: the largest so far of two runs in a row or a late submit
        self._programs: dict[tuple[int, PromptHead], Program] = {}
        self._recordings: dict[tuple[int, PromptHead], Recording] = {}
        self._blocks: dict[str, tuple[Arena, BufferRange]] = {}
        self._refusals: dict[tuple[int, PromptHead], str] = {}  # a look at all dispatches of a program takes longer than its submit

    def attach(self, n_ctx: int) -> None:
        """From here on the cache is another one, of n_ctx rows."""
        self.close()
        self._n_ctx = n_ctx
        self._fitting = sys.maxsize

    def limit(self, ubatch: int) -> None:
        """From here on the largest program has so many tokens."""
        self.close()
        self._asked = self._most = ubatch
        self._fitting = sys.maxsize

    def close(self) -> None:
        """Give programs and memory back; later calls make them anew."""
        self._forget_programs()
        for arena, _ in self._blocks.values():
            arena.destroy()
        self._blocks.clear()

    @property
    def ubatch(self) -> int:
        """Tokens of the largest program, were the context as large: what was asked, unless that did not work."""
        return min(self._most, self._fitting)

    @property
    def programs(self) -> Mapping[tuple[int, PromptHead], Program]:
        """Those that are bound now, by tokens and head."""
        return self._programs

    @property
    def recordings(self) -> Mapping[tuple[int, PromptHead], Recording]:
        """Those of the programs that ran or were prepared, by tokens and head."""
        return self._recordings

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that all programs share, by purpose."""
        return {purpose: block.size for purpose, (_, block) in self._blocks.items()}

    def sizes(self, head: PromptHead = "none") -> list[int]:
        """Tokens of the programs there may be, the largest first."""
        sizes = program_sizes(self.ubatch, self._n_ctx)
        if head == "none":
            return sizes
        return [size for size in sizes if 4 * self._n_vocab * size <= LOGITS_BYTES] or sizes[-1:]

    def schedule(self) -> Schedule:
        """That of the largest program."""
        return self._plan(self._next_size(sys.maxsize, "none"), "none")

    def dispatches(self, counts: Iterable[int]) -> Iterable[Dispatch]:
        """What prompts of so many tokens run."""
        used = dict.fromkeys(size for count in counts for size in self.pieces(count))
        return (d for size in used for d in self._plan(size, "none").dispatches())

    def pieces(self, count: int) -> list[int]:
        """Tokens of each program that a prompt of so many tokens runs, in order; the last may hold padding."""
        found: list[int] = []
        while count > 0:
            found.append(self._next_size(count, "none"))
            count -= found[-1]
        return found

    def record(self, counts: Iterable[int]) -> None:
        """Compile and record what prompts of so many tokens need."""
        for _ in self._recorded(counts):
            pass

    def prepare(self, counts: Iterable[int]) -> list[Ticket]:
        """As `record`, and submit each recording once with nothing but padding."""
        tickets = []
        for recording in self._recorded(counts):
            if not recording.runs:
                self._set_input(recording.size, [], 0)
                tickets += [self.device.submit(part) for part in recording.parts]
                recording.runs = 1
        return tickets

    def _recorded(self, counts: Iterable[int]) -> Iterator[Recording]:
        for count in sorted(counts, reverse=True):
            left = count
            while left > 0:
                recording = self._ready(left, "none")
                left -= recording.size
                yield recording

    def run(self, tokens: Sequence[int], n_past: int, meanwhile: Callable[[], object] | None = None) -> Iterator[int]:
        """Fill the cache with tokens from row n_past on; gives the number of tokens after each program that has finished. meanwhile: called
        while each of them runs."""
        for done, _ in self._pieces(tokens, n_past, "none", self._report, meanwhile):
            yield done

    def logits(self, tokens: Sequence[int], n_past: int) -> Iterator[Floats]:
        """As `run`; gives the logits after each token, float32 [tokens of a program, n_vocab]."""
        for done, size in self._pieces(tokens, n_past, "all", None):
            words = self._logits_memory(size).map().view(np.float32)
            yield np.array(words[: done * self._n_vocab].reshape(done, self._n_vocab))

    def _pieces(
        self, tokens: Sequence[int], n_past: int, head: PromptHead, report: Report | None, meanwhile: Callable[[], object] | None = None
    ) -> Iterator[tuple[int, int]]:
        """(tokens done, size of the program) after each program."""
        at = 0
        no_logits: PromptHead = "none"
        again, again_at = tokens[:0], 0  # earlier tokens that run once more
        with Reported(report, "prompt", len(tokens)) as work:
            while at < len(tokens):
                repeats = again_at < len(again)
                rest, row, kind = (again[again_at:], again_at, no_logits) if repeats else (tokens[at:], n_past + at, head)
                recording = self._ready(len(rest), kind)
                piece = rest[: recording.size]
                shown = 0 if repeats else len(piece)
                self._set_input(recording.size, piece, row)
                place = None if repeats else (at, len(piece))
                self._submit(recording, lambda share, shown=shown: work.advance(share * shown), meanwhile, place)  # type: ignore[misc]
                if why := self._out_of_order(recording, kind):
                    work.advance(-shown)
                    self._forget_programs()
                    self._use_barriers(why)
                elif overflowed := self._overflowed(recording):
                    work.advance(-shown)
                    self._forget_programs()
                    again, again_at = self._rescale(overflowed, row + len(piece)), 0
                elif repeats:
                    again_at += len(piece)
                else:
                    at += len(piece)
                    yield len(piece), recording.size

    def _submit(
        self,
        recording: Recording,
        on_part: Callable[[float], None],
        meanwhile: Callable[[], object] | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Run a recording to its end. on_part: called with the share of it that each submit was. meanwhile: called before it is waited for,
        and waits for what is in the queue ahead of it. place: of its tokens, as of `Crossing`."""
        whole = sum(recording.predicted_us)
        begun = time.perf_counter()
        if self._crossing is not None and place is not None and (first := self._crossing.before(*place)):
            self.device.submit(first)
        tickets = [self.device.submit(part) for part in recording.parts]
        if self._crossing is not None and place is not None and (last := self._crossing.after(recording.program, *place)):
            stored = self.device.submit(last)
        else:
            stored = tickets[-1]
        if meanwhile is not None:
            meanwhile()
            begun = max(begun, time.perf_counter())
        before = begun
        late = 0.0  # slowness of a submit that took too long
        for ticket, predicted in zip(tickets, recording.predicted_us, strict=True):
            ticket.wait()
            now = time.perf_counter()
            self.longest_submit_s = max(self.longest_submit_s, now - before)
            if (now - before) * 1e6 > LONGEST_SUBMIT_US:
                late = max(late, (now - before) * 1e6 / predicted)
            before = now
            on_part(predicted / whole)
        stored.wait()
        if recording.runs:
            slowness = (time.perf_counter() - begun) * 1e6 / whole
            # One run may have been slow for other reasons; but none is waited for once a submit took too long.
            known = max(late, min(slowness, recording.last))
            self.slowness = max(self.slowness, 2.0 ** math.ceil(math.log2(max(known, 1.0))))
            recording.last = slowness
        recording.runs += 1

    def _overflowed(self, recording: Recording) -> dict[str, float]:
        """Overflow words that the last run of a recording left, with what they hold: its tokens then have to run again."""
        words = recording.program.overflow
        if words is None:
            return {}
        held = self._overflow_memory(words.size).map()[: words.size].view(np.uint32)
        return recording.program.overflowed(held) if held.any() else {}

    def _out_of_order(self, recording: Recording, head: PromptHead) -> str:
        """What went wrong in the last run of a recording with barrier-free stages, which is then worth nothing; "" for nothing. After the
        first run of a program its tokens go through it once more with all barriers, which must give the same bits."""
        program, key = recording.program, (recording.size, head)
        if program.state is None:
            return ""
        timed_out, made = bool(self._state_memory().map().view(np.uint32)[0]), program.last_waited_for
        if made is None:
            return TIMED_OUT if timed_out else ""
        waited_for = made

        def found() -> Values:
            return self.device.download(waited_for, np.uint32)

        def with_barriers() -> Values:
            self.device.submit(program.record("prompt, all barriers", barriers=True)).wait()
            return found()

        return self._trial.fault(key, "a prompt's values", timed_out=timed_out, found=found, with_barriers=with_barriers)

    def next_size(self, left: int) -> int:
        """Tokens of the program that `left` tokens of a prompt begin with."""
        return self._next_size(left, "none")

    def _next_size(self, left: int, head: PromptHead) -> int:
        """Tokens of the program that `left` tokens begin with. Sizes that the device's limits forbid, or with a kernel that may take longer
        than a submit should, are left out from then on, in this context."""
        while True:
            size = next_size(left, self.sizes(head))
            smaller = self._smaller(size)
            if smaller and (size, head) not in self._refusals:
                self._refusals[size, head] = self._why_not(size, head)
            why = self._refusals[size, head] if smaller else ""
            if smaller is None or not why:
                return size
            if self._asked is not None and self._fitting == sys.maxsize:
                _say(why, smaller)
            self._fitting = smaller

    def _smaller(self, size: int) -> int | None:
        return next((s for s in self.sizes() if s < size), None)

    def _why_not(self, size: int, head: PromptHead) -> str:
        """What speaks against a program, from its plan alone; "" for nothing."""
        try:
            longest_us = max(dispatch_us(d, self._costs) for d in self._plan(size, head).dispatches())
        except PlanError as error:
            return f"{size} tokens of a prompt at a time exceed a limit of the device ({error})"
        late = longest_us > LONGEST_SUBMIT_US
        return f"one kernel over {size} tokens of a prompt may take over {LONGEST_SUBMIT_US / 1e6:g} s" if late else ""

    def _ready(self, left: int, head: PromptHead) -> Recording:
        """The recording that `left` tokens begin with. A program for which there is no memory gives way to a smaller one; raises
        OutOfDeviceMemory when there is none."""
        while True:
            size = self._next_size(left, head)
            try:
                return self._recording(size, head)
            except OutOfDeviceMemory as error:
                smaller = self._smaller(size)
                if smaller is None:
                    raise
                self._forget_programs()
                _say(f"no memory for {size} tokens of a prompt at a time ({error})", smaller)
                self._most = smaller

    def _recording(self, size: int, head: PromptHead) -> Recording:
        key = (size, head)
        found = self._recordings.get(key)
        if found is not None and (max(found.predicted_us) * self.slowness <= LONGEST_SUBMIT_US or found.slowness >= self.slowness):
            return found
        logits = self._logits_memory(size) if head == "all" else None
        words = overflow_bytes(self._plan(size, head))
        held = self._overflow_memory(words) if words else None
        program = self._program(size, head)
        submits = cuts(program.schedule, self._costs, LONGEST_SUBMIT_US / self.slowness)
        result = program.range("result_output") if logits else None
        copies = [(result, logits.slice(0, result.size))] if logits and result else []
        copies += [(program.overflow, held.slice(0, words))] if program.overflow and held else []
        if program.state is not None:
            copies.append((program.state, self._state_memory().slice(0, program.state.size)))
        parts = program.record_parts(f"prompt x{size}", submits, copies=copies)
        runs = found.runs if found is not None and found.program is program else 0
        self._recordings[key] = Recording(size, program, parts, list(submits.values()), self.slowness, runs)
        return self._recordings[key]

    def _program(self, size: int, head: PromptHead) -> Program:
        key = (size, head)
        if key not in self._programs:
            schedule = self._plan(size, head)
            need = schedule.activation_bytes
            activations = self._block("activations of prompts", need, "device") if need else None
            inputs = self._inputs()
            half = aligned(4 * size)
            ranges = {"tokens": inputs.slice(0, 4 * size), "pos": inputs.slice(half, 4 * size)}
            ranges |= self._crossing.inputs(size) if self._crossing is not None else {}
            self._programs[key] = self._bind(schedule, ranges, activations)
        return self._programs[key]

    def _block(self, purpose: str, size: int, kind: Literal["device", "readback", "host_visible_device"]) -> BufferRange:
        """Memory of at least `size` bytes for a purpose. Where it must grow, programs that use the old one are forgotten."""
        found = self._blocks.get(purpose)
        if found is not None and found[1].size >= size:
            return found[1]
        if found is not None:
            self._forget_programs()
            del self._blocks[purpose]
            found[0].destroy()
        arena = self.device.arena(purpose, aligned(size), kind)
        self._blocks[purpose] = arena, arena.alloc(aligned(size), purpose)
        return self._blocks[purpose][1]

    def _inputs(self) -> BufferRange:
        caps = self.device.caps
        size = 2 * aligned(4 * program_sizes(self.ubatch, self._n_ctx)[0])
        return self._block("inputs of prompts", size, "host_visible_device" if caps.rebar or caps.uma else "device")

    def _logits_memory(self, size: int) -> BufferRange:
        return self._block("logits of prompts", 4 * self._n_vocab * size, "readback")

    def _overflow_memory(self, size: int) -> BufferRange:
        return self._block("overflow words of prompts", size, "readback")

    def _state_memory(self) -> BufferRange:
        return self._block("state of spin-waits of prompts", 4, "readback")

    def _set_input(self, size: int, piece: Sequence[int], n_past: int) -> None:
        """Tokens and positions of a program of `size` tokens, padding at the end, in one upload."""
        half = aligned(4 * size)
        words = np.zeros((2, half // 4), np.int32)
        words[0, : len(piece)] = piece
        words[1] = -1
        words[1, : len(piece)] = np.arange(n_past, n_past + len(piece))
        self.device.upload(self._inputs().slice(0, 2 * half), words)

    def _forget_programs(self) -> None:
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self._recordings.clear()
        self._refusals.clear()
        self._trial.forget()


def _say(why: str, smaller: int) -> None:
    log.warning("%s; going on with %d (--ubatch %d)", why, smaller, smaller)
