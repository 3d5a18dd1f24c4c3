"""Reads a physical device into Capabilities."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from vkback.device.architecture import Traits, classify
from vkback.device.capabilities import Capabilities, Heap, MatrixShape, MemoryType, vendor_name
from vkback.device.driver import Handle, ffi, listed, struct, text, vk

API_1_2 = (1 << 22) | (2 << 12)
API_1_3 = (1 << 22) | (3 << 12)
QUEUE_GRAPHICS, QUEUE_COMPUTE = 1, 2
"""VkQueueFlagBits."""

BFLOAT16_FEATURES_STYPE = 1000141000
"""VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR; newer than the binding."""

NEWER_DRIVER_IDS = {26: "VK_DRIVER_ID_MESA_HONEYKRISP", 28: "VK_DRIVER_ID_MESA_KOSMICKRISP"}
"""VkDriverId values that the binding does not know by their current names."""

DEVICE_TYPES = ("other", "integrated", "discrete", "virtual", "cpu")
SUBGROUP_OPS = (
    "basic",
    "vote",
    "arithmetic",
    "ballot",
    "shuffle",
    "shuffle_relative",
    "clustered",
    "quad",
    "partitioned",
    "rotate",
    "rotate_clustered",
)
"""VkSubgroupFeatureFlagBits from bit 0; partitioned is NV's (bit 8), rotate and clustered rotate KHR's (bits 9 and 10)."""

MEMORY_FLAGS = (
    "device_local",
    "host_visible",
    "host_coherent",
    "host_cached",
    "lazily_allocated",
    "protected",
    "device_coherent",
    "device_uncached",
    "rdma",
)
"""VkMemoryPropertyFlagBits from bit 0."""


@dataclass(frozen=True)
class PhysicalDevice:
    """A device before it is opened."""

    handle: Handle
    caps: Capabilities
    api_version: int
    features: Features
    has_compute_queue: bool


@dataclass(frozen=True)
class Features:
    """Feature structs as the driver filled them, chained for VkDeviceCreateInfo: they enable exactly what the device has.

    chain       first struct of the chain
    extensions  device extensions that the chain's structs need
    """

    chain: Any
    extensions: tuple[str, ...]


def read_physical_device(fn: Any, handle: Handle, instance_api: int) -> PhysicalDevice:
    """Properties, features, memory and queues of one device."""
    extensions = frozenset(
        text(e.extensionName)
        for e in listed(
            fn.vkEnumerateDeviceExtensionProperties, "vkEnumerateDeviceExtensionProperties", "VkExtensionProperties", handle, ffi.NULL
        )
    )
    base = ffi.new("VkPhysicalDeviceProperties *")
    fn.vkGetPhysicalDeviceProperties(handle, base)
    api = min(base.apiVersion, instance_api | 0xFFF)
    properties = _read_properties(fn, handle, api, extensions)
    bits = _Bits(fn, handle, api, extensions)
    families = queue_families(fn, handle)
    caps = _capabilities(fn, handle, families, extensions, properties, bits)
    return PhysicalDevice(handle, caps, api, bits.to_enable(), any(flags & QUEUE_COMPUTE for flags, _ in families))


class _Chain:
    """A pNext chain; the struct added last comes first."""

    def __init__(self) -> None:
        self.head: Any = None
        self.structs: dict[str, Any] = {}

    def add(self, name: str) -> Any:
        self.head = struct(name, self.head)
        self.structs[name] = self.head
        return self.head


def _read_properties(fn: Any, handle: Handle, api: int, extensions: frozenset[str]) -> dict[str, Any]:
    chain = _Chain()
    chain.add("VkPhysicalDeviceVulkan11Properties")
    chain.add("VkPhysicalDeviceVulkan12Properties")
    if api >= API_1_3:
        chain.add("VkPhysicalDeviceVulkan13Properties")
    else:
        for extension, name in (
            ("VK_EXT_subgroup_size_control", "VkPhysicalDeviceSubgroupSizeControlPropertiesEXT"),
            ("VK_KHR_shader_integer_dot_product", "VkPhysicalDeviceShaderIntegerDotProductPropertiesKHR"),
            ("VK_KHR_maintenance4", "VkPhysicalDeviceMaintenance4PropertiesKHR"),
        ):
            if extension in extensions:
                chain.add(name)
    for extension, name in (
        ("VK_NV_shader_sm_builtins", "VkPhysicalDeviceShaderSMBuiltinsPropertiesNV"),
        ("VK_AMD_shader_core_properties", "VkPhysicalDeviceShaderCorePropertiesAMD"),
        ("VK_AMD_shader_core_properties2", "VkPhysicalDeviceShaderCoreProperties2AMD"),
        ("VK_ARM_shader_core_builtins", "VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM"),
    ):
        if extension in extensions:
            chain.add(name)
    chain.add("VkPhysicalDeviceProperties2")
    fn.vkGetPhysicalDeviceProperties2(handle, chain.head)
    return chain.structs


class _Bits:
    """Feature bits, wherever this Vulkan version keeps them."""

    def __init__(self, fn: Any, handle: Handle, api: int, extensions: frozenset[str]) -> None:
        chain = _Chain()
        used: list[str] = []
        chain.add("VkPhysicalDeviceVulkan11Features")
        chain.add("VkPhysicalDeviceVulkan12Features")
        if api >= API_1_3:
            chain.add("VkPhysicalDeviceVulkan13Features")
        else:
            for extension, name in (
                ("VK_EXT_subgroup_size_control", "VkPhysicalDeviceSubgroupSizeControlFeaturesEXT"),
                ("VK_KHR_shader_integer_dot_product", "VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR"),
                ("VK_KHR_maintenance4", "VkPhysicalDeviceMaintenance4FeaturesKHR"),
                ("VK_KHR_synchronization2", "VkPhysicalDeviceSynchronization2FeaturesKHR"),
            ):
                if extension in extensions:
                    chain.add(name)
                    used.append(extension)
        for extension, name in (
            ("VK_KHR_cooperative_matrix", "VkPhysicalDeviceCooperativeMatrixFeaturesKHR"),
            ("VK_EXT_device_fault", "VkPhysicalDeviceFaultFeaturesEXT"),
            ("VK_KHR_shader_clock", "VkPhysicalDeviceShaderClockFeaturesKHR"),
            ("VK_EXT_pipeline_robustness", "VkPhysicalDevicePipelineRobustnessFeaturesEXT"),
        ):
            if extension in extensions:
                chain.add(name)
                used.append(extension)
        if "VK_KHR_shader_bfloat16" in extensions:
            # Three feature bits after sType and pNext, like the struct borrowed here, which the binding does know.
            borrowed = chain.add("VkPhysicalDeviceVulkanMemoryModelFeatures")
            borrowed.sType = BFLOAT16_FEATURES_STYPE
            used.append("VK_KHR_shader_bfloat16")
        # Without structs of features; a device that lists portability_subset demands that it is enabled.
        used.extend(e for e in ("VK_EXT_memory_budget", "VK_EXT_external_memory_host", "VK_KHR_portability_subset") if e in extensions)
        chain.add("VkPhysicalDeviceFeatures2")
        fn.vkGetPhysicalDeviceFeatures2(handle, chain.head)
        self._chain, self._used = chain, used
        self.core = chain.structs["VkPhysicalDeviceFeatures2"].features
        self.v11 = chain.structs["VkPhysicalDeviceVulkan11Features"]
        self.v12 = chain.structs["VkPhysicalDeviceVulkan12Features"]

    def newer(self, field: str, ext_struct: str) -> bool:
        """A feature bit that is core in Vulkan 1.3 and an extension's before."""
        found = self._chain.structs.get("VkPhysicalDeviceVulkan13Features") or self._chain.structs.get(ext_struct)
        return bool(found and getattr(found, field))

    def bfloat16(self) -> bool:
        found = self._chain.structs.get("VkPhysicalDeviceVulkanMemoryModelFeatures")
        return bool(found and found.vulkanMemoryModel)

    def robustness(self) -> bool:
        found = self._chain.structs.get("VkPhysicalDevicePipelineRobustnessFeaturesEXT")
        return bool(found and found.pipelineRobustness)

    def clock(self) -> bool:
        found = self._chain.structs.get("VkPhysicalDeviceShaderClockFeaturesKHR")
        return bool(found and found.shaderDeviceClock)

    def matrix(self) -> bool:
        found = self._chain.structs.get("VkPhysicalDeviceCooperativeMatrixFeaturesKHR")
        return bool(found and found.cooperativeMatrix)

    def to_enable(self) -> Features:
        """The chain without features that cost speed or that nobody needs.

        Robust buffer access bounds-checks every load; graphics features may cost memory.
        Everything else is enabled as the driver offers it.
        """
        for name, _ in ffi.typeof("VkPhysicalDeviceFeatures").fields:
            if name not in ("shaderInt64", "shaderInt16"):
                setattr(self.core, name, 0)
        self.v12.bufferDeviceAddressCaptureReplay = 0
        self.v12.bufferDeviceAddressMultiDevice = 0
        self.v11.protectedMemory = 0
        for name, unwanted in (
            ("VkPhysicalDeviceVulkan13Features", "robustImageAccess"),
            ("VkPhysicalDeviceCooperativeMatrixFeaturesKHR", "cooperativeMatrixRobustBufferAccess"),
            ("VkPhysicalDeviceFaultFeaturesEXT", "deviceFaultVendorBinary"),
        ):
            if name in self._chain.structs:
                setattr(self._chain.structs[name], unwanted, 0)
        return Features(self._chain.head, tuple(self._used))


def _capabilities(
    fn: Any, handle: Handle, families: list[tuple[int, int]], extensions: frozenset[str], properties: dict[str, Any], bits: _Bits
) -> Capabilities:
    base = properties["VkPhysicalDeviceProperties2"].properties
    identity = _identity(base, properties["VkPhysicalDeviceVulkan12Properties"])
    v11 = properties["VkPhysicalDeviceVulkan11Properties"]
    v13 = properties.get("VkPhysicalDeviceVulkan13Properties")
    dot = v13 or properties.get("VkPhysicalDeviceShaderIntegerDotProductPropertiesKHR")
    subgroups = _subgroups(v11, v13 or properties.get("VkPhysicalDeviceSubgroupSizeControlPropertiesEXT"))
    dot_signed = bool(dot and dot.integerDotProduct4x8BitPackedSignedAccelerated)
    hints, cores = _cores(properties)
    traits = Traits(
        vendor=identity["vendor"],
        name=identity["name"],
        device_id=base.deviceID,
        subgroup_min=subgroups["subgroup_min"],
        subgroup_max=subgroups["subgroup_max"],
        dot_signed_accelerated=dot_signed,
        dot_mixed_accelerated=bool(dot and dot.integerDotProduct4x8BitPackedMixedSignednessAccelerated),
        cooperative_matrix=bits.matrix(),
        extensions=extensions,
        hints=hints,
    )
    return Capabilities(
        **identity,
        **subgroups,
        **_feature_fields(bits),
        **_limit_fields(base.limits, v11, v13 or properties.get("VkPhysicalDeviceMaintenance4PropertiesKHR")),
        **_memory_fields(*_memory(fn, handle), uma=identity["device_type"] in ("integrated", "cpu")),
        architecture=classify(traits),
        int_dot_accelerated=dot_signed,
        timestamp_bits=families[choose_queue_family(families)][1],
        cooperative_matrix_shapes=_matrix_shapes(fn, handle) if bits.matrix() else (),
        shader_cores=cores,
        extensions=tuple(sorted(extensions)),
        uuid=str(uuid.UUID(bytes=bytes(ffi.buffer(v11.deviceUUID)))),
        driver_uuid=str(uuid.UUID(bytes=bytes(ffi.buffer(v11.driverUUID)))),
    )


def _identity(base: Any, v12: Any) -> dict[str, Any]:
    """Vendor and names of the device and its driver."""
    device_type = DEVICE_TYPES[base.deviceType] if base.deviceType < len(DEVICE_TYPES) else "other"
    number = int(v12.driverID)
    driver_id = NEWER_DRIVER_IDS.get(number) or ffi.typeof("VkDriverId").elements.get(number, f"VkDriverId {number}")
    vendor = vendor_name(base.vendorID, device_type, driver_id)
    return {
        "name": text(base.deviceName),
        "vendor": vendor,
        "device_type": device_type,
        "vendor_id": base.vendorID,
        "device_id": base.deviceID,
        "driver_id": driver_id,
        "driver_name": text(v12.driverName),
        "driver_info": text(v12.driverInfo),
        "driver_version": _driver_version(base.driverVersion, vendor),
        "api_version": f"{(base.apiVersion >> 22) & 0x7F}.{(base.apiVersion >> 12) & 0x3FF}.{base.apiVersion & 0xFFF}",
    }


def _subgroups(v11: Any, control: Any) -> dict[str, Any]:
    """control: properties of subgroup size control; None if the device lacks it."""
    size = int(v11.subgroupSize)
    compute = vk.VK_SHADER_STAGE_COMPUTE_BIT
    operations = v11.subgroupSupportedOperations if v11.subgroupSupportedStages & compute else 0
    return {
        "subgroup_size": size,
        "subgroup_min": int(control.minSubgroupSize) if control else size,
        "subgroup_max": int(control.maxSubgroupSize) if control else size,
        "subgroup_ops": tuple(op for i, op in enumerate(SUBGROUP_OPS) if operations >> i & 1),
        "subgroup_required_size": bool(control and control.requiredSubgroupSizeStages & compute),
        "max_workgroup_subgroups": int(control.maxComputeWorkgroupSubgroups) if control else 0,
    }


def _feature_fields(bits: _Bits) -> dict[str, Any]:
    control = "VkPhysicalDeviceSubgroupSizeControlFeaturesEXT"
    return {
        "subgroup_size_control": bits.newer("subgroupSizeControl", control),
        "full_subgroups": bits.newer("computeFullSubgroups", control),
        "int_dot": bits.newer("shaderIntegerDotProduct", "VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR"),
        "fp16": bool(bits.v12.shaderFloat16),
        "bf16": bits.bfloat16(),
        "int8": bool(bits.v12.shaderInt8),
        "int16": bool(bits.core.shaderInt16),
        "int64": bool(bits.core.shaderInt64),
        "storage_8bit": bool(bits.v12.storageBuffer8BitAccess),
        "storage_16bit": bool(bits.v11.storageBuffer16BitAccess),
        "timeline_semaphore": bool(bits.v12.timelineSemaphore),
        "buffer_device_address": bool(bits.v12.bufferDeviceAddress),
        "vulkan_memory_model": bool(bits.v12.vulkanMemoryModel),
        "vulkan_memory_model_device_scope": bool(bits.v12.vulkanMemoryModelDeviceScope),
        "synchronization2": bits.newer("synchronization2", "VkPhysicalDeviceSynchronization2FeaturesKHR"),
        "maintenance4": bits.newer("maintenance4", "VkPhysicalDeviceMaintenance4FeaturesKHR"),
        "pipeline_robustness": bits.robustness(),
        "shader_clock": bits.clock(),
        "cooperative_matrix": bits.matrix(),
    }


def _limit_fields(limits: Any, v11: Any, large: Any) -> dict[str, Any]:
    """large: properties of maintenance4; None if the device lacks it."""
    return {
        "max_storage_buffer_range": limits.maxStorageBufferRange,
        "max_shared_memory": limits.maxComputeSharedMemorySize,
        "max_workgroup_invocations": limits.maxComputeWorkGroupInvocations,
        "max_workgroup_size": _triple(limits.maxComputeWorkGroupSize),
        "max_workgroup_count": _triple(limits.maxComputeWorkGroupCount),
        "max_push_constants": limits.maxPushConstantsSize,
        "max_storage_bindings": min(limits.maxPerStageDescriptorStorageBuffers, limits.maxDescriptorSetStorageBuffers),
        "max_allocation_size": int(v11.maxMemoryAllocationSize),
        "max_buffer_size": int(large.maxBufferSize) if large else int(v11.maxMemoryAllocationSize),
        "min_storage_buffer_offset_alignment": int(limits.minStorageBufferOffsetAlignment),
        "timestamp_period": float(limits.timestampPeriod),
    }


def _memory_fields(heaps: tuple[Heap, ...], types: tuple[MemoryType, ...], *, uma: bool) -> dict[str, Any]:
    local = [i for i, h in enumerate(heaps) if h.device_local]
    mapped = {t.heap for t in types if {"device_local", "host_visible", "host_coherent"} <= set(t.flags)}
    rebar = not uma and bool(local) and max(local, key=lambda i: heaps[i].size) in mapped
    return {"heaps": heaps, "memory_types": types, "uma": uma, "rebar": rebar}


def queue_families(fn: Any, handle: Handle) -> list[tuple[int, int]]:
    """(flags, valid timestamp bits) of each queue family."""
    name = "vkGetPhysicalDeviceQueueFamilyProperties"
    found = listed(fn.vkGetPhysicalDeviceQueueFamilyProperties, name, "VkQueueFamilyProperties", handle)
    return [(int(q.queueFlags), int(q.timestampValidBits)) for q in found]


def choose_queue_family(families: list[tuple[int, int]]) -> int:
    """Index of the queue family to use, from the (flags, timestamp bits) of each.

    Preferred is a family with compute and timestamps but without graphics: on AMD and NVIDIA it is not held up by a desktop's rendering,
    and its context switches are cheaper. If that family has no timestamps, nothing could be measured, so the family with graphics is used.
    """

    def rank(i: int) -> tuple[bool, bool]:
        flags, bits = families[i]
        return (bits == 0, bool(flags & QUEUE_GRAPHICS))

    capable = [i for i, (flags, _) in enumerate(families) if flags & QUEUE_COMPUTE]
    return min(capable, key=rank) if capable else 0


def _triple(values: Any) -> tuple[int, int, int]:
    return int(values[0]), int(values[1]), int(values[2])


def _memory(fn: Any, handle: Handle) -> tuple[tuple[Heap, ...], tuple[MemoryType, ...]]:
    memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
    fn.vkGetPhysicalDeviceMemoryProperties(handle, memory)
    heaps = tuple(
        Heap(int(memory.memoryHeaps[i].size), bool(memory.memoryHeaps[i].flags & vk.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT))
        for i in range(memory.memoryHeapCount)
    )
    types = tuple(
        MemoryType(
            int(memory.memoryTypes[i].heapIndex),
            tuple(name for bit, name in enumerate(MEMORY_FLAGS) if memory.memoryTypes[i].propertyFlags >> bit & 1),
        )
        for i in range(memory.memoryTypeCount)
    )
    return heaps, types


def _matrix_shapes(fn: Any, handle: Handle) -> tuple[MatrixShape, ...]:
    found = listed(
        fn.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR,
        "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR",
        "VkCooperativeMatrixPropertiesKHR",
        handle,
        init="VkCooperativeMatrixPropertiesKHR",
    )
    components = {
        0: "f16",
        1: "f32",
        2: "f64",
        3: "s8",
        4: "s16",
        5: "s32",
        6: "s64",
        7: "u8",
        8: "u16",
        9: "u32",
        10: "u64",
        1000141000: "bf16",
    }
    scopes = {1: "device", 2: "workgroup", 3: "subgroup", 5: "queue_family"}

    def component(value: Any) -> str:
        return components.get(int(value), f"VkComponentTypeKHR {int(value)}")

    return tuple(
        MatrixShape(
            p.MSize,
            p.NSize,
            p.KSize,
            component(p.AType),
            component(p.BType),
            component(p.CType),
            component(p.ResultType),
            bool(p.saturatingAccumulation),
            scopes.get(int(p.scope), str(int(p.scope))),
        )
        for p in found
    )


def _cores(properties: dict[str, Any]) -> tuple[dict[str, int], int | None]:
    """Hints for `classify`, and the number of shader cores."""
    if sm := properties.get("VkPhysicalDeviceShaderSMBuiltinsPropertiesNV"):
        return {"shaderWarpsPerSM": int(sm.shaderWarpsPerSM)}, int(sm.shaderSMCount)
    if arm := properties.get("VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM"):
        return {"warpsPerCore": int(arm.shaderWarpsPerCore)}, int(arm.shaderCoreCount)
    amd, amd2 = properties.get("VkPhysicalDeviceShaderCorePropertiesAMD"), properties.get("VkPhysicalDeviceShaderCoreProperties2AMD")
    hints, cores = {}, None
    if amd:
        hints["wavefrontsPerSimd"] = int(amd.wavefrontsPerSimd)
        cores = int(amd.shaderEngineCount * amd.shaderArraysPerEngineCount * amd.computeUnitsPerShaderArray)
    if amd2:
        cores = int(amd2.activeComputeUnitCount)
    return hints, cores


def _driver_version(packed: int, vendor: str) -> str:
    """NVIDIA packs 10.8.8.6 bits; others use Vulkan's own 10.10.12."""
    if vendor == "nvidia":
        return f"{packed >> 22}.{packed >> 14 & 0xFF}.{packed >> 6 & 0xFF}.{packed & 0x3F}"
    return f"{packed >> 22}.{packed >> 12 & 0x3FF}.{packed & 0xFFF}"
