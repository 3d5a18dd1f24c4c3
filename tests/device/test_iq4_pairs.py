"""IQ4_NL and IQ4_XS in pairs, as a Hopper has them: every kernel takes them, and the table of pairs makes the bits that formulas make."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_pairs, with_params

from vkback import quants
from vkback.device import Device
from vkback.harness.cases import context_of, find_case
from vkback.harness.runner import Workbench, prepare, run_case
from vkback.ops.case import Array, Case
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul import gemm
from vkback.ops.matmul.gemv import GemvConfig
from vkback.ops.matmul.linear_cases import MATRICES, REGISTERS, fused_case, mul_mat_case
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary


@pytest.fixture
def paired(ctx: LowerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LowerContext:
    """The context of this device as one whose IQ4 weights lie in pairs."""
    return with_pairs(ctx, tmp_path, monkeypatch)


def outputs(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext, **defines: int) -> list[Array]:
    """Of a case, run by kernels of which one has these defines."""
    ready = prepare(case.build(), ctx)
    kernels = [d.kernel for d in ready.schedule.dispatches()]
    assert any(dict(k.defines).items() >= defines.items() for k in kernels), kernels
    with Workbench(device, library) as bench:
        return list(bench.run(ready).values())


def same(a: list[Array], b: list[Array]) -> bool:
    return all(np.any(x) and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (mul_mat_case("IQ4_NL", 33, 1, 288), {"wg": 64}),
        (mul_mat_case("IQ4_XS", 33, 1, 256), {"wg": 160}),  # of threads that are no power of two
        (fused_case("IQ4_NL", 192, 512, 1, ("norm",), glu=True, out="Q8_1"), {"wg": 256, "groups": 2}),
        (fused_case("IQ4_XS", 33, 256, 2, ("ids", "expert_weights")), {"wg": 128, "x_in_shared": True}),
    ],
    ids=lambda p: p.line if isinstance(p, Case) else "",
)
def test_levels_from_the_table_are_those_of_the_formulas(
    case: Case,
    shape: dict[str, Any],
    device: Device,
    library: ShaderLibrary,
    ctx: LowerContext,
    paired: LowerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever threads fill the table, with all that lies in shared memory beside it."""

    def fixed(ctx: LowerContext, **more: bool) -> LowerContext:
        return with_params(dataclasses.replace(ctx, act="q8_1"), **shape, lanes=8, rows=1, unroll=1, prefetch="none", **more)

    table = outputs(case, device, library, fixed(paired, pairs_in_shared=True), PATH_INT=1, PAIRS_IN_SHARED=1)
    monkeypatch.undo()
    formulas = outputs(case, device, library, fixed(ctx), PATH_INT=1)
    assert same(table, formulas)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("case", "params", "source"),
    [
        (mul_mat_case("IQ4_XS", 33, 1, 512, act="f32"), {}, "gemv/gemv.comp"),
        (mul_mat_case("IQ4_NL", 33, 1, 288, act="q8_1"), {}, "gemv/gemv.comp"),
        (mul_mat_case("IQ4_NL", 17, 9, 96, act="f32"), {"kernel": "f32", "tile_n": 16, "rows": 2}, "gemm/f32.comp"),
        (mul_mat_case("IQ4_XS", 17, 9, 256, act="q8_1"), {"kernel": "int_dot", "tile_n": 16}, "gemm/int_dot.comp"),
        (mul_mat_case("IQ4_NL", 70, 19, 288), MATRICES, "gemm/coop_mat.comp"),
        (mul_mat_case("IQ4_XS", 70, 19, 512), REGISTERS, "gemm/coop_reg.comp"),
        (find_case("MUL_MAT_BACK(type_a=iq4_nl,m=37,n=3,k=96)"), {}, "gemm_f32/gemm_weight_lanes.comp"),
        (find_case("GET_ROWS(type=iq4_xs,n=256,m=5,r=4,be1=7,be2=1,v=0)"), {}, "rows/get_rows.comp"),
        (find_case("CPY(type_src=IQ4_NL,type_dst=F32,ne=[5,768],weight=1)"), {}, "copy/decode.comp"),
        (find_case("SET_ROWS(type_src=f32,type_dst=iq4_nl,type_idx=i64,ne=[256,11,1,7],nr23=[2,3],r=7,v=0)"), {}, "encode/encode.comp"),
        (find_case("CPY(type_src=f32,type_dst=iq4_xs,ne_src=[256,4,4,4])"), {}, "encode/encode.comp"),
    ],
    ids=lambda p: p.line if isinstance(p, Case) else "",
)
def test_every_kernel_takes_pairs(
    case: Case, params: dict[str, Any], source: str, device: Device, library: ShaderLibrary, paired: LowerContext
) -> None:
    ctx = paired
    if "coop" in source and matrix_shape(ctx.caps) is None:
        pytest.skip(f"{ctx.caps.name} has no cooperative matrices")
    fixed = context_of(case, with_params(ctx, **params))
    kernels = [d.kernel for d in prepare(case.build(), fixed).schedule.dispatches()]
    assert any(k.source == source and ("CODE_PAIRS", 1) in k.defines for k in kernels), kernels
    outcome = run_case(device, library, case, fixed)
    assert outcome.ok, outcome.text


def lowered(case: Case, profile: str) -> list[Dispatch]:
    problem = case.build()
    return OPS[problem.node.op].lower(problem.node, planned_for(profile))


@pytest.mark.parametrize("quant", quants.PAIRED)
@pytest.mark.parametrize(
    ("profile", "k", "pairs"),
    [
        ("nvidia_h200_linux", 4096, True),
        ("nvidia_h200_linux", 14336, True),
        ("nvidia_h200_linux", 14592, False),
        ("nvidia_rtx_4090_windows", 4096, False),
    ],
)
def test_pairs_are_where_they_are_looked_up(quant: str, profile: str, k: int, pairs: bool) -> None:
    for case in (mul_mat_case(quant, 4096, 1, k), fused_case(quant, 64, k, 1, ("ids",))):
        *_, d = lowered(case, profile)
        assert isinstance(d.config, GemvConfig) and d.config.path == "int"
        assert (d.config.pairs_in_shared, dict(d.kernel.defines).get("CODE_PAIRS")) == (pairs, 1 if pairs else None), case.line
        assert "pairs_in_shared" not in str(d.config.adjustments)


def test_a_table_that_shared_memory_does_not_hold_is_left_out_and_said() -> None:
    """Beside the x of two experts, as in Mixtral."""
    ctx = dataclasses.replace(planned_for("nvidia_h200_linux"), sync="sentinel")
    problem = fused_case("IQ4_XS", 64, 14336, 1, ("ids", "expert_weights"), used=2).build()
    *_, d = OPS[problem.node.op].lower(problem.node, with_params(ctx, x_in_shared=True))
    assert isinstance(d.config, GemvConfig) and not d.config.pairs_in_shared
    assert "49152 bytes of shared memory do not hold the table" in str(d.config.adjustments)


def test_prompts_of_a_hopper_need_no_compiler() -> None:
    shipped = gemm.prebuilt_variants()
    for quant in quants.PAIRED:
        for tokens in (4, 512):
            kernels = [d.kernel for d in lowered(mul_mat_case(quant, 4096, tokens, 4096), "nvidia_h200_linux") if "coop" in d.kernel.source]
            assert kernels and all((k.source, k.defines) in {(v.source, v.defines) for v in shipped} for k in kernels), (quant, tokens)
