"""QUANTIZE_Q8_1: activations to eight bits for the integer-dot kernels (shaders/quantize)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push, spread
from vkback.ops.family import declare
from vkback.ops.lowering import LowerContext
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant

declare("quantize", match={"k": "number", "n": "number"}, params={"wg_size": (8, 16, 32, 64, 128, 256, 512, 1024)})

Q8_1_TOLERANCE = Tolerance(
    1e-4,
    0.05,
    "rounding to steps of amax/127 a unit: NMSE (amax/127)^2/12 over mean square, 1.6e-5 for uniform and 2-5e-5 for Gaussian values; "
    "the worst element is off by half a step, 0.5 * amax/127, where amax is up to 5 rms",
)
"""Any op that leaves its result as Q8_1, judged against unquantized values."""

EXACT = Tolerance(0.0, 1e-4, "nothing is computed before the rounding: half a step is all, and 127 steps of 2^-23 from the quotient")


def rounded_rows(x: Array) -> Array:
    """x [..., k] as it is once it went through Q8_1: what an integer-dot kernel computes with."""
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    return quants.q8_1_dequantize(quants.q8_1_quantize(rows), x.shape[-1]).astype(np.float64).reshape(x.shape)


def rounded_tolerance(k: int, glu: bool = False) -> Tolerance:
    """Of a dot product over k values of x against the reference of the same x rounded on the host.

    Host and device agree on the rounded x but for values on the edge between two steps: a quotient is allowed 2.5 ulp, up to 3e-5 of a
    step, so one value in 3e4. One such value moves every output of its token by a step of amax/127 times a weight. With amax up to 3 rms
    that is an NMSE of (3/127)^2 / k = 6e-4 / k, one value in 2048 of long rows. The worst output is off by 0.024 / sqrt(k) times a weight
    of up to 4 rms. A GLU passes the gate's error on at up to twice its size, and its products have wider tails.
    """
    values, more = min(k, 2048), 4 if glu else 1
    reason = "f32 sums, and one value of x on the edge between two steps of amax/127: (3/127)^2 / k of the energy"
    return Tolerance(1e-9 + more * 6e-4 / values, 2e-3 + more * 0.1 / values**0.5, reason)


def quantize_dispatch(x: Tensor, y: Tensor, ctx: LowerContext, label: str = "") -> list[Dispatch]:
    """The dispatch that stores F32 x [..., k] as Q8_1 y of the same shape, a part of any op's lowering."""
    k, rows = x.shape[-1], prod(x.shape[:-1])
    units = ceil_div(k, 32)
    choice = ctx.tuning.pick("quantize", k=k, n=rows)
    wg = max(workgroup_size(ctx.caps, choice["wg_size"], 8 * units * rows), 8)
    defines, subgroup = reduction(ctx.caps, wg, lanes=8)
    defines["WIDTH"] = 4 if k % 4 == 0 else 1
    return [
        Dispatch(
            Variant.of("quantize/quantize.comp", defines, subgroup_size=subgroup),
            (Arg(x), Arg(y, "w")),
            pack_push(rows, k, units),
            spread(ceil_div(8 * units * rows, wg)),
            "QUANTIZE_Q8_1",
            label or y.name,
            f"{wg} threads: {choice.source}",
            nbytes=nbytes(x) + nbytes(y),
            flops=3 * rows * k,
            waits=SpinWaits(part=(x.name,)),
        )
    ]


@register
class QuantizeQ81(Op):
    """QUANTIZE_Q8_1(x F32 [..., k]) -> Q8_1 [..., k]; k is filled up with zeros to a multiple of 32."""

    name = "QUANTIZE_Q8_1"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value its product with 1 / d, of 32 the two divisions that give d and 1 / d. Sums are of integers."""
        x = node.inputs[0]
        return {"fmul": x.elements, "fdiv": 2 * (x.elements // x.shape[-1]) * ceil_div(x.shape[-1], 32)}

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        return [np.asarray(inputs[0], np.float64)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return quantize_dispatch(node.inputs[0], node.outputs[0], ctx, node.name)

    def cases(self) -> Iterator[Case]:
        for shape in ((1, 32), (1, 4096), (3, 96), (2, 2, 2880), (5, 70), (1, 33), (7, 1)):
            yield self.build_case(shape)

    def full_cases(self) -> Iterator[Case]:
        for shape in ((1, 32), (1, 64), (1, 4096), (1, 14336), (17, 64), (2, 2880), (3, 33), (5, 1), (2, 3, 4, 96), (16, 4096), (70000, 1)):
            yield self.build_case(shape)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case((n, 4096))

    def build_case(self, ne: Shape, seed: int = 3) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            node = Node("QUANTIZE_Q8_1", (Tensor("x", "F32", ne, "input"),), (Tensor("y", "Q8_1", ne),))
            return Problem(node, {"x": rng.standard_normal(ne).astype(np.float32)})

        return Case("QUANTIZE_Q8_1", {"ne": ne, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Q8_1_TOLERANCE if node.outputs[0].type == "Q8_1" else EXACT
