"""Experts that lie in memory of the host are read from a cache on the device, where a program's choices fit it."""

from __future__ import annotations

import dataclasses
import re

from vkback.graph import Node, Tensor
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_node import inputs_by_role
from vkback.ops.moe.expert_cache import MAX_CHOSEN, cached_tensor, copy_problem, table_words
from vkback.plan.nodes import Nodes

EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.weight$")
"""Names of tensors of a file that hold the matrices of experts, with their layer."""

CACHED, TABLE = ".cached", ".expert_table"
"""Suffixes of the names of slots, and of the table that says what they hold."""


def layer_of(weight: Tensor) -> int | None:
    """The layer whose experts a weight holds; None: it holds none, or is none of several axes."""
    names = weight.recipe.sources if weight.recipe else (weight.name,)
    found = [EXPERTS.match(name) for name in names] if len(weight.shape) > 2 else []
    return int(found[0][1]) if found and found[0] is not None else None


def is_cache(tensor: Tensor) -> bool:
    """Whether a tensor is of a cache of experts: slots, or a table."""
    return tensor.name.endswith((CACHED, TABLE))


def cache_experts(nodes: Nodes, ctx: LowerContext) -> Nodes:
    """Products by experts in memory of the host read slots of the cache instead, behind an EXPERT_CACHE and EXPERT_COPY for each tensor.

    All products by the same choice share a table, so those of a layer are cached together, or none is: where a program has more choices
    than there are slots, or experts are no whole words.
    """
    groups: dict[str, list[Node]] = {}
    for node in nodes if ctx.expert_slots else ():
        if node.op == "LINEAR" and "ids" in node.params["roles"]:
            by = inputs_by_role(node)
            layer = layer_of(by["w"])
            if layer is not None and layer < ctx.host_layers:
                groups.setdefault(by["ids"].name, []).append(node)
    for readers in groups.values():
        nodes = _cached(nodes, readers, ctx.expert_slots)
    return nodes


def _cached(nodes: Nodes, readers: list[Node], slots: int) -> Nodes:
    """The nodes with those products of one choice of experts reading slots."""
    roles = [inputs_by_role(node) for node in readers]
    ids, n_expert = roles[0]["ids"], roles[0]["w"].shape[0]
    slots = min(slots, n_expert)
    held = {t.name: t for by in roles for role, t in by.items() if role in ("w", "bias")}
    if ids.elements > min(slots, MAX_CHOSEN) or any(copy_problem(t, n_expert) for t in held.values()):
        return nodes
    params = {"n_expert": n_expert, "slots": slots}
    name = roles[0]["w"].name
    table = Tensor(f"{name}{TABLE}", "I32", (table_words(n_expert, slots),), "state")
    found = dataclasses.replace(ids, name=f"{ids.name}.slots", kind="node")
    moves = Tensor(f"{ids.name}.moves", "I32", (ids.elements, 2))
    new = {name: cached_tensor(t, n_expert, slots, f"{name}{CACHED}") for name, t in held.items()} | {ids.name: found}
    added = [Node("EXPERT_CACHE", (ids, table), (found, moves, table), params)]
    added += [Node("EXPERT_COPY", (t, moves, new[t.name]), (new[t.name],), {"n_expert": n_expert}) for t in held.values()]
    first = next(i for i, node in enumerate(nodes) if node is readers[0])
    out = [dataclasses.replace(n, inputs=tuple(new.get(t.name, t) for t in n.inputs)) if any(n is r for r in readers) else n for n in nodes]
    return [*out[:first], *added, *out[first:]]
