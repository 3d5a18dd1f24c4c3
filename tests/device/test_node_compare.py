"""Nodes of a model on the device beside numpy's: right runs stay within the band, planted faults are named."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for, with_params
from prompt_kernels import kernel_params, skip_without
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.device import Device
from vkback.evaluate import node_compare as nodes
from vkback.evaluate.judge import nmse
from vkback.evaluate.node_run import Batch, NodeRun, NodeRunError, graph_of, run_nodes
from vkback.evaluate.node_walk import Item, Swap, Walk, WalkValues, chosen_as, items_of
from vkback.evaluate.twin import NumpyTwin
from vkback.harness.doctor import SWITCHES
from vkback.models import Model
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.ops.op import OPS
from vkback.ops.quantize import rounded_rows
from vkback.paths import builtin_model
from vkback.plan.planner import fused_nodes
from vkback.plan.schedule import Schedule
from vkback.program import WeightRanges
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

BATCH = Batch((1, 17, 300), 1, 64)

Run = Callable[..., tuple[Model, NodeRun]]


@pytest.fixture(scope="module")
def run(device: Device, library: ShaderLibrary, ctx: LowerContext) -> Run:
    """A built-in model's batch on the device."""

    def of(name: str, context: LowerContext = ctx, batch: Batch = BATCH, **options: object) -> tuple[Model, NodeRun]:
        model = Model.open(builtin_model(name))
        return model, run_nodes(model, device, library, context, batch, **options)  # type: ignore[arg-type]

    return of


def compared(model: Model, found: NodeRun, batch: Batch = BATCH) -> nodes.Comparison:
    return nodes.compare(*nodes.sides(found, nodes.walked(model, found, batch), batch, "device", {}))


@pytest.fixture(scope="module")
def right(run: Run) -> tuple[Model, NodeRun, WalkValues]:
    """A right run of the dense model, walked."""
    model, found = run("demo-dense")
    return model, found, nodes.walked(model, found, BATCH)


@pytest.mark.vulkan
@pytest.mark.parametrize(("name", "sync"), [("demo-dense", "barrier"), ("demo-moe", "sentinel")])
def test_a_right_run_is_within_the_band(
    name: str, sync: str, run: Run, right: tuple[Model, NodeRun, WalkValues], ctx: LowerContext
) -> None:
    if name == "demo-dense":
        model, found, made = right
        result = nodes.compare(*nodes.sides(found, made, BATCH, "device", {}))
    else:
        model, found = run(name, with_params(ctx, sync=sync, router="experts", quantize="attention"))
        result = compared(model, found)
    assert result.first is None, result.verdict
    assert not found.timed_out and bool(found.schedule.barrier_free) == (sync == "sentinel")
    assert {"Qcur-0", "Kcur-5" if name == "demo-dense" else "Kcur-1", "result_output", "cache_v_l1"} <= {r.name for r in result.rows}
    # What rounding explains is what there is: the device rounds as the walk does, but for values on an edge.
    known = [r for r in result.rows if r.expected > 1e-6 and r.op == "LINEAR" and not r.name.startswith("ffn_moe_weights")]
    ratios = np.array([r.nmse / r.expected for r in known])
    assert len(known) > 10 and ratios.min() > 0.3 and ratios.max() < 2.5
    alone = nodes.compare_steps(model, found, BATCH, "device")
    assert alone.first is None and len(alone.rows) == len(result.rows)


@pytest.mark.vulkan
@pytest.mark.parametrize("kernel", ["coop_reg", "coop_mat"])
@pytest.mark.parametrize("name", ["demo-dense", "demo-moe"])
def test_prompts_by_matrices_are_within_the_band(name: str, kernel: GemmKernel, run: Run, ctx: LowerContext) -> None:
    """Few tokens decoded in registers, and a prompt with attention by matrices: activations packed as f16 and all."""
    skip_without(kernel, ctx.caps)
    context = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, kernel_params(kernel, ctx.caps), f"prompts by {kernel}"))
    batch = Batch(tuple(range(1, 9 if kernel == "coop_reg" else 25)), 8 if kernel == "coop_reg" else 24, 64)
    model, found = run(name, context, batch)
    assert any(f"/{kernel}.comp" in d.kernel.source for d in found.schedule.dispatches())
    comparison = compared(model, found, batch)
    assert comparison.first is None, comparison.verdict


@pytest.mark.parametrize(("name", "n"), [("demo-dense", 1), ("demo-moe", 1), ("demo-moe", 3)])
def test_the_walk_of_fused_nodes_is_the_graph(name: str, n: int) -> None:
    """As planned for an H200: the exact walk is the twin's, which walks the graph before fusion; the rounded one is near it."""
    model = Model.open(builtin_model(name))
    batch = Batch(BATCH.tokens, n, 64)
    planned, ctx = fused_nodes(graph_of(model, batch), planned_for("nvidia_h200_linux"))
    walk = Walk(model, planned, ctx)
    for step in batch.steps:
        made = walk.run(batch.inputs(step), {})
    want = NumpyTwin(model, n_ctx=64).logits(batch.tokens)[-n:]
    assert nmse(made.exact["result_output"], want) < 1e-20
    assert 1e-8 < nmse(made.rounded["result_output"], want) < 1e-3


def unit(schedule: Schedule, label: str) -> int:
    return next(i for i, stage in enumerate(schedule.stages) if any(d.label == label for d in stage))


@pytest.mark.vulkan
def test_a_corrupted_block_is_named(run: Run) -> None:
    def spoil(device: Device, weights: Mapping[str, WeightRanges]) -> None:
        block = weights["blk.3.ffn_down.weight"].shards[0]
        raw = device.download(block)
        raw[5 * 512 : 5 * 512 + 128] ^= 0xFF  # of row 5 the first 256 weights, Q4_K, or Q6_K in part
        device.upload(block, raw)

    model, found = run("demo-dense", spoil=spoil)
    alone = nodes.compare_steps(model, found, BATCH, "device")
    assert [r.name for r in alone.rows if r.outside] == ["l_out-3"], alone.verdict
    result = nodes.with_own(compared(model, found), alone)
    assert result.first is not None and result.first.name == "l_out-3", result.verdict
    assert "by itself: NMSE" in result.first.outside and "[0, 5]" in result.first.outside


@pytest.mark.vulkan
def test_a_scale_off_by_one_is_named(run: Run) -> None:
    """The exponent of one kernel's scale, the attention's of layer 2, is one too large."""
    right = struct.pack("<f", math.log2(math.e) * 64**-0.5)

    def alter(schedule: Schedule) -> Schedule:
        stage = unit(schedule, "kqv_out-2")
        (d,) = schedule.stages[stage]
        assert d.push.count(right) == 1
        wrong = dataclasses.replace(d, push=d.push.replace(right, struct.pack("<f", 2 * math.log2(math.e) * 64**-0.5)))
        return dataclasses.replace(schedule, stages=[[wrong] if i == stage else s for i, s in enumerate(schedule.stages)])

    model, found = run("demo-dense", alter=alter)
    result = compared(model, found)
    assert result.first is not None and result.first.name == "kqv_out-2", result.verdict
    assert [r.name for r in nodes.compare_steps(model, found, BATCH, "device").rows if r.outside] == ["kqv_out-2"]


@pytest.mark.vulkan
def test_a_barrier_left_out_is_named(run: Run) -> None:
    """Two stages without the barrier between them: the second may run first, and reads what nobody wrote yet."""

    def alter(schedule: Schedule) -> Schedule:
        at = unit(schedule, "ffn_swiglu-4")
        together = [*schedule.stages[at], *schedule.stages[at - 1]]
        return dataclasses.replace(schedule, stages=[*schedule.stages[: at - 1], together, *schedule.stages[at + 1 :]])

    model, found = run("demo-dense", alter=alter)
    result = compared(model, found)
    assert result.first is not None and result.first.name == "ffn_swiglu-4" and "not numbers" in result.first.outside
    assert result.first.sources[1] == "ffn_inp-4"


@pytest.mark.vulkan
def test_two_settings_and_a_saved_run(run: Run, right: tuple[Model, NodeRun, WalkValues], ctx: LowerContext, tmp_path: Path) -> None:
    model, found, made = right
    mine, _ = nodes.sides(found, made, BATCH, "here", {"tokens": list(BATCH.tokens)})
    nodes.save(tmp_path / "run.npz", mine)
    loaded = nodes.load(tmp_path / "run.npz", mine.about)
    assert loaded.label == "run.npz: here" and loaded.expected == mine.expected and loaded.items.keys() == mine.items.keys()
    again = nodes.compare(mine, loaded)
    assert again.first is None and max(r.nmse for r in again.rows) < 1e-12
    with pytest.raises(nodes.CompareError, match=r"its tokens is \[1, 17, 300\], this run's is \[5\]"):
        nodes.load(tmp_path / "run.npz", {"tokens": [5]})
    (tmp_path / "none.npz").write_bytes(b"PK")
    with pytest.raises(nodes.CompareError, match="no saved run of vkback compare"):
        nodes.load(tmp_path / "none.npz", {})
    _, floats = run("demo-dense", dataclasses.replace(ctx, act="f32"))
    other = nodes.sides(floats, nodes.walked(model, floats, BATCH), BATCH, "floats", {})[0]
    result = nodes.compare(mine, other)
    assert result.first is None and any(r.nmse > 1e-6 for r in result.rows), "one rounds to eight bits, the other does not"


def test_items_take_packed_products_apart(ctx: LowerContext) -> None:
    model = Model.open(builtin_model("demo-dense"))
    graph = model.graph(1, 64, head="last")
    planned, _ = fused_nodes(graph, ctx)
    found = {i.name: i for i in items_of(planned, graph)}
    assert found["Qcur-0"].columns == (0, 256) and found["Kcur-0"].columns == (256, 384) and found["Vcur-0"].columns == (384, 512)
    assert found["Vcur-0"].sources[0] == "blk.0.attn_v.weight" and "blk.0.attn_norm.weight" in found["Vcur-0"].sources


@pytest.mark.parametrize(("gating", "norm"), [("softmax", True), ("softmax", False), ("softmax_weight", False), ("sigmoid", True)])
def test_weights_of_experts_that_a_device_chose(gating: str, norm: bool) -> None:
    logits = np.array([[0.5, 2.0, 1.999, -1.0, 1.0]])
    params = {"n_used": 2, "norm": norm, "gating": gating, "scale": 1.5}
    own = OPS["TOPK_MOE"].reference([logits], params)
    assert own[1].tolist() == [[1, 2]]
    weights, ids = chosen_as(logits, [], params, np.array([[2, 1]], np.int32))
    assert ids.tolist() == [[2, 1]]
    np.testing.assert_allclose(weights, own[0][:, ::-1], rtol=1e-12)
    swapped, _ = chosen_as(logits, [], params, np.array([[1, 4]], np.int32))
    only = OPS["TOPK_MOE"].reference([np.where([True, True, False, True, True], logits, -np.inf)], params)[0]
    if gating != "softmax" or norm:
        np.testing.assert_allclose(swapped, only, rtol=1e-12)
    else:
        np.testing.assert_allclose(swapped[0, 0], own[0][0, 0], rtol=1e-12)


def test_a_choice_far_from_a_tie_is_outside() -> None:
    ids = np.array([[3, 1]], np.int32)
    from vkback.graph import Tensor

    item = Item("ids-0", "TOPK_MOE", ("logits-0",), Tensor("ids-0", "I32", (1, 2)), 0)
    for distance, outside in ((0.01, False), (0.5, True)):
        a = nodes.Side("a", {"ids-0": item}, {"ids-0": ids}, swaps={"ids-0": Swap(distance, 0.1)})
        b = nodes.Side("b", {"ids-0": item}, {"ids-0": ids})
        assert bool(nodes.compare(a, b).first) == outside


def test_the_expected_error_of_one_product_is_the_closed_form() -> None:
    """docs/comparing_nodes.md: E[amax^2] / (12 * 127^2) of Gaussian units of 32, for activations and for products with them."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 2048))
    amax = np.abs(x.reshape(-1, 32)).max(axis=1)
    closed = float(np.mean(amax**2)) / (12 * 127**2)
    assert closed == pytest.approx(2.95e-5, rel=0.03)
    assert nmse(rounded_rows(x), x) == pytest.approx(closed, rel=0.03)
    w = rng.standard_normal((256, 2048))
    assert nmse(rounded_rows(x) @ w.T, x @ w.T) == pytest.approx(closed, rel=0.1)


def test_the_band_of_few_values_is_wider() -> None:
    for values, chi_square in ((4, 33.4), (1, 23.9), (100, 179.0)):  # at 1 - 1e-6
        assert nodes.band(values) == pytest.approx(nodes.BAND * chi_square / values, rel=0.16)
    assert nodes.band(4096) == pytest.approx(1.11 * nodes.BAND, rel=0.01)


def test_bad_batches_say_why(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    for tokens, n, n_ctx, says in (
        ((1, 2), 3, 64, "3 tokens at once of 2"),
        ((1, 2, 3), 2, 64, "go from position 0"),
        ((1, 2, 3), 1, 2, "raise --ctx"),
    ):
        with pytest.raises(NodeRunError, match=says):
            Batch(tokens, n, n_ctx)
    with pytest.raises(NodeRunError, match=r"token 99999: expected an id in 0\.\.4095"):
        run_nodes(Model.open(builtin_model("demo-dense")), device, library, ctx, Batch((99999,), 1, 64))


@pytest.mark.vulkan
def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(cli.app, ["compare", "-n", "2", "--save", str(tmp_path / "a.npz")])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[-1] == "all 57 nodes are within the band"
    (line,) = [line for line in lines if "tensor 'Qcur-0[blk.0.attn_q.weight, inp_embd, " in line]
    assert line.startswith("nmse = 0.0000") and line.endswith("op = LINEAR")
    assert sum(line[:5].strip().isdigit() for line in lines) == 6, "the growth of six layers"
    other = runner.invoke(cli.app, ["compare", "-n", "2", "--against", str(tmp_path / "a.npz"), "--json"])
    data = json.loads(other.stdout)
    assert data["first_outside"] is None and len(data["nodes"]) == 57 and data["against"].startswith("a.npz: ")
    assert "--step compares each node with its own reference" in str(
        runner.invoke(cli.app, ["compare", "--step", "--against", "x"]).exception
    )


@pytest.mark.vulkan
def test_doctor_examines_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from vkback.harness import doctor_model

    result = CliRunner().invoke(cli.app, ["doctor", "-m", "demo-dense"])
    assert result.exit_code == 0 and "verdict: all 57 nodes within the band" in result.output
    row = nodes.Row("l_out-3", "LINEAR", ("w", "x"), 3, 1.0, 0.0, 0.1, 1.0, 0.1, "NMSE 1")
    switch = next(s for s in SWITCHES if s.name == "integer dot off")
    found = doctor_model.ModelDiagnosis(row, (row,), (switch,), 57)
    assert found.verdict == (
        'wrong from l_out-3 on; kernels that are wrong: l_out-3 (LINEAR); "integer dot off" cures it. Meanwhile: --act f32'
    )
