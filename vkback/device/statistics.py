"""What a driver tells about a compiled kernel (VK_KHR_pipeline_executable_properties): registers, size of the code, spills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkback.device.driver import Driver, Handle, listed, struct, text, vk

EXTENSION = "VK_KHR_pipeline_executable_properties"
CAPTURE_STATISTICS = 0x40
"""VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR"""


@dataclass(frozen=True)
class Statistic:
    """One figure. Names and meanings are the driver's own; `executable` tells apart the several forms that some drivers compile."""

    executable: str
    name: str
    value: bool | int | float
    description: str


def read_statistics(driver: Driver, pipeline: Handle) -> list[Statistic]:
    """Of a pipeline made with CAPTURE_STATISTICS, in the driver's order."""
    ask, name = driver.fn.vkGetPipelineExecutablePropertiesKHR, "vkGetPipelineExecutablePropertiesKHR"
    made = "VkPipelineExecutablePropertiesKHR"
    executables = listed(ask, name, made, driver.device, struct("VkPipelineInfoKHR", pipeline=pipeline), init=made)
    found = []
    for i, executable in enumerate(executables):
        info = struct("VkPipelineExecutableInfoKHR", pipeline=pipeline, executableIndex=i)
        ask, name = driver.fn.vkGetPipelineExecutableStatisticsKHR, "vkGetPipelineExecutableStatisticsKHR"
        made = "VkPipelineExecutableStatisticKHR"
        for s in listed(ask, name, made, driver.device, info, init=made):
            found.append(Statistic(text(executable.name), text(s.name), _value(s), text(s.description)))
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
