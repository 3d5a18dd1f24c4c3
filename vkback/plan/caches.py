"""Quantized KV caches: attention reads them as F16, which CACHE_TO_F16 makes of a layer's rows in memory that all layers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vkback.graph import Node, Tensor
from vkback.ops.cache import QUANTIZED


def read_quantized(nodes: Sequence[Node]) -> list[Node]:
    """Put a CACHE_TO_F16 before each attention for each quantized cache that it reads."""
    out: list[Node] = []
    for node in nodes:
        if node.op == "FLASH_ATTN_EXT":
            read = {t.name: t for t in node.inputs[1:3] if t.kind == "state" and t.type in QUANTIZED}  # K's may be V's, too
            made = {name: Tensor(f"{name} (f16)", "F16", t.shape) for name, t in read.items()}
            params = {"window": node.params.get("window", 0)}
            out += [Node("CACHE_TO_F16", (t, node.inputs[3]), (made[name],), params) for name, t in read.items()]
            node = dataclasses.replace(node, inputs=tuple(made.get(t.name, t) for t in node.inputs))
        out.append(node)
    return out
