"""Quantization of activations."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback import quants
from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.storage import nbytes
from vkback.plan.schedule import Schedule
from vkback.program import Program
from vkback.shader import ShaderLibrary

CASES = list(OPS["QUANTIZE_Q8_1"].cases())


@pytest.mark.vulkan
@pytest.mark.parametrize("wg_size", [8, 128])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_without_subgroups(case: Case, wg_size: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(with_params(ctx, wg_size=wg_size)))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
def test_bytes_are_those_of_the_host(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Scales, sums and padding too. A quotient that the device rounds the other way may move a value on the edge by one step."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((3, 200)) * np.array([[1e-6], [1.0], [1e6]])).astype(np.float32)
    values[0, :32] = 0.0
    values[1, 32:64] = 1e-40
    values[2, 64:96] = 5.0
    x, y = Tensor("x", "F32", values.shape), Tensor("y", "Q8_1", values.shape)
    with device.arena("quantize", 65536, "device") as arena:
        ranges = {t.name: arena.alloc(nbytes(t), t.name) for t in (x, y)}
        device.upload(ranges["x"], values.reshape(-1).view(np.uint8))
        device.upload(ranges["y"], np.zeros(nbytes(y), np.uint8))
        program = Program(device, library, Schedule([quantize_dispatch(x, y, ctx)]), ranges, {})
        try:
            device.submit(program.record("quantize")).wait()
        finally:
            program.close()
        got = device.download(ranges["y"]).reshape(3, -1)
    want = quants.q8_1_quantize(values)
    assert got.shape == want.shape
    units = 7
    steps = np.abs(got[:, : 32 * units].view(np.int8).astype(int) - want[:, : 32 * units].view(np.int8))
    assert steps.max() <= 1
    assert (steps > 0).mean() < 0.01
    tail_got, tail_want = (r[:, 32 * units : 40 * units].reshape(3, units, 8) for r in (got, want))
    d_got, d_want = (np.ascontiguousarray(t[:, :, :4]).view(np.float32) for t in (tail_got, tail_want))
    np.testing.assert_allclose(d_got, d_want, rtol=3e-7)
    sums = np.ascontiguousarray(tail_got[:, :, 4:]).view(np.int16).astype(int)
    low = got[:, : 16 * units].view(np.int8).reshape(3, units, 16).astype(int).sum(axis=2)
    high = got[:, 16 * units : 32 * units].view(np.int8).reshape(3, units, 16).astype(int).sum(axis=2)
    np.testing.assert_array_equal(sums, np.stack([low, high], axis=2))


PROFILES = ["nvidia_h200_linux", "amd_rx_7900_xtx_radv", "intel_arc_a770_anv", "broadcom_v3d_4_2_pi4", "apple_m1_moltenvk"]


@pytest.mark.parametrize("profile", PROFILES)
def test_lowering_for_other_devices(profile: str) -> None:
    """A pinned subgroup fits the device and the workgroup; without shuffles shared memory takes over."""
    ctx = planned_for(profile)
    x = Tensor("x", "F32", (2, 4096))
    (d,) = OPS["QUANTIZE_Q8_1"].lower(Node("QUANTIZE_Q8_1", (x,), (Tensor("y", "Q8_1", x.shape),)), ctx)
    defines = dict(d.kernel.defines)
    assert int(defines["WG_SIZE"]) <= ctx.caps.max_workgroup_invocations
    assert d.groups[0] * d.groups[1] * int(defines["WG_SIZE"]) >= 2 * 4096 // 4
    assert bool(defines["REDUCE_SUBGROUP"]) == (ctx.caps.has_subgroup_ops("arithmetic", "shuffle") and ctx.caps.subgroup_min >= 8)
    if d.kernel.subgroup_size is not None:
        assert ctx.caps.subgroup_min <= d.kernel.subgroup_size <= min(ctx.caps.subgroup_max, int(defines["WG_SIZE"]))
