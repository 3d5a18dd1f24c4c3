"""Sweeps of products of several tokens: kernels and tiles that are tried, what is refused, rows for the table, where kernels cross."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from shapes import product
from sweep_kit import H200, set_clock, tune, tune_result

from vkback.autotune.device_table import DeviceTable, table_text
from vkback.autotune.driver import Sweep, Watcher
from vkback.autotune.gemm_points import (
    MISFIT,
    GemmPoint,
    GemmTask,
    actual,
    as_prompt,
    axes,
    guesses,
    lowered,
    neighbours,
    refusal,
    tasks_for,
    with_point,
)
from vkback.autotune.gemm_rows import gemm_rows, tflops
from vkback.autotune.gemm_sweep import Gemms, GemmTrial, sample
from vkback.autotune.problem import LinearProblem
from vkback.autotune.tunable import TuneResult
from vkback.cli.tune_families import of_model
from vkback.device import Device
from vkback.harness.runner import reference_inputs
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.family import FAMILIES
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.choice import PARAMS_READ
from vkback.ops.op import OPS
from vkback.program.fragments import fragments_hold
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Tuning, device_table
from vkback.tuning.table import parse_table

Q4_K = product("llama-8b", "attn_output", "Q4_K", 512, roles=())
TILES = GemmPoint("coop_mat", 128, 128, 64, 64, 64, 1)
LINEAR = GemmPoint("gemv")


def task_of(problem: LinearProblem, ctx: LowerContext) -> GemmTask:
    ((task,), said) = tasks_for([(problem, 1)], ctx)
    assert not said
    return task


# -- tasks and points


def test_products_are_taken_as_prompts_have_them() -> None:
    fused = LinearProblem("Q4_K", 64, 256, 8, ("norm", "bias"), glu=True, out="Q8_1", x="Q8_1")
    assert as_prompt(fused) == LinearProblem("Q4_K", 64, 256, 8, ("bias",), glu=True)
    task = task_of(fused, planned_for(H200))
    assert task.match == {"matrices": True, "path": "int", "experts": "none", "quant": "Q4_K"}
    assert task.sizes == {"n": 8, "m": 64, "k": 256}


def test_tasks_of_a_weight_stand_together_and_the_heaviest_come_first() -> None:
    problems = [dataclasses.replace(Q4_K, m=m, n=n) for n in (2, 512, 16) for m in (1024, 4096)]
    tasks, _ = tasks_for([(p, 1) for p in problems], planned_for(H200))
    assert [(j.problem.m, j.problem.n) for j in tasks] == [(4096, 512), (4096, 16), (4096, 2), (1024, 512), (1024, 16), (1024, 2)]
    same = [(Q4_K, 3), (dataclasses.replace(Q4_K, roles=("residual",)), 2)]
    ((one,), _) = tasks_for(same, planned_for(H200))
    assert (one.problem.roles, one.count) == (("residual",), 5), "tables cannot tell them apart"


def test_what_is_passed_over_says_why() -> None:
    problems = [(dataclasses.replace(Q4_K, n=n), 1) for n in (1, 512, 8)]
    tasks, said = tasks_for(problems, planned_for("llvmpipe_mesa_26"))
    assert [j.problem.n for j in tasks] == [8]
    assert said[0].endswith("passed over: one token is for GEMVs (--op gemv)")
    assert "n=512" in said[1] and "passed over: one launch may take 5.7 s on such a device" in said[1]


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (TILES, ""),
        (LINEAR, ""),
        (GemmPoint("int_dot", tile_n=16), ""),
        (GemmPoint("f32", tile_n=16), ""),
        (TILES._replace(split_k=4), ""),
        (TILES._replace(subnormals=True), ""),
        (TILES._replace(warp_m=48), MISFIT),
        (TILES._replace(tile_n=8, warp_n=8), MISFIT),  # matrices have 16 columns
        (TILES._replace(tile_n=512, warp_n=32), MISFIT),  # 32 subgroups of 64 x 32
        (TILES._replace(step_k=1024), "step_k = 1024 would become 128"),
        (TILES._replace(warp_m=128, warp_n=128), "512 sums a thread, at most 128 are worth trying"),
        (TILES._replace(tile_m=256, tile_n=256), "128 sums and 40 other registers in each of 512 threads: a core has 65536"),
        (TILES._replace(tile_n=1024, tile_m=32, warp_m=32), "half of 1024 columns and more would be empty"),
        (TILES._replace(split_k=100), "100 parts of a row of 4096 weights in steps of 64"),
    ],
)
def test_points_are_refused_before_they_are_compiled(point: GemmPoint, said: str) -> None:
    ctx = planned_for(H200)
    roomy = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_shared_memory=1 << 17))
    assert refusal(task_of(Q4_K, ctx), point, ctx if said == MISFIT else roomy) == said


def test_what_the_tables_choose_is_tried_whatever_it_takes() -> None:
    ctx = planned_for(H200)
    large = TILES._replace(warp_m=128, warp_n=128)
    assert refusal(task_of(Q4_K, ctx), large, ctx, chosen=True) == ""


def test_every_parameter_that_a_kernel_reads_is_in_reach() -> None:
    assert GemmPoint._fields == tuple(FAMILIES["gemm"].set)
    starts = [TILES, GemmPoint("coop_reg", 16, 16, warp_m=16, slice_k=8), GemmPoint("int_dot"), GemmPoint("f32", tile_n=8, rows=4)]
    for start in starts:
        found = [p._asdict().items() ^ start._asdict().items() for p in neighbours(start, planned_for(H200).caps)]
        changed = {name for pairs in found for name, _ in pairs}
        given = {"tile_n"} if start.kernel == "coop_reg" else set()  # by the number of tokens
        assert changed == set(PARAMS_READ[start.kernel]) - given, start.kernel


def test_weights_without_a_step_have_no_subnormals() -> None:
    task = task_of(product("llama-8b", "attn_output", "F16", 512), planned_for(H200))
    assert refusal(task, TILES._replace(subnormals=True), planned_for(H200)) == "subnormals = true would become false"


def test_integer_dot_is_no_candidate_for_floats() -> None:
    ctx = planned_for(H200)
    task = task_of(LinearProblem("F16", 64, 256, 64), ctx)
    assert refusal(task, GemmPoint("int_dot", tile_n=16), ctx) == "kernel = int_dot would become f32"
    assert "int_dot" not in {g.kernel for g in guesses(task, ctx.caps)}


@pytest.mark.parametrize("profile", [H200, "amd_rx_9070_xt_radv", "amd_rx_6900_xt_radv", "intel_arc_b580_windows", "llvmpipe_mesa_26"])
@pytest.mark.parametrize("n", [2, 16, 512])
def test_what_is_not_refused_is_planned_as_it_stands(profile: str, n: int) -> None:
    ctx = planned_for(profile)
    small = dataclasses.replace(Q4_K, m=256, k=512, n=min(n, 64) if ctx.caps.software else n)
    task = task_of(small, ctx)
    starts = [p for g in guesses(task, ctx.caps) if not refusal(task, p := actual(task, with_point(ctx, g))[0], ctx)]
    kernels = {p.kernel for p in starts}
    assert "gemv" in kernels and len(kernels) >= 2
    assert ("coop_mat" in kernels) == (matrix_shape(ctx.caps) is not None)
    first = next(p for p in starts if p.kernel == ("coop_mat" if "coop_mat" in kernels else "int_dot"))
    for point in [*starts, *(p for p in neighbours(first, ctx.caps) if not refusal(task, p, ctx))]:
        assert actual(task, with_point(ctx, point))[0] == point
        sources = {d.kernel.source for d in lowered(task, point, ctx)}
        assert ("gemv/gemv.comp" if point.kernel == "gemv" else f"gemm/{point.kernel}.comp") in sources
        assert ("gemm/split_sum.comp" in sources) == (point.split_k > 1)


def test_neighbours_reach_every_value_and_are_another_kernel_s_never() -> None:
    ctx = planned_for(H200)
    found = list(neighbours(TILES, ctx.caps))
    for name, values in axes(ctx.caps).items():
        assert {getattr(p, name) for p in found} >= set(values)
    assert {p.kernel for p in found} == {"coop_mat"}
    assert {p.tile_n for p in neighbours(GemmPoint("int_dot", tile_n=8), ctx.caps)} == {4, 8}
    narrow = [p for p in neighbours(LINEAR, ctx.caps) if not refusal(task_of(dataclasses.replace(Q4_K, n=8), ctx), p, ctx)]
    assert {p.kernel for p in narrow} == {"coop_mat"} and {p.tile_n for p in narrow} == {16}, "narrow tiles stand against it"
    assert {p.split_k for p in narrow} == {1, 2, 4, 8}
    assert not list(neighbours(LINEAR, planned_for("amd_rx_6900_xt_radv").caps))


# -- the reference

SAMPLED = [
    LinearProblem("Q4_K", 200, 512, 5, ("bias", "residual")),
    LinearProblem("Q6_K", 128, 512, 9, ("bias",), glu=True),
    LinearProblem("MXFP4", 64, 256, 7, ("ids",), glu=True, n_expert=6, n_used=3),
    LinearProblem("Q4_K", 96, 256, 6, ("bias", "residual", "ids", "expert_weights"), n_expert=6, n_used=3),
]


@pytest.mark.parametrize("problem", SAMPLED, ids=lambda p: p.line)
def test_the_sample_is_a_part_of_the_op_s_reference(problem: LinearProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = planned_for(H200)
    task, built = task_of(problem, ctx), problem.build()
    (whole,) = OPS["LINEAR"].reference(reference_inputs(built), built.node.params)
    found = sample(built, task)
    outs = problem.m >> problem.glu
    assert found.columns[-1] == outs - 1 and len({c // 32 for c in found.columns}) == -(-outs // 32), "one of every 32 columns"
    np.testing.assert_allclose(found.values, whole[found.tokens][..., found.columns], rtol=1e-11)
    monkeypatch.setattr("vkback.autotune.gemm_sweep.CHECKED_SLOTS", 8)
    monkeypatch.setattr("vkback.autotune.gemm_sweep.CHECKED_EXPERTS", 8 * problem.k * 2)
    monkeypatch.setattr("vkback.autotune.gemm_sweep.GATHERED", 1)
    part = sample(built, dataclasses.replace(task, problem=dataclasses.replace(problem, n=problem.n - 1)))
    assert part.tokens[0] == 0 and part.tokens[-1] == problem.n - 2, "of fewer tokens the same weights serve"
    np.testing.assert_allclose(part.values, whole[part.tokens][..., part.columns], rtol=1e-11)


# -- rows


def result(n: int, after: GemmPoint, *, m: int = 4096, k: int = 4096, before: GemmPoint = LINEAR) -> TuneResult[GemmPoint]:
    task = task_of(LinearProblem("Q4_K", m, k, n), planned_for(H200))
    return tune_result(task, before, after, source="default.toml [[gemm]] row 1", latency_before=50.0, latency=25.0)


def test_a_row_speaks_for_tokens_around_its_own_and_the_planner_takes_it() -> None:
    small = GemmPoint("coop_mat", 128, 16, 64, 32, 16, 2)
    int_dot = GemmPoint("int_dot", tile_n=16)
    results = [result(2, LINEAR), result(8, small), result(64, TILES._replace(tile_n=64)), result(512, int_dot)]
    rows = parse_table(table_text(gemm_rows(results, "Card, driver 1"), "Card"), "device_card.toml")
    found = sorted((r.match["n"]["min"], r.match["n"]["max"]) for r in rows)
    assert found == [(4, 22), (23, 181), (182, 1024)], "nothing beat gemv at 2"
    assert all(r.match["m"] == r.match["k"] == {"min": 2048, "max": 8192} for r in rows)
    ctx = planned_for(H200)
    own = dataclasses.replace(ctx, tuning=Tuning([rows, *Tuning.for_device(ctx.caps).tables]))
    for n, want in ((2, "coop_reg"), (4, "coop_mat"), (22, "coop_mat"), (100, "coop_mat"), (512, "int_dot")):
        assert actual(task_of(dataclasses.replace(Q4_K, n=n), own), own)[0].kernel == want
    assert actual(task_of(dataclasses.replace(Q4_K, n=8), own), own)[0] == small
    assert actual(task_of(dataclasses.replace(Q4_K, m=100, n=8), own), own)[0].kernel == "coop_reg", "another size"
    assert "latency 25.00 us (10.74 TFLOPS), was 50.00 (gemv; default.toml" in next(r for r in rows if r.match["n"]["min"] == 4).measured
    assert tflops(result(8, small), 25.0) == pytest.approx(2 * 4096 * 4096 * 8 / 25e6)


def test_gemvs_speak_for_whole_passes_of_sixteen_tokens_only() -> None:
    results = [result(16, LINEAR, before=TILES), result(512, TILES, before=TILES)]
    (row,) = parse_table(table_text(gemm_rows(results, "Card"), "Card"), "device_card.toml")
    assert row.match["n"] == {"min": 8, "max": 16}
    assert row.set == {"kernel": "gemv"}


def test_rows_of_many_sizes_never_meet() -> None:
    results = [result(n, TILES, m=m, k=k) for n in (2, 8, 512) for m, k in ((4096, 4096), (4096, 14336), (14336, 4096), (1024, 4096))]
    results += [result(16, TILES)]
    rows = parse_table(table_text(gemm_rows(results, "Card"), "Card"), "device_card.toml")
    assert len(rows) == len(results), "the table was taken: no two rows disagree, each wins somewhere"


# -- on a device

SMALL = [LinearProblem("Q8_0", 72, 256, n) for n in (2, 24)]
Clock = Callable[[Callable[[GemmPoint, int], float]], None]


@pytest.fixture(autouse=True)
def few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU drivers take seconds to compile tiles of many columns."""
    monkeypatch.setattr("vkback.autotune.gemm_points.COLUMNS", (4, 8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a point takes, by its task's tokens; the kernels still run once, to be checked."""

    return lambda time_us: set_clock(monkeypatch, GemmTrial, "measured", lambda trial, point: time_us(point, trial.task.problem.n))


def swept(
    device: Device, library: ShaderLibrary, folder: Path, problems: list[LinearProblem], *, told: list[str] | None = None
) -> tuple[Sweep[GemmTask, GemmPoint], list[TuneResult[GemmPoint]]]:
    own = DeviceTable(device.caps, library, folder)
    ctx = LowerContext(device.caps, own.tables(), fragments=fragments_hold(device, library))
    tasks, said = tasks_for([(p, 1) for p in problems], ctx)
    assert not said
    watcher = Watcher(point=lambda task, point, text: told.append(f"{point.text}: {text}") if told is not None else None)
    sweep = Sweep(Gemms(device, library, ctx, tasks, cold_bytes=1), own, 1.0, budget_s=200.0, watcher=watcher)
    return sweep, sweep.run(tasks)


@pytest.mark.vulkan
def test_every_kernel_of_the_device_is_tried_and_right(device: Device, library: ShaderLibrary, tmp_path: Path, clock: Clock) -> None:
    clock(lambda point, n: 100.0 + len(point.kernel))
    told: list[str] = []
    problems = [SMALL[1], LinearProblem("Q8_0", 64, 64, 9, ("bias", "residual", "ids", "expert_weights"), n_expert=6, n_used=2)]
    sweep, results = swept(device, library, tmp_path, problems, told=told)
    assert not sweep.faults and not any(r.wrong for r in results)
    right = {text.split()[0].rstrip(":") for text in told if text.endswith(" us")}
    wanted = {"gemv", "f32"} | ({"int_dot"} if device.caps.int_dot else set())
    assert right == wanted | ({"coop_mat"} if matrix_shape(device.caps) is not None else set())


@pytest.mark.vulkan
def test_where_kernels_cross_is_found_and_the_next_plan_knows_it(
    device: Device, library: ShaderLibrary, tmp_path: Path, clock: Clock
) -> None:
    """gemv takes 3 us a token, f32 tiles 30: they cross at 10 tokens, where the tables that come with vkback say 3."""
    clock(lambda point, n: 3.0 * n if point.kernel == "gemv" else 30.0 + point.tile_n / 100 if point.kernel == "f32" else 500.0)
    problems = [LinearProblem("Q8_0", 72, 64, n) for n in (4, 14)]
    sweep, results = swept(device, library, tmp_path, problems)
    assert {r.sizes["n"]: r.after.kernel for r in results} == {4: "gemv", 14: "f32"}
    assert {r.sizes["n"]: r.kept for r in results} == {4: True, 14: False}
    own = LowerContext(device.caps, Tuning.for_device(device.caps, user=tmp_path))
    assert actual(task_of(problems[1], own), own)[0].kernel == "f32"
    assert actual(task_of(problems[0], own), own)[0] == LINEAR
    tunable = sweep.tunable
    assert isinstance(tunable, Gemms)
    (quickest,) = [found for key, found in tunable.quickest.items() if '"n": 14' in key]
    assert quickest["gemv"] == 42.0 and quickest["f32"] == pytest.approx(30.04), "the hill climb went along tile_n"


@pytest.mark.vulkan
def test_real_times_are_measured_and_a_run_is_resumed(
    device: Device, library: ShaderLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkback.autotune.gemm_sweep.guesses", lambda task, caps: [LINEAR, GemmPoint("f32", tile_n=8)])
    monkeypatch.setattr("vkback.autotune.gemm_sweep.neighbours", lambda point, caps: iter(()))
    _, (found,) = swept(device, library, tmp_path, SMALL[:1])
    assert found.latency > 0 and found.throughput > 0 and found.nbytes > 0 and found.tried >= 1 and not found.wrong
    table = tmp_path / device_table(device.caps)
    assert len(parse_table(table.read_text(), table.name)) == int(found.kept)
    again = swept(device, library, tmp_path, [])[0]
    assert again.results == [found]
    assert again.own.journal.finished(found.key)


@pytest.mark.vulkan
def test_a_kernel_with_wrong_results_never_counts(
    device: Device, library: ShaderLibrary, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column of one token is off in all that f32 makes; by its time it would win."""
    clock(lambda point, n: 1.0 if point.kernel == "f32" else 10.0)
    monkeypatch.setattr("vkback.autotune.gemm_sweep.BLOCK", 1)
    from vkback.timing.launches import Bench

    right = Bench.outputs

    def outputs(self: Bench, ctx: LowerContext, node: object = None) -> dict[str, np.ndarray]:
        made = right(self, ctx, node)  # type: ignore[arg-type]
        if any(d.kernel.source == "gemm/f32.comp" for d in OPS["LINEAR"].lower(node, ctx)):  # type: ignore[arg-type]
            made["y"][1, 17] += 1000.0
        return made

    monkeypatch.setattr(Bench, "outputs", outputs)
    _, (found,) = swept(device, library, tmp_path, SMALL[:1])
    assert found.after.kernel in ("gemv", "int_dot")
    assert found.wrong and all(text.startswith("f32 ") and "NMSE" in text for text in found.wrong)


# -- the command


@pytest.mark.vulkan
def test_the_command_tells_where_kernels_cross(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    clock(lambda point, n: 3.0 * n if point.kernel == "gemv" else 30.0 if point.kernel == "f32" else 500.0)
    code, text = tune("--op", "gemm", "--quant", "Q8_0", "--shape", "72x256", "-t", "1,4,14,200000", "--budget", "100")
    assert code == 0, text
    assert "n=200000" in text and "passed over: one launch may take" in text
    assert "2 products of several tokens, 100 s" in text
    assert "Q8_0 72x256: gemv for 4 tokens; f32 for 14 tokens" in text
    assert "% of math rate" in text and "kernels' best us" in text
    assert "1 of 2 products of several tokens improved" in text
    (table,) = tmp_path.glob("device_*.toml")
    assert [r.match["n"] for r in parse_table(table.read_text(), table.name)] == [{"min": 2, "max": 7}]
    code, text = tune("--op", "gemm", "--quant", "Q8_0", "--shape", "72x256", "-t", "4,14", "--resume")
    assert code == 0 and "2 of 2 products of several tokens were finished by an earlier run" in text
    assert "Q8_0 72x256: gemv for 4 tokens; f32 for 14 tokens" in text, "from the journal"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "gemm", "--path", "int"], "--path int: gemm takes the kernels of every path as candidates; leave it out"),
        (["--op", "gemm", "-t", "2,x"], "--tokens 2,x: expected whole numbers above 0 with commas, as 2,8,512"),
        (["--op", "gemm", "--shape", "64x256", "-t", "1"], "nothing to tune on"),
        (["--op", "gemms"], "--op gemms: expected one of gemv, gemm, attention"),
    ],
)
@pytest.mark.vulkan
def test_the_command_refuses_what_it_cannot_do(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    code, text = tune(*arguments)
    assert code == 1 and f"UsageError: {said}" in text


def test_a_model_s_products_of_a_prompt_are_those_of_its_schedule() -> None:
    ctx = planned_for(H200)
    tasks, _ = tasks_for([(p, count) for p, count in of_model("demo-moe", 512, ctx) if p.n > 1], ctx)
    assert {j.problem.n for j in tasks} == {512}
    assert {j.problem.experts for j in tasks} == {"none", "each", "summed"}
    assert all("norm" not in j.problem.roles and j.problem.x == j.problem.out == "F32" for j in tasks)
