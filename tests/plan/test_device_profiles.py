"""Facts about devices that are not here, and choices among devices, queues and memory types: no device needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_kit import GiB, MiB, profile

from vkback.device import Capabilities, DeviceError, FeatureMissing, Heap, MemoryType, NoDevice, profile_ids
from vkback.device import device as device_module
from vkback.device.architecture import Traits, classify
from vkback.device.capabilities import PROFILE_DIR
from vkback.device.instance import say_no_gpu, select, without_duplicates
from vkback.device.memory import choose_memory_type
from vkback.device.query import Features, PhysicalDevice, choose_queue_family

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
    with pytest.raises(DeviceError, match=r"no profile 'gpu_of_nobody'; expected a file, or a recorded device\. Of \d+ the nearest are "):
        Capabilities.from_profile("gpu_of_nobody")
    for asked, found in (
        ("h200", "nvidia_h200_linux"),
        ("nvidia_h201_linux", "nvidia_h200_linux"),
        ("RTX 3090", "nvidia_rtx_3090_partial"),
    ):
        with pytest.raises(DeviceError) as error:
            Capabilities.from_profile(asked)
        named = str(error.value).partition("nearest are ")[2].partition(";")[0].split(", ")
        assert len(named) == 5 and found in named[:2], "all 46 would hide the one that was meant"
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


def test_software_only_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("VKBACK_DEVICE", raising=False)
    say_no_gpu.cache_clear()
    devices = two_gpus()[:1]
    assert select(devices, None) is devices[0]
    assert caplog.messages == ["no GPU found, running on the CPU: llvmpipe (LLVM 22.1.6, 256 bits)"]
    caplog.clear()
    assert select(devices, None) is devices[0]
    assert not caplog.messages, "once is enough"
    assert select(devices, 0) is devices[0]
    assert not caplog.messages


def test_the_better_driver_of_one_device_is_kept() -> None:
    card = "11111111-0000-0000-0000-000000000000"
    radv = physical(profile("amd_rx_7800_xt_radv", uuid=card))
    windows = physical(profile("amd_rx_7800_xt_windows", uuid=card))
    other = physical(profile("amd_rx_6600_radv", uuid="22222222-0000-0000-0000-000000000000"))
    assert without_duplicates([windows, other, radv]) == [radv, other]
    same_driver = physical(profile("amd_rx_7800_xt_radv", uuid=card))
    assert without_duplicates([radv, same_driver]) == [radv, same_driver]


def test_every_missing_feature_is_named_at_once() -> None:
    caps = profile("nvidia_rtx_2070_linux", storage_16bit=False, timeline_semaphore=False)  # 16-bit storage is not needed
    with pytest.raises(FeatureMissing, match=r"RTX 2070 .*needs Vulkan 1\.2, timelineSemaphore, a compute queue, which"):
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
