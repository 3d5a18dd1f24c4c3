"""Products with factors of low rank (shaders/gemm_f32/low_rank*.comp), as LoRA's A [rank, k] and B [m, rank]: what MUL_MAT, MUL_MAT_BACK
and OUT_PROD are carried out by where an operand is so narrow that tiles would be nearly empty.

Sums are in f32; their order depends on the sizes and the device alone.
"""

from __future__ import annotations

from vkback.graph import Node, Tensor
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import nbytes, shards, weight_push
from vkback.ops.workgroup import workgroup_size
from vkback.shader import Variant

MAX_RANK = 64
"""Beyond it, tiles are full enough."""

CHUNK = 8
"""Numbers of the rank that a kernel takes at a time."""

DOWN_TOKENS, UP_TOKENS = 4, 8
"""Tokens of a thread: shaders/gemm_f32/low_rank_down.comp, low_rank_up.comp."""

DOWN_THREADS, UP_THREADS, OUTER_SLICES = 256, 128, 16
"""Threads of a workgroup, and slices of 32 threads each, where the device has as many. Starting values: of 512 tokens and 4096 columns 128,
512 and 32 workgroups, on a GPU of 132 cores."""


def rank_is_rows(w: Tensor) -> bool:
    """Whether the shorter axis of a factor is that of its rows."""
    return w.shape[0] <= w.shape[1]


def is_factor(w: Tensor, n: int, ctx: LowerContext) -> bool:
    """Whether products of n tokens with a stored weight go by these kernels: F32 of low rank, on a device that else takes tiles through
    shared memory, which would be nearly empty."""
    if w.type != "F32" or w.kind != "weight" or len(w.shape) != 2 or n < 2 or ctx.exact or ctx.act == "q8_1":
        return False
    rank, width = sorted(w.shape)
    return _fits(n, width, rank, ctx) and len(shards(w, ctx.caps)) == 1


def is_narrow(n: int, width: int, rank: int, ctx: LowerContext) -> bool:
    """The same of a sum of outer products of n rows."""
    return n >= 2 and _fits(n, width, rank, ctx)


def _fits(n: int, width: int, rank: int, ctx: LowerContext) -> bool:
    if rank > MAX_RANK or width < 4 * rank or width % 4 or n > MAX_GROUPS_X:
        return False
    able = ctx.caps.has_subgroup_ops("arithmetic") and ctx.caps.subgroup_min >= 4
    return able and ctx.tuning.pick("gemm_f32", m=n, n=rank, k=width)["tiles"] == "shared"


def makes_rank(w: Tensor, *, back: bool) -> bool:
    """Whether x w^T, or going back x w, has rows as short as the rank."""
    return rank_is_rows(w) != back


def product(node: Node, ctx: LowerContext, x: Tensor, w: Tensor, y: Tensor, *, back: bool, before: Tensor | None = None) -> list[Dispatch]:
    """y = x w^T, or going back x w, of a factor. before: it is added; rows that are longer than the rank can have one, which may be y."""
    rank, width = sorted(w.shape)
    n, rows = x.shape[0], rank_is_rows(w)
    units, part = weight_push(w.type, shards(w, ctx.caps)[0].layout, w.shape[1])[:2]
    push = pack_push(units, part, n, width, rank, int(before is not None))
    flops = 2 * n * w.elements
    if makes_rank(w, back=back):
        if before is not None:
            raise PlanError(f"[{node.op}] {node.name}: nothing can be added to {y}")
        wg = workgroup_size(ctx.caps, DOWN_THREADS, width // 4)
        args: tuple[Arg, ...] = (Arg(w), Arg(x), Arg(y, "w"))
        groups = (ceil_div(n, DOWN_TOKENS), ceil_div(rank, CHUNK), 1)
        shader, said = "low_rank_down", f"{wg} threads for {DOWN_TOKENS} tokens"
    else:
        wg = workgroup_size(ctx.caps, UP_THREADS, width // 4)
        in_place = before is not None and before.name == y.name
        args = (Arg(w), Arg(x), Arg(y, "rw" if in_place else "w"), Arg(before or x))
        groups = (ceil_div(width // 4, wg), ceil_div(n, UP_TOKENS), 1)
        shader, said = "low_rank_up", f"{wg} threads for {4 * wg} columns of {UP_TOKENS} tokens"
    kernel = Variant.of(f"gemm_f32/{shader}.comp", {"RANK_ROWS": int(rows), "WG_SIZE": wg})
    moved = sum(nbytes(a.tensor) for a in args[:3]) + (nbytes(before) if before is not None else 0)
    return [
        Dispatch(kernel, args, push, groups, node.op, node.name, f"rank {rank}: {said}", nbytes=moved, flops=flops, weight_bytes=nbytes(w))
    ]


def outer(node: Node, ctx: LowerContext, x: Tensor, dy: Tensor, y: Tensor, *, add: bool) -> list[Dispatch]:
    """y [m, k] = dy [n, m]^T x [n, k], where m or k is a low rank; add: to what y has."""
    rows = dy.shape[1] <= x.shape[1]
    wide, narrow = (x, dy) if rows else (dy, x)
    n, width, rank = x.shape[0], wide.shape[1], narrow.shape[1]
    slices = max(1, min(OUTER_SLICES, ctx.caps.max_workgroup_invocations // 32, n))
    return [
        Dispatch(
            Variant.of("gemm_f32/low_rank_outer.comp", {"RANK_ROWS": int(rows), "SLICES": slices}),
            (Arg(wide), Arg(narrow), Arg(y, "rw" if add else "w")),
            pack_push(n, width, rank, int(add)),
            (ceil_div(width // 4, 32), ceil_div(rank, CHUNK), 1),
            node.op,
            node.name,
            f"rank {rank}: {slices} slices of the tokens",
            nbytes=nbytes(x) + nbytes(dy) + nbytes(y),
            flops=2 * n * width * rank,
        )
    ]
