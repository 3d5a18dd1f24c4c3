"""ATTENTION (shaders/attention/general.comp): attention with everything that FLASH_ATTN_EXT of test-backend-ops has, whose lines it runs.

    ATTENTION  q F32 [sequences, n_head, n, hsk], k [.., n_head_kv, kv, hsk], v [.., n_head_kv, kv, hsv] of any plain or quantized type
               [, mask F16 [sequences, heads, n, kv]] [, sinks F32 [n_head]] -> F32 [sequences, n, n_head, hsv]
               params: scale, has_mask, has_sinks [, max_bias, softcap] [, views of q, k, v]

A score is scale * q . k, or softcap * tanh(scale * q . k / softcap), plus slope * mask, slope being 1 without ALiBi (max_bias 0). A
sink is a logit without a value. A query that sees no row gives zeros. K and V that are not F32 are made so first. Of models those with
ALiBi take it, which make vectors of texts and have no cache; the kernels of others, which read a cache as it is, are in flash.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.as_floats import as_floats
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.general import rounded_to, views_of
from vkback.ops.ggml_words import operand, sized, tensor_type, type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import VALUE_BYTES, in_planes, nbytes
from vkback.ops.view import View
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant

SIZES = ((128, 4), (640, 2))
"""Longest head of K or V, and queries that a workgroup then takes: 14 KiB of shared memory at most."""

ROWS = 128
"""Rows of K that a workgroup scores at once, a thread each."""


def slopes(heads: int, max_bias: float) -> Array:
    """ALiBi's slope of each head: of the largest power of two of heads n the powers of 2^(-max_bias / n), of further ones the odd powers of
    its root."""
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-max_bias / n * (h + 1)) for h in range(n)]
    return np.array(first + [2.0 ** (-max_bias / 2 / n * (2 * h + 1)) for h in range(heads - n)])


def operands(node: Node) -> tuple[View, View, View]:
    """Views of q, k and v."""
    views = [views_of(node.params).get(i, View.whole(t.shape)) for i, t in enumerate(node.inputs[:3])]
    return views[0], views[1], views[2]


@register
class Attention(Op):
    """Attention of queries over K and V under a mask; see the module's text."""

    name = "ATTENTION"
    ggml_nmse = 5e-4

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
        rest = list(inputs[3:])
        sequences, heads, n, _ = q.shape
        mask = np.asarray(rest.pop(0), np.float64) if params["has_mask"] else None
        sinks = np.asarray(rest.pop(0), np.float64) if params["has_sinks"] else None
        softcap, max_bias = params.get("softcap", 0.0), params.get("max_bias", 0.0)
        slope = slopes(heads, max_bias) if max_bias else np.ones(heads)
        out = np.zeros((sequences, n, heads, v.shape[3]))
        for s, h in np.ndindex(sequences, heads):
            kv_head = h * k.shape[1] // heads
            scores = q[s, h] @ k[s % len(k), kv_head].T * params["scale"]
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if mask is not None:
                scores = scores + slope[h] * mask[s % mask.shape[0], h % mask.shape[1], :n]
            top = scores.max(axis=-1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[h])
            weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
            total = weights.sum(axis=-1, keepdims=True) + (0.0 if sinks is None else np.exp(sinks[h] - top))
            out[s, :, h] = weights / np.where(total > 0, total, 1.0) @ v[s % len(v), kv_head]
        return [out]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, k, v, *rest = node.inputs
        y = node.outputs[0]
        q_view, k_view, v_view = operands(node)
        mask = rest.pop(0) if node.params["has_mask"] else None
        sinks = rest.pop(0) if node.params["has_sinks"] else None
        sequences, heads, n, k_dim = q_view.shape
        kv_heads, kv, v_dim = k_view.shape[1], k_view.shape[2], v_view.shape[3]
        if k_view.shape[3] != k_dim or v_view.shape[1:3] != k_view.shape[1:3] or heads % kv_heads:
            raise PlanError(f"[{self.name}] {node.name}: q {q_view.shape}, k {k_view.shape}, v {v_view.shape}: heads do not fit")
        if k_view.shape[0] not in (1, sequences) or v_view.shape[0] != k_view.shape[0] or y.shape != (sequences, n, heads, v_dim):
            raise PlanError(f"[{self.name}] {node.name}: {sequences} sequences of q, {k_view.shape[0]} of k, output {y}")
        if mask and (mask.type != "F16" or len(mask.shape) != 4 or mask.shape[2] < n or mask.shape[3] != kv):
            raise PlanError(f"[{self.name}] {node.name}: mask {mask}: expected F16 [sequences, heads, {n} or more, {kv}]")
        found = [size for size in SIZES if max(k_dim, v_dim) <= size[0]]
        if not found:
            raise PlanError(f"[{self.name}] {node.name}: heads of {k_dim} and {v_dim} values; at most {SIZES[-1][0]}")
        most, queries = found[0]
        copies, q_rows = as_floats(node, ctx, q, q_view)
        k_copies, k_rows, k_at = _rows(node, ctx, k, k_view)
        copies += k_copies
        # V may be K under another name, or a part of its rows: one copy serves both.
        if k.name == v.name and k_view.shape[:3] == v_view.shape[:3] and (k_view.offset, k_view.strides) == (v_view.offset, v_view.strides):
            v_rows, v_at = k_rows, k_at
        else:
            v_copies, v_rows, v_at = _rows(node, ctx, v, v_view)
            copies += v_copies
        wg = workgroup_size(ctx.caps, ROWS, kv)
        defines, subgroup = reduction(ctx.caps, wg)
        scale, softcap = float(node.params["scale"]), float(node.params.get("softcap", 0.0))
        push = pack_push(
            n,
            heads,
            kv_heads,
            kv,
            k_dim,
            v_dim,
            k_at.offset,
            v_at.offset,
            *_steps(k_at),
            *_steps(v_at),
            *(mask.shape[:3] if mask else (1, 1, 1)),
            int(mask is not None),
            int(sinks is not None),
            scale / softcap if softcap else scale,
            softcap,
            float(node.params.get("max_bias", 0.0)),
        )
        return [
            *copies,
            Dispatch(
                Variant.of("attention/general.comp", {**defines, "QUERIES": queries, "MAX_DIM": most}, subgroup_size=subgroup),
                (Arg(q_rows), Arg(k_rows), Arg(v_rows), Arg(mask or q_rows), Arg(sinks or q_rows), Arg(y, "w")),
                push,
                (ceil_div(heads // kv_heads * n, queries), kv_heads, sequences),
                node.op,
                node.name,
                f"{wg} threads, {queries} queries a workgroup: nothing to choose",
                nbytes=nbytes(q_rows) + nbytes(y) + 4 * k_view.elements + 4 * v_view.elements,
                flops=2 * sequences * heads * n * kv * (k_dim + v_dim),
            ),
        ]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """A multiply-add for each value of K and V and each query, an exponential for each score."""
        (sequences, heads, n, k_dim), _, v_view = (v.shape for v in operands(node))
        scores = sequences * heads * n * v_view[2]
        return {"fmul": scores * (k_dim + v_view[3]), "fexp": scores}

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-10, 1e-4, "f32 sums; exp of logits up to 20 is off by 5e-6, the worst element by a few times that")

    def build_case(
        self,
        hsk: int = 128,
        hsv: int = 128,
        nh: int = 32,
        nr23: tuple[int, int] = (1, 1),
        kv: int = 96,
        nb: int = 8,
        mask: bool = True,
        sinks: bool = False,
        max_bias: float = 0.0,
        logit_softcap: float = 0.0,
        prec: str = "f32",
        type_K: str = "f16",  # noqa: N803
        type_V: str = "",  # noqa: N803
        permute: tuple[int, int, int, int] = (0, 1, 2, 3),
        kv_view: bool = True,
        v_is_view_of_k: bool = False,
        n_kv_max: int = 0,
        seed: int = 1,
    ) -> Case:
        """hsk, hsv: head sizes, nh: kv heads, nr23: heads a kv head, sequences; kv: rows, nb: tokens. prec asks for f32 sums, which there
        are always. permute: order of the axes in memory; kv_view: k and v are parts of tensors twice as long; n_kv_max: rows that the
        mask lets a token see, 0: most."""
        kind_k, kind_v = tensor_type(type_K, "type_K"), tensor_type(type_V or type_K, "type_V")
        if prec not in ("f32", "def"):
            raise CaseLineError(f"prec={prec}: expected f32 or def")
        if sorted(permute) != [0, 1, 2, 3] or permute[0] != 0 or any(permute[permute[axis]] != axis for axis in range(4)):
            raise CaseLineError(f"permute={list(permute)}: expected the axes 0 to 3, the first at its place, others exchanged in pairs")
        if max_bias and not mask:
            raise CaseLineError(f"max_bias={max_bias}: ALiBi needs mask=1")
        if min(hsk, hsv, nh, *nr23, kv, nb) < 1 or n_kv_max < 0:
            raise CaseLineError("hsk, hsv, nh, nr23, kv and nb: expected numbers above 0")
        dims = [ceil_div(hs, block) * block for hs, block in ((hsk, _block(kind_k)), (hsv, _block(kind_v)))]
        if dims[0] != ceil_div(hsk, _block(kind_k)) * _block(kind_k) or (v_is_view_of_k and (dims[1] > dims[0] or kind_k != kind_v)):
            raise CaseLineError(f"v_is_view_of_k=1 needs hsv at most hsk and one type, got {hsk}, {hsv}, {type_K}, {type_V}")
        heads, sequences = nh * nr23[0], nr23[1]
        shown = {
            "hsk": hsk,
            "hsv": hsv,
            "nh": nh,
            "nr23": nr23,
            "kv": kv,
            "nb": nb,
            "mask": mask,
            "sinks": sinks,
            "max_bias": max_bias,
            "logit_softcap": logit_softcap,
            "prec": prec,
            "type_K": type_word(kind_k),
            "type_V": type_word(kind_v),
            "permute": permute,
            "kv_view": kv_view,
            "v_is_view_of_k": v_is_view_of_k,
            "n_kv_max": n_kv_max,
            "seed": seed,
        }
        q_shape, q_view = _permuted((sequences, heads, nb, dims[0]), permute, 1)
        k_shape, k_view = _permuted((sequences, nh, kv, dims[0]), permute, 1 + kv_view)
        v_shape, v_view = _permuted((sequences, nh, kv, dims[1]), permute, 1 + kv_view)
        if v_is_view_of_k:
            v_shape, v_view = k_shape, View(k_view.offset, (*k_view.shape[:3], dims[1]), k_view.strides)
        for shape in (q_shape, k_shape, v_shape, (sequences, nb, kv)):
            sized(shape)

        def make(rng: np.random.Generator) -> Problem:
            q = Tensor("q", "F32", q_shape, "input")
            k = operand("k", kind_k, k_shape)
            v = k if v_is_view_of_k else operand("v", kind_v, v_shape)
            inputs, values = [q, k, v], {"q": rng.uniform(-1, 1, q_shape).astype(np.float32)}
            values |= {t.name: _rows_within(t, view, rng) for t, view in ((v, v_view), (k, k_view))}
            if mask:
                inputs.append(Tensor("mask", "F16", (sequences, 1, nb, kv), "input"))
                values["mask"] = _sparse(rng, inputs[-1].shape, n_kv_max) if n_kv_max else _mask(rng, inputs[-1].shape)
            if sinks:
                inputs.append(Tensor("sinks", "F32", (heads,), "input"))
                values["sinks"] = rng.uniform(-10, 10, heads).astype(np.float32)
            params = {
                "scale": 1 / math.sqrt(hsk),
                "has_mask": mask,
                "has_sinks": sinks,
                "max_bias": max_bias,
                "softcap": logit_softcap,
                "views": {0: q_view, 1: k_view, 2: v_view},
            }
            y = Tensor("y", "F32", (sequences, nb, heads, dims[1]))
            return Problem(Node(self.name, tuple(inputs), (y,), params), values)

        return Case("FLASH_ATTN_EXT", shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(72, 72, 2, (4, 3), 113, 3, True, True, 8.0, 10.0)
        yield self.build_case(40, 40, 3, (2, 1), 150, 5, True, False, 8.0, type_K="q8_0", type_V="q4_0")
        yield self.build_case(65, 67, 2, (1, 2), 130, 2, False, True, type_K="f32")
        yield self.build_case(128, 96, 1, (3, 1), 260, 2, permute=(0, 2, 1, 3), type_K="bf16")
        yield self.build_case(576, 512, 1, (4, 1), 113, 1, v_is_view_of_k=True, n_kv_max=64, kv_view=False)

    def full_cases(self) -> Iterator[Case]:
        for kind in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"):
            for hs, nb in ((64, 1), (72, 35)):
                yield self.build_case(hs, hs, 4, (2, 1), 113, nb, sinks=nb == 1, type_K=kind)
        for hsk, hsv in ((40, 40), (80, 80), (96, 64), (192, 128), (256, 256), (320, 256), (512, 512), (576, 512)):
            for nb, kv in ((1, 512), (3, 113), (75, 64)):
                yield self.build_case(hsk, hsv, 2, (4, 1), kv, nb, max_bias=8.0)
        yield self.build_case(256, 256, 1, (2, 1), 16384, 1)


def _block(kind: str) -> int:
    return 1 if kind in VALUE_BYTES else quants.quant(kind).block_values


def _permuted(shape: Shape, permute: Sequence[int], times: int) -> tuple[Shape, View]:
    """A tensor with these axes exchanged in memory and the axis that is then the second fastest `times` as long, and the values' view."""
    order = [3 - permute[3 - axis] for axis in range(4)]
    inner = [shape[axis] for axis in order]
    inner[2] *= times
    steps = View.whole(tuple(inner)).strides
    return tuple(inner), View(0, shape, tuple(steps[order.index(axis)] for axis in range(4)))


def _rows(node: Node, ctx: LowerContext, x: Tensor, view: View) -> tuple[list[Dispatch], Tensor, View]:
    """K or V as the kernel takes them: F32 whose rows are together."""
    if x.type == "F32" and not in_planes(x) and view.strides[3] == 1:
        view.check(x, node.op)
        return [], x, view
    copies, y = as_floats(node, ctx, x, view)
    return copies, y, View.whole(y.shape)


def _steps(view: View) -> tuple[int, ...]:
    """From sequence to sequence, head to head and row to row; one sequence serves all."""
    return (view.strides[0] if view.shape[0] > 1 else 0, *view.strides[1:3])


def _rows_within(t: Tensor, view: View, rng: np.random.Generator) -> Array:
    """Values in +-1 within the view, NaN outside of it; of quantized types random blocks everywhere."""
    if t.kind == "weight":
        return quants.random_blocks(t.type, math.prod(t.shape[:-1]), t.shape[-1], rng, std=0.5)
    values = np.full(t.shape, np.nan, np.float32)
    view.of(values)[...] = rng.uniform(-1, 1, view.shape)
    return rounded_to(t.type, values)


def _mask(rng: np.random.Generator, shape: Shape) -> Array:
    """Values in +-1, of which every fifth block of 64 tokens by 128 rows is 0 or hides its rows."""
    values = rng.uniform(-1, 1, shape).astype(np.float16)
    for s, token, row in np.ndindex(shape[0], ceil_div(shape[2], 64), ceil_div(shape[3], 128)):
        if rng.random() < 0.2:
            values[s, :, 64 * token : 64 * token + 64, 128 * row : 128 * row + 128] = -np.inf if rng.random() < 0.5 else 0.0
    return values


def _sparse(rng: np.random.Generator, shape: Shape, seen: int) -> Array:
    """A mask that lets each token see some rows and hides the others."""
    values = np.full(shape, -np.inf, np.float16)
    chosen = rng.random(shape).argsort(axis=-1)[..., :seen]
    np.put_along_axis(values, chosen, np.float16(0.0), axis=-1)
    return values
