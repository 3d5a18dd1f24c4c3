"""Products of matrices in f32 for gradients (shaders/mul_mat/gemm.comp): which tile, how many splits of the sums, shards of a weight."""

from __future__ import annotations

from dataclasses import dataclass

from vkback.graph import Node, Tensor
from vkback.ops.base import MAX_GROUPS_X, Access, Arg, Dispatch, LowerContext, PlanError, ceil_div, nbytes, pack_push, shards, weight_push
from vkback.ops.code_books import decoder
from vkback.ops.column_sums import column_sums
from vkback.ops.workgroup import Defines
from vkback.shader import Variant

ENOUGH_GROUPS = 256
"""Workgroups below which the sums of a product are split."""

LEAST_DEPTH = 512
"""Terms of a sum that a split has at least."""

MOST_SPLIT_VALUES = 1 << 23
"""Values of a product whose sums are split; there are workgroups enough beyond."""


@dataclass(frozen=True)
class Product:
    """y [n3 n2, m, n] = A B. turned: A lies as [k, m]; r2, r3: neighbouring batches (of n2, and outer ones) that share a matrix B."""

    m: int
    n: int
    k: int
    turned: bool = False
    batches: int = 1
    n2: int = 1
    r2: int = 1
    r3: int = 1


def tile_of(m: int, n: int) -> tuple[int, int]:
    """Values of a thread: along m as few as the matrix needs, along n eight, or four of a narrow one."""
    return (8 if m > 32 else 4 if m > 16 else 2 if m > 8 else 1), (8 if n > 32 else 4)


def multiplied(node: Node, ctx: LowerContext, a: Tensor, b: Tensor, y: Tensor, product: Product, *, add: bool = False) -> list[Dispatch]:
    """A B of plain F32 tensors; with `add` y keeps what it has, and the product is added to it. The sum of a value is one chain over k, or a
    few chains of a length that depends on the shape alone.

    Raises PlanError where the grid is more than every device takes.
    """
    tm, tn = tile_of(product.m, product.n)
    if max(ceil_div(product.m, 8 * tm), ceil_div(product.n, 8 * tn), product.batches) > MAX_GROUPS_X:
        size = f"{product.batches} products of {product.m} x {product.n}"
        raise PlanError(f"[{node.op}] {node.name}: {size}: at most {MAX_GROUPS_X} of them, and as many tiles along an axis")
    depth = 16
    groups = ceil_div(product.n, 8 * tn) * ceil_div(product.m, 8 * tm) * product.batches
    splits = 1
    if not add and product.batches == 1 and product.m * product.n <= MOST_SPLIT_VALUES:
        splits = max(1, min(product.k // LEAST_DEPTH, ENOUGH_GROUPS // groups))
    each = ceil_div(ceil_div(product.k, splits), depth) * depth
    splits = ceil_div(product.k, each)
    into = y if splits == 1 else Tensor(f"{y.name}.splits", "F32", (splits, product.m * product.n))
    defines: Defines = {"TM": tm, "TN": tn, "DEPTH": depth, "A_TURNED": int(product.turned)}
    stride = product.m if product.turned else product.k
    push = pack_push(
        product.m, product.n, product.k, splits, each, stride, 0, int(add), product.n2, product.r2, product.r3
    )
    made = [_launch(node, defines, (Arg(b), Arg(a), Arg(into, "rw" if add else "w")), push, product, (tm, tn), product.batches * splits)]
    if splits > 1:
        made += column_sums(node, ctx, into, y, splits, product.m * product.n)
    return made


def multiplied_by_weight(node: Node, ctx: LowerContext, a: Tensor, w: Tensor, y: Tensor, m: int) -> list[Dispatch]:
    """a [m, k] times a stored weight [k, n] of any type, read as it lies on the device; its shards one after the other."""
    k, n = w.shape
    product = Product(m, n, k)
    tm, tn = tile_of(m, n)
    defines: Defines = {"TM": tm, "TN": tn, "DEPTH": 32, "A_TURNED": 0, **decoder(w.type, ctx.caps)}
    made = []
    for i, part in enumerate(shards(w, ctx.caps)):
        rows = ceil_div(part.rows, 32) * 32
        push = pack_push(*weight_push(w.type, part.layout, n), m, n, part.rows, 1, rows, k, part.row0, int(i > 0))
        access: Access = "rw" if i else "w"
        made.append(_launch(node, defines, (Arg(w, "r", i), Arg(a), Arg(y, access)), push, product, (tm, tn), 1))
    return made


def _launch(
    node: Node, defines: Defines, args: tuple[Arg, ...], push: bytes, product: Product, tile: tuple[int, int], depth: int
) -> Dispatch:
    tm, tn = tile
    return Dispatch(
        Variant(f"mul_mat/{'gemm_weight' if 'QUANT_FILE' in defines else 'gemm'}.comp", tuple(sorted(defines.items()))), args, push,
        (ceil_div(product.n, 8 * tn), ceil_div(product.m, 8 * tm), depth), node.op, node.name,
        f"64 threads, tiles of {8 * tm} x {8 * tn}", nbytes=sum(nbytes(arg.tensor) for arg in args),
        flops=2 * product.m * product.n * product.k * product.batches,
        weight_bytes=sum(nbytes(arg.tensor) for arg in args if arg.tensor.kind == "weight"),
    )  # fmt: skip
