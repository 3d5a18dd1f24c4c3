"""An open device: what it can do, its memory, kernels, recordings and queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from vkback.device.capabilities import MIN_STORAGE_BINDINGS, Capabilities
from vkback.device.driver import NULL, Driver, check, ffi, strings, struct, text
from vkback.device.errors import CompileOnly, DeviceError, DeviceLost, FeatureMissing, Timeout
from vkback.device.instance import Instance, Validation, ValidationMessage, no_hardware, select
from vkback.device.kernel import Kernel, KernelCache, KernelSpec
from vkback.device.memory import Arena, BufferRange, HostPages, Kind, MemoryPool, MemoryUse
from vkback.device.query import API_1_2, PhysicalDevice, choose_queue_family, queue_families
from vkback.device.queue import CPU_WAIT_S, WAIT_S, Gate, Queue, Ticket
from vkback.device.recorder import Commands, Recorder
from vkback.device.statistics import EXTENSION as STATISTICS_EXTENSION
from vkback.device.statistics import CompiledText, Statistic
from vkback.device.transfer import BLOCKING_CHUNK, CHUNK, Uploader, download

CompilesOnly = bool | Literal["auto"]


class Device:
    """A Vulkan device opened for compute. Use it as a context manager, or call `close()`.

    Everything made from a device belongs to it and is destroyed with it at the latest.

    compile_only  why the device can only compile (no queue, no memory); "" if it runs what it compiles
    """

    def __init__(self, instance: Instance, physical: PhysicalDevice, index: int, statistics: bool = False, compile_only: str = "") -> None:
        """Use `Device.open`."""
        self.index = index
        self.compile_only = compile_only
        self.caps: Capabilities = physical.caps
        self._instance = instance
        self._physical = physical
        self._family = choose_queue_family(queue_families(instance.fn, physical.handle))
        priority = ffi.new("float *", 1.0)
        queue_info = struct("VkDeviceQueueCreateInfo", queueFamilyIndex=self._family, queueCount=1, pQueuePriorities=priority)
        chain, extensions = physical.features.chain, physical.features.extensions
        self._has_statistics = statistics
        if statistics:
            chain = struct("VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR", chain, pipelineExecutableInfo=1)
            extensions = (*extensions, STATISTICS_EXTENSION)
        info = struct(
            "VkDeviceCreateInfo",
            chain,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue_info,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=strings(extensions),
        )
        out = ffi.new("VkDevice *")
        check(
            instance.fn.vkCreateDevice(physical.handle, info, NULL, out),
            "vkCreateDevice",
            f"{self.caps.name}, extensions {', '.join(extensions)}",
        )
        self._driver = Driver(out[0])
        self._driver.count("Device", 1)
        queue = ffi.new("VkQueue *")
        self._driver.fn.vkGetDeviceQueue(self._driver.device, self._family, 0, queue)
        wait_s = CPU_WAIT_S if self.caps.software else WAIT_S
        self._running = None if compile_only else Queue(self._driver, queue[0], self._fault_report, wait_s)
        self._memory = MemoryPool(self._driver, physical.handle, instance.fn, self.caps, self.settle)
        self._kernels = KernelCache(self._driver, self.caps)
        self._arenas: list[Arena] = []
        self._commands: set[Commands] = set()
        self._uploader: Uploader | None = None
        self._readback: tuple[BufferRange, BufferRange] | None = None
        self._host_barrier: Commands | None = None
        self._open = True

    @classmethod
    def open(
        cls,
        selector: str | int | None = None,
        *,
        validation: Validation = False,
        statistics: bool = False,
        compile_only: CompilesOnly = False,
    ) -> Device:
        """Open a device.

        selector    index, part of the name, or UUID; None: the environment variable VKBACK_DEVICE, else the best GPU there is.
                    Software drivers are used on request, or when there is no GPU (with a line on stderr).
        validation  True: run under the Khronos validation layer; "sync": with its synchronization checks, too
        statistics  needed by `kernel_statistics` and `kernel_texts`
        compile_only  True: kernels can be compiled and inspected; anything that would run raises CompileOnly. Drivers without hardware can
                    do no more (RADV's null device, any driver over a no-op kernel shim). "auto": do so for these; False: refuse them
        Raises NoDevice, or FeatureMissing naming every required feature that the device lacks.
        """
        instance = Instance(validation)
        try:
            devices = instance.physical_devices()
            physical = select(devices, selector)
            require(physical)
            if statistics and STATISTICS_EXTENSION not in physical.caps.extensions:
                raise FeatureMissing(
                    f"[device] statistics of kernels need {STATISTICS_EXTENSION}, which {physical.caps.name} ({physical.caps.driver_name}) "
                    "does not offer. Do without them, or use a driver that has it, as NVIDIA's and Mesa's for AMD and Intel do"
                )
            why = no_hardware(physical.caps)
            if why and not compile_only:
                raise compiles_only(physical.caps, why)
            if compile_only is True:
                why = why or "it was opened so"
            return cls(instance, physical, next(i for i, d in enumerate(devices) if d is physical), statistics, why)
        except BaseException:
            instance.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(check_validation=error is None)

    # -- memory

    def free_memory(self) -> int:
        """Bytes left in the largest device-local heap: the driver's budget if it reports one,
        else the heap's size minus what this Device has taken."""
        self._driver.require_own_process()
        return self._memory.free()

    def budget_left(self) -> int | None:
        """Bytes that the driver leaves to this process beyond what it has taken, of the same heap; negative where others have taken them
        since. None where it does not tell (VK_EXT_memory_budget)."""
        self._driver.require_own_process()
        return self._memory.budget_left()

    @property
    def own_bytes(self) -> int:
        """What this Device has taken of that heap."""
        return self._memory.own_bytes

    def memory_use(self) -> MemoryUse:
        """What its memory is used for now, and the most that was used."""
        purposes: dict[str, tuple[int, int]] = {}
        for arena in self._arenas:
            if arena.alive:
                size, count = purposes.get(arena.purpose, (0, 0))
                purposes[arena.purpose] = size + sum(arena.buffers), count + len(arena.buffers)
        return MemoryUse(purposes, self._memory.peak)

    def arena(self, purpose: str, nbytes: int, kind: Kind = "device") -> Arena:
        """Memory for one purpose.

        kind  "device", "upload" (host writes), "readback" (host reads), "host_visible_device" (device memory that is mapped), "host" (what
              kernels read where it lies, in memory of the host: imported pages where the driver takes them)

        Raises OutOfDeviceMemory with what was asked, what was free, and for what; FeatureMissing when there is no memory of that kind.
        """
        self._require_running(f"memory for {purpose}")
        arena = Arena(self._memory, purpose, nbytes, kind)
        self._arenas = [a for a in self._arenas if a.alive]
        self._arenas.append(arena)
        return arena

    def import_host(self, purpose: str, pages: HostPages) -> Arena:
        """Memory of the host as an arena of this device, which other devices may have as well (VK_EXT_external_memory_host). What is
        allocated first lies first.

        Raises FeatureMissing where driver or memory do not allow it.
        """
        self._require_running(f"memory for {purpose}")
        arena = Arena(self._memory, purpose, pages.size, "imported", pages)
        self._arenas = [a for a in self._arenas if a.alive]
        self._arenas.append(arena)
        return arena

    # -- kernels

    def kernel(
        self,
        spirv: bytes,
        *,
        name: str,
        bindings: int,
        push_bytes: int,
        spec: Mapping[int, int] | None = None,
        subgroup_size: int | None = None,
    ) -> Kernel:
        """Compile a kernel with entry point `main`, or return it if it was compiled before.

        bindings       storage buffers in set 0
        spec           specialization constant id -> 32-bit value
        subgroup_size  required size, with full subgroups if the device has them; None leaves the choice to the driver
        """
        self._require_open()
        return self._kernels.get(KernelSpec(spirv, name, bindings, push_bytes, tuple(sorted((spec or {}).items())), subgroup_size))

    def kernels(self, specs: Iterable[KernelSpec]) -> list[Kernel]:
        """Compile many kernels in parallel; returned in the order of `specs`."""
        self._require_open()
        return self._kernels.get_all(specs)

    def trim_kernels(self, most: int) -> int:
        """Destroy the least recently used kernels until `most` are left; returns how many. They are compiled again on demand.
        No recording may be left that runs one of them."""
        self._require_open()
        return self._kernels.trim(most)

    def kernel_statistics(self, spec: KernelSpec) -> list[Statistic]:
        """What the driver reports about a kernel: registers, code size, spills. Compiles it once more.

        Raises DeviceError on a device that was not opened with `statistics`.
        """
        self._require_open()
        if not self._has_statistics:
            raise DeviceError("[device] statistics of kernels were not asked for; open the device with statistics=True")
        return self._kernels.statistics(spec)

    def kernel_texts(self, spec: KernelSpec) -> list[CompiledText]:
        """What the driver prints about a kernel: its intermediate forms and, last, its machine code. Compiles it once more.

        Empty if the driver prints nothing. Raises DeviceError on a device that was not opened with `statistics`.
        """
        self._require_open()
        if not self._has_statistics:
            raise DeviceError("[device] texts of kernels were not asked for; open the device with statistics=True")
        return self._kernels.texts(spec)

    def kernel_cache_data(self, spec: KernelSpec) -> bytes:
        """The data of the driver's VkPipelineCache for a kernel, in the driver's own format. Compiles the kernel once more."""
        self._require_open()
        return self._kernels.cache_data(spec)

    # -- work

    def recorder(self, name: str, *, timestamps: int = 0) -> Recorder:
        """Begin a recording. timestamps: the most that it will write."""
        self._require_running(name)
        return Recorder(self._driver, self.caps, self._family, name, timestamps, self._commands)

    def submit(self, commands: Commands | Sequence[Commands], gate: Gate | None = None) -> Ticket:
        """Run recordings in order, after everything submitted before. Returns at once, unless one of them is still in flight. gate: they
        wait for it (`Queue.submit`), and so does what is submitted after them."""
        self._require_open()
        return self._queue.submit([commands] if isinstance(commands, Commands) else list(commands), gate)

    def gate(self) -> Gate:
        """One that submissions of this device may wait for. Close it before the device."""
        self._require_running("a gate")
        return Gate(self._driver)

    def run(self, recorder: Recorder) -> None:
        """Finish a recording, run it once to its end, and destroy it."""
        commands = recorder.finish()
        self.submit(commands).wait()
        commands.destroy()

    def wait_idle(self) -> None:
        """Wait until everything submitted is done and its writes are visible to the host."""
        self._require_open()
        if self._host_barrier is None:
            rec = self.recorder("host barrier")
            rec.host_barrier()
            self._host_barrier = rec.finish()
        self.submit(self._host_barrier).wait()

    # -- transfers

    def upload(self, dst: BufferRange, data: npt.NDArray[Any]) -> None:
        """Write an array into a range and wait until it has arrived; the array may be shorter than the range."""
        self.upload_many([(dst, data)])

    def upload_many(self, pairs: Sequence[tuple[BufferRange, npt.NDArray[Any]]]) -> None:
        """`upload` of several arrays, with one wait for all."""
        self._require_open()
        if any(dst.host_visible for dst, _ in pairs):
            self._queue.last.wait()
        if self._uploader is None:
            self._uploader = Uploader(self, BLOCKING_CHUNK)
        try:
            for dst, data in pairs:
                self._uploader.write(dst, 0, data)
        finally:
            self._uploader.flush_and_wait()

    def download(self, src: BufferRange, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """The range's content after everything submitted, as a new one-dimensional array."""
        itemsize = np.dtype(dtype).itemsize
        if src.size % itemsize:
            raise DeviceError(f"[download] {src.name!r} has {src.size} bytes, no multiple of the {itemsize} of {np.dtype(dtype).name}")
        return self.download_many([src]).view(dtype)

    def download_many(self, ranges: Sequence[BufferRange]) -> npt.NDArray[np.uint8]:
        """The bytes of several ranges of one kind of memory, end to end, after everything submitted."""
        if all(src.host_visible for src in ranges):
            self.wait_idle()
            return np.concatenate([np.empty(0, np.uint8), *(src.map() for src in ranges)])
        if self._readback is None:
            arena = self.arena("readback staging", 2 * BLOCKING_CHUNK, "readback")
            self._readback = (arena.alloc(BLOCKING_CHUNK, "readback 0"), arena.alloc(BLOCKING_CHUNK, "readback 1"))
        return download(self, ranges, self._readback)

    def uploader(self, chunk_bytes: int = CHUNK) -> Uploader:
        """A streaming uploader with staging slots of `chunk_bytes`."""
        self._require_open()
        return Uploader(self, chunk_bytes)

    # -- diagnosis

    def summary_line(self) -> str:
        """One line about the device with its index, in the form that llama.cpp's users know."""
        return self.caps.summary_line(self.index)

    @property
    def validation_messages(self) -> list[ValidationMessage]:
        """What the validation layers have reported so far; empty without them."""
        return self._instance.messages

    def check_validation(self) -> None:
        """Raises DeviceError when the validation layers reported errors."""
        errors = [m for m in self.validation_messages if m.severity == "error"]
        if errors:
            first = "\n".join(str(m) for m in errors[:5])
            raise DeviceError(f"[validation] {len(errors)} errors from the validation layers, the first of them:\n{first}")

    def live_objects(self) -> dict[str, int]:
        """Kinds of Vulkan objects that are alive, with their counts; empty after `close()` unless something leaked."""
        return {kind: n for kind, n in self._driver.live.items() if n}

    def _fault_report(self) -> str:
        """What VK_EXT_device_fault knows about a lost device."""
        if "VK_EXT_device_fault" not in self.caps.extensions:
            return ""
        counts = struct("VkDeviceFaultCountsEXT")
        if self._driver.fn.vkGetDeviceFaultInfoEXT(self._driver.device, counts, NULL) < 0:
            return ""
        counts.vendorBinarySize = 0
        addresses = ffi.new("VkDeviceFaultAddressInfoEXT[]", max(counts.addressInfoCount, 1))
        vendors = ffi.new("VkDeviceFaultVendorInfoEXT[]", max(counts.vendorInfoCount, 1))
        info = struct("VkDeviceFaultInfoEXT", pAddressInfos=addresses, pVendorInfos=vendors)
        if self._driver.fn.vkGetDeviceFaultInfoEXT(self._driver.device, counts, info) < 0:
            return ""
        where = [f"address {a.reportedAddress:#x} (type {int(a.addressType)})" for a in addresses[0 : counts.addressInfoCount]]
        said = [f"{text(v.description)} ({v.vendorFaultCode:#x})" for v in vendors[0 : counts.vendorInfoCount]]
        return f" Device fault: {'; '.join([text(info.description), *where, *said])}."

    # -- end

    def close(self, *, check_validation: bool = True) -> None:
        """Wait for the device, destroy everything, and raise if the validation layers reported errors."""
        if not self._open:
            return
        self._open = False
        if self._driver.forked:
            return
        # The objects of a lost device must be destroyed like any others; those of a hung one may as well.
        with contextlib.suppress(DeviceLost, Timeout):
            if self._running is not None:
                self._running.last.wait()
        for commands in list(self._commands):
            commands.release()
        for arena in self._arenas:
            if arena.alive:
                arena.release()
        self._kernels.destroy()
        if self._running is not None:
            self._running.destroy()
        self._driver.fn.vkDestroyDevice(self._driver.device, NULL)
        self._driver.count("Device", -1)
        self._instance.close()
        if check_validation:
            self.check_validation()

    def settle(self) -> None:
        """Wait until nothing is in flight; a lost device has nothing in flight."""
        with contextlib.suppress(DeviceLost):
            self._queue.last.wait()

    @property
    def _queue(self) -> Queue:
        self._require_running("work")
        assert self._running is not None
        return self._running

    def _require_running(self, what: str) -> None:
        self._require_open()
        if self.compile_only:
            raise compiles_only(self.caps, self.compile_only, what)

    def require_own_process(self) -> None:
        """Raises OtherProcess in a process that was forked after this Device was opened."""
        self._driver.require_own_process()

    @property
    def forked(self) -> bool:
        """This process was forked after this Device was opened, and can do nothing with it."""
        return self._driver.forked

    def _require_open(self) -> None:
        self._driver.require_own_process()
        if not self._open:
            raise DeviceError("[device] this Device is closed")


def compiles_only(caps: Capabilities, why: str, what: str = "this") -> CompileOnly:
    """The error to raise for something that would run, on a device that only compiles."""
    return CompileOnly(
        f"[device] {caps.name} only compiles kernels ({why}); {what} needs a device that runs them. Choose one with VKBACK_DEVICE, or look "
        "at kernels with vkback kernels, explain and plan"
    )


def require(physical: PhysicalDevice) -> None:
    """Raises FeatureMissing that names every feature that vkback needs and the device lacks."""
    caps = physical.caps
    needs = (
        ("Vulkan 1.2", physical.api_version >= API_1_2),
        ("timelineSemaphore", caps.timeline_semaphore),
        ("a compute queue", physical.has_compute_queue),
        (f"{MIN_STORAGE_BINDINGS} storage buffers a shader", caps.max_storage_bindings >= MIN_STORAGE_BINDINGS),
    )
    missing = [name for name, there in needs if not there]
    if missing:
        raise FeatureMissing(
            f"[device] {caps.name} ({caps.driver_name} {caps.driver_info}, Vulkan {caps.api_version}): vkback needs {', '.join(missing)}, "
            "which it does not offer. Update the driver or choose another device with VKBACK_DEVICE"
        )
