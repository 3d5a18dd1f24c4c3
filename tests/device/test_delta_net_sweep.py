"""Sweeps of the delta nets of a prompt, in chains of launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_paths import planned_for
from sweep_kit import H200, assert_planned_as_they_stand, set_clock, tune, tune_result

from vkback.autotune.chain_trial import ChainTrial
from vkback.autotune.delta_nets import GUESSES, DeltaNets, DeltaPoint, DeltaTask, neighbours, tasks_for
from vkback.autotune.device_table import DeviceTable
from vkback.autotune.driver import Sweep, Watcher
from vkback.device import Device
from vkback.models import Model
from vkback.ops.lowering import LowerContext
from vkback.ops.recurrent.delta_heads import Heads
from vkback.shader import ShaderLibrary
from vkback.tuning.table import load_table

TASK = DeltaTask(512, Heads(32, 128, 128, 16))
SCAN, CHUNKS = DeltaPoint("scan", 16, 8, 1), DeltaPoint("chunks", 32, chunk=32, tokens=2)
Clock = Callable[[Callable[[DeltaPoint], float]], None]


def test_a_prompt_s_delta_nets_are_those_of_its_graph(models: Callable[[str], Model]) -> None:
    ctx = planned_for(H200)
    model = models("qwen35moe-35b-a3b-Q4_K_M:4")
    assert tasks_for(model.graph(512, 512, head="all").nodes, ctx) == ([TASK], [])
    assert DeltaNets.actual(TASK.node(), ctx) == CHUNKS and TASK.node().outputs[0].shape == (512, 4096)
    assert tasks_for(models("demo-dense").graph(512, 512, head="all").nodes, ctx) == ([], [])
    slow, said = tasks_for(model.graph(4096, 4096, head="all").nodes, planned_for("llvmpipe_mesa_26"))
    assert not slow and "delta net of 4096 tokens, 32 heads of 128, 16 of 128 for q and k passed over: one launch may take" in said[0]


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (SCAN, ""),
        (CHUNKS, ""),
        (CHUNKS._replace(chunk=64), ""),
        (CHUNKS._replace(chunk=48), "chunk = 48 is not legal, expected one of 16, 32, 64"),
        (CHUNKS._replace(rows=64), "rows = 64 would become 32"),
        (CHUNKS._replace(chunk=16, rows=128), "rows = 128 would become 32"),
        (SCAN._replace(rows=1, per_thread=2), "per_thread = 2 would become 1"),
    ],
)
def test_points_are_refused_before_they_are_compiled(point: DeltaPoint, said: str) -> None:
    assert DeltaNets.why_not(TASK.node(), point, planned_for(H200)) == said


@pytest.mark.parametrize("profile", [H200, "amd_rx_6900_xt_radv", "llvmpipe_mesa_26"])
def test_what_is_not_refused_is_planned_as_it_stands(profile: str) -> None:
    dispatches = {"scan": 1, "chunks": 2}
    assert_planned_as_they_stand(
        DeltaNets, DeltaTask(64, Heads(4, 64, 64, 2)).node(), planned_for(profile), GUESSES, neighbours, dispatches
    )


@pytest.mark.vulkan
def test_rows_name_tokens_and_heads_and_the_parameters_of_their_kernel(device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    own, tunable = DeviceTable(device.caps, library, tmp_path), DeltaNets(device, library, planned_for(H200))
    own.path.write_text('[[delta_net]]\nn = 1\nset = { lanes = 4 }\nmeasured = "by hand"\n')
    for n, after in ((512, CHUNKS._replace(rows=16)), (64, SCAN), (512, CHUNKS._replace(rows=8))):
        own.keep(tunable, tune_result(DeltaTask(n, TASK.heads), SCAN if after != SCAN else CHUNKS, after))
    heads = {"n_head": 32, "dim": 128, "key": 128}
    rows = [(r.match, r.set) for r in load_table(own.path)]
    assert ({"n": {"min": 182, "max": 1024}, **heads}, {"kernel": "chunks", "chunk": 32, "rows": 8, "tokens": 2}) in rows
    assert ({"n": {"min": 32, "max": 181}, **heads}, {"kernel": "scan", "lanes": 8, "rows": 16, "per_thread": 1}) in rows
    assert ({"n": 1}, {"lanes": 4}) in rows and len(rows) == 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a point takes; the kernels still run once, to be checked."""
    return lambda time_us: set_clock(monkeypatch, ChainTrial, "measured", lambda trial, point: time_us(point))


@pytest.mark.vulkan
def test_both_kernels_are_tried_and_right(
    device: Device, library: ShaderLibrary, ctx: LowerContext, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkback.autotune.delta_nets.neighbours", lambda point: iter(()))
    clock(lambda point: 9.0 if point.kernel == "chunks" and point.chunk == 16 else 10.0)
    told: list[str] = []
    watcher = Watcher(point=lambda task, point, text: told.append(f"{point.kernel} {text}"))
    sweep = Sweep(DeltaNets(device, library, ctx), DeviceTable(device.caps, library, tmp_path), 1.0, budget_s=100.0, watcher=watcher)
    (found,) = sweep.run([DeltaTask(40, Heads(4, 16, 16, 2))])
    assert not found.wrong and found.after == DeltaPoint("chunks", 16, chunk=16, tokens=1) and found.kept
    assert {text.split()[0] for text in told if text.endswith(" us")} == {"scan", "chunks"}


@pytest.mark.vulkan
def test_a_model_s_prompt_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock, tiny: Callable[[str], Path]) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    monkeypatch.setattr("vkback.autotune.delta_nets.neighbours", lambda point: iter(()))
    clock(lambda point: 5.0 if point.kernel == "chunks" and point.chunk == 16 else 50.0)
    code, text = tune("--op", "delta_net", "-m", str(tiny("tiny-qwen35")), "-t", "40", "--budget", "30")
    assert code == 0, text
    assert "1 delta nets, 30 s" in text and "after:  chunks of 16 tokens, 16 rows, 1 tokens a thread: 5.00 us, " in text
    (table,) = tmp_path.glob("device_*.toml")
    (row,) = load_table(table)
    assert row.set == {"kernel": "chunks", "chunk": 16, "rows": 16, "tokens": 1} and row.match["n"] == {"min": 20, "max": 80}
    code, text = tune("--op", "delta_net")
    assert code != 0 and "--op delta_net is tuned with the shapes of a model; name one with --model" in text
