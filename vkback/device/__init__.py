"""Vulkan devices: the only part of vkback that touches the Vulkan binding.

Names are imported when they are first used: to list devices takes neither numpy nor what runs kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkback.device.capabilities import Capabilities, Heap, MatrixShape, MemoryType, profile_ids
    from vkback.device.device import Device
    from vkback.device.driver import alive_objects
    from vkback.device.errors import (
        CompileOnly,
        DeviceError,
        DeviceLost,
        FeatureMissing,
        NoDevice,
        OtherProcess,
        OutOfDeviceMemory,
        Timeout,
    )
    from vkback.device.instance import ValidationMessage, devices_for, list_devices, selectors
    from vkback.device.kernel import Kernel, KernelSpec
    from vkback.device.memory import Arena, BufferRange, HostPages, Kind, MemoryUse
    from vkback.device.queue import Gate, Ticket
    from vkback.device.recorder import Commands, Recorder
    from vkback.device.spirv import PushConstant, inspect
    from vkback.device.statistics import CompiledText, Statistic
    from vkback.device.transfer import Uploader

__all__ = [
    "Arena",
    "BufferRange",
    "Capabilities",
    "Commands",
    "CompileOnly",
    "CompiledText",
    "Device",
    "DeviceError",
    "DeviceLost",
    "FeatureMissing",
    "Gate",
    "Heap",
    "HostPages",
    "Kernel",
    "KernelSpec",
    "Kind",
    "MatrixShape",
    "MemoryType",
    "MemoryUse",
    "NoDevice",
    "OtherProcess",
    "OutOfDeviceMemory",
    "PushConstant",
    "Recorder",
    "Statistic",
    "Ticket",
    "Timeout",
    "Uploader",
    "ValidationMessage",
    "alive_objects",
    "devices_for",
    "inspect",
    "list_devices",
    "profile_ids",
    "selectors",
]

_PLACES = {
    name: module
    for module, names in {
        "capabilities": "Capabilities Heap MatrixShape MemoryType profile_ids",
        "device": "Device",
        "driver": "alive_objects",
        "errors": "CompileOnly DeviceError DeviceLost FeatureMissing NoDevice OtherProcess OutOfDeviceMemory Timeout",
        "instance": "ValidationMessage devices_for list_devices selectors",
        "kernel": "Kernel KernelSpec",
        "memory": "Arena BufferRange HostPages Kind MemoryUse",
        "queue": "Gate Ticket",
        "recorder": "Commands Recorder",
        "spirv": "PushConstant inspect",
        "statistics": "CompiledText Statistic",
        "transfer": "Uploader",
    }.items()
    for name in names.split()
}

if not TYPE_CHECKING:  # a type checker knows the names from above, and what is none of them

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'vkback.device' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"vkback.device.{_PLACES[name]}"), name)
