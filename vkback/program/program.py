"""Binds a schedule to memory of a device and records it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Commands, Device, Recorder
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.f16_range import is_overflow_word
from vkback.ops.lowering import PlanError
from vkback.ops.storage import nbytes
from vkback.plan.schedule import Schedule, Slot, aligned
from vkback.plan.sync import SENTINEL, STATE
from vkback.program.compile import compile_kernels
from vkback.shader import ShaderLibrary


def overflow_bytes(schedule: Schedule) -> int:
    """Bytes of `Program.overflow`."""
    return sum(aligned(nbytes(t)) for t in schedule.tensors().values() if is_overflow_word(t))


@dataclass(frozen=True)
class WeightRanges:
    """The shards of one weight in device memory."""

    shards: tuple[BufferRange, ...]


class Program:
    """A schedule with compiled kernels and memory for every tensor.

    ranges   memory of inputs and states, by tensor name
    weights  memory of weights, by tensor name
    state    one word, not zero once a spin-wait has timed out; None if all stages have barriers between them
    overflow  the overflow words of kernels that pack activations as f16 (vkback/ops/f16_range.py), one after another; None: there is no
              such kernel
    Tensors of kind "node" live in `activations`, laid out by the schedule; those of kind "counter" in an arena of this program, zeroed.
    activations  memory of at least schedule.activation_bytes, or one range for each of schedule.blocks; programs that run one after another
                 can share it. None: an arena of this program
    """

    def __init__(
        self,
        device: Device,
        library: ShaderLibrary,
        schedule: Schedule,
        ranges: Mapping[str, BufferRange],
        weights: Mapping[str, WeightRanges],
        activations: BufferRange | Sequence[BufferRange] | None = None,
    ) -> None:
        self.device = device
        self.schedule = schedule
        self._ranges = dict(ranges)
        self._weights = weights
        self._arenas: list[Arena] = []
        self._commands: list[Commands] = []
        self._sentinel: BufferRange | None = None
        self.state: BufferRange | None = None
        self.overflow: BufferRange | None = None
        self._kernels = compile_kernels(device, library, schedule.dispatches())
        try:
            self._allocate_nodes(activations)
        except BaseException:
            self.close()
            raise

    def _allocate_nodes(self, activations: BufferRange | Sequence[BufferRange] | None) -> None:
        """Give nodes and counters their memory."""
        schedule = self.schedule
        if schedule.activation_bytes:
            if activations is None:
                arena = self.device.arena("activations", schedule.activation_bytes, "device")
                self._arenas.append(arena)
                activations = [arena.alloc(size, "activations") for size in schedule.blocks]
            blocks = [activations] if isinstance(activations, BufferRange) else activations

            def of_slot(slot: Slot) -> BufferRange:
                number, offset = divmod(slot.offset, schedule.block_bytes)
                return blocks[number].slice(offset, slot.size)

            self._ranges |= {name: of_slot(slot) for name, slot in schedule.slots.items()}
            if schedule.sentinel_range.size:
                self._sentinel = of_slot(schedule.sentinel_range)
        counters = [t for t in schedule.tensors().values() if t.kind == "counter" and t.name not in self._ranges]
        counters.sort(key=is_overflow_word)
        if counters:
            sizes = [aligned(nbytes(t)) for t in counters]
            block = self._allocate("counters", sum(sizes))
            self.device.upload(block, np.zeros(sum(sizes), np.uint8))
            for tensor, end in zip(counters, accumulate(sizes), strict=True):
                self._ranges[tensor.name] = block.slice(end - aligned(nbytes(tensor)), nbytes(tensor))
            if size := overflow_bytes(schedule):
                self.overflow = block.slice(sum(sizes) - size, size)
        self.state = self._ranges.get(STATE.name)

    def _allocate(self, purpose: str, size: int) -> BufferRange:
        arena = self.device.arena(purpose, size, "device")
        self._arenas.append(arena)
        return arena.alloc(size, purpose)

    def range(self, name: str) -> BufferRange:
        """Memory of an input, state or node."""
        return self._ranges[name]

    @property
    def last_waited_for(self) -> BufferRange | None:
        """Memory of the last tensor of the schedule that a barrier-free stage waits for, which keeps its values to the end;
        None if there is none."""
        kept = self.schedule.sentinel_tensors | self.schedule.counted_tensors
        made = [a.tensor for d in self.schedule.dispatches() for a in d.args if "w" in a.access and a.tensor.name in kept]
        values = [t.name for t in made if t.type != "I32"]
        return self._ranges[values[-1]] if values else None

    @property
    def timed_out(self) -> bool:
        """Whether a spin-wait of any run so far has timed out; reads the device."""
        return self.state is not None and bool(self.device.download(self.state, np.uint32)[0])

    def overflowed(self, words: npt.NDArray[np.uint32]) -> dict[str, float]:
        """Names of the overflow words that are not zero, with the magnitude that they hold. words: a copy of `overflow`, as u32."""
        names = [t.name for t in self.schedule.tensors().values() if is_overflow_word(t)]
        sizes = words.reshape(len(names), -1)[:, 0].view(np.float32)
        return {name: float(size) for name, size in zip(names, sizes, strict=True) if size != 0.0}

    def _bind(self, arg: Arg) -> BufferRange:
        if arg.tensor.kind == "weight":
            loaded = self._weights.get(arg.tensor.name)
            if loaded is None:
                raise PlanError(
                    f"[program] {arg.tensor}: not among the weights that were loaded; expected a plan that combines weights as those of "
                    "one token and of the smallest prompt do (Engine.load loads what they use)"
                )
            return loaded.shards[arg.shard]
        found = self._ranges.get(arg.tensor.name)
        if found is None:
            raise PlanError(f"[program] {arg.tensor}: bound to no memory; pass it in `ranges` or make it a node of the schedule")
        return found

    def record(
        self,
        name: str,
        *,
        repeat: int = 1,
        timestamps: bool = False,
        barriers: bool = False,
        loads: Sequence[tuple[BufferRange, BufferRange]] = (),
        copies: Sequence[tuple[BufferRange, BufferRange]] = (),
        mark: tuple[BufferRange, int] | None = None,
        before: Callable[[Recorder], object] | None = None,
        part: Sequence[int] | None = None,
        on_dispatch: Callable[[Dispatch], object] | None = None,
    ) -> Commands:
        """Record the schedule `repeat` times into one command buffer.

        loads       (source, target) copied at the beginning, of memory that the host writes
        copies      (source, target) copied at the end, for the host to read
        mark        a word of host memory, and what is written there when all is done, for a host that looks at it
        before      records what runs ahead of the schedule, each time
        timestamps  write a GPU timestamp after every stage (and one at the start); labels are the stages' numbers
        barriers    between all stages, also those that could do without; timestamps need them
        part        numbers of the stages to record, in a row; None: all. Of a schedule without barrier-free stages
        on_dispatch  called after each dispatch was recorded
        """
        part = range(len(self.schedule.stages)) if part is None else part
        count = 1 + len(part) if timestamps else 0
        rec = self.device.recorder(name, timestamps=count * repeat)
        if loads:
            rec.host_writes()
        for source, target in loads:
            rec.copy(source, target)
        for _ in range(repeat):
            if before is not None:
                before(rec)
            self._write(rec, part, timestamps=timestamps, barriers=barriers, on_dispatch=on_dispatch)
        return self._finish(rec, copies, mark)

    def write(self, rec: Recorder) -> None:
        """The schedule once, into a recording that another program finishes."""
        self._write(rec, range(len(self.schedule.stages)))

    def _write(
        self,
        rec: Recorder,
        part: Sequence[int],
        *,
        timestamps: bool = False,
        barriers: bool = False,
        on_dispatch: Callable[[Dispatch], object] | None = None,
    ) -> None:
        rec.barrier()
        if timestamps:
            rec.timestamp("start")
        if self._sentinel is not None:
            rec.fill(self._sentinel, SENTINEL)
        for i in part:
            if i > part[0] and (barriers or timestamps or i not in self.schedule.barrier_free):
                rec.barrier()
            for d in self.schedule.stages[i]:
                self._dispatch(rec, d)
                if on_dispatch is not None:
                    on_dispatch(d)
            if timestamps:
                rec.timestamp(str(i))

    def record_parts(self, name: str, begins: Collection[int], *, copies: Sequence[tuple[BufferRange, BufferRange]] = ()) -> list[Commands]:
        """Record the schedule once into several command buffers, to be submitted one after another.

        begins  numbers of the dispatches, in the schedule's order, with which a command buffer begins; the first is 0
        copies  as in `record`
        A recording begins with a barrier, so a cut preserves the order within a single command buffer.
        """
        rec = self.device.recorder(name)
        if self._sentinel is not None:
            rec.fill(self._sentinel, SENTINEL)
        parts: list[Commands] = []
        number = 0
        for stage_number, stage in enumerate(self.schedule.stages):
            for i, d in enumerate(stage):
                if number and number in begins:
                    parts.append(self._finish(rec))
                    rec = self.device.recorder(f"{name}, part {len(parts) + 1}")
                elif i == 0 and number and stage_number not in self.schedule.barrier_free:
                    rec.barrier()
                self._dispatch(rec, d)
                number += 1
        return [*parts, self._finish(rec, copies)]

    def _dispatch(self, rec: Recorder, d: Dispatch) -> None:
        kernel = self._kernels[d.kernel, len(d.args), len(d.push)]
        rec.dispatch(kernel, [self._bind(a) for a in d.args], d.push, d.groups, d.label)

    def _finish(
        self, rec: Recorder, copies: Sequence[tuple[BufferRange, BufferRange]] = (), mark: tuple[BufferRange, int] | None = None
    ) -> Commands:
        if copies:
            rec.barrier()
        for source, target in copies:
            rec.copy(source, target)
        if mark is not None:
            rec.barrier()
            rec.fill(*mark)
        rec.host_barrier()
        commands = rec.finish()
        self._commands.append(commands)
        return commands

    def close(self) -> None:
        """Destroy recordings and the memory of activations and counters."""
        for commands in self._commands:
            commands.destroy()
        self._commands.clear()
        for arena in self._arenas:
            arena.destroy()
        self._arenas.clear()
