"""Sweeps of attention of many tokens, in chains of launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from sweep_kit import H200, set_clock, tune, tune_result

from vkback.autotune.attention_prompts import PromptAttention, PromptPoint, PromptTask, guesses, neighbours, sample, tasks_for
from vkback.autotune.chain_trial import ChainTrial
from vkback.autotune.device_table import DeviceTable
from vkback.autotune.driver import Sweep, Watcher
from vkback.autotune.tunable import TuneResult
from vkback.device import Device
from vkback.harness.runner import reference_inputs
from vkback.models import Model
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.plan.passes.fuse import fuse
from vkback.shader import ShaderLibrary
from vkback.tuning.table import load_table

TASK = PromptTask(512, 32, 8, 128)
MATRIX = PromptPoint("matrix", 64, 64, 4)
DECODE = PromptPoint("decode")
Clock = Callable[[Callable[[PromptPoint], float]], None]


def test_a_task_s_node_is_that_of_its_problem() -> None:
    task = PromptTask(20, 4, 2, 64, 13, 8, True)
    assert task.node() == task.build().node


def test_a_prompt_s_shapes_of_attention_are_those_of_its_graph(models: Callable[[str], Model]) -> None:
    ctx = planned_for(H200)
    tasks, said = tasks_for(fuse(models("gpt-oss-20b-MXFP4:4").graph(512, 512, head="all"), ctx), 0, ctx)
    assert tasks == [PromptTask(512, 64, 8, 64, 0, 0, True)] and not said, "a layer without a window speaks for both"
    few, said = tasks_for(models("demo-dense").graph(8, 64, head="all").nodes, 0, ctx)
    assert not few and "passed over: up to 16 tokens take the kernel of generation" in said[0]
    deep, said = tasks_for(models("demo-dense").graph(512, 512, head="all").nodes, 200_000, planned_for("llvmpipe_mesa_26"))
    assert not deep and "passed over: one launch may take" in said[0]


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (MATRIX, ""),
        (DECODE, ""),
        (PromptPoint("plain", 64, 16, 4), ""),
        (MATRIX._replace(tile_kv=24), "tile_kv = 24 is not legal, expected one of 4, 8, 16, 32, 64, 128"),
        (MATRIX._replace(tile_q=16), "tile_q = 16 would become 64"),
        (MATRIX._replace(warps=3), "warps = 3 is not legal, expected one of 1, 2, 4, 8, 16"),
    ],
)
def test_points_are_refused_before_they_are_compiled(point: PromptPoint, said: str) -> None:
    assert PromptAttention.why_not(TASK.node(), point, planned_for(H200)) == said


@pytest.mark.parametrize("profile", [H200, "amd_rx_6900_xt_radv", "llvmpipe_mesa_26"])
def test_what_is_not_refused_is_planned_as_it_stands(profile: str) -> None:
    ctx, node = planned_for(profile), PromptTask(64, 8, 2, 64).node()
    starts = [PromptAttention.actual(node, PromptAttention.with_point(ctx, g)) for g in guesses(ctx.caps)]
    assert {p.kernel for p in starts} == {"decode", "plain"} | ({"matrix"} if matrix_shape(ctx.caps) is not None else set())
    tried = {p for start in starts for p in neighbours(start, ctx.caps) if not PromptAttention.why_not(node, p, ctx)}
    assert len(tried) >= 4
    sources = {
        "decode": "attention/decode/attention.comp",
        "plain": "attention/prompt/prompt.comp",
        "matrix": "attention/prompt/prompt_matrix.comp",
    }
    for point in (*starts, *tried):
        assert not PromptAttention.why_not(node, point, ctx)
        assert PromptAttention.lowered(node, point, ctx)[-1].kernel.source == sources[point.kernel]


def test_the_sample_is_a_part_of_the_op_s_reference() -> None:
    built = PromptTask(70, 4, 2, 64, 30, 0, True).build()
    (whole,) = OPS["FLASH_ATTN_EXT"].reference(reference_inputs(built), built.node.params)
    tokens, values = sample(built)
    assert tokens[0] == 0 and tokens[-1] == 69 and len(tokens) < 70
    np.testing.assert_allclose(values, whole.reshape(70, -1)[tokens], rtol=1e-10)


def result(n: int, after: PromptPoint, *, heads: int = 32, before: PromptPoint = DECODE) -> TuneResult[PromptPoint]:
    task = PromptTask(n, heads, 8, 128)
    return tune_result(task, before, after)


GENERATION = """
[[attention]]
n = { max = 16 }
n_head = 32
set = { wg_size = 64 }
measured = "by hand"
"""


@pytest.mark.vulkan
def test_rows_of_prompts_stand_beside_those_of_generation(device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    own, tunable = DeviceTable(device.caps, library, tmp_path), PromptAttention(device, library, planned_for(H200))
    own.path.write_text(GENERATION)
    newer, other = result(512, MATRIX._replace(tile_kv=32)), result(512, DECODE, heads=64, before=MATRIX)
    for found in (result(512, MATRIX), result(20, MATRIX), newer, other):
        own.keep(tunable, found)
    rows = [(r.match["n"], r.match["n_head"], r.set) for r in load_table(own.path)]
    assert ({"max": 16}, 32, {"wg_size": 64}) in rows
    assert ({"min": 102, "max": 1024}, 32, MATRIX._replace(tile_kv=32)._asdict()) in rows
    assert ({"min": 17, "max": 101}, 32, MATRIX._asdict()) in rows
    assert ({"min": 256, "max": 1024}, 64, {"kernel": "decode"}) in rows
    assert len(rows) == 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a point takes; the kernels still run once, to be checked."""

    return lambda time_us: set_clock(monkeypatch, ChainTrial, "measured", lambda trial, point: time_us(point))


@pytest.mark.vulkan
def test_every_kernel_of_the_device_is_tried_and_right(
    device: Device, library: ShaderLibrary, ctx: LowerContext, tmp_path: Path, clock: Clock
) -> None:
    clock(lambda point: {"decode": 9.0, "plain": 10.0, "matrix": 11.0}[point.kernel])
    told: list[str] = []
    watcher = Watcher(point=lambda task, point, text: told.append(f"{point.kernel} {text}"))
    sweep = Sweep(PromptAttention(device, library, ctx), DeviceTable(device.caps, library, tmp_path), 1.0, budget_s=100.0, watcher=watcher)
    (found,) = sweep.run([PromptTask(40, 4, 2, 64, 9, 0, True)])
    assert not found.wrong and found.after.kernel == "decode" and found.kept
    right = {text.split()[0] for text in told if text.endswith(" us")}
    assert right == {"decode", "plain"} | ({"matrix"} if matrix_shape(device.caps) is not None else set())


@pytest.mark.vulkan
def test_a_model_s_prompt_is_tuned_beside_its_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    monkeypatch.setattr("vkback.autotune.attention_prompts.neighbours", lambda point, caps: iter(()))
    clock(lambda point: 8.0 + point.tile_q / 10 if point.kernel == "plain" else 50.0)
    code, text = tune("--op", "attention", "-m", "demo-dense", "-t", "64", "--budget", "30")
    assert code == 0, text
    assert "1 attentions of a prompt, 30 s" in text
    assert "attention of 64 tokens, 4/2 heads of 64, depth 0" in text
    assert "before: plain 16 queries x 8 rows, 1 subgroups: 9.60 us" in text
    assert "after:  plain 8 queries x 4 rows, 1 subgroups: 8.80 us, " in text
    (table,) = tmp_path.glob("device_*.toml")
    (row,) = load_table(table)
    assert row.set == {"kernel": "plain", "tile_q": 8, "tile_kv": 4, "warps": 1} and row.match["n"] == {"min": 32, "max": 128}
