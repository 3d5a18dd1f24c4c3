"""Compute pipelines: layouts, specialization, subgroup sizes, the pipeline cache on disk."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from vkback.device.capabilities import Capabilities
from vkback.device.driver import NULL, PIPELINE_STAGE_REQUIRE_FULL_SUBGROUPS, Driver, Handle, array, ffi, struct, vk
from vkback.device.errors import DeviceError, FeatureMissing
from vkback.device.spirv import inspect
from vkback.device.statistics import CAPTURE_STATISTICS, CAPTURE_TEXTS, CompiledText, Statistic, read_statistics, read_texts
from vkback.paths import cache_dir, write_cache

UNCHECKED = dict.fromkeys(("storageBuffers", "uniformBuffers", "vertexInputs", "images"), 1)
"""VK_PIPELINE_ROBUSTNESS_{BUFFER,IMAGE}_BEHAVIOR_DISABLED_EXT for all a VkPipelineRobustnessCreateInfoEXT asks for."""


@dataclass(frozen=True)
class KernelSpec:
    """Everything that defines a kernel. spec: specialization constant id -> 32-bit value (a float is given as its bits)."""

    spirv: bytes = field(repr=False)
    name: str
    bindings: int
    push_bytes: int
    spec: tuple[tuple[int, int], ...] = ()
    subgroup_size: int | None = None


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled compute pipeline. Owned by its device."""

    name: str
    bindings: int
    push_bytes: int
    pipeline: Handle = field(repr=False)
    layout: Handle = field(repr=False)
    set_layout: Handle = field(repr=False)


class KernelCache:
    """All kernels of a device, each compiled once, in the order of their last use."""

    def __init__(self, driver: Driver, caps: Capabilities) -> None:
        self._driver, self._caps = driver, caps
        self._lock = threading.Lock()
        self._kernels: dict[KernelSpec, Kernel] = {}
        self._set_layouts: dict[int, Handle] = {}
        self._layouts: dict[tuple[int, int], Handle] = {}
        self._file = PipelineCacheFile(driver, caps)

    def get(self, spec: KernelSpec) -> Kernel:
        """The kernel, compiled on first use. Safe to call from several threads."""
        with self._lock:
            found = self._kernels.pop(spec, None)
            if found is not None:
                self._kernels[spec] = found
                return found
        layout = self._checked_layout(spec)
        pipeline = self._compile(spec, layout)
        with self._lock:
            kernel = Kernel(spec.name, spec.bindings, spec.push_bytes, pipeline, layout, self._set_layout(spec.bindings))
            twin = self._kernels.setdefault(spec, kernel)
        if twin is not kernel:
            self._driver.destroy("Pipeline", pipeline)
        return twin

    def get_all(self, specs: Iterable[KernelSpec]) -> list[Kernel]:
        """Kernels in the order of `specs`; those not known yet are compiled in parallel."""
        specs = list(specs)
        new = [s for s in dict.fromkeys(specs) if s not in self._kernels]
        if len(new) > 1:
            with ThreadPoolExecutor(max_workers=min(len(new), os.cpu_count() or 1)) as pool:
                list(pool.map(self.get, new))
        return [self.get(s) for s in specs]

    def trim(self, most: int) -> int:
        """Destroy the least recently used kernels until `most` are left; returns how many. No recording that runs one may be left."""
        with self._lock:
            old = [self._kernels.pop(spec) for spec in list(self._kernels)[: max(0, len(self._kernels) - most)]]
        for kernel in old:
            self._driver.destroy("Pipeline", kernel.pipeline)
        return len(old)

    def __len__(self) -> int:
        return len(self._kernels)

    def statistics(self, spec: KernelSpec) -> list[Statistic]:
        """What the driver reports about a kernel, which is compiled just for this. The device must be open for statistics."""
        pipeline = self._compile(spec, self._checked_layout(spec), CAPTURE_STATISTICS)
        try:
            return read_statistics(self._driver, pipeline)
        finally:
            self._driver.destroy("Pipeline", pipeline)

    def texts(self, spec: KernelSpec) -> list[CompiledText]:
        """What the driver prints about a kernel, which is compiled just for this. The device must be open for statistics."""
        pipeline = self._compile(spec, self._checked_layout(spec), CAPTURE_TEXTS)
        try:
            return read_texts(self._driver, pipeline)
        finally:
            self._driver.destroy("Pipeline", pipeline)

    def cache_data(self, spec: KernelSpec) -> bytes:
        """VkPipelineCache data of a kernel that is compiled just for this."""
        layout = self._checked_layout(spec)
        driver = self._driver
        cache = driver.create("PipelineCache", struct("VkPipelineCacheCreateInfo"), spec.name)
        try:
            driver.destroy("Pipeline", self._compile(spec, layout, cache=cache))
            return _cache_data(driver, cache)
        finally:
            driver.destroy("PipelineCache", cache)

    def _checked_layout(self, spec: KernelSpec) -> Handle:
        with self._lock:
            self._check(spec)
            return self._layout(spec.bindings, spec.push_bytes)

    def _check(self, spec: KernelSpec) -> None:
        caps = self._caps
        module = inspect(spec.spirv)
        if missing := module.missing(caps):
            raise FeatureMissing(
                f"[kernel] {spec.name} needs {', '.join(missing)}, which {caps.name} does not offer. Choose another variant"
            )
        if module.bindings and max(module.bindings) >= spec.bindings:
            raise DeviceError(
                f"[kernel] {spec.name}: declared with {spec.bindings} bindings, but the shader uses binding {max(module.bindings)}"
            )
        if module.push_bytes > spec.push_bytes:
            raise DeviceError(
                f"[kernel] {spec.name}: declared with {spec.push_bytes} bytes of push constants, but the shader reads {module.push_bytes}"
            )
        # Specialization constants may set the workgroup's size, so it is not known from the module alone.
        threads = module.workgroup_size(dict(spec.spec))
        if prod(threads) > caps.max_workgroup_invocations or any(t > m for t, m in zip(threads, caps.max_workgroup_size, strict=True)):
            raise DeviceError(
                f"[kernel] {spec.name}: workgroup of {threads} threads; {caps.name} takes {caps.max_workgroup_size}, "
                f"{caps.max_workgroup_invocations} in all (maxComputeWorkGroupInvocations)"
            )
        if module.shared_bytes > caps.max_shared_memory:
            raise DeviceError(
                f"[kernel] {spec.name}: {module.shared_bytes} bytes of shared memory; {caps.name} has {caps.max_shared_memory} "
                "(maxComputeSharedMemorySize)"
            )
        if spec.push_bytes > caps.max_push_constants or spec.push_bytes % 4:
            raise DeviceError(
                f"[kernel] {spec.name}: {spec.push_bytes} push constant bytes; {caps.name} takes {caps.max_push_constants}, a multiple of 4"
            )
        if spec.bindings > caps.max_storage_bindings:
            raise DeviceError(
                f"[kernel] {spec.name}: {spec.bindings} storage buffers; {caps.name} takes {caps.max_storage_bindings} "
                "(maxPerStageDescriptorStorageBuffers)"
            )
        size = spec.subgroup_size
        # A device with one size has it already, with or without the extension.
        if size is None or size == caps.subgroup_min == caps.subgroup_max:
            return
        if not (caps.subgroup_size_control and caps.subgroup_required_size):
            raise FeatureMissing(
                f"[kernel] {spec.name}: subgroup size {size} was asked for, but {caps.name} cannot fix it for compute shaders "
                f"(its default is {caps.subgroup_size})"
            )
        if not caps.subgroup_min <= size <= caps.subgroup_max or size & (size - 1):
            raise FeatureMissing(
                f"[kernel] {spec.name}: subgroup size {size}; {caps.name} has powers of two from {caps.subgroup_min} to {caps.subgroup_max}"
            )

    def _set_layout(self, bindings: int) -> Handle:
        if bindings not in self._set_layouts:
            entries = ffi.new("VkDescriptorSetLayoutBinding[]", max(bindings, 1))
            for i in range(bindings):
                entries[i].binding = i
                entries[i].descriptorType = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
                entries[i].descriptorCount = 1
                entries[i].stageFlags = vk.VK_SHADER_STAGE_COMPUTE_BIT
            info = struct("VkDescriptorSetLayoutCreateInfo", bindingCount=bindings, pBindings=entries)
            self._set_layouts[bindings] = self._driver.create("DescriptorSetLayout", info, f"{bindings} storage buffers")
        return self._set_layouts[bindings]

    def _layout(self, bindings: int, push_bytes: int) -> Handle:
        key = (bindings, push_bytes)
        if key not in self._layouts:
            push = struct("VkPushConstantRange", stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT, size=push_bytes)
            info = struct(
                "VkPipelineLayoutCreateInfo",
                setLayoutCount=1,
                pSetLayouts=array("VkDescriptorSetLayout", [self._set_layout(bindings)]),
                pushConstantRangeCount=1 if push_bytes else 0,
                pPushConstantRanges=push,
            )
            self._layouts[key] = self._driver.create("PipelineLayout", info, f"{bindings} storage buffers, {push_bytes} push bytes")
        return self._layouts[key]

    def _compile(self, spec: KernelSpec, layout: Handle, flags: int = 0, cache: Handle | None = None) -> Handle:
        driver, caps = self._driver, self._caps
        words = ffi.new("uint32_t[]", len(spec.spirv) // 4)
        ffi.memmove(words, spec.spirv, len(spec.spirv))
        module = driver.create("ShaderModule", struct("VkShaderModuleCreateInfo", codeSize=len(spec.spirv), pCode=words), spec.name)
        try:
            chain, stage_flags = None, 0
            if caps.pipeline_robustness:
                # Without it NVIDIA's driver checks the bounds of every access, though robustBufferAccess is off.
                chain = struct("VkPipelineRobustnessCreateInfoEXT", **UNCHECKED)
            if spec.subgroup_size is not None and caps.subgroup_size_control and caps.subgroup_required_size:
                chain = struct("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", chain, requiredSubgroupSize=spec.subgroup_size)
                if caps.full_subgroups and inspect(spec.spirv).workgroup_size(dict(spec.spec))[0] % spec.subgroup_size == 0:
                    stage_flags = PIPELINE_STAGE_REQUIRE_FULL_SUBGROUPS
            stage = struct(
                "VkPipelineShaderStageCreateInfo",
                chain,
                flags=stage_flags,
                stage=vk.VK_SHADER_STAGE_COMPUTE_BIT,
                module=module,
                pName=ffi.new("char[]", b"main"),
                pSpecializationInfo=_specialization(dict(spec.spec)),
            )
            info = struct("VkComputePipelineCreateInfo", flags=flags, stage=stage[0], layout=layout)
            out = ffi.new("VkPipeline *")
            about = f"kernel {spec.name}, specialization {dict(spec.spec)}, subgroup size {spec.subgroup_size}"
            driver.call("vkCreateComputePipelines", driver.device, cache or self._file.handle, 1, info, NULL, out, about=about)
        finally:
            driver.destroy("ShaderModule", module)
        driver.count("Pipeline", 1)
        self._file.changed = self._file.changed or cache is None
        return out[0]

    def destroy(self) -> None:
        """Write the pipeline cache and destroy every kernel."""
        for kernel in self._kernels.values():
            self._driver.destroy("Pipeline", kernel.pipeline)
        for layout in self._layouts.values():
            self._driver.destroy("PipelineLayout", layout)
        for layout in self._set_layouts.values():
            self._driver.destroy("DescriptorSetLayout", layout)
        self._kernels.clear()
        self._layouts.clear()
        self._set_layouts.clear()
        self._file.close()


def _specialization(values: Mapping[int, int]) -> Any:
    if not values:
        return NULL
    entries = ffi.new("VkSpecializationMapEntry[]", len(values))
    data = ffi.new("uint32_t[]", [v & 0xFFFFFFFF for v in values.values()])
    for i, constant in enumerate(values):
        entries[i].constantID = constant
        entries[i].offset = 4 * i
        entries[i].size = 4
    return struct("VkSpecializationInfo", mapEntryCount=len(values), pMapEntries=entries, dataSize=4 * len(values), pData=data)


def _cache_size(driver: Driver, cache: Handle) -> int:
    size = ffi.new("size_t *")
    driver.call("vkGetPipelineCacheData", driver.device, cache, size, NULL)
    return int(size[0])


def _cache_data(driver: Driver, cache: Handle) -> bytes:
    size = ffi.new("size_t *", _cache_size(driver, cache))
    data = ffi.new("char[]", max(size[0], 1))
    driver.call("vkGetPipelineCacheData", driver.device, cache, size, data)
    return bytes(ffi.buffer(data, size[0]))


class PipelineCacheFile:
    """A VkPipelineCache kept on disk, one file per device and driver.

    The file is a SHA-256 of the driver's data, then the data: drivers have crashed on damaged caches. Losing it costs only compile time, so
    a file that cannot be read is ignored, and one that cannot be written is reported once.
    """

    def __init__(self, driver: Driver, caps: Capabilities) -> None:
        self._driver = driver
        self.changed = False
        identity = (
            f"{caps.uuid} {caps.driver_uuid} {caps.vendor_id} {caps.device_id} {caps.driver_id} {caps.driver_version} {caps.driver_info}"
        )
        self._path: Path = cache_dir() / "pipelines" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.bin"
        data = self._read()
        self._read_bytes = len(data)
        info = struct("VkPipelineCacheCreateInfo", initialDataSize=len(data), pInitialData=ffi.new("char[]", data) if data else NULL)
        self.handle = driver.create("PipelineCache", info, str(self._path))

    def _read(self) -> bytes:
        try:
            raw = self._path.read_bytes()
        except OSError:
            return b""
        data = raw[32:]
        return data if hashlib.sha256(data).digest() == raw[:32] else b""

    def close(self) -> None:
        """Write the cache if the driver has put something into it, and destroy it."""
        if self.changed and _cache_size(self._driver, self.handle) != self._read_bytes:
            blob = _cache_data(self._driver, self.handle)
            write_cache(self._path, hashlib.sha256(blob).digest() + blob)
        self._driver.destroy("PipelineCache", self.handle)
