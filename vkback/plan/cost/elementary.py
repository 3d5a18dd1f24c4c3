"""The graph of a model as ggml builds it, without fused ops: the granularity at which listings count costs and temporary storage.

How our graph becomes that one:
- A node whose op has an elementary chain (`Op.elementary`: attention, gated units, the store into a cache) becomes that chain.
- The order is depth-first, first operand first, from these roots: for every attention its queries, the values that its caches are to store
  (without the views around them) and the stores; then the outputs; then whatever else writes a state. A node is listed once all its
  operands are.

Names of values and operands stay ours; nothing is described a second time.
"""

from __future__ import annotations

from collections.abc import Iterator

from vkback.graph import Graph, Node, Tensor
from vkback.ops.op import cost_rule


def elementary(graph: Graph, n_kv: int) -> Graph:
    """The same values by elementary nodes. n_kv: rows of the caches in use, including the batch's."""
    nodes = [simple for node in graph.nodes for simple in cost_rule(node).elementary(node, n_kv) or [node]]
    return Graph(_ordered(nodes, list(_roots(graph))), graph.outputs)


def _roots(graph: Graph) -> Iterator[Tensor]:
    """The values from which the listing descends, in order; a state stands for the nodes that write it."""
    producers = {t.name: node for node in graph.nodes for t in node.outputs if t.kind != "state"}
    stores = {t.name: node for node in graph.nodes if node.op == "SET_ROWS" for t in node.outputs}
    for node in graph.nodes:
        if node.op != "FLASH_ATTN_EXT":
            continue
        yield node.inputs[0]
        caches = list(dict.fromkeys(t for t in node.inputs if t.kind == "state"))
        for cache in caches:
            if cache.name in stores:
                x = stores[cache.name].inputs[0]
                while x.name in producers and producers[x.name].op == "VIEW":
                    x = producers[x.name].inputs[0]
                yield x
        yield from caches
    yield from graph.outputs
    yield from (t for node in graph.nodes for t in node.outputs if t.kind in ("state", "input"))


def _ordered(nodes: list[Node], roots: list[Tensor]) -> list[Node]:
    """Depth-first order from the roots. Nodes that read a state after it was written, as attention reads its caches, come after:
    stores are roots."""
    makers: dict[str, list[Node]] = {}
    for node in nodes:
        for t in node.outputs:
            makers.setdefault(t.name, []).append(node)
    order: list[Node] = []
    done: set[int] = set()
    stack = [(node, False) for root in reversed(roots) for node in reversed(makers.get(root.name, []))]
    while stack:
        node, ready = stack.pop()
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            order.append(node)
            continue
        stack.append((node, True))
        stack += [(makers[t.name][0], False) for t in reversed(node.inputs) if t.kind == "node" and t.name in makers]
    return order
