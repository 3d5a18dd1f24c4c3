"""Kernels that round to eight bits, judged against the reference of their own rounding; and conditions that a case sets itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback import quants
from vkback.device import Device
from vkback.device.capabilities import MatrixShape
from vkback.evaluate.judge import judge, nmse, steps_of
from vkback.graph import Tensor
from vkback.harness.cases import context_of, find_case, quick_cases
from vkback.harness.runner import WordError, check_words, expected, prepare, run_problem
from vkback.ops.case import Array
from vkback.ops.case_line import CaseLineError
from vkback.ops.ggml_words import tensor_type, type_word
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear import linear_tolerance
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case
from vkback.ops.matmul.linear_node import INT_QUANTS
from vkback.ops.quantize import EXACT, rounded_rows
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

H200 = planned_for("nvidia_h200_linux")


def failed(case_expected: list[object], outputs: dict[str, Array]) -> list[str]:
    return [e.name for e in case_expected if not e.verdict(outputs).ok]  # type: ignore[attr-defined]


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", sorted(INT_QUANTS))
def test_one_row_a_tenth_off_fails_in_every_type(quant: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    ints = dataclasses.replace(ctx, act="q8_1")
    problem = mul_mat_case(quant, 131, 1, 2048).build()
    judged = expected(problem, ints)
    outputs = run_problem(device, library, problem, ints)
    assert [e.name for e in judged] == ["y", "y beyond its own rounding"] and not failed(list(judged), outputs)
    for row in (0, 130):
        wrong = outputs["y"].copy()
        wrong[0, row] *= 1.1
        assert "y beyond its own rounding" in failed(list(judged), {"y": wrong})


def test_what_is_judged_against_its_own_rounding() -> None:
    """Where x is rounded on the way, and where an output is; not where floats stay floats."""
    for case, act, names in (
        (mul_mat_case("Q4_K", 16, 1, 256), "q8_1", ["y", "y beyond its own rounding"]),
        (mul_mat_case("Q4_K", 16, 1, 256), "f32", ["y"]),
        (fused_case("Q4_K", 64, 256, 1, (), glu=True, out="Q8_1"), "f32", ["y", "y beyond its own rounding"]),
        (find_case("MUL_MAT(type_a=Q8_0,type_b=f32,m=17,n=3,k=256,bs=[1,3],nr=[2,2],seed=7)"), "q8_1", ["y", "y beyond its own rounding"]),
    ):
        judged = expected(case.build(), dataclasses.replace(H200, act=act))  # type: ignore[arg-type]
        assert [e.name for e in judged] == names, case.line
        assert len(judged) == 1 or judged[1].tolerance.nmse < judged[0].tolerance.nmse / 20
        assert (judged[-1].steps is not None) == ("out=Q8_1" in case.line)


def test_parts_of_an_output_are_judged_each_by_its_own_kernel() -> None:
    """Several nodes fill a Q8_1 output by GEMVs, which round x; one node would fill it by matrices of f16."""
    shapes = tuple(MatrixShape(16, 16, 16, "f16", "f16", sums, sums, False, "subgroup") for sums in ("f16", "f32"))
    caps = dataclasses.replace(H200.caps, cooperative_matrix_shapes=shapes)
    cut = {"tile_m": 128, "tile_n": 16, "step_k": 64, "warp_m": 32, "warp_n": 16, "split_k": 1}
    tuning = Overrides(H200.tuning, {"gemm": {"kernel": "coop_mat", **cut}, "gemv_path": {"path": "int"}}, "test")
    matrices = dataclasses.replace(H200, caps=caps, tuning=tuning)
    whole, parts = (fused_case("Q8_0", 192, 256, 3, ("residual",), out="Q8_1", split=s) for s in ((), (64, 32, 96)))
    assert [e.name for e in expected(whole.build(), matrices)] == ["y", "y beyond its own rounding"]
    judged = expected(parts.build(), matrices)
    names = ["y rows 0 to 63", "y rows 64 to 95", "y rows 96 to 191"]
    assert [e.name for e in judged] == [n + s for n in names for s in ("", " beyond its own rounding")]
    rounded = linear_tolerance(True, False).nmse
    assert all(e.tolerance.nmse < rounded / 20 and e.values.shape == (3, e.rows[1] - e.rows[0]) for e in judged[1::2] if e.rows)
    exact, own = (np.concatenate([e.values for e in judged[i::2]], axis=-1) for i in (0, 1))
    assert not failed(list(judged[1::2]), {"y": own})
    assert len(failed(list(judged[1::2]), {"y": exact + 0.5})) == 3
    assert 1e-6 < nmse(own, exact) < rounded, "x is rounded in the bounds of the parts"


def test_the_norm_is_rounded_as_the_prologue_does() -> None:
    """x times the norm's weight is rounded, the rms divides afterwards."""
    problem = fused_case("Q8_0", 64, 256, 1, ("norm",)).build()
    x, norm = problem.values["x"], problem.values["norm"]
    w = quants.decode("Q8_0", problem.values["w"])
    want = rounded_rows(x * norm) @ w.T.astype(np.float64) / np.sqrt(np.mean(np.square(x, dtype=np.float64)) + 1e-5)
    (_, own) = expected(problem, dataclasses.replace(H200, act="q8_1"))
    np.testing.assert_allclose(own.values, want, rtol=1e-6)


def test_half_a_step_is_no_error_and_more_is() -> None:
    rng = np.random.default_rng(1)
    want = rng.standard_normal((3, 70))
    rounded = rounded_rows(want)
    steps = steps_of(want)
    assert steps.shape == want.shape and steps[0, 0] == pytest.approx(np.abs(want[0, :32]).max() / 127)
    assert judge(rounded, want, EXACT, steps).ok
    assert not judge(np.trunc(want / steps) * steps, want, EXACT, steps).ok
    wrong = rounded.copy()
    wrong[2] *= 1.1
    verdict = judge(wrong, want, EXACT, steps)
    assert not verdict.ok and "rows with errors: 2 (1 in all)" in verdict.text


def test_sums_that_are_not_those_of_the_int8_are_found() -> None:
    tensor = Tensor("y", "Q8_1", (3, 70))
    rows = quants.q8_1_quantize(np.random.default_rng(2).standard_normal(tensor.shape).astype(np.float32))
    prepared = prepare(find_case("QUANTIZE_Q8_1(ne=[3,70])").build(), H200)
    check_words(prepared, tensor, rows.ravel())
    rows[1, 3 * 32 + 8 + 6] ^= 1  # unit 1: behind d, the second of two int16
    with pytest.raises(WordError, match=r"1 units store other sums than those of their int8, first \[row, unit\] \[1 1\]"):
        check_words(prepared, tensor, rows.ravel())


def test_a_case_sets_its_own_conditions() -> None:
    plain = mul_mat_case("Q4_K", 35, 1, 1280)
    case = plain.where(lanes=16, unroll=2, sync="sentinel", range=70_000)
    assert case.line == (
        "MUL_MAT(type_a=q4_K,type_b=f32,m=35,n=1,k=1280,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0,"
        "tuning=[lanes:16,unroll:2],sync=sentinel,range=70000,seed=7)"
    )
    assert find_case(case.line).line == case.line
    for words, says in (("[lanez:16]", "no parameter is called lanez"), ("[lanes:3]", "3 is not legal, expected one of 1, 2, 4")):
        with pytest.raises(CaseLineError, match=says):
            find_case(f"MUL_MAT(type_a=Q4_K,m=35,n=1,k=1280,tuning={words})")
    own = context_of(case, H200)
    assert own.sync == "sentinel" and own.caps.max_storage_buffer_range == 70_000
    query = {"quant": "Q4_K", "path": "int", "m": 35, "k": 1280, "n": 1, "experts": "none", "glu": False, "y": "F32", "prologue": "none"}
    choice = own.tuning.pick("gemv", **query, sync="sentinel")
    assert (choice["lanes"], choice["unroll"]) == (16, 2) and choice.source == "the case's own parameters"


def test_the_quick_set_has_tails_and_many_splits() -> None:
    """An odd number of units; units that the lanes of a workgroup do not divide; more splits of the cache than two, on any device."""
    cases = [c for c in quick_cases() if c.op in ("MUL_MAT", "FLASH_ATTN_EXT", "ATTN_DECODE")]
    odd = {tensor_type(c.params["type_a"]) for c in cases if c.op == "MUL_MAT" and c.params["k"] % 64 == 32}
    assert odd >= {q for q in INT_QUANTS if quants.QUANTS[q].block_values == 32}
    for quant in INT_QUANTS:
        tails = [c for c in cases if c.params.get("type_a") == type_word(quant) and "lanes:16" in c.params.get("tuning", ())]
        assert any(c.params["k"] // 32 % 32 for c in tails), quant
    for op in ("FLASH_ATTN_EXT", "ATTN_DECODE"):
        found = [c for c in cases if c.op == op and "rows_per_split:32" in c.params.get("tuning", ())]
        assert len(found) >= 3
        for case in found:
            (launch,) = prepare(case.build(), context_of(case, H200)).schedule.dispatches()
            assert launch.kernel.source != "attention/decode/attention.comp" or int(dict(launch.kernel.defines)["SPLITS"]) > 2
