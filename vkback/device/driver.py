"""All Vulkan calls go through here: loading the binding, building structs, calling the driver, typed errors, counts of live objects.

Everything uses cffi directly; the binding's Python wrappers are slow and raise on success codes. Hot vkCmd* calls, which return nothing,
are called on `Driver.fn`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from vkback.device.errors import DeviceError, DeviceLost, NoDevice, OtherProcess, OutOfDeviceMemory, Timeout
from vkback.systems import how_to_get, mac_loaders


def install_hint() -> str:
    """What to do where there is no Vulkan."""
    return f"{how_to_get('driver')}, then check with vulkaninfo"


class _ByPath:
    """The binding's cffi object while it is imported: a loader that is not found by its name is opened by its path."""

    def __init__(self, ffi: Any, paths: Sequence[Path]) -> None:
        self._ffi, self._paths = ffi, paths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ffi, name)

    def dlopen(self, name: str, *flags: int) -> Any:
        for place in (name, *map(str, self._paths)):
            with suppress(OSError):
                return self._ffi.dlopen(place, *flags)
        raise OSError(f"cannot load library {name}")


def binding(paths: Sequence[Path]) -> Any:
    """The module that calls Vulkan. It opens the loader when it is imported, and by name alone. paths: loaders to try after that; without
    any this is a plain import.

    Raises OSError where no loader can be opened, ImportError without the binding.
    """
    found = importlib.util.find_spec("vulkan") if paths else None
    folder = Path(found.origin).parent if found and found.origin else None
    name = "vulkan._vulkancache"
    types = importlib.util.spec_from_file_location(name, folder / "_vulkancache.py") if folder else None
    if types and types.loader:
        sys.modules[name] = importlib.util.module_from_spec(types)
        types.loader.exec_module(sys.modules[name])
        with _opening_by_path(sys.modules[name], paths) as usual:
            from vulkan import _vulkan
        _vulkan.ffi = usual
    else:
        from vulkan import _vulkan
    return _vulkan


@contextmanager
def _opening_by_path(declared: Any, paths: Sequence[Path]) -> Iterator[Any]:
    """The module of the binding's declarations has a `_ByPath`; gives its own object, which it gets back."""
    usual = declared.ffi
    declared.ffi = _ByPath(usual, paths)
    try:
        yield usual
    finally:
        declared.ffi = usual


try:
    vk: Any = binding(mac_loaders(os.environ, Path.home()) if sys.platform == "darwin" else ())
    ffi: Any = vk.ffi
    lib: Any = vk.lib
    NULL: Any = vk.ffi.NULL
    LOAD_ERROR = ""
except OSError as error:  # libvulkan cannot be opened
    vk = ffi = lib = NULL = None
    LOAD_ERROR = f"no Vulkan loader: {error}. {install_hint()}"
except ImportError as error:
    vk = ffi = lib = NULL = None
    LOAD_ERROR = f"the Vulkan binding cannot be imported: {error}. Install it with pip install vulkan"

Handle = Any
"""A cffi pointer to a Vulkan object."""

# Core bits that the binding lacks, from the Vulkan headers.
BUFFER_USAGE_SHADER_DEVICE_ADDRESS = 0x00020000
MEMORY_ALLOCATE_DEVICE_ADDRESS = 0x00000002
PIPELINE_STAGE_REQUIRE_FULL_SUBGROUPS = 0x00000002

_RESULT_ERRORS: dict[str, type[DeviceError]] = {
    "VK_ERROR_OUT_OF_DEVICE_MEMORY": OutOfDeviceMemory,
    "VK_ERROR_OUT_OF_HOST_MEMORY": OutOfDeviceMemory,
    "VK_ERROR_DEVICE_LOST": DeviceLost,
    "VK_TIMEOUT": Timeout,
}

_held: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def require_loader() -> None:
    """Raises NoDevice when libvulkan or its binding cannot be loaded."""
    if LOAD_ERROR:
        raise NoDevice(f"[device] {LOAD_ERROR}")


@cache
def _structure_types() -> dict[str, int]:
    prefix = "VK_STRUCTURE_TYPE_"
    enum: dict[str, int] = ffi.typeof("VkStructureType").relements
    return {name[len(prefix) :].replace("_", "").lower(): value for name, value in enum.items()}


def struct(name: str, next: Any = None, **fields: Any) -> Any:
    """A new `name` struct with sType filled in and `next` as pNext; returns a pointer.

    Values that are cffi data, and lists made into arrays, live as long as the returned pointer.
    """
    ptr = ffi.new(f"{name} *")
    held = []
    stype = _structure_types().get(name[2:].lower())
    if stype is not None:
        ptr.sType = stype
    if next is not None:
        ptr.pNext = next
        held.append(next)
    for key, value in fields.items():
        setattr(ptr, key, value)
        if isinstance(value, ffi.CData):
            held.append(value)
    if held:
        _held[ptr] = tuple(held)
    return ptr


def array(ctype: str, values: Sequence[Any]) -> Any:
    """A new array of `ctype`; structs are copied, and what they point to lives as long as the array."""
    new = ffi.new(f"{ctype}[]", list(values))
    _held[new] = tuple(values)
    return new


def strings(values: Sequence[str]) -> Any:
    """A new `char *[]`."""
    return array("char *", [ffi.new("char[]", v.encode()) for v in values])


def text(chars: Any) -> str:
    """A C string as str."""
    raw: bytes = ffi.string(chars)
    return raw.decode("utf-8", "replace")


def result_name(code: int) -> str:
    """-4 -> "VK_ERROR_DEVICE_LOST"."""
    found: str | None = ffi.typeof("VkResult").elements.get(int(code))
    return found or f"VkResult {int(code)}"


def check(code: int, call: str, about: str = "") -> int:
    """The gate. Negative results and VK_TIMEOUT raise the typed error; other success codes are returned.

    about  the object and sizes the call was for
    """
    if code >= 0 and code != vk.VK_TIMEOUT:
        return code
    name = result_name(code)
    suffix = f": {about}" if about else ""
    raise _RESULT_ERRORS.get(name, DeviceError)(f"{call} failed: {name}{suffix}", call=call, result=name)


def listed(call: Callable[..., int | None], name: str, ctype: str, *args: Any, init: str = "") -> list[Any]:
    """The two-call idiom: ask for the count, then for the items. `init` names the struct whose sType each item needs."""
    count = ffi.new("uint32_t *")
    check(call(*args, count, NULL) or 0, name)
    items = ffi.new(f"{ctype}[]", max(count[0], 1))
    if init:
        stype = _structure_types()[init[2:].lower()]
        for i in range(count[0]):
            items[i].sType = stype
    check(call(*args, count, items) or 0, name)
    if ffi.typeof(ctype).kind == "struct":
        # An item of an array does not keep the array alive; a copy of its own does.
        return [ffi.new(f"{ctype} *", items[i]) for i in range(count[0])]
    return [items[i] for i in range(count[0])]


class _Functions:
    """Entry points by name, fetched on first use; attributes afterwards."""

    def __init__(self, fetch: Callable[[bytes], Any]) -> None:
        self._fetch = fetch

    def __getattr__(self, name: str) -> Any:
        for candidate in (name, f"{name}KHR", f"{name}EXT"):
            pointer = self._fetch(candidate.encode())
            if pointer != NULL:
                function = ffi.cast(f"PFN_{candidate}", pointer)
                setattr(self, name, function)
                return function
        raise DeviceError(f"[device] the driver has no entry point {name}; update the Vulkan driver", call=name)


def instance_functions(instance: Handle) -> Any:
    """Entry points of an instance."""
    return _Functions(lambda name: lib.vkGetInstanceProcAddr(instance, name))


_alive: Counter[str] = Counter()
_alive_lock = threading.Lock()


def count_alive(kind: str, change: int) -> None:
    """Adjust the count of `alive_objects`."""
    with _alive_lock:
        _alive[kind] += change


def alive_objects() -> dict[str, int]:
    """Kinds of Vulkan objects alive in this process (instances, and the objects of all devices), with their counts."""
    return {kind: n for kind, n in sorted(_alive.items()) if n}


class _NoFunctions:
    """Entry points in a process that was forked from the one that opened the device: a driver's threads are not there, and calls would wait
    for them for ever."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        self._driver.require_own_process()
        raise AssertionError(name)


class Driver:
    """A logical device and all that exists on it.

    fn        entry points of the device (bypassing the loader's dispatch)
    live      how many objects of each kind are alive
    forked    this process was forked from the one that opened the device: nothing can be called, and nothing is destroyed
    """

    def __init__(self, device: Handle) -> None:
        self.device = device
        self.fn: Any = _Functions(lambda name: lib.vkGetDeviceProcAddr(device, name))
        self.live: Counter[str] = Counter()
        self.forked = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        _drivers.add(self)
        _leave_at_exit()  # found before a process is forked

    def require_own_process(self) -> None:
        """Raises OtherProcess in a process that was forked after the device was opened."""
        if self.forked:
            raise OtherProcess(
                f"[device] opened in process {self._pid}, from which this one, {os.getpid()}, was forked: a device, its models and its "
                "tensors are of use there alone. Open the device and load the model in this process (multiprocessing: in each worker, best "
                'with the start method "spawn")'
            )

    def leave_to_parent(self) -> None:
        """In a process that was just forked."""
        self.forked = True
        self.fn = _NoFunctions(self)
        self._lock = threading.Lock()  # a thread that is not here may have held it

    def call(self, name: str, *args: Any, about: str = "") -> int:
        """Call a device-level function that returns a VkResult, through the gate."""
        return check(getattr(self.fn, name)(*args), name, about)

    def create(self, kind: str, info: Any, about: str = "", *, verb: str = "Create") -> Handle:
        """vk<verb><kind>(device, info, NULL, &handle), counted. `kind` without "Vk": "Buffer"."""
        out = ffi.new(f"Vk{'DeviceMemory' if kind == 'Memory' else kind} *")
        self.call(f"vk{verb}{kind}", self.device, info, NULL, out, about=about)
        self.count(kind, 1)
        return out[0]

    def destroy(self, kind: str, handle: Handle, *, verb: str = "Destroy") -> None:
        """vk<verb><kind>(device, handle, NULL), counted."""
        if self.forked:
            return
        getattr(self.fn, f"vk{verb}{kind}")(self.device, handle, NULL)
        self.count(kind, -1)

    def count(self, kind: str, change: int) -> None:
        """Adjust the count of live objects. Locked, since compiling threads create objects at the same time."""
        with self._lock:
            self.live[kind] += change
        count_alive(kind, change)


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


@cache
def _leave_at_exit() -> Callable[[], object]:
    """What makes a process end without the exit handlers of C libraries, with the status that it has then. Mesa's wait for threads that a
    forked process has not, or crash. glibc has this; elsewhere nothing is done."""
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        leave = ctypes.cast(libc._exit, ctypes.c_void_p)
        on_exit = libc.on_exit  # calls leave(status, NULL) after Python has ended, before the handlers registered earlier
    except (OSError, AttributeError, TypeError):
        return lambda: None
    return lambda: on_exit(leave, None)


def _after_fork() -> None:
    global _alive_lock
    _alive_lock = threading.Lock()
    _alive.clear()
    for driver in _drivers:
        driver.leave_to_parent()
    if _leave_at_exit.cache_info().currsize:  # a driver was loaded
        _leave_at_exit()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def handle_value(handle: Handle) -> int:
    """A handle as the 64-bit number that arrays of structs hold."""
    return int(ffi.cast("uintptr_t", handle))
