"""The device's own read rate: the roof that every kernel and every token is measured against."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from vkback.device import BufferRange, Device, Kernel, Kind
from vkback.ops.dispatch import MAX_GROUPS_X, pack_push
from vkback.shader import ShaderLibrary, Variant
from vkback.timing.launches import COLD_BYTES, span_us, warm_up

UNROLL = 4
SEED = 0x9E3779B9

GRIDS = [(t, g) for t in (128, 256, 512) for g in (1056, 2112, 4224)]
SOFTWARE_GRIDS = [(32, 16), (8, 64)]
"""Threads of a workgroup and number of workgroups that are tried."""
SOFTWARE_BYTES = 64 << 20
"""What is read on CPU drivers, beyond the caches of most; a second or two. The tests take less (tests/conftest.py)."""


@dataclass(frozen=True)
class ReadRate:
    """Best rate found in bytes a second, with the grid that reached it."""

    bytes_per_second: float
    nbytes: int
    threads: int
    groups: int

    @property
    def gb_s(self) -> float:
        return self.bytes_per_second / 1e9


def read_variants() -> list[Variant]:
    """The kernels of `measure_read_rate` and of the cost of a stage, on any device."""
    return [_read_variant(threads, UNROLL) for threads in sorted({t for t, _ in (*SOFTWARE_GRIDS, *GRIDS)})]


def _read_variant(threads: int, unroll: int) -> Variant:
    return Variant.of("probe/read.comp", {"UNROLL": unroll, "WG": threads})


def _read_kernel(device: Device, library: ShaderLibrary, threads: int, unroll: int) -> Kernel:
    variant = _read_variant(threads, unroll)
    return device.kernel(library.spirv(variant), name=variant.name, bindings=2, push_bytes=8)


def _fill(device: Device, source: BufferRange) -> None:
    rec = device.recorder("fill")
    rec.fill(source, SEED)
    device.run(rec)


HOST_BYTES = 256 << 20
"""What is read of the host's memory: PCIe takes 5 to 20 ms for it."""


def measure_read_rate(device: Device, library: ShaderLibrary, nbytes: int | None = None, kind: Kind = "device") -> ReadRate:
    """Read `nbytes` (default: far more than any cache, at most a quarter of what is free) with several grids; the best of them. kind: of
    memory.

    Timed with GPU timestamps, each grid the best of three runs after a warm-up.
    """
    software = device.caps.device_type == "cpu"
    limit = min(device.caps.max_storage_buffer_range, device.free_memory() // 4)
    size = min(nbytes or (SOFTWARE_BYTES if software else 2 << 30), limit) // (1 << 20) * (1 << 20)
    grids = SOFTWARE_GRIDS if software else GRIDS
    best = ReadRate(0.0, size, 0, 0)
    with device.arena("read rate", size + 4096, kind) as arena:
        source, sink = arena.alloc(size, "source"), arena.alloc(256, "sink")
        _fill(device, source)
        for threads, groups in grids:
            threads = min(threads, device.caps.max_workgroup_invocations)
            kernel = _read_kernel(device, library, threads, UNROLL)
            push = pack_push(size // (16 * threads * UNROLL), 1)
            rec = device.recorder("read", timestamps=2)
            rec.timestamp("start")
            rec.dispatch(kernel, [source, sink], push, (groups, 1, 1), "read")
            rec.barrier()
            rec.timestamp("end")
            commands = rec.finish()
            warm_up(device, commands, 0.02)
            rate = 1e6 * size / min(span_us(device, commands) for _ in range(3))
            commands.destroy()
            if rate > best.bytes_per_second:
                best = ReadRate(rate, size, threads, groups)
    return best


CHAIN = 64
"""Launches in a chain of plain reads."""

MIN_READ = 1 << 16
"""Bytes of the smallest plain read: one tile of the largest workgroup."""


def plain_read_us(device: Device, library: ShaderLibrary, nbytes: int) -> float:
    """Microseconds that a launch takes which only reads `nbytes` of cold data and waits for the one before: the best of several grids.

    The floor of a kernel that reads as much and must wait for its input; it stores nothing. Raises ValueError for less than MIN_READ.
    """
    if nbytes < MIN_READ:
        raise ValueError(f"a plain read takes at least {MIN_READ} bytes, got {nbytes}")
    software = device.caps.device_type == "cpu"
    step = -(-nbytes // 4096) * 4096
    copies = 2 if software else max(2, COLD_BYTES // step)
    launches = 4 if software else CHAIN
    best = math.inf
    with device.arena("plain read", copies * step + 4096, "device") as arena:
        source, sink = arena.alloc(copies * step, "source"), arena.alloc(256, "sink")
        _fill(device, source)
        for threads, unroll in ((32, 4),) if software else itertools.product((256, 512, 1024), (1, 2, 4)):
            threads = min(threads, device.caps.max_workgroup_invocations)
            kernel = _read_kernel(device, library, threads, unroll)
            tiles = nbytes // (16 * threads * unroll)
            for groups in sorted({g for g in (tiles, 528, 1056, 2112) if 0 < g <= min(tiles, MAX_GROUPS_X)}):
                rec = device.recorder("plain read", timestamps=2)
                rec.barrier()
                rec.timestamp("start")
                for i in range(launches):
                    if i:
                        rec.barrier()
                    part = source.slice(i % copies * step, tiles * 16 * threads * unroll)
                    rec.dispatch(kernel, [part, sink], pack_push(tiles, 1), (groups, 1, 1), "read")
                rec.timestamp("end")
                rec.host_barrier()
                commands = rec.finish()
                warm_up(device, commands, 0.01)
                best = min(best, *(span_us(device, commands) / launches for _ in range(3)))
                commands.destroy()
    return best
