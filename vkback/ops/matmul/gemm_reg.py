"""Products of a stored weight and few tokens by cooperative matrices, weights decoded in registers: shaders/gemm/coop_reg*.comp as pure
lowering helpers, beside those of vkback/ops/matmul/gemm.py.

For 2 to 16 tokens a product waits for weights from memory, as a GEMV does. The kernel reads them as GEMVs do, each lane whole units,
and its time hardly depends on the number of tokens. It counts on which lanes share a row of a matrix (`cooperative_matrix.row_lanes`).
"""

from __future__ import annotations

import dataclasses
from math import prod

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.codebooks import decoder
from vkback.ops.cooperative_matrix import matrix_shapes, matrix_spec
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, arg_of, ceil_div, pack_push
from vkback.ops.f16_range import overflow_word
from vkback.ops.lowering import PlanError
from vkback.ops.matmul.gemm import grid, push_words, weight_bytes
from vkback.ops.matmul.gemm_problem import GLU_KINDS, Gemm, GemmShape, Heads, decoder_spec
from vkback.ops.storage import Shard, nbytes, shards
from vkback.ops.workgroup import required_subgroup
from vkback.quants import UNIT
from vkback.shader import Spec, Variant, interface

SHADER = "gemm/coop_reg.comp"
HEADS_SHADER = "gemm/coop_reg_heads.comp"
"""Of products whose rows are heads of Q, K and V."""
EXPERTS_SHADER = "gemm/coop_reg_experts.comp"
"""Of grouped products."""


def shape_of(
    tile_m: int, tile_n: int, warp_m: int, slice_k: int, lanes: int, caps: Capabilities, *, narrow: bool = False, x_shared: bool = False
) -> GemmShape | None:
    """A shape with the largest matrices that tile_n columns are whole ones of; None where the device has none, or not so many threads or so
    much shared memory.

    lanes   neighbouring lanes that share a row of a matrix, 0 where that is not known
    narrow  of these matrices those with the fewest columns, as grouped products take them: a lane then has few columns to look up
    x_shared  as in `GemmShape`
    """
    fitting = [s for s in matrix_shapes(caps) if tile_n % s[1] == 0 and warp_m % s[0] == 0]
    matrix = min(fitting, key=lambda s: s[1], default=None) if narrow else next(iter(fitting), None)
    if matrix is None or not lanes or tile_m % warp_m or caps.subgroup_size % lanes or matrix[2] % lanes:
        return None
    subgroups = tile_m // warp_m * slice_k
    cut = GemmShape(
        "coop_reg", tile_m, tile_n, UNIT, subgroups, 1, warp_m, tile_n, matrix, slice_k=slice_k, row_lanes=lanes, x_shared=x_shared
    )
    fits = caps.max_storage_bindings >= interface(SHADER).buffers
    fits = fits and subgroups * caps.subgroup_size <= caps.max_workgroup_invocations
    return cut if fits and _staging(cut, caps) is not None else None


def _staging(shape: GemmShape, caps: Capabilities) -> tuple[int, int] | None:
    """X_PART and PASS_N of shaders/gemm/coop_reg.glsl: the largest that shared memory holds; None where it holds none."""
    lanes, columns = caps.subgroup_size, shape.matrix[1]
    # A part holds whole words of what a lane decodes of a unit, four 16-byte words.
    block_words = 4 * columns * shape.row_lanes // lanes
    x_parts = [block_words // i for i in (1, 2, 4) if block_words % i == 0] if shape.x_shared else [0]
    passes = [columns * i for i in range(shape.tile_n // columns, 0, -1) if shape.tile_n // columns % i == 0]
    for part in x_parts:
        for columns_at_once in passes if shape.x_shared else passes[:1]:
            if _shared_bytes(shape, lanes, part, columns_at_once) <= caps.max_shared_memory:
                return part, columns_at_once
    return None


def _shared_bytes(shape: GemmShape, lanes: int, x_part: int, pass_n: int) -> int:
    """Shared memory of shaders/gemm/coop_reg.comp with subgroups of so many lanes, codebooks left out."""
    first_items = min(pass_n * shape.tile_m // 4, shape.subgroups * lanes)
    sums = 16 * shape.subgroups * pass_n * (shape.warp_m // 4 + 1)
    x_bytes = 2 * 16 * shape.slice_k * shape.tile_n // shape.matrix[1] * x_part * lanes
    return max(sums, x_bytes) + 32 * first_items + 4 * shape.tile_n + 4


def lane_units(quant: str, row_lanes: int) -> int:
    """Units that a lane loads per step. Two where a row has 4 lanes or fewer, so that the lanes of a row cover the eight units that share a
    scale block; one for types above 40 bytes a unit, which would spill."""
    bytes_of_unit = quants.quant(quant).row_bytes(256) / 8
    return max(1, min(2, 8 // row_lanes)) if bytes_of_unit <= 40 else 1


def blocks_of(k: int, shape: GemmShape) -> int:
    """Blocks along K, of a unit for each lane of a row."""
    return ceil_div(ceil_div(k, UNIT), shape.row_lanes)


def packed_units(name: str, n: int, k: int, shape: GemmShape) -> Tensor:
    """Activations as the kernel takes them (shaders/gemm/units.glsl): F16, columns to whole tiles, K to whole blocks."""
    return Tensor(name, "F16", (ceil_div(n, shape.tile_n) * shape.tile_n, blocks_of(k, shape) * shape.row_lanes * UNIT))


def units_stride(k: int, shape: GemmShape, caps: Capabilities) -> int:
    """16-byte words of a column of matrices of such a tensor."""
    own_columns = shape.matrix[1] * shape.row_lanes // caps.subgroup_size
    return blocks_of(k, shape) * 4 * own_columns * caps.subgroup_size


@dataclasses.dataclass(frozen=True)
class ExpertSum:
    """MOE_REDUCE on the way: weights F32 [n, n_used], residual F32 [n, k], and where the sums go, F32 [n, k]."""

    weights: Tensor
    residual: Tensor
    sums: Tensor


def pack_units(
    x: Tensor,
    y: Tensor,
    n: int,
    shape: GemmShape,
    caps: Capabilities,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    scale: float = 1.0,
    experts: ExpertSum | None = None,
) -> Dispatch:
    """The dispatch that makes `y` (see `packed_units`) of x F32 [n, k].

    eps  given: every row is RMS-normed first, and multiplied by `norm` F32 [k] if there is one
    scale  of all values, so that f16 holds them (vkback/ops/f16_range.py)
    experts  x is F32 [n, n_used, k]: what is packed are its weighted sums over n_used, with a residual; whole rows, which `eps` asks for
    """
    k = x.shape[-1]
    blocks = blocks_of(k, shape)
    quads = blocks * shape.row_lanes * UNIT // 4
    most = min(512 if eps is not None else 128, caps.max_workgroup_invocations)
    threads = max(caps.subgroup_size, min(most, quads) // caps.subgroup_size * caps.subgroup_size)
    norms = 0 if eps is None else 1 if norm is None else 2
    spec = matrix_spec(threads // caps.subgroup_size, shape.matrix, caps) | {"ROW_LANES": shape.row_lanes, "NORM": norms}
    parts = 1 if eps is not None else ceil_div(quads, 2 * threads)
    shader = "gemm/pack_units.comp"
    buffers = {"X": Arg(x), "Y": Arg(y, "w"), "NormWeight": arg_of(norm), "Overflow": Arg(overflow_word(y), "rw")}
    spins = SpinWaits(shares=(x.name,), arrives=n * parts, specialized=True) if k % 4 == 0 else None
    nbytes_of_sums = 0
    if experts is not None:
        if k % 4 or x.shape != (n, x.shape[1], k) or eps is None:
            raise PlanError(f"[gemm] {y.name}: sums of {x}; expected [{n}, n_used, k], k in fours, and a norm behind them")
        spec |= {"USED": x.shape[1]}
        buffers |= {"ExpertWeights": Arg(experts.weights), "Residual": Arg(experts.residual), "Sums": Arg(experts.sums, "w")}
        spins = SpinWaits(counted=(x.name,), arrives=n, specialized=True)
        nbytes_of_sums = nbytes(experts.residual) + nbytes(experts.sums)
    return Dispatch(
        Variant.of(shader, spec=spec, subgroup_size=required_subgroup(caps)),
        interface(shader).bound(buffers, Arg(norm or x)),
        pack_push(k, units_stride(k, shape, caps), blocks, float(eps or 0.0), float(scale)),
        (n, parts, 1),
        "PACK_F16",
        y.name,
        "units",
        nbytes=nbytes(x) + nbytes(y) + nbytes_of_sums,
        flops=4 * x.elements,
        waits=spins,
    )


def stores_units(w: Tensor, glu: bool, shape: GemmShape, caps: Capabilities) -> bool:
    """Whether the product with a weight can leave its output in unit order, made of one shard: whole blocks, or by experts whole fours of
    rows, whose block is then filled up with zeros."""
    whole = UNIT * shape.row_lanes if len(w.shape) == 2 else 4
    return shape.kernel == "coop_reg" and (w.shape[-2] >> glu) % whole == 0 and len(shards(w, caps)) == 1


def stores_next_norm(w: Tensor, shape: GemmShape, caps: Capabilities) -> bool:
    """Whether the product with a weight can leave its F32 output in unit order, too: as `stores_units`, and its rows are whole tiles, four
    and four, of a power of two of rows, which lanes of one subgroup store."""
    quads = shape.tile_m // 4
    of_subgroups = quads & (quads - 1) == 0 and quads <= caps.subgroup_size
    return stores_units(w, False, shape, caps) and w.shape[0] % (4 * shape.tile_m) == 0 and of_subgroups


def lower(problem: Gemm, shape: GemmShape, caps: Capabilities) -> list[Dispatch]:
    """The dispatches of a product, one a shard of its weight. Raises PlanError for what the kernel cannot do."""
    stored = problem.y.type == "F32" or (problem.y.type == "F16" and stores_units(problem.w, problem.glu != "", shape, caps))
    grouped = problem.route is not None
    dense_alone = grouped and (problem.residual or problem.units or problem.heads or len(shards(problem.w, caps)) > 1)
    if dense_alone or not stored or problem.x.type != "F16" or shape.kernel != "coop_reg":
        said = "coop_reg makes F32 of packed F16, or F16 of whole blocks; by experts without a residual, a norm or heads, of one shard"
        raise PlanError(f"[gemm] {problem.name}: {said}; got {problem.x} and {problem.y}")
    if problem.x.shape[-1] != blocks_of(problem.k, shape) * shape.row_lanes * UNIT:
        raise PlanError(f"[gemm] {problem.name}: {problem.x} does not hold rows of {problem.k} values in whole blocks")
    return [_product(problem, shape, caps, i, shard) for i, shard in enumerate(shards(problem.w, caps))]


def _product(problem: Gemm, shape: GemmShape, caps: Capabilities, index: int, shard: Shard) -> Dispatch:
    step_units = lane_units(problem.w.type, shape.row_lanes)
    x_part, pass_n = _staging(shape, caps) or (0, shape.tile_n)
    spec = (
        matrix_spec(shape.subgroups, shape.matrix, caps)
        | decoder_spec(shape)
        | {
            "SUBGROUP_M": shape.warp_m,
            "TILE_N": shape.tile_n,
            "PASS_N": pass_n,
            "ROW_SUBGROUPS": shape.tile_m // shape.warp_m,
            "ROW_LANES": shape.row_lanes,
            "HAS_BIAS": int(problem.bias is not None),
            "LANE_UNITS": step_units,
            "K_ALIGNED": int(step_units * shape.row_lanes == 8 and problem.k % (8 * UNIT) == 0),
        }
    )
    if problem.route is None:
        spec |= {"X_PART": x_part}
    if problem.squares is not None:
        spec |= {"X_SQUARES": problem.squares.shape[-1], "EPS": float(problem.eps)}
    weight = Arg(problem.w, "r", index)
    buffers = {"WeightWords": weight, "X": Arg(problem.x), "Bias": arg_of(problem.bias), "XSquares": arg_of(problem.squares)}
    # x may have been packed for matrices of other columns, by a product that shares it.
    x_columns = problem.x_matrix_columns or shape.matrix[1]
    x_shape = dataclasses.replace(shape, matrix=(shape.matrix[0], x_columns, shape.matrix[2]))
    if problem.heads is not None:
        shader, stored, y_stride = HEADS_SHADER, "rotated and stored", problem.y.shape[-1]
        spec |= _heads_spec(problem.heads)
        buffers |= _heads_buffers(problem.heads, problem.y_row0, problem.m)
    else:
        shader, stored = SHADER if problem.route is None else EXPERTS_SHADER, "stored as f16 units" if problem.y.type == "F16" else ""
        y_stride = units_stride(problem.m >> (problem.glu != ""), shape, caps) if problem.y.type == "F16" else problem.y.shape[-1]
        spec |= _epilogue_spec(problem, shape, caps)
        stores = _epilogue_buffers(problem, shard, caps)
        if problem.route is not None:
            spec = {name: value for name, value in spec.items() if name not in DENSE_ALONE}
            spec |= {"X_FN": x_columns, "TILES_EACH": shape.tiles_each}
            stores = {name: arg for name, arg in stores.items() if name in ("Y", "Overflow")} | {"Route": Arg(problem.route)}
        buffers |= stores
    groups = grid(problem, shape, shard)
    return Dispatch(
        Variant.of(shader, decoder(problem.w.type, caps, problem.pairs), spec=spec, subgroup_size=required_subgroup(caps)),
        interface(shader).bound(buffers, weight),
        push_words(problem, shape, shard, units_stride(problem.k, x_shape, caps), y_stride),
        groups,
        "MUL_MAT" if problem.route is None else "MUL_MAT_ID",
        problem.name,
        f"coop_reg: tiles of {shape.tile_m} x {shape.tile_n}, {shape.slice_k} of {shape.subgroups} subgroups share a row"
        + (", x through shared memory" if shape.x_shared else "")
        + (f", {shape.tiles_each} row tiles a workgroup" if shape.tiles_each > 1 else "")
        + (f", {stored}" if stored else ""),
        nbytes=weight_bytes(problem, shard) + nbytes(problem.x) + nbytes(problem.y),
        weight_bytes=weight_bytes(problem, shard),
        flops=2 * (shard.rows if problem.route is None else problem.m) * problem.k * problem.n,
        waits=SpinWaits(
            counted=tuple(t.name for t in (problem.x, problem.squares) if t),
            first=() if problem.route is None else (problem.route.name,),
            arrives=prod(groups),
            specialized=True,
        ),
    )


DENSE_ALONE = ("HAS_RESIDUAL",)
"""Constants of shaders/gemm/coop_reg.comp that the shader of grouped products lacks."""


def _epilogue_spec(problem: Gemm, shape: GemmShape, caps: Capabilities) -> Spec:
    """Constants of shaders/gemm/coop_reg.comp alone."""
    outputs = problem.m >> (problem.glu != "")
    spec: Spec = {"HAS_RESIDUAL": int(problem.residual is not None), "GLU": GLU_KINDS[problem.glu], "Y_UNITS": int(problem.y.type == "F16")}
    if problem.glu:
        spec |= {"GLU_ALPHA": float(problem.alpha), "GLU_LIMIT": float(problem.limit)}
    if problem.units is not None:
        spec |= {"NEXT_NORM": 1, "UNITS_STRIDE": units_stride(outputs, shape, caps), "Y_SQUARES": ceil_div(outputs, shape.tile_m)}
    return spec


def _epilogue_buffers(problem: Gemm, shard: Shard, caps: Capabilities) -> dict[str, Arg | None]:
    """Buffers of shaders/gemm/coop_reg.comp alone."""
    whole = problem.y.shape[-1] == problem.m >> (problem.glu != "") and len(shards(problem.w, caps)) == 1
    packed = problem.y if problem.y.type == "F16" else problem.units
    return {
        "Y": Arg(problem.y, "w", part="" if whole else f"rows {problem.y_row0} {shard.row0}"),
        "Residual": arg_of(problem.residual),
        "Overflow": Arg(overflow_word(packed), "rw") if packed is not None else None,
        "Units": arg_of(problem.units, "w"),
        "NextNormWeight": arg_of(problem.units_norm),
        "YSquares": arg_of(problem.y_squares, "w"),
    }


def _heads_spec(heads: Heads) -> Spec:
    """Constants of shaders/gemm/coop_reg_heads.comp alone."""
    q_rows, kv_rows, _ = heads.rows
    cache_rows = heads.caches[0].shape[1]
    spec: Spec = {"Q_ROWS": q_rows, "KV_ROWS": kv_rows, "HEAD_DIM": heads.head_dim, "CACHE_ROWS": cache_rows}
    return spec | {"ROPE_PAIRS": heads.pairs, "NEOX": int(heads.neox)}


def _heads_buffers(heads: Heads, row0: int, m: int) -> dict[str, Arg | None]:
    """Buffers of shaders/gemm/coop_reg_heads.comp alone. Of Q and the caches those of which the product makes rows: m, from row0 on."""
    stored: dict[str, Arg | None] = {"Positions": Arg(heads.pos), "Angles": arg_of(heads.angles)}
    first = 0
    for name, tensor, rows in zip(("Q", "CacheK", "CacheV"), (heads.q, *heads.caches), heads.rows, strict=True):
        stored[name] = Arg(tensor, "w") if first < row0 + m and row0 < first + rows else None
        first += rows
    return stored
