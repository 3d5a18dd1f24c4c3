"""Products of a stored weight and many tokens: the kernels of shaders/gemm as pure lowering helpers.

`lower` makes the dispatches of a `Gemm`, cut as a `GemmShape` says (vkback/ops/matmul/gemm_problem.py). Nothing here chooses a shape from
tables or takes part in fusion.

Four kernels:

    coop_mat  cooperative matrices of f16 with f32 sums; x comes packed (vkback/ops/matmul/pack.py)
    coop_reg  the same for few tokens (vkback/ops/matmul/gemm_reg.py)
    int_dot   packed integer dot products; x is Q8_1
    f32       plain f32; x is F32

A product of experts (MUL_MAT_ID) is a grouped one, with a route (vkback/ops/matmul/route.py).
"""

from __future__ import annotations

import dataclasses
from math import prod

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.codebooks import CODEBOOK_TYPES, IN_PAIRS, decoder
from vkback.ops.cooperative_matrix import matrix_spec
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, arg_of, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.lowering import PlanError
from vkback.ops.matmul.gemm_problem import GLU_KINDS, Gemm, GemmShape, decoder_spec, f16_misfits, misfits
from vkback.ops.matmul.pack import order_word, packed_stride
from vkback.ops.matmul.route import max_tiles
from vkback.ops.storage import Shard, nbytes, shards, weight_push
from vkback.ops.workgroup import Defines, lanes_for, reduction, required_subgroup
from vkback.quants import UNIT
from vkback.shader import Spec, Variant, interface


def lower(problem: Gemm, shape: GemmShape, caps: Capabilities) -> list[Dispatch]:
    """The dispatches of a product, one a shard of its weight, with split-K two. Raises PlanError for what the kernel cannot do."""
    check(problem, shape, caps)
    if shape.kernel != "coop_mat":
        return [_by_rows(problem, shape, caps, i, shard) for i, shard in enumerate(shards(problem.w, caps))]
    found: list[Dispatch] = []
    for i, shard in enumerate(shards(problem.w, caps)):
        found += _by_matrices(problem, shape, caps, i, shard)
    return found


def check(problem: Gemm, shape: GemmShape, caps: Capabilities) -> None:
    """Raises PlanError, with what to do instead, where kernel, product and device do not fit together."""
    if shape.kernel != "coop_mat" and (problem.transposed or problem.x_factors is not None):
        raise PlanError(f"[gemm] {problem.name}: only coop_mat reads weights the other way round, or has factors of columns")
    wanted = {"int_dot": "Q8_1", "f32": "F32", "coop_mat": "F16", "coop_reg": "F16"}[shape.kernel]
    if problem.x.type != wanted:
        raise PlanError(f"[gemm] {problem.name}: {shape.kernel} takes x as {wanted}, got {problem.x}; convert it first")
    if shape.kernel == "coop_mat":
        return _check_matrices(problem, shape, caps)
    if problem.x.shape[-1] != problem.k:
        raise PlanError(f"[gemm] {problem.name}: {problem.w} takes rows of {problem.k} values, got {problem.x}")
    if shape.kernel == "int_dot" and (problem.w.type in ("F32", "F16", "BF16") or not caps.int_dot):
        raise PlanError(f"[gemm] {problem.name}: no integer dot products of {problem.w.type} on {caps.name}; take f32")
    threads = shape.subgroups * lanes_for(caps)[0]
    if shape.tile_m % threads:
        raise PlanError(f"[gemm] {problem.name}: {shape.tile_m} rows of a tile are no multiple of its {threads} threads")
    if problem.y.type == "Q8_1" and shape.tile_m // threads != (8 if problem.glu else 4):
        raise PlanError(f"[gemm] {problem.name}: a Q8_1 output takes 4 rows a thread, 8 with GLU, got {shape.tile_m // threads}")
    if problem.y.type == "F16" or shape.split_k > 1:
        raise PlanError(f"[gemm] {problem.name}: F16 outputs and split-K are for coop_mat, not {shape.kernel}")


def _check_matrices(problem: Gemm, shape: GemmShape, caps: Capabilities) -> None:
    rows, columns, depth = shape.matrix
    cut = f"tiles of {shape.tile_m} x {shape.tile_n}, parts of {shape.warp_m} x {shape.warp_n}, matrices {rows}x{columns}x{depth}"
    dense_f32 = problem.y.type == "F32" and problem.route is None
    faults = {
        f"x {problem.x} does not hold rows of {problem.k} values": problem.x.shape[-1] != ceil_div(problem.k, UNIT) * UNIT,
        "split-K makes F32 of a dense product": shape.split_k > 1 and not dense_f32,
        "Q8_1 outputs are for int_dot": problem.y.type == "Q8_1",
        "factors of columns stand where a bias would": problem.x_factors is not None
        and (problem.bias is not None or problem.route is not None),
        "transposed, a tile has whole units of a dense weight in one shard, and makes F32": problem.transposed
        and not _can_transpose(problem, shape, caps),
    }
    packs = f16_misfits(shape, problem.glu != "") if problem.y.type == "F16" else []
    wrong = [*misfits(shape, caps), *packs, *(text for text, there in faults.items() if there)]
    if wrong:
        raise PlanError(f"[gemm] {problem.name}: coop_mat with {cut}: {'; '.join(wrong)}")


def _can_transpose(problem: Gemm, shape: GemmShape, caps: Capabilities) -> bool:
    """Whether coop_mat can multiply by a weight the other way round."""
    plain = problem.y.type == "F32" and problem.route is None and not problem.glu and problem.y_row0 == 0 and len(problem.w.shape) == 2
    return plain and shape.tile_m % UNIT == 0 and len(shards(problem.w, caps)) == 1


def _coop_spec(problem: Gemm, shape: GemmShape, y_type: int, caps: Capabilities) -> Spec:
    """Specialization constants of shaders/gemm/coop_mat.comp."""
    return (
        matrix_spec(shape.subgroups, shape.matrix, caps)
        | decoder_spec(shape)
        | {
            "TILE_M": shape.tile_m,
            "TILE_N": shape.tile_n,
            "SUBGROUP_M": shape.warp_m,
            "SUBGROUP_N": shape.warp_n,
            "STEP_K": shape.step_k,
            "FRAGMENTS": int(shape.fragments),
            "GROUPED": int(problem.route is not None),
            "HAS_BIAS": int(problem.bias is not None),
            "HAS_RESIDUAL": int(problem.residual is not None),
            "GLU": GLU_KINDS[problem.glu],
            "GLU_ALPHA": float(problem.alpha),
            "GLU_LIMIT": float(problem.limit),
            "Y_TYPE": y_type,
            "TRANSPOSED": int(problem.transposed),
            "COLUMN_FACTORS": int(problem.x_factors is not None),
        }
    )


def _by_matrices(problem: Gemm, shape: GemmShape, caps: Capabilities, index: int, shard: Shard) -> list[Dispatch]:
    """A dispatch of shaders/gemm/coop_mat.comp, and with split-K one that adds up the slices."""
    rows = problem.m if problem.route is not None or problem.transposed else shard.rows
    # A slice of K is at least one unit.
    split = min(shape.split_k, ceil_div(problem.k, UNIT))
    shape = dataclasses.replace(shape, split_k=split)
    glu = problem.glu != ""
    target, y_stride, y_type = problem.y, problem.y.shape[-1], 0
    if problem.y.type == "F16":
        y_stride, y_type = packed_stride(problem.y.shape[-1], shape, caps), 2 if shape.fragments else 1
    making, row0 = problem, problem.y_row0
    # With split-K the product stores bare sums, and the second dispatch applies the epilogue.
    if split > 1:
        target, y_stride, y_type = Tensor(f"{problem.name}.parts{problem.y_row0 + shard.row0}", "F32", (split, problem.n, rows)), rows, 3
        making, row0 = dataclasses.replace(problem, bias=None, residual=None, glu="", y_row0=0), 0
    spec = _coop_spec(making, shape, y_type, caps)
    pieces = shards(problem.w, caps)
    # A store that covers the whole tensor needs no name for its region (synchronization tells regions apart).
    whole = len(pieces) == 1 and (problem.y.type == "F16" or problem.y.shape[-1] == problem.m >> glu)
    part = "" if whole or split > 1 else f"rows {row0} {shard.row0}"
    alone = dataclasses.replace(shard, row0=0) if split > 1 else shard  # parts have this shard's rows alone
    push = push_words(making, shape, alone, packed_stride(problem.k, shape, caps), y_stride)
    weight = Arg(problem.w, "r", index)
    buffers = {
        "WeightWords": weight,
        "X": Arg(making.x),
        "Y": Arg(target, "w", part=part),
        "Bias": arg_of(making.bias),
        "ColumnFactors": arg_of(making.x_factors),
        "Residual": arg_of(making.residual),
        "Route": arg_of(making.route),
        "Overflow": Arg(overflow_word(target), "rw", part=part) if target.type == "F16" else None,
    }
    shader = "gemm/coop_mat.comp"
    product = Dispatch(
        Variant.of(shader, decoder(problem.w.type, caps, problem.pairs), spec=spec, subgroup_size=required_subgroup(caps)),
        interface(shader).bound(buffers, weight),
        push,
        grid(problem, shape, shard),
        "MUL_MAT" if problem.route is None else "MUL_MAT_ID",
        problem.name,
        f"coop_mat{', transposed weights' if problem.transposed else ''}: tiles of {shape.tile_m} x {shape.tile_n} x {shape.step_k}, "
        f"{shape.subgroups} subgroups, {split} parts" + (f", stored as f16 {order_word(shape)}" if problem.y.type == "F16" else ""),
        nbytes=weight_bytes(problem, shard) + nbytes(problem.x) + nbytes(problem.y),
        weight_bytes=weight_bytes(problem, shard),
        flops=problem.flops * shard.rows // prod(problem.w.shape[:-1]),
    )
    if split == 1:
        return [product]
    wg = min(256, caps.max_workgroup_invocations)
    # Four rows at a time where all offsets are multiples of four and nothing is applied but the residual.
    aligned = not any(size % 4 for size in (rows, problem.y.shape[-1], problem.y_row0 + (shard.row0 >> glu)))
    quads = aligned and problem.bias is None and not glu
    threads = rows // 4 if quads else rows >> glu
    defines: Defines = {**epilogue_defines(problem), "WG": wg, "PARTS": split, "QUADS": int(quads)}
    unused = Arg(target)
    return [
        product,
        Dispatch(
            Variant.of("gemm/split_sum.comp", defines),
            (
                unused,
                Arg(problem.y, "w", part="" if whole else f"rows {problem.y_row0} {shard.row0}"),
                *(Arg(t) if t is not None else unused for t in (problem.bias, problem.residual)),
            ),
            pack_push(rows, problem.n, problem.y.shape[-1], problem.y_row0 + (shard.row0 >> glu), shard.row0),
            (ceil_div(threads, wg), problem.n, 1),
            "MUL_MAT",
            f"{problem.name} parts",
            f"{split} parts",
            nbytes=nbytes(target) + nbytes(problem.y),
            flops=split * rows * problem.n,
        ),
    ]


def epilogue_defines(problem: Gemm) -> Defines:
    """What becomes of the sums."""
    return {
        "HAS_BIAS": int(problem.bias is not None),
        "HAS_RESIDUAL": int(problem.residual is not None),
        "GLU": GLU_KINDS[problem.glu],
        "GLU_ALPHA": repr(float(problem.alpha)),
        "GLU_LIMIT": repr(float(problem.limit)),
    }


def column_tiles(problem: Gemm, tile_n: int) -> int:
    """Column tiles of the grid."""
    return ceil_div(problem.n, tile_n) if problem.route is None else max_tiles(problem.n, problem.w.shape[0], tile_n)


def push_words(problem: Gemm, shape: GemmShape, shard: Shard, x_stride: int, y_stride: int) -> bytes:
    """The push constants of shaders/gemm/iface.glsl."""
    units = ceil_div(problem.k, UNIT)
    grouped = problem.route is not None
    return pack_push(
        *weight_push(problem.w.type, shard.layout, problem.w.shape[-1]),
        problem.m if grouped or problem.transposed else shard.rows,
        problem.k,
        problem.n,
        column_tiles(problem, shape.tile_n),
        ceil_div(units, shape.split_k),
        x_stride,
        y_stride,
        problem.y_row0 + (0 if grouped else shard.row0 >> (problem.glu != "")),
        0 if grouped else shard.row0,
        problem.x_shared,
        1.0 / problem.x_scale,
        float(problem.out_scale),
    )


def grid(problem: Gemm, shape: GemmShape, shard: Shard) -> tuple[int, int, int]:
    """Workgroups: row tiles times column tiles, spread over x and y, and the parts of a split-K product along z."""
    rows = problem.m if problem.route is not None or problem.transposed else shard.rows
    tiles = ceil_div(rows, shape.tile_m * shape.tiles_each) * column_tiles(problem, shape.tile_n)
    y = ceil_div(tiles, MAX_GROUPS_X)
    return ceil_div(tiles, y), y, shape.split_k


def bindings(problem: Gemm, index: int, y: Tensor, part: str) -> tuple[Arg, ...]:
    """Buffers in the order of shaders/gemm/iface.glsl; the weight stands in for those that are not needed."""
    none = Arg(problem.w, "r", index)
    others = (Arg(t) if t is not None else none for t in (problem.bias or problem.x_factors, problem.residual, problem.route))
    return (none, Arg(problem.x), Arg(y, "w", part=part), *others)


def weight_bytes(problem: Gemm, shard: Shard) -> int:
    """Bytes of weights that a product must read, each once; of a stack of experts those that can be chosen."""
    whole = shard.layout.nbytes
    return whole if problem.route is None else whole * min(problem.n, problem.w.shape[0]) // problem.w.shape[0]


def _by_rows(problem: Gemm, shape: GemmShape, caps: Capabilities, index: int, shard: Shard) -> Dispatch:
    """A dispatch of shaders/gemm/f32.comp or int_dot.comp."""
    lanes, required, use_shuffles = lanes_for(caps)
    wg = shape.subgroups * lanes
    q8_out = problem.y.type == "Q8_1"
    defines: Defines = {
        **decoder(problem.w.type, caps, problem.pairs),
        **epilogue_defines(problem),
        "WG": wg,
        "ROWS": shape.tile_m // wg,
        "COLS": shape.tile_n,
        "USE_SHUFFLES": use_shuffles,
        "GROUPED": int(problem.route is not None),
    }
    if shape.kernel == "f32":
        defines["K_TAIL"] = int(problem.k % UNIT != 0)
        x_stride = problem.k
    else:
        defines["Y_TYPE"] = int(q8_out)
        x_stride = quants.q8_1_stride(problem.k) // 16
    if q8_out:
        sums, pinned = reduction(caps, wg, lanes=8)
        required = required or pinned
        defines |= {name: sums[name] for name in ("REDUCE_SUBGROUP", "SUBGROUP_SIZE")}
    y_stride = ceil_div(problem.y.shape[-1], UNIT) if q8_out else problem.y.shape[-1]
    whole = problem.y.shape[-1] == problem.m >> (problem.glu != "") and len(shards(problem.w, caps)) == 1
    return Dispatch(
        Variant.of(f"gemm/{shape.kernel}.comp", defines, subgroup_size=required),
        bindings(problem, index, problem.y, "" if whole else f"rows {problem.y_row0} {shard.row0}"),
        push_words(problem, shape, shard, x_stride, y_stride),
        grid(problem, dataclasses.replace(shape, split_k=1), shard),
        "MUL_MAT" if problem.route is None else "MUL_MAT_ID",
        problem.name,
        f"{shape.kernel}: tiles of {shape.tile_m} x {shape.tile_n}, {wg} threads",
        nbytes=weight_bytes(problem, shard) + nbytes(problem.x) + nbytes(problem.y),
        weight_bytes=weight_bytes(problem, shard),
        flops=problem.flops * shard.rows // prod(problem.w.shape[:-1]),
    )


def prebuilt_variants() -> list[Variant]:
    """All modules that need a compiler with cooperative matrices, as they come with vkback (shaders/prebuilt): one for each layout of a
    weight type, the rest by specialization."""
    found = [Variant.of("gemm/pack_f16.comp", {"FRAGMENTS": 1})]
    found += [Variant(source) for source in ("gemm/fragment_map.comp", "gemm/element_map.comp", "probe/matrix_rate.comp")]
    for name, kind in quants.QUANTS.items():
        if kind.planes and name != "Q8_1":
            layouts: list[Defines] = [{}, IN_PAIRS] if name in quants.PAIRED else [{}]
            found += [
                Variant.of(f"gemm/{kernel}.comp", gpu_decoder(name) | layout)
                for layout in layouts
                for kernel in ("coop_mat", "coop_reg", "coop_reg_heads", "coop_reg_experts")
            ]
    return found


def gpu_decoder(quant: str) -> Defines:
    """The defines of a decoder for devices other than CPUs."""
    defines: Defines = {"QUANT_FILE": f'"quant/{quant.lower()}.glsl"'}
    return defines | ({"CODEBOOK_LITERALS": 0} if quant in CODEBOOK_TYPES or quant == "IQ1_M" else {})
