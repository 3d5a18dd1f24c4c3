"""Vulkan devices: the only part of vkback that touches the Vulkan binding."""

from vkback.device.capabilities import Capabilities, Heap, MatrixShape, MemoryType, profile_ids
from vkback.device.device import Device
from vkback.device.driver import alive_objects
from vkback.device.errors import CompileOnly, DeviceError, DeviceLost, FeatureMissing, NoDevice, OutOfDeviceMemory, Timeout
from vkback.device.instance import ValidationMessage, list_devices
from vkback.device.kernel import Kernel, KernelSpec
from vkback.device.memory import Arena, BufferRange
from vkback.device.queue import Ticket
from vkback.device.recorder import Commands, Recorder
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
    "Heap",
    "Kernel",
    "KernelSpec",
    "MatrixShape",
    "MemoryType",
    "NoDevice",
    "OutOfDeviceMemory",
    "Recorder",
    "Statistic",
    "Ticket",
    "Timeout",
    "Uploader",
    "ValidationMessage",
    "alive_objects",
    "list_devices",
    "profile_ids",
]
