"""Device memory: arenas made of a few large buffers, and ranges inside them."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from vkback.device.capabilities import Capabilities, Heap, MemoryType
from vkback.device.driver import (
    BUFFER_USAGE_SHADER_DEVICE_ADDRESS,
    MEMORY_ALLOCATE_DEVICE_ADDRESS,
    Driver,
    Handle,
    ffi,
    handle_value,
    struct,
    vk,
)
from vkback.device.errors import DeviceError, DeviceLost, FeatureMissing, OutOfDeviceMemory, human_bytes
from vkback.device.host_memory import available_bytes, device_limit

Kind = Literal["device", "upload", "readback", "host_visible_device", "imported", "host"]
Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 256
"""Alignment of every range: the largest minStorageBufferOffsetAlignment that a device may have."""

HOST_ALIGNMENT = 1 << 16
"""Alignment of host memory that is imported: the largest minImportedHostPointerAlignment that a device may have."""

EXTERNAL_HOST = "VK_EXT_external_memory_host"

PREFERENCES: dict[Kind, tuple[tuple[frozenset[str], frozenset[str]], ...]] = {
    "device": (
        (frozenset({"device_local"}), frozenset({"host_visible"})),
        (frozenset({"device_local"}), frozenset()),
        (frozenset(), frozenset()),
    ),
    "upload": (
        (frozenset({"host_visible", "host_coherent"}), frozenset({"device_local", "host_cached"})),
        (frozenset({"host_visible", "host_coherent"}), frozenset({"device_local"})),
        (frozenset({"host_visible", "host_coherent"}), frozenset()),
    ),
    "readback": (
        (frozenset({"host_visible", "host_coherent", "host_cached"}), frozenset({"device_local"})),
        (frozenset({"host_visible", "host_coherent", "host_cached"}), frozenset()),
        (frozenset({"host_visible", "host_coherent"}), frozenset()),
    ),
    "host_visible_device": ((frozenset({"device_local", "host_visible", "host_coherent"}), frozenset()),),
    "imported": (
        (frozenset({"host_visible", "host_coherent", "host_cached"}), frozenset({"device_local"})),
        (frozenset({"host_visible", "host_coherent"}), frozenset()),
    ),
    "host": (
        (frozenset({"host_visible", "host_coherent", "host_cached"}), frozenset({"device_local"})),
        (frozenset({"host_visible", "host_coherent"}), frozenset({"device_local"})),
        (frozenset({"host_visible", "host_coherent"}), frozenset()),
    ),
}
"""For each kind, in order of preference: flags that a memory type must have, and flags that it must not have. Memory that the host uses is
coherent, so nothing is ever flushed."""

AVOIDED = frozenset({"lazily_allocated", "protected", "device_coherent", "device_uncached", "rdma"})
"""Types for other purposes; AMD's coherent and uncached types are slow."""


def choose_memory_type(types: Sequence[MemoryType], heaps: Sequence[Heap], allowed: int, kind: Kind) -> int | None:
    """Index of the memory type for a kind, among the bits of `allowed`; of equals, the one on the largest heap. None if there is none."""
    for needed, unwanted in PREFERENCES[kind]:
        fits = [
            i
            for i, t in enumerate(types)
            if allowed >> i & 1 and needed <= set(t.flags) and not unwanted & set(t.flags) and not AVOIDED & set(t.flags)
        ]
        if fits:
            return max(fits, key=lambda i: heaps[types[i].heap].size)
    return None


class HostPages:
    """Zeroed memory of the host, of at least so many bytes, which several devices may import. It lives as long as this object."""

    def __init__(self, nbytes: int) -> None:
        self.size = -(-nbytes // HOST_ALIGNMENT) * HOST_ALIGNMENT
        self._memory = mmap.mmap(-1, self.size + HOST_ALIGNMENT)
        whole = int(ffi.cast("uintptr_t", ffi.from_buffer(self._memory)))
        self.address = -(-whole // HOST_ALIGNMENT) * HOST_ALIGNMENT


@dataclass(frozen=True, eq=False)
class BufferRange:
    """`size` bytes at `offset` of a VkBuffer. `handle` is the buffer, `key` its number."""

    handle: Handle = field(repr=False)
    key: int = field(repr=False)
    offset: int
    size: int
    name: str
    arena: Arena = field(repr=False)
    address: int = field(repr=False, default=0)
    """Address at which the host sees the range; 0 if it does not."""

    def slice(self, offset: int, size: int, name: str = "") -> BufferRange:
        """A part of this range. As a storage buffer its offset must be a multiple of the device's alignment (256 always does)."""
        if offset < 0 or size <= 0 or offset + size > self.size:
            raise DeviceError(f"[memory] slice of {size} bytes at {offset} does not lie within {self.name!r} of {self.size} bytes")
        address = self.address + offset if self.address else 0
        return BufferRange(self.handle, self.key, self.offset + offset, size, name or self.name, self.arena, address)

    @property
    def host_visible(self) -> bool:
        """Whether `map()` works."""
        return self.address != 0

    def map(self) -> Bytes:
        """The range as writable bytes. The memory stays mapped until the arena is destroyed; do not keep the view longer."""
        if not self.address:
            raise DeviceError(
                f"[memory] {self.name!r} in arena {self.arena.purpose!r} (kind {self.arena.kind!r}) is not visible to the host. "
                "Use device.upload or device.download"
            )
        view = np.frombuffer(ffi.buffer(ffi.cast("char *", self.address), self.size), np.uint8)
        return view


@dataclass(frozen=True)
class MemoryUse:
    """Memory of an open device, in bytes.

    purposes  by what it is for: bytes and buffers
    peak      most that was taken at once since the device was opened
    """

    purposes: dict[str, tuple[int, int]]
    peak: int

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.purposes.values())

    @property
    def buffers(self) -> int:
        return sum(count for _, count in self.purposes.values())


@dataclass
class _Block:
    """One VkBuffer on its own VkDeviceMemory."""

    buffer: Handle
    memory: Handle
    size: int
    heap: int
    address: int
    used: int = 0
    pages: HostPages | None = None


class Arena:
    """Memory for one purpose, allocated front to back and freed all at once; a context manager that destroys itself.

    Ranges never cross a VkBuffer. If the device limits buffer sizes, an arena has several buffers, and a range goes into the first that it
    fits. Buffers are added when a range only fails to fit because of such cuts, so all ranges whose sizes, each rounded up to ALIGNMENT,
    sum to `nbytes` fit.
    """

    def __init__(self, pool: MemoryPool, purpose: str, nbytes: int, kind: Kind, pages: HostPages | None = None) -> None:
        """Use `Device.arena`, or with pages `Device.import_host`."""
        if kind not in PREFERENCES:
            raise DeviceError(f"[memory] arena {purpose!r}: unknown kind {kind!r}, expected one of {', '.join(PREFERENCES)}")
        if nbytes <= 0:
            raise DeviceError(f"[memory] arena {purpose!r}: {nbytes} bytes asked; a positive size is needed")
        self.purpose = purpose
        self.kind: Kind = kind
        self.nbytes = _aligned(nbytes)
        self._pool = pool
        self._pages = pages
        self._blocks: list[_Block] = []
        self._given = 0
        self.alive = True
        pool.driver.count("Arena", 1)
        try:
            if pages is not None:
                self._blocks.append(pool.imported(purpose, pages))
                return
            left = self.nbytes
            while left > 0:
                size = min(left, pool.block_limit)
                self._blocks.append(self._block(size, left))
                left -= size
        except BaseException:
            self.destroy()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def alloc(self, nbytes: int, name: str) -> BufferRange:
        """The next `nbytes`, aligned to 256. Raises OutOfDeviceMemory when the arena is full."""
        if not self.alive:
            raise DeviceError(f"[memory] arena {self.purpose!r} is destroyed; {name!r} cannot be placed in it")
        if nbytes <= 0:
            raise DeviceError(f"[memory] {name!r} in arena {self.purpose!r}: {nbytes} bytes asked; a positive size is needed")
        size, pool = _aligned(nbytes), self._pool
        if size > pool.block_limit:
            raise DeviceError(
                f"[memory] {name!r} in arena {self.purpose!r}: {human_bytes(nbytes)} exceed the largest buffer of this device, "
                f"{human_bytes(pool.block_limit)}. Cut it into shards"
            )
        if size > self.free:
            raise OutOfDeviceMemory(
                f"[memory] arena {self.purpose!r} is full: {name!r} asks {human_bytes(nbytes)}, {human_bytes(self.free)} of "
                f"{human_bytes(self.nbytes)} are left. Make the arena larger"
            )
        block = next((b for b in self._blocks if b.used + size <= b.size), None)
        if block is None:
            block = self._block(size, size)
            self._blocks.append(block)
        offset = block.used
        block.used += size
        self._given += size
        address = block.address + offset if block.address else 0
        return BufferRange(block.buffer, handle_value(block.buffer), offset, nbytes, name, self, address)

    def _block(self, size: int, wanted: int) -> _Block:
        """A buffer more; wanted as of `MemoryPool.take`."""
        if self.kind == "host":
            return self._pool.take_host(self.purpose, size, wanted)
        return self._pool.take(self.purpose, size, self.kind, wanted)

    @property
    def free(self) -> int:
        """Bytes not allocated yet."""
        return self.nbytes - self._given

    def reset(self) -> None:
        """Free all ranges at once. Using an old range afterwards overlaps new ones."""
        for block in self._blocks:
            block.used = 0
        self._given = 0

    @property
    def buffers(self) -> tuple[int, ...]:
        """Sizes of its buffers."""
        return tuple(block.size for block in self._blocks)

    def destroy(self) -> None:
        """Wait for submitted work, then give the memory back. Ranges of this arena, and recordings that use them, are dead afterwards."""
        if self.alive:
            self._pool.settle()
            self.release()

    def release(self) -> None:
        """Give the memory back without waiting; nothing in flight may use it."""
        self.alive = False
        for block in self._blocks:
            self._pool.give_back(block)
        self._blocks.clear()
        self._pool.driver.count("Arena", -1)


class MemoryPool:
    """Where arenas get their buffers from; keeps account of what is left of each heap.

    settle  waits for submitted work
    """

    def __init__(self, driver: Driver, physical: Handle, instance_fn: Any, caps: Capabilities, settle: Callable[[], None]) -> None:
        self.driver = driver
        self.settle = settle
        self.block_limit = caps.largest_buffer
        self._physical, self._instance_fn, self._caps = physical, instance_fn, caps
        self._taken = [0] * len(caps.heaps)
        self._limit = device_limit()
        self.peak = 0

    def free(self, heap: int | None = None) -> int:
        """Bytes left in a heap (default: the largest device-local one).

        From the driver's budget if it reports one, which counts other programs, too; else the heap's size minus what this Device has taken.
        """
        if heap is None:
            heap = own_heap(self._caps)
        left = self._unclaimed(heap)
        budget = budget_left(self._physical, self._instance_fn, self._caps, heap)
        return max(left if budget is None else min(left, budget), 0)

    def budget_left(self) -> int | None:
        """As of `Device`."""
        return budget_left(self._physical, self._instance_fn, self._caps)

    @property
    def own_bytes(self) -> int:
        """Bytes taken of the device's own heap."""
        return self._taken[own_heap(self._caps)]

    def _unclaimed(self, heap: int) -> int:
        size = self._caps.heaps[heap].size
        if self._limit is not None and heap == own_heap(self._caps):
            size = min(size, self._limit)
        return size - self._taken[heap]

    def take(self, purpose: str, size: int, kind: Kind, wanted: int) -> _Block:
        """A new buffer of `size` bytes on memory of its own. wanted:
        bytes of the heap that this buffer and the purpose's further ones need."""
        driver, caps = self.driver, self._caps
        usage = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        chain = None
        if caps.buffer_device_address:
            usage |= BUFFER_USAGE_SHADER_DEVICE_ADDRESS
            chain = struct("VkMemoryAllocateFlagsInfo", flags=MEMORY_ALLOCATE_DEVICE_ADDRESS)
        about = f"{human_bytes(size)} for {purpose}"
        with contextlib.ExitStack() as undo:
            buffer = driver.create("Buffer", struct("VkBufferCreateInfo", size=size, usage=usage), about)
            undo.callback(driver.destroy, "Buffer", buffer)
            needs = ffi.new("VkMemoryRequirements *")
            driver.fn.vkGetBufferMemoryRequirements(driver.device, buffer, needs)
            index = choose_memory_type(caps.memory_types, caps.heaps, needs.memoryTypeBits, kind)
            if index is None:
                raise FeatureMissing(
                    f"[memory] arena {purpose!r}: {caps.name} has no memory type of kind {kind!r}. Use kind 'device' and staged uploads"
                )
            chosen = caps.memory_types[index]
            # Drivers differ in what they do beyond a heap's size: some page to host memory and crawl, some fail much later.
            if wanted > self._unclaimed(chosen.heap):
                raise self._out_of_memory("memory check", wanted, chosen.heap, purpose)
            try:
                info = struct("VkMemoryAllocateInfo", chain, allocationSize=needs.size, memoryTypeIndex=index)
                memory = driver.create("Memory", info, verb="Allocate")
            except OutOfDeviceMemory as error:
                raise self._out_of_memory(error.call, wanted, chosen.heap, purpose) from error
            undo.callback(driver.destroy, "Memory", memory, verb="Free")
            driver.call("vkBindBufferMemory", driver.device, buffer, memory, 0, about=about)
            address = 0
            if "host_visible" in chosen.flags:
                where = ffi.new("void **")
                driver.call("vkMapMemory", driver.device, memory, 0, size, 0, where, about=about)
                address = int(ffi.cast("uintptr_t", where[0]))
            undo.pop_all()
        self._taken[chosen.heap] += size
        self.peak = max(self.peak, sum(self._taken))
        return _Block(buffer, memory, size, chosen.heap, address)

    def take_host(self, purpose: str, size: int, wanted: int) -> _Block:
        """A new buffer of at least `size` bytes on memory of the host: imported where it can be, since a driver's heap of it may be small;
        else of a memory type that is not the device's. wanted: bytes that this buffer and the purpose's further ones need."""
        left = available_bytes()
        if left is not None and wanted > left:
            raise OutOfDeviceMemory(
                f"[memory] {purpose}: {human_bytes(wanted)} of the host's memory asked, {human_bytes(left)} are available. End other "
                "programs, or leave more on the device"
            )
        if EXTERNAL_HOST in self._caps.extensions:
            with contextlib.suppress(FeatureMissing):
                return self.imported(purpose, _pages(size, purpose))
        return self.take(purpose, size, "host", wanted)

    def imported(self, purpose: str, pages: HostPages) -> _Block:
        """A buffer over memory of the host, which is of no heap. Raises FeatureMissing where that cannot be."""
        driver, caps = self.driver, self._caps
        refused = f"[memory] arena {purpose!r}: {caps.name} cannot import memory of the host"
        if EXTERNAL_HOST not in caps.extensions:
            raise FeatureMissing(f"{refused}, it lacks {EXTERNAL_HOST}. Copy through memory of kind 'readback' and 'upload'")
        kind = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
        where = ffi.cast("void *", pages.address)
        usage = vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        try:
            with contextlib.ExitStack() as undo:
                chain = struct("VkExternalMemoryBufferCreateInfo", handleTypes=kind)
                buffer = driver.create("Buffer", struct("VkBufferCreateInfo", chain, size=pages.size, usage=usage), purpose)
                undo.callback(driver.destroy, "Buffer", buffer)
                needs = ffi.new("VkMemoryRequirements *")
                driver.fn.vkGetBufferMemoryRequirements(driver.device, buffer, needs)
                fits = struct("VkMemoryHostPointerPropertiesEXT")
                driver.call("vkGetMemoryHostPointerPropertiesEXT", driver.device, kind, where, fits, about=purpose)
                index = choose_memory_type(caps.memory_types, caps.heaps, needs.memoryTypeBits & fits.memoryTypeBits, "imported")
                if index is None or needs.size > pages.size:
                    raise FeatureMissing(f"{refused}: no memory type fits. Copy through memory of kind 'readback' and 'upload'")
                info = struct("VkImportMemoryHostPointerInfoEXT", handleType=kind, pHostPointer=where)
                memory = driver.create(
                    "Memory", struct("VkMemoryAllocateInfo", info, allocationSize=pages.size, memoryTypeIndex=index), verb="Allocate"
                )
                undo.callback(driver.destroy, "Memory", memory, verb="Free")
                driver.call("vkBindBufferMemory", driver.device, buffer, memory, 0, about=purpose)
                undo.pop_all()
        except DeviceLost:
            raise
        except FeatureMissing:
            raise
        except DeviceError as error:
            raise FeatureMissing(f"{refused}: {error}. Copy through memory of kind 'readback' and 'upload'") from error
        return _Block(buffer, memory, pages.size, -1, pages.address, pages=pages)

    def give_back(self, block: _Block) -> None:
        """Destroy a buffer and free its memory."""
        self.driver.destroy("Buffer", block.buffer)
        self.driver.destroy("Memory", block.memory, verb="Free")
        if block.heap >= 0:
            self._taken[block.heap] -= block.size

    def _out_of_memory(self, call: str, asked: int, heap: int, purpose: str) -> OutOfDeviceMemory:
        result = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
        return OutOfDeviceMemory(
            f"{call} failed: {result}: asked {human_bytes(asked)} in heap {heap}, {human_bytes(self.free(heap))} free, for {purpose}",
            call=call,
            result=result,
        )


def own_heap(caps: Capabilities) -> int:
    """The largest heap of a device's own, by its index."""
    return max(range(len(caps.heaps)), key=lambda i: (caps.heaps[i].device_local, caps.heaps[i].size))


def budget_left(physical: Handle, instance_fn: Any, caps: Capabilities, heap: int | None = None) -> int | None:
    """Bytes of a heap, default `own_heap`, that the driver has left for this process; None where it does not tell."""
    if "VK_EXT_memory_budget" not in caps.extensions:
        return None
    heap = own_heap(caps) if heap is None else heap
    budget = struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    instance_fn.vkGetPhysicalDeviceMemoryProperties2(physical, struct("VkPhysicalDeviceMemoryProperties2", budget))
    return int(budget.heapBudget[heap]) - int(budget.heapUsage[heap])


def _pages(nbytes: int, purpose: str) -> HostPages:
    try:
        return HostPages(nbytes)
    except (OSError, MemoryError, ValueError) as error:
        raise OutOfDeviceMemory(f"[memory] {purpose}: the host gives no {human_bytes(nbytes)} of memory: {error}") from error


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
