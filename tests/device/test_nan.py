"""A NaN stays one: kernels that bound, compare or hide values make no number of it, for then nobody would learn of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.case import Case, Problem
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary


def nodes_of_nan() -> list[Case]:
    """Rows of which one holds a NaN, and one is nothing but: SOFT_MAX with and without a mask, attention of ggml, SET_ROWS of blocks,
    functions that bound their argument."""

    def with_nan(case: Case, name: str, *where: Any) -> Case:
        def make(rng: np.random.Generator) -> Problem:
            problem = case.make(rng)
            values = dict(problem.values)
            values[name] = values[name].copy()
            for at in where:
                values[name][at] = np.nan
            return dataclasses.replace(problem, values=values)

        return dataclasses.replace(case, make=make)

    soft, attention = OPS["SOFT_MAX"], OPS["ATTENTION"]
    plain = {"nr23": (1, 1), "kv": 40, "nb": 3, "mask": False, "kv_view": False, "type_K": "f32"}
    return [
        with_nan(soft.build_case(ne=(37, 5)), "x", (..., 1, 3), (..., 2, slice(None))),
        with_nan(soft.build_case(ne=(37, 5), mask=True), "x", (..., 1, slice(None))),
        with_nan(soft.build_case(ne=(37, 5, 2), mask=True, sinks=True), "x", (..., 1, slice(None)), (..., 2, 3)),
        with_nan(attention.build_case(40, 40, 2, **plain), "k", (0, 1, 3, 2)),
        with_nan(attention.build_case(40, 40, 2, **plain, logit_softcap=10.0), "k", (0, 1)),
        *(with_nan(OPS["SET_ROWS"].build_case((2, 1, 64), (3, 4), "F32", kind), "x", (0, 0, 1)) for kind in ("Q8_0", "Q4_0")),
        *(with_nan(next(iter(OPS[op].cases())), "x", (..., 0)) for op in ("TANH", "SIGMOID", "RELU", "GELU", "ELU", "STEP", "CLAMP")),
    ]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", nodes_of_nan(), ids=lambda c: c.line)
def test_a_nan_does_not_become_a_number(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text
