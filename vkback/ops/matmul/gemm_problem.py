"""Products of a stored weight and many tokens as values: a `Gemm` says what to compute, in tensors; a `GemmShape` which kernel does it
and how it cuts the work."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.cooperative_matrix import fragments_possible, matrix_shape
from vkback.ops.lowering import PlanError
from vkback.ops.workgroup import lanes_for
from vkback.quants import UNIT
from vkback.shader import Spec

GemmKernel = Literal["coop_mat", "coop_reg", "int_dot", "f32"]

GLU_KINDS = {"": 0, "silu": 1, "oai": 2, "gelu": 3}
"""GLU of shaders/gemm/glu.glsl by name."""


@dataclass(frozen=True)
class GemmShape:
    """How a product is cut.

    kernel     which kernel
    tile_m     weight rows of a workgroup's tile
    tile_n     columns (tokens, slots) of the tile
    step_k     weights of a row between two barriers; kernels without shared memory take a unit at a time
    subgroups  subgroups of a workgroup
    split_k    parts of a row, each by workgroups of its own and added up at the end

    Of coop_mat alone:
    warp_m, warp_n  the part of the tile that one subgroup makes; subgroups = tile_m / warp_m * tile_n / warp_n
    matrix          rows, columns and depth of a matrix
    fragments       x is packed in fragment order and goes straight into matrices; else it is row-major and goes through shared memory
    subnormals      weights are decoded by way of subnormal f16 (shaders/gemm/unit_f16.glsl); of coop_reg, too

    Of coop_reg, with warp_m and matrix as above:
    slice_k    subgroups that share the rows of a part and take turns along K; subgroups = tile_m / warp_m * slice_k
    row_lanes  neighbouring lanes that share a row of a matrix
    x_shared   x goes through shared memory, once for all rows of a tile; else each subgroup reads it into registers
    tiles_each  row tiles that a workgroup of a product by experts makes one after the other
    """

    kernel: GemmKernel
    tile_m: int
    tile_n: int
    step_k: int = UNIT
    subgroups: int = 1
    split_k: int = 1
    warp_m: int = 0
    warp_n: int = 0
    matrix: tuple[int, int, int] = (0, 0, 0)
    fragments: bool = False
    slice_k: int = 1
    row_lanes: int = 0
    subnormals: bool = False
    x_shared: bool = False
    tiles_each: int = 1


@dataclass(frozen=True)
class Heads:
    """Where a product (coop_reg) stores heads of Q, K and V, those of Q and K rotated.

    q        F32 [n, n_head, head_dim]
    caches   of K and V, F16 [n_head_kv, n_ctx, head_dim]
    pos      I32 [n]: positions of the tokens; -1, or one outside the caches, stores nothing
    angles   F32 [n, pairs, 2], as ROPE_ANGLES makes them; None: nothing is rotated
    neox     value i of a head is paired with i + pairs, else with its neighbour
    """

    q: Tensor
    caches: tuple[Tensor, Tensor]
    pos: Tensor
    angles: Tensor | None = None
    neox: bool = False

    @property
    def head_dim(self) -> int:
        return self.caches[0].shape[-1]

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V among all heads."""
        kv = self.caches[0].shape[0] * self.head_dim
        return prod(self.q.shape[1:]), kv, kv

    @property
    def pairs(self) -> int:
        """Pairs of a head that are rotated."""
        return self.angles.shape[-2] if self.angles is not None else 0


@dataclass(frozen=True)
class Gemm:
    """y = x w^T, or with `transposed` y = x w, and what is done to it before it is stored.

    w         weight [m, k], or [n_expert, m, k] with a route; transposed: [k, m]
    x         F32 or Q8_1 [rows, k], or F16 as `packed` has it; with a route: one row per token, shared by `x_shared`
              experts, or one row per (token, expert)
    y         F32 or Q8_1 [n, rows_total], or F16 as `packed` has it; rows y_row0.. are this product's
    n         columns: tokens, or with a route slots
    bias      F32 [m], or of all experts end to end
    residual  F32, shape of y
    route     what `route` makes of the ids of the slots
    x_scale   what an F16 x was multiplied by, and out_scale what an F16 y will be, so that all values stay within 65504
    x_factors  F32 [n], coop_mat alone: what each column of y is multiplied by, as `pack_f16` stored it; then there is no bias
    pairs     the weight's codes lie in pairs on the device (vkback/ops/codebooks.py)
    glu       "": none. Rows of w alternate gate and up: "silu": silu(gate) * up; "gelu": gelu(gate) * up; "oai": the clamped form
              of the first with alpha and limit

    Of coop_reg alone, where what is normed is made and read by products:
    units         a further output: y in unit order, each row times its weight units_norm F32 [m]
    y_squares  a further output, F32 [n, parts]: sums of squares of each column of y
    squares       such sums of x, whose columns are then divided by their rms, with eps
    x_matrix_columns  with a route: columns of the matrices that x was packed for, 0: as the shape's
    heads         Q, K and V heads: where to store them. y is unused; y_row0 counts rows over all heads
    """

    w: Tensor
    x: Tensor
    y: Tensor
    n: int
    bias: Tensor | None = None
    residual: Tensor | None = None
    route: Tensor | None = None
    x_shared: int = 1
    glu: Literal["", "silu", "oai", "gelu"] = ""
    alpha: float = 0.0
    limit: float = 0.0
    y_row0: int = 0
    x_scale: float = 1.0
    out_scale: float = 1.0
    label: str = ""
    x_factors: Tensor | None = None
    transposed: bool = False
    units: Tensor | None = None
    units_norm: Tensor | None = None
    y_squares: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    x_matrix_columns: int = 0
    heads: Heads | None = None
    pairs: bool = False

    def __post_init__(self) -> None:
        """Raises PlanError where a GLU has a gate too many."""
        if self.glu and self.m % 2:
            raise PlanError(f"[gemm] {self.name}: rows of {self.w} should alternate gate and up, but they are odd in number")

    @property
    def m(self) -> int:
        """Values of a row of y: weight rows of the matrix, or of one expert; transposed: values of a weight row."""
        return self.w.shape[-1] if self.transposed else self.w.shape[-2]

    @property
    def k(self) -> int:
        """Terms of a sum."""
        return self.w.shape[-2] if self.transposed else self.w.shape[-1]

    @property
    def name(self) -> str:
        return self.label or self.y.name

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def default_shape(kernel: GemmKernel, n: int, caps: Capabilities) -> GemmShape:
    """A shape that works everywhere, for tests and until tables have been measured."""
    lanes = lanes_for(caps)[0]
    if kernel == "coop_mat":
        matrix = matrix_shape(caps)
        if matrix is None:
            raise PlanError(f"[gemm] {caps.name} has no cooperative matrices of f16 with f32 sums for subgroups")
        rows, columns, depth = matrix
        fragments = fragments_possible(matrix, caps)
        if caps.software:  # small parts: such a driver takes long to compile large ones
            return GemmShape(kernel, 8 * rows, 2 * columns, UNIT, 4, 1, 2 * rows, 2 * columns, matrix, fragments)
        return GemmShape(kernel, 8 * rows, 8 * columns, max(2 * UNIT, depth), 4, 1, 4 * rows, 4 * columns, matrix, fragments)
    subgroups = 1 if caps.software else max(1, 128 // lanes)
    return GemmShape(kernel, tile_m=subgroups * lanes * 4, tile_n=16 if n > 8 else 8, subgroups=subgroups)


def decoder_spec(shape: GemmShape) -> Spec:
    """Specialization constants of shaders/gemm/unit_f16.glsl."""
    return {"SUBNORMALS": 1} if shape.subnormals else {}


def shared_bytes(shape: GemmShape) -> int:
    """Shared memory of shaders/gemm/coop_mat.comp: double-buffered rows of weights, and of activations where they are no fragments."""
    pitch = 16 * (shape.step_k // 8 + 1)
    stages = 16 * shape.subgroups * shape.matrix[1] * (shape.warp_m // 4 + 1)
    return max(2 * shape.tile_m * pitch, stages) + (16 if shape.fragments else 2 * shape.tile_n * pitch)


def misfits(shape: GemmShape, caps: Capabilities) -> list[str]:
    """Why coop_mat cannot be cut like this on a device, whatever it multiplies; empty when it can."""
    rows, columns, depth = shape.matrix
    need, threads = shared_bytes(shape), shape.subgroups * caps.subgroup_size
    faults = {
        "parts are no multiples of matrices": shape.warp_m % rows or shape.warp_n % columns,
        "tiles are no multiples of parts": shape.tile_m % shape.warp_m or shape.tile_n % shape.warp_n,
        f"{shape.subgroups} subgroups do not make a tile": shape.subgroups * shape.warp_m * shape.warp_n != shape.tile_m * shape.tile_n,
        f"steps of {shape.step_k} along K are no multiples of units of {UNIT}": shape.step_k % UNIT,
        f"matrices of depth {depth} do not divide a unit of {UNIT}": UNIT % depth,
        "no fragments with such matrices": shape.fragments and not fragments_possible(shape.matrix, caps),
        f"{need} bytes of shared memory, {caps.name} has {caps.max_shared_memory}": need > caps.max_shared_memory,
        f"{threads} threads, {caps.name} has {caps.max_workgroup_invocations}": threads > caps.max_workgroup_invocations,
    }
    return [text for text, there in faults.items() if there]


def f16_misfits(shape: GemmShape, glu: bool) -> list[str]:
    """Why a coop_mat of this shape cannot leave its output packed as F16, with GLU of half as many rows; empty when it can."""
    depth = shape.matrix[2]
    faults = {
        "a tile of an F16 output has whole units": (shape.tile_m >> glu) % UNIT,
        "a part of an F16 output has whole matrices": (shape.warp_m >> glu) % depth,
    }
    return [text for text, there in faults.items() if there]
