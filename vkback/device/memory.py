"""Device memory: arenas made of a few large buffers, and ranges inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
from vkback.device.errors import DeviceError, FeatureMissing, OutOfDeviceMemory, human_bytes

Kind = Literal["device", "upload", "readback", "host_visible_device"]
Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 256
"""Of every range: the largest minStorageBufferOffsetAlignment that Vulkan allows; devices may not exceed it."""

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
}
"""For each kind, in order: flags a memory type must have, flags it must not have. All host-visible kinds are coherent, so nothing is flushed."""

AVOIDED = frozenset({"lazily_allocated", "protected", "device_coherent", "device_uncached", "rdma"})
"""Types for other purposes; AMD's coherent and uncached ones are slow."""


def choose_memory_type(types: Sequence[MemoryType], heaps: Sequence[Heap], allowed: int, kind: Kind) -> int | None:
    """Index of the memory type for a kind, among the bits of `allowed`; of equals the one on the largest heap. None when there is none."""
    for needed, unwanted in PREFERENCES[kind]:
        fits = [
            i
            for i, t in enumerate(types)
            if allowed >> i & 1 and needed <= set(t.flags) and not unwanted & set(t.flags) and not AVOIDED & set(t.flags)
        ]
        if fits:
            return max(fits, key=lambda i: heaps[types[i].heap].size)
    return None


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
    """Where the host sees the range; 0 when it does not."""

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
                f"[memory] {self.name!r} in arena {self.arena.purpose!r} (kind {self.arena.kind!r}) is not visible to the host. Use device.upload or device.download"
            )
        view = np.frombuffer(ffi.buffer(ffi.cast("char *", self.address), self.size), np.uint8)
        return view


class Heaps:
    """What this process has taken from each heap, and what is left."""

    def __init__(self, physical: Handle, instance_fn: Any, caps: Capabilities) -> None:
        self._physical, self._fn = physical, instance_fn
        self._caps = caps
        self._taken = [0] * len(caps.heaps)
        self._has_budget = "VK_EXT_memory_budget" in caps.extensions

    def take(self, heap: int, nbytes: int) -> None:
        self._taken[heap] += nbytes

    def free(self, heap: int) -> int:
        """Bytes left in a heap: the driver's budget where it tells one, else its size less our own allocations."""
        left = self._caps.heaps[heap].size - self._taken[heap]
        if self._has_budget:
            budget = struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
            self._fn.vkGetPhysicalDeviceMemoryProperties2(self._physical, struct("VkPhysicalDeviceMemoryProperties2", budget))
            left = min(left, int(budget.heapBudget[heap]) - int(budget.heapUsage[heap]))
        return max(left, 0)

    def main(self) -> int:
        """The heap for weights: the largest device-local one."""
        heaps = self._caps.heaps
        local = [i for i, h in enumerate(heaps) if h.device_local] or list(range(len(heaps)))
        return max(local, key=lambda i: heaps[i].size)


@dataclass
class _Block:
    """One VkBuffer on its own VkDeviceMemory."""

    buffer: Handle
    memory: Handle
    size: int
    heap: int
    address: int
    used: int = 0


class Arena:
    """Memory of one purpose, given out front to back and taken back all at once.

    Ranges never cross a VkBuffer. Where the device limits a buffer's size the arena has several, and a range goes into the first it fits; a
    buffer is added when only such cutting stands in the way, so any ranges whose sizes, each rounded up to ALIGNMENT, sum to `nbytes` fit.
    """

    def __init__(self, driver: Driver, caps: Capabilities, heaps: Heaps, purpose: str, nbytes: int, kind: Kind) -> None:
        if kind not in PREFERENCES:
            raise DeviceError(f"[memory] arena {purpose!r}: unknown kind {kind!r}, expected one of {', '.join(PREFERENCES)}")
        if nbytes <= 0:
            raise DeviceError(f"[memory] arena {purpose!r}: {nbytes} bytes asked; a positive size is needed")
        self.purpose = purpose
        self.kind: Kind = kind
        self.nbytes = _aligned(nbytes)
        self._driver, self._caps, self._heaps = driver, caps, heaps
        self._block_limit = min(caps.max_allocation_size, caps.max_buffer_size) // ALIGNMENT * ALIGNMENT
        self._blocks: list[_Block] = []
        self._given = 0
        self.alive = True
        driver.count("Arena", 1)
        try:
            left = self.nbytes
            while left > 0:
                size = min(left, self._block_limit)
                self._add_block(size)
                left -= size
        except DeviceError:
            self.destroy()
            raise

    def alloc(self, nbytes: int, name: str) -> BufferRange:
        """The next `nbytes`, aligned to 256. Raises OutOfDeviceMemory when the arena is full."""
        if not self.alive:
            raise DeviceError(f"[memory] arena {self.purpose!r} is destroyed; {name!r} cannot be placed in it")
        if nbytes <= 0:
            raise DeviceError(f"[memory] {name!r} in arena {self.purpose!r}: {nbytes} bytes asked; a positive size is needed")
        size = _aligned(nbytes)
        if size > self._block_limit:
            raise DeviceError(
                f"[memory] {name!r} in arena {self.purpose!r}: {human_bytes(nbytes)} exceed the largest buffer of this device, "
                f"{human_bytes(self._block_limit)}. Cut it into shards"
            )
        if self._given + size > self.nbytes:
            raise OutOfDeviceMemory(
                f"[memory] arena {self.purpose!r} is full: {name!r} asks {human_bytes(nbytes)}, {human_bytes(self.nbytes - self._given)} of "
                f"{human_bytes(self.nbytes)} are left. Make the arena larger"
            )
        block = next((b for b in self._blocks if b.used + size <= b.size), None) or self._add_block(size)
        offset = block.used
        block.used += size
        self._given += size
        address = block.address + offset if block.address else 0
        return BufferRange(block.buffer, handle_value(block.buffer), offset, nbytes, name, self, address)

    @property
    def free(self) -> int:
        """Bytes not given out."""
        return self.nbytes - self._given

    def reset(self) -> None:
        """Take back every range; using an old one afterwards overlaps a new one."""
        for block in self._blocks:
            block.used = 0
        self._given = 0

    def destroy(self) -> None:
        """Give the memory back. Ranges of this arena are dead afterwards."""
        if not self.alive:
            return
        self.alive = False
        for block in self._blocks:
            self._driver.destroy("Buffer", block.buffer)
            self._driver.destroy("Memory", block.memory, verb="Free")
            self._heaps.take(block.heap, -block.size)
        self._blocks.clear()
        self._driver.count("Arena", -1)

    def _add_block(self, size: int) -> _Block:
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
            | vk.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT
        )
        chain = None
        if self._caps.buffer_device_address:
            usage |= BUFFER_USAGE_SHADER_DEVICE_ADDRESS
            chain = struct("VkMemoryAllocateFlagsInfo", flags=MEMORY_ALLOCATE_DEVICE_ADDRESS)
        driver = self._driver
        about = f"{human_bytes(size)} for {self.purpose}"
        buffer = driver.create("Buffer", struct("VkBufferCreateInfo", size=size, usage=usage), about)
        memory = None
        try:
            needs = ffi.new("VkMemoryRequirements *")
            driver.fn.vkGetBufferMemoryRequirements(driver.device, buffer, needs)
            index = choose_memory_type(self._caps.memory_types, self._caps.heaps, needs.memoryTypeBits, self.kind)
            if index is None:
                raise FeatureMissing(
                    f"[memory] arena {self.purpose!r}: this device has no memory type of kind {self.kind!r}. Use kind 'device' and staged uploads"
                )
            kind = self._caps.memory_types[index]
            needed = int(needs.size)
            if needed > self._heaps.free(kind.heap):
                raise self._out_of_memory("memory check", needed, kind.heap)
            info = struct("VkMemoryAllocateInfo", chain, allocationSize=needed, memoryTypeIndex=index)
            try:
                memory = driver.create("Memory", info, verb="Allocate")
            except OutOfDeviceMemory as error:
                raise self._out_of_memory(error.call, needed, kind.heap) from error
            driver.call("vkBindBufferMemory", driver.device, buffer, memory, 0, about=about)
            address = 0
            if "host_visible" in kind.flags:
                where = ffi.new("void **")
                driver.call("vkMapMemory", driver.device, memory, 0, size, 0, where, about=about)
                address = int(ffi.cast("uintptr_t", where[0]))
        except DeviceError:
            driver.destroy("Buffer", buffer)
            if memory is not None:
                driver.destroy("Memory", memory, verb="Free")
            raise
        block = _Block(buffer, memory, size, kind.heap, address)
        self._heaps.take(kind.heap, size)
        self._blocks.append(block)
        return block

    def _out_of_memory(self, call: str, asked: int, heap: int) -> OutOfDeviceMemory:
        free = human_bytes(self._heaps.free(heap))
        return OutOfDeviceMemory(
            f"{call} failed: VK_ERROR_OUT_OF_DEVICE_MEMORY: asked {human_bytes(asked)} in heap {heap}, {free} free, for {self.purpose}",
            call=call,
            result="VK_ERROR_OUT_OF_DEVICE_MEMORY",
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
