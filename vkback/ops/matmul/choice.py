"""The kernel of a product of a stored weight: which one the tables, the device and the product lead to, as one value.

`choose` asks the tables, once for each product of a plan (vkback/plan/passes/choose.py): the value stays on the node. Code that needs to
know what kernel it is, what that kernel can store or rounds, reads it there: fusion, packing, lowering, tolerances, the comparison of
nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Node, Tensor
from vkback.ops.case import Tolerance
from vkback.ops.cooperative_matrix import fragments_possible, matrix_shape, row_lanes
from vkback.ops.family import Choice, declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm_reg
from vkback.ops.matmul.gemm_problem import GemmKernel, GemmShape, default_shape, misfits, shared_bytes
from vkback.ops.matmul.linear_node import Experts, LinearNode, Path
from vkback.ops.matmul.pack import packs_glu
from vkback.ops.storage import shards
from vkback.quants import UNIT

Kernel = Literal["gemv", "coop_mat", "coop_reg", "int_dot", "f32"]
"""The GEMV kernels, 16 tokens at a time; or one of the GEMMs (vkback/ops/matmul/gemm.py)."""

declare(
    "gemm",
    match={
        "matrices": (False, True),  # cooperative matrices of f16 with f32 sums, and no --act that forbids them
        "path": get_args(Path),  # how GEMVs of the type multiply
        "experts": get_args(Experts),
        "glu": (False, True),
        "n": "number",
        "quant": tuple(quants.QUANTS),
        "decoder": get_args(quants.Decoder),
        "m": "number",
        "k": "number",
    },
    params={
        "kernel": get_args(Kernel),
        "tile_m": "positive",  # weight rows of a workgroup's tile (coop_mat)
        "tile_n": "positive",  # tokens or slots of the tile
        "step_k": "positive",  # weights of a row between two barriers (coop_mat)
        "warp_m": "positive",  # the part of the tile that a subgroup makes (coop_mat)
        "warp_n": "positive",
        "split_k": "positive",  # parts of a row, added up at the end (coop_mat, dense)
        "slice_k": (1, 2, 3, 4, 6, 7, 8, 12, 14, 16),  # subgroups of a workgroup that share a row (coop_reg, dense)
        "x_shared": (False, True),  # activations go through shared memory, once for all rows of a tile (coop_reg, dense)
        "tiles_each": (1, 2, 3, 4, 6, 8),  # row tiles that a workgroup makes one after the other (coop_reg, by experts)
        "subnormals": (False, True),  # weights decoded by way of subnormal f16, where type and values allow it (coop_mat, coop_reg)
        "rows": (2, 4),  # weight rows of a thread (f32)
    },
)

PARAMS_READ: Mapping[Kernel, tuple[str, ...]] = {
    "gemv": (),
    "coop_mat": ("tile_m", "tile_n", "step_k", "warp_m", "warp_n", "split_k", "subnormals"),
    "coop_reg": ("tile_m", "tile_n", "warp_m", "slice_k", "x_shared", "tiles_each", "subnormals"),
    "int_dot": ("tile_n",),
    "f32": ("tile_n", "rows"),
}
"""Parameters of [[gemm]] that have an effect on each kernel."""

F16_TOLERANCE = Tolerance(
    1e-6, 0.02, "weights and activations rounded to f16 (relative error 2^-12 in the mean square of each: NMSE 1.2e-7), sums in f32"
)


F16_WEIGHTS = F16_TOLERANCE.nmse / 4
"""NMSE of a product by weights decoded in f16: a quarter of what the op is allowed, for a band of four times that."""

ROUTE_BYTES = 20
"""Shared memory of shaders/gemm/route.glsl for each expert."""


Stores = Literal["Q8_1", "f16", "units", "normed units", "heads"]
"""What a kernel can store beside F32: Q8_1; F16 for GEMMs that take x packed (gemm_pack.packed); F16 in unit order
(gemm_reg.packed_units), its output itself or beside it times the weight of a norm; heads of Q, K and V, rotated, where they belong."""

Rounds = Literal["", "Q8_1", "F16"]
"""What a kernel makes of activations that come as F32: nothing, Q8_1, or F16, as which it takes the weights, too."""


@dataclass(frozen=True)
class ProductChoice:
    """The kernel of one product.

    problem  the product in words
    path     how GEMVs of it multiply, and why; a GEMM may do otherwise
    shape    of a GEMM; None: the GEMV kernels, whose shape depends on all that is fused (gemv_config.configure)
    source   the row of the tables that won, or what forbids a GEMM
    stores   what the kernel can store beside F32
    """

    problem: str
    path: Path
    path_source: str
    shape: GemmShape | None
    source: str
    stores: frozenset[Stores] = frozenset()
    by_heads: bool = False

    @property
    def kernel(self) -> Kernel:
        """Which kernel it is."""
        return "gemv" if self.shape is None else self.shape.kernel

    @property
    def rounds(self) -> Rounds:
        """What it rounds F32 activations to."""
        if self.kernel in ("coop_mat", "coop_reg"):
            return "F16"
        by_ints = self.path == "int" if self.shape is None else self.kernel == "int_dot"
        return "Q8_1" if by_ints else ""

    @property
    def x_type(self) -> str:
        """What the kernel wants x as from its producer: F32 (GEMMs by matrices pack it, products by heads cut it) or Q8_1."""
        return "Q8_1" if self.rounds == "Q8_1" and (self.shape is None or not self.by_heads) else "F32"

    def stores_heads(self, head_dim: int, pairs: int) -> bool:
        """Whether it can rotate `pairs` pairs of heads and store them: four rows of a thread lie in one head, all or none rotated."""
        return "heads" in self.stores and head_dim % 4 == 0 and pairs % 2 == 0

    def storing(self, node: Node, ctx: LowerContext) -> ProductChoice:
        """The choice for the node with another type of output, of which only Q8_1 may make the kernel another."""
        if self.shape is None or node.outputs[0].type != "Q8_1":
            return self
        return self._storing_q8_1(self.shape, LinearNode.of(node))

    def _storing_q8_1(self, shape: GemmShape, node: LinearNode) -> ProductChoice:
        partial = self.kernel != "coop_reg" and not self.by_heads and node.rows_total != node.m >> node.glu
        if self.kernel == "coop_reg" or partial:
            return dataclasses.replace(self, shape=None, stores=frozenset({"Q8_1"}))
        if self.kernel == "int_dot" and node.glu:  # a thread makes four values of it, of twice as many rows
            return dataclasses.replace(self, shape=dataclasses.replace(shape, tile_m=2 * shape.tile_m))
        return self

    def __str__(self) -> str:
        """Like `coop_mat 128x128x64 for Q4_K 4096x14336, 512 tokens, stores f16, rounds x to F16: nvidia.toml [[gemm]] row 3`."""
        cut = "" if self.shape is None else f" {self.shape.tile_m}x{self.shape.tile_n}x{self.shape.step_k}"
        kernel = f"{self.kernel}{cut}" if self.shape else f"gemv ({self.path}: {self.path_source})"
        stores = f", stores {', '.join(sorted(self.stores))}" if self.stores else ""
        rounds = f", rounds x to {self.rounds}" if self.rounds else ""
        return f"{kernel} for {self.problem}{stores}{rounds}: {self.source}"


def choice_of(node: LinearNode, ctx: LowerContext) -> ProductChoice:
    """The choice that a plan has made for a node; of a node outside a plan it is made here."""
    known = node.node.choice
    return known if isinstance(known, ProductChoice) else choose(node, ctx)


def choose(node: LinearNode, ctx: LowerContext) -> ProductChoice:
    """The kernel for a product: a GEMM where the tables say so and device and product allow it, else the GEMV kernels."""
    path, why = node.path(ctx)
    shape, source = _gemm(node, path, ctx)
    problem = f"{node.w.type} {node.m}x{node.k}, {node.n} token{'s' * (node.n > 1)}"
    problem += f", experts {node.experts}" * (node.experts != "none") + ", GLU" * node.glu
    return ProductChoice(problem, path, why, shape, source, _stores(node, shape, ctx.caps), node.experts == "heads")


def _stores(node: LinearNode, shape: GemmShape | None, caps: Capabilities) -> frozenset[Stores]:
    """What a kernel of this shape can store of a product."""
    if shape is None or shape.kernel == "int_dot":
        return frozenset({"Q8_1"})
    found: set[Stores] = set()
    whole = node.params.rows_total is None
    gelu_alone = node.gelu and not node.glu  # a dispatch behind the GEMM applies it, to floats
    if shape.kernel == "coop_mat" and whole and node.experts != "summed" and not gelu_alone and packs_glu(shape, node.glu, node.k):
        found.add("f16")
    if shape.kernel != "coop_reg":
        return frozenset(found)
    if whole and node.glu and gemm_reg.stores_units(node.w, node.glu, shape, caps):
        found.add("units")
    if node.experts != "none":
        return frozenset(found)
    if whole and not node.glu and not node.gelu and gemm_reg.stores_next_norm(node.w, shape, caps):
        found.add("normed units")
    if not (node.w.shape[0] | node.params.row0) % 4 and len(shards(node.w, caps)) == 1:
        found.add("heads")
    return frozenset(found)


def _gemm(node: LinearNode, path: Path, ctx: LowerContext) -> tuple[GemmShape | None, str]:
    """The GEMM for a product, None for the GEMV kernels; and the row of the tables that says so, or what forbids it."""
    # The route counts tokens per expert in shared memory.
    if ROUTE_BYTES * node.w.shape[0] > ctx.caps.max_shared_memory and node.experts != "none":
        return None, f"{node.w.shape[0]} matrices, more than a route has shared memory for"
    by_heads = node.experts == "heads"
    # GEMMs have no prologue and choose no experts.
    by_gemv = node.norms_x or node.chosen or "multiplier" in node.extra or node.params.softcap or node.params.squared_relu
    if node.n < 2 or by_gemv or (by_heads and node.x.type != "F32"):
        return (
            None,
            "one token, or what only GEMVs have: a prologue, a multiplier, softcap or squared ReLU, the choice of experts, heads of Q8_1",
        )
    matrix = matrix_shape(ctx.caps) if _matrices_allowed(node.w, ctx) else None
    choice = ctx.tuning.pick(
        "gemm",
        matrices=matrix is not None,
        path=path,
        experts=node.experts,
        glu=node.glu,
        n=node.n,
        quant=node.w.type,
        decoder=quants.quant(node.w.type).decoder,
        m=node.m,
        k=node.k,
    )
    kernel: Kernel = choice["kernel"]
    # Integers need an x in 8 bits, which the float path excludes.
    if kernel == "int_dot" and path == "float":
        kernel = "f32"
    # act=q8_1 wants activations in 8 bits at any number of tokens.
    if ctx.act == "q8_1" and path == "int" and kernel != "gemv":
        kernel = "int_dot"
    if kernel == "coop_reg" and ctx.act == "f16":  # it has no factors of columns
        kernel = "f32"
    if kernel == "coop_reg":
        grouped = node.experts in ("each", "summed")
        fits = matrix is not None and not by_heads and node.y.type != "Q8_1" and node.x.type != "Q8_1"
        fits = fits and not (grouped and len(shards(node.w, ctx.caps)) > 1)
        lanes = row_lanes(ctx) if fits else 0
        cut = (choice["tile_m"], choice["tile_n"], choice["warp_m"], choice["slice_k"])
        shape = gemm_reg.shape_of(*cut, lanes, ctx.caps, narrow=grouped, x_shared=bool(choice["x_shared"]) and not grouped)
        if shape is not None:
            each = int(choice["tiles_each"]) if grouped else 1
            shape = dataclasses.replace(shape, subnormals=_by_subnormals(node.w, choice, ctx), tiles_each=each)
        return shape, choice.source
    # No matrices on this device, or this weight may not go through them.
    if kernel == "coop_mat" and matrix is None:
        kernel = "int_dot" if path == "int" else "f32"
    if node.x.type == "F16" and kernel != "coop_mat":
        raise PlanError(f"[gemm] {node.node.name}: {choice.source} chooses {kernel}, which takes no packed {node.x}; give it F32")
    # GEMMs write Q8_1 as a whole tensor, not as a slice of a wider one.
    partial_q8 = node.y.type == "Q8_1" and not by_heads and node.rows_total != node.m >> node.glu
    if kernel == "gemv" or (node.x.type == "Q8_1" and kernel != "int_dot") or partial_q8:
        return None, choice.source
    if kernel != "coop_mat":
        return _by_rows(kernel, node, choice["tile_n"], choice["rows"], ctx), choice.source
    assert matrix is not None
    return _by_matrices(node.w, choice, matrix, ctx, split=node.experts == "none"), choice.source


@dataclass(frozen=True)
class TransposedChoice:
    """The kernel of gradients times a stored weight. shape None: f32."""

    shape: GemmShape | None
    source: str

    @property
    def kernel(self) -> Kernel:
        """Which kernel it is."""
        return "f32" if self.shape is None else self.shape.kernel

    @property
    def rounds(self) -> Rounds:
        """What it rounds F32 gradients to."""
        return "F16" if self.shape is not None else ""

    def storing(self, node: Node, ctx: LowerContext) -> TransposedChoice:
        """It makes F32 alone."""
        return self

    def __str__(self) -> str:
        return f"{self.kernel}, transposed{', rounds gradients to F16' if self.rounds else ''}: {self.source}"


def choose_transposed(w: Tensor, n: int, ctx: LowerContext) -> TransposedChoice:
    """The kernel for gradients [n, m] times a stored weight [m, k], by the tables' rows for a weight [k, m]. Only with act "f16"; shape
    None: f32."""
    matrix = matrix_shape(ctx.caps) if ctx.act == "f16" and _matrices_allowed(w, ctx) else None
    if matrix is None or len(shards(w, ctx.caps)) > 1:
        return TransposedChoice(None, "f32: --act, the weight or the device has no matrices for it")
    m, k = w.shape
    choice = ctx.tuning.pick(
        "gemm", matrices=True, path="float", experts="none", n=n, quant=w.type, decoder=quants.quant(w.type).decoder, m=k, k=m
    )
    if choice["kernel"] != "coop_mat" or choice["tile_m"] % UNIT:
        return TransposedChoice(None, choice.source)
    return TransposedChoice(_by_matrices(w, choice, matrix, ctx), choice.source)


def _matrices_allowed(w: Tensor, ctx: LowerContext) -> bool:
    """Whether a weight may become f16. Of what the device made, nobody knows whether it fits; in training, F32 weights are adapters."""
    fits = w.name not in ctx.beyond_f16 and (w.kind == "weight" or w.type not in ("F32", "BF16"))
    return fits and (ctx.act == "auto" or (ctx.act == "f16" and w.type != "F32"))


def _by_subnormals(w: Tensor, choice: Choice, ctx: LowerContext) -> bool:
    """Whether a weight is decoded by way of subnormal f16: where the tables say so, its type has a quantization step, and that is small."""
    return bool(choice["subnormals"]) and quants.quant(w.type).step_factor > 0 and w.name not in ctx.coarse


def _by_matrices(w: Tensor, choice: Choice, matrix: tuple[int, int, int], ctx: LowerContext, *, split: bool = True) -> GemmShape | None:
    """The shape of coop_mat that a row of the tables means."""
    subgroups = choice["tile_m"] // choice["warp_m"] * (choice["tile_n"] // choice["warp_n"])
    parts = choice["split_k"] if split else 1
    cut = (choice["tile_m"], choice["tile_n"], choice["step_k"], subgroups, parts, choice["warp_m"], choice["warp_n"])
    fragments = ctx.fragments and fragments_possible(matrix, ctx.caps)
    return _fitting(GemmShape("coop_mat", *cut, matrix, fragments, subnormals=_by_subnormals(w, choice, ctx)), ctx.caps)


def _by_rows(kernel: GemmKernel, node: LinearNode, tile_n: int, f32_rows: int, ctx: LowerContext) -> GemmShape:
    """A shape of the kernels without shared memory; a Q8_1 output takes 4 rows a thread, 8 with GLU."""
    shape = default_shape(kernel, node.n, ctx.caps)
    rows = f32_rows if kernel == "f32" else 8 if node.y.type == "Q8_1" and node.glu else 4
    return dataclasses.replace(shape, tile_n=tile_n, tile_m=shape.tile_m // 4 * rows)


def _fitting(shape: GemmShape, caps: Capabilities) -> GemmShape | None:
    """The shape with steps along K as the device's shared memory allows; None where it does not fit the device (`misfits`)."""
    while shared_bytes(shape) > caps.max_shared_memory and shape.step_k > UNIT:
        shape = dataclasses.replace(shape, step_k=shape.step_k // 2)
    return None if misfits(shape, caps) else shape
