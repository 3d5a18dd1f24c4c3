"""Launches that small ops have in common: a thread for each value (or column), and a workgroup for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push, spread
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import reduction, workgroup_size
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
    choice: Choice | None = None,
    grid: tuple[int, int] | None = None,
    needed: int | None = None,
    how: str = "",
    moved: int | None = None,
    weight_bytes: int = 0,
    flops: int = 0,
    spins_on: Sequence[Tensor] | None = None,
) -> Dispatch:
    """A launch of `threads` threads in workgroups of the size that a table gives (define WG_SIZE).

    choice  the table's row, with `wg_size`; by default of [[elementwise]], for as many values
    grid    workgroups along y and z, if x alone counts threads; by default a grid of one dimension (`spread`)
    needed  threads that a workgroup need not exceed, by default all
    how     what the reason says of the threads
    moved   bytes, by default of each tensor once
    spins_on  of a shader with common/sentinel.glsl and common/arrivals.glsl what its threads read of other stages (with SPINS_ON_PARTS all
              of it, else the first); None: barriers stay
    """
    choice = choice or ctx.tuning.pick("elementwise", elements=threads)
    wg = workgroup_size(ctx.caps, choice["wg_size"], threads if needed is None else needed)
    groups = ceil_div(threads, wg)
    launched = (groups, *grid) if grid else spread(groups)
    waits = SpinWaits(also_part=tuple(t.name for t in spins_on), arrives=prod(launched)) if spins_on is not None else None
    return Dispatch(
        Variant.of(shader, {**(defines or {}), "WG_SIZE": wg}),
        tuple(args),
        pack_push(*push),
        launched,
        node.op,
        node.name,
        f"{wg} threads{how}: {choice.source}",
        nbytes=sum({a.tensor.name: nbytes(a.tensor) for a in args}.values()) if moved is None else moved,
        flops=flops,
        weight_bytes=weight_bytes,
        waits=waits,
    )


def by_rows(
    node: Node,
    ctx: LowerContext,
    shader: str,
    args: Sequence[Arg],
    push: Sequence[int | float],
    rows: int,
    wg: int,
    choice: Choice,
    defines: Mapping[str, str | int] | None = None,
    *,
    lanes: int = 1,
    how: str = "",
    moved: int | None = None,
    flops: int = 0,
    waits: SpinWaits | None = None,
) -> Dispatch:
    """A launch of a workgroup of `wg` threads for each row, whose threads share sums (`reduction`, with its defines).

    lanes  widest group_* of the shader
    how    what the reason says of the threads
    moved  bytes, by default those of each argument, of a tensor that is read and written in place both
    """
    reduce, subgroup = reduction(ctx.caps, wg, lanes=lanes)
    return Dispatch(
        Variant.of(shader, {**reduce, **(defines or {})}, subgroup_size=subgroup),
        tuple(args),
        pack_push(*push),
        spread(rows),
        node.op,
        node.name,
        f"{wg} threads{how}: {choice.source}",
        nbytes=sum(nbytes(a.tensor) for a in args) if moved is None else moved,
        flops=flops,
        waits=waits,
    )
