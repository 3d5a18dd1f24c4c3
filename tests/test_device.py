"""The device layer on any Vulkan device, and its facts about devices that are not here."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vkback.device import (
    Arena,
    BufferRange,
    Capabilities,
    Device,
    DeviceError,
    DeviceLost,
    FeatureMissing,
    Heap,
    KernelSpec,
    MemoryType,
    NoDevice,
    OutOfDeviceMemory,
    Timeout,
    list_devices,
    profile_ids,
)
from vkback.device import device as device_module
from vkback.device import driver as driver_module
from vkback.device import instance as instance_module
from vkback.device.architecture import Traits, classify
from vkback.device.capabilities import PROFILE_DIR
from vkback.device.driver import check, ffi, vk
from vkback.device.instance import VALIDATION_LAYER, select, without_duplicates
from vkback.device.kernel import KernelCache
from vkback.device.memory import choose_memory_type
from vkback.device.query import API_1_2, Features, PhysicalDevice, choose_queue_family
from vkback.device.report import report
from vkback.device.spirv import inspect
from vkback.shader import ShaderLibrary, Variant

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

SHADERS = {
    # c[i] = a[i] + SCALE * b[i] for i < n
    "add": """#version 450
layout(local_size_x_id = 1, local_size_x = 64) in;
layout(constant_id = 0) const uint SCALE = 1;
layout(set = 0, binding = 0) readonly buffer A { float a[]; };
layout(set = 0, binding = 1) readonly buffer B { float b[]; };
layout(set = 0, binding = 2) writeonly buffer C { float c[]; };
layout(push_constant) uniform Push { uint n; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < n) c[i] = a[i] + float(SCALE) * b[i];
}
""",
    "nothing": """#version 450
layout(local_size_x = 1) in;
void main() {}
""",
    # word 0 counts the runs
    "count": """#version 450
layout(local_size_x = 1) in;
layout(set = 0, binding = 0) buffer A { uint a[]; };
void main() { a[0] = a[0] + gl_NumWorkGroups.x; }
""",
    # x = 3x + 1, a chain that shows any missing or doubled step
    "step": """#version 450
layout(local_size_x = 1) in;
layout(set = 0, binding = 0) readonly buffer A { uint a[]; };
layout(set = 0, binding = 1) writeonly buffer B { uint b[]; };
void main() { b[0] = 3 * a[0] + 1; }
""",
    # four signed bytes each
    "dot": """#version 450
#extension GL_EXT_spirv_intrinsics : require
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int sdot(int a, int b, spirv_literal int packed_format);
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer A { int a[]; };
layout(set = 0, binding = 1) readonly buffer B { int b[]; };
layout(set = 0, binding = 2) writeonly buffer C { int c[]; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    c[i] = sdot(a[i], b[i], 0);
}
""",
    "shared": """#version 450
layout(local_size_x = 64) in;
struct Pair { vec4 a; uvec2 b; };
shared Pair pairs[3][8];
shared uint word;
layout(set = 0, binding = 0) buffer A { float a[]; };
void main() {
    const uint i = gl_LocalInvocationID.x;
    pairs[i & 1][i & 7] = Pair(vec4(a[i]), uvec2(i));
    if (i == 0) word = i;
    barrier();
    a[i] = pairs[0][i & 7].a.x + float(pairs[1][i & 7].b.y + word);
}
""",
    # seconds of work
    "busy": """#version 450
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer A { uint a[]; };
layout(push_constant) uniform Push { uint n; };
void main() {
    uint x = a[0] + gl_GlobalInvocationID.x;
    for (uint i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
    }
    a[gl_LocalInvocationID.x] = x;
}
""",
    "subgroup": """#version 450
#extension GL_KHR_shader_subgroup_basic : require
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) writeonly buffer A { uint a[]; };
void main() { if (gl_LocalInvocationID.x == 0) a[0] = gl_SubgroupSize; }
""",
    "half": """#version 450
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_shader_subgroup_clustered : require
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer A { float a[]; };
void main() { a[0] = subgroupClusteredAdd(a[1], 4) + float(float16_t(a[2]) * float16_t(a[3])); }
""",
}


@pytest.fixture(scope="session")
def spirv(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("shaders")
    for name, source in SHADERS.items():
        (root / f"{name}.comp").write_text(source)
    variants = {name: Variant(f"{name}.comp") for name in SHADERS}
    built = ShaderLibrary(root).compile_many(variants.values())
    return {name: built[v] for name, v in variants.items()}


@pytest.fixture
def arena(device: Device) -> Iterator[Arena]:
    with device.arena("test", 4 * MiB, "device") as made:
        yield made


def word(value: int) -> bytes:
    return struct.pack("<I", value)


def hidden(r: BufferRange) -> BufferRange:
    """The range as on a GPU whose memory the host does not see: transfers take the staged way."""
    return dataclasses.replace(r, address=0)


def profile(name: str, **changes: Any) -> Capabilities:
    return dataclasses.replace(Capabilities.from_profile(name), **changes)


# -- capabilities and profiles: no device needed


@pytest.mark.parametrize("name", profile_ids())
def test_profile_reads_and_makes_the_json_round_trip(name: str) -> None:
    caps = Capabilities.from_profile(name)
    raw = json.loads((PROFILE_DIR / f"{name}.json").read_text())
    assert Capabilities.from_dict(json.loads(json.dumps(caps.to_dict()))) == caps
    assert caps.name == raw["name"]
    assert caps.architecture == raw["architecture"]["class"]
    assert caps.vendor in ("nvidia", "amd", "intel", "apple", "qualcomm", "arm", "broadcom", "software")
    # What nobody knows is what Vulkan guarantees, or absent.
    assert caps.max_storage_buffer_range == (raw["limits"]["maxStorageBufferRange"] or 1 << 27)
    assert caps.int_dot is (raw["features"]["shaderIntegerDotProduct"] is True)
    assert 1 <= caps.subgroup_min <= caps.subgroup_size <= caps.subgroup_max


def test_there_are_46_profiles() -> None:
    assert len(profile_ids()) == 46


@pytest.mark.parametrize("name", profile_ids())
def test_reported_facts_lead_to_the_architecture_class(name: str) -> None:
    raw = json.loads((PROFILE_DIR / f"{name}.json").read_text())
    caps = Capabilities.from_profile(name)
    traits = Traits(
        vendor=caps.vendor,
        name=caps.name,
        device_id=caps.device_id,
        subgroup_min=caps.subgroup_min,
        subgroup_max=caps.subgroup_max,
        dot_signed_accelerated=caps.int_dot_accelerated,
        dot_mixed_accelerated=bool(raw["integer_dot_accelerated"]["packed_4x8_mixed"]),
        cooperative_matrix=caps.cooperative_matrix,
        extensions=frozenset(caps.extensions),
        hints=raw["arch_hints"],
    )
    assert classify(traits) == caps.architecture


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia_gtx_1650_linux", "turing_no_tensor"),
        ("nvidia_rtx_2070_linux", "turing"),
        ("amd_rx_5700_xt_radv", "rdna1"),
        ("amd_rx_5700_xt_windows", "rdna1"),
        ("amd_rx_6600_radv", "rdna2"),
        ("amd_rx_7900_xtx_radv", "rdna3"),
        ("amd_radeon_vii_radv", "gcn5"),
        ("amd_rx_570_radv", "gcn4"),
        ("intel_arc_b580_windows", "xe2_hpg"),
        ("intel_arc_a770_anv", "xe_hpg"),
        ("intel_iris_xe_anv", "xe_lp"),
        ("intel_hd_620_anv", "gen9"),
    ],
)
def test_a_name_that_says_nothing_leaves_it_to_the_properties(name: str, expected: str) -> None:
    raw = json.loads((PROFILE_DIR / f"{name}.json").read_text())
    caps = Capabilities.from_profile(name)
    mixed = bool(raw["integer_dot_accelerated"]["packed_4x8_mixed"])
    traits = Traits(
        caps.vendor,
        "Graphics Device",
        0,
        caps.subgroup_min,
        caps.subgroup_max,
        caps.int_dot_accelerated,
        mixed,
        caps.cooperative_matrix,
        frozenset(caps.extensions),
        raw["arch_hints"],
    )
    assert classify(traits) == expected


def test_h200_profile_has_the_figures_of_the_dump() -> None:
    caps = Capabilities.from_profile("nvidia_h200_linux")
    assert (caps.vendor, caps.architecture, caps.subgroup_size) == ("nvidia", "hopper", 32)
    assert caps.int_dot and caps.int_dot_accelerated and caps.rebar and not caps.uma
    assert sum(h.size for h in caps.heaps if h.device_local) == 150754820096
    assert caps.has_subgroup_ops("arithmetic", "clustered") and not caps.has_subgroup_ops("rotate")
    assert caps.summary_line() == (
        "vkback: 0 = NVIDIA H200 (NVIDIA) | uma: 0 | fp16: 1 | bf16: 1 | warp size: 32 | shared memory: 49152 | int dot: 1 | "
        "matrix cores: KHR_coopmat"
    )


def test_software_and_mesa_devices_get_their_vendor() -> None:
    assert Capabilities.from_profile("llvmpipe_mesa_26").vendor == "software"
    assert Capabilities.from_profile("apple_m1_honeykrisp").vendor == "apple"
    assert Capabilities.from_profile("llvmpipe_mesa_26").software
    assert not Capabilities.from_profile("apple_m1_honeykrisp").software


def test_profile_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no profile 'gpu_of_nobody'\. There are: amd_radeon_8060s_radv, "):
        Capabilities.from_profile("gpu_of_nobody")
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(DeviceError, match=r"old\.json: schema 0, expected 1"):
        Capabilities.from_profile(tmp_path / "old.json")
    values = profile("nvidia_h200_linux").to_dict()
    del values["name"]
    values["colour"] = "green"
    with pytest.raises(DeviceError, match=r"fields missing: name; unknown: colour"):
        Capabilities.from_dict(values)


# -- choices among devices, queues and memory types: no device needed


def physical(caps: Capabilities, api_version: int = (1 << 22) | (3 << 12), compute: bool = True) -> PhysicalDevice:
    return PhysicalDevice(None, caps, api_version, Features(None, ()), compute)


def two_gpus() -> list[PhysicalDevice]:
    return [
        physical(profile("llvmpipe_mesa_26", uuid="00000000-0000-0000-0000-00000000000a")),
        physical(profile("nvidia_rtx_2070_linux", uuid="00000000-0000-0000-0000-00000000000b")),
        physical(profile("intel_iris_xe_anv", uuid="00000000-0000-0000-0000-00000000000c")),
    ]


@pytest.mark.parametrize(
    ("selector", "index"),
    [
        (0, 0),
        ("2", 2),
        ("rtx 20", 1),
        ("LLVMPIPE", 0),
        ("00000000-0000-0000-0000-00000000000c", 2),
        ("0000000000000000000000000000000b", 1),
        (None, 1),
    ],
)
def test_selector_takes_index_name_part_or_uuid_and_prefers_discrete(
    selector: str | int | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VKBACK_DEVICE", raising=False)
    devices = two_gpus()
    assert select(devices, selector) is devices[index]


def test_environment_stands_in_for_the_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_DEVICE", "iris")
    devices = two_gpus()
    assert select(devices, None) is devices[2]
    assert select(devices, 0) is devices[0]


def test_selector_errors_list_what_there_is() -> None:
    with pytest.raises(
        NoDevice, match=r"no device fits 'voodoo' \(index, part of a name, or UUID\)\. There are: 0: llvmpipe .*; 1: NVIDIA"
    ):
        select(two_gpus(), "voodoo")
    with pytest.raises(NoDevice, match=r"no device has index 7\. There are: 0: llvmpipe"):
        select(two_gpus(), 7)
    with pytest.raises(NoDevice, match=r"no device has index -1"):
        select(two_gpus(), "-1")
    with pytest.raises(NoDevice, match=r"'x' fits 2 devices: NVIDIA GeForce RTX 2070, Intel\(R\) Iris\(R\) Xe"):
        select(two_gpus()[1:], "x")
    with pytest.raises(NoDevice, match=r"lists no device\. Install"):
        select([], None)


def test_software_only_is_taken_with_a_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("VKBACK_DEVICE", raising=False)
    devices = two_gpus()[:1]
    assert select(devices, None) is devices[0]
    assert capsys.readouterr().err == "vkback: no GPU found, running on the CPU through llvmpipe (LLVM 22.1.6, 256 bits)\n"
    assert select(devices, 0) is devices[0]
    assert capsys.readouterr().err == ""


def test_the_better_driver_of_one_device_is_kept() -> None:
    card = "11111111-0000-0000-0000-000000000000"
    radv = physical(profile("amd_rx_7800_xt_radv", uuid=card))
    windows = physical(profile("amd_rx_7800_xt_windows", uuid=card))
    other = physical(profile("amd_rx_6600_radv", uuid="22222222-0000-0000-0000-000000000000"))
    assert without_duplicates([windows, other, radv]) == [radv, other]
    same_driver = physical(profile("amd_rx_7800_xt_radv", uuid=card))
    assert without_duplicates([radv, same_driver]) == [radv, same_driver]


def test_every_missing_feature_is_named_at_once() -> None:
    caps = profile("nvidia_rtx_2070_linux", storage_16bit=False, timeline_semaphore=False)
    with pytest.raises(
        FeatureMissing, match=r"RTX 2070 .*needs Vulkan 1\.2, storageBuffer16BitAccess, timelineSemaphore, a compute queue, which"
    ):
        device_module.require(physical(caps, api_version=(1 << 22) | (1 << 12), compute=False))
    device_module.require(physical(profile("nvidia_rtx_2070_linux")))


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ([(0b1111, 64), (0b1100, 64), (0b1110, 64)], 2),  # NVIDIA: all, transfer, compute + transfer
        ([(0b1111, 64), (0b1110, 0)], 0),  # the dedicated one writes no timestamps
        ([(0b0100, 64), (0b0111, 36)], 1),
        ([(0b0111, 64)], 0),
    ],
)
def test_queue_family_is_compute_only_if_it_has_timestamps(families: list[tuple[int, int]], expected: int) -> None:
    assert choose_queue_family(families) == expected


LOCAL, VISIBLE, COHERENT, CACHED = "device_local", "host_visible", "host_coherent", "host_cached"
MEMORY_LAYOUTS = {
    # heaps, types, chosen index for device, upload, readback, host_visible_device
    "discrete": (
        (Heap(8 * GiB, True), Heap(24 * GiB, False), Heap(246 * MiB, True)),
        ((1, ()), (0, (LOCAL,)), (1, (VISIBLE, COHERENT)), (1, (VISIBLE, COHERENT, CACHED)), (2, (LOCAL, VISIBLE, COHERENT))),
        (1, 2, 3, 4),
    ),
    "unified": ((Heap(16 * GiB, True),), ((0, (LOCAL, VISIBLE, COHERENT, CACHED)),), (0, 0, 0, 0)),
    "no host-visible device memory": (
        (Heap(8 * GiB, True), Heap(16 * GiB, False)),
        ((0, (LOCAL,)), (1, (VISIBLE, COHERENT))),
        (0, 1, 1, None),
    ),
    "larger of two device heaps": (
        (Heap(GiB, True), Heap(8 * GiB, True)),
        ((0, (LOCAL,)), (1, (LOCAL,)), (1, (LOCAL, VISIBLE, COHERENT))),
        (1, 2, 2, 2),
    ),
    "AMD's device-coherent types are left alone": (
        (Heap(8 * GiB, True), Heap(16 * GiB, False)),
        ((0, (LOCAL, "device_coherent", "device_uncached")), (0, (LOCAL,)), (1, (VISIBLE, COHERENT, CACHED))),
        (1, 2, 2, None),
    ),
}


@pytest.mark.parametrize("name", MEMORY_LAYOUTS)
def test_memory_type_by_kind(name: str) -> None:
    heaps, kinds, expected = MEMORY_LAYOUTS[name]
    types = [MemoryType(heap, flags) for heap, flags in kinds]
    chosen = tuple(choose_memory_type(types, heaps, 0xFFFF, k) for k in ("device", "upload", "readback", "host_visible_device"))
    assert chosen == expected
    assert choose_memory_type(types, heaps, 0, "device") is None


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


# -- opening


def run_python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | env
    return subprocess.run([sys.executable, "-c", program], env=full, capture_output=True, text=True, timeout=60)


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
def test_kernels_beyond_the_device_are_refused_by_name(device: Device, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"add: declared with 2 bindings, but the shader uses binding 2"):
        device.kernel(spirv["add"], name="add", bindings=2, push_bytes=4)
    with pytest.raises(DeviceError, match=r"add: 65536 push constant bytes; .* takes \d+, a multiple of 4"):
        device.kernel(spirv["add"], name="add", bindings=3, push_bytes=65536)
    with pytest.raises(DeviceError, match=r"add: workgroup of \(1048576, 1, 1\) threads; .*maxComputeWorkGroupInvocations"):
        device.kernel(spirv["add"], name="add", bindings=3, push_bytes=4, spec={1: 1 << 20})
    monkeypatch.setattr(device._kernels, "_caps", dataclasses.replace(device.caps, max_shared_memory=512))
    with pytest.raises(DeviceError, match=r"shared: 580 bytes of shared memory; .* has 512 \(maxComputeSharedMemorySize\)"):
        device.kernel(spirv["shared"], name="shared", bindings=1, push_bytes=0)
    monkeypatch.setattr(device._kernels, "_caps", dataclasses.replace(device.caps, fp16=False, subgroup_ops=("basic",)))
    with pytest.raises(
        FeatureMissing, match=r"half needs Float16, GroupNonUniformClustered, which .* does not offer\. Choose another variant"
    ):
        device.kernel(spirv["half"], name="half", bindings=1, push_bytes=0)


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
def test_indirect_dispatch_copy_and_fill(device: Device, arena: Arena, spirv: dict[str, bytes]) -> None:
    args, counter, copied = arena.alloc(16, "args"), arena.alloc(4, "counter"), arena.alloc(4, "copied")
    device.upload(args, np.array([0, 5, 1, 1], np.uint32))
    kernel = device.kernel(spirv["count"], name="count", bindings=1, push_bytes=0)
    rec = device.recorder("indirect")
    rec.fill(counter, 7)
    rec.barrier()
    # Five groups add 5 each without synchronization; all see 7 or what others left, all add: only a lower bound and a multiple are sure.
    rec.dispatch_indirect(kernel, [counter], b"", args.slice(4, 12))
    rec.barrier()
    rec.copy(counter, copied)
    commands = rec.finish()
    device.submit(commands).wait()
    commands.destroy()
    value = int(device.download(copied, np.uint32)[0])
    assert value >= 12 and (value - 7) % 5 == 0
    assert device.download(counter, np.uint32)[0] == value


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
    with pytest.raises(DeviceError, match=r"group counts need 12 bytes at a multiple of 4, 'weights' has 8 at 0"):
        rec.dispatch_indirect(kernel, [r, r, r], word(1), r.slice(0, 8))


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
    rec = device.recorder("long work")
    rec.dispatch(device.kernel(spirv["busy"], name="busy", bindings=1, push_bytes=4), [a], word(4_000_000), (64, 1, 1))
    commands = rec.finish()
    ticket = device.submit(commands)
    with pytest.raises(
        Timeout, match=r"VK_TIMEOUT: long work has not finished after 0\.01 s .*Submit less at once or raise timeout_s"
    ) as caught:
        ticket.wait(0.01)
    assert (caught.value.call, caught.value.result) == ("vkWaitSemaphores", "VK_TIMEOUT")
    assert not ticket.done
    ticket.wait()
    assert ticket.done
    commands.destroy()


@pytest.mark.vulkan
def test_a_lost_device_is_reported_with_what_was_running_and_can_be_closed(
    spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = -4  # VK_ERROR_DEVICE_LOST
    device = Device.open(0)
    arena = device.arena("a", 256, "device")
    rec = device.recorder("token 17")
    rec.fill(arena.alloc(256, "a"), 0)
    commands = rec.finish()
    ticket = device.submit(commands)
    ticket.wait()
    device._queue._completed = 0
    for call in ("vkWaitSemaphores", "vkGetSemaphoreCounterValue", "vkQueueSubmit"):
        monkeypatch.setattr(device._driver.fn, call, lambda *_: lost)
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


# -- validation layers, leaks, threads


def use_everything(device: Device, spirv: dict[str, bytes]) -> None:
    arena = device.arena("all", 64 * KiB, "device")
    a, b, c, args = (arena.alloc(4 * KiB, name) for name in ("a", "b", "c", "args"))
    device.upload(a, np.ones(1024, np.float32))
    device.upload(hidden(b), np.ones(1024, np.float32))
    up = device.uploader(chunk_bytes=KiB)
    up.write(hidden(args), 0, np.array([16, 1, 1], np.uint32))
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
    rec.dispatch_indirect(kernel, [c, b, a], word(1024), args)
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


@pytest.mark.vulkan
@pytest.mark.parametrize("offered", [False, True])
def test_pipelines_ask_for_no_bounds_checks_where_they_may(
    device: Device, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    """A driver that does not know the struct passes over it."""
    chained: list[int] = []
    call = device._driver.call

    def noting(name: str, *args: Any, **about: Any) -> Any:
        if name == "vkCreateComputePipelines":
            link = ffi.cast("VkBaseInStructure *", args[3].stage.pNext)
            while link != ffi.NULL:
                chained.append(int(link.sType))
                link = link.pNext
        return call(name, *args, **about)

    monkeypatch.setattr(device._driver, "call", noting)
    cache = KernelCache(device._driver, dataclasses.replace(device.caps, pipeline_robustness=offered))
    cache.get(KernelSpec(spirv["add"], "add", 3, 4))
    cache.destroy()
    assert chained.count(vk.VK_STRUCTURE_TYPE_PIPELINE_ROBUSTNESS_CREATE_INFO_EXT) == int(offered)
