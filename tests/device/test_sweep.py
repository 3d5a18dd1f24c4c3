"""Sweeps: which points are tried, what is refused and kept, what the journal remembers, and one small run on a device."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from shapes import product
from sweep_kit import CARD, H200, shaders_with, tune, tune_result
from waiting import PATIENCE_S

from vkback.autotune.chain_sweep import ChainGemvs, expected
from vkback.autotune.device_table import DeviceTable, table_lock, table_text
from vkback.autotune.driver import Sweep, Watcher
from vkback.autotune.gemv_rows import edges, gemv_rows
from vkback.autotune.gemvs import Gemvs
from vkback.autotune.journal import JOURNAL_FORMAT
from vkback.autotune.points import Point, Task, actual, axes, lowered, neighbours, refusal, tasks_for
from vkback.autotune.problem import LinearProblem
from vkback.autotune.search import beats
from vkback.autotune.tunable import TuneResult
from vkback.cli.tune_families import of_model
from vkback.device import Capabilities, Device
from vkback.harness.cases import find_case
from vkback.harness.lines import cases_of
from vkback.harness.runner import reference_inputs
from vkback.ops.case_line import CaseLineError
from vkback.ops.family import FAMILIES
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_node import Path as ProductPath
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary
from vkback.timing.launches import Measurement
from vkback.tuning.lookup import Tuning, device_table
from vkback.tuning.table import parse_table

A = Point(256, 64, 1, 4)
B = Point(64, 32, 2, 2)
DOWN = product("llama-8b", "down", "Q4_K", roles=(), x="Q8_1")

GEMVS = [
    LinearProblem("Q4_K", 96, 512, 3, ("bias",)),
    LinearProblem("Q8_0", 96, 512, 1, ("residual",), x="Q8_1"),
    LinearProblem("Q6_K", 128, 512, 1, ("norm",), glu=True, out="Q8_1"),
    LinearProblem("MXFP4", 64, 256, 2, ("ids",), glu=True, n_expert=6, n_used=3),
    LinearProblem("Q4_K", 96, 256, 2, ("residual", "ids", "expert_weights"), n_expert=6, n_used=3),
]


# -- GEMVs


@pytest.mark.parametrize("gemv", GEMVS, ids=lambda p: p.line)
def test_a_gemv_is_its_text_and_its_node(gemv: LinearProblem) -> None:
    assert LinearProblem.parse(gemv.line) == gemv
    assert LinearProblem.of(gemv.node()) == gemv


@pytest.mark.parametrize("gemv", GEMVS, ids=lambda p: p.line)
def test_what_tuning_prints_of_a_gemv_is_a_case_of_the_suite(gemv: LinearProblem) -> None:
    case = find_case(gemv.line)
    assert LinearProblem.of(case.build().node) == gemv
    assert LinearProblem.parse(case.line) == gemv
    said = Task(gemv, "int", program="llama-8b").line
    assert [found.line for found in cases_of(said, "tune")] == [case.line], "with what stands around it"


def test_gemvs_are_read_from_the_suite_s_own_lines() -> None:
    assert LinearProblem.parse("MUL_MAT(type_a=q4_K,type_b=f32,m=4096,n=1,k=14336,seed=7)") == LinearProblem("Q4_K", 4096, 14336)
    layout = "bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0"
    assert LinearProblem.parse(f"MUL_MAT(type_a=q8_0,type_b=f32,m=64,n=2,k=256,{layout})") == LinearProblem("Q8_0", 64, 256, 2)
    moe = LinearProblem.parse(" mul_mat_id(type_a=MXFP4,type_b=f32,n_mats=32,n_used=4,b=1,m=64,n=2,k=256) ")
    assert moe == LinearProblem("MXFP4", 64, 256, 2, ("ids",), n_expert=32, n_used=4)
    fused = LinearProblem.parse("LINEAR(type_a=Q8_0,m=64,n=1,k=256,fused=norm+bias,glu=1,out=q8_1)")
    assert fused == LinearProblem("Q8_0", 64, 256, 1, ("norm", "bias"), glu=True, out="Q8_1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MUL_MAT", "MUL_MAT: not a case; a case is written OP(key=value,...), as a run prints it"),
        ("MUL_MAT(m)", "MUL_MAT: parameter type_a is missing; known are"),
        ("ROPE(m=1)", "[case] ROPE(m=1): expected one of MUL_MAT, MUL_MAT_ID, LINEAR"),
        ("MUL_MAT(type_a=Q4_K,m=1,q=1)", "MUL_MAT: no parameter is called q; known are type_a"),
        ("MUL_MAT(type_a=Q4_K,m=1,k=256,nr=[2,1])", "[case] MUL_MAT(type_a=Q4_K,m=1,k=256,nr=[2,1]): nr: expected a weight of two axes"),
        ("MUL_MAT(type_a=Q4_K,m=1)", "MUL_MAT: parameter k is missing; known are"),
        ("MUL_MAT(type_a=Q4,m=1,k=1)", "type_a=Q4: expected one of bf16, f16,"),
        ("MUL_MAT(type_a=Q4_K,m=0,k=256)", "MUL_MAT: m=0, n=1, k=256"),
        ("LINEAR(type_a=Q4_K,m=1,k=1,fused=relu)", "fused=relu: no input is called relu; expected some of norm+"),
        ("MUL_MAT_ID(type_a=Q4_K,m=1,k=256,n_mats=2,n_used=3)", "n_mats=2, n_used=3, m_v=0: expected sizes from 1, n_used up to n_mats"),
    ],
)
def test_a_text_that_is_no_gemv_is_refused(text: str, said: str) -> None:
    with pytest.raises(CaseLineError) as error:
        LinearProblem.parse(text)
    assert said in str(error.value)


@pytest.mark.parametrize("gemv", GEMVS, ids=lambda p: p.line)
def test_the_reference_of_used_experts_and_blocks_of_rows_is_the_op_s(gemv: LinearProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gemv.build()
    (whole,) = OPS["LINEAR"].reference(reference_inputs(problem), problem.node.params)
    monkeypatch.setattr("vkback.autotune.chain_sweep.REFERENCE_ROWS", 32)
    want = expected(problem, gemv)
    assert want.columns.tolist() == list(range(gemv.m >> gemv.glu))
    np.testing.assert_allclose(want.values, whole, rtol=1e-12)
    monkeypatch.setattr("vkback.autotune.chain_sweep.CHECKED_WEIGHTS", 1)
    monkeypatch.setattr("vkback.autotune.chain_sweep.REFERENCE_ROWS", 2)
    part = expected(problem, gemv)
    assert {0, (gemv.m >> gemv.glu) - 1} <= set(part.columns.tolist())
    assert part.columns.size == 8 >> gemv.glu
    np.testing.assert_allclose(part.values, whole[..., part.columns], rtol=1e-12)


# -- tasks and points


def test_tasks_take_the_path_of_the_tables_and_x_as_a_producer_leaves_it() -> None:
    ctx = planned_for(H200)
    norm, plain = (product("llama-8b", "qkv", "Q4_K", roles=roles) for roles in (("norm",), ()))
    tasks = tasks_for([(norm, 1), (plain, 1), (LinearProblem("F16", 64, 4096), 1)], ctx)
    assert [(j.problem.quant, j.problem.roles, j.path, j.problem.x) for j in tasks] == [
        ("Q4_K", ("norm",), "int", "F32"),
        ("Q4_K", (), "int", "Q8_1"),
        ("F16", (), "float", "F32"),
    ]
    assert [j.path for j in tasks_for([(plain, 1)], ctx, "both")] == ["int", "float"]
    without = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, int_dot=False))
    assert [j.path for j in tasks_for([(plain, 1)], without, "both")] == ["float"]


def test_gemvs_that_tables_cannot_tell_apart_are_one_task_and_the_most_bytes_come_first() -> None:
    plain, residual = (product("llama-8b", "attn_output", "Q4_K", roles=roles) for roles in ((), ("residual",)))
    tasks = tasks_for([(plain, 3), (residual, 2), (product("llama-8b", "down", "Q4_K", roles=()), 2)], planned_for(H200))
    assert [(j.problem.roles, j.count) for j in tasks] == [((), 2), (("residual",), 5)]


def test_a_model_s_gemvs_are_those_of_its_schedule() -> None:
    found = dict(of_model("demo-moe", 1, planned_for(H200)))
    kinds = {(p.experts, p.glu, p.out) for p in found}
    assert kinds >= {("each", True, "F32"), ("summed", False, "F32"), ("none", False, "F32")}
    assert all(count > 0 for count in found.values())


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (A, ""),
        (A._replace(wg=2048), "wg = 2048 is not legal"),
        (A._replace(rows=128), "rows = 128 is not legal"),
        (A._replace(wg=32), "lanes = 64 would become 32"),
        (A._replace(unroll=8), "unroll = 8 would become 7"),
        (A._replace(unroll=14), "unroll = 14 would become 7"),
        (A._replace(groups=1 << 20), f"groups = {1 << 20} would become per_tile"),
        (A._replace(unroll=6, lanes=128, prefetch="weights"), "unroll = 6 would become 4"),
        (A._replace(unroll=4, lanes=128, prefetch="weights"), "prefetch = weights would become none"),
        (A._replace(prefetch="weights+x"), ""),
        (A._replace(prefetch="weights+x", x_in_shared=True), "prefetch = weights+x would become weights"),
        (A._replace(subgroup=32), "subgroup = 32 would become default"),
        (A._replace(rows=8, unroll=4), "160 registers of weights in flight, at most 96 are worth trying"),
        (Point(1024, 64, 8, 2, prefetch="weights"), "80 registers of weights in flight in each of 1024 threads: a core has 65536"),
    ],
)
def test_points_are_refused_before_they_are_compiled(point: Point, said: str) -> None:
    assert refusal(point, Task(DOWN, "int"), planned_for(H200)) == said


def test_points_have_every_parameter_that_the_family_declares() -> None:
    ctx = planned_for(H200)
    assert Point._fields == tuple(FAMILIES["gemv"].set) and set(axes(ctx.caps)) == set(Point._fields)
    assert (A.wg, A.unroll, A.prefetch, A.scales, A.groups, A.subgroup) == (256, 4, "none", "weights", "per_tile", "default")
    with pytest.raises(TypeError, match=r"gemv has the parameters wg, lanes, .*'row'"):
        Point(256, row=2)
    with pytest.raises(AttributeError, match="gemv has no parameter 'row'"):
        A.row  # noqa: B018
    for caps in (ctx.caps, planned_for("llvmpipe_mesa_22_debian12").caps):
        for name, values in axes(caps).items():
            assert values and not any(FAMILIES["gemv"].why_illegal(name, value) for value in values), name


@pytest.mark.parametrize(
    ("quant", "path", "scales", "in_shared"),
    [
        ("Q4_K", "int", {"weights"}, {False}),
        ("Q4_K", "float", {"weights", "sums"}, {False}),
        ("MXFP4", "float", {"weights", "sums", "levels", "levels_bfe"}, {False}),
        ("F16", "float", {"weights"}, {False}),
        ("IQ4_XS", "int", {"weights"}, {False, True}),  # whose codes lie in pairs on this device
    ],
)
def test_how_weights_are_decoded_is_in_reach(quant: str, path: ProductPath, scales: set[str], in_shared: set[bool]) -> None:
    """Where a type and a path have a choice; the others' points are refused before they are compiled."""
    ctx = planned_for(H200)
    task = Task(product("llama-8b", "attn_output", quant, x="Q8_1" if path == "int" else "F32"), path)
    start = actual(Point(256, 32, 2, 1), task, ctx)
    tried = [start, *(p for p in neighbours(start, axes(ctx.caps)) if not refusal(p, task, ctx))]
    assert ({p.scales for p in tried}, {p.pairs_in_shared for p in tried}) == (scales, in_shared)


def test_guesses_decode_weights_as_the_tables_do() -> None:
    gemvs = object.__new__(ChainGemvs)
    Gemvs.__init__(gemvs, planned_for("amd_rx_7900_xtx_radv"))
    starts = gemvs.starts(Task(product("llama-8b", "attn_output", "MXFP4"), "float"))
    assert len(starts) > 2 and {p.scales for p in starts} == {"levels_bfe"}


def test_what_the_tables_choose_is_tried_whatever_it_takes() -> None:
    task = Task(LinearProblem("F32", 16, 256, roles=("norm",), x="F32"), "float")
    point = Point(64, 8, 4, 1)
    assert refusal(point, task, planned_for(H200)) == "128 registers of weights in flight, at most 96 are worth trying"
    assert refusal(point, task, planned_for(H200), chosen=True) == ""


def test_points_beyond_shared_memory_are_refused() -> None:
    task = Task(product("llama-8b", "gate_up", "Q4_K", x="Q8_1"), "int")
    ctx = planned_for("apple_m1_moltenvk")  # sums of every thread go through shared memory
    small = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_shared_memory=8192))
    said = refusal(Point(256, 32, 8, 1), task, small)
    # 256 threads of 8 sums, a word a thread twice to reduce over, 32 output rows
    assert f"need {4 * 256 * 8 + 2 * 4 * 256 + 4 * 32} bytes of shared memory, Apple M1 has 8192" in said


TWO = [DOWN, product("qwen3-0.6b", "gate_up", "Q4_K", roles=("norm",))]


@pytest.mark.parametrize("profile", [H200, "amd_rx_7900_xtx_radv", "intel_arc_a770_anv", "llvmpipe_mesa_22_debian12"])
@pytest.mark.parametrize("gemv", TWO)
def test_what_is_not_refused_is_compiled_as_it_stands(profile: str, gemv: LinearProblem) -> None:
    ctx, task = planned_for(profile), Task(gemv, "int")
    start = actual(A._replace(rows=2, unroll=2), task, ctx)
    tried = [p for p in neighbours(start, axes(ctx.caps)) if not refusal(p, task, ctx)]
    assert len(set(tried)) >= 4
    for point in tried:
        defines = dict(lowered(point, task, ctx)[-1].kernel.defines)
        got = [defines[name] for name in ("WG", "LANES", "ROWS", "UNROLL", "PREFETCH", "LANES_BLOCKED", "LOOP_TILES")]
        prefetch = ("none", "weights", "weights+x").index(point.prefetch)
        blocked, loops = point.lane_order == "blocked", point.groups != "per_tile"
        assert got == [point.wg, point.lanes, point.rows, point.unroll, prefetch, int(blocked), int(loops)]
        if point.subgroup != "default":
            assert lowered(point, task, ctx)[-1].kernel.subgroup_size == point.subgroup


def test_only_a_time_beyond_the_noise_of_both_is_better() -> None:
    assert beats(Measurement(9.0, 0.1), Measurement(10.0, 0.1))
    assert not beats(Measurement(9.0, 0.3), Measurement(10.0, 0.3))
    assert not beats(Measurement(9.95, 0.0), Measurement(10.0, 0.0))
    assert not beats(Measurement(11.0, 0.0), Measurement(10.0, 0.0))


# -- the table


def result(m: int, k: int, *, after: Point = B, path: str = "int", latency: float = 8.0, **match: object) -> TuneResult[Point]:
    task = Task(LinearProblem("Q4_K", m, k, x="Q8_1" if path == "int" else "F32"), "int" if path == "int" else "float")
    return tune_result(
        task, A, after, key=task.key + str(match), match={**task.match, **match}, source="nvidia.toml [[gemv]] row 1", latency=latency
    )


def test_ranges_meet_at_the_geometric_mean_and_end_at_a_factor_of_two() -> None:
    assert edges([4096]) == {4096: (2048, 8192)}
    assert edges([14336, 1024, 4096, 4096]) == {1024: (512, 2047), 4096: (2048, 7662), 14336: (7663, 28672)}


def test_the_table_has_a_row_for_what_was_kept_and_leaves_the_rest_to_the_others() -> None:
    others = [result(4096, 4096, glu=True), result(4096, 4096, experts="summed")]
    results = [result(4096, 4096), result(14336, 4096, after=A), result(4096, 14336), *others]
    text = table_text(gemv_rows(results, CARD), CARD)
    rows = parse_table(text, "device_card.toml")
    assert [(r.match["m"], r.match["k"]) for r in rows if not r.match["glu"] and r.match["experts"] == "none"] == [
        ({"min": 2048, "max": 7662}, {"min": 2048, "max": 7662}),
        ({"min": 2048, "max": 8192}, {"min": 7663, "max": 28672}),
    ]
    assert len(rows) == 4
    assert all(r.match["sync"] == "barrier" for r in rows)
    assert rows[0].measured == (
        "2026-11-21 Card, driver 1, LINEAR(type_a=Q4_K,m=4096,n=1,k=4096,type_b=q8_1) int: latency 8.00 us, was 10.00 (nvidia.toml "
        "[[gemv]] row 1, noise 0.10); throughput 7.00 us, was 9.00, 100 % of the read rate"
    )


def test_the_quicker_path_wins_where_both_were_tuned() -> None:
    results = [result(4096, 4096), result(4096, 4096, path="float", latency=6.0), result(4096, 14336)]
    (path,) = [r for r in parse_table(table_text(gemv_rows(results, CARD), CARD), "device_card.toml") if r.family == "gemv_path"]
    assert path.set == {"path": "float"}
    assert (path.match["m"], path.match["k"]) == ({"min": 2048, "max": 8192}, {"min": 2048, "max": 8192})
    assert path.measured == "2026-11-21 Card, driver 1, Q4_K 4096x4096: latency 8.00 us in integers, 6.00 in floats"


# -- on a device


def sweep_of(
    device: Device, library: ShaderLibrary, folder: Path, *, budget_s: float, watcher: Watcher | None = None
) -> Sweep[Task, Point]:
    own = DeviceTable(device.caps, library, folder)
    tunable = ChainGemvs(device, library, LowerContext(device.caps, own.tables()), cold_bytes=1 << 16)
    return Sweep(tunable, own, 1.0, budget_s=budget_s, watcher=watcher)


@pytest.mark.vulkan
def test_a_sweep_makes_a_table_that_the_next_plan_uses(device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    seen: list[str] = []
    watcher = Watcher(point=lambda task, point, said: seen.append(said))
    tasks = tasks_for([(LinearProblem("Q4_K", 64, 256), 1)], LowerContext(device.caps, Tuning.for_device(device.caps)))
    (found,) = sweep_of(device, library, tmp_path, budget_s=1.0, watcher=watcher).run(tasks)
    assert found.tried >= 1
    assert not found.wrong
    assert any(said.endswith(" us") for said in seen)
    table = tmp_path / device_table(device.caps)
    assert len(parse_table(table.read_text(), table.name)) == int(found.kept)
    picked = Tuning.for_device(device.caps, user=tmp_path).pick("gemv", **found.match, m=64, k=256)
    assert (picked.source.startswith(str(table))) == found.kept
    assert found.latency <= found.latency_before
    again = sweep_of(device, library, tmp_path, budget_s=1.0)
    assert again.run(tasks, resume=True) == []
    assert again.results == [found]


@pytest.mark.vulkan
def test_a_point_that_ended_the_last_run_is_not_tried_again(device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    refused: dict[Point, str] = {}
    tasks = tasks_for([(LinearProblem("Q4_K", 64, 256), 1)], LowerContext(device.caps, Tuning.for_device(device.caps)))
    watcher = Watcher(point=lambda task, point, said: refused.update({point: said}))
    sweep = sweep_of(device, library, tmp_path, budget_s=0.5, watcher=watcher)
    suspect = sweep.tunable.starts(tasks[0])[-1]
    with suppress(KeyboardInterrupt), sweep.own.journal.trying(tasks[0].key, suspect):
        raise KeyboardInterrupt
    sweep = sweep_of(device, library, tmp_path, budget_s=0.5, watcher=watcher)
    sweep.run(tasks)
    assert refused[suspect] == "refused: the last run ended while trying it"


@pytest.fixture
def broken(tmp_path: Path) -> ShaderLibrary:
    """Shaders whose sums of more than one row a row group are a little off."""
    fault = "return CAPPED(total[c] * (ROWS > 1 ? 1.1 : 1.0) + addend[c]);"
    return shaders_with(tmp_path, "gemv/epilogue.glsl", "return CAPPED(NORMED(total[c]) + addend[c]);", fault)


@pytest.mark.vulkan
def test_points_with_wrong_results_are_not_timed(
    device: Device, broken: ShaderLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [Point(8, 8, 1, 1), Point(8, 8, 2, 1)]
    tasks = tasks_for([(LinearProblem("Q4_K", 64, 256), 1)], LowerContext(device.caps, Tuning.for_device(device.caps)))

    monkeypatch.setattr(Gemvs, "starts", lambda self, task: points)
    monkeypatch.setattr(Gemvs, "picked", lambda self, task, tables: (points[0], "test"))
    (found,) = sweep_of(device, broken, tmp_path, budget_s=0.1).run(tasks)
    assert found.after.rows == 1
    assert any(text.startswith("8 threads, 8 lanes, 2 rows, unroll 1: NMSE 1.0e-02 >") for text in found.wrong)
    assert not any(", 1 rows," in text for text in found.wrong)
    points.reverse()
    sweep = sweep_of(device, broken, tmp_path, budget_s=0.1)
    assert sweep.run(tasks) == []
    assert re.search(r"\(test: 8 threads, 8 lanes, 2 rows, unroll 1\) gives no right result: NMSE .* vkback doctor", sweep.faults[0])


@pytest.mark.vulkan
def test_points_that_do_not_compile_are_refused(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normed = "return CAPPED(NORMED(total[c]) + addend[c]);"
    library = shaders_with(tmp_path, "gemv/epilogue.glsl", normed, f"\n#if ROWS == 2\n#error two rows\n#endif\n    {normed}")
    points = [Point(8, 8, 1, 1), Point(8, 8, 2, 1), Point(16, 8, 1, 1)]
    refused: list[str] = []
    watcher = Watcher(point=lambda task, point, said: refused.append(said) if point.rows == 2 else None)
    tasks = tasks_for([(LinearProblem("Q4_K", 64, 256), 1)], LowerContext(device.caps, Tuning.for_device(device.caps)))
    monkeypatch.setattr(Gemvs, "starts", lambda self, task: points)
    monkeypatch.setattr(Gemvs, "picked", lambda self, task, tables: (points[0], "test"))
    (found,) = sweep_of(device, library, tmp_path, budget_s=0.1, watcher=watcher).run(tasks)
    assert found.after.rows == 1
    assert "two rows" in refused[0]


@pytest.mark.vulkan
def test_the_command_prints_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    code, text = tune("--case", "MUL_MAT(type_a=Q4_0,m=64,n=1,k=256)", "--budget", "1")
    assert code == 0, text
    assert "LINEAR(type_a=Q4_0,m=64,n=1,k=256,type_b=q8_1) int" in text
    assert "% of read rate" in text
    (table,) = tmp_path.glob("*.toml")
    assert f"table {table}" in text
    with (tmp_path / f"{table.stem}.journal").open() as file:
        assert json.loads(file.readline())["format"] == JOURNAL_FORMAT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "rope"], "--op rope: expected one of gemv"),
        (["--path", "half"], "--path half: expected one of auto, int, float, both"),
        (["--shape", "4096"], "--shape 4096: expected rows x columns, as 4096x14336"),
        (["--quant", "Q9"], "type_a=Q9: expected one of bf16,"),
        (["--case", "MUL_MAT(m=1)", "-m", "demo-dense"], "--case and --model exclude each other"),
    ],
)
@pytest.mark.vulkan
def test_the_command_refuses_what_it_cannot_do(arguments: Sequence[str], said: str) -> None:
    code, text = tune(*arguments)
    assert code == 1
    assert said in text


@pytest.mark.vulkan
def test_a_run_waits_for_another_of_the_same_device(device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    """It says so in one line, and begins with what the other has found: nothing of that is lost."""
    command = [sys.executable, "-m", "vkback.cli.main", "tune", "--quant", "Q8_0", "--shape", "64x256", "--budget", "1"]
    settings = {**os.environ, "VKBACK_TUNING": str(tmp_path)}
    with table_lock(device.caps, tmp_path, pytest.fail):
        asked = [*command, "--device", device.caps.name]
        run = subprocess.Popen(asked, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")
        try:
            assert run.stderr is not None
            own = DeviceTable(device.caps, library, tmp_path)
            line = next(iter(run.stderr))
            assert line == f"vkback: another run tunes {device.caps.name} and has {own.path}; waiting for its end\n"
            own.journal.finish("of the first", "its key", {"latency": 1.0})
        except BaseException:
            run.kill()
            raise
    assert run.wait(PATIENCE_S) == 0, run.stderr.read()
    assert "its key" in DeviceTable(device.caps, library, tmp_path).journal.results("of the first")


def test_axes_follow_the_device() -> None:
    intel, nvidia = (Capabilities.from_profile(p) for p in ("intel_arc_a770_anv", H200))
    assert axes(intel)["subgroup"] == ("default", 8, 16)
    assert axes(nvidia)["subgroup"] == ("default",)
    assert axes(dataclasses.replace(nvidia, shader_cores=132))["groups"] == ("per_tile", 132, 264, 528, 1056)
