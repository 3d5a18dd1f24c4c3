"""MUL_MAT_W4A8, MUL_MAT_W4A4, MUL_MAT_ID_W4A8 and MUL_MAT_ID_W4A4: products whose activations may be rounded to 8 or to 4 bits.

They are MUL_MAT and MUL_MAT_ID of weights of about 4 bits, with a promise of the graph: so few bits of the activations will do. What is
asked for is at least that; kernels here keep f32, or 8 bits with a scale for 32 values (Q8_1), which serves both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vkback.graph import Node
from vkback.ops.case import Case, Problem
from vkback.ops.ggml_words import one_of_types
from vkback.ops.matmul.linear_cases import mul_mat_case, mul_mat_id_case
from vkback.ops.matmul.mul_mat import MulMat, MulMatId
from vkback.ops.op import register

FOUR_BITS = ("NVFP4", "MXFP4", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS")
"""Types of weights."""


def _renamed(case: Case, op: str) -> Case:
    def make(rng: np.random.Generator) -> Problem:
        problem = case.make(rng)
        node = problem.node
        return dataclasses.replace(problem, node=Node(op, node.inputs, node.outputs, node.params))

    return dataclasses.replace(case, op=op, make=make, bare=None)


class _W4(MulMat):
    """MUL_MAT of weights of FOUR_BITS."""

    def case(self, params: Mapping[str, Any]) -> Case:
        one_of_types(str(params.get("type_a", "nvfp4")), FOUR_BITS, "type_a")
        return _renamed(super().case(params), self.name)

    def cases(self) -> Iterator[Case]:
        for quant, n in (("NVFP4", 1), ("MXFP4", 5)):
            yield _renamed(mul_mat_case(quant, 16, n, 256), self.name)

    def full_cases(self) -> Iterator[Case]:
        for quant, n in (("NVFP4", 16), ("MXFP4", 32)):
            yield _renamed(mul_mat_case(quant, 64, n, 512), self.name)

    def perf_cases(self) -> Iterator[Case]:
        return iter(())


class _W4Id(MulMatId):
    """MUL_MAT_ID of weights of FOUR_BITS."""

    def case(self, params: Mapping[str, Any]) -> Case:
        one_of_types(str(params.get("type_a", "nvfp4")), FOUR_BITS, "type_a")
        return _renamed(super().case(params), self.name)

    def cases(self) -> Iterator[Case]:
        for quant in ("NVFP4", "MXFP4"):
            yield _renamed(mul_mat_id_case(quant, 8, 2, 32, 5, 256, shared=False), self.name)

    def full_cases(self) -> Iterator[Case]:
        for quant in ("NVFP4", "MXFP4"):
            yield _renamed(mul_mat_id_case(quant, 8, 2, 32, 32, 256, shared=False), self.name)

    def perf_cases(self) -> Iterator[Case]:
        return iter(())


@register
class MulMatW4A8(_W4):
    """MUL_MAT whose x may be rounded to 8 bits."""

    name = "MUL_MAT_W4A8"


@register
class MulMatW4A4(_W4):
    """MUL_MAT whose x may be rounded to 4 bits."""

    name = "MUL_MAT_W4A4"


@register
class MulMatIdW4A8(_W4Id):
    """MUL_MAT_ID whose x may be rounded to 8 bits."""

    name = "MUL_MAT_ID_W4A8"


@register
class MulMatIdW4A4(_W4Id):
    """MUL_MAT_ID whose x may be rounded to 4 bits."""

    name = "MUL_MAT_ID_W4A4"
