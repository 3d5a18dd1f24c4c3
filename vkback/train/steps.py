"""What carries out the graphs of a training step: a device, or float64 numpy, which the device is measured against.

Both hold the weights, gradients and the optimizer's states under the names of the graph's tensors (vkback/plan/training.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Arena, BufferRange, Commands, Device, Ticket
from vkback.engine.kernels import KernelCompiler
from vkback.engine.weights import load_weights
from vkback.events import Report
from vkback.gguf.file import GgufFile
from vkback.graph import Graph, Tensor
from vkback.ops.case import Array
from vkback.ops.f16_range import SUFFIX, F16RangeError
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.ops.storage import in_planes, nbytes, shards
from vkback.plan.cost.forecast import cuts, low_costs
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, aligned
from vkback.program import Program, WeightRanges
from vkback.program.fragments import fragments_hold, row_lanes_found
from vkback.program.values import decoded, stored_bytes
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Tuning

TrainingAct = Literal["f32", "f16"]
"""How products with stored weights are made: in f32, or by cooperative matrices of f16 with sums in f32, where the device has them and the
weights are not F32 themselves."""


class Steps(Protocol):
    """Graphs by name, over tensors that stay."""

    def run(self, graph: str, inputs: Mapping[str, Array]) -> list[Array]:
        """Run a graph; gives its outputs. inputs: values of the tensors of kind "input"."""

    def read(self, tensor: Tensor) -> Array:
        """The value of a weight or state, in its shape."""

    def write(self, tensor: Tensor, value: Array) -> None:
        """Replace the value of a weight or state."""

    def close(self) -> None: ...


def _kept(graphs: Iterable[Graph]) -> dict[str, Tensor]:
    """Weights and states of graphs."""
    return {t.name: t for graph in graphs for t in graph.tensors().values() if t.kind in ("weight", "state")}


class HostSteps:
    """The graphs by the ops' references, in float64."""

    def __init__(self, file: GgufFile, graphs: Mapping[str, Graph]) -> None:
        self._graphs = graphs
        self._values: dict[str, Array] = {}
        for name, t in _kept(graphs.values()).items():
            source = file.tensors.get(name) if t.kind == "weight" else None
            stored = quants.decode(source.type, np.asarray(source.data)).reshape(t.shape) if source else np.zeros(t.shape)
            self._values[name] = stored.astype(np.float64)

    def run(self, graph: str, inputs: Mapping[str, Array]) -> list[Array]:
        found = self._graphs[graph]
        last_use = {t.name: i for i, node in enumerate(found.nodes) for t in node.inputs}
        wanted = {t.name for t in found.outputs}
        values: dict[str, Array] = dict(inputs)
        for i, node in enumerate(found.nodes):
            given = [self._values[t.name] if t.kind in ("weight", "state") else values[t.name] for t in node.inputs]
            made = given if node.op == "VIEW" else OPS[node.op].reference(given, node.params)
            for t, value in zip(node.outputs, made, strict=True):
                (self._values if t.kind in ("weight", "state") else values)[t.name] = np.asarray(value).reshape(t.shape)
            for t in node.inputs:
                if last_use[t.name] == i and t.name not in wanted:
                    values.pop(t.name, None)
        return [values[t.name] for t in found.outputs]

    def read(self, tensor: Tensor) -> Array:
        return self._values[tensor.name].copy()

    def write(self, tensor: Tensor, value: Array) -> None:
        self._values[tensor.name] = np.asarray(value, np.float64).reshape(tensor.shape)

    def close(self) -> None:
        self._values.clear()


SUBMIT_US = 500_000.0
"""Predicted length of a submit, at most: drivers reset a GPU that works on one for some seconds."""

AHEAD = 6
"""Stages by which a dispatch may run before its turn. Of a LoRA step of llama 8B, 3 in 10 stages go, for 1 to 2 % more memory; without a
bound, layers are made again for their gradients long before these."""

IN_FLIGHT = 2
"""Submits under way at once: the next is there when one ends. Each is waited for as long as the device's queue waits for anything
(vkback/device/queue.py): what is longer than SUBMIT_US is one dispatch, which takes seconds at the lowest rates of a GPU."""


class DeviceSteps:
    """The graphs as programs of a device, recorded when they are first run. All share one block of memory for activations."""

    def __init__(
        self, file: GgufFile, graphs: Mapping[str, Graph], device: Device, *, act: TrainingAct = "f32", progress: Report | None = None
    ) -> None:
        """Weights that the file lacks (adapters) are zeros until they are written. act: as of LowerContext."""
        self.device = device
        self._library = ShaderLibrary()
        self.ctx = LowerContext(
            device.caps,
            Tuning.for_device(device.caps),
            act,
            fragments=fragments_hold(device, self._library),
            row_lanes=row_lanes_found(device, self._library),
        )
        self._kernels = KernelCompiler(device, self._library, progress)
        self._graphs = graphs
        self._arenas: list[Arena] = []
        self._programs: dict[str, Program] = {}
        self._commands: dict[str, list[Commands]] = {}
        kept = _kept(graphs.values())
        stored = {name: t for name, t in kept.items() if t.kind == "weight" and name in file.tensors}
        own = [t for name, t in kept.items() if name not in stored]
        inputs = {t.name: t for graph in graphs.values() for t in graph.tensors().values() if t.kind == "input"}
        self.schedules = self._planned()
        try:
            self._weights: dict[str, WeightRanges] = {}
            self._ranges: dict[str, BufferRange] = {}
            if stored:
                loaded = load_weights(file, stored, device, progress=progress)
                self._arenas.append(loaded.arena)
                self._weights |= loaded.ranges
                # Which weights f16 cannot hold is known only when they are loaded.
                if (loaded.beyond_f16 or loaded.coarse) and act == "f16":
                    self.ctx = replace(self.ctx, beyond_f16=loaded.beyond_f16, coarse=loaded.coarse)
                    self.schedules = self._planned()
            block = self._allocate("gradients and states of the optimizer", [nbytes(t) for t in own])
            for t, buffer in zip(own, block, strict=True):
                if t.kind == "weight":
                    self._weights[t.name] = WeightRanges((buffer,))
                else:
                    self._ranges[t.name] = buffer
                self.write(t, np.zeros(t.shape, np.float32))
            block = self._allocate("inputs", [nbytes(t) for t in inputs.values()])
            self._ranges |= dict(zip(inputs, block, strict=True))
            self._inputs = inputs
            # Graphs run one after the other and share memory: the largest fits them all.
            largest = max(self.schedules.values(), key=lambda s: s.activation_bytes)
            self._activations = self._allocate("activations", largest.blocks)
        except BaseException:
            self.close()
            raise

    def _planned(self) -> dict[str, Schedule]:
        ahead = {"optimizer": None}
        return {name: plan(graph, self.ctx, fusion="training", ahead=ahead.get(name, AHEAD)) for name, graph in self._graphs.items()}

    def _allocate(self, purpose: str, sizes: Sequence[int]) -> list[BufferRange]:
        arena = self.device.arena(purpose, max(1, sum(map(aligned, sizes))), "device")
        self._arenas.append(arena)
        return [arena.alloc(size, purpose) for size in sizes]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory taken: weights, gradients, states, activations."""
        return sum(buffer.size for w in self._weights.values() for buffer in w.shards) + sum(
            buffer.size for buffer in (*self._ranges.values(), *self._activations)
        )

    def prepare(self, graph: str) -> None:
        """Compile and record a graph's program, unless that is done."""
        if graph in self._programs:
            return
        schedule = self.schedules[graph]
        self._kernels.compile(schedule.dispatches())
        program = Program(self.device, self._library, schedule, self._ranges, self._weights, self._activations)
        self._programs[graph] = program
        self._commands[graph] = program.record_parts(graph, set(cuts(schedule, low_costs(self.device.caps), SUBMIT_US)))

    def program(self, graph: str) -> Program:
        """A graph's program, to be measured. What it reads is what the last run has left."""
        self.prepare(graph)
        return self._programs[graph]

    def parts(self, graph: str) -> Sequence[Commands]:
        """The submits of a graph."""
        self.prepare(graph)
        return self._commands[graph]

    def run(self, graph: str, inputs: Mapping[str, Array]) -> list[Array]:
        self.prepare(graph)
        given = [
            (self._ranges[name], stored_bytes(self._inputs[name], value, self.device.caps)[0])
            for name, value in inputs.items()
            if name in self._inputs
        ]
        self.device.upload_many(given)
        under_way: list[Ticket] = []
        for part in self._commands[graph]:
            if len(under_way) == IN_FLIGHT:
                under_way.pop(0).wait()
            under_way.append(self.device.submit(part))
        for ticket in under_way:
            ticket.wait()
        program = self._programs[graph]
        outputs = self._graphs[graph].outputs
        buffers = [program.range(t.name) for t in outputs] + ([program.overflow] if program.overflow is not None else [])
        if not buffers:
            return []
        raw = self.device.download_many(buffers)
        ends = np.cumsum([buffer.size for buffer in buffers])
        pieces = np.split(raw, ends[:-1])
        if program.overflow is not None:
            self._check_range(program, program.overflow, pieces.pop().view(np.uint32))
        return [decoded(t, piece, self.device.caps) for t, piece in zip(outputs, pieces, strict=True)]

    def _check_range(self, program: Program, buffer: BufferRange, words: npt.NDArray[np.uint32]) -> None:
        """Raises F16RangeError where a kernel has packed what is no number. Rows are packed by powers of two of their own: no number is
        beyond the range of f16. words: the program's overflow words, of which `buffer` is the memory."""
        if found := program.overflowed(words):
            self.device.upload(buffer, np.zeros_like(words))
            name = next(iter(found)).removesuffix(SUFFIX)
            raise F16RangeError(
                f"[train] {name}: activations or gradients are infinite or no numbers: lower the learning rate, or bound the gradients"
            )

    def _buffers_of(self, tensor: Tensor) -> Sequence[BufferRange]:
        return self._weights[tensor.name].shards if tensor.kind == "weight" else (self._ranges[tensor.name],)

    def _decoded(self, tensor: Tensor, buffers: Sequence[BufferRange]) -> Array:
        if len(buffers) == 1:
            return decoded(tensor, self.device.download(buffers[0]), self.device.caps)
        rows = [
            decoded(replace(tensor, shape=(s.rows, tensor.shape[-1])), self.device.download(buffer), self.device.caps)
            for s, buffer in zip(shards(tensor, self.device.caps), buffers, strict=True)
        ]
        return np.concatenate(rows).reshape(tensor.shape)

    def read(self, tensor: Tensor) -> Array:
        return self._decoded(tensor, self._buffers_of(tensor))

    def write(self, tensor: Tensor, value: Array) -> None:
        raw = np.ascontiguousarray(value, np.float32)
        if in_planes(tensor):
            raw = raw.reshape(-1, tensor.shape[-1]).view(np.uint8)
        for buffer, data in zip(self._buffers_of(tensor), stored_bytes(tensor, raw, self.device.caps), strict=True):
            self.device.upload(buffer, data)

    def close(self) -> None:
        for program in self._programs.values():
            program.close()
        for arena in reversed(self._arenas):
            arena.destroy()
        self._programs.clear()
        self._arenas.clear()
