"""Sums over the rows of a matrix, in an order that depends on its shape alone (shaders/sums/columns.comp)."""

from __future__ import annotations

from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.lowering import LowerContext
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

MAX_BLOCKS = 64
"""Parts of the rows that are summed at once."""

MIN_ROWS = 16
"""Of a part, at least."""


def blocks_of(rows: int) -> tuple[int, int]:
    """Rows of a block, and how many blocks there are."""
    block = max(MIN_ROWS, ceil_div(rows, MAX_BLOCKS))
    return block, ceil_div(rows, block)


def column_sums(node: Node, ctx: LowerContext, x: Tensor, y: Tensor, rows: int, columns: int, outer: int = 1) -> list[Dispatch]:
    """x F32 [outer, rows, columns] -> y F32 [outer, columns], in one launch or two."""
    block, blocks = blocks_of(rows)
    if blocks > 1:
        parts = Tensor(f"{y.name}.parts", "F32", (outer, blocks, columns))
        return [_launch(node, ctx, x, parts, rows, columns, block, outer), _launch(node, ctx, parts, y, blocks, columns, blocks, outer)]
    return [_launch(node, ctx, x, y, rows, columns, rows, outer)]


def _launch(node: Node, ctx: LowerContext, x: Tensor, y: Tensor, rows: int, columns: int, block: int, outer: int) -> Dispatch:
    blocks = ceil_div(rows, block)
    choice = ctx.tuning.pick("elementwise", elements=columns)
    wg = workgroup_size(ctx.caps, choice["wg_size"], columns)
    groups = spread(ceil_div(columns, wg) * blocks * outer)
    return Dispatch(
        Variant.of("sums/columns.comp", {"WG_SIZE": wg}),
        (Arg(x), Arg(y, "w")),
        pack_push(rows, columns, block, blocks, outer),
        groups,
        node.op,
        node.name,
        f"{wg} threads, {block} rows each: {choice.source}",
        nbytes=nbytes(x) + nbytes(y),
        flops=x.elements,
    )
