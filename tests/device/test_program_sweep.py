"""Sweeps in the program of a model's token: what is planned for a point, what is kept, refused and remembered."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from sweep_kit import H200, set_clock, shaders_with, tune, tune_result

from vkback.autotune import program_sweep
from vkback.autotune.device_table import DeviceTable, table_text
from vkback.autotune.driver import Sweep, Watcher
from vkback.autotune.gemv_rows import gemv_rows
from vkback.autotune.gemvs import Gemvs
from vkback.autotune.points import Point, Task, actual, lowered, refusal, tasks_for
from vkback.autotune.program_sweep import (
    CHECKED_TOKENS,
    PROLOGUE_STARTS,
    WAITING_STARTS,
    ProgramGemvs,
    ProgramTrial,
    first_changed,
    replaced,
)
from vkback.autotune.tunable import TuneResult
from vkback.cli.tune_families import of_model
from vkback.device import Device
from vkback.graph import Tensor
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary
from vkback.timing import token_program
from vkback.timing.token_program import Tokens, is_barrier_free, token_graph
from vkback.tuning.lookup import Overrides, Tuning, device_table
from vkback.tuning.table import parse_table

Clock = Callable[[Callable[[Point], float]], None]
WORD = {"schedule": {"sync": "sentinel"}}
SCHEDULE_ROW = '[[schedule]]\nn = 1\nset = { sync = "sentinel" }\nmeasured = "test"\n'


def barrier_free(ctx: LowerContext) -> LowerContext:
    return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, WORD, "test"), sync="sentinel")


def program_tasks(name: str, ctx: LowerContext) -> list[Task]:
    return tasks_for(of_model(name, 1, ctx), ctx, program=name)


# -- what is planned


def test_the_tables_decide_whether_there_is_a_program_to_tune_in() -> None:
    model, ctx = Model.open(builtin_model("demo-moe")), planned_for(H200)
    barriers = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"schedule": {"sync": "barrier"}}, "test"))
    assert is_barrier_free(model, barrier_free(ctx))
    assert not is_barrier_free(model, barriers)


@pytest.mark.parametrize("name", ["demo-dense", "demo-moe"])
def test_a_point_takes_the_place_of_its_own_gemv_alone(name: str) -> None:
    ctx = barrier_free(planned_for(H200))
    graph = token_graph(Model.open(builtin_model(name)))
    present = [d for stage in plan(graph, ctx).stages for d in stage]
    tasks = program_tasks(name, ctx)
    changed: set[int] = set()
    for task in tasks:
        assert task.match["sync"] == "sentinel"
        assert task.line.endswith(f" in {name}")
        point = actual(Point(256, 16, 4, 1), task, task.context(ctx))
        other = plan(graph, dataclasses.replace(ctx, tuning=replaced(ctx.tuning, task, point)))
        mine = {i for i, (d, was) in enumerate(zip(other.dispatches(), present, strict=True)) if d.kernel != was.kernel}
        assert not mine & changed
        for i in mine:
            defines = dict(list(other.dispatches())[i].kernel.defines)
            assert (defines["WG"], defines["LANES"], defines["ROWS"]) == (point.wg, point.lanes, point.rows)
        changed |= mine
    gemvs = {i for i, d in enumerate(present) if d.op in ("LINEAR", "MOE_ROUTER")}
    assert changed == gemvs
    assert sum(task.count for task in tasks) == len(gemvs)


def test_starts_are_legal_where_they_are_meant_for() -> None:
    ctx = planned_for(H200)
    tasks = program_tasks("demo-dense", barrier_free(ctx))
    large = [dataclasses.replace(j, problem=dataclasses.replace(j.problem, m=8192, k=4096)) for j in tasks]
    for task in large:
        plain = task.problem.out == "F32" and "norm" not in task.problem.roles
        for shape in WAITING_STARTS if plain else PROLOGUE_STARTS:
            start = actual(Point(*shape, prefetch="weights"), task, task.context(ctx))
            assert refusal(start, task, task.context(ctx)) == ""
            defines = dict(lowered(start, task, ctx)[-1].kernel.defines)
            assert [defines[n] for n in ("WG", "LANES", "ROWS", "UNROLL")] == [*start[:4]]
            assert defines["PROLOGUE"] == ("none", "norm", "copy").index("copy" if plain else task.match["prologue"])
    plain_task = next(j for j in large if j.problem.x == "Q8_1")
    staged = Point(1024, 64, 2, 1, prefetch="weights", x_in_shared=True)
    assert refusal(staged, plain_task, plain_task.context(ctx)) == "x_in_shared = true would become false"  # it always is


# -- on a device


class Runs:
    """Sweeps of the dense built-in model in a folder whose table has its stages barrier-free; few tokens, and a clock of its own."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.table = folder / device_table(device.caps)
        self.table.write_text(SCHEDULE_ROW)
        self.said: dict[Point, str] = {}
        self.task = program_tasks("demo-dense", barrier_free(LowerContext(device.caps, Tuning.for_device(device.caps))))[0]

    def sweep(self, library: ShaderLibrary) -> Sweep[Task, Point]:
        watcher = Watcher(point=lambda task, point, said: self.said.update({point: said}))
        model = Model.open(builtin_model("demo-dense"))
        own = DeviceTable(self.device.caps, library, self.folder)
        ctx = LowerContext(self.device.caps, own.tables())
        tunable = ProgramGemvs(partial(Tokens, model, self.device, library, ctx), ctx)
        return Sweep(tunable, own, 1.0, budget_s=0.1, watcher=watcher)


@pytest.fixture
def runs(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr(token_program, "TOKENS_PER_SUBMIT", 2)
    monkeypatch.setattr(token_program, "DEPTH", 3)
    return Runs(device, tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a token takes with a point in its program."""

    return lambda time_us: set_clock(monkeypatch, ProgramTrial, "measure", lambda trial, point: time_us(point))


@pytest.mark.vulkan
def test_the_quickest_token_is_kept_as_a_row_for_barrier_free_programs(runs: Runs, library: ShaderLibrary, clock: Clock) -> None:
    seen: list[Point] = []  # what the tables choose first

    def time_us(point: Point) -> float:
        seen.append(point)
        return 100.0 if point == seen[0] else 99.5

    clock(time_us)
    sweep = runs.sweep(library)
    (found,) = sweep.run([runs.task])
    assert found.kept
    assert found.before == seen[0]
    assert not found.wrong
    rows = parse_table(runs.table.read_text(), runs.table.name)
    assert [(r.family, r.match.get("sync")) for r in rows] == [("schedule", None), ("gemv", "sentinel")]
    assert rows[0].set == {"sync": "sentinel"}
    assert rows[1].measured.startswith(f"{found.date} {runs.device.caps.name}")
    assert f"{runs.task.line}: 99.50 us a token, was 100.00 ({found.source}, noise 0.10)" in rows[1].measured
    query = {**runs.task.match, **runs.task.sizes}
    tables = Tuning.for_device(runs.device.caps, user=runs.folder)
    chosen = tables.pick("gemv", **query).params
    assert Point(**{name: chosen[name] for name in Point._fields}) == found.after
    assert tables.pick("gemv", **query | {"sync": "barrier"}).source != tables.pick("gemv", **query).source
    assert sweep.tunable.ctx.tuning.pick("gemv", **query) == tables.pick("gemv", **query)  # the next task begins with it
    again = runs.sweep(library)
    assert again.run([runs.task], resume=True) == []
    assert again.results == [found]


@pytest.mark.vulkan
def test_a_token_as_quick_within_the_noise_is_not_kept(runs: Runs, library: ShaderLibrary, clock: Clock) -> None:
    times: dict[Point, float] = {}
    clock(lambda point: times.setdefault(point, 100.0 - 0.001 * len(times)))
    (found,) = runs.sweep(library).run([runs.task])
    assert found.tried >= 2
    assert not found.kept
    assert [r.family for r in parse_table(runs.table.read_text(), runs.table.name)] == ["schedule"]


@pytest.mark.vulkan
def test_a_token_is_timed_by_the_device(runs: Runs, library: ShaderLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemvs, "starts", lambda self, task: [self.picked(task, self.ctx.tuning)[0]])
    (found,) = runs.sweep(library).run([runs.task])
    assert 0 < found.latency < 1e6
    assert found.read_share > 0


LANE = "    lane = tid % LANES;\n"


TENTH_MORE = ("gemv/epilogue.glsl", "CAPPED(NORMED(total[c]) + addend[c])", "CAPPED((WG == 8 ? 1.1 : 1.0) * NORMED(total[c]) + addend[c])")
TIMING_OUT = ("gemv/gemv.comp", LANE, f"{LANE}#if SPINS && WG == 8\n    spin_timeout = 1u;\n#endif\n")


@pytest.mark.parametrize(
    ("fault", "role", "said"),
    [
        (TENTH_MORE, "norm", r"WRONG RESULT: logits of 3 tokens of 3: NMSE "),
        (TENTH_MORE, "residual", r"WRONG RESULT: \S+: NMSE "),
        (TIMING_OUT, "norm", "WRONG RESULT: a spin-wait timed out"),
    ],
    ids=["logits", "first result", "waits"],
)
@pytest.mark.vulkan
def test_a_wrong_token_is_refused_and_named(
    runs: Runs, clock: Clock, fault: tuple[str, str, str], role: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(lambda point: 50.0 if point.wg == 8 else 100.0)
    tasks = program_tasks("demo-dense", barrier_free(planned_for(H200)))
    task = next(j for j in tasks if j.problem.out == "F32" and role in j.problem.roles)
    before: list[Point] = []

    def starts(self: Gemvs, task: Task) -> list[Point]:
        before[:] = [self.picked(task, self.ctx.tuning)[0]]
        return [*before, actual(Point(8, 8, 1, 1), task, task.context(self.ctx))]

    monkeypatch.setattr(Gemvs, "starts", starts)
    (found,) = runs.sweep(shaders_with(tmp_path, *fault)).run([task])
    assert before[0].wg != 8
    assert [p.wg for p, text in runs.said.items() if re.match(said, text)] == [8]
    assert [text.partition(":")[0] for text in found.wrong] == ["8 threads, 8 lanes, 1 rows, unroll 1"]
    assert found.after.wg != 8


@pytest.mark.vulkan
def test_a_program_that_is_wrong_as_it_stands_is_a_fault(runs: Runs, tmp_path: Path) -> None:
    library = shaders_with(tmp_path, "gemv/gemv.comp", LANE, f"{LANE}#if SPINS\n    spin_timeout = 1u;\n#endif\n")
    sweep = runs.sweep(library)
    assert sweep.run([runs.task]) == []
    assert "a spin-wait timed out" in sweep.faults[0]
    assert not sweep.own.journal.finished(runs.task.key)


@pytest.mark.vulkan
def test_the_command_tunes_in_the_program_where_it_is_barrier_free(runs: Runs, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    clock(lambda point: 100.0)
    monkeypatch.setenv("VKBACK_TUNING", str(runs.folder))
    code, text = tune("--op", "gemv", "-m", "demo-dense", "--budget", "1")
    assert code == 0, text
    assert "8 GEMVs, 8 of them in the program of a token" in text
    assert runs.task.line in text.replace("demo-dense-Q4_K_M", "demo-dense")
    assert "us a token" in text
    assert "latency us" not in text
    assert "0 of " in text
    assert runs.table.read_text().endswith(SCHEDULE_ROW)


def test_results_of_programs_and_of_chains_do_not_meet() -> None:
    task = program_tasks("demo-dense", barrier_free(planned_for(H200)))[0]
    point = Point(64, 32, 2, 2)

    def result(task: Task, latency: float) -> TuneResult[Point]:
        return tune_result(task, point, point._replace(wg=128), latency=latency)

    chain = dataclasses.replace(task, program="")
    results = [result(task, 900.0), result(chain, 8.0), result(dataclasses.replace(chain, path="float"), 9.0)]
    text = table_text(gemv_rows(results, "Card, driver 1"), "Card, driver 1")
    rows = parse_table(text, "device_card.toml")
    assert sorted(r.match["sync"] for r in rows if r.family == "gemv") == ["barrier", "barrier", "sentinel"]
    (path,) = [r for r in rows if r.family == "gemv_path"]
    assert path.measured.endswith("latency 8.00 us in integers, 9.00 in floats")


class Answers:
    """A program with these logits and experts for each of CHECKED_TOKENS, and a first result."""

    def __init__(self, logits: Array, experts: list[Array], first: Array) -> None:
        self._answers: dict[int, tuple[Array, Array]] = dict(zip(CHECKED_TOKENS, zip(logits, experts, strict=True), strict=True))
        self._first = first
        self._token = CHECKED_TOKENS[0]
        self.schedule, self.timed_out = None, False

    def run(self, token: int) -> Array:
        self._token = token
        return self._answers[token][0]

    def experts(self) -> list[Array]:
        return [self._answers[self._token][1]]

    def output(self, tensor: Tensor) -> Array:
        return self._first


@pytest.mark.parametrize(
    ("off", "rerouted", "first", "said"),
    [
        ((), (), 0.0, ""),
        ((1,), (), 0.0, ""),
        ((0, 2), (), 0.0, "logits of 2 tokens of 3"),
        ((0, 1, 2), (), 0.0, "logits of 3 tokens of 3"),
        ((0, 1, 2), (0, 1, 2), 0.0, ""),
        ((0, 1, 2), (1,), 0.0, "logits of 2 tokens of 3"),
        ((0, 1, 2), (0, 1, 2), 0.5, "y: NMSE"),
        ((), (), 0.5, "y: NMSE"),
    ],
)
def test_tokens_may_choose_other_experts_and_the_first_result_may_not_differ(
    off: tuple[int, ...], rerouted: tuple[int, ...], first: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order of additions, with two experts all but equally likely; what is wrong shows in the first result or in most tokens."""
    rng = np.random.default_rng(1)
    want, experts, result = rng.standard_normal((3, 64)).astype(np.float32), rng.integers(0, 32, (3, 4)), rng.standard_normal(64)
    got, chosen = want.copy(), experts.copy()
    for token in off:
        got[token] += 0.2 * rng.standard_normal(64).astype(np.float32)
    for token in rerouted:
        chosen[token, 0] += 1
    trial: ProgramTrial[Point] = object.__new__(ProgramTrial)
    present, candidate = Answers(want, list(experts), result), Answers(got, list(chosen), (1 + first) * result)
    monkeypatch.setattr(trial, "_present", present, raising=False)
    monkeypatch.setattr(trial, "_want", [(want[i], [experts[i]]) for i in range(3)], raising=False)
    monkeypatch.setattr(trial, "_program", lambda point: candidate)
    monkeypatch.setattr(program_sweep, "first_changed", lambda a, b: Tensor("y", "F32", (64,)))
    told = trial.wrong(Point(64, 32, 1, 1))
    assert told.startswith(said) and bool(told) == bool(said)


@pytest.mark.parametrize("name", ["demo-dense", "demo-moe"])
def test_the_first_tensor_that_another_kernel_makes(name: str) -> None:
    """Of every GEMV that the next spins on, and none where nothing has changed."""
    ctx = barrier_free(planned_for(H200))
    graph = token_graph(Model.open(builtin_model(name)))
    present = plan(graph, ctx)
    assert first_changed(present, plan(graph, ctx)) is None
    found: list[str] = []
    for task in program_tasks(name, ctx):
        point = Point(64, 8, 2, 1)
        other = plan(graph, dataclasses.replace(ctx, tuning=replaced(ctx.tuning, task, point)))
        tensor = first_changed(present, other)
        if tensor is not None:
            maker = next(d for d in other.dispatches() if (d.kernel, d.groups) not in {(p.kernel, p.groups) for p in present.dispatches()})
            assert tensor.name in {w for w, _ in maker.writes} and tensor.name in present.sentinel_tensors & other.sentinel_tensors
            found.append(tensor.name)
    assert len(found) >= 3
