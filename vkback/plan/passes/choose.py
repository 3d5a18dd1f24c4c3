"""Kernels chosen once: after the fusions that combine nodes, each product gets the choice that all later passes read (`Node.choice`).

Later passes change what a node reads and stores, never which kernel it is: they ask the choice what the kernel can store, and take from it
what the kernel is with another type of output (`storing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from vkback.graph import Node
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, KernelChoice
from vkback.plan.nodes import Nodes


def choose_kernels(nodes: Sequence[Node], ctx: LowerContext) -> Nodes:
    """The nodes with the kernels that their ops choose."""
    return [_chosen(node, ctx) if node.choice is None and node.op in OPS else node for node in nodes]


def choices_of(nodes: Iterable[Node]) -> Iterator[tuple[str, KernelChoice]]:
    """(name, choice) of every node that has one, and of the products that one stands for."""
    for node in nodes:
        yield from choices_of(node.params.get("parts", ()))
        if node.choice is not None and isinstance(node.choice, KernelChoice):  # most have none, and isinstance of a Protocol is slow
            yield node.name, node.choice


def as_stored(node: Node, ctx: LowerContext) -> Node:
    """A node that a pass has given another type of output, with the choice of that."""
    choice = node.choice
    return dataclasses.replace(node, choice=choice.storing(node, ctx)) if isinstance(choice, KernelChoice) else node


def _chosen(node: Node, ctx: LowerContext) -> Node:
    try:
        choice = OPS[node.op].choose(node, ctx)
    except PlanError:  # no kernel fits: lowering says so, after what is wrong with the nodes before this one
        return node
    return node if choice is None else dataclasses.replace(node, choice=choice)
