"""One launch of a kernel whose threads take a value (or a row) each: what small ops have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vkback.graph import Node
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.lowering import LowerContext
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant


def by_threads(
    node: Node,
    ctx: LowerContext,
    shader: str,
    args: Sequence[Arg],
    push: Sequence[int | float],
    threads: int,
    defines: Mapping[str, str | int] | None = None,
    *,
    flops: int = 0,
) -> Dispatch:
    """A launch of `threads` threads in workgroups of the size that tables give for as many values (define WG_SIZE)."""
    choice = ctx.tuning.pick("elementwise", elements=threads)
    wg = workgroup_size(ctx.caps, choice["wg_size"], threads)
    return Dispatch(
        Variant.of(shader, {**(defines or {}), "WG_SIZE": wg}),
        tuple(args),
        pack_push(*push),
        spread(ceil_div(threads, wg)),
        node.op,
        node.name,
        f"{wg} threads: {choice.source}",
        nbytes=sum({a.tensor.name: nbytes(a.tensor) for a in args}.values()),
        flops=flops,
    )
