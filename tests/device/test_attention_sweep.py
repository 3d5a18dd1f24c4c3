"""Sweeps of attention in the program of a model's token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from kernel_paths import planned_for
from sweep_kit import H200, set_clock, tune, tune_result

from vkback.autotune.attention import Attention, AttentionPoint, AttentionShape, AttentionTask, actual, attention_shapes, axes, neighbours
from vkback.autotune.device_table import DeviceTable, table_text
from vkback.autotune.driver import Sweep, Watcher
from vkback.autotune.program_sweep import ProgramTrial
from vkback.autotune.tunable import TuneResult
from vkback.device import Device
from vkback.models.registry import Model
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext, PlanError
from vkback.paths import builtin_model
from vkback.shader import ShaderLibrary
from vkback.timing.token_program import Tokens, token_graph
from vkback.tuning.lookup import Tuning
from vkback.tuning.table import load_table, parse_table

N_CTX = 64
SHAPE = AttentionShape(32, 8, 128, 4096)
Clock = Callable[[Callable[[AttentionPoint], float]], None]


def result(shape: AttentionShape, after: AttentionPoint) -> TuneResult[AttentionPoint]:
    task, before = AttentionTask(shape, 100), AttentionPoint(32, 4, 1, 1, 64, 64)
    return tune_result(task, before, after)


def no_tokens() -> AbstractContextManager[Tokens]:
    raise AssertionError("no program is run")


def attention(tokens: Tokens, ctx: LowerContext) -> Attention:
    return Attention(lambda: nullcontext(tokens), ctx)


def tuned(
    tokens: Tokens, ctx: LowerContext, own: DeviceTable, told: list[str] | None = None
) -> tuple[Sweep[AttentionTask, AttentionPoint], list[TuneResult[AttentionPoint]]]:
    """A sweep of the one shape there is, and its result."""
    (shape,) = attention_shapes(tokens.graph, ctx)
    watcher = Watcher(point=lambda task, point, said: told.append(said) if told is not None else None)
    sweep = Sweep(attention(tokens, ctx), own, 1.0, budget_s=60, watcher=watcher)
    return sweep, sweep.run([AttentionTask(shape, tokens.depth)])


# -- what is planned


def test_layers_that_the_tables_cannot_tell_apart_are_one_form(models: Callable[[str], Model]) -> None:
    ctx = planned_for(H200)
    graph = token_graph(models("gpt-oss-20b-MXFP4:4"), 512)
    assert attention_shapes(graph, ctx) == [AttentionShape(64, 8, 64, 512)], "with a window and without"
    hp = models("demo-dense").hp
    assert attention_shapes(token_graph(models("demo-dense"), 64), ctx) == [AttentionShape(hp.n_head, hp.n_head_kv, hp.head_dim_k, 64)]


def test_points_are_those_that_kernels_are_built_for() -> None:
    ctx = planned_for(H200)
    point = AttentionPoint(512, 16, 2, 4, 128, 64)
    assert actual(Choice(point._asdict(), "test"), SHAPE, ctx) == point
    adjusted = {"lanes": (32, 16), "steps": (8, 4), "queries": (8, 4)}
    for name, (wanted, got) in adjusted.items():
        changed = point._replace(**{"lanes": 8, name: wanted} if name == "steps" else {name: wanted})
        assert getattr(actual(Choice(changed._asdict(), "test"), SHAPE, ctx), name) == got


def test_neighbours_reach_every_value() -> None:
    ctx = planned_for(H200)
    choices = axes(ctx.caps)
    point = AttentionPoint(512, 16, 2, 4, 132, 64)
    found = list(neighbours(point, choices))
    for name, values in choices.items():
        assert {getattr(p, name) for p in found} >= set(values) - {getattr(point, name)}
    assert point not in found


def test_a_row_speaks_for_caches_around_its_own_and_for_one_token() -> None:
    after = AttentionPoint(256, 16, 4, 2, 132, 64)
    lines = Attention(no_tokens, planned_for(H200)).rows([result(SHAPE, after)], [], "a device, a driver")
    (row,) = parse_table(table_text(lines, "a device"), "device_test.toml")
    tuning = Tuning([[row], *Tuning.for_device(planned_for(H200).caps).tables])
    shape = SHAPE._asdict()

    def said(**changes: int) -> dict[str, object]:
        params = tuning.pick("attention", **{"n": 1, **shape, **changes}).params
        return {name: params[name] for name in AttentionPoint._fields}

    assert said() == said(n_ctx=2900) == said(n_ctx=5790) == after._asdict()
    for n in (2, 8, 16):
        shipped = Tuning.for_device(planned_for(H200).caps).pick("attention", n=n, **shape)
        assert tuning.pick("attention", n=n, **shape) == shipped, "a sweep of one token says nothing of steps of several"
    for changes in ({"n": 17}, {"n_ctx": 2890}, {"n_ctx": 5800}, {"n_head": 64}, {"head_dim": 64}):
        assert said(**changes) != after._asdict()
    assert "100 in use" in row.measured and "9.00 us a token, was 10.00" in row.measured


# -- on a device


@pytest.fixture(scope="module")
def tokens(device: Device, library: ShaderLibrary, ctx: LowerContext) -> Iterator[Tokens]:
    with Tokens(Model.open(builtin_model("demo-dense")), device, library, ctx, n_ctx=N_CTX, depth=20) as made:
        yield made


@pytest.fixture
def own(device: Device, library: ShaderLibrary, tmp_path: Path) -> DeviceTable:
    return DeviceTable(device.caps, library, tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a point takes; the kernels still run once, to be checked."""

    return lambda time_us: set_clock(monkeypatch, ProgramTrial, "measure", lambda trial, point: time_us(point))


def only(monkeypatch: pytest.MonkeyPatch, **values: tuple[int, ...]) -> None:
    """Has the sweep vary these parameters alone."""
    monkeypatch.setattr("vkback.autotune.attention.axes", lambda caps: values)
    monkeypatch.setattr(
        "vkback.autotune.attention.neighbours",
        lambda point, choices: (point._replace(**{name: value}) for name, some in choices.items() for value in some),
    )


@pytest.mark.vulkan
def test_the_best_point_is_found_step_by_step(
    tokens: Tokens, ctx: LowerContext, own: DeviceTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, wg_size=(8, 16), rows_per_split=(16, 4096))
    clock(lambda p: 100.0 - p.wg_size - 3 * (p.rows_per_split == 16))
    told: list[str] = []
    _, (found,) = tuned(tokens, ctx, own, told)
    assert found.kept and (found.after.wg_size, found.after.rows_per_split) == (16, 16), "one step at a time leads there"
    assert found.latency < found.latency_before and not found.wrong and found.tried == len(told) == 4


@pytest.mark.vulkan
def test_what_is_no_better_beyond_the_noise_is_not_kept(
    tokens: Tokens, ctx: LowerContext, own: DeviceTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, wg_size=(8, 16))
    clock(lambda p: 100.0 - 0.001 * p.wg_size)
    _, (found,) = tuned(tokens, ctx, own)
    assert not found.kept


@pytest.mark.vulkan
def test_wrong_points_are_named_and_never_kept(
    tokens: Tokens, ctx: LowerContext, own: DeviceTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, wg_size=(8, 16))
    clock(lambda p: 100.0 - 50 * (p.wg_size == 16))
    monkeypatch.setattr(ProgramTrial, "wrong", lambda self, point: "row 3 is wrong" if point.wg_size == 16 else "")
    _, (found,) = tuned(tokens, ctx, own)
    assert not found.kept and len(found.wrong) == 1 and "16 threads" in found.wrong[0] and "row 3 is wrong" in found.wrong[0]
    monkeypatch.setattr(ProgramTrial, "wrong", lambda self, point: "all wrong")
    sweep, results = tuned(tokens, ctx, own)
    assert not results and re.search(r"gives no right result: all wrong\. vkback doctor", sweep.faults[0])


@pytest.mark.vulkan
def test_points_the_planner_refuses_are_passed_over(
    tokens: Tokens, ctx: LowerContext, own: DeviceTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, wg_size=(8, 16))
    clock(lambda p: 100.0)
    right = ProgramTrial.wrong

    def refusing(self: ProgramTrial[AttentionPoint], point: AttentionPoint) -> str:
        if point.wg_size == 16:
            raise PlanError("no room")
        return right(self, point)

    monkeypatch.setattr(ProgramTrial, "wrong", refusing)
    told: list[str] = []
    _, (found,) = tuned(tokens, ctx, own, told)
    assert found.tried == 1
    assert "refused: no room" in told


@pytest.mark.vulkan
def test_rows_replace_those_of_the_same_form_and_no_others(own: DeviceTable) -> None:
    tunable = Attention(no_tokens, planned_for(H200))
    other, first, second = (AttentionPoint(64, 4, 1, q, 64, 64) for q in (1, 2, 4))
    own.keep(tunable, result(SHAPE._replace(head_dim=64), other))
    for point in (first, second):
        own.keep(tunable, result(SHAPE, point))
    rows = {r.match["head_dim"]: r.set["queries"] for r in load_table(own.path)}
    assert rows == {64: 1, 128: 4}
    own.path.write_text(own.path.read_text().replace("n = 1\n", "n = { max = 16 }\n"))
    own.keep(tunable, result(SHAPE, first))
    assert {r.match["head_dim"]: r.match["n"] for r in load_table(own.path)} == {64: {"max": 16}, 128: 1}, "as tables of before"


# -- the command


def test_a_case_is_refused() -> None:
    code, text = tune("--op", "attention", "-m", "demo-dense", "--case", "MUL_MAT(type_a=Q4_K,m=64,n=1,k=256)")
    assert code == 1 and "UsageError: " in text and "takes a model, no --case" in text


@pytest.mark.vulkan
def test_steps_of_several_tokens_are_passed_over_with_a_word() -> None:
    code, text = tune("--op", "attention", "-m", "demo-dense", "-t", "8")
    assert "attention of 8 tokens passed over: sweeps are of one token, or of prompts of more than 16" in text
    assert code == 1 and "UsageError: " in text and "nothing to tune" in text


def test_attention_needs_a_model() -> None:
    code, text = tune("--op", "attention")
    assert code == 1 and "UsageError: " in text and "name one with --model" in text


@pytest.mark.vulkan
def test_the_command_tells_before_and_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    only(monkeypatch, wg_size=(8, 16))
    clock(lambda p: 108.0 - p.wg_size)
    code, text = tune("--op", "attention", "-m", "demo-dense", "--ctx", "64", "--depth", "20", "-t", "1")
    assert code == 0, text
    assert "20 in use" in text and "before: " in text and "92.00 us a token, -8.0 %" in text
    (table,) = tmp_path.glob("device_*.toml")
    (row,) = load_table(table)
    assert row.family == "attention" and row.set["wg_size"] == 16


@pytest.mark.vulkan
def test_resuming_passes_over_forms_that_are_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    only(monkeypatch, wg_size=(8, 16))
    clock(lambda p: 100.0)

    def resumed(depth: int) -> str:
        code, text = tune("--op", "attention", "-m", "demo-dense", "--ctx", "64", "--depth", str(depth), "-t", "1", "--resume")
        assert code == 0, text
        return text

    assert "before: " in resumed(20)
    again = resumed(20)
    assert "1 of 1 shapes of attention were finished by an earlier run" in again and "before: " not in again
    assert "before: " in resumed(5), "another depth is another question"


@pytest.mark.vulkan
def test_a_point_that_ended_the_last_run_is_not_tried_again(
    tokens: Tokens, ctx: LowerContext, own: DeviceTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, wg_size=(8, 16))
    (shape,) = attention_shapes(tokens.graph, ctx)

    def ends(point: AttentionPoint) -> float:
        if point.wg_size == 16:
            raise KeyboardInterrupt
        return 100.0

    clock(ends)
    with pytest.raises(KeyboardInterrupt):
        tuned(tokens, ctx, own)
    key = AttentionTask(shape, tokens.depth).key
    assert not own.journal.finished(key)
    clock(lambda p: 100.0)
    told: list[str] = []
    again = DeviceTable(tokens.device.caps, tokens.library, own.path.parent)
    _, (found,) = tuned(tokens, ctx, again, told)
    assert not found.kept and "refused: the last run ended while trying it" in told
    assert again.journal.finished(key) and again.journal.results("attention")[key]["tried"] == 1
