"""SPIR-V facts, kernels, the pipeline cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_kit import driver_of, profile, word

from vkback.device import Arena, Device, DeviceError, FeatureMissing, KernelSpec
from vkback.device.driver import ffi, vk
from vkback.device.kernel import KernelCache
from vkback.device.spirv import inspect

# -- SPIR-V facts: no device needed


def test_module_facts(spirv: dict[str, bytes]) -> None:
    module = inspect(spirv["add"])
    assert module.bindings == {0, 1, 2}
    assert module.workgroup_size({}) == (64, 1, 1)
    assert module.workgroup_size({1: 128}) == (128, 1, 1)
    assert {6018, 6019} <= inspect(spirv["dot"]).capabilities
    assert module.shared_bytes == 0
    assert inspect(spirv["shared"]).shared_bytes == 3 * 8 * (16 + 8) + 4
    bare = profile("nvidia_h200_linux", fp16=False, subgroup_ops=("basic",), int_dot=False)
    assert inspect(spirv["half"]).missing(bare) == ["Float16", "GroupNonUniformClustered"]
    assert inspect(spirv["dot"]).missing(bare) == ["DotProductInput4x8BitPacked", "DotProduct"]
    assert inspect(spirv["half"]).missing(profile("nvidia_h200_linux")) == []


def test_bytes_that_are_no_module_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"8 bytes that are no SPIR-V module \(magic number 64656164, expected 03022307\)"):
        inspect(b"deadbeef")


# -- kernels


@pytest.mark.vulkan
def test_vector_add(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    n = 1000  # not a multiple of the workgroup
    a, b, c = (arena.alloc(4 * n, name) for name in "abc")
    rng = np.random.default_rng(1)
    x, y = rng.random(n, np.float32), rng.random(n, np.float32)
    device.upload(a, x)
    device.upload(b, y)
    for scale, threads in ((1, 64), (3, 32)):
        kernel = device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={0: scale, 1: threads})
        rec = device.recorder("add")
        rec.dispatch(kernel, [a, b, c], word(n), (-(-n // threads), 1, 1))
        commands = rec.finish()
        device.submit(commands).wait()
        commands.destroy()
        # One multiplication by a small integer and one addition: at most two float32 roundings, which may be fused into one.
        assert np.allclose(device.download(c, np.float32), x + np.float32(scale) * y, rtol=2**-22, atol=0)


@pytest.mark.vulkan
def test_integer_dot_product(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    if not device.caps.int_dot:
        pytest.skip(f"{device.caps.name} has no shaderIntegerDotProduct")
    rng = np.random.default_rng(2)
    x, y = rng.integers(-128, 128, (2, 64, 4), np.int8)
    x[0], y[0] = -128, -128
    a, b, c = (arena.alloc(256, name) for name in "abc")
    device.upload(a, x)
    device.upload(b, y)
    rec = device.recorder("dot")
    rec.dispatch(device.kernel(spirv["dot"], name="dot", bindings=3, push_bytes=0), [a, b, c], b"", (1, 1, 1))
    commands = rec.finish()
    device.submit(commands).wait()
    commands.destroy()
    assert device.download(c, np.int32).tolist() == (x.astype(np.int32) * y).sum(axis=1).tolist()


@pytest.mark.vulkan
def test_kernels_are_made_once(device: Device, spirv: dict[str, bytes]) -> None:
    one = device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={0: 5, 1: 64})
    assert device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={1: 64, 0: 5}) is one
    assert device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={0: 6, 1: 64}) is not one


@pytest.mark.vulkan
def test_many_kernels_compile_in_parallel(device: Device, spirv: dict[str, bytes]) -> None:
    specs = [KernelSpec(spirv["add"], "add", 3, 4, ((0, 100 + i % 10),)) for i in range(20)]
    kernels = device.kernels(specs)
    assert len({id(k) for k in kernels}) == 10
    assert kernels[:10] == kernels[10:]
    assert device.kernels([]) == []


@pytest.mark.vulkan
def test_required_subgroup_size(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    caps = device.caps
    if not caps.subgroup_required_size:
        pytest.skip(f"{caps.name} cannot fix the subgroup size of compute shaders")
    out = arena.alloc(4, "out")
    size = caps.subgroup_min
    while size <= caps.subgroup_max:
        rec = device.recorder("subgroup")
        rec.dispatch(device.kernel(spirv["subgroup"], name="subgroup", bindings=1, push_bytes=0, subgroup_size=size), [out], b"", (1, 1, 1))
        commands = rec.finish()
        device.submit(commands).wait()
        commands.destroy()
        assert device.download(out, np.uint32)[0] == size
        size *= 2
    if caps.subgroup_min != caps.subgroup_max or size > 128:
        return
    with pytest.raises(
        FeatureMissing, match=rf"subgroup size {size}; .* has powers of two from {caps.subgroup_min} to {caps.subgroup_max}"
    ):
        device.kernel(spirv["subgroup"], name="subgroup", bindings=1, push_bytes=0, subgroup_size=size)


@pytest.mark.vulkan
def test_kernels_beyond_the_device_are_refused_by_name(device: Device, spirv: dict[str, bytes]) -> None:
    with pytest.raises(DeviceError, match=r"add: declared with 2 bindings, but the shader uses binding 2"):
        device.kernel(spirv["add"], name="add", bindings=2, push_bytes=4)
    with pytest.raises(DeviceError, match=r"add: 65536 push constant bytes; .* takes \d+, a multiple of 4"):
        device.kernel(spirv["add"], name="add", bindings=3, push_bytes=65536)
    with pytest.raises(DeviceError, match=r"add: workgroup of \(1048576, 1, 1\) threads; .*maxComputeWorkGroupInvocations"):
        device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={1: 1 << 20})
    small = KernelCache(driver_of(device), dataclasses.replace(device.caps, max_shared_memory=512))
    with pytest.raises(DeviceError, match=r"shared: 580 bytes of shared memory; .* has 512 \(maxComputeSharedMemorySize\)"):
        small.get(KernelSpec(spirv["shared"], "shared", 1, 0))
    plain = KernelCache(driver_of(device), dataclasses.replace(device.caps, fp16=False, subgroup_ops=("basic",)))
    with pytest.raises(
        FeatureMissing, match=r"half needs Float16, GroupNonUniformClustered, which .* does not offer\. Choose another variant"
    ):
        plain.get(KernelSpec(spirv["half"], "half", 1, 0))
    small.destroy()
    plain.destroy()


@pytest.mark.vulkan
def test_pipeline_cache_is_kept_and_damage_is_survived(spirv: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path))
    for damage in (None, b"", b"\0" * 100):
        if damage is not None:
            (file,) = (tmp_path / "pipelines").iterdir()
            file.write_bytes(damage)
        with Device.open(0) as device:
            device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4)
        (file,) = (tmp_path / "pipelines").iterdir()
        assert file.stat().st_size > 32
    written = file.read_bytes()
    with Device.open(0):
        pass
    assert file.read_bytes() == written  # nothing was compiled, nothing is written


@pytest.mark.vulkan
@pytest.mark.parametrize("offered", [False, True])
def test_pipelines_ask_for_no_bounds_checks_where_they_may(
    device: Device, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    """A driver that does not know the struct passes over it."""
    chained: list[int] = []
    call = driver_of(device).call

    def noting(name: str, *args: Any, **about: Any) -> Any:
        if name == "vkCreateComputePipelines":
            link = ffi.cast("VkBaseInStructure *", args[3].stage.pNext)
            while link != ffi.NULL:
                chained.append(int(link.sType))
                link = link.pNext
        return call(name, *args, **about)

    monkeypatch.setattr(driver_of(device), "call", noting)
    cache = KernelCache(driver_of(device), dataclasses.replace(device.caps, pipeline_robustness=offered))
    cache.get(KernelSpec(spirv["add"], "add", 3, 4))
    cache.destroy()
    assert chained.count(vk.VK_STRUCTURE_TYPE_PIPELINE_ROBUSTNESS_CREATE_INFO_EXT) == int(offered)
