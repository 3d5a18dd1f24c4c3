"""Low-rank adapters (LoRA) beside weights of a graph: y = W x + B (alpha / rank) A x. The scale is applied where there are fewest values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vkback.graph import Node, Recipe, Tensor

A, B = ".lora_a", ".lora_b"
"""What an adapter file adds to the name of a weight."""


@dataclass(frozen=True)
class Lora:
    """Which weights have adapters.

    ranks     rank by the weight's name: A is [rank, k], B [m, rank]
    alpha     B A x is multiplied by alpha / rank ...
    strength  ... and by this
    """

    ranks: Mapping[str, int]
    alpha: float
    strength: float = 1.0

    def scale(self, weight: str) -> float:
        """The factor of B A x."""
        return self.strength * self.alpha / self.ranks[weight]


def is_adapter(name: str) -> bool:
    """Whether a weight is an adapter's A or B."""
    return name.endswith((A, B))


def adapters(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of a weight, named as in adapter files."""
    m, k = weight.shape
    a, b = (
        Tensor(f"{weight.name}{which}", "F32", shape, "weight", Recipe("plain", (f"{weight.name}{which}",)))
        for which, shape in ((A, (rank, k)), (B, (m, rank)))
    )
    return a, b


def adapted(nodes: Sequence[Node], lora: Lora) -> list[Node]:
    """The nodes with adapters beside the products that have them."""
    out: list[Node] = []
    for node in nodes:
        if node.op != "MUL_MAT" or node.inputs[0].name not in lora.ranks:
            out.append(node)
            continue
        (w, x), (y,) = node.inputs, node.outputs
        rank = lora.ranks[w.name]
        a, b = adapters(w, rank)
        prefix, dash, layer = y.name.partition("-")
        few = (*y.shape[:-1], rank)
        plain, low, scaled, high = (
            Tensor(f"{prefix}_{what}{dash}{layer}", "F32", shape)
            for what, shape in (("base", y.shape), ("lora_a", few), ("lora_scaled", few), ("lora_b", y.shape))
        )
        out += [
            Node("MUL_MAT", (w, x), (plain,)),
            Node("MUL_MAT", (a, x), (low,)),
            Node("SCALE", (low,), (scaled,), {"scale": lora.scale(w.name), "bias": 0.0}),
            Node("MUL_MAT", (b, scaled), (high,)),
            Node("ADD", (plain, high), (y,)),
        ]
    return out
