"""MUL_MAT_HADAMARD (shaders/hadamard): the Walsh-Hadamard transform of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies.copy_cases import numbers
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import is_general, lower_general
from vkback.ops.ggml_words import FLOATS, Four, one_of_types, sized, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_cases import LAYOUT_DEFAULTS
from vkback.ops.op import Op, register

RADIX_BITS = 4
"""Of the place of a value, in one step."""


@register
class MulMatHadamard(Op):
    """MUL_MAT_HADAMARD(x F32, F16 or BF16 [..., k]) -> F32 as x: each row times Hadamard's matrix of k rows divided by sqrt(k), which is
    symmetric and its own inverse. k is a power of two. The matrix is no operand: its values are (-1)^(ones of row & column)."""

    name = "MUL_MAT_HADAMARD"
    ggml_nmse = 5e-4

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x = np.asarray(inputs[0], np.float64)
        k = x.shape[-1]
        y = x.reshape(-1, *(2,) * (k.bit_length() - 1))
        for axis in range(1, y.ndim):
            low, high = np.take(y, 0, axis), np.take(y, 1, axis)
            y = np.stack((low + high, low - high), axis)
        return [y.reshape(x.shape) / np.sqrt(k)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        x, y = node.inputs[0], node.outputs[0]
        k = x.shape[-1]
        if k & (k - 1) or y.shape != x.shape:
            raise PlanError(f"[{self.name}] {node.name}: {x} to {y}: expected rows of a power of two values, and an output as large")
        steps: list[Dispatch] = []
        source, bits = x, k.bit_length() - 1
        for first in range(0, max(bits, 1), RADIX_BITS):
            radix = 1 << min(RADIX_BITS, bits - first)
            last = first + RADIX_BITS >= bits
            into = y if last else Tensor(f"{node.name}.bits{first}", "F32", x.shape)
            threads = x.elements // radix
            push = (threads, 1 << first, 1.0 / math.sqrt(k) if last else 1.0)
            steps.append(by_threads(node, ctx, "hadamard/hadamard.comp", (Arg(source), Arg(into, "w")), push, threads, {"RADIX": radix}))
            source = into
        return steps

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 2e-5, "log2(k) additions in f32, each off by 2^-24 of what it makes, and a product")

    def build_case(
        self,
        type_a: str = "f32",
        type_b: str = "f32",
        m: int = 128,
        n: int = 1,
        k: int = 128,
        bs: tuple[int, int] = (1, 1),
        nr: tuple[int, int] = (1, 1),
        per: Four = (0, 1, 2, 3),
        k_v: int = 0,
        o: int = 1,
        src_overlap: int = 0,
        m_v: int = 0,
        pad: int = 0,
        seed: int = 53,
    ) -> Case:
        """As a MUL_MAT whose weight is the matrix, m = k. bs: batches of n rows."""
        one_of_types(type_a, ("F32",), "type_a")
        kind = one_of_types(type_b, FLOATS, "type_b")
        if m != k or k < 1 or k & (k - 1) or min(n, *bs, *nr) < 1:
            raise CaseLineError(f"{self.name}: m={m}, n={n}, k={k}, bs={list(bs)}: expected m = k, a power of two, and others from 1")
        layout = {"nr": nr, "per": per, "k_v": k_v, "o": o, "src_overlap": src_overlap, "m_v": m_v, "pad": pad}
        odd = [key for key, value in layout.items() if value != LAYOUT_DEFAULTS[key]]
        if odd:
            raise PlanError(f"{', '.join(odd)}: here the matrix is no operand, and rows lie one after the other")
        shape = sized((bs[1], bs[0], n, k))

        def make(rng: np.random.Generator) -> Problem:
            x = Tensor("x", kind, shape, "input")
            return Problem(Node(self.name, (x,), (Tensor("y", "F32", shape),)), {"x": numbers(x, rng, 1.0)})

        shown = {"type_a": "f32", "type_b": type_word(kind), "m": m, "n": n, "k": k, "bs": bs, **layout, "seed": seed}
        return Case(self.name, shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(m=128, k=128, n=3)
        yield self.build_case(type_b="f16", m=64, k=64, n=2, bs=(2, 3))

    def full_cases(self) -> Iterator[Case]:
        for k in (1 << bits for bits in range(15)):
            yield self.build_case(m=k, k=k, n=2 if prod((2, k)) < 1 << 20 else 1)
