"""Recording, replay and waiting."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_kit import lose, word

from vkback.device import Arena, Device, DeviceError, DeviceLost, OutOfDeviceMemory, Timeout, queue
from vkback.device.driver import check, ffi, vk

# -- recording and replay


@pytest.mark.vulkan
def test_a_recording_is_replayed_any_number_of_times(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    counter = arena.alloc(4, "counter")
    device.upload(counter, np.array([100], np.uint32))
    rec = device.recorder("count")
    rec.dispatch(device.kernel(spirv["count"], name="count", bindings=1, push_bytes=0), [counter], b"", (1, 1, 1))
    commands = rec.finish()
    tickets = [device.submit(commands) for _ in range(10)]
    tickets[-1].wait()
    assert all(t.done for t in tickets)
    assert device.download(counter, np.uint32)[0] == 110
    with pytest.raises(DeviceError, match=r"'count' is already finished"):
        rec.finish()
    commands.destroy()
    with pytest.raises(DeviceError, match=r"'count' is destroyed"):
        device.submit(commands)


@pytest.mark.vulkan
def test_200_dependent_dispatches_replayed(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    kernel = device.kernel(spirv["step"], name="step", bindings=2, push_bytes=0)
    cells = [arena.alloc(4, f"cell {i}") for i in range(2)]
    rec = device.recorder("chain")
    for i in range(200):
        rec.barrier()
        rec.dispatch(kernel, [cells[i % 2], cells[1 - i % 2]], b"", (1, 1, 1))
    commands = rec.finish()
    expected = 1
    device.upload(cells[0], np.array([expected], np.uint32))
    for _ in range(5):
        for _ in range(200):
            expected = (3 * expected + 1) % 2**32
        device.submit(commands).wait()
        assert device.download(cells[0], np.uint32)[0] == expected
    commands.destroy()


@pytest.mark.vulkan
def test_several_recordings_in_flight_run_in_order(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    kernel = device.kernel(spirv["step"], name="step", bindings=2, push_bytes=0)
    cells = [arena.alloc(4, f"cell {i}") for i in range(2)]
    recordings = []
    for i in range(2):
        rec = device.recorder(f"half {i}")
        rec.dispatch(kernel, [cells[i], cells[1 - i]], b"", (1, 1, 1))
        recordings.append(rec.finish())
    device.upload(cells[0], np.array([0], np.uint32))
    first = device.submit(recordings)
    second = device.submit(recordings)  # waits for the first
    second.wait()
    assert first.done
    assert device.download(cells[0], np.uint32)[0] == 40  # 0 -> 1 -> 4 -> 13 -> 40
    for commands in recordings:
        commands.destroy()


@pytest.mark.vulkan
def test_fill_dispatch_and_copy(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    counter, copied = arena.alloc(4, "counter"), arena.alloc(4, "copied")
    kernel = device.kernel(spirv["count"], name="count", bindings=1, push_bytes=0)
    rec = device.recorder("fill, dispatch, copy")
    rec.fill(counter, 7)
    rec.barrier()
    rec.dispatch(kernel, [counter], b"", (1, 1, 1))
    rec.barrier()
    rec.copy(counter, copied)
    commands = rec.finish()
    device.submit(commands).wait()
    commands.destroy()
    assert device.download(copied, np.uint32)[0] == device.download(counter, np.uint32)[0] == 8


@pytest.mark.vulkan
def test_timestamps(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    if not device.caps.timestamp_bits:
        pytest.skip(f"{device.caps.name} writes no timestamps")
    a = arena.alloc(256, "a")
    kernel = device.kernel(spirv["busy"], name="busy", bindings=1, push_bytes=4)
    rec = device.recorder("timed", timestamps=3)
    rec.timestamp("start")
    rec.dispatch(kernel, [a], word(20_000), (1, 1, 1))
    rec.barrier()
    rec.timestamp("short")
    rec.dispatch(kernel, [a], word(2_000_000), (1, 1, 1))
    rec.barrier()
    rec.timestamp("long")
    with pytest.raises(DeviceError, match=r"'timed' was made for 3 timestamps; 'more' is one more"):
        rec.timestamp("more")
    commands = rec.finish()
    with pytest.raises(DeviceError, match=r"'timed' was never submitted, so it has no timestamps"):
        commands.timestamps()
    device.submit(commands).wait()  # a first run may hold a driver's late compilation
    shortest = []
    for _ in range(4):
        begin = time.perf_counter_ns()
        device.submit(commands).wait()
        wall = time.perf_counter_ns() - begin
        labels, times = zip(*commands.timestamps(), strict=True)
        assert labels == ("start", "short", "long")
        short, long = np.diff(times)
        assert short > 0
        assert long > 0
        assert short + long <= wall
        shortest.append((short, long))
    short, long = np.min(shortest, axis=0)  # a busy machine may stop either for a while, not every time
    assert short < long
    commands.destroy()


@pytest.mark.vulkan
def test_wrong_bindings_are_refused_with_the_label(
    device: Device, arena: Arena, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4)
    r = arena.alloc(1024, "weights")
    rec = device.recorder("refused")
    with pytest.raises(DeviceError, match=r"add blk\.3: 2 ranges for 3 bindings"):
        rec.dispatch(kernel, [r, r], word(1), (1, 1, 1), "blk.3")
    with pytest.raises(DeviceError, match=r"add blk\.3: 0 bytes of push constants, the kernel has 4"):
        rec.dispatch(kernel, [r, r, r], b"", (1, 1, 1), "blk.3")
    with pytest.raises(DeviceError, match=r"add blk\.3: \(0, 1, 1\) workgroups; .* takes 1 to "):
        rec.dispatch(kernel, [r, r, r], word(1), (0, 1, 1), "blk.3")
    with pytest.raises(DeviceError, match=r"binding 1, 'weights', begins at 4, no multiple of \d+ \(minStorageBufferOffsetAlignment\)"):
        rec.dispatch(kernel, [r, r.slice(4, 4), r], word(1), (1, 1, 1))
    monkeypatch.setattr(rec, "_max_range", 1000)
    with pytest.raises(
        DeviceError, match=r"binding 0, 'weights', has 1024 bytes; .* binds at most 1000 \(maxStorageBufferRange\)\. Cut it into shards"
    ):
        rec.dispatch(kernel, [r, r, r], word(1), (1, 1, 1))
    with pytest.raises(DeviceError, match=r"'weights' has 1024 bytes, 'weights' 4; slice one of them"):
        rec.copy(r, r.slice(0, 4))
    with pytest.raises(DeviceError, match=r"'weights' at 0 and 'weights' at 256, 512 bytes, overlap"):
        rec.copy(r.slice(0, 512), r.slice(256, 512))
    with pytest.raises(DeviceError, match=r"'weights': 3 bytes at 0; both must be multiples of 4"):
        rec.fill(r.slice(0, 3), 0)


@pytest.mark.vulkan
def test_recordings_over_destroyed_memory_are_refused(device: Device, spirv: dict[str, bytes]) -> None:
    arena = device.arena("gone", 256, "device")
    rec = device.recorder("late")
    rec.fill(arena.alloc(256, "r"), 0)
    commands = rec.finish()
    arena.destroy()
    with pytest.raises(DeviceError, match=r"'late' uses arena 'gone', which is destroyed\. Record again"):
        device.submit(commands)
    with pytest.raises(DeviceError, match=r"arena 'gone' is destroyed; 'r' cannot be placed in it"):
        arena.alloc(4, "r")
    commands.destroy()


# -- waiting


@pytest.mark.vulkan
def test_a_wait_is_bounded(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    a = arena.alloc(256, "a")
    kernel = device.kernel(spirv["busy"], name="busy", bindings=1, push_bytes=4)
    for times in (4_000_000, 16_000_000, 64_000_000):  # a busy machine may stop this thread until all is done, not always
        rec = device.recorder("long work")
        rec.dispatch(kernel, [a], word(times), (64, 1, 1))
        commands = rec.finish()
        ticket = device.submit(commands)
        late: Timeout | None = None
        try:
            ticket.wait(0.01)
        except Timeout as caught:
            late = caught
        done = ticket.done
        ticket.wait()
        assert ticket.done
        commands.destroy()
        if not done:
            break
    assert late is not None and not done
    assert re.match(r".*VK_TIMEOUT: long work has not finished after 0\.01 s .*Submit less at once or raise timeout_s", str(late))
    assert (late.call, late.result) == ("vkWaitSemaphores", "VK_TIMEOUT")


def test_a_wait_counts_no_time_in_which_the_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped, or slept with its machine, finds its device stopped as well."""
    stopped_s, clock, slices = 2700.0, [0.0], [0]
    timeout: int = vk.VK_TIMEOUT
    not_ready = iter(range(7))

    def wait(device: object, info: object, nanoseconds: int) -> int:
        slices[0] += 1
        clock[0] += nanoseconds / 1e9 + stopped_s
        return 0 if next(not_ready, None) is None else timeout

    def counter(device: object, semaphore: object, value: Any) -> int:
        value[0] = 0
        return 0

    functions = SimpleNamespace(vkWaitSemaphores=wait, vkGetSemaphoreCounterValue=counter)
    driver = SimpleNamespace(fn=functions, device=ffi.NULL, create=lambda *_: ffi.cast("VkSemaphore", 0))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    waiting = queue.Queue(driver, ffi.NULL, lambda: "")  # type: ignore[arg-type]
    waiting.wait(1, 1.0, "long work")
    assert slices == [8] and clock[0] > 8 * stopped_s
    not_ready = iter(range(100))
    with pytest.raises(Timeout, match=r"long work has not finished after 1 s \(submission 2, the device has finished 1\)"):
        waiting.wait(2, 1.0, "long work")
    assert slices[0] - 8 == pytest.approx(11, abs=1), "ten slices of 0.1 s, and a last look"


@pytest.mark.vulkan
def test_a_lost_device_is_reported_with_what_was_running_and_can_be_closed(
    spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device.open(0)
    arena = device.arena("a", 256, "device")
    rec = device.recorder("token 17")
    rec.fill(arena.alloc(256, "a"), 0)
    commands = rec.finish()
    ticket = device.submit(commands)
    ticket.wait()
    lose(device, monkeypatch)
    with pytest.raises(
        DeviceLost, match=r"vkWaitSemaphores failed: VK_ERROR_DEVICE_LOST: the device stopped; .*finished: 1: token 17\. Close"
    ):
        ticket.wait()
    with pytest.raises(DeviceLost, match=r"vkGetSemaphoreCounterValue failed"):
        _ = ticket.done
    commands.destroy()
    device.close()
    assert device.live_objects() == {}


def test_every_driver_error_has_its_class() -> None:
    assert check(0, "vkX") == 0
    assert check(5, "vkX") == 5  # VK_INCOMPLETE is a success code
    for code, kind, name in (
        (-2, OutOfDeviceMemory, "VK_ERROR_OUT_OF_DEVICE_MEMORY"),
        (-1, OutOfDeviceMemory, "VK_ERROR_OUT_OF_HOST_MEMORY"),
        (-4, DeviceLost, "VK_ERROR_DEVICE_LOST"),
        (2, Timeout, "VK_TIMEOUT"),
        (-7, DeviceError, "VK_ERROR_EXTENSION_NOT_PRESENT"),
        (-999999, DeviceError, "VkResult -999999"),
    ):
        with pytest.raises(kind) as caught:
            check(code, "vkX", "the object, 5 bytes")
        assert type(caught.value) is kind
        assert str(caught.value) == f"vkX failed: {name}: the object, 5 bytes"
        assert (caught.value.call, caught.value.result) == ("vkX", name)
