"""The Vulkan instance: layers, messages of the validation layers, physical devices in a stable order without duplicates."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from vkback.device.capabilities import Capabilities
from vkback.device.driver import (
    NULL,
    array,
    check,
    count_alive,
    ffi,
    install_hint,
    instance_functions,
    lib,
    listed,
    require_loader,
    strings,
    struct,
    text,
    vk,
)
from vkback.device.errors import FeatureMissing, NoDevice, UnknownDevice
from vkback.device.query import API_1_2, API_1_3, PhysicalDevice, read_physical_device
from vkback.events import log
from vkback.systems import how_to_get

Validation = bool | Literal["sync"]

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
PORTABILITY_FLAG = 0x1
"""VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR: without it the loader hides MoltenVK."""

DRIVER_RANK: Sequence[tuple[str, int]] = (
    ("MESA_RADV", 0),
    ("NVIDIA_PROPRIETARY", 0),
    ("AMD_OPEN_SOURCE", 1),
    ("MESA_NVK", 1),
    ("AMD_PROPRIETARY", 2),
    ("MESA_DOZEN", 9),
)
"""Which driver is kept when two offer the same device; lower wins."""


@dataclass(frozen=True)
class ValidationMessage:
    """One message of the validation layers. severity: "error", "warning"."""

    severity: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.name}: {self.text}"


class Instance:
    """A VkInstance. Destroyed by `close()`."""

    def __init__(self, validation: Validation = False) -> None:
        require_loader()
        self.messages: list[ValidationMessage] = []
        version = ffi.new("uint32_t *")
        check(lib.vkEnumerateInstanceVersion(version), "vkEnumerateInstanceVersion")
        if version[0] < API_1_2:
            raise FeatureMissing(f"[device] the Vulkan loader offers {version_text(version[0])}, 1.2 is needed. Update libvulkan")
        self.api_version = min(version[0], API_1_3)
        have = {
            text(e.extensionName)
            for e in listed(
                lib.vkEnumerateInstanceExtensionProperties, "vkEnumerateInstanceExtensionProperties", "VkExtensionProperties", NULL
            )
        }
        extensions, layers, flags, chain = [], [], 0, None
        if "VK_KHR_portability_enumeration" in have:
            extensions.append("VK_KHR_portability_enumeration")
            flags |= PORTABILITY_FLAG
        if validation:
            _require_validation_layer()
            layers.append(VALIDATION_LAYER)
            extensions.append("VK_EXT_debug_utils")
            # Messages about the instance's own creation and destruction come only through a messenger in its chain.
            self._messenger_info = self._describe_messenger()
            chain = self._messenger_info
            if validation == "sync":
                enabled = array("VkValidationFeatureEnableEXT", [vk.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT])
                chain = struct("VkValidationFeaturesEXT", chain, enabledValidationFeatureCount=1, pEnabledValidationFeatures=enabled)
        app = struct(
            "VkApplicationInfo",
            pApplicationName=ffi.new("char[]", b"vkback"),
            pEngineName=ffi.new("char[]", b"vkback"),
            apiVersion=self.api_version,
        )
        info = struct(
            "VkInstanceCreateInfo",
            chain,
            flags=flags,
            pApplicationInfo=app,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=strings(layers),
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=strings(extensions),
        )
        out = ffi.new("VkInstance *")
        code = lib.vkCreateInstance(info, NULL, out)
        if code == vk.VK_ERROR_INCOMPATIBLE_DRIVER:
            raise NoDevice(f"[device] the Vulkan loader found no driver (VK_ERROR_INCOMPATIBLE_DRIVER). {install_hint()}")
        check(code, "vkCreateInstance", f"layers {layers}, extensions {extensions}")
        self.handle = out[0]
        count_alive("Instance", 1)
        self.fn = instance_functions(self.handle)
        self._messenger = None
        if validation:
            messenger = ffi.new("VkDebugUtilsMessengerEXT *")
            check(
                self.fn.vkCreateDebugUtilsMessengerEXT(self.handle, self._messenger_info, NULL, messenger), "vkCreateDebugUtilsMessengerEXT"
            )
            self._messenger = messenger[0]
            count_alive("DebugUtilsMessenger", 1)

    def _describe_messenger(self) -> Any:
        severities = {
            vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT: "error",
            vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT: "warning",
        }
        messages = self.messages

        def collect(severity: int, _types: int, data: Any, _user: Any) -> int:
            name = text(data.pMessageIdName) if data.pMessageIdName != NULL else ""
            messages.append(ValidationMessage(severities.get(severity, "info"), name, text(data.pMessage)))
            return 0

        callback = ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", collect)
        return struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            messageSeverity=sum(severities),
            messageType=vk.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT | vk.VK_DEBUG_UTILS_MESSAGE_TYPE_GENERAL_BIT_EXT,
            pfnUserCallback=callback,
        )

    def physical_devices(self) -> list[PhysicalDevice]:
        """Every device once, in the loader's order."""
        handles = listed(self.fn.vkEnumeratePhysicalDevices, "vkEnumeratePhysicalDevices", "VkPhysicalDevice", self.handle)
        return without_duplicates([read_physical_device(self.fn, h, self.api_version) for h in handles])

    def close(self) -> None:
        """Destroy the messenger and the instance."""
        if self._messenger is not None:
            self.fn.vkDestroyDebugUtilsMessengerEXT(self.handle, self._messenger, NULL)
            self._messenger = None
            count_alive("DebugUtilsMessenger", -1)
        self.fn.vkDestroyInstance(self.handle, NULL)
        count_alive("Instance", -1)


def version_text(packed: int) -> str:
    """A packed VkVersion as "1.3.230"."""
    return f"{(packed >> 22) & 0x7F}.{(packed >> 12) & 0x3FF}.{packed & 0xFFF}"


def _require_validation_layer() -> None:
    layers = listed(lib.vkEnumerateInstanceLayerProperties, "vkEnumerateInstanceLayerProperties", "VkLayerProperties")
    if VALIDATION_LAYER not in {text(layer.layerName) for layer in layers}:
        raise FeatureMissing(f"[device] validation was asked for, but {VALIDATION_LAYER} is not installed. {how_to_get('validation')}")


def without_duplicates(found: Sequence[PhysicalDevice]) -> list[PhysicalDevice]:
    """Drop devices that a better driver offers too (same device UUID)."""

    def rank(device: PhysicalDevice) -> int:
        return next((r for part, r in DRIVER_RANK if part in device.caps.driver_id), 5)

    kept: list[PhysicalDevice] = []
    for device in found:
        twin = next((i for i, k in enumerate(kept) if k.caps.uuid == device.caps.uuid and k.caps.driver_id != device.caps.driver_id), None)
        if twin is None:
            kept.append(device)
        elif rank(device) < rank(kept[twin]):
            kept[twin] = device
    return kept


def selectors(given: Any) -> list[Any]:
    """The devices that are asked for: a list or tuple as it is, a text or VKBACK_DEVICE cut at commas, but for those in parentheses, which
    names of devices have."""
    if given is None:
        found = _cut_at_commas(os.environ.get("VKBACK_DEVICE", ""))
        return found if len(found) > 1 else [None]
    if isinstance(given, str):
        return _cut_at_commas(given)
    return list(given) if isinstance(given, list | tuple) else [given]


def _cut_at_commas(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]


def select(devices: Sequence[PhysicalDevice], selector: str | int | None) -> PhysicalDevice:
    """The device that a selector means: index, part of a name, or UUID. For None, VKBACK_DEVICE is used.

    Without a selector: the first discrete GPU, else integrated, else virtual, else software, with one line on stderr per process.
    Raises UnknownDevice that lists the devices there are, NoDevice where there is none.
    """
    if not devices:
        raise NoDevice(f"[device] the Vulkan loader lists no device. {install_hint()}")
    asked = selector if selector is not None else os.environ.get("VKBACK_DEVICE") or None
    if asked is None:
        order = ("discrete", "integrated", "virtual", "other", "cpu")
        best = min(devices, key=lambda d: order.index(d.caps.device_type))
        if best.caps.software:
            say_no_gpu(best.caps.name)
        return best
    listing = "; ".join(f"{i}: {d.caps.name} (uuid {d.caps.uuid})" for i, d in enumerate(devices))
    if isinstance(asked, int) or re.fullmatch(r"-?\d+", asked):
        index = int(asked)
        if 0 <= index < len(devices):
            return devices[index]
        raise UnknownDevice(f"[device] no device has index {index}. There are: {listing}")
    wanted = asked.lower()
    fits = [d for d in devices if (wanted and wanted in d.caps.name.lower()) or wanted.replace("-", "") == d.caps.uuid.replace("-", "")]
    if not fits:
        raise UnknownDevice(f"[device] no device fits {asked!r} (index, part of a name, or UUID). There are: {listing}")
    if len({d.caps.name for d in fits}) > 1:
        raise UnknownDevice(
            f"[device] {asked!r} fits {len(fits)} devices: {', '.join(d.caps.name for d in fits)}. Give more of the name, or an index"
        )
    return fits[0]


@cache
def say_no_gpu(name: str) -> None:
    """A warning, once a process: a command may open a device for each model and setting."""
    log.warning("no GPU found, running on the CPU: %s", name)


def no_hardware(caps: Capabilities) -> str:
    """Why a device can compile kernels but run none; "" if nothing says so.

    Mesa's no-op shims let a driver open any chip of its vendor: submits succeed, and buffers read as zeros.
    """
    if caps.name.startswith("Null hardware"):
        return "RADV's null device has no hardware"
    if not caps.software and "_noop_drm_shim" in os.environ.get("LD_PRELOAD", ""):
        return "a no-op kernel shim stands in for its hardware"
    return ""


def free_memory() -> list[int | None]:
    """Bytes left of every device's largest heap of its own, by index, where its driver tells (VK_EXT_memory_budget)."""
    from vkback.device.memory import budget_left

    instance = Instance()
    try:
        return [budget_left(d.handle, instance.fn, d.caps) for d in instance.physical_devices()]
    finally:
        instance.close()


def list_devices() -> list[Capabilities]:
    """Capabilities of every device, by index. Raises NoDevice when there is no loader or no driver."""
    instance = Instance()
    try:
        return [d.caps for d in instance.physical_devices()]
    finally:
        instance.close()


def devices_for(selectors: Sequence[str] | None) -> list[tuple[int, Capabilities]]:
    """Index and capabilities of the devices that selectors mean, as `select` reads them, in their order. None: all GPUs; without one,
    what `select` takes without a selector. Raises what that raises."""
    with closing(Instance(False)) as instance:
        devices = instance.physical_devices()
        gpus = [d for d in devices if not d.caps.software] if selectors is None and not os.environ.get("VKBACK_DEVICE") else []
        found = gpus or [select(devices, each) for each in selectors or (None,)]
        return [(next(i for i, d in enumerate(devices) if d is each), each.caps) for each in found]
