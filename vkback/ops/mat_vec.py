"""Products of a stored weight and few tokens with what is fused around them: one family of kernels (shaders/mat_vec).

`MAT_VEC` is the fused form. Its inputs carry roles:

    w               weight [m, k], or [n_expert, m, k] with ids
    x               F32 or Q8_1 [n, k]; with ids [n, 1 or n_used, k]
    norm            F32 [k]: x is RMS-normed and multiplied by it first (params: eps)
    bias            F32 [m]; with ids [n_expert * m], the experts' rows end to end
    residual        F32, shape of the output: added to it
    ids             I32 [n, n_used]: the experts of each token
    logits          F32 [1, n_expert], in the place of ids: the experts are chosen by them as TOPK_MOE does (its params, too); weights
                    F32 [1, n_used] and ids I32 [1, n_used] are further outputs
    expert_weights  F32 [n, n_used]: the experts' outputs are summed with these weights
    params: roles (names in input order), glu (rows of w alternate gate and up: y = silu(gate) * up, or with alpha and limit what
    SWIGLU_OAI makes of them), row0 and rows_total (the output is rows row0.. of a wider tensor, filled by several nodes)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Recipe, Tensor
from vkback.ops.base import (
    MAX_GROUPS_X,
    OPS,
    Arg,
    Array,
    Case,
    Choice,
    Dispatch,
    LowerContext,
    Op,
    PlanError,
    Problem,
    Shard,
    SpinWaits,
    Tolerance,
    ceil_div,
    declare,
    nbytes,
    pack_push,
    register,
    shards,
)
from vkback.ops.code_books import decoder
from vkback.ops.code_books import shared_bytes as code_book_bytes
from vkback.ops.glu import SWIGLU_OAI
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.reference import REFERENCES
from vkback.ops.topk import choice_bytes, choice_defines
from vkback.ops.workgroup import Defines, power_of_two
from vkback.shader import Variant

MAX_COLUMNS = 16
"""Tokens one workgroup takes at once; more go along the grid."""

MAX_ROWS = 16
"""Rows of a slot at most: each keeps its sums and its loads in registers."""

QUANTS = quants.WEIGHT_TYPES
INT_QUANTS = frozenset(name for name in QUANTS if quants.quant(name).int_dot)
RARE = frozenset(name for name in QUANTS if quants.quant(name).rare)

declare(
    "mat_vec",
    match={
        "y": ("F32", "Q8_1"),
        "prologue": (0, 2),  # as PROLOGUE in shaders/mat_vec: 2 norms x
        "ids": (0, 1, 2),  # as IDS in shaders/mat_vec: 2 sums the experts of a token
        "glu": (0, 1),
        "n": "number",
        "quant": tuple(quants.QUANTS),
        "path": ("int", "float"),
        "m": "number",
        "k": "number",
        "sync": ("barrier", "sentinel"),  # sentinel: of a token whose stages run barrier-free where they can
    },
    params={
        "wg": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        "lanes": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        "rows": (1, 2, 4, 8, 16, 32),
        "unroll": (1, 2, 3, 4, 6, 8, 14, 16),
        "prefetch": (0, 1, 2),  # 1: a unit's registers take that of the next round as soon as it is used; 2: those of x, too
        "adjoin": (0, 1),  # whether the units a lane takes at once adjoin, where they are a power of two and divide a row
        "stage": (0, 1),  # a Q8_1 x by way of shared memory
        "groups": "count",  # workgroups at most, each taking several tiles; 0: one a tile
        "subgroup": (0, 8, 16, 32, 64, 128),  # size to require where the device has it; 0: its default
    },
    never=({"quant": set(quants.QUANTS) - INT_QUANTS, "path": ("int",)},),
)
declare(
    "mat_vec_path",
    match={
        "accelerated": (0, 1),  # the device has integer dot as an instruction, says its driver
        "ids": (0, 1, 2),
        "n": "number",
        "quant": tuple(sorted(INT_QUANTS)),
        "m": "number",
        "k": "number",
    },
    params={"path": ("int", "float")},
)

FUSED_ROLES = ("norm", "bias", "residual", "ids", "logits", "expert_weights")


def path_for(quant: str, m: int, k: int, n: int, ids: int, ctx: LowerContext) -> tuple[str, str]:
    """("int" or "float", why) for a product of a [m, k] weight with n tokens."""
    if quant not in INT_QUANTS:
        return "float", f"{quant} has no integer-dot path"
    if not ctx.caps.int_dot:
        return "float", "device has no integer dot product"
    if k % 32:
        return "float", f"k = {k} is not a multiple of 32"
    if ctx.act != "auto":
        return ("float" if ctx.act == "f32" else "int"), f"--act {ctx.act}"
    choice = ctx.tuning.pick("mat_vec_path", accelerated=int(ctx.caps.int_dot_accelerated), ids=ids, n=n, quant=quant, m=m, k=k)
    return choice["path"], choice.source


def subgroup_for(ctx: LowerContext, wanted: int = 0) -> tuple[int, int | None]:
    """(size the shader may rely on, size to require): (1, None) when reductions must go through shared memory.

    wanted  the tables' size, taken where the device can be held to it; 0 and others: the device's default
    """
    caps = ctx.caps
    if "shuffle" not in caps.subgroup_ops:
        return 1, None
    if caps.subgroup_required_size:
        size = wanted if caps.subgroup_min <= wanted <= caps.subgroup_max else caps.subgroup_size
        return size, size
    if caps.subgroup_min == caps.subgroup_max:
        return caps.subgroup_size, None
    return 1, None


@dataclasses.dataclass(frozen=True)
class Shape:
    """Threads of a workgroup: `lanes` of them share a slot of `rows` weight rows."""

    wg: int
    lanes: int
    rows: int

    @property
    def tile_rows(self) -> int:
        return self.wg // self.lanes * self.rows


def legal_shape(choice: Choice, *, units: int, glu: bool, q8_out: bool, ctx: LowerContext) -> Shape:
    """The tables' shape bent to what this node and device need.

    Lanes beyond the `units` of a row would have nothing to do. A lane finishes at most one row of its slot, GLU has row pairs, a Q8_1
    output whole units. The nearest shape wins: more rows, then fewer lanes, then more threads. Raises PlanError when none fits.
    """
    most = min(ctx.caps.max_workgroup_invocations, ctx.caps.max_workgroup_size[0])
    subgroup, required = subgroup_for(ctx, choice["subgroup"])
    if required and ctx.caps.max_workgroup_subgroups:
        most = min(most, required * ctx.caps.max_workgroup_subgroups)
    tile = (32 if q8_out else 1) << glu
    wg = min(max(choice["wg"], 8 if q8_out else 1), most)
    while wg <= most:
        lanes = min(max(choice["lanes"], 1 << glu), wg, max(power_of_two(units), choice["rows"], 1 << glu))
        while lanes:
            rows = max(choice["rows"], 1 << glu)
            most_rows = min(lanes, MAX_ROWS, subgroup if subgroup > 1 else MAX_ROWS)
            while rows <= most_rows:
                shape = Shape(wg, lanes, rows)
                if shape.tile_rows % tile == 0:
                    return shape
                rows *= 2
            lanes //= 2
        wg *= 2
    raise PlanError(f"[mat_vec] {choice.source}: no shape near {dict(choice.params)} makes tiles of {tile} rows on {ctx.caps.name}")


def can_adjoin(unroll: int, lanes: int, k_units: int) -> bool:
    """Whether the units that a lane takes at once can adjoin: they are a power of two, and those of all lanes divide a row."""
    return unroll > 1 and unroll == power_of_two(unroll) and k_units % (unroll * lanes) == 0


def can_prefetch_x(defines: Mapping[str, str | int]) -> bool:
    """Whether a lane can ask for its units of x ahead: those of one row of Q8_1 in memory, which take several rounds."""
    several = int(defines["LANES"]) * int(defines["UNROLL"]) < int(defines["K_UNITS"])
    return bool(several and defines["PATH_INT"] and defines["COLS"] == 1 and defines["IDS"] != 2 and defines["PROLOGUE"] == 0)


def shared_bytes(defines: Mapping[str, str | int]) -> int:
    """Shared memory of a kernel of this family without its code book, as shaders/mat_vec declares it."""

    def number(name: str) -> int:
        return int(defines.get(name, 0))

    wg, lanes, turns = number("WG"), number("LANES"), 1 + number("TILES")
    rows, partials = number("COLS") * number("ROWS") * (wg // lanes), lanes // number("SUBGROUP")
    summed = number("N_USED") if number("IDS") == 2 else 0
    total = 4 * turns * rows * partials if partials > 1 else 0
    if number("PROLOGUE"):
        total += max(1, summed) * number("K_UNITS") * (40 if number("PATH_INT") else 128)
    total += 8 * summed
    if number("Y_TYPE"):
        total += 4 * turns * (rows >> number("GLU"))
    if number("EXPERTS"):
        total += choice_bytes(defines)
    sums = number("PROLOGUE") == 2 or (number("EXPERTS") > 0 and number("GATE") == 1)
    if (sums or number("Y_TYPE")) and not number("REDUCE_SUBGROUP"):
        total += 2 * 4 * wg
    elif sums and wg > number("SUBGROUP_SIZE"):
        total += 2 * 4 * ceil_div(wg, 4)
    return total


PROLOGUE_SHARED = 8192 + 2048
"""Shared memory beside x: parts of a reduction over 1024 threads without subgroup operations, and the row sums."""


def choice_problem(node: Node, ctx: LowerContext) -> str:
    """Why a MAT_VEC node with the role "logits" must be given the experts' ids instead; "" when it can choose them."""
    product = MatVecNode.of(node)
    if product.n != 1:
        return f"it takes one token, got {product.n}"
    if 5 + len(product.extra) > ctx.caps.max_storage_bindings:
        return f"it binds {5 + len(product.extra)} storage buffers, {ctx.caps.name} takes {ctx.caps.max_storage_bindings}"
    try:
        product.build(product.path(ctx)[0], 2 if "norm" in product.extra else 0, ctx)
    except PlanError as e:
        return str(e)
    return ""


def prologue_problem(quant: str, k: int, n: int, path: str, ctx: LowerContext) -> str:
    """Why x [n, k] cannot be brought into shared memory by every workgroup of a product with such weights; "" when it can."""
    need = (k // 32 * 40 if path == "int" else 4 * k) + code_book_bytes(quant, ctx.caps)
    if n > 1:
        return f"it takes one token, got {n}"
    if k % 32:
        return f"k = {k} is not a multiple of 32"
    if need + PROLOGUE_SHARED > ctx.caps.max_shared_memory:
        return f"{quant} with k = {k} needs {need} bytes of shared memory, {ctx.caps.name} has {ctx.caps.max_shared_memory}"
    return ""


@dataclasses.dataclass(frozen=True)
class Build:
    """A kernel of the family before its last defines (TILES, ROWS_FULL), which depend on the shard."""

    shape: Shape
    defines: Mapping[str, str | int]
    subgroup: int | None
    groups: int
    source: str

    @property
    def columns(self) -> int:
        return int(self.defines["COLS"])


@dataclasses.dataclass(frozen=True)
class MatVecNode:
    """A MAT_VEC node taken apart. extra: the optional inputs by role, in binding order; ids: 0 dense, 1 an expert a slot, 2 summed;
    chosen: weights and ids that it writes where it chooses its experts."""

    node: Node
    w: Tensor
    x: Tensor
    y: Tensor
    extra: Mapping[str, Tensor]
    glu: bool
    ids: int
    chosen: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, node: Node) -> MatVecNode:
        by = dict(zip(node.params["roles"], node.inputs, strict=True))
        ids = 2 if "expert_weights" in by else int("ids" in by or "logits" in by)
        extra = {role: by[role] for role in FUSED_ROLES if role in by}
        return cls(node, by["w"], by["x"], node.outputs[0], extra, bool(node.params.get("glu")), ids, node.outputs[1:])

    @property
    def m(self) -> int:
        """Weight rows of the matrix, or of one expert."""
        return self.w.shape[-2]

    @property
    def k(self) -> int:
        return self.w.shape[-1]

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def n_used(self) -> int:
        return (self.chosen[1] if self.chosen else self.extra["ids"]).shape[-1] if self.ids else 1

    @property
    def rows_total(self) -> int:
        """Rows of the output tensor, which several nodes may fill."""
        return int(self.node.params.get("rows_total", self.m >> self.glu))

    def path(self, ctx: LowerContext) -> tuple[str, str]:
        """("int" or "float", why), as `path_for` has it."""
        return path_for(self.w.type, self.m, self.k, self.n, self.ids, ctx)

    def choice(self, node: Node, logits: Tensor, ctx: LowerContext) -> Defines:
        """Defines of the choice of experts that a kernel of this product makes for a node, its results bound after the optional inputs."""
        defines = choice_defines(node, logits, ctx)
        return {**defines, "TOPK_SCALE": repr(float(node.params["scale"])), "BIND_TOPK": 3 + len(self.extra)}

    def build(self, path: str, prologue: int, ctx: LowerContext) -> Build:
        """The kernel that the tables and the device's limits lead to. Raises PlanError when it cannot be made to fit."""
        q8_out = self.y.type == "Q8_1"
        choice = ctx.tuning.pick(
            "mat_vec", quant=self.w.type, path=path, m=self.m, k=self.k, n=self.n, ids=self.ids, glu=int(self.glu), y=self.y.type,
            prologue=prologue, sync=ctx.sync,
        )
        k_units = ceil_div(self.k, 32)
        walk_units = k_units * (self.n_used if self.ids == 2 else 1)
        shape = legal_shape(choice, units=walk_units, glu=self.glu, q8_out=q8_out, ctx=ctx)
        subgroup, required = subgroup_for(ctx, choice["subgroup"])
        if prologue:
            shape = dataclasses.replace(shape, wg=max(shape.wg, 8))
        unroll = min(choice["unroll"], ceil_div(walk_units, shape.lanes))
        defines: dict[str, str | int] = {
            **decoder(self.w.type, ctx.caps),
            "PATH_INT": int(path == "int"),
            "WG": shape.wg,
            "LANES": shape.lanes,
            "ROWS": shape.rows,
            "UNROLL": unroll,
            "PREFETCH": choice["prefetch"],
            "ADJOIN": int(choice["adjoin"] and can_adjoin(unroll, shape.lanes, k_units)),
            "K_UNITS": k_units,
            "COLS": 1 if self.ids else min(self.n, MAX_COLUMNS),
            "SUBGROUP": min(subgroup, shape.wg),
            "IDS": self.ids,
            "GLU": int(self.glu),
            "PROLOGUE": prologue,
            "X_TYPE": int(self.x.type == "Q8_1"),
            "Y_TYPE": int(q8_out),
            "K_TAIL": int(self.k % 32 != 0),
        }
        if self.ids:
            defines["N_USED"] = self.n_used
        if self.glu and "limit" in self.node.params:
            defines |= {f"GLU_{name.upper()}": repr(float(self.node.params[name])) for name in ("alpha", "limit")}
        if prologue:
            defines["VALUES4"] = ceil_div(self.k // 4, shape.wg)
        if self.chosen:
            defines |= {"CHOOSE": 1, **self.choice(self.node, self.extra["logits"], ctx)}
        if prologue or q8_out or self.chosen:
            defines["REDUCE_SUBGROUP"] = int(subgroup >= 8 and "arithmetic" in ctx.caps.subgroup_ops)
            defines["SUBGROUP_SIZE"] = subgroup if subgroup > 1 else 0
        defines |= {f"BIND_{role.upper()}": binding for binding, role in enumerate(self.extra, 3)}
        if (choice["stage"] or ctx.sync == "sentinel") and self.x.type == "Q8_1" and path == "int" and defines["COLS"] == 1:
            defines["PROLOGUE"] = 3
        self._fit_shared_memory(defines, choice, ctx)
        if defines["PREFETCH"] == 2 and not can_prefetch_x(defines):
            defines["PREFETCH"] = 1
        return Build(shape, defines, required, choice["groups"], choice.source)

    def _fit_shared_memory(self, defines: dict[str, str | int], choice: Choice, ctx: LowerContext) -> None:
        """Halve the tokens of a workgroup until the device's shared memory holds what they need."""
        room = ctx.caps.max_shared_memory - code_book_bytes(self.w.type, ctx.caps)
        tiles = {"TILES": int(choice["groups"] > 0)}
        while (need := shared_bytes(defines | tiles)) > room:
            if defines["PROLOGUE"] == 3:
                defines["PROLOGUE"] = 0
                continue
            if defines["COLS"] == 1:
                raise PlanError(
                    f"[mat_vec] {self.node.name}: {defines['WG']} threads of {defines['ROWS']} rows need {need} bytes of shared memory, "
                    f"{ctx.caps.name} has {room} besides the code book; {choice.source} asks for too much"
                )
            defines["COLS"] = ceil_div(int(defines["COLS"]), 2)

    def waits(self, build: Build) -> SpinWaits | None:
        """What the kernel awaits of the stage before; x must come by way of shared memory."""
        if not build.defines["PROLOGUE"] or build.columns > 1 or self.n > 1:
            return None
        first = [self.extra[role].name for role in ("ids", "expert_weights", "logits") if role in self.extra]
        if self.ids == 1 and len(self.x.shape) == 3 and self.x.shape[1] > 1:
            return SpinWaits(tuple(first), (self.x.name,))
        return SpinWaits((*first, self.x.name))

    def dispatch(self, build: Build, index: int, shard: Shard, shard_count: int, reason: str) -> Dispatch:
        """The launch for one shard of the weight."""
        rows = self.m if self.ids else shard.rows
        slices = {0: ceil_div(self.n, build.columns), 1: self.n * self.n_used, 2: self.n}[self.ids]
        tiles = ceil_div(rows, build.shape.tile_rows)
        most = ceil_div(build.groups, slices)
        groups = most if 0 < most < tiles else tiles
        gy = ceil_div(groups, MAX_GROUPS_X)
        y_row0 = int(self.node.params.get("row0", 0)) + (0 if self.ids else shard.row0 >> self.glu)
        q8_in, q8_out = self.x.type == "Q8_1", self.y.type == "Q8_1"
        push = pack_push(
            *weight_push(self.w.type, shard.layout, self.k),
            rows,
            self.k,
            self.n,
            quants.q8_1_stride(self.k) // 16 if q8_in else self.k,
            quants.q8_1_stride(self.rows_total) // 16 if q8_out else self.rows_total,
            y_row0,
            0 if self.ids else shard.row0,
            ceil_div(self.rows_total, 32),
            self.x.shape[1] if self.ids and len(self.x.shape) == 3 else 1,
            float(self.node.params.get("eps", 0.0)),
        )
        whole = self.rows_total == self.m >> self.glu and shard_count == 1
        weight_bytes = shard.layout.nbytes
        if self.ids:
            weight_bytes = weight_bytes * min(self.n * self.n_used, self.w.shape[0]) // self.w.shape[0]
        choice_moved = sum(map(nbytes, (self.extra["logits"], *self.chosen))) if self.chosen else 0
        defines = {**build.defines, "TILES": int(groups < tiles), "ROWS_FULL": int(rows % build.shape.tile_rows == 0)}
        return Dispatch(
            Variant("mat_vec/mat_vec.comp", tuple(sorted(defines.items())), build.subgroup),
            (
                Arg(self.w, "r", index),
                Arg(self.x),
                Arg(self.y, "w", part="" if whole else f"rows {y_row0}"),
                *map(Arg, self.extra.values()),
                *(Arg(t, "w") for t in self.chosen),
            ),
            push,
            (ceil_div(groups, gy), gy, slices + bool(self.chosen)),  # one more slice to store the choice
            self.node.op,
            self.node.name,
            reason,
            nbytes=weight_bytes + nbytes(self.x) + nbytes(self.y) + choice_moved,
            weight_bytes=weight_bytes,
            flops=2 * rows * self.k * self.n * self.n_used,
            waits=self.waits(build),
        )


@register
class MatVec(Op):
    """The fused form; see the module's text."""

    name = "MAT_VEC"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        by = dict(zip(params["roles"], (np.asarray(i, np.float64) if i.dtype.kind == "f" else i for i in inputs), strict=True))
        w, x = by["w"], by["x"]
        if "norm" in by:
            x = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + params["eps"]) * by["norm"]
        chosen: list[Array] = []
        if "logits" in by:
            chosen = OPS["TOPK_MOE"].reference([by["logits"]], params)
            by["ids"] = chosen[1]
        if "ids" in by:
            ids = by["ids"]
            x = np.broadcast_to(x, (*ids.shape, x.shape[-1]))
            y = np.einsum("nsmk,nsk->nsm", w[ids], x)
        else:
            y = x @ w.T
        if "bias" in by:
            y = y + (by["bias"].reshape(len(w), -1)[by["ids"]] if "ids" in by else by["bias"])
        if params.get("glu"):
            (y,) = REFERENCES["SWIGLU_OAI" if "limit" in params else "SWIGLU"]([y[..., 0::2], y[..., 1::2]], params)
        if "expert_weights" in by:
            y = np.einsum("nsm,ns->nm", y, by["expert_weights"])
        if "residual" in by:
            y = y + by["residual"]
        return [y, *chosen]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        product = MatVecNode.of(node)
        path, why = product.path(ctx)
        before: list[Dispatch] = []
        prologue = 2 if "norm" in product.extra else 0
        if product.chosen and (problem := choice_problem(node, ctx)):
            raise PlanError(f"[mat_vec] {node.name}: it cannot choose its experts: {problem}; give TOPK_MOE a node of its own")
        if prologue:
            problem = prologue_problem(product.w.type, product.k, product.n, path, ctx)
            if problem:
                raise PlanError(f"[mat_vec] {node.name}: x cannot be normed in the prologue: {problem}; give the norm a node of its own")
        elif path == "int" and product.x.type == "F32":
            x8 = Tensor(f"{node.name}.x_q8_1", "Q8_1", product.x.shape)
            before = quantize_dispatch(product.x, x8, ctx)
            product = dataclasses.replace(product, x=x8)
        build = product.build(path, prologue, ctx)
        reason = f"{path}: {why}; {build.shape.wg} threads, {build.shape.lanes} lanes, {build.shape.rows} rows: {build.source}"
        pieces = shards(product.w, ctx.caps)
        return before + [product.dispatch(build, i, piece, len(pieces), reason) for i, piece in enumerate(pieces)]

    def cases(self) -> Iterator[Case]:
        for quant in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
            for n in (1, 3):
                yield fused_case(quant, 96, 512, n, ("residual",))
                yield fused_case(quant, 96, 512, n, ("bias",))
                yield fused_case(quant, 128, 512, n, (), glu=True)
                yield fused_case(quant, 128, 512, n, ("bias",), glu=True)
                yield fused_case(quant, 128, 512, n, (), glu=True, out="Q8_1")
                yield fused_case(quant, 64, 512, n, ("ids",), glu=True)
                yield fused_case(quant, 64, 512, n, ("ids",), glu=True, out="Q8_1")
                yield fused_case(quant, 100, 256, n, ("ids", "expert_weights"))
                yield fused_case(quant, 100, 256, n, ("ids", "expert_weights", "residual"))
                yield fused_case(quant, 100, 256, n, ("bias", "ids", "expert_weights", "residual"))
                yield fused_case(quant, 64, 512, n, ("bias", "ids"), glu=True, oai=True, out="Q8_1")
            yield fused_case(quant, 128, 512, 1, ("norm",))
            yield fused_case(quant, 128, 1024, 1, ("norm",), glu=True, out="Q8_1")
            yield fused_case(quant, 64, 512, 1, ("logits",), glu=True, out="Q8_1")
            yield fused_case(quant, 64, 512, 1, ("norm", "bias", "logits"), glu=True, ties=True)
        yield fused_case("MXFP4", 192, 2880, 1, ("norm", "bias", "ids"), glu=True, oai=True, out="Q8_1")
        yield fused_case("MXFP4", 192, 2880, 1, ("norm", "bias", "logits"), glu=True, oai=True, out="Q8_1", gating="softmax_weight")
        yield fused_case("MXFP4", 100, 256, 2, (), glu=True, oai=True)
        for n in (1, 3):
            yield split_case(fused_case("Q4_K", 100, 256, n, ("bias",)), (64, 33, 3))
            yield split_case(fused_case("Q8_0", 192, 256, n, ("residual",), out="Q8_1"), (64, 32, 96))

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        product = MatVecNode.of(node)
        path, _ = product.path(ctx)
        return product_tolerance(path == "int" and product.x.type == "F32", product.y.type == "Q8_1", product.glu)


def product_tolerance(q8_in: bool, q8_out: bool, glu: bool = False) -> Tolerance:
    """One bound for all products. q8_in: x is rounded on the way; an x that comes as Q8_1 the reference sees as it is.

    Rounding to q8_1 has a step of amax/127: on uniform data an NMSE of (1/127)^2/12 * 3 = 1.5e-5, on Gaussian data about 4e-5, once for
    activations and once more where the output is stored so. In a GLU the gate's error goes through silu, which passes it on at up to
    twice its size, four times in the square: (4 gate + 1 up + 1 output) * 4e-5 = 2.4e-4, over a few dozen values twice that by chance.
    """
    if glu and (q8_in or q8_out):
        return Tolerance(5e-4, 0.25, "8-bit activations through silu(gate) * up: six times 4e-5, and as much again for few values")
    if q8_in or q8_out:
        return Tolerance(2e-4, 0.25, "8-bit activations: step amax/127 a unit, and again for a Q8_1 output")
    return Tolerance(1e-9, 2e-3, "f32 sums of k products, relative error about sqrt(k) * 2^-24")


def _rows_of(node: Node, row0: int, rows: int) -> Node:
    """The part of a MAT_VEC node that makes some rows of its output."""
    glu, total = int(bool(node.params.get("glu"))), node.outputs[0].shape[-1]

    def cut(role: str, t: Tensor) -> Tensor:
        return dataclasses.replace(t, name=f"{t.name}.{row0}", shape=(rows << glu, *t.shape[1:])) if role in ("w", "bias") else t

    inputs = tuple(cut(role, t) for role, t in zip(node.params["roles"], node.inputs, strict=True))
    return Node("MAT_VEC", inputs, node.outputs, {**node.params, "row0": row0, "rows_total": total})


def split_case(case: Case, split: tuple[int, ...]) -> Case:
    """A MAT_VEC case without ids of which nodes make so many output rows each, all into one tensor."""

    def make(rng: np.random.Generator) -> Problem:
        whole = case.make(rng)
        node, glu = whole.node, int(bool(whole.node.params.get("glu")))
        parts, values, row0 = [], dict(whole.values), 0
        for rows in split:
            part = _rows_of(node, row0, rows)
            parts.append(part)
            for t, old in zip(part.inputs, node.inputs, strict=True):
                if t.name != old.name:
                    values[t.name] = whole.values[old.name][row0 << glu : (row0 + rows) << glu]
            row0 += rows
        if row0 != node.outputs[0].shape[-1]:
            raise ValueError(f"split {split} of {node.outputs[0].shape[-1]} rows")
        return Problem(node, values, tuple(parts))

    params = {k: v for k, v in case.params.items() if k != "seed"} | {"split": split, "seed": case.seed}
    return dataclasses.replace(case, params=params, make=make)


def weight_push(quant: str, layout: quants.DeviceLayout, k: int) -> list[int]:
    """The `Weights` block of shaders/quant/weights.glsl, in 16-byte words: units, part, plane[4]."""
    stem = layout.planes[0].name.rstrip("0123456789")
    parts = sum(p.name.rstrip("0123456789") == stem for p in layout.planes)
    others = [p.offset // 16 for p in layout.planes[parts:]]
    return [ceil_div(k, 32), layout.part_stride // 16, *others, *([0] * (4 - len(others)))]


def weight(name: str, quant: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, quant, shape, "weight", Recipe("plain", (name,)))


def fused_case(
    quant: str, m: int, k: int, n: int, roles: tuple[str, ...], *, glu: bool = False, oai: bool = False, out: str = "F32",
    experts: int = 6, used: int = 3, gating: str = "softmax", norm_w: bool = True, ties: bool = False, seed: int = 7,
) -> Case:
    """A case of the fused family; with ids: `experts` experts of which each token uses `used` (expert 0 is never chosen); oai: the GLU is
    SWIGLU_OAI; with logits: gating and norm_w as TOPK_MOE's gating and norm, ties: the logits are whole numbers."""
    choosing = "logits" in roles
    choice = {"gating": gating, "norm_w": norm_w, "ties": ties} if choosing else {}

    def make(rng: np.random.Generator) -> Problem:
        routed = choosing or "ids" in roles
        shape = (experts, m, k) if routed else (m, k)
        w = weight("w", quant, shape)
        x = Tensor("x", "F32", (n, used if "expert_weights" in roles else 1, k) if routed else (n, k), "input")
        rows = m >> glu
        y_shape = (n, used, rows) if routed and "expert_weights" not in roles else (n, rows)
        outs = [Tensor("y", out, y_shape)]
        if choosing:
            outs += [Tensor("weights", "F32", (n, used)), Tensor("ids", "I32", (n, used))]
        extra = {
            "norm": Tensor("norm", "F32", (k,), "weight"),
            "bias": Tensor("bias", "F32", (experts * m if routed else m,), "weight"),
            "residual": Tensor("residual", "F32", y_shape, "input"),
            "ids": Tensor("ids", "I32", (n, used), "input"),
            "logits": Tensor("logits", "F32", (n, experts), "input"),
            "expert_weights": Tensor("expert_weights", "F32", (n, used), "input"),
        }
        inputs = [extra[r] for r in FUSED_ROLES if r in roles]
        params = {"roles": ("w", "x", *(r for r in FUSED_ROLES if r in roles)), "glu": glu, "eps": 1e-5, **(SWIGLU_OAI if oai else {})}
        if choosing:
            params |= {"n_used": used, "norm": norm_w, "gating": gating, "scale": 1.5}
        node = Node("MAT_VEC", (w, x, *inputs), tuple(outs), params)
        values: dict[str, Array] = {
            "w": quants.random_blocks(quant, prod(shape[:-1]), k, rng, std=0.5),
            "x": rng.uniform(-1, 1, x.shape).astype(np.float32),
        }
        for t in inputs:
            values[t.name] = rng.uniform(-1, 1, t.shape).astype(np.float32)
        if "ids" in roles:
            values["ids"] = np.stack([rng.permutation(np.arange(1, experts))[:used] for _ in range(n)]).astype(np.int32)
        if choosing:
            logits = 3 * rng.standard_normal((n, experts), np.float32)
            values["logits"] = np.round(logits) if ties else logits
        return Problem(node, values)

    params = {"type_a": quant, "m": m, "n": n, "k": k, "fused": "+".join(roles) or "none", "glu": glu, "out": out}
    return Case("MAT_VEC", params | ({"oai": True} if oai else {}) | choice | {"seed": seed}, make, seed)


def mul_mat_case(quant: str, m: int, n: int, k: int, *, seed: int = 7) -> Case:
    def make(rng: np.random.Generator) -> Problem:
        w, x = weight("w", quant, (m, k)), Tensor("x", "F32", (n, k), "input")
        node = Node("MUL_MAT", (w, x), (Tensor("y", "F32", (n, m)),))
        return Problem(node, {"w": quants.random_blocks(quant, m, k, rng, std=0.5), "x": rng.uniform(-1, 1, (n, k)).astype(np.float32)})

    return Case("MUL_MAT", {"type_a": quant, "type_b": "f32", "m": m, "n": n, "k": k, "seed": seed}, make, seed)


def mul_mat_id_case(quant: str, experts: int, used: int, m: int, n: int, k: int, *, shared: bool, seed: int = 7) -> Case:
    def make(rng: np.random.Generator) -> Problem:
        w = weight("w", quant, (experts, m, k))
        x = Tensor("x", "F32", (n, 1 if shared else used, k), "input")
        ids = Tensor("ids", "I32", (n, used), "input")
        node = Node("MUL_MAT_ID", (w, x, ids), (Tensor("y", "F32", (n, used, m)),))
        return Problem(node, {
            "w": quants.random_blocks(quant, experts * m, k, rng, std=0.5),
            "x": rng.uniform(-1, 1, x.shape).astype(np.float32),
            "ids": np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32),
        })

    params = {"type_a": quant, "type_b": "f32", "n_mats": experts, "n_used": used, "b": shared, "m": m, "n": n, "k": k, "seed": seed}
    return Case("MUL_MAT_ID", params, make, seed)
