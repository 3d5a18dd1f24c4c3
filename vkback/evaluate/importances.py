"""Importance matrices: how strong the activations are that each weight's columns meet, over a text (vkback/gguf/imatrix.py).

The text goes through in chunks, each in a fresh context, a batch of tokens at a time. What products with weights take is kept in the
device's memory and read after every batch; squares are summed here in float64. Nodes are not fused, so every such value is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.node_run import context_on
from vkback.events import Report
from vkback.gguf.imatrix import Imatrix, Sums
from vkback.graph import Graph, Tensor
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.plan.planner import plan
from vkback.program import Program
from vkback.program.values import decoded
from vkback.shader import ShaderLibrary
from vkback.timing.stages import loaded

KEPT_BYTES = 512 << 20
"""Of activations of one batch."""

MAX_TOKENS, MAX_TOKENS_ON_CPU = 256, 32
"""Of a batch."""

TIMEOUT_S = 600.0

OUTPUTS = ("output.weight", "token_embd.weight")
"""Weights of the last product, whose importances are not gathered unless somebody asks: llama-quantize gives them more digits anyway."""


class ImportancesError(VkbackError):
    """A text or a model of which no importances can be gathered."""


@dataclass(frozen=True)
class Met:
    """A weight of the file and what it meets.

    x      F32 [n, k]; of experts [n, 1 or n_used, k]
    ids    of experts I32 [n, n_used], else None
    n_mat  experts, else 1
    source the tensor whose values those of x are, in whatever shape
    """

    weight: str
    x: Tensor
    ids: Tensor | None
    n_mat: int
    source: Tensor

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What has to be read."""
        return (self.source,) if self.ids is None else (self.source, self.ids)


def met_by_weights(model: Model, graph: Graph, *, with_output: bool = False) -> list[Met]:
    """What the matrices of a file meet in a graph. A tensor of the file that serves as several weights is named once; one whose rows meet
    different activations, by the first of them."""
    found: dict[str, Met] = {}
    file = model.file
    views = {node.outputs[0].name: node.inputs[0] for node in graph.nodes if node.op == "VIEW"}
    for node in graph.nodes:
        if node.op not in ("MUL_MAT", "MUL_MAT_ID") or node.inputs[0].kind != "weight" or node.inputs[1].kind != "node":
            continue
        weight, ids = node.inputs[0], node.inputs[2] if node.op == "MUL_MAT_ID" else None
        source = node.inputs[1]
        while source.name in views:
            source = views[source.name]
        for part in file.joined.get(weight.name, (weight.name,)):
            t = file.tensors.get(part)
            if t is None or t.made or t.name in found or (t.name in OUTPUTS and not with_output):
                continue
            if node.inputs[1].shape[-1] == t.shape[-1]:
                found[t.name] = Met(t.name, node.inputs[1], ids, prod(t.shape[:-2]) if ids is not None else 1, source)
    return list(found.values())


class _Totals:
    """Sums of one weight, in float64."""

    def __init__(self, met: Met) -> None:
        self.met = met
        self.sums = np.zeros((met.n_mat, met.x.shape[-1]))
        self.counts = np.zeros(met.n_mat)

    def add(self, x: Array, ids: Array | None) -> None:
        squares = np.square(x.reshape(self.met.x.shape).astype(np.float64))
        if self.met.ids is None or ids is None:
            rows = squares.reshape(-1, squares.shape[-1])
            self.sums += rows.sum(axis=0)
            self.counts += len(rows)
            return
        chosen = ids.reshape(self.met.ids.shape)
        spread = np.broadcast_to(squares, (*chosen.shape, squares.shape[-1])).reshape(-1, squares.shape[-1])
        order = np.argsort(chosen.ravel(), kind="stable")
        experts, first, counts = np.unique(chosen.ravel()[order], return_index=True, return_counts=True)
        self.sums[experts] += np.add.reduceat(spread[order], first, axis=0)
        self.counts[experts] += counts

    @property
    def found(self) -> Sums:
        return Sums(self.sums.astype(np.float32), self.counts.astype(np.float32))


def chunks_of(ids: Sequence[int], size: int, most: int | None, bos: int | None) -> list[npt.NDArray[np.int32]]:
    """A text's tokens in chunks, each beginning with the token of a beginning where the model wants one, as llama-imatrix takes them. What
    is left at the end is left out. Raises ImportancesError where the text has not one chunk."""
    count = len(ids) // size
    if not count:
        raise ImportancesError(f"[imatrix] the text has {len(ids)} tokens, one chunk takes {size}; give a longer text, or a smaller --ctx")
    found = np.array(ids[: count * size], np.int32).reshape(count, size)
    if bos is not None:
        found[:, 0] = bos
    return list(found[:most])


def gather_importances(
    model: Model,
    device: Device,
    chunks: Sequence[npt.NDArray[np.int32]],
    *,
    out: Path,
    text: str = "",
    with_output: bool = False,
    on_chunk: Callable[[int], object] | None = None,
    progress: Report | None = None,
) -> Imatrix:
    """Run chunks of equal length and sum what every matrix meets.

    out       what errors call the result
    text      its name in the file
    on_chunk  called with the number of a chunk, from 1, once it is done
    Raises ImportancesError for a model whose text goes through whole (BERT).
    """
    if not model.architecture.causal:
        raise ImportancesError(
            f"[imatrix] {model.file.path.name}: {model.file.arch} makes vectors of whole texts; give one that makes text"
        )
    library, size = ShaderLibrary(), len(chunks[0])
    ctx = context_on(device, library, "f32")
    batch = _batch(model, size, device.caps.software, with_output)
    graph, met = _graph(model, batch, size, with_output)
    if not met:
        raise ImportancesError(f"[imatrix] {model.file.path.name}: no matrix of it meets activations")
    schedule = plan(graph, ctx, fusion="none")
    wanted = {t.name: t for each in met for t in each.kept}
    totals = [_Totals(each) for each in met]
    with ExitStack() as stack:
        weights, ranges = loaded(model, schedule.tensors(), device, stack, progress=progress)
        program = Program(device, library, schedule, ranges, weights)
        stack.callback(program.close)
        commands = program.record("importances")
        states = [name for name, t in schedule.tensors().items() if t.kind == "state"]
        for number, tokens in enumerate(chunks, 1):
            rec = device.recorder("zeros")
            for name in states:
                rec.fill(ranges[name], 0)
            device.run(rec)
            for first in range(0, size, batch):
                inputs = {
                    "tokens": tokens[first : first + batch],
                    "pos": np.arange(first, first + batch, dtype=np.int32),
                    "out_ids": np.array([batch - 1], np.int32),
                }
                for name, value in inputs.items():
                    if name in ranges:
                        device.upload(ranges[name], value)
                device.submit(commands).wait(TIMEOUT_S)
                values = {name: decoded(t, device.download(program.range(name)), device.caps) for name, t in wanted.items()}
                for total in totals:
                    ids = total.met.ids
                    total.add(values[total.met.source.name], values[ids.name] if ids is not None else None)
            if on_chunk is not None:
                on_chunk(number)
    sums = {total.met.weight: total.found for total in totals}
    return Imatrix(out, sums, (text,) if text else (), len(chunks), size, len(sums))


def _graph(model: Model, batch: int, size: int, with_output: bool) -> tuple[Graph, list[Met]]:
    """A graph whose outputs are what the weights meet."""
    graph = model.graph(batch, size, head="all")
    met = met_by_weights(model, graph, with_output=with_output)
    kept = {t.name: t for each in met for t in each.kept}
    return dataclasses.replace(graph, outputs=tuple(kept.values())), met


def _batch(model: Model, size: int, software: bool, with_output: bool) -> int:
    """Tokens of a batch: a power of two that divides a chunk, whose activations take little memory."""
    batch = size & -size
    graph, _ = _graph(model, 1, size, with_output)
    per_token = sum(4 * t.elements for t in graph.outputs)
    most = min(MAX_TOKENS_ON_CPU if software else MAX_TOKENS, max(1, KEPT_BYTES // per_token))
    while batch > most:
        batch //= 2
    return batch
