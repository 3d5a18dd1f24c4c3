"""Clocks read in the kernels of a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for, with_params

from vkback.autotune.program_sweep import CHECKED_TOKENS
from vkback.device import Device
from vkback.models import Model, synth
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.shader import ShaderLibrary
from vkback.timing.stage_clocks import POINTS, ClockError, measure_clocks, with_clocks
from vkback.timing.token_program import TokenProgram, Tokens, token_graph

N_CTX = 64


def schedule(model: Model, ctx: LowerContext, sync: str) -> Schedule:
    return plan(token_graph(model, N_CTX), with_params(ctx, sync=sync, quantize="attention", router="experts"))


def test_kernels_of_barrier_free_stages_get_marks() -> None:
    model = Model.open(builtin_model("demo-moe"))
    plain = schedule(model, planned_for("nvidia_h200_linux"), "sentinel")
    marked = with_clocks(plain, 64)
    for old, new in zip(plain.dispatches(), marked.dispatches(), strict=True):
        if old.waits is None:
            assert new is old
        else:
            assert len(new.args) == len(old.args) + 1 and dict(new.kernel.defines)["BIND_CLOCKS"] == len(old.args)
            assert new.args[-1].tensor.shape == (prod(old.groups), len(POINTS))
    names = [d.args[-1].tensor.name for d in marked.dispatches() if d.waits]
    assert len(names) == len(set(names)) == 7 * model.hp.n_layer + 1
    assert with_clocks(plain, 3).stages == plain.stages, "no room for one more buffer"


@pytest.fixture(scope="module")
def tokens(device: Device, library: ShaderLibrary, ctx: LowerContext) -> Iterator[Tokens]:
    if not device.caps.shader_clock:
        pytest.skip(f"kernels of {device.caps.name} cannot read its clock")
    with Tokens(Model.open(builtin_model("demo-moe")), device, library, ctx, n_ctx=N_CTX, depth=20) as made:
        yield made


@pytest.mark.vulkan
@pytest.mark.parametrize("sync", ["barrier", "sentinel"])
def test_workgroups_pass_the_points_in_order(sync: str, tokens: Tokens, ctx: LowerContext) -> None:
    planned = schedule(tokens.model, ctx, sync)
    clocks = measure_clocks(tokens, planned)
    # The first of them has none before it to count from.
    assert [c.stage for c in clocks] == [i for i, stage in enumerate(planned.stages) if any(d.waits for d in stage)][1:]
    for clock in clocks:
        assert clock.workgroups > 0 and 0 < clock.took_us < 1e8
        known = clock.us[np.isfinite(clock.us).all(axis=1)]
        assert np.isfinite(clock.us[[0, -1]]).all(), f"{clock.labels} did not begin or did not end"
        assert (np.diff(known, axis=0) >= 0).all() and (np.diff(known, axis=1) >= 0).all()
    if sync == "barrier":
        assert all(clock.us[0, 0] > 0 for clock in clocks), "a workgroup began before the barrier"


@pytest.mark.vulkan
def test_marks_change_no_bit(tokens: Tokens, ctx: LowerContext) -> None:
    planned = schedule(tokens.model, ctx, "sentinel")
    with TokenProgram(tokens, planned) as plain, TokenProgram(tokens, with_clocks(planned, 64)) as marked:
        np.testing.assert_array_equal(marked.logits(CHECKED_TOKENS).view(np.uint32), plain.logits(CHECKED_TOKENS).view(np.uint32))


@pytest.mark.vulkan
def test_a_device_without_a_clock_is_named(tokens: Tokens, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = dataclasses.replace(tokens.device.caps, shader_clock=False)
    monkeypatch.setattr(tokens.device, "caps", blind)
    with pytest.raises(ClockError, match="cannot read the device's clock"):
        measure_clocks(tokens, schedule(tokens.model, ctx, "sentinel"))


@pytest.mark.vulkan
def test_logits_end_with_the_vocabulary(device: Device, library: ShaderLibrary, ctx: LowerContext, tmp_path: Path) -> None:
    """A vocabulary of 331 tokens, whose memory is longer: what lies behind it is no logit."""
    synth.synthesize("tiny-qwen3-Q8_0", tmp_path / "model.gguf")
    model = Model.open(tmp_path / "model.gguf")
    with Tokens(model, device, library, ctx, n_ctx=N_CTX, depth=2) as made, TokenProgram(made, plan(made.graph, ctx)) as program:
        assert program.run(7).shape == (model.hp.n_vocab,)
