"""Runs one problem on a device: outputs filled with NaN first, guard bytes on both sides of every tensor, one barrier a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import BufferRange, Device
from vkback.errors import VkbackError
from vkback.graph import Node, Tensor
from vkback.harness.judge import Verdict, judge
from vkback.ops.base import OPS, Case, LowerContext, Problem, nbytes, shards
from vkback.plan.schedule import Schedule, into_stages
from vkback.program import Program, WeightRanges
from vkback.shader import ShaderLibrary

Array = npt.NDArray[Any]

GUARD = 256
"""Guard bytes on each side of a tensor."""
GUARD_BYTE = 0xA5
NAN_WORD = 0x7FC0DEAD


class GuardError(VkbackError):
    """A kernel wrote outside its tensors."""


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


def run_problem(device: Device, library: ShaderLibrary, problem: Problem, ctx: LowerContext) -> dict[str, Array]:
    """Lower the problem's node, run it once and return its outputs by name: float32 (F32, F16 and Q8_1 decoded) or int32.

    Raises GuardError naming tensor and side when guard bytes changed.
    """
    node = problem.node
    schedule = Schedule(into_stages(OPS[node.op].lower(node, ctx)))
    tensors = {**schedule.tensors(), **{t.name: t for t in (*node.inputs, *node.outputs)}}
    pieces: dict[str, list[Array]] = {t.name: _pieces(t, problem.values.get(t.name), ctx) for t in tensors.values()}
    total = sum(GUARD * 2 + 512 + p.nbytes for parts in pieces.values() for p in parts)
    with device.arena("case", total, "device") as arena:
        outer: dict[str, list[BufferRange]] = {}
        inner: dict[str, list[BufferRange]] = {}
        for name, parts in pieces.items():
            for part in parts:
                block = arena.alloc(part.nbytes + 2 * GUARD, name)
                device.upload(block, np.concatenate([_guard(), part, _guard()]))
                outer.setdefault(name, []).append(block)
                inner.setdefault(name, []).append(block.slice(GUARD, part.nbytes))
        weights = {n: WeightRanges(tuple(r)) for n, r in inner.items() if tensors[n].kind == "weight"}
        ranges = {n: r[0] for n, r in inner.items() if tensors[n].kind != "weight"}
        program = Program(device, library, schedule, ranges, weights)
        try:
            device.submit(program.record(node.op)).wait(60)
        finally:
            program.close()
        for name, blocks in outer.items():
            for block in blocks:
                raw = device.download(block)
                for side, bytes_ in (("before", raw[:GUARD]), ("after", raw[-GUARD:])):
                    if (bytes_ != GUARD_BYTE).any():
                        raise GuardError(f"[{node.op}] {tensors[name]}: {int((bytes_ != GUARD_BYTE).sum())} guard bytes {side} it were overwritten")
        return {t.name: _decoded(t, device.download(ranges[t.name])) for t in node.outputs}


def run_case(device: Device, library: ShaderLibrary, case: Case, ctx: LowerContext) -> Outcome:
    """Run a case and judge every output against the op's reference."""
    problem = case.build()
    op = OPS[case.op]
    want = op.reference(reference_inputs(problem), problem.node.params)
    outputs = run_problem(device, library, problem, ctx)
    tolerance = op.tolerance(problem.node, ctx)
    verdicts = {
        t.name: judge(outputs[t.name], np.asarray(w).reshape(t.shape), tolerance) for t, w in zip(problem.node.outputs, want, strict=True)
    }
    return Outcome(verdicts, outputs)


def reference_inputs(problem: Problem) -> list[Array]:
    """Values of a node's inputs as the reference takes them: weights dequantized, floats as they are."""
    return [_plain(t, problem.values[t.name]) for t in problem.node.inputs]


def _plain(tensor: Tensor, value: Array) -> Array:
    if tensor.kind == "weight" and len(tensor.shape) > 1:
        return quants.decode(tensor.type, value).reshape(tensor.shape)
    if tensor.type == "Q8_1" and value.dtype == np.uint8:
        return quants.q8_1_dequantize(value, tensor.shape[-1]).reshape(tensor.shape)
    return value


def _guard() -> Array:
    return np.full(GUARD, GUARD_BYTE, np.uint8)


def _pieces(tensor: Tensor, value: Array | None, ctx: LowerContext) -> list[Array]:
    """The bytes of a tensor as the device holds them, one piece a shard."""
    if tensor.kind == "weight" and len(tensor.shape) > 1:
        assert value is not None, f"{tensor} has no value"
        raw = value.reshape(prod(tensor.shape[:-1]), -1)
        return [quants.to_device(tensor.type, raw[s.row0 : s.row0 + s.rows], tensor.shape[-1]) for s in shards(tensor, ctx.caps)]
    if value is None and tensor.kind == "counter":
        return [np.zeros(nbytes(tensor), np.uint8)]
    if value is None:
        return [np.full(-(-nbytes(tensor) // 4), NAN_WORD, np.uint32).view(np.uint8)]
    if value.dtype == np.uint8:
        return [np.ascontiguousarray(value).ravel()]
    if tensor.type == "Q8_1":
        return [quants.q8_1_quantize(value.reshape(-1, tensor.shape[-1]).astype(np.float32)).ravel()]
    dtype = {"F32": np.float32, "F16": np.float16, "I32": np.int32}[tensor.type]
    return [np.ascontiguousarray(value.astype(dtype)).ravel().view(np.uint8)]


def _decoded(tensor: Tensor, raw: Array) -> Array:
    if tensor.type == "Q8_1":
        rows = raw[: nbytes(tensor)].reshape(prod(tensor.shape[:-1]), -1)
        return quants.q8_1_dequantize(rows, tensor.shape[-1]).reshape(tensor.shape)
    dtype = {"F32": np.float32, "F16": np.float16, "I32": np.int32}[tensor.type]
    return raw[: nbytes(tensor)].view(dtype).reshape(tensor.shape).astype(np.int32 if tensor.type == "I32" else np.float32)


def node_problem(node: Node, values: Mapping[str, Array]) -> Problem:
    """A problem from a node and values by input name."""
    return Problem(node, dict(values))
