"""Recording of command buffers that are replayed many times.

`Recorder` only collects commands. `finish` allocates and writes all descriptor sets at once and then emits the commands, so a dispatch
costs a few Python operations and a few driver calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from vkback.device.capabilities import Capabilities
from vkback.device.driver import NULL, Driver, Handle, check, ffi, struct, vk
from vkback.device.errors import DeviceError, DeviceLost, FeatureMissing
from vkback.device.kernel import Kernel
from vkback.device.memory import Arena, BufferRange
from vkback.device.queue import Ticket

Emit = Callable[[Any, Handle], None]


class Commands:
    """A recorded command buffer with its descriptor sets and timestamps. It can be submitted repeatedly,
    but is in flight only once at a time."""

    def __init__(
        self,
        driver: Driver,
        name: str,
        buffer: Handle,
        owned: list[tuple[str, Handle]],
        stamps: _Stamps | None,
        arenas: set[Arena],
        registry: set[Commands],
    ) -> None:
        """Use `Recorder.finish`. owned: what to destroy with these commands; arenas: whose memory they use; registry: of all live ones."""
        self.name = name
        self.buffer = buffer
        self.ticket: Ticket | None = None
        self._driver = driver
        self._owned = owned
        self._stamps = stamps
        self._arenas = arenas
        self._registry = registry
        registry.add(self)
        driver.count("Commands", 1)

    @property
    def alive(self) -> bool:
        return bool(self._owned)

    def wait(self) -> None:
        """Wait until the last submission of these commands is done."""
        if self.ticket is not None:
            self.ticket.wait()

    def check_usable(self) -> None:
        """Raises DeviceError if these commands, or memory that they use, have been destroyed."""
        if not self.alive:
            raise DeviceError(f"[commands] {self.name!r} is destroyed")
        for arena in self._arenas:
            if not arena.alive:
                raise DeviceError(f"[commands] {self.name!r} uses arena {arena.purpose!r}, which is destroyed. Record again")

    def timestamps(self) -> list[tuple[str, float]]:
        """(label, ns) of the last submission, in the order recorded; waits for it.

        Times count from an origin that is the device's own: only differences mean something.
        """
        if self._stamps is None:
            return []
        if self.ticket is None:
            raise DeviceError(f"[commands] {self.name!r} was never submitted, so it has no timestamps. Call device.submit first")
        self.wait()
        return self._stamps.read(self._driver)

    def destroy(self) -> None:
        """Wait for the last submission, then free the recording."""
        if self.alive:
            with contextlib.suppress(DeviceLost):
                self.wait()
            self.release()

    def release(self) -> None:
        """Free the recording without waiting; nothing of it may be in flight."""
        for kind, handle in self._owned:
            self._driver.destroy(kind, handle)
        self._owned = []
        self._registry.discard(self)
        self._driver.count("Commands", -1)


class _Stamps:
    """The query pool of a recording."""

    def __init__(self, pool: Handle, labels: list[str], caps: Capabilities) -> None:
        self._pool, self._labels = pool, labels
        self._period, self._bits = caps.timestamp_period, caps.timestamp_bits

    def read(self, driver: Driver) -> list[tuple[str, float]]:
        count = len(self._labels)
        if not count:
            return []
        ticks = np.zeros(count, np.uint64)
        flags = vk.VK_QUERY_RESULT_64_BIT
        data = ffi.cast("void *", ticks.ctypes.data)
        driver.call("vkGetQueryPoolResults", driver.device, self._pool, 0, count, ticks.nbytes, data, 8, flags)
        # The counter has `bits` valid bits and wraps; a step back by more than half its span is a wrap.
        span = 1 << self._bits
        times: list[tuple[str, float]] = []
        base = last = None
        for label, tick in zip(self._labels, ticks.tolist(), strict=True):
            tick &= span - 1
            if last is None:
                base, last = 0, tick
            elif tick < last and last - tick > span // 2:
                base = (base or 0) + span
            last = tick
            times.append((label, ((base or 0) + tick) * self._period))
        return times


Work = Literal["compute", "transfer"]


@functools.cache
def _scope_table() -> dict[Work, tuple[int, int, int]]:
    """Pipeline stage, write access and read access of each kind of work."""
    return {
        "compute": (vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, vk.VK_ACCESS_SHADER_WRITE_BIT, vk.VK_ACCESS_SHADER_READ_BIT),
        "transfer": (vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_ACCESS_TRANSFER_WRITE_BIT, vk.VK_ACCESS_TRANSFER_READ_BIT),
    }


@functools.cache
def barrier_of(before: frozenset[Work], after: frozenset[Work]) -> tuple[int, int, Any]:
    """Stages and memory barrier between what ran before and what comes after; an empty set means every kind of work."""
    table = _scope_table()
    from_stages = from_access = to_stages = to_access = 0
    for kind in before or table:
        from_stages |= table[kind][0]
        from_access |= table[kind][1]
    for kind in after or table:
        stage, write, read = table[kind]
        to_stages |= stage
        to_access |= write | read
    return from_stages, to_stages, struct("VkMemoryBarrier", srcAccessMask=from_access, dstAccessMask=to_access)


class Recorder:
    """Collects commands in order.

    Commands that touch the same memory need a `barrier()` between them. Each recording begins with one, so that recordings submitted one
    after another are ordered.
    """

    def __init__(self, driver: Driver, caps: Capabilities, queue_family: int, name: str, timestamps: int, registry: set[Commands]) -> None:
        if timestamps and not caps.timestamp_bits:
            raise FeatureMissing(f"[recorder] {name!r}: {caps.name} writes no timestamps on its compute queue. Record without them")
        self.name = name
        self._driver, self._caps, self._family, self._registry = driver, caps, queue_family, registry
        self._max_stamps = timestamps
        self._labels: list[str] = []
        self._steps: list[Emit] = []
        self._sets: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
        self._set_layouts: list[Handle] = []
        self._set_handles: Any = None
        self._max_groups = caps.max_workgroup_count
        self._max_range = caps.max_storage_buffer_range
        self._alignment = caps.min_storage_buffer_offset_alignment
        self._bound: Kernel | None = None
        self._query_pool: Handle = None
        self._arenas: set[Arena] = set()
        self._fenced = False
        self._spent = False
        self._kinds: set[Work] = set()
        self.barrier()

    def dispatch(self, kernel: Kernel, ranges: Sequence[BufferRange], push: bytes, groups: tuple[int, int, int], label: str = "") -> None:
        """Launch `groups` workgroups of a kernel; `ranges` are its bindings 0.. in order.

        Raises DeviceError for a wrong number of ranges or push bytes, or a limit of the device, with `label`.
        """
        x, y, z = groups
        most = self._max_groups
        if not (0 < x <= most[0] and 0 < y <= most[1] and 0 < z <= most[2]):
            raise DeviceError(
                f"[dispatch] {kernel.name} {label}: {groups} workgroups; {self._caps.name} takes 1 to {most} (maxComputeWorkGroupCount)"
            )
        bind = self._bind(kernel, ranges, push, label)

        def emit(fn: Any, cmd: Handle) -> None:
            bind(fn, cmd)
            fn.vkCmdDispatch(cmd, x, y, z)

        self._work(emit, kinds=("compute",))

    def _work(self, emit: Emit, *ranges: BufferRange, kinds: Sequence[Work]) -> None:
        self._steps.append(emit)
        self._fenced = False
        self._kinds.update(kinds)
        for r in ranges:
            self._arenas.add(r.arena)

    def _bind(self, kernel: Kernel, ranges: Sequence[BufferRange], push: bytes, label: str) -> Emit:
        if len(ranges) != kernel.bindings:
            raise DeviceError(f"[dispatch] {kernel.name} {label}: {len(ranges)} ranges for {kernel.bindings} bindings")
        if len(push) != kernel.push_bytes:
            raise DeviceError(f"[dispatch] {kernel.name} {label}: {len(push)} bytes of push constants, the kernel has {kernel.push_bytes}")
        for i, r in enumerate(ranges):
            self._arenas.add(r.arena)
            if r.size > self._max_range:
                raise DeviceError(
                    f"[dispatch] {kernel.name} {label}: binding {i}, {r.name!r}, has {r.size} bytes; {self._caps.name} binds at most "
                    f"{self._max_range} (maxStorageBufferRange). Cut it into shards"
                )
            if r.offset % self._alignment:
                raise DeviceError(
                    f"[dispatch] {kernel.name} {label}: binding {i}, {r.name!r}, begins at {r.offset}, no multiple of {self._alignment} "
                    "(minStorageBufferOffsetAlignment)"
                )
        key = (kernel.bindings, tuple((r.key, r.offset, r.size) for r in ranges))
        index = self._sets.setdefault(key, len(self._sets)) if ranges else 0
        if index == len(self._set_layouts) and ranges:
            self._set_layouts.append(kernel.set_layout)
        new_pipeline = kernel is not self._bound
        self._bound = kernel
        point = vk.VK_PIPELINE_BIND_POINT_COMPUTE
        stage = vk.VK_SHADER_STAGE_COMPUTE_BIT
        size = len(push)

        def bind(fn: Any, cmd: Handle) -> None:
            if new_pipeline:
                fn.vkCmdBindPipeline(cmd, point, kernel.pipeline)
            if kernel.bindings:
                fn.vkCmdBindDescriptorSets(cmd, point, kernel.layout, 0, 1, self._set_handles + index, 0, NULL)
            if size:
                fn.vkCmdPushConstants(cmd, kernel.layout, stage, 0, size, ffi.from_buffer(push))

        return bind

    def barrier(self) -> None:
        """Everything before is finished and its writes are visible to everything after: shaders, copies, fills."""
        if self._fenced:
            return
        self._fenced = True
        before, after = self._kinds, set[Work]()
        self._kinds = after

        def emit(fn: Any, cmd: Handle) -> None:
            # Only the stages that have work on either side: naming transfers between two dispatches costs an H200 1.9 us more a barrier.
            from_stages, to_stages, memory = barrier_of(frozenset(before), frozenset(after))
            fn.vkCmdPipelineBarrier(cmd, from_stages, to_stages, 0, 1, memory, 0, NULL, 0, NULL)

        self._steps.append(emit)

    def host_barrier(self) -> None:
        """Writes of the device before this are visible to the host once the submission is done."""
        work = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | vk.VK_PIPELINE_STAGE_TRANSFER_BIT
        written = vk.VK_ACCESS_SHADER_WRITE_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT
        barrier = struct("VkMemoryBarrier", srcAccessMask=written, dstAccessMask=vk.VK_ACCESS_HOST_READ_BIT)
        host = vk.VK_PIPELINE_STAGE_HOST_BIT
        self._steps.append(lambda fn, cmd: fn.vkCmdPipelineBarrier(cmd, work, host, 0, 1, barrier, 0, NULL, 0, NULL))

    def host_writes(self) -> None:
        """What the host wrote before this ran is visible to copies after it: also what it wrote since the submit, before it opened the gate
        that the submission waits for."""
        work = vk.VK_PIPELINE_STAGE_TRANSFER_BIT
        barrier = struct("VkMemoryBarrier", srcAccessMask=vk.VK_ACCESS_HOST_WRITE_BIT, dstAccessMask=vk.VK_ACCESS_TRANSFER_READ_BIT)
        host = vk.VK_PIPELINE_STAGE_HOST_BIT
        self._steps.append(lambda fn, cmd: fn.vkCmdPipelineBarrier(cmd, host, work, 0, 1, barrier, 0, NULL, 0, NULL))

    def copy(self, src: BufferRange, dst: BufferRange) -> None:
        """Copy `src` to `dst`, which must be equally long and not overlap it."""
        if src.size != dst.size:
            raise DeviceError(f"[copy] {src.name!r} has {src.size} bytes, {dst.name!r} {dst.size}; slice one of them")
        if src.key == dst.key and src.offset < dst.offset + dst.size and dst.offset < src.offset + src.size:
            raise DeviceError(f"[copy] {src.name!r} at {src.offset} and {dst.name!r} at {dst.offset}, {src.size} bytes, overlap")
        region = struct("VkBufferCopy", srcOffset=src.offset, dstOffset=dst.offset, size=src.size)
        self._work(lambda fn, cmd: fn.vkCmdCopyBuffer(cmd, src.handle, dst.handle, 1, region), src, dst, kinds=("transfer",))

    def fill(self, dst: BufferRange, word: int) -> None:
        """Fill with a 32-bit word; offset and size must be multiples of 4."""
        if dst.offset % 4 or dst.size % 4:
            raise DeviceError(f"[fill] {dst.name!r}: {dst.size} bytes at {dst.offset}; both must be multiples of 4")
        self._work(lambda fn, cmd: fn.vkCmdFillBuffer(cmd, dst.handle, dst.offset, dst.size, word & 0xFFFFFFFF), dst, kinds=("transfer",))

    def timestamp(self, label: str) -> None:
        """Record the time at which everything before this is finished."""
        index = len(self._labels)
        if index >= self._max_stamps:
            raise DeviceError(f"[recorder] {self.name!r} was made for {self._max_stamps} timestamps; {label!r} is one more")
        self._labels.append(label)
        stage = vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
        self._steps.append(lambda fn, cmd: fn.vkCmdWriteTimestamp(cmd, stage, self._query_pool, index))

    def finish(self) -> Commands:
        """Write the descriptor sets, emit everything, and return the replayable commands. The recorder cannot be used afterwards."""
        if self._spent:
            raise DeviceError(f"[recorder] {self.name!r} is already finished")
        self._spent = True
        driver, fn = self._driver, self._driver.fn
        owned: list[tuple[str, Handle]] = []
        try:
            if self._sets:
                owned.append(("DescriptorPool", self._write_sets()))
            stamps = None
            if self._labels:
                count = len(self._labels)
                info = struct("VkQueryPoolCreateInfo", queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=count)
                self._query_pool = driver.create("QueryPool", info, f"{count} timestamps of {self.name}")
                owned.append(("QueryPool", self._query_pool))
                stamps = _Stamps(self._query_pool, self._labels, self._caps)
            pool = driver.create("CommandPool", struct("VkCommandPoolCreateInfo", queueFamilyIndex=self._family), self.name)
            owned.append(("CommandPool", pool))
            info = struct("VkCommandBufferAllocateInfo", commandPool=pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1)
            out = ffi.new("VkCommandBuffer *")
            driver.call("vkAllocateCommandBuffers", driver.device, info, out, about=self.name)
            cmd = out[0]
            check(fn.vkBeginCommandBuffer(cmd, struct("VkCommandBufferBeginInfo")), "vkBeginCommandBuffer", self.name)
            if self._labels:
                fn.vkCmdResetQueryPool(cmd, self._query_pool, 0, len(self._labels))
            for emit in self._steps:
                emit(fn, cmd)
            check(fn.vkEndCommandBuffer(cmd), "vkEndCommandBuffer", f"{self.name}, {len(self._steps)} commands")
        except DeviceError:
            for kind, handle in owned:
                driver.destroy(kind, handle)
            raise
        self._steps.clear()
        return Commands(driver, self.name, cmd, owned, stamps, self._arenas, self._registry)

    def _write_sets(self) -> Handle:
        """Allocate every set in one call and write all in another; returns the pool."""
        driver = self._driver
        keys = list(self._sets)
        total = sum(bindings for bindings, _ in keys)
        sizes = struct("VkDescriptorPoolSize", type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=total)
        info = struct("VkDescriptorPoolCreateInfo", maxSets=len(keys), poolSizeCount=1, pPoolSizes=sizes)
        about = f"{len(keys)} descriptor sets of {self.name}"
        pool = driver.create("DescriptorPool", info, about)
        layouts = ffi.new("VkDescriptorSetLayout[]", self._set_layouts)
        handles = ffi.new("VkDescriptorSet[]", len(keys))
        info = struct("VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=len(keys), pSetLayouts=layouts)
        try:
            driver.call("vkAllocateDescriptorSets", driver.device, info, handles, about=about)
        except DeviceError:
            driver.destroy("DescriptorPool", pool)
            raise
        # VkDescriptorBufferInfo is three 64-bit numbers: buffer, offset, range.
        ranges = np.array([r for _, key in keys for r in key], np.uint64).reshape(-1, 3)
        infos = ffi.cast("VkDescriptorBufferInfo *", ranges.ctypes.data)
        writes = ffi.new("VkWriteDescriptorSet[]", len(keys))
        first = 0
        for i, (bindings, _) in enumerate(keys):
            w = writes[i]
            w.sType = vk.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
            w.dstSet = handles[i]
            w.descriptorCount = bindings
            w.descriptorType = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
            w.pBufferInfo = infos + first
            first += bindings
        driver.fn.vkUpdateDescriptorSets(driver.device, len(keys), writes, 0, NULL)
        self._set_handles = handles
        return pool
