"""SOFT_MAX and SUM_ROWS (shaders/soft_max): a workgroup a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from vkback.constants import power
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost, times
from vkback.ops.dispatch import Arg, Dispatch, ceil_div
from vkback.ops.family import Choice
from vkback.ops.general import is_general, lower_general, rounded_to
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of, sized, type_word
from vkback.ops.launch import by_rows
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.view import View
from vkback.ops.workgroup import workgroup_size


def threads_of_a_row(x: Tensor, ctx: LowerContext) -> tuple[int, Choice]:
    """Threads that share a row of x, and what the tables say."""
    choice = ctx.tuning.pick("norm", dim=x.shape[-1], rows=prod(x.shape[:-1]))
    return workgroup_size(ctx.caps, choice["wg_size"], ceil_div(x.shape[-1], 4)), choice


def softmax_tolerance(z: Array, sizes: Array, p: Array, threads: int) -> Tolerance:
    """How far f32 may be from softmax p of logits z, rows along the last axis.

    sizes    of what z was rounded from: one more 2^-24 of them is the error of a logit
    threads  of a row, each of which adds up its part of the exponentials
    The error of exp(z - max), relative: 3 + 2 (max - z) ulp by Vulkan's rules, and that of its argument, 2^-24 of z, of max - z, and of
    sizes. So what is far below the maximum is off by more, but counts for less. The sum takes on the errors of its terms, by their share.
    It has one rounding for each addition, which may all fall on one side where one term is far above the others.
    """
    seen = np.isfinite(z) & (p > 0)
    z, sizes = np.where(seen, z, 0.0), np.where(seen, sizes, 0.0)
    below = np.where(seen, np.where(seen, z, -np.inf).max(axis=-1, keepdims=True) - z, 0.0)
    of_term = 2.0**-24 * (sizes + np.abs(z) + below) + 2.0**-23 * (3 + 2 * below)
    additions = ceil_div(z.shape[-1], threads) + threads.bit_length()
    of_sum = (np.where(seen, p, 0.0) * of_term).sum(axis=-1, keepdims=True) + 2.0**-24 * additions
    error = np.where(seen, p, 0.0) * (of_term + of_sum + 3 * 2.0**-23)
    energy = float(np.square(np.where(seen, p, 0.0)).sum())
    nmse = float(np.square(error).sum()) / energy if energy else 0.0
    worst = float(error.max()) / float(np.sqrt(energy / p.size)) if energy else 0.0
    reason = f"f32; exponentials and a sum of {additions} additions in turn, of logits up to {below.max():.3g} below the largest"
    return Tolerance(nmse, worst, reason)


def _dispatch(node: Node, ctx: LowerContext, *, sum_rows: bool) -> Dispatch:
    x, *mask = node.inputs
    dim, rows = x.shape[-1], prod(x.shape[:-1])
    wg, choice = threads_of_a_row(x, ctx)
    return by_rows(
        node,
        ctx,
        "soft_max/soft_max.comp",
        (Arg(x), *map(Arg, mask), Arg(node.outputs[0], "w" if sum_rows else "rw")),
        (rows, dim, prod(mask[0].shape[:-1]) if mask else 1, float(node.params.get("scale", 1.0))),
        rows,
        wg,
        choice,
        {"MASK": len(mask), "SUM": int(sum_rows)},
        flops=(1 if sum_rows else 8) * rows * dim,
    )


SHAPES: tuple[Shape, ...] = (
    (1, 1),
    (1, 32),
    (2, 33),
    (4, 1, 128),
    (7, 1024),
    (3, 4096),
    (2, 16, 1000),
    (1, 151936),
    (1, 643251),
    (5, 4, 3, 70),
)
"""Of the full set."""


def slopes(heads: int, max_bias: float) -> tuple[int, float, float]:
    """ALiBi by max_bias: head h of the first n (a power of two) weighs its mask by below^(h + 1), later ones by above^(2 (h - n) + 1)."""
    n = 1 << (heads.bit_length() - 1)
    return n, float(power(2.0, -max_bias, n)), float(power(2.0, -max_bias, 2 * n))


@register
class SoftMax(Op):
    """SOFT_MAX(x [..., dim] [, mask [..., dim]] [, sinks [heads]]; scale) -> softmax of scale * x + mask over the last axis.

    The mask's rows are those of x's last axes, used again for each of the leading ones; -inf hides a value, and a row that is hidden
    altogether gives zeros. With the param `sinks`, `max_bias` or `repeat_mask` x is [outer, heads, rows, dim]: the last input is then one
    more value of every row of a head, of which nothing is put out; the mask is weighted by `slopes`; it is repeated along its first axes.
    """

    name = "SOFT_MAX"
    formula = "soft_max(x)"
    ggml_nmse = 1e-6

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [self._logits_and_softmax(inputs, params)[-1]]

    def _logits_and_softmax(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> tuple[Array, Array, Array]:
        """Logits, the sizes of what they are rounded from, and their softmax."""
        z = np.asarray(inputs[0], np.float64) * params.get("scale", 1.0)
        sizes = np.abs(z)
        masks = inputs[1 : len(inputs) - bool(params.get("sinks"))]
        if masks:
            mask = np.asarray(masks[0], np.float64)
            if params.get("repeat_mask"):
                mask = np.tile(mask, [big // small for big, small in zip(z.shape, mask.shape, strict=True)])
            if params.get("max_bias"):
                n, below, above = slopes(z.shape[-3], params["max_bias"])
                slope = [below ** (h + 1) if h < n else above ** (2 * (h - n) + 1) for h in range(z.shape[-3])]
                mask = mask * np.array(slope)[:, None, None]
            # A slope is a power, off by some 20 ulp.
            sizes = sizes + np.abs(np.where(np.isfinite(mask), mask, 0.0)) * (40 if params.get("max_bias") else 1)
            z = z + mask
        top = z.max(axis=-1, keepdims=True)
        sink = np.asarray(inputs[-1], np.float64).reshape(-1, 1, 1) if params.get("sinks") else np.full((1,) * z.ndim, -np.inf)
        top = np.maximum(top, sink)
        top = np.where(np.isfinite(top), top, 0.0)
        e = np.exp(z - top)
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        return z, sizes, np.divide(e, total, out=np.zeros_like(e), where=total != 0)

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value: its scale and the sum's inverse, subtraction of the maximum and the sum, an exponential. A mask adds its slope and a
        sum, and each row the power that ALiBi's slope is, as ggml's op has it: without ALiBi the slope is 1."""
        x, *mask = node.inputs
        per_value = {"fmul": 3, "fadd": 3, "fexp": 1} if mask else {"fmul": 2, "fadd": 2, "fexp": 1}
        return ({"fpow": prod(x.shape[:-1])} if mask else {}) | times(per_value, x.elements)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, *mask = node.inputs
        if any(node.params.get(key) for key in ("sinks", "max_bias", "repeat_mask")):
            return [self._with_heads(node, ctx)]
        if mask and mask[0].shape != x.shape[len(x.shape) - len(mask[0].shape) :]:
            raise PlanError(f"[SOFT_MAX] {node.name}: mask {mask[0]} does not fit {x}: expected its last axes")
        return [_dispatch(node, ctx, sum_rows=False)]

    def _with_heads(self, node: Node, ctx: LowerContext) -> Dispatch:
        x, *rest = node.inputs
        sinks = bool(node.params.get("sinks"))
        mask = rest[: len(rest) - sinks]
        outer, heads, rows, dim = x.shape
        fits = not mask or (mask[0].shape[2:] == (rows, dim) and outer % mask[0].shape[0] == 0 and heads % mask[0].shape[1] == 0)
        if not fits or (sinks and rest[-1].elements != heads):
            raise PlanError(f"[SOFT_MAX] {node.name}: {', '.join(map(str, rest))} do not fit {x}")
        wg, choice = threads_of_a_row(x, ctx)
        mask_outer, mask_heads = mask[0].shape[:2] if mask else (1, 1)
        n, below, above = slopes(heads, float(node.params.get("max_bias", 0.0)))
        return by_rows(
            node,
            ctx,
            "soft_max/general.comp",
            (Arg(x), *map(Arg, rest), Arg(node.outputs[0], "rw")),
            (outer, heads, rows, dim, mask_outer, mask_heads, n, float(node.params.get("scale", 1.0)), below, above),
            outer * heads * rows,
            wg,
            choice,
            {"MASK": len(mask), "SINKS": int(sinks)},
            flops=8 * x.elements,
        )

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (3, 2, 37), (5, 1), (1, 20000)):
            for masked in (False, True):
                yield self.build_case(ne=ne_of(shape), mask=masked)
        yield self.build_case(ne=(33, 3, 2, 2), mask=True, sinks=True, m_prec="f16", nr23=(3, 1), max_bias=8.0)
        yield self.build_case(ne=(40, 3, 3, 1), sinks=True)
        yield self.build_case(ne=(32, 2, 2, 1), mask=True, nr23=(1, 2), inplace=True)

    def full_cases(self) -> Iterator[Case]:
        for shape in SHAPES:
            for masked in (False, True):
                yield self.build_case(ne=ne_of(shape), mask=masked)
        for ne, (sinks, bias), nr23 in product(
            ((16, 16, 1, 1), (1024, 3, 2, 1), (15, 15, 3, 2), (200, 2, 5, 2)), product((False, True), (0.0, 8.0)), ((1, 1), (3, 1), (2, 2))
        ):
            for prec in ("f32", "f16"):
                yield self.build_case(ne=ne, mask=True, sinks=sinks, m_prec=prec, nr23=nr23, scale=0.1, max_bias=bias)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(ne=(4096, 32))

    def build_case(
        self,
        type: str = "f32",
        ne: Shape = (10, 5, 4, 3),
        mask: bool = False,
        sinks: bool = False,
        m_prec: str = "f32",
        nr23: tuple[int, int] = (1, 1),
        scale: float = 0.5,
        max_bias: float = 0.0,
        inplace: bool = False,
        seed: int = 37,
    ) -> Case:
        """Values uniform in +-20; the mask hides a third of them and the first row altogether where there are several. nr23: how often the
        mask is repeated along the axes of heads and outside, which x has so many times longer than ne; inplace: the output is x itself."""
        one_of_types(type, ("F32",))
        kind, small = one_of_types(m_prec, ("F32", "F16"), "m_prec"), shape_of(ne)
        if min(nr23) < 1 or max_bias < 0:
            raise CaseLineError(f"SOFT_MAX: nr23=[{nr23[0]},{nr23[1]}], max_bias={max_bias}: expected counts from 1, and a bias from 0")
        if max_bias and not mask:
            raise CaseLineError(f"SOFT_MAX: max_bias={max_bias} without a mask: there is nothing to weigh")
        shape = sized((small[0] * nr23[1], small[1] * nr23[0], *small[2:]))

        def make(rng: np.random.Generator) -> Problem:
            inputs = [Tensor("x", "F32", shape, "input")]
            values: dict[str, Array] = {"x": rng.uniform(-20, 20, shape).astype(np.float32)}
            params: dict[str, Any] = {"scale": scale}
            if mask:
                inputs.append(Tensor("mask", kind, small, "input"))
                hidden = np.where(rng.random(small) < 1 / 3, -np.inf, rng.uniform(-1, 1, small) if max_bias else 0.0)
                hidden[..., -1, 0] = 0.0
                if small[2] > 1:
                    hidden[..., 0, :] = -np.inf
                values["mask"] = rounded_to(kind, hidden)
                params |= {"repeat_mask": True} if shape != small else {}
                params |= {"max_bias": max_bias} if max_bias else {}
            if sinks:
                inputs.append(Tensor("sinks", "F32", (shape[1],), "input"))
                values["sinks"] = rng.uniform(-20, 20, shape[1]).astype(np.float32)
                params["sinks"] = True
            y = inputs[0] if inplace else Tensor("y", "F32", shape)
            return Problem(Node("SOFT_MAX", tuple(inputs), (y,), params), values)

        shown = {
            "type": type.lower(),
            "ne": ne_of(small),
            "mask": int(mask),
            "sinks": int(sinks),
            "m_prec": type_word(kind),
            "nr23": nr23,
            "scale": scale,
            "max_bias": max_bias,
            "inplace": int(inplace),
            "seed": seed,
        }
        return Case("SOFT_MAX", shown, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        """Of logits up to 20; one row may hold all of the energy, so that the rms is 1 / sqrt(values) of the largest."""
        wg, _ = threads_of_a_row(node.inputs[0], ctx)
        additions = ceil_div(node.inputs[0].shape[-1], wg) + wg.bit_length()
        relative = 2.0**-24 * additions + 3e-6
        return Tolerance(
            max(1e-10, relative**2),
            max(1e-3, relative * node.inputs[0].elements ** 0.5),
            f"f32; exp(z - max) with |z| up to 20 has 3 + 2|z| ulp by Vulkan's rules: 3e-6 relative; {additions} additions in turn",
        )

    def tolerance_at(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Tolerance:
        wg, _ = threads_of_a_row(node.inputs[0], ctx)
        with np.errstate(invalid="ignore"):
            return softmax_tolerance(*self._logits_and_softmax(inputs, node.params), wg)


@register
class SumRows(Op):
    """SUM_ROWS(x [..., dim]) -> [..., 1]."""

    name = "SUM_ROWS"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.asarray(inputs[0], np.float64).sum(axis=-1, keepdims=True)]

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {"fadd": node.inputs[0].elements}

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return lower_general(self, node, ctx) if is_general(node) else [_dispatch(node, ctx, sum_rows=True)]

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 4096), (3, 2, 37), (5, 1)):
            yield self.build_case(ne=ne_of(shape))
        yield self.build_case(ne=(16, 5, 6, 3), permute=True, slice=True)

    def full_cases(self) -> Iterator[Case]:
        for shape in SHAPES:
            yield self.build_case(ne=ne_of(shape))
        for permute, slice in product((False, True), repeat=2):
            yield self.build_case(ne=(33, 5, 6, 3), permute=permute, slice=slice)

    def build_case(self, type: str = "f32", ne: Shape = (10, 5, 4, 3), permute: bool = False, slice: bool = False, seed: int = 41) -> Case:
        """slice: of the third axis every second, of the fourth all but the first; permute: the axes behind the first turn by one."""
        one_of_types(type, ("F32",))
        inner = shape_of(ne)
        view = View.whole(inner)
        if slice:
            if inner[0] < 2 or inner[1] < 2:
                raise CaseLineError("SUM_ROWS: slice=1: expected two or more as third and fourth of ne")
            outer, head, row, one = view.strides
            view = View(outer, (inner[0] - 1, inner[1] // 2, *inner[2:]), (outer, 2 * head, row, one))
        if permute:
            view = View(view.offset, *(tuple(v[a] for a in (2, 0, 1, 3)) for v in (view.shape, view.strides)))

        def make(rng: np.random.Generator) -> Problem:
            x, y = Tensor("x", "F32", inner, "input"), Tensor("y", "F32", (*view.shape[:-1], 1))
            node = Node("SUM_ROWS", (x,), (y,), {"views": {0: view}} if permute or slice else {})
            return Problem(node, {"x": rng.uniform(-0.5, 1.5, inner).astype(np.float32)})

        shown = {"type": type.lower(), "ne": ne_of(inner), "permute": int(permute), "slice": int(slice), "seed": seed}
        return Case("SUM_ROWS", shown, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of dim values, relative error about sqrt(dim) * 2^-24")
