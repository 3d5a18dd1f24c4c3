"""Reductions of shaders/common/reduce.glsl, by subgroups and through shared memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from vkback.device import Device
from vkback.graph import Tensor
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.workgroup import reduction
from vkback.paths import shader_root
from vkback.plan.schedule import Schedule
from vkback.program import Program
from vkback.shader import ShaderLibrary, Variant

SHADER = """#version 450
#define REDUCE_GROUPS 1
#include "common/reduce.glsl"
layout(local_size_x = WG_SIZE) in;
layout(std430, set = 0, binding = 0) readonly buffer InX { float x[]; };
layout(std430, set = 0, binding = 1) writeonly buffer OutY { float y[]; };
void main() {
    const uint t = gl_LocalInvocationID.x;
    const float v = x[t];
    y[t] = wg_sum(v);
    y[WG_SIZE + t] = wg_max(v);
    y[2u * WG_SIZE + t] = float(wg_sum(t));
    y[3u * WG_SIZE + t] = float(wg_max(t ^ 1u));
    y[4u * WG_SIZE + t] = group_sum(v, 4u);
    y[5u * WG_SIZE + t] = float(group_max(t ^ 5u, 8u));
    y[6u * WG_SIZE + t] = float(group_sum(t, 2u));
    y[7u * WG_SIZE + t] = wg_sum(-v);
}
"""


@pytest.mark.vulkan
@pytest.mark.parametrize("subgroup", [False, True], ids=["shared", "subgroup"])
@pytest.mark.parametrize("size_known", [False, True], ids=["any size", "size known"])
@pytest.mark.parametrize("wg", [8, 16, 64, 256])
def test_reductions(wg: int, size_known: bool, subgroup: bool, device: Device, tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    for name in ("reduce.glsl", "lane_butterfly.glsl"):
        shutil.copy(shader_root() / "common" / name, tmp_path / "common")
    (tmp_path / "reduce.comp").write_text(SHADER)
    defines, required = reduction(device.caps, wg, lanes=8)
    defines["REDUCE_SUBGROUP"] = int(subgroup)
    if not size_known:
        defines["SUBGROUP_SIZE"] = 0
    x, y = Tensor("x", "F32", (wg,)), Tensor("y", "F32", (8, wg))
    kernel = Variant.of("reduce.comp", defines, subgroup_size=required)
    schedule = Schedule([[Dispatch(kernel, (Arg(x), Arg(y, "w")), b"", (1, 1, 1), "TEST", "reduce")]])
    values = np.random.default_rng(wg).uniform(-1, 1, wg).astype(np.float32)
    with device.arena("reduce", 64 * wg + 4096, "device") as arena:
        ranges = {t.name: arena.alloc(4 * t.elements, t.name) for t in (x, y)}
        device.upload(ranges["x"], values.view(np.uint8))
        program = Program(device, ShaderLibrary(tmp_path, tmp_path), schedule, ranges, {})
        try:
            device.submit(program.record("reduce")).wait()
        finally:
            program.close()
        got = device.download(ranges["y"]).view(np.float32)[: 8 * wg].reshape(8, wg)
    index = np.arange(wg)
    total = values.astype(np.float64).sum()
    want = [
        np.full(wg, total),
        np.full(wg, values.max()),
        np.full(wg, index.sum()),
        np.full(wg, wg - 1),
        values.astype(np.float64).reshape(-1, 4).sum(axis=1).repeat(4),
        index.reshape(-1, 8).max(axis=1).repeat(8),
        index.reshape(-1, 2).sum(axis=1).repeat(2),
        np.full(wg, -total),
    ]
    # Sums of wg values below 1 in f32: each of at most wg additions rounds by 2^-24 of a partial sum below sqrt(wg).
    assert np.abs(got - np.stack(want)).max() < 1e-5
    assert len(np.unique(got[0])) == 1, "the sum differs between threads"
