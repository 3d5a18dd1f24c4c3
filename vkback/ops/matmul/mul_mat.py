"""MUL_MAT and MUL_MAT_ID: what the graph asks for, as the GEMV family carries it out (gemv, mul_mat_batched)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Rounded, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Dispatch
from vkback.ops.general import random_values
from vkback.ops.ggml_words import FLOATS, Four, one_of_types, sized, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import batched
from vkback.ops.matmul.case_sets import (
    BASE,
    full_mul_mat,
    full_mul_mat_id,
    paths,
    perf_mul_mat,
    perf_mul_mat_id,
    prompts_mul_mat,
    prompts_mul_mat_id,
    scaled_sums,
)
from vkback.ops.matmul.choice import ProductChoice
from vkback.ops.matmul.linear import Linear
from vkback.ops.matmul.linear_cases import UNSAID, UNSAID_OF_EXPERTS, known_type, mul_mat_case, mul_mat_id_case, with_x
from vkback.ops.matmul.linear_node import QUANTS, weight
from vkback.ops.op import Op, Tape, register
from vkback.ops.storage import nbytes
from vkback.ops.view import ORDERS, TRANSPOSED, View, laid_out

RARE = frozenset(name for name in QUANTS if quants.quant(name).rare)
"""Types that few models have: they get a part of the cases."""

ORDERLY: Four = (0, 1, 2, 3)


class _Plain(Op):
    """MUL_MAT and MUL_MAT_ID: the fused op with no fusion."""

    roles: tuple[str, ...]
    ggml_nmse = 5e-4
    weight_type = "type_a"
    shares_weights = True
    formula = "X*Y"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """A multiply-add for each value of a row and each value of the output."""
        w = node.params["w_view"].shape if "w_view" in node.params else node.inputs[0].shape
        return {"fmul": w[-1] * node.outputs[0].elements}

    def fused(self, node: Node) -> Node:
        """The node in the fused op."""
        return dataclasses.replace(node, op="LINEAR", params={**node.params, "roles": self.roles})

    def choose(self, node: Node, ctx: LowerContext) -> ProductChoice | None:
        return Linear().choose(self.fused(node), ctx)

    def as_f16(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> list[Array] | None:
        return Linear().as_f16(inputs, self.fused(node), ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return [dataclasses.replace(d, op=node.op) if d.op == "LINEAR" else d for d in Linear().lower(self.fused(node), ctx)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Linear().tolerance(self.fused(node), ctx)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        return Linear().rounded(inputs, self.fused(node), ctx)


TOKENS_IN_TURN = ((1, 2, 5, 8, 17), (1, 3, 9, 17), (1, 2, 16, 17))
"""Numbers of tokens that types take in turn in the quick set: each is a kernel, which takes a CPU driver a second to compile. The full set
has all of them of every type."""


@register
class MulMat(_Plain):
    """MUL_MAT(w [m, k], x F32 or Q8_1 [n, k]) -> F32 [n, m].

    Batched: w [b3, b2, m, k], x [r3 * b3, r2 * b2, n, k] -> [r3 * b3, r2 * b2, n, m]; r2 (r3) slices of x in a row share a matrix. w may be
    F32, F16 or BF16 that is no weight, x F16 or BF16, and either a view of its tensor (params `w_view`, `x_view`). Further matrices behind
    x make an output each.
    """

    name = "MUL_MAT"
    roles = ("w", "x")

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """dx = dy w, dw = dy^T x."""
        w, x, *more = node.inputs
        if more or len(w.shape) != 2 or len(x.shape) != 2 or node.params:
            return super().backward(node, dy, tape)
        dw = tape.kept(w)
        if dw is not None:
            tape.add("OUT_PROD", (x, dy, dw), (dw,))
        elif tape.wants(w):
            dw = tape.emit("OUT_PROD", w, (x, dy))
        return [dw, tape.emit("MUL_MAT_BACK", x, (dy, w)) if tape.wants(x) else None]

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, x, *more = inputs
        if more:
            return [y for each in (w, *more) for y in self.reference((each, x), params)]
        if w.ndim == x.ndim == 2 and not any(view in params for view in batched.VIEWS):
            return [np.asarray(x, np.float64) @ np.asarray(w, np.float64).T]
        return [batched.reference(params, inputs)]

    def choose(self, node: Node, ctx: LowerContext) -> ProductChoice | None:
        if len(node.outputs) > 1:
            return None
        return batched.choose_kernel(node, ctx) if batched.is_batched(node) else super().choose(node, ctx)

    def as_f16(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> list[Array] | None:
        return None if len(node.outputs) > 1 or batched.is_batched(node) else super().as_f16(inputs, node, ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if len(node.outputs) > 1:
            return [d for one in _products(node) for d in self.lower(one, ctx)]
        return batched.lower(node, ctx) if batched.is_batched(node) else super().lower(node, ctx)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        node = _products(node)[0]
        return batched.tolerance(node, ctx) if batched.is_batched(node) else super().tolerance(node, ctx)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        w, x, *more = inputs
        if more:
            found = [self.rounded((each, x), one, ctx) for each, one in zip((w, *more), _products(node), strict=True)]
            own = [r for r in found if r is not None]
            return Rounded([r.outputs[0] for r in own], own[0].tolerance) if len(own) == len(found) else None
        return batched.rounded(inputs, node, ctx) if batched.is_batched(node) else super().rounded(inputs, node, ctx)

    def cases(self) -> Iterator[Case]:
        for number, quant in enumerate(QUANTS):
            if quant in RARE:
                yield mul_mat_case(quant, 19, 5, 256)
                yield mul_mat_case(quant, 131, 1, 2048)
                yield mul_mat_case(quant, 33, 2, 2048)
                yield _with_a_tail(quant)
                continue
            group = number % len(TOKENS_IN_TURN)
            for n in (1, 2, 3, 5, 8, 9, 16, 17) if quant in ("Q4_K", "Q8_0") else TOKENS_IN_TURN[group]:
                yield mul_mat_case(quant, 16, n, 256)
            if group == 0:
                yield mul_mat_case(quant, 1, 9, 256)  # several tokens: a single value may be small by chance, and its NMSE large
            yield mul_mat_case(quant, 131, 1, 2048)
            yield mul_mat_case(quant, 33, 2, 4096)
            yield _with_a_tail(quant)
            if quants.QUANTS[quant].block_values <= 32:
                yield mul_mat_case(quant, 21, 1, 96)
        for quant, n in (("Q4_K", 32), ("Q8_0", 12), ("F16", 9), ("IQ4_XS", 24)):
            yield mul_mat_case(quant, 67, n, 512)
            yield mul_mat_case(quant, 67, n, 512).where(exact=True)
        for quant in ("Q4_0", "Q8_0", "MXFP4"):  # software prefetch of w and x, several tiles a workgroup
            yield mul_mat_case(quant, 35, 1, 7 * 32).where(lanes=4, rows=2, unroll=2, prefetch="weights+x", groups=3)
        yield mul_mat_case("Q4_K", 35, 1, 5 * 256).where(lanes=4, rows=2, unroll=2, lane_order="blocked", prefetch="weights", groups=3)
        yield mul_mat_case("Q6_K", 203, 2, 256).where(range=20_000)  # shards of 64 rows
        for quant in ("F32", "F16", "BF16"):
            for k in (65, 80, 588):
                yield mul_mat_case(quant, 17, 2, k)
        for quant in ("Q4_0", "Q8_0", "MXFP4", "Q5_1"):
            yield mul_mat_case(quant, 40, 1, 2880)
        for quant in ("F32", "Q4_K", "Q8_0"):
            yield batched_case(quant, 17, 3, 256, (1, 3), (2, 2))
            yield batched_case(quant, 17, 2, 256, (3, 2), (1, 2), order=(0, 2, 1, 3), gap=256)
        yield batched_case("Q8_0", 35, 37, 96, (1, 3), (1, 2))  # a grouped GEMM
        yield from scaled_sums()
        yield from prompts_mul_mat()
        yield batched_case("F16", 17, 3, 80, (2, 2), (1, 3), order=(0, 1, 3, 2), plain=True, type_b="f16")
        yield batched_case("F32", 5, 4, 65, (1, 1), (2, 3), plain=True)

    def full_cases(self) -> Iterator[Case]:
        yield from full_mul_mat()
        yield from full_batched()
        for quant, x_type in product(("F32", "F16", "BF16"), ("f32", "f16", "bf16")):
            for bs, nr, per in product(((1, 1), (3, 2)), ((1, 1), (2, 1)), (ORDERLY, (0, 2, 1, 3), (1, 0, 2, 3))):
                yield self.build_case(quant, 16, 3, 64, x_type, bs, nr, per)
            yield self.build_case(quant, 8, 16, 64, x_type, (8, 1), m_v=5120)
            yield self.build_case(quant, 8, 16, 64, x_type, (8, 1), m_v=16, pad=16)
        for type in ("f32", "f16"):
            yield self.build_case(type, 32, 4, 96, type, (3, 2), src_overlap=1)
        for quant, n in product(("F32", "Q4_K", "Q8_0"), (1, 8)):
            yield self.build_case(quant, 16, n, 256, o=3)

    def perf_cases(self) -> Iterator[Case]:
        return perf_mul_mat()

    def case(self, params: Mapping[str, Any]) -> Case:
        return super().case(UNSAID | dict(params))

    def build_case(
        self,
        type_a: str,
        m: int,
        n: int,
        k: int,
        type_b: str = "f32",
        bs: tuple[int, int] = (1, 1),
        nr: tuple[int, int] = (1, 1),
        per: Four = ORDERLY,
        k_v: int = 0,
        o: int = 1,
        src_overlap: int = 0,
        m_v: int = 0,
        pad: int = 0,
        plain: bool = False,
        act: str = "auto",
        amax: float = 1.0,
        seed: int = 7,
    ) -> Case:
        """bs matrices (the faster axis first), each for nr slices of x; o of them one after the other on the same x. (test-backend-ops
        takes one matrix o times and judges the sum of the products; here each has a matrix and an output of its own: none hides another.)

        per          axis i of the operands in memory (0 the fastest) is axis per[i] of what is multiplied
        k_v          values between the rows of both operands in memory, where it is not k; of w with `pad` more than k instead
        m_v          rows between w's matrices in memory, where it is not m
        src_overlap  w and x are views of one tensor, x from the middle of w on
        plain        w is no weight but F32, F16 or BF16 that the device has, as a cache is
        act, amax    as of a weight times some tokens (`mul_mat_case`)
        """
        quant = known_type(type_a)
        layout = _OperandLayout((bs[1], bs[0]), (nr[1], nr[0]), per, k_v, src_overlap, m_v, pad)
        try:
            quants.row_bytes(quant, k)
            quants.row_bytes(quant, max(k, k_v) + pad)
        except quants.QuantShapeError as e:
            raise CaseLineError(f"MUL_MAT: {e}") from e
        if min(m, n, k, *bs, *nr, o) < 1 or o > 16:
            raise CaseLineError(f"MUL_MAT: m={m}, n={n}, k={k}, bs={list(bs)}, nr={list(nr)}, o={o}: expected all from 1, o up to 16")
        sized((*layout.batch, m, k))
        sized((*layout.batch, *layout.repeat, n, max(m, k)))
        if (layout, o, plain) == (_OperandLayout(), 1, False) and type_b in ("f32", "q8_1"):
            return mul_mat_case(quant, m, n, k, type_b=type_b, act=act, amax=amax, seed=seed)
        if amax != 1.0:
            raise PlanError(f"amax={amax}: only of a weight of two axes times some tokens")
        return _strided_case(quant, m, n, k, layout, o=o, plain=plain, type_b=type_b, act=act, seed=seed)


def _products(node: Node) -> list[Node]:
    """A node for each output of a MUL_MAT."""
    w, x, *more = node.inputs
    return [Node(node.op, (each, x), (y,), node.params) for each, y in zip((w, *more), node.outputs, strict=True)]


def _with_a_tail(quant: str) -> Case:
    """Rows of five blocks of 256: the units of a row are no multiple of those that the lanes of two subgroups take at once, so that some of
    them have none in the end, and partial sums go through shared memory."""
    return mul_mat_case(quant, 35, 1, 5 * 256).where(wg=32, lanes=16, rows=2, unroll=2)


@register
class MulMatId(_Plain):
    """MUL_MAT_ID(w [n_expert, m, k], x F32 [n, 1 or n_used, k], ids I32 [n, n_used]) -> F32 [n, n_used, m]."""

    name = "MUL_MAT_ID"
    roles = ("w", "x", "ids")
    formula = "X[z]*Y"

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the experts' matrices as many as there are tokens times experts used: tokens that share an expert are not foreseen."""
        w, _, ids = node.inputs
        return nbytes(w) // w.shape[0] * min(w.shape[0], ids.elements) if tensor.name == w.name else nbytes(tensor)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        w, x, ids = inputs
        w = self._viewed(w, params)
        x = np.broadcast_to(np.asarray(x, np.float64), (*ids.shape, x.shape[-1]))
        out = np.zeros((*ids.shape, w.shape[1]))
        for expert in np.unique(ids):
            chosen = ids == expert
            out[chosen] = x[chosen] @ np.asarray(w[expert], np.float64).T
        return [out]

    def cases(self) -> Iterator[Case]:
        for quant in QUANTS:
            if quant in RARE:
                yield mul_mat_id_case(quant, 4, 2, 24, 2, 256, shared=True)
                continue
            for experts, used in ((4, 1), (8, 2), (8, 4)):
                for n in (1, 5):
                    yield mul_mat_id_case(quant, experts, used, 32, n, 256, shared=used != 4)
        yield mul_mat_id_case("Q8_0", 8, 3, 21, 2, 96, shared=False)
        yield from prompts_mul_mat_id()
        for quant, n in (("Q4_K", 32), ("MXFP4", 12)):
            yield mul_mat_id_case(quant, 8, 2, 40, n, 256, shared=True)
            yield mul_mat_id_case(quant, 8, 2, 40, n, 256, shared=True).where(exact=True)
        yield mul_mat_id_case("Q5_K", 4, 2, 35, 1, 1280, shared=True).where(wg=32, lanes=16, rows=2, unroll=2)

    def full_cases(self) -> Iterator[Case]:
        yield from full_mul_mat_id()
        for quant, shared in product(("F32", "F16", "BF16", "Q4_0"), (False, True)):
            yield self.build_case(quant, 4, 2, 8, 16, 64, b=shared, m_v=64)

    def perf_cases(self) -> Iterator[Case]:
        return perf_mul_mat_id()

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if "w_view" not in node.params and node.inputs[1].type in ("F32", "Q8_1"):
            return super().lower(node, ctx)
        before, w = batched.weight_operand(node, ctx)
        copies, x = batched.token_operand(node, ctx)
        plain = Node(node.op, (self._as_weight(node, w), x, node.inputs[2]), node.outputs)
        return [*before, *copies, *(self._back(d, w) for d in super().lower(plain, ctx))]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return super().tolerance(self._plain_node(node), ctx)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        w, x, ids = inputs
        return super().rounded((self._viewed(w, node.params), x, ids), self._plain_node(node), ctx)

    @staticmethod
    def _viewed(w: Array, params: Mapping[str, Any]) -> Array:
        return params["w_view"].of(np.ascontiguousarray(w)) if "w_view" in params else w

    def _plain_node(self, node: Node) -> Node:
        """The node on what its views show."""
        if "w_view" not in node.params and node.inputs[1].type in ("F32", "Q8_1"):
            return node
        w, x, ids = node.inputs
        kind = "F32" if "w_view" in node.params else w.type
        shape = node.params["w_view"].shape if "w_view" in node.params else w.shape
        inputs = (dataclasses.replace(w, type=kind, shape=shape, kind="weight"), dataclasses.replace(x, type="F32"), ids)
        return Node(node.op, inputs, node.outputs)

    @staticmethod
    def _as_weight(node: Node, w: Tensor) -> Tensor:
        return dataclasses.replace(w, shape=node.params["w_view"].shape, kind="weight") if "w_view" in node.params else w

    @staticmethod
    def _back(d: Dispatch, w: Tensor) -> Dispatch:
        """The dispatch on the copy of w as the tensor that it is."""
        return dataclasses.replace(d, args=tuple(dataclasses.replace(a, tensor=w) if a.tensor.name == w.name else a for a in d.args))

    def case(self, params: Mapping[str, Any]) -> Case:
        return super().case(UNSAID_OF_EXPERTS | dict(params))

    def build_case(
        self,
        type_a: str,
        n_mats: int,
        n_used: int,
        m: int,
        n: int,
        k: int,
        type_b: str = "f32",
        b: bool = True,
        amax: float = 1.0,
        m_v: int = 0,
        ids: str = "shuffled",
        act: str = "auto",
        seed: int = 7,
    ) -> Case:
        """n_mats experts, of which each token uses n_used; b: they share its x; m_v: rows between the experts in memory, where it is not m;
        ids: one of ROUTES."""
        quant = known_type(type_a)
        try:
            quants.row_bytes(quant, k)
        except quants.QuantShapeError as e:
            raise CaseLineError(f"MUL_MAT_ID: {e}") from e
        if min(m, n, k, n_used) < 1 or n_used > n_mats or m_v < 0 or 0 < m_v < m:
            given = f"m={m}, n={n}, k={k}, n_mats={n_mats}, n_used={n_used}, m_v={m_v}"
            raise CaseLineError(f"MUL_MAT_ID: {given}: expected sizes from 1, n_used up to n_mats, m_v 0 or at least m")
        sized((n_mats, m_v or m, k))
        sized((n, n_used, max(m, k)))
        case = mul_mat_id_case(quant, n_mats, n_used, m, n, k, shared=b, type_b=type_b, ids=ids, act=act, amax=amax, seed=seed)
        return with_rows_between(case, m_v) if m_v else case


def with_rows_between(case: Case, m_v: int) -> Case:
    """A MUL_MAT_ID whose experts are the first rows of m_v each; a weight of floats becomes a tensor that is none."""

    def make(rng: np.random.Generator) -> Problem:
        problem = case.make(rng)
        w, *rest = problem.node.inputs
        experts, _, k = w.shape
        inner = (experts, m_v, k)
        bare = w.type in FLOATS
        whole = Tensor("w", w.type, inner, "state") if bare else weight("w", w.type, inner)
        data = random_values(w.type, inner, rng) if bare else quants.random_blocks(w.type, experts * m_v, k, rng, std=0.5)
        node = Node("MUL_MAT_ID", (whole, *rest), problem.node.outputs, {"w_view": View(0, w.shape, (m_v * k, k, 1))})
        return Problem(node, {**problem.values, "w": data})

    return dataclasses.replace(case, params={**case.params, "m_v": m_v}, make=make, bare=None)


@dataclasses.dataclass(frozen=True)
class _OperandLayout:
    """Layout in memory of the operands of a batched MUL_MAT; see `MulMat.build_case`. batch and repeat with the slower axis first."""

    batch: tuple[int, int] = (1, 1)
    repeat: tuple[int, int] = (1, 1)
    per: Four = ORDERLY
    k_v: int = 0
    src_overlap: int = 0
    m_v: int = 0
    pad: int = 0

    def checked(self, m: int, k: int) -> _OperandLayout:
        """Raises CaseLineError."""
        if sorted(self.per) != [0, 1, 2, 3]:
            raise CaseLineError(f"MUL_MAT: per=[{','.join(map(str, self.per))}]: expected an order of 0 to 3")
        for key, value, least in (("k_v", self.k_v, k), ("m_v", self.m_v, m), ("pad", self.pad, 0)):
            if (value and value < least) or value < 0:
                raise CaseLineError(f"MUL_MAT: {key}={value}: expected 0, or at least {least}")
        if self.src_overlap not in (0, 1):
            raise CaseLineError(f"MUL_MAT: src_overlap={self.src_overlap}: expected 0 or 1")
        return self

    def viewed(self, shape: Shape, rows: int, columns: int) -> tuple[Shape, View]:
        """A tensor with so many rows and columns in place of the last two sizes of `shape`, its axes by `per`, and the view of `shape`."""
        order = tuple(3 - self.per[3 - i] for i in range(4))
        inner, view = laid_out((*shape[:2], rows, columns), order)
        return sized(inner), View(0, shape, view.strides)


def _strided_case(
    quant: str, m: int, n: int, k: int, layout: _OperandLayout, *, o: int, plain: bool, type_b: str, act: str, seed: int
) -> Case:
    layout.checked(m, k)
    if type_b == "q8_1" and (o > 1 or layout.src_overlap):
        raise PlanError(f"type_b=q8_1 with o={o}, src_overlap={layout.src_overlap}: quantized activations come in one tensor of their own")
    x_type = "F32" if type_b == "q8_1" else one_of_types(type_b, FLOATS, "type_b")
    w_shape = (*layout.batch, m, k)
    x_shape = (layout.batch[0] * layout.repeat[0], layout.batch[1] * layout.repeat[1], n, k)
    w_inner, w_view = layout.viewed(w_shape, layout.m_v or m, (layout.k_v or k) + layout.pad)
    x_inner, x_view = layout.viewed(x_shape, n, layout.k_v or k)
    moved = w_view != View.whole(w_shape) or x_view != View.whole(x_shape) or bool(layout.src_overlap)
    # A weight is stored in the layout of the device; operands with strides are plain memory.
    bare = plain or (moved and quant in FLOATS)
    if plain and quant not in FLOATS:
        raise PlanError(f"plain=1 with type_a={type_word(quant)}: quantized values are always a weight")
    if layout.src_overlap and (quant != x_type or o > 1):
        raise PlanError(f"src_overlap=1 with type_a={type_word(quant)}, type_b={type_b}, o={o}: operands overlap that have one type")
    if moved and quant not in FLOATS and w_view.strides[3] != 1:
        raise PlanError(f"per={list(layout.per)} with type_a={type_word(quant)}: rows of quantized values cannot be taken apart")
    # The second operand begins in the middle of the first: both read the same memory.
    start = prod(w_inner) // 2
    joint = sized((max(prod(w_inner), start + prod(x_inner)),))

    def make(rng: np.random.Generator) -> Problem:
        y_shape = (*x_shape[:2], n, m)
        ys = tuple(Tensor(f"y{i}" if i else "y", "F32", y_shape) for i in range(o))
        if layout.src_overlap:
            both = Tensor("wx", quant, joint, "input")
            views = {"w_view": w_view, "x_view": View(start, x_view.shape, x_view.strides)}
            return Problem(Node("MUL_MAT", (both, both), ys, views), {"wx": random_values(quant, joint, rng)})
        names = ["w", *(f"w{i}" for i in range(1, o))]
        ws = [Tensor(name, quant, w_inner, "state") if bare else weight(name, quant, w_inner) for name in names]
        x = Tensor("x", x_type, x_inner, "input")
        values: dict[str, Array] = {}
        for w in ws:
            values[w.name] = (
                random_values(quant, w_inner, rng) if bare else quants.random_blocks(quant, prod(w_inner[:-1]), w_inner[-1], rng, std=0.5)
            )
        values["x"] = random_values(x_type, x_inner, rng)
        params = {"w_view": w_view, "x_view": x_view} if moved else {}
        return Problem(Node("MUL_MAT", (ws[0], x, *ws[1:]), ys, params), values)

    shown: dict[str, Any] = {
        "type_a": type_word(quant),
        "type_b": type_word(x_type),
        "m": m,
        "n": n,
        "k": k,
        "bs": layout.batch[::-1],
        "nr": layout.repeat[::-1],
        "per": layout.per,
        "k_v": layout.k_v,
        "o": o,
        "src_overlap": layout.src_overlap,
        "m_v": layout.m_v,
        "pad": layout.pad,
    }
    shown |= {"plain": 1} if plain else {}
    return with_x(Case("MUL_MAT", {**shown, "seed": seed}, make, seed), "f32" if type_b == "bf16" else type_b, act, [])


def batched_case(
    quant: str,
    m: int,
    n: int,
    k: int,
    batch: tuple[int, int],
    repeat: tuple[int, int],
    *,
    type_b: str = "f32",
    act: str = "auto",
    order: Shape = (),
    gap: int = 0,
    plain: bool = False,
    seed: int = 7,
) -> Case:
    """A batched MUL_MAT: w [*batch, m, k], x [repeat times batch, n, k].

    type_b      "f32", "f16", or "q8_1" for activations that come quantized
    order, gap  axes of both operands in memory from the slowest to the fastest, and how many values more their rows have there
    plain       w is no weight but F32 or F16 that the device has, as a cache is
    """
    order = order or (0, 1, 2, 3)
    per = cast(Four, tuple(3 - order[3 - i] for i in range(4)))
    layout = _OperandLayout(batch, repeat, per, k + gap if gap else 0)
    return _strided_case(quant, m, n, k, layout, o=1, plain=plain, type_b=type_b, act=act, seed=seed)


def full_batched() -> Iterator[Case]:
    """As attention multiplies by its cache, and more: every type in a few shapes, base types in many."""
    repeats = ((1, 1), (1, 2), (2, 1), (2, 2))
    for quant in QUANTS:
        for path in paths(quant):
            for bs, nr, n in product(((1, 1), (1, 3), (2, 3)), repeats, (1, 4, 8, 16) if quant in BASE else (2,)):
                yield batched_case(quant, 16, n, 256, bs, nr, **path)
        for order, n in product(ORDERS, (1, 8, 16) if quant in BASE else (2,)):
            yield batched_case(quant, 16, n, 256, (3, 2), (1, 1), order=order)
        for n, k in product((1, 4), (256, 768)):
            yield batched_case(quant, 19, n, k, (1, 2), (1, 2), gap=256)
    for quant, x_type, n in product(("F32", "F16"), ("f32", "f16"), (1, 2, 8)):
        for m, k, nr in product((127, 128, 129, 1056), (64, 65, 128), ((1, 1), (1, 4))):
            if m < 1000 or k == 128:
                yield batched_case(quant, m, n, k, (1, 2), nr, plain=True, type_b=x_type)
        for order, gap, k in product((*ORDERS, *TRANSPOSED), (0, 64), (32, 80)):
            yield batched_case(quant, 40, n, k, (2, 3), (1, 2), order=order, gap=gap, plain=True, type_b=x_type)
    for quant in BASE:
        yield batched_case(quant, 8, 2, 256, (1, 1536), (1, 1))
        yield batched_case(quant, 70, 130, 256, (1, 5), (1, 1))
