"""Products of matrices in f32 for gradients (shaders/gemm_f32/gemm.comp): which tile, how many splits of the sums, shards of a weight."""

from __future__ import annotations

from dataclasses import dataclass

from vkback.graph import Node, Tensor
from vkback.ops.codebooks import decoder_of
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push
from vkback.ops.family import declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import nbytes, shards, weight_push
from vkback.ops.training.column_sums import column_sums
from vkback.ops.workgroup import Defines, lanes_for
from vkback.shader import Variant

declare("gemm_f32", match={"m": "number", "n": "number", "k": "number"}, params={"tiles": ("shared", "lanes")})

ENOUGH_GROUPS = 1024
"""Workgroups below which the sums of a product are split: eight for each core of a large GPU."""

MAX_CHAIN = 4096
"""Terms that are added up one by one, as errors of f32 grow with a chain's length, unless parts would take more than MAX_SPLIT_VALUES."""

MAX_SPLIT_VALUES = 1 << 24
"""Of all parts of a product's sums."""

MIN_DEPTH = 128
"""Terms of a sum that a split has at least."""


@dataclass(frozen=True)
class Product:
    """y [n3 n2, m, n] = A B. transposed: A is [k, m]; r2, r3: neighbouring batches (of n2, and outer ones) that share a matrix B."""

    m: int
    n: int
    k: int
    transposed: bool = False
    batches: int = 1
    n2: int = 1
    r2: int = 1
    r3: int = 1


def tile_of(m: int, n: int) -> tuple[int, int]:
    """Values of a thread: along m as few as the matrix needs, along n eight, or four of a narrow one."""
    return (8 if m > 32 else 4 if m > 16 else 2 if m > 8 else 1), (8 if n > 32 else 4)


def shuffle_lanes(ctx: LowerContext, product: Product) -> tuple[int, int | None, str]:
    """Lanes of a subgroup, and the size to require, where B's values are to go from lane to lane; 0 where through shared memory. And the
    table's row that says so."""
    choice = ctx.tuning.pick("gemm_f32", m=product.m, n=product.n, k=product.k)
    lanes, required, use_shuffles = lanes_for(ctx.caps)
    return (lanes, required, choice.source) if choice["tiles"] == "lanes" and use_shuffles else (0, None, choice.source)


def vectors_of(m: int, lanes: int) -> int:
    """Rows of A that a lane has."""
    return max(v for v in (1, 2, 4) if v == 1 or (v - 1) * lanes < m)


def splits_of(product: Product, tile: tuple[int, int], depth: int) -> tuple[int, int]:
    """Parts of a sum, and the terms of each, a multiple of `depth`. A function of the shape alone, so that the bits are, too."""
    tm, tn = tile
    groups = ceil_div(product.n, 8 * tn) * ceil_div(product.m, 8 * tm) * product.batches
    wanted = 1 if product.batches > 1 else max(1, min(product.k // MIN_DEPTH, ENOUGH_GROUPS // groups))
    if product.k > MAX_CHAIN and product.batches == 1 and product.m * product.n * ceil_div(product.k, MAX_CHAIN) <= MAX_SPLIT_VALUES:
        wanted = max(wanted, ceil_div(product.k, MAX_CHAIN))
    each = ceil_div(ceil_div(product.k, wanted), depth) * depth
    return ceil_div(product.k, each), each


def check_grid(node: Node, product: Product, tile: tuple[int, int]) -> None:
    """Raises PlanError where the grid is more than every device takes."""
    tm, tn = tile
    if max(ceil_div(product.m, 8 * tm), ceil_div(product.n, 8 * tn), product.batches) > MAX_GROUPS_X:
        size = f"{product.batches} products of {product.m} x {product.n}"
        raise PlanError(f"[{node.op}] {node.name}: {size}: at most {MAX_GROUPS_X} of them, and as many tiles along an axis")


def lower_product(node: Node, ctx: LowerContext, a: Tensor, b: Tensor, y: Tensor, product: Product, *, add: bool = False) -> list[Dispatch]:
    """A B of plain F32 tensors; with `add` y keeps what it has, and the product is added to it. The sum of a value is one chain over k, or
    a few chains. Raises PlanError where the grid is more than every device takes."""
    tile, depth = tile_of(product.m, product.n), 16
    check_grid(node, product, tile)
    lanes, required, source = shuffle_lanes(ctx, product)
    if lanes:
        vectors = vectors_of(product.m, lanes)
        own: Defines = {"LANES": lanes, "VECTORS": vectors, "A_TRANSPOSED": int(product.transposed)}
        stride = product.m if product.transposed else product.k
        push = pack_push(product.m, product.n, product.k, stride, 0, int(add), product.n2, product.r2, product.r3)
        args = (Arg(b), Arg(a), Arg(y, "rw" if add else "w"))
        return [_by_shuffles(node, Variant.of("gemm_f32/gemm_lanes.comp", own, subgroup_size=required), args, push, product, source)]
    splits, each = (1, ceil_div(product.k, depth) * depth) if add else splits_of(product, tile, depth)
    into = y if splits == 1 else Tensor(f"{y.name}.splits", "F32", (splits, product.m * product.n))
    defines: Defines = {"TM": tile[0], "TN": tile[1], "DEPTH": depth, "A_TRANSPOSED": int(product.transposed)}
    stride = product.m if product.transposed else product.k
    push = pack_push(product.m, product.n, product.k, splits, each, stride, 0, int(add), 0, product.n2, product.r2, product.r3)
    args = (Arg(b), Arg(a), Arg(into, "rw" if add else "w"))
    kernel = Variant.of("gemm_f32/gemm.comp", defines)
    dispatches = [_launch(node, kernel, args, push, product, tile, product.batches * splits, source)]
    if splits > 1:
        dispatches += column_sums(node, ctx, into, y, splits, product.m * product.n)
    return dispatches


def lower_product_by_weight(node: Node, ctx: LowerContext, a: Tensor, w: Tensor, y: Tensor, m: int) -> list[Dispatch]:
    """a [m, k] times a stored weight [k, n] of any type, read as it lies on the device. The parts of its sums, and its shards, are added up
    in their order. Raises PlanError where the grid is more than every device takes."""
    k, n = w.shape
    tile, depth = tile_of(m, n), 32
    check_grid(node, Product(m, n, k), tile)
    defines: Defines = {"TM": tile[0], "TN": tile[1], "DEPTH": depth, "A_TRANSPOSED": 0, **decoder_of(w.type, n, ctx)}
    parts = shards(w, ctx.caps)
    lanes, required, source = shuffle_lanes(ctx, Product(m, n, k))
    if lanes:
        own = {"LANES": lanes, "VECTORS": vectors_of(m, lanes), "A_TRANSPOSED": 0, **decoder_of(w.type, n, ctx)}
        kernel = Variant.of("gemm_f32/gemm_weight_lanes.comp", own, subgroup_size=required)
        dispatches = []
        for i, part in enumerate(parts):
            push = pack_push(*weight_push(w.type, part.layout, n), m, n, part.rows, k, part.row0, int(i > 0))
            args = (Arg(w, "r", i), Arg(a), Arg(y, "rw" if i else "w"))
            dispatches.append(_by_shuffles(node, kernel, args, push, Product(m, n, part.rows), source))
        return dispatches
    splits = [splits_of(Product(m, n, part.rows), tile, depth) for part in parts]
    total = sum(count for count, _ in splits)
    into = y if total == 1 else Tensor(f"{y.name}.splits", "F32", (total, m * n))
    kernel = Variant.of("gemm_f32/gemm_weight.comp", defines)
    dispatches, slot = [], 0
    for i, (part, (count, each)) in enumerate(zip(parts, splits, strict=True)):
        push = pack_push(*weight_push(w.type, part.layout, n), m, n, part.rows, count, each, k, part.row0, 0, slot)
        args = (Arg(w, "r", i), Arg(a), Arg(into, "w", part=f"of shard {i}" if len(parts) > 1 else ""))
        dispatches.append(_launch(node, kernel, args, push, Product(m, n, part.rows), tile, count, source))
        slot += count
    return dispatches if total == 1 else [*dispatches, *column_sums(node, ctx, into, y, total, m * n)]


def _by_shuffles(node: Node, kernel: Variant, args: tuple[Arg, ...], push: bytes, product: Product, source: str) -> Dispatch:
    """A subgroup for each tile of 32 columns."""
    defines = dict(kernel.defines)
    rows = int(defines["LANES"]) * int(defines["VECTORS"])
    groups = (ceil_div(product.n, 32), ceil_div(product.m, rows), product.batches)
    return _dispatch(node, kernel, args, push, product, groups, f"tiles of {rows} x 32, from lane to lane: {source}")


def _launch(
    node: Node, kernel: Variant, args: tuple[Arg, ...], push: bytes, product: Product, tile: tuple[int, int], depth: int, source: str
) -> Dispatch:
    """64 threads for each tile, `depth` products or parts of sums."""
    tm, tn = tile
    groups = (ceil_div(product.n, 8 * tn), ceil_div(product.m, 8 * tm), depth)
    return _dispatch(node, kernel, args, push, product, groups, f"64 threads, tiles of {8 * tm} x {8 * tn}: {source}")


def _dispatch(
    node: Node, kernel: Variant, args: tuple[Arg, ...], push: bytes, product: Product, groups: tuple[int, int, int], reason: str
) -> Dispatch:
    return Dispatch(
        kernel,
        args,
        push,
        groups,
        node.op,
        node.name,
        reason,
        nbytes=sum(nbytes(arg.tensor) for arg in args),
        flops=2 * product.m * product.n * product.k * product.batches,
        weight_bytes=sum(nbytes(arg.tensor) for arg in args if arg.tensor.kind == "weight"),
    )
