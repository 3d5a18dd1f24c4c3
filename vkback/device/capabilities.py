"""What a device can do, as a frozen value: read from a driver, from JSON, or from the recorded profile of a GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkback.device.errors import DeviceError, UnknownDevice
from vkback.errors import nearest

PROFILE_DIR = Path(__file__).resolve().parent / "profiles"

VENDORS: Mapping[int, str] = {
    0x1002: "amd",
    0x10DE: "nvidia",
    0x8086: "intel",
    0x106B: "apple",
    0x5143: "qualcomm",
    0x13B5: "arm",
    0x14E4: "broadcom",
    0x1010: "imagination",
}
"""PCI vendor ids, and the Khronos ones of vendors without PCI. Mesa's own id (0x10005) names no maker."""


MIN_STORAGE_BINDINGS = 8
"""Storage buffers that a kernel may always have: as many as a Raspberry Pi binds, the fewest of all recorded devices.
Vulkan guarantees only 4."""


@dataclass(frozen=True)
class Heap:
    """A memory heap; size in bytes."""

    size: int
    device_local: bool


@dataclass(frozen=True)
class MemoryType:
    """flags: names of VkMemoryPropertyFlagBits: device_local, host_visible, host_coherent, host_cached, lazily_allocated, ..."""

    heap: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class MatrixShape:
    """One cooperative matrix multiply-add: result[m, n] = a[m, k] x b[k, n] + c[m, n], component types as "f16", "f32", "s8", ..."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    result: str
    saturating: bool
    scope: str


@dataclass(frozen=True)
class Capabilities:
    """One device under one driver. Sizes are in bytes, `timestamp_period` in ns per tick.

    vendor        "nvidia", "amd", "intel", "apple", "qualcomm", "arm", "broadcom", "software", "other"
    architecture  class name as in docs/device_profiles.md ("ampere", "rdna3", ...), "unknown" when no rule fits
    device_type   "discrete", "integrated", "virtual", "cpu", "other"
    int_dot       the feature; `int_dot_accelerated`: packed signed 4x8-bit dot products are fast
    subgroup_ops  "basic", "vote", "arithmetic", "ballot", "shuffle", "shuffle_relative", "clustered", "quad", "rotate", ...
    extensions    names that the driver lists
    pipeline_robustness  a pipeline can switch bounds checks of its accesses off
    shader_clock  kernels can read the device's clock; from a profile: it lists the extension
    uma           host and device share their memory; `rebar`: all device memory is host-visible
    shader_cores  SMs, compute units, shader cores; None when not reported
    unknown       what a recorded profile does not say, by Vulkan's names; nothing of a device that is here
    Unknown features count as absent, and an unknown limit as the least that Vulkan allows.
    """

    name: str
    vendor: str
    architecture: str
    device_type: str
    vendor_id: int
    device_id: int
    driver_id: str
    driver_name: str
    driver_info: str
    driver_version: str
    api_version: str

    subgroup_size: int
    subgroup_min: int
    subgroup_max: int
    subgroup_ops: tuple[str, ...]
    subgroup_size_control: bool
    subgroup_required_size: bool
    full_subgroups: bool
    max_workgroup_subgroups: int

    int_dot: bool
    int_dot_accelerated: bool
    fp16: bool
    bf16: bool
    int8: bool
    int16: bool
    int64: bool
    storage_8bit: bool
    storage_16bit: bool
    timeline_semaphore: bool
    buffer_device_address: bool
    vulkan_memory_model: bool
    vulkan_memory_model_device_scope: bool
    synchronization2: bool
    maintenance4: bool
    pipeline_robustness: bool
    shader_clock: bool

    max_storage_buffer_range: int
    max_shared_memory: int
    max_workgroup_invocations: int
    max_workgroup_size: tuple[int, int, int]
    max_workgroup_count: tuple[int, int, int]
    max_push_constants: int
    max_storage_bindings: int
    max_allocation_size: int
    max_buffer_size: int
    min_storage_buffer_offset_alignment: int

    heaps: tuple[Heap, ...]
    memory_types: tuple[MemoryType, ...]
    uma: bool
    rebar: bool

    timestamp_period: float
    timestamp_bits: int

    cooperative_matrix: bool
    cooperative_matrix_shapes: tuple[MatrixShape, ...]

    shader_cores: int | None
    extensions: tuple[str, ...]
    uuid: str
    driver_uuid: str
    unknown: tuple[str, ...] = ()

    @property
    def largest_buffer(self) -> int:
        """Largest size of a buffer in bytes, a multiple of 256, as ranges are."""
        return min(self.max_allocation_size, self.max_buffer_size) // 256 * 256

    @property
    def software(self) -> bool:
        """Whether the "GPU" is the CPU."""
        return self.device_type == "cpu"

    def has_subgroup_ops(self, *names: str) -> bool:
        """Whether the device has all of these subgroup operations."""
        return set(names) <= set(self.subgroup_ops)

    def summary_line(self, index: int = 0) -> str:
        """One line about the device, in the form that llama.cpp's users know."""
        matrix = "KHR_coopmat" if self.cooperative_matrix else "none"
        return (
            f"vkback: {index} = {self.name} ({self.driver_name}) | uma: {self.uma:d} | fp16: {self.fp16:d} | bf16: {self.bf16:d} | "
            f"warp size: {self.subgroup_size} | shared memory: {self.max_shared_memory} | int dot: {self.int_dot_accelerated:d} | "
            f"matrix cores: {matrix}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives back an equal Capabilities."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Capabilities:
        """Inverse of `to_dict`. Raises DeviceError naming fields that are missing or unknown."""
        names = {f.name for f in dataclasses.fields(cls)}
        missing, extra = sorted(names - {"unknown"} - set(values)), sorted(set(values) - names)
        if missing or extra:
            raise DeviceError(
                f"[capabilities] fields missing: {', '.join(missing) or 'none'}; unknown: {', '.join(extra) or 'none'}. "
                "Write the file again with this version's to_dict"
            )
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        fields["heaps"] = tuple(Heap(**h) for h in values["heaps"])
        fields["memory_types"] = tuple(MemoryType(t["heap"], tuple(t["flags"])) for t in values["memory_types"])
        fields["cooperative_matrix_shapes"] = tuple(MatrixShape(**s) for s in values["cooperative_matrix_shapes"])
        return cls(**fields)

    @classmethod
    def from_profile(cls, path: str | Path) -> Capabilities:
        """Read a recorded profile (schema of docs/device_profiles.md).

        path  a file, or the id of a profile that comes with vkback ("nvidia_h200_linux")
        Raises DeviceError for a name that is neither, and for a file that is no profile.
        """
        file = Path(path)
        if not file.suffix and not file.exists():
            file = PROFILE_DIR / f"{file.name}.json"
        if not file.exists():
            known = profile_ids()
            raise UnknownDevice(
                f"[capabilities] no profile {str(path)!r}; expected a file, or a recorded device. Of {len(known)} the nearest are "
                f"{nearest(file.stem, known)}; docs/device_profiles.md lists all"
            )
        try:
            profile = json.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise DeviceError(f"[capabilities] {file}: cannot be read: {e.strerror}") from e
        except (ValueError, RecursionError) as e:
            raise DeviceError(f"[capabilities] {file}: no recorded profile, which is JSON: {e}") from e
        schema = profile.get("schema") if isinstance(profile, dict) else None
        if schema != 1:
            raise DeviceError(f"[capabilities] {file}: schema {schema!r}, expected 1")
        try:
            return _checked(_from_profile(profile))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as e:
            raise DeviceError(f"[capabilities] {file}: lacks a value, or has one of another kind: {e}; see docs/device_profiles.md") from e


def profile_ids() -> tuple[str, ...]:
    """Ids of the profiles that come with vkback."""
    return tuple(sorted(p.stem for p in PROFILE_DIR.glob("*.json")))


def vendor_name(vendor_id: int, device_type: str, driver_id: str) -> str:
    """The maker's name as tuning tables use it."""
    if device_type == "cpu":
        return "software"
    if "HONEYKRISP" in driver_id or "KOSMICKRISP" in driver_id:  # Apple hardware under Mesa's vendor id
        return "apple"
    return VENDORS.get(vendor_id, "other")


_FEATURES = {
    "full_subgroups": "computeFullSubgroups",
    "int_dot": "shaderIntegerDotProduct",
    "fp16": "shaderFloat16",
    "int8": "shaderInt8",
    "int16": "shaderInt16",
    "int64": "shaderInt64",
    "storage_8bit": "storageBuffer8BitAccess",
    "storage_16bit": "storageBuffer16BitAccess",
    "timeline_semaphore": "timelineSemaphore",
    "buffer_device_address": "bufferDeviceAddress",
    "vulkan_memory_model": "vulkanMemoryModel",
    "vulkan_memory_model_device_scope": "vulkanMemoryModelDeviceScope",
    "synchronization2": "synchronization2",
    "maintenance4": "maintenance4",
}
"""Fields that are feature bits, with Vulkan's name."""

_EXTENSIONS = {"bf16": "VK_KHR_shader_bfloat16", "pipeline_robustness": "VK_EXT_pipeline_robustness", "shader_clock": "VK_KHR_shader_clock"}
"""Fields that a profile tells by an extension's presence."""

_LIMITS: Mapping[str, tuple[str, int | tuple[int, int, int]]] = {
    "max_storage_buffer_range": ("maxStorageBufferRange", 1 << 27),
    "max_shared_memory": ("maxComputeSharedMemorySize", 16384),
    "max_workgroup_invocations": ("maxComputeWorkGroupInvocations", 128),
    "max_workgroup_size": ("maxComputeWorkGroupSize", (128, 128, 64)),
    "max_workgroup_count": ("maxComputeWorkGroupCount", (65535, 65535, 65535)),
    "max_push_constants": ("maxPushConstantsSize", 128),
    "max_storage_bindings": ("maxPerStageDescriptorStorageBuffers", MIN_STORAGE_BINDINGS),
    "max_allocation_size": ("maxMemoryAllocationSize", 1 << 30),
    "max_buffer_size": ("maxBufferSize", 1 << 30),
    "min_storage_buffer_offset_alignment": ("minStorageBufferOffsetAlignment", 256),
}
"""Fields that are limits, with Vulkan's name and what Vulkan 1.2 guarantees (its table of required limits)."""


def _from_profile(p: Mapping[str, Any]) -> Capabilities:
    limits = p["limits"]
    return Capabilities(
        **_profile_identity(p),
        **_profile_subgroups(p["subgroup"]),
        **_profile_features(p),
        **_profile_limits(limits),
        **_profile_memory(p["memory"]),
        **_profile_matrix(p["cooperative_matrix"]),
        int_dot_accelerated=bool(p["integer_dot_accelerated"]["packed_4x8_signed"]),
        timestamp_period=float(limits["timestampPeriod"] or 1.0),
        timestamp_bits=64 if limits["timestampPeriod"] else 0,
        shader_cores=p["compute_units"]["count"],
        extensions=tuple(sorted(name for name, there in p["extensions"].items() if there)),
        unknown=_unknown(p),
    )


_SUBGROUP = {
    "size": "subgroupSize",
    "min": "minSubgroupSize",
    "max": "maxSubgroupSize",
    "operations": "subgroup operations",
    "size_control": "subgroupSizeControl",
    "required_size_in_compute": "requiredSubgroupSizeStages",
    "max_workgroup_subgroups": "maxComputeWorkgroupSubgroups",
}
"""Keys of a profile's subgroup, with Vulkan's name."""


_SUBGROUP_SIZES = "subgroup sizes that kernels demand, and whether lanes share a row's sum by shuffles"
_MEMORY = "how weights and activations are cut into buffers"

DECIDES: Mapping[str, str] = {
    "shaderIntegerDotProduct": "whether products take 8-bit activations and integer dot products",
    "accelerated integer dot products": "whether products take 8-bit activations and integer dot products",
    "shaderFloat16": "whether GEMMs and attention take cooperative matrices",
    "cooperative matrices": "whether GEMMs and attention take cooperative matrices",
    "shapes of cooperative matrices": "whether GEMMs and attention take cooperative matrices",
    "storageBuffer16BitAccess": "which kernels read an F16 cache by halves",
    "subgroupSize": _SUBGROUP_SIZES,
    "minSubgroupSize": _SUBGROUP_SIZES,
    "maxSubgroupSize": _SUBGROUP_SIZES,
    "subgroup operations": _SUBGROUP_SIZES,
    "subgroupSizeControl": _SUBGROUP_SIZES,
    "requiredSubgroupSizeStages": _SUBGROUP_SIZES,
    "computeFullSubgroups": _SUBGROUP_SIZES,
    "maxComputeWorkGroupInvocations": "threads of a workgroup",
    "maxComputeWorkGroupSize": "threads of a workgroup",
    "maxComputeWorkgroupSubgroups": "threads of a workgroup",
    "maxComputeSharedMemorySize": "tiles of GEMMs and attention, tokens of a GEMV",
    "maxPerStageDescriptorStorageBuffers": "what is fused into one kernel",
    "maxStorageBufferRange": _MEMORY,
    "maxMemoryAllocationSize": _MEMORY,
    "maxBufferSize": _MEMORY,
    "maxComputeWorkGroupCount": "how grids are folded",
    "maxPushConstantsSize": "whether a kernel's constants fit",
    "timelineSemaphore": "whether it runs at all",
}
"""What hangs on a fact that a profile may lack; on the others, no choice of a kernel."""


def _unknown(p: Mapping[str, Any]) -> tuple[str, ...]:
    """What a profile does not say of all that kernels are chosen by."""
    matrix = p["cooperative_matrix"]
    values = {
        **{name: p["features"][name] for name in _FEATURES.values()},
        **{name: p["limits"][name] for name, _ in _LIMITS.values()},
        **{name: p["subgroup"][key] for key, name in _SUBGROUP.items()},
        "accelerated integer dot products": p["integer_dot_accelerated"]["packed_4x8_signed"],
        "cooperative matrices": matrix["supported"],
        "shapes of cooperative matrices": matrix["shapes"] if matrix["supported"] else (),
    }
    return tuple(name for name, value in values.items() if value is None)


def _checked(caps: Capabilities) -> Capabilities:
    """Raises TypeError for a value of another kind than its field's."""
    for field in dataclasses.fields(caps):
        value = getattr(caps, field.name)
        kind = {"str": str, "int": int, "tuple[str, ...]": str}.get(str(field.type))
        wrong = [v for v in (value if isinstance(value, tuple) else (value,)) if kind and not isinstance(v, kind)]
        if wrong:
            raise TypeError(f"{field.name} is {wrong[0]!r}")
    return caps


def _profile_identity(p: Mapping[str, Any]) -> dict[str, Any]:
    driver = p["driver"]
    return {
        "name": p["name"],
        "vendor": vendor_name(p["vendor_id"] or 0, p["device_type"], driver["id"] or ""),
        "architecture": p["architecture"]["class"] or "unknown",
        "device_type": p["device_type"] or "other",
        "vendor_id": p["vendor_id"] or 0,
        "device_id": p["device_id"] or 0,
        "driver_id": driver["id"] or "",
        "driver_name": driver["name"] or "",
        "driver_info": driver["info"] or "",
        "driver_version": driver["version"] or "",
        "api_version": p["api_version"] or "1.2.0",
        "uuid": "",
        "driver_uuid": "",
    }


def _profile_subgroups(subgroup: Mapping[str, Any]) -> dict[str, Any]:
    size = subgroup["size"] or 1
    return {
        "subgroup_size": size,
        "subgroup_min": subgroup["min"] or size,
        "subgroup_max": subgroup["max"] or size,
        "subgroup_ops": tuple(subgroup["operations"] or ()),
        "subgroup_size_control": bool(subgroup["size_control"]),
        "subgroup_required_size": bool(subgroup["required_size_in_compute"]),
        "max_workgroup_subgroups": subgroup["max_workgroup_subgroups"] or 0,
    }


def _profile_features(p: Mapping[str, Any]) -> dict[str, Any]:
    features = {field: bool(p["features"][name]) for field, name in _FEATURES.items()}
    return features | {field: bool(p["extensions"].get(name)) for field, name in _EXTENSIONS.items()}


def _profile_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Limits as recorded; an unknown one is the least that Vulkan allows."""
    values = {field: least if limits[name] is None else limits[name] for field, (name, least) in _LIMITS.items()}
    return {field: tuple(map(int, v)) if isinstance(v, list | tuple) else int(v) for field, v in values.items()}


def _profile_memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    heaps = tuple(Heap(int(h["size"]), bool(h["device_local"])) for h in memory["heaps"] or ())
    if not heaps and memory["device_memory_mib"]:
        heaps = (Heap(int(memory["device_memory_mib"]) << 20, True),)
    return {
        "heaps": heaps,
        "memory_types": tuple(MemoryType(int(t["heap"]), tuple(t["flags"])) for t in memory["types"] or ()),
        "uma": bool(memory["uma"]),
        "rebar": bool(memory["rebar"]),
    }


def _profile_matrix(matrix: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "cooperative_matrix": bool(matrix["supported"]),
        "cooperative_matrix_shapes": tuple(
            MatrixShape(s["m"], s["n"], s["k"], s["a"], s["b"], s["c"], s["result"], bool(s["saturating"]), s["scope"])
            for s in matrix["shapes"] or ()
        ),
    }
