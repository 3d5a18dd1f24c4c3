"""Errors of the device layer. Each text names the call, the object, the sizes and what to do."""

from __future__ import annotations

from vkback.errors import VkbackError


class DeviceError(VkbackError):
    """A Vulkan call that failed, or a request the device layer refuses.

    call    the Vulkan call, or "" when none was made
    result  the VkResult's name, or ""
    """

    def __init__(self, text: str, *, call: str = "", result: str = "") -> None:
        super().__init__(text)
        self.call = call
        self.result = result


class OutOfDeviceMemory(DeviceError):  # noqa: N818  the names of these conditions are Vulkan's
    """Device or host memory is exhausted; the text says what was asked, what was free, and for what."""


class DeviceLost(DeviceError):  # noqa: N818
    """The device stopped: a hang, a reset or a driver fault. The Device can only be closed."""


class OtherProcess(DeviceLost):
    """The device was opened before this process was forked, and is of use in the one that opened it alone. Closing it here does nothing."""


class Timeout(DeviceError):  # noqa: N818
    """A bounded wait ended before the device had finished."""


class FeatureMissing(DeviceError):  # noqa: N818
    """The device, driver or loader lacks something that was required or requested."""


class CompileOnly(DeviceError):  # noqa: N818
    """The device compiles kernels and cannot run them: it was opened so, or no hardware is behind its driver."""


class NoDevice(DeviceError):  # noqa: N818
    """No Vulkan loader, no driver, or no device that the selector fits."""


class UnknownDevice(NoDevice):
    """A selector, or the name of a recorded profile, that fits nothing."""

    exit_code = 2


def human_bytes(nbytes: int) -> str:
    """1536 -> "1.5 KiB"; exact below 1 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
