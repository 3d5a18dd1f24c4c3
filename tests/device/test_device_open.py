"""Opening a device, what it reports, validation layers, leaks, threads."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from device_kit import KiB, hidden, word
from processes import run_program

from vkback.device import BufferRange, Capabilities, CompileOnly, Device, DeviceError, FeatureMissing, NoDevice, list_devices
from vkback.device import driver as driver_module
from vkback.device import instance as instance_module
from vkback.device.instance import VALIDATION_LAYER
from vkback.device.query import API_1_2
from vkback.device.report import report

# -- opening


def run_python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | env
    return run_program([sys.executable, "-c", program], env=full)


OPEN_AND_PRINT_ERROR = """
from vkback.device import Device, NoDevice
try: Device.open()
except NoDevice as e: print(e)
"""


def test_no_driver_says_what_to_install() -> None:
    ran = run_python(OPEN_AND_PRINT_ERROR, VK_DRIVER_FILES="/nonexistent", VK_ICD_FILENAMES="/nonexistent")
    assert ran.stdout.startswith("[device] the Vulkan loader "), ran.stderr
    assert "apt install libvulkan1 mesa-vulkan-drivers" in ran.stdout


def test_no_loader_says_what_to_install_and_planning_still_works() -> None:
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "vulkan": raise OSError("Cannot find Vulkan SDK version.")
sys.meta_path.insert(0, Refuse())
from vkback.device import Capabilities
print(Capabilities.from_profile("nvidia_h200_linux").architecture)
"""
    ran = run_python(program + OPEN_AND_PRINT_ERROR)
    assert ran.stdout.startswith("hopper\n[device] no Vulkan loader: Cannot find Vulkan SDK version.. Install a Vulkan loader"), ran.stderr


@pytest.mark.vulkan
def test_unknown_selector_lists_the_devices() -> None:
    with pytest.raises(NoDevice, match=r"no device fits 'voodoo' .*There are: 0: "):
        Device.open("voodoo")


@pytest.mark.vulkan
def test_opens_by_index_name_and_uuid() -> None:
    (first, *_) = list_devices()
    for selector in (0, first.name[:6], first.uuid):
        with Device.open(selector) as device:
            assert device.caps == first


@pytest.mark.vulkan
def test_capabilities_of_a_live_device_are_sane(device: Device) -> None:
    caps = device.caps
    assert Capabilities.from_dict(caps.to_dict()) == caps
    assert caps.storage_16bit and caps.timeline_semaphore
    assert caps.subgroup_min <= caps.subgroup_size <= caps.subgroup_max
    assert "basic" in caps.subgroup_ops
    assert caps.max_storage_buffer_range >= 1 << 27
    assert sum(h.size for h in caps.heaps if h.device_local) >= device.free_memory() > 0
    assert device.summary_line().startswith(f"vkback: 0 = {caps.name} ({caps.driver_name}) | uma: ")


@pytest.mark.vulkan
def test_llvmpipe_reports_what_its_profile_says(device: Device) -> None:
    if "Mesa 22.3.6" not in device.caps.driver_info:
        pytest.skip("the profile is of Mesa 22.3.6's llvmpipe")
    told, live = Capabilities.from_profile("llvmpipe_mesa_22_debian12"), device.caps
    apart = {
        "name",
        "driver_info",
        "uuid",
        "driver_uuid",
        "extensions",
        "heaps",
        "memory_types",
        "subgroup_size",
        "subgroup_min",
        "subgroup_max",
    }
    for field in dataclasses.fields(Capabilities):
        if field.name not in apart:
            assert getattr(live, field.name) == getattr(told, field.name), field.name


# -- validation layers, leaks, threads


def use_everything(device: Device, spirv: dict[str, bytes]) -> None:
    arena = device.arena("all", 64 * KiB, "device")
    a, b, c, d = (arena.alloc(4 * KiB, name) for name in ("a", "b", "c", "d"))
    device.upload(a, np.ones(1024, np.float32))
    device.upload(hidden(b), np.ones(1024, np.float32))
    up = device.uploader(chunk_bytes=KiB)
    up.write(hidden(d), 0, np.array([16, 1, 1], np.uint32))
    up.finish()
    size = device.caps.subgroup_size if device.caps.subgroup_required_size else None
    kernel = device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={0: 2}, subgroup_size=size)
    nothing = device.kernel(spirv["nothing"], name="nothing", bindings=0, push_bytes=0)
    dot = device.kernel(spirv["dot"], name="dot", bindings=3, push_bytes=0) if device.caps.int_dot else None
    rec = device.recorder("everything", timestamps=2 if device.caps.timestamp_bits else 0)
    if device.caps.timestamp_bits:
        rec.timestamp("start")
    rec.dispatch(kernel, [a, b, c], word(1024), (16, 1, 1))
    rec.dispatch(nothing, [], b"", (1, 1, 1))
    rec.barrier()
    rec.dispatch(kernel, [c, b, a], word(1024), (16, 1, 1))
    if dot:
        rec.barrier()
        rec.dispatch(dot, [a, b, c], b"", (16, 1, 1))
    rec.barrier()
    rec.copy(a, b)
    rec.fill(c, 0)
    if device.caps.timestamp_bits:
        rec.timestamp("end")
    rec.host_barrier()
    commands = rec.finish()
    for _ in range(3):
        device.submit([commands]).wait()
    assert device.download(hidden(b), np.float32).shape == (1024,)
    assert device.download(c, np.uint32).any() == np.False_
    assert len(commands.timestamps()) in (0, 2)


@pytest.mark.vulkan
def test_close_destroys_everything(spirv: dict[str, bytes]) -> None:
    device = Device.open(0)
    use_everything(device, spirv)
    alive = device.live_objects()
    assert alive["Buffer"] >= 1 and alive["Pipeline"] >= 1 and alive["Commands"] >= 1
    device.close()
    assert device.live_objects() == {}
    device.close()
    with pytest.raises(DeviceError, match=r"this Device is closed"):
        device.arena("late", 1, "device")


@pytest.mark.vulkan
@pytest.mark.parametrize("mode", [True, "sync"])
def test_validation_layers_have_nothing_to_say(spirv: dict[str, bytes], mode: bool) -> None:
    try:
        device = Device.open(0, validation=mode)
    except FeatureMissing as missing:
        assert VALIDATION_LAYER in str(missing)
        pytest.skip("the Khronos validation layer is not installed")
    with device:
        use_everything(device, spirv)
    assert device.live_objects() == {}
    assert [str(m) for m in device.validation_messages] == []


@pytest.mark.vulkan
def test_vulkan_1_2_gets_the_same_through_extensions(spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with Device.open(0) as newest:
        expected = newest.caps
    monkeypatch.setattr(instance_module, "API_1_3", API_1_2)
    try:
        device = Device.open(0, validation=True)
    except FeatureMissing:
        device = Device.open(0)
    with device:
        assert device.caps == expected
        use_everything(device, spirv)
    assert [str(m) for m in device.validation_messages] == []


@pytest.mark.vulkan
def test_validation_errors_are_collected_and_raised(spirv: dict[str, bytes]) -> None:
    try:
        device = Device.open(0, validation=True)
    except FeatureMissing:
        pytest.skip("the Khronos validation layer is not installed")
    arena = device.arena("a", 256, "device")
    r = arena.alloc(16, "r")
    rec = device.recorder("bad fill")
    # vkCmdFillBuffer beyond the buffer's end: the layer is there to see it, the driver clamps nothing, so it is never submitted.
    rec.fill(dataclasses.replace(r, offset=256, size=16), 0)
    rec.finish()
    assert any(m.severity == "error" and "vkCmdFillBuffer" in m.name for m in device.validation_messages)
    with pytest.raises(DeviceError, match=r"\[validation\] \d+ errors from the validation layers"):
        device.check_validation()
    with pytest.raises(DeviceError, match=r"vkCmdFillBuffer"):
        device.close()
    assert device.live_objects() == {}


@pytest.mark.vulkan
def test_an_error_in_the_with_block_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), Device.open(0):
        _ = 1 / 0


@pytest.mark.vulkan
def test_threads_may_submit_at_the_same_time(device: Device, spirv: dict[str, bytes]) -> None:
    kernel = device.kernel(spirv["count"], name="count", bindings=1, push_bytes=0)
    with device.arena("threads", 4 * 256, "device") as arena:
        counters = [arena.alloc(4, f"c{i}") for i in range(4)]
        for c in counters:
            device.upload(c, np.zeros(1, np.uint32))

        def work(counter: BufferRange) -> None:
            rec = device.recorder("thread")
            rec.dispatch(kernel, [counter], b"", (1, 1, 1))
            commands = rec.finish()
            for _ in range(25):
                device.submit(commands)
            commands.destroy()

        threads = [threading.Thread(target=work, args=(c,)) for c in counters]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [int(device.download(c, np.uint32)[0]) for c in counters] == [25] * 4


# -- report


@pytest.mark.vulkan
def test_report_has_what_a_bug_report_needs(device: Device) -> None:
    said = report("glslc 1.2.3")
    for part in ("vkback ", "python ", "vulkan 1.3.275.1", "shader compiler glslc 1.2.3", device.caps.name, device.caps.driver_info):
        assert part in said
    for part in (
        "max_storage_buffer_range: ",
        "int_dot_accelerated: ",
        "heap 0: ",
        "memory type 0: heap 0",
        "extensions: VK_",
        "timestamp_period: ",
    ):
        assert part in said


def test_report_without_vulkan_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "LOAD_ERROR", "no Vulkan loader: gone. Install one")
    assert "[device] no Vulkan loader: gone. Install one" in report()


# -- without hardware


@pytest.mark.vulkan
def test_a_device_that_only_compiles_says_so_of_all_that_would_run(device: Device, spirv: dict[str, bytes]) -> None:
    with Device.open(device.index, compile_only=True) as compiling:
        assert compiling.compile_only
        compiling.kernel(spirv["add"], name="add", bindings=3, push_bytes=4)
        for run in (
            lambda: compiling.arena("weights", KiB),
            lambda: compiling.recorder("token"),
            lambda: compiling.submit([]),
            compiling.wait_idle,
        ):
            with pytest.raises(CompileOnly, match=r"only compiles kernels \(it was opened so\); .* needs a device that runs them"):
                run()
    assert not compiling.live_objects()


def test_drivers_without_hardware_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Capabilities.from_profile("amd_rx_7900_xtx_radv")
    null = dataclasses.replace(card, name="Null hardware (RADV NAVI21)")
    assert instance_module.no_hardware(card) == "" != instance_module.no_hardware(null)
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libamdgpu_noop_drm_shim.so")
    assert "no-op kernel shim" in instance_module.no_hardware(card)
    assert instance_module.no_hardware(Capabilities.from_profile("llvmpipe_mesa_26")) == ""
