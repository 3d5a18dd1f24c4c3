"""What a driver reports about a compiled kernel (VK_KHR_pipeline_executable_properties): registers, code size, spills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkback.device.driver import Driver, Handle, ffi, listed, struct, text, vk

EXTENSION = "VK_KHR_pipeline_executable_properties"
CAPTURE_STATISTICS = 0x40
"""VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR"""
CAPTURE_TEXTS = 0x80
"""VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR"""


@dataclass(frozen=True)
class Statistic:
    """One figure. Names and meanings are the driver's own; `executable` tells apart the several forms that some drivers compile."""

    executable: str
    name: str
    value: bool | int | float
    description: str


@dataclass(frozen=True)
class CompiledText:
    """One form of a kernel that the driver prints (an "internal representation"), under the driver's own name for it."""

    executable: str
    name: str
    text: str


def _executables(driver: Driver, pipeline: Handle) -> list[tuple[str, Any]]:
    """Names of a pipeline's executables, and a VkPipelineExecutableInfoKHR of each."""
    ask, name = driver.fn.vkGetPipelineExecutablePropertiesKHR, "vkGetPipelineExecutablePropertiesKHR"
    made = "VkPipelineExecutablePropertiesKHR"
    found = listed(ask, name, made, driver.device, struct("VkPipelineInfoKHR", pipeline=pipeline), init=made)
    info = "VkPipelineExecutableInfoKHR"
    return [(text(e.name), struct(info, pipeline=pipeline, executableIndex=i)) for i, e in enumerate(found)]


def read_texts(driver: Driver, pipeline: Handle) -> list[CompiledText]:
    """Texts of a pipeline made with CAPTURE_TEXTS, in the driver's order; binary forms are left out."""
    name = "vkGetPipelineExecutableInternalRepresentationsKHR"
    made = "VkPipelineExecutableInternalRepresentationKHR"
    ask, found = getattr(driver.fn, name), []
    for executable, info in _executables(driver, pipeline):
        sizes = listed(ask, name, made, driver.device, info, init=made)
        held = ffi.new(f"{made}[]", max(len(sizes), 1))
        space = [ffi.new("char[]", max(int(s.dataSize), 1)) for s in sizes]
        for i, (s, data) in enumerate(zip(sizes, space, strict=True)):
            held[i].sType, held[i].dataSize, held[i].pData = s.sType, s.dataSize, data
        driver.call(name, driver.device, info, ffi.new("uint32_t *", len(sizes)), held, about=executable)
        found += [CompiledText(executable, text(held[i].name), text(data)) for i, data in enumerate(space) if held[i].isText]
    return found


def read_statistics(driver: Driver, pipeline: Handle) -> list[Statistic]:
    """Statistics of a pipeline made with CAPTURE_STATISTICS, in the driver's order."""
    found = []
    for executable, info in _executables(driver, pipeline):
        ask, name = driver.fn.vkGetPipelineExecutableStatisticsKHR, "vkGetPipelineExecutableStatisticsKHR"
        made = "VkPipelineExecutableStatisticKHR"
        for s in listed(ask, name, made, driver.device, info, init=made):
            found.append(Statistic(executable, text(s.name), _value(s), text(s.description)))
    return found


def _value(statistic: Any) -> bool | int | float:
    formats = "VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_"
    if statistic.format == getattr(vk, f"{formats}BOOL32_KHR"):
        return bool(statistic.value.b32)
    if statistic.format == getattr(vk, f"{formats}INT64_KHR"):
        return int(statistic.value.i64)
    if statistic.format == getattr(vk, f"{formats}FLOAT64_KHR"):
        return float(statistic.value.f64)
    return int(statistic.value.u64)
