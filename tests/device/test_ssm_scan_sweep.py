"""Sweeps of the Mamba-2 scans of a prompt, in chains of launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_paths import planned_for
from sweep_kit import H200, assert_planned_as_they_stand, set_clock, tune

from vkback.autotune.chain_trial import ChainTrial
from vkback.autotune.device_table import DeviceTable
from vkback.autotune.driver import Sweep, Watcher
from vkback.autotune.ssm_scans import GUESSES, ScanPoint, ScanTask, SsmScans, neighbours, tasks_for
from vkback.device import Device
from vkback.models import Model
from vkback.ops.lowering import LowerContext
from vkback.ops.recurrent.scan_heads import Heads
from vkback.shader import ShaderLibrary
from vkback.tuning.table import load_table

TASK = ScanTask(512, Heads(24, 64, 128, 1))
SCAN, CHUNKS = ScanPoint("scan", 16, 8), ScanPoint("chunks", 64, chunk=64, tokens=4, columns=64)


def test_a_prompt_s_scans_are_those_of_its_graph(models: Callable[[str], Model]) -> None:
    ctx, model = planned_for(H200), models("mamba2-130m-Q4_K_M:4")
    assert tasks_for(model.graph(512, 512, head="all").nodes, ctx) == ([TASK], [])
    assert SsmScans.actual(TASK.node(), ctx) == CHUNKS and TASK.node().outputs[0].shape == (512, 24 * 64)
    assert tasks_for(models("demo-dense").graph(512, 512, head="all").nodes, ctx) == ([], [])


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (SCAN, ""),
        (CHUNKS, ""),
        (CHUNKS._replace(chunk=32), ""),
        (CHUNKS._replace(chunk=48), "chunk = 48 is not legal, expected one of 16, 32, 64"),
        (CHUNKS._replace(rows=8), "tokens = 4 would become 2"),
        (SCAN._replace(lanes=64), "lanes = 64 is not legal, expected one of 1, 2, 4, 8, 16, 32"),
        (SCAN._replace(rows=64, lanes=32), "rows = 64 would become 32"),
    ],
)
def test_points_are_refused_before_they_are_compiled(point: ScanPoint, said: str) -> None:
    assert SsmScans.why_not(TASK.node(), point, planned_for(H200)) == said


@pytest.mark.parametrize("profile", [H200, "amd_rx_6900_xt_radv", "llvmpipe_mesa_26"])
def test_what_is_not_refused_is_planned_as_it_stands(profile: str) -> None:
    dispatches = {"scan": 1, "chunks": 3}
    assert_planned_as_they_stand(SsmScans, ScanTask(64, Heads(4, 64, 64, 2)).node(), planned_for(profile), GUESSES, neighbours, dispatches)


@pytest.mark.vulkan
def test_both_kernels_are_tried_and_right(
    device: Device, library: ShaderLibrary, ctx: LowerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkback.autotune.ssm_scans.neighbours", lambda point: iter(()))
    set_clock(monkeypatch, ChainTrial, "measured", lambda trial, point: 9.0 if point.chunk == 32 else 10.0)
    told: list[str] = []
    watcher = Watcher(point=lambda task, point, text: told.append(f"{point.kernel} {text}"))
    sweep = Sweep(SsmScans(device, library, ctx), DeviceTable(device.caps, library, tmp_path), 1.0, budget_s=100.0, watcher=watcher)
    (found,) = sweep.run([ScanTask(40, Heads(4, 16, 16, 2))])
    assert not found.wrong and found.after.kernel == "chunks" and found.after.chunk == 32
    assert {text.split()[0] for text in told if text.endswith(" us")} == {"scan", "chunks"}


@pytest.mark.vulkan
def test_a_model_s_prompt_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    monkeypatch.setattr("vkback.autotune.ssm_scans.neighbours", lambda point: iter(()))
    set_clock(monkeypatch, ChainTrial, "measured", lambda trial, point: 5.0 if point.kernel == "scan" and point.lanes > 1 else 50.0)
    code, text = tune("--op", "ssm_scan", "-m", str(tiny("tiny-mamba2")), "-t", "40", "--budget", "30")
    assert code == 0, text
    assert "1 Mamba-2 scans, 30 s" in text and "after:  scan, " in text
    (table,) = tmp_path.glob("device_*.toml")
    (row,) = load_table(table)
    assert row.family == "ssm_scan" and row.set["kernel"] == "scan" and row.set["lanes"] > 1 and row.match["n"] == {"min": 20, "max": 80}
    code, text = tune("--op", "ssm_scan")
    assert code != 0 and "--op ssm_scan is tuned with the shapes of a model; name one with --model" in text
