"""What a head that drafts reads, as one node: the norms of a token's embedding and of a hidden row, side by side (vkback/models/mtp.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vkback.graph import Node
from vkback.ops.lowering import LowerContext
from vkback.ops.norm_pair import RmsNormPair
from vkback.plan.nodes import Index, Nodes, rewrite

ROTATING = frozenset({"ROPE", "ROPE_ANGLES", "QKV_ROPE_SET_ROWS", "MLA_ROPE_SET_ROWS"})


def fuse_norm_pairs(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """CONCAT along a row of two RMS_NORM_MUL, the second of GET_ROWS of a state -> RMS_NORM_PAIR. It also leaves the rows, or these normed,
    where anybody else reads one of the two."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "CONCAT" or len(node.inputs) != 2 or node.params["axis"] not in (1, -1) or len(node.outputs[0].shape) != 2:
            return None
        first = index.one_use_producer(node.inputs[0], "RMS_NORM_MUL")
        second = index.producer.get(node.inputs[1].name)
        if first is None or second is None or second.op != "RMS_NORM_MUL":
            return None
        (a, wa), (b, wb) = first.inputs, second.inputs
        rows = index.producer.get(b.name)
        if rows is None or rows.op != "GET_ROWS" or rows.params or not a.shape == b.shape == node.inputs[0].shape == node.inputs[1].shape:
            return None
        table, ids = rows.inputs
        if table.type != "F32" or table.kind != "state" or a.type != "F32" or not RmsNormPair.threads(a.shape[-1], a.shape[0], ctx):
            return None
        read = [not index.read_once(t) for t in (rows.outputs[0], second.outputs[0])]
        if all(read) or len(node.inputs) + 6 > ctx.caps.max_storage_bindings:
            return None
        keeps, kept = ("row", rows.outputs) if read[0] else ("normed", second.outputs) if read[1] else ("", ())
        params = {"eps": first.params["eps"], "eps_b": second.params["eps"], "keeps": keeps}
        return [rows, first, second, node], Node("RMS_NORM_PAIR", (a, wa, table, wb, ids), (node.outputs[0], *kept), params)

    return rewrite(nodes, outputs, match)


def embeddings_into_pairs(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """RMS_NORM_PAIR of GET_ROWS of a weight, which nobody else reads -> RMS_NORM_PAIR of the weight, and of positions in place of their
    PREVIOUS. Of a draft it is in the first stage then."""
    bindings = ctx.caps.max_storage_bindings

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        embedded = index.one_use_producer(node.inputs[0], "GET_ROWS") if node.op == "RMS_NORM_PAIR" else None
        if embedded is None or not embedded.params.keys() <= {"scale"} or len(node.inputs) + len(node.outputs) + 1 > bindings:
            return None
        table, tokens = embedded.inputs
        if not RmsNormPair.embeds(table, tokens.elements, ctx):
            return None
        _, *inputs, ids = node.inputs
        previous = index.producer.get(ids.name)
        params = {**node.params, **embedded.params, "embeds": True}
        if previous is not None and previous.op == "PREVIOUS":
            ids, params = previous.inputs[0], {**params, "previous": True}
        return [embedded, node], dataclasses.replace(node, inputs=(table, *inputs, ids, tokens), params=params)

    return rewrite(nodes, outputs, match)


def previous_into_angles(nodes: Nodes) -> Nodes:
    """ROPE_ANGLES of PREVIOUS -> ROPE_ANGLES with `previous`, which need not wait for it; what makes its own angles by such positions gets
    `previous_of`."""
    previous = {n.outputs[0].name: n.inputs[0] for n in nodes if n.op == "PREVIOUS"}

    def of_pos(node: Node) -> Node:
        pos = next((t for t in node.inputs if t.name in previous), None)
        if pos is None or node.op not in ROTATING:
            return node
        if node.op != "ROPE_ANGLES":
            return dataclasses.replace(node, params={**node.params, "previous_of": previous[pos.name]})
        return dataclasses.replace(node, inputs=(previous[pos.name], *node.inputs[1:]), params={**node.params, "previous": True})

    return [of_pos(node) for node in nodes]
