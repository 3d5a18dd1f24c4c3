"""Arenas, and transfers in both directions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from device_kit import KiB, MiB, hidden

from vkback.device import Arena, Device, DeviceError, OutOfDeviceMemory

# -- memory


@pytest.mark.vulkan
def test_ranges_are_aligned_and_apart(arena: Arena) -> None:
    a, b, c = (arena.alloc(n, str(n)) for n in (1, 300, 256))
    assert [r.offset for r in (a, b, c)] == [0, 256, 768]
    assert [r.size for r in (a, b, c)] == [1, 300, 256]
    part = b.slice(4, 296, "tail")
    assert (part.offset, part.size, part.name, part.key) == (260, 296, "tail", b.key)
    with pytest.raises(DeviceError, match=r"slice of 297 bytes at 4 does not lie within '300' of 300 bytes"):
        b.slice(4, 297)
    assert arena.free == arena.nbytes - 1024


@pytest.mark.vulkan
def test_a_full_arena_says_so_and_reset_empties_it(device: Device) -> None:
    with device.arena("small", 1000, "device") as arena:
        arena.alloc(768, "first")
        with pytest.raises(
            OutOfDeviceMemory, match=r"arena 'small' is full: 'second' asks 300 B, 256 B of 1\.0 KiB are left\. Make the arena larger"
        ):
            arena.alloc(300, "second")
        arena.reset()
        assert arena.alloc(1024, "all").offset == 0


@pytest.mark.vulkan
def test_out_of_memory_says_what_was_asked_free_and_for_what(device: Device) -> None:
    before = device.live_objects()
    with pytest.raises(
        OutOfDeviceMemory,
        match=r"failed: VK_ERROR_OUT_OF_DEVICE_MEMORY: asked 1048576\.0 GiB in heap \d, [\d.]+ GiB free, for kv cache \(layers 0-31\)",
    ):
        device.arena("kv cache (layers 0-31)", 1 << 50, "device")
    assert device.live_objects() == before


@pytest.mark.vulkan
def test_arenas_larger_than_a_buffer_have_several(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device._memory, "block_limit", 1024)
    with device.arena("cut", 2560, "device") as arena:
        ranges = [arena.alloc(768, f"r{i}") for i in range(3)]
        last = arena.alloc(256, "last")
        assert arena.free == 0
        assert len({r.key for r in ranges}) == 3
        assert last.key == ranges[0].key and last.offset == 768
        with pytest.raises(
            DeviceError, match=r"'large' in arena 'cut': 2\.0 KiB exceed the largest buffer of this device, 1\.0 KiB\. Cut it"
        ):
            arena.alloc(2048, "large")


@pytest.mark.vulkan
def test_sizes_and_kinds_that_mean_nothing_are_refused(device: Device, arena: Arena) -> None:
    with pytest.raises(DeviceError, match=r"arena 'none': 0 bytes asked"):
        device.arena("none", 0, "device")
    with pytest.raises(DeviceError, match=r"'none' in arena 'test': -1 bytes asked"):
        arena.alloc(-1, "none")
    with pytest.raises(DeviceError, match=r"unknown kind 'fast', expected one of device, upload, readback, host_visible_device"):
        device.arena("x", 1, "fast")  # type: ignore[arg-type]


@pytest.mark.vulkan
def test_host_visible_kinds_map(device: Device) -> None:
    for kind in ("upload", "readback"):
        with device.arena(kind, 1024, kind) as arena:
            r = arena.alloc(100, "r")
            r.map()[:] = np.arange(100, dtype=np.uint8)
            assert r.map().tolist() == list(range(100))
            assert r.slice(10, 5).map().tolist() == [10, 11, 12, 13, 14]


@pytest.mark.vulkan
def test_memory_the_host_does_not_see_cannot_be_mapped(arena: Arena) -> None:
    with pytest.raises(DeviceError, match=r"'r' in arena 'test' \(kind 'device'\) is not visible to the host\. Use device\.upload"):
        hidden(arena.alloc(4, "r")).map()


# -- transfers

SIZES = [1, 3, 4, 255, 4 * KiB, 4 * MiB - 1, 4 * MiB + 5, 40 * MiB]


def pattern(n: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(n).integers(0, 256, n, np.uint8)


@pytest.mark.vulkan
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_upload_and_download_give_the_same_bytes(device: Device, size: int, staged: bool) -> None:
    with device.arena("transfer", size, "device") as arena:
        r = arena.alloc(size, "r")
        if staged:
            r = hidden(r)
        data = pattern(size)
        device.upload(r, data)
        assert np.array_equal(device.download(r), data)


@pytest.mark.vulkan
@pytest.mark.parametrize("staged", [False, True])
def test_typed_and_partial_transfers(device: Device, arena: Arena, staged: bool) -> None:
    r = arena.alloc(400, "r")
    r = hidden(r) if staged else r
    values = np.linspace(0, 1, 200, dtype=np.float32).reshape(10, 20)[:, ::2]
    device.upload(r, values)
    assert np.array_equal(device.download(r, np.float32), values.reshape(-1))
    device.upload(r, np.array([7], np.float32))
    assert device.download(r, np.float32)[:2].tolist() == [7, values[0, 1]]
    with pytest.raises(DeviceError, match=r"'r' has 396 bytes, no multiple of the 8 of float64"):
        device.download(r.slice(4, 396), np.float64)
    with pytest.raises(DeviceError, match=r"401 bytes at 0 do not fit into 'r' of 400 bytes"):
        device.upload(r, np.zeros(401, np.uint8))


@pytest.mark.vulkan
@pytest.mark.parametrize("staged", [False, True])
def test_uploader_streams_many_writes(device: Device, staged: bool) -> None:
    sizes = [1, 7, 1000, 5000, 64, 12345, 3]  # smaller and larger than a chunk of 4000, and odd
    with device.arena("stream", sum(-(-n // 256) * 256 for n in sizes), "device") as arena:
        ranges = [arena.alloc(n, str(n)) for n in sizes]
        up = device.uploader(chunk_bytes=4000)
        data = [pattern(n) for n in sizes]
        for r, d in zip(ranges, data, strict=True):
            half = d.size // 2
            target = hidden(r) if staged else r
            scratch = d.copy()
            up.write(target, half, scratch[half:])
            up.write(target, 0, scratch[:half])
            scratch[:] = 0  # the uploader must not look at it any more
        up.finish()
        for r, d in zip(ranges, data, strict=True):
            assert np.array_equal(device.download(r), d)
