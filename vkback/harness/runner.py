"""Runs nodes on a device: all they touch lies in one block of memory, outputs and scratch filled with NaN, guard words around each tensor.

After a run the block may differ from what went in only where a dispatch says that it writes. The dispatches of a stage are recorded in
reverse, since they may run in any order: a barrier missing between two of them then shows even on a device that runs them one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Arena, BufferRange, Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import Verdict, judge, steps_of
from vkback.graph import Node, Tensor
from vkback.harness.cases import context_of
from vkback.ops.case import Case, Problem, Tolerance
from vkback.ops.dispatch import Dispatch, ceil_div
from vkback.ops.f16_range import F16RangeError, is_overflow_word, rescaled
from vkback.ops.general import viewed
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_node import LinearParams
from vkback.ops.op import OPS
from vkback.ops.storage import in_planes, nbytes
from vkback.plan.schedule import Schedule, aligned, into_stages
from vkback.plan.sync import SENTINEL, STATE, synchronized
from vkback.program import Program, WeightRanges
from vkback.program.values import decoded, q8_1_bytes, stored_bytes
from vkback.shader import ShaderLibrary

Array = npt.NDArray[Any]

GUARD = 256
"""Guard bytes before a tensor, and at least as many after it."""
GUARD_WORD = {"read": 0x7FCA7FCA, "written": 0xFFC5FFC5}
"""Around tensors that are only read, and around others. NaN as F32, F16 and BF16, so that reading past an end spoils a result; two of them,
since arithmetic hands a NaN's bits on, and a NaN read past one end and written past another must not look as if nothing had happened."""

MIN_BLOCK = 16 << 20
TIMEOUT_S = 60.0
CPU_TIMEOUT_S = 600.0
"""CPU drivers may compile a kernel when it first runs, which can take minutes."""


class GuardError(VkbackError):
    """A kernel wrote outside its tensors."""


class OverwriteError(VkbackError):
    """A kernel changed what it may only read, or left one of its counters other than zero."""


class WordError(VkbackError):
    """A kernel stored words that a later kernel would trip over."""


@dataclass(frozen=True)
class Piece:
    """A tensor, or a shard of a weight, at `offset` of the block."""

    tensor: Tensor
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Prepared:
    """Nodes ready to run: the block's bytes, where everything lies in it, what is launched, and what comes out.

    scales  of activations in f16 (LowerContext.f16_scales)
    scaled  prepares the same nodes with other ones; None where that changes nothing
    """

    label: str
    schedule: Schedule
    block: Array
    pieces: tuple[Piece, ...]
    outputs: tuple[Tensor, ...]
    scales: Mapping[str, float] = field(default_factory=dict)
    scaled: Callable[[Mapping[str, float]], Prepared] | None = None


@dataclass(frozen=True)
class Expected:
    """What an output must be: `values` within `tolerance`; with `steps` half a step of its own rounding is no error.

    label  "" for the op's reference, else what the bound is about
    rows   (first, end) along the last axis: the values are of that part of the output
    """

    output: str
    values: Array
    tolerance: Tolerance
    label: str = ""
    steps: Array | None = None
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        of_rows = f"rows {self.rows[0]} to {self.rows[1] - 1} " if self.rows else ""
        return f"{self.output} {of_rows}{self.label}".rstrip()

    def verdict(self, got: Mapping[str, Array]) -> Verdict:
        found = got[self.output]
        return judge(found[..., slice(*self.rows)] if self.rows else found, self.values, self.tolerance, self.steps)


@dataclass(frozen=True)
class Outcome:
    """Verdicts by output name, and the outputs."""

    verdicts: dict[str, Verdict]
    outputs: dict[str, Array]

    @property
    def ok(self) -> bool:
        return all(v.ok for v in self.verdicts.values())

    @property
    def text(self) -> str:
        return "; ".join(f"{n}: {v.text}" for n, v in self.verdicts.items())


def scheduled(problem: Problem, ctx: LowerContext, nodes: Sequence[Node] = ()) -> Schedule:
    """The dispatches of `prepare`, those of a stage in reverse. Raises PlanError.

    With ctx.sync "sentinel" kernels that can spin-wait do so, on inputs that are there already and on partial results of each other.
    """
    stages = into_stages([d for n in nodes or problem.parts or (problem.node,) for d in OPS[n.op].lower(n, ctx)])
    schedule = Schedule([stage[::-1] for stage in stages])
    check_bound(schedule.dispatches(), ctx)
    if ctx.sync != "sentinel":
        return schedule
    # A number that no kernel of a barrier-free stage stores: what holds it has been complete for long.
    older = frozenset(name for name, values in problem.values.items() if _holds_sentinel(values))
    return _barrier_free(schedule, ctx, older)


def _holds_sentinel(values: Array) -> bool:
    return values.dtype.itemsize == 4 and bool(np.any(np.ascontiguousarray(values).view(np.uint32) == SENTINEL))


def coarse_weights(problem: Problem) -> frozenset[str]:
    """`LowerContext.coarse` of a problem, as an engine finds it when it loads weights."""
    inputs = {t.name: t for n in problem.parts or (problem.node,) for t in n.inputs if t.name in problem.values}
    steps = (t for t in inputs.values() if t.type in quants.QUANTS and quants.quant(t.type).step_factor)
    return frozenset(t.name for t in steps if quants.coarse(t.type, problem.values[t.name]))


def prepare(problem: Problem, ctx: LowerContext, nodes: Sequence[Node] = ()) -> Prepared:
    """Lower a problem's node (or parts), or the chain `nodes` that makes the same outputs, and lay out all it needs. Raises PlanError."""
    node = problem.node
    ctx = replace(ctx, coarse=coarse_weights(problem))
    schedule = scheduled(problem, ctx, nodes)
    tensors = {**schedule.tensors(), **{t.name: t for t in (*node.inputs, *node.outputs)}}
    pieces: list[Piece] = []
    contents: list[Array] = []
    end = 0
    for tensor in tensors.values():
        for part in stored_bytes(tensor, problem.values.get(tensor.name), ctx.caps):
            if tensor.name in schedule.sentinel_tensors:
                part = np.full(ceil_div(part.nbytes, 4), SENTINEL, np.uint32).view(np.uint8)[: part.nbytes]
            pieces.append(Piece(tensor, end + GUARD, part.nbytes))
            contents.append(part)
            end = aligned(end + 2 * GUARD + part.nbytes)
    written = {name for d in schedule.dispatches() for name, _ in d.writes}
    words = np.empty(end // 4, np.uint32)
    for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
        until = (after.offset - GUARD if after else end) // 4
        words[(piece.offset - GUARD) // 4 : until] = GUARD_WORD["written" if piece.tensor.name in written else "read"]
    block = words.view(np.uint8)
    for piece, part in zip(pieces, contents, strict=True):
        block[piece.offset : piece.offset + piece.nbytes] = part

    def scaled(scales: Mapping[str, float]) -> Prepared:
        return prepare(problem, replace(ctx, f16_scales=scales), nodes)

    return Prepared(node.op, schedule, block, tuple(pieces), node.outputs, ctx.f16_scales, scaled)


def check_bound(dispatches: Iterable[Dispatch], ctx: LowerContext) -> None:
    """Raises PlanError where a tensor that no lowering cuts into shards exceeds what the device binds."""
    most = ctx.caps.max_storage_buffer_range
    for d in dispatches:
        for t in (a.tensor for a in d.args):
            if t.kind != "weight" and nbytes(t) > most:
                raise PlanError(f"[{d.op}] {t} takes {nbytes(t)} bytes, the device binds at most {most} (maxStorageBufferRange)")


def _barrier_free(schedule: Schedule, ctx: LowerContext, older: frozenset[str]) -> Schedule:
    """The schedule with kernels as they are in barrier-free stages, and partial results that begin as SENTINEL. Barriers stay.

    older  inputs that are not spun on where the kernel need not
    """

    def waiting(d: Dispatch) -> Dispatch:
        if not d.waits or len(d.args) >= ctx.caps.max_storage_bindings:
            return d
        parts = tuple(name for name in d.waits.also_part if name not in older)
        return synchronized(replace(d, waits=replace(d.waits, also_part=parts)), True)

    stages = [[waiting(d) for d in stage] for stage in schedule.stages]
    own = frozenset(name for stage in stages for d in stage if d.waits for name in d.waits.own)
    return replace(schedule, stages=stages, sentinel_tensors=own)


class Workbench:
    """Memory of a device in which one problem after the other is run. A context manager."""

    def __init__(self, device: Device, library: ShaderLibrary) -> None:
        self.device, self.library = device, library
        self._arenas: list[Arena] = []
        self._block: BufferRange | None = None
        self._upload: BufferRange | None = None
        self._readback: BufferRange | None = None

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for arena in self._arenas:
            arena.destroy()
        self._arenas.clear()
        self._block = self._upload = self._readback = None

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """Run; the outputs by name: float32 (F32, F16 and Q8_1 decoded) or int32.

        Where activations leave the range of f16, it runs again with the scales that an engine would take then. Raises F16RangeError where
        there are none, GuardError or OverwriteError naming the tensor when memory changed that should not have.
        """
        while True:
            raw = self._run(prepared)
            check_memory(prepared, raw)
            sizes = overflowed(prepared, raw)
            if not sizes:
                break
            scales = rescaled(prepared.scales, sizes)
            if prepared.scaled is None:
                raise F16RangeError(f"[{prepared.label}] activations leave the range of f16: {sizes}")
            prepared = prepared.scaled(scales)
        where = {p.tensor.name: p for p in prepared.pieces}
        stored = {t: raw[where[t.name].offset :][: where[t.name].nbytes].copy() for t in prepared.outputs}
        for t, words in stored.items():
            check_words(prepared, t, words)
        return {t.name: decoded(t, words, self.device.caps) for t, words in stored.items()}

    def _run(self, prepared: Prepared) -> Array:
        """The block after one run."""
        size = prepared.block.nbytes
        block, upload, readback = (r.slice(0, size) for r in self._ranges(size))
        upload.map()[:] = prepared.block
        rec = self.device.recorder(f"{prepared.label} inputs")
        rec.copy(upload, block)
        inputs = rec.finish()
        ranges: dict[str, BufferRange] = {}
        weights: dict[str, WeightRanges] = {}
        for piece in prepared.pieces:
            # Bound with the guard behind it: many drivers drop accesses beyond what is bound, and would hide the fault.
            bound = min(piece.nbytes + GUARD, max(piece.nbytes, self.device.caps.max_storage_buffer_range))
            part = block.slice(piece.offset, bound, piece.tensor.name)
            if piece.tensor.kind == "weight":
                before = weights.get(piece.tensor.name, WeightRanges(()))
                weights[piece.tensor.name] = WeightRanges((*before.shards, part))
            else:
                ranges[piece.tensor.name] = part
        program = Program(self.device, self.library, prepared.schedule, ranges, weights)
        try:
            commands = program.record(prepared.label, copies=[(block, readback)])
            self.device.submit([inputs, commands]).wait(CPU_TIMEOUT_S if self.device.caps.device_type == "cpu" else TIMEOUT_S)
        finally:
            program.close()
            inputs.destroy()
        return readback.map()

    def _ranges(self, size: int) -> tuple[BufferRange, BufferRange, BufferRange]:
        if self._block is None or self._upload is None or self._readback is None or self._block.size < size:
            self.close()
            room = max(MIN_BLOCK, 1 << (size - 1).bit_length())
            made = []
            for kind in ("device", "upload", "readback"):
                self._arenas.append(self.device.arena("case", room, kind))
                made.append(self._arenas[-1].alloc(room, f"case {kind}"))
            self._block, self._upload, self._readback = made
        return self._block, self._upload, self._readback


def overflowed(prepared: Prepared, after: Array) -> dict[str, float]:
    """Names of the overflow words that a run raised, with the size that they hold."""
    words = {p.tensor.name: after[p.offset : p.offset + 4].view(np.float32)[0] for p in prepared.pieces if is_overflow_word(p.tensor)}
    return {name: float(size) for name, size in words.items() if size != 0.0}


def check_words(prepared: Prepared, tensor: Tensor, raw: Array) -> None:
    """What the values of an output do not show: the sums of a Q8_1 unit are those of its int8, and a barrier-free stage stores no SENTINEL.

    Raises WordError.
    """
    if tensor.type == "Q8_1":
        rows = raw[: nbytes(tensor)].reshape(prod(tensor.shape[:-1]), -1)
        wrong = quants.q8_1_wrong_sums(rows, tensor.shape[-1])
        if wrong.size:
            raise WordError(
                f"[{prepared.label}] {tensor}: {len(wrong)} units store other sums than those of their int8, first [row, unit] {wrong[0]}"
            )
    makers = [d for d in prepared.schedule.dispatches() if any(name == tensor.name for name, _ in d.writes)]
    if tensor.kind == "node" and all(any(a.tensor.name == STATE.name for a in d.args) for d in makers):
        count = int(np.count_nonzero(raw.view(np.uint32) == SENTINEL))
        if count:
            raise WordError(f"[{prepared.label}] {tensor}: {count} words are SENTINEL, on which a barrier-free stage would wait for ever")


def check_memory(prepared: Prepared, after: Array) -> None:
    """Compare the block with what went in, outside of what dispatches write; see `Workbench.run`."""
    written = {name for d in prepared.schedule.dispatches() for name, _ in d.writes}
    changed = after != prepared.block
    for p in prepared.pieces:
        if p.tensor.kind == "counter" and not is_overflow_word(p.tensor):
            left = after[p.offset : p.offset + p.nbytes].view(np.uint32)
            if left.any():
                raise OverwriteError(f"[{prepared.label}] {p.tensor}: {np.count_nonzero(left)} counters were not put back to zero")
        if p.tensor.name in written:
            changed[p.offset : p.offset + p.nbytes] = False
    where = np.flatnonzero(changed)
    if not where.size:
        return
    first = int(where[0])
    index = bisect_right([p.offset - GUARD for p in prepared.pieces], first) - 1
    p = prepared.pieces[index]
    inside = where[(where >= p.offset) & (where < p.offset + p.nbytes)]
    if inside.size:
        raise OverwriteError(
            f"[{prepared.label}] {p.tensor}: {inside.size} of its {p.nbytes} bytes were changed, the first at {int(inside[0]) - p.offset}, "
            "and the kernel may only read it"
        )
    side = "before" if first < p.offset else "after"
    end = prepared.pieces[index + 1].offset - GUARD if index + 1 < len(prepared.pieces) else after.size
    count = np.count_nonzero(where < p.offset) if side == "before" else np.count_nonzero(where < end)
    raise GuardError(f"[{prepared.label}] {p.tensor}: {count} guard bytes {side} it were overwritten")


def run_problem(device: Device, library: ShaderLibrary, problem: Problem, ctx: LowerContext) -> dict[str, Array]:
    """Lower the problem's node, run it once and return its outputs by name; see `Workbench.run`."""
    with Workbench(device, library) as bench:
        return bench.run(prepare(problem, ctx))


def run_case(device: Device, library: ShaderLibrary, case: Case, ctx: LowerContext) -> Outcome:
    """Run a case and judge every output against the op's reference."""
    problem, ctx = case.build(), context_of(case, ctx)
    outputs = run_problem(device, library, problem, ctx)
    return Outcome({e.name: e.verdict(outputs) for e in expected(problem, ctx)}, outputs)


def reference(problem: Problem) -> dict[str, Array]:
    """What the op's reference makes of a problem, by output name."""
    node = problem.node
    return _by_name(node, OPS[node.op].reference(reference_inputs(problem), node.params))


def _by_name(node: Node, results: Sequence[Array]) -> dict[str, Array]:
    return {t.name: np.asarray(r).reshape(t.shape) for t, r in zip(node.outputs, results, strict=True)}


EXACT = Tolerance(0.0, 0.0, "whole numbers beside numbers that are rounded")


def expected(problem: Problem, ctx: LowerContext) -> list[Expected]:
    """What each output of a problem must be: first against the op's reference, then, where the kernel rounds to eight bits, against the
    reference of its own rounding. Nodes that fill an output between them may take kernels that round otherwise than the whole node's would:
    each has bounds of its own, for its rows.

    The first bound must allow for the rounding, which hides a small fault: a tenth of one row in a hundred. The second need not. x that the
    kernel rounds is rounded on the host as well (Op.rounded), and of a Q8_1 output half a step is taken off.
    """
    if problem.parts:
        found = []
        for part in problem.parts:
            rows = rows_of(part)
            found += [replace(e, rows=rows) for e in expected(of_rows(part, problem.values, slice(*rows)), ctx)]
        return found
    node, op = problem.node, OPS[problem.node.op]
    inputs = reference_inputs(problem)
    want = _by_name(node, op.reference(inputs, node.params))
    loose = op.tolerance_at(inputs, node, ctx)
    whole = {t.name for t in node.outputs if t.type == "I32"} if any(t.type != "I32" for t in node.outputs) else set()
    found = [Expected(name, values, EXACT if name in whole else loose) for name, values in want.items()]
    rounded = op.rounded(inputs, node, ctx)
    unrounded = Node(node.op, node.inputs, tuple(replace(t, type="F32") if t.type == "Q8_1" else t for t in node.outputs), node.params)
    tight = rounded.tolerance if rounded else op.tolerance(unrounded, ctx)
    if rounded:
        want = _by_name(node, rounded.outputs)
    for t in node.outputs:
        if rounded or t.type == "Q8_1":
            steps = steps_of(want[t.name]) if t.type == "Q8_1" else None
            found.append(Expected(t.name, want[t.name], tight, "beyond its own rounding", steps))
    return found


def rows_of(part: Node) -> tuple[int, int]:
    """(first, end) of the output rows that a LINEAR node fills."""
    params = LinearParams.of(part.params)
    return params.row0, params.row0 + (part.inputs[0].shape[-2] >> params.glu)


def of_rows(part: Node, values: Mapping[str, Array], rows: slice) -> Problem:
    """A LINEAR node that fills some rows of an output, with those rows for its output and its residual."""

    def cut(t: Tensor) -> Tensor:
        return replace(t, shape=(*t.shape[:-1], rows.stop - rows.start))

    roles = part.params["roles"]
    inputs = tuple(cut(t) if role == "residual" else t for role, t in zip(roles, part.inputs, strict=True))
    own = {t.name: values[t.name][..., rows] for role, t in zip(roles, inputs, strict=True) if role == "residual"}
    return Problem(replace(part, inputs=inputs, outputs=tuple(map(cut, part.outputs))), {**values, **own})


def reference_inputs(problem: Problem) -> list[Array]:
    """Values of a node's inputs as the reference takes them: weights and Q8_1 dequantized, floats as they are."""
    params = problem.node.params
    return [viewed(params, i, _plain(t, problem.values[t.name])) for i, t in enumerate(problem.node.inputs)]


def _plain(tensor: Tensor, value: Array) -> Array:
    if in_planes(tensor):
        return quants.decode(tensor.type, value).reshape(tensor.shape)
    if tensor.type == "Q8_1":
        return quants.q8_1_dequantize(q8_1_bytes(tensor, value), tensor.shape[-1]).reshape(tensor.shape)
    return value
