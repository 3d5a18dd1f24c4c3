"""Low-rank adapters (LoRA) beside weights of a graph: y = W x + B (alpha / rank) A x, and of the rows of an embedding table
W[id] + A^T (alpha / rank) B[id]. The scale is applied where there are fewest values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkback.graph import Node, Recipe, Tensor

A, B = ".lora_a", ".lora_b"
"""What an adapter file adds to the name of a weight."""
TRANSPOSED = ".lora_a_transposed"
"""A^T [k, rank], which is multiplied by rows of B where the weight is an embedding table."""


@dataclass(frozen=True)
class Lora:
    """Which weights have adapters.

    ranks     rank by the weight's name: A is [rank, k], B [m, rank]
    alpha     B A x is multiplied by alpha / rank, by 1 where alpha is 0 (as llama.cpp does) ...
    strength  ... and by this
    """

    ranks: Mapping[str, int]
    alpha: float
    strength: float = 1.0

    def scale(self, weight: str) -> float:
        """The factor of B A x."""
        return self.strength * (self.alpha / self.ranks[weight] if self.alpha else 1.0)


def is_adapter(name: str) -> bool:
    """Whether a weight is an adapter's A or B."""
    return name.endswith((A, B))


def adapters(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of a weight, named as in adapter files."""
    m, k = weight.shape
    return _stored(weight, A, (rank, k)), _stored(weight, B, (m, rank))


def _stored(weight: Tensor, which: str, shape: tuple[int, int]) -> Tensor:
    return Tensor(f"{weight.name}{which}", "F32", shape, "weight", Recipe("plain", (f"{weight.name}{which}",)))


def adapted(nodes: Sequence[Node], lora: Lora) -> list[Node]:
    """The nodes with adapters beside the products, and beside the rows of tables, that have them."""
    out: list[Node] = []
    for node in nodes:
        if node.op in ("MUL_MAT", "GET_ROWS") and node.inputs[0].name in lora.ranks:
            out += _product(node, lora) if node.op == "MUL_MAT" else _rows(node, lora)
        else:
            out.append(node)
    return out


def _product(node: Node, lora: Lora) -> list[Node]:
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
        Node("SCALE", (low,), (scaled,), {"scale": lora.scale(w.name), "bias": 0.0}),
        Node("MUL_MAT", (b, scaled), (high,)),
        Node("ADD", (plain, high), (y,)),
    ]


def _rows(node: Node, lora: Lora) -> list[Node]:
    (table, ids), (y,) = node.inputs, node.outputs
    rank = lora.ranks[table.name]
    _, b = adapters(table, rank)
    transposed = _stored(table, TRANSPOSED, (table.shape[1], rank))
    plain, low, high = (
        _beside(y, what, shape) for what, shape in (("base", y.shape), ("lora_b", (*y.shape[:-1], rank)), ("lora_a", y.shape))
    )
    return [
        Node("GET_ROWS", (table, ids), (plain,), node.params),
        Node("GET_ROWS", (b, ids), (low,), {"scale": lora.scale(table.name) * node.params.get("scale", 1.0)}),
        Node("MUL_MAT", (transposed, low), (high,)),
        Node("ADD", (plain, high), (y,)),
    ]


def _beside(y: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
    """A value on the way to y, named after it."""
    prefix, dash, layer = y.name.partition("-")
    return Tensor(f"{prefix}_{what}{dash}{layer}", "F32", shape)
