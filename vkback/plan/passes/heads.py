"""Products of Q, K and V that apply RoPE and store K and V in their epilogue, which saves a stage in each layer for few tokens.

The last pass over the nodes: by then it is decided which kernel a product uses and what its x is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vkback.graph import Node
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_rope import fused, stored_by_products
from vkback.plan.nodes import Nodes, replace
from vkback.plan.passes.attention import angles_node
from vkback.plan.schedule_choice import schedule_choice


def store_by_products(nodes: Sequence[Node], ctx: LowerContext) -> Nodes:
    """LINEAR of Q, K and V into one packed tensor, and the QKV_ROPE_SET_ROWS that reads it -> LINEAR_ROPE_SET_ROWS with its angles
    (ROPE_ANGLES), if the tables say "product" and the products can do it."""
    out = list(nodes)
    if schedule_choice(nodes, ctx)["rope"] != "product":
        return out
    for store in [n for n in nodes if n.op == "QKV_ROPE_SET_ROWS" and n.params["packed"]]:
        packed, pos, cache_k, cache_v, *factors = store.inputs
        rows = factors.pop() if store.params.get("has_rows") else pos
        parts = [n for n in out if any(t.name == packed.name for t in n.outputs)]
        readers = [n for n in out if any(t.name == packed.name for t in n.inputs)]
        if len(readers) > 1 or any(n.op != "LINEAR" for n in parts) or not stored_by_products(parts, store, ctx):
            continue
        angles = [angles_node(out, pos, factors, store.params)] if store.params["n_dims"] else []
        new = [n for n in angles if not any(n is there for there in out)]
        # Frequency factors are in the angles, which are made of the position; the products only store.
        params = {key: value for key, value in store.params.items() if key != "has_rows"}
        plain = dataclasses.replace(store, inputs=(packed, rows, cache_k, cache_v), params={**params, "has_ff": False})
        out = replace(out, [*parts, store], [*new, fused(parts, plain, angles[0].outputs[0] if angles else None)])
    return out
