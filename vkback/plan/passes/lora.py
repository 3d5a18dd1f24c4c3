"""Low-rank adapters (LoRA) beside weights of a graph: y = W x + B (alpha / rank) A x, and of the rows of an embedding table
W[id] + A^T (alpha / rank) B[id]. The scale is applied where there are fewest values.

Scales are either part of the graph, or an input of it, so that programs stay as they are while adapters are switched. Then A and B of all
adapters lie side by side, and the input has a number for each row of A: 0 for rows of an adapter that is off. In a batch each sequence has
such numbers of its own, so that sequences with different adapters share a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vkback.graph import Node, Recipe, Tensor

A, B = ".lora_a", ".lora_b"
"""What an adapter file adds to the name of a weight."""
TRANSPOSED = ".lora_a_transposed"
"""A^T [k, rank], which is multiplied by rows of B where the weight is an embedding table."""
SCALES = "lora_scales"
"""The input of scales: F32 [rank], in a batch [sequences, rank]."""


@dataclass(frozen=True)
class Lora:
    """Which weights have adapters.

    ranks     rank by the weight's name: A is [rank, k], B [m, rank]
    alpha     B A x is multiplied by alpha / rank, by 1 where alpha is 0 (as llama.cpp does) ...
    strength  ... and by this
    widths    rows of A of each adapter, where an input has their scales; (): scales are part of the graph
    """

    ranks: Mapping[str, int]
    alpha: float
    strength: float = 1.0
    widths: tuple[int, ...] = ()

    @property
    def switched(self) -> bool:
        """Whether an input has the scales."""
        return bool(self.widths)

    def switches(self, scales: Sequence[float]) -> npt.NDArray[np.float32]:
        """The input for scales of the first adapters, float32 [rank]; the others are off."""
        return np.repeat(np.array([*scales, *[0.0] * (len(self.widths) - len(scales))], np.float32), self.widths)

    def scale(self, weight: str) -> float:
        """The factor of B A x."""
        return self.strength * (self.alpha / self.ranks[weight] if self.alpha else 1.0)


def is_adapter(name: str) -> bool:
    """Whether a weight is an adapter's A or B."""
    return name.endswith((A, B))


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor that lies in memory is of an adapter."""
    return name.endswith((A, B, TRANSPOSED))


def adapters(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of a weight, named as in adapter files."""
    m, k = weight.shape
    return _stored(weight, A, (rank, k)), _stored(weight, B, (m, rank))


def _stored(weight: Tensor, which: str, shape: tuple[int, int]) -> Tensor:
    return Tensor(f"{weight.name}{which}", "F32", shape, "weight", Recipe("plain", (f"{weight.name}{which}",)))


def adapted(nodes: Sequence[Node], lora: Lora, columns: tuple[int, int] | None = None) -> list[Node]:
    """The nodes with adapters beside the products, and beside the rows of tables, that have them.

    columns  of a step of a batch, and sequences that there may be: where scales are an input, each column takes those of its sequence
    """
    out: list[Node] = []
    scales: Tensor | None = None
    if lora.switched:
        scales = Tensor(SCALES, "F32", (sum(lora.widths),), "input")
        if columns is not None:
            n, sequences = columns
            table, slots = Tensor(SCALES, "F32", (sequences, sum(lora.widths)), "input"), Tensor("slots", "I32", (n,), "input")
            scales = Tensor(f"{SCALES}_of_columns", "F32", (n, sum(lora.widths)))
            out.append(Node("GET_ROWS", (table, slots), (scales,)))
    for node in nodes:
        if node.op in ("MUL_MAT", "GET_ROWS") and node.inputs[0].name in lora.ranks:
            out += _product(node, lora, scales) if node.op == "MUL_MAT" else _rows(node, lora, scales)
        else:
            out.append(node)
    return out


def _product(node: Node, lora: Lora, scales: Tensor | None) -> list[Node]:
    (w, x), (y,) = node.inputs, node.outputs
    rank = lora.ranks[w.name]
    a, b = adapters(w, rank)
    few = (*y.shape[:-1], rank)
    plain, low, scaled, high = (
        _beside(y, what, shape) for what, shape in (("base", y.shape), ("lora_a", few), ("lora_scaled", few), ("lora_b", y.shape))
    )
    return [
        Node("MUL_MAT", (w, x), (plain,)),
        Node("MUL_MAT", (a, x), (low,)),
        Node("SCALE", (low,), (scaled,), {"scale": lora.scale(w.name), "bias": 0.0})
        if scales is None
        else Node("MUL", (low, scales), (scaled,)),
        Node("MUL_MAT", (b, scaled), (high,)),
        Node("ADD", (plain, high), (y,)),
    ]


def _rows(node: Node, lora: Lora, scales: Tensor | None) -> list[Node]:
    (table, ids), (y,) = node.inputs, node.outputs
    rank = lora.ranks[table.name]
    _, b = adapters(table, rank)
    transposed = _stored(table, TRANSPOSED, (table.shape[1], rank))
    few = (*y.shape[:-1], rank)
    plain, low, scaled, high = (
        _beside(y, what, shape) for what, shape in (("base", y.shape), ("lora_b", few), ("lora_scaled", few), ("lora_a", y.shape))
    )
    return [
        Node("GET_ROWS", (table, ids), (plain,), node.params),
        Node("GET_ROWS", (b, ids), (low,), {"scale": lora.scale(table.name) * node.params.get("scale", 1.0)}),
        *([] if scales is None else [Node("MUL", (low, scales), (scaled,))]),
        Node("MUL_MAT", (transposed, low if scales is None else scaled), (high,)),
        Node("ADD", (plain, high), (y,)),
    ]


def _beside(y: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
    """A value on the way to y, named after it."""
    prefix, dash, layer = y.name.partition("-")
    return Tensor(f"{prefix}_{what}{dash}{layer}", "F32", shape)
