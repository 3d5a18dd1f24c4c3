"""Every case of the GEMV family on both paths."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from kernel_paths import with_params
from suite_cases import RUNS

from vkback.device import Device
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import Act, LowerContext
from vkback.ops.matmul.gemv import BitSwap
from vkback.ops.matmul.linear_cases import mul_mat_case
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
@pytest.mark.parametrize(("case", "act"), RUNS, ids=lambda v: v.line if isinstance(v, Case) else v)
def test_case(case: Case, act: Act, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, dataclasses.replace(ctx, act=act))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize(("act", "quant"), [("f32", "Q5_K"), ("q8_1", "Q4_K")])
def test_sixteen_tokens(act: Act, quant: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """As on GPUs; tables of CPU drivers give that many to the GEMM kernels."""
    fixed = with_params(dataclasses.replace(ctx, act=act), kernel="gemv")
    case = mul_mat_case(quant, 19, 16, 256)
    dispatches = OPS[case.op].lower(case.build().node, fixed)
    assert ("COLS", 16) in dispatches[-1].kernel.defines and dispatches[-1].kernel.source == "gemv/gemv.comp"
    outcome = run_case(device, library, case, fixed)
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("swap", get_args(BitSwap)[1:])
def test_bits_are_swapped_right(swap: BitSwap, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """shaders/quant/bit_planes.glsl. CPU drivers take none of these by themselves."""
    ctx = with_params(dataclasses.replace(ctx, act="q8_1"), swap=swap)
    case = mul_mat_case("IQ4_NL", 33, 1, 2048)
    node = case.build().node
    assert any(("SWAP_BITS", get_args(BitSwap).index(swap)) in d.kernel.defines for d in OPS["MUL_MAT"].lower(node, ctx))
    outcome = run_case(device, library, case, ctx)
    assert outcome.ok, outcome.text
