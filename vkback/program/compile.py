"""The kernels of dispatches: shaders and pipelines, compiled in parallel, counted and timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from vkback.device import Device, Kernel, KernelSpec
from vkback.ops.dispatch import Dispatch
from vkback.shader import ShaderLibrary, Variant
from vkback.units import counted

KernelKey = tuple[Variant, int, int]
"""A variant, its number of bindings and its bytes of push constants."""

AHEAD_BATCH = 64
"""Most shaders compiled in one go in the background: a compiler's start costs as much as several shaders."""

OnKernel = Callable[[], object]
"""Called once for each kernel that is ready, from any thread."""


@dataclass(frozen=True)
class CompileTotals:
    """How many kernels were prepared, how many of these were compiled from GLSL rather than found as SPIR-V, and the time it took."""

    kernels: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def __add__(self, other: CompileTotals) -> CompileTotals:
        return CompileTotals(self.kernels + other.kernels, self.compiled + other.compiled, self.seconds + other.seconds)

    def __sub__(self, other: CompileTotals) -> CompileTotals:
        return CompileTotals(self.kernels - other.kernels, self.compiled - other.compiled, self.seconds - other.seconds)

    def __str__(self) -> str:
        """Like "prepared 41 kernels in 9.8 s, 12 compiled from GLSL"; the others came as SPIR-V, and only the driver compiled them."""
        compiled = {0: "none", self.kernels: "all"}.get(self.compiled, str(self.compiled))
        return f"prepared {counted(self.kernels, 'kernel')} in {self.seconds:.1f} s, {compiled} compiled from GLSL"


def kernel_keys(dispatches: Iterable[Dispatch]) -> list[KernelKey]:
    """The distinct kernels of dispatches, in order."""
    return list(dict.fromkeys((d.kernel, len(d.args), len(d.push)) for d in dispatches))


def kernel_spec(library: ShaderLibrary, spirv: bytes, variant: Variant, bindings: int, push_bytes: int) -> KernelSpec:
    """What to ask the device layer for: a variant's SPIR-V with the number of buffers and push-constant bytes of its dispatches."""
    return KernelSpec(spirv, variant.name, bindings, push_bytes, library.specialization(variant), variant.subgroup_size)


def kernel_of(device: Device, library: ShaderLibrary, variant: Variant, bindings: int, push_bytes: int) -> Kernel:
    """The kernel of one variant, for a launch beside any program."""
    return _kernel(device, kernel_spec(library, library.spirv(variant), variant, bindings, push_bytes))


def dispatch_spec(d: Dispatch, library: ShaderLibrary) -> KernelSpec:
    """What to ask the device layer for, for one dispatch."""
    return kernel_spec(library, library.spirv(d.kernel), d.kernel, len(d.args), len(d.push))


def start_kernels(
    device: Device, library: ShaderLibrary, wanted: Iterable[KernelKey], pool: Executor, *, batch: int | None = None
) -> Iterator[tuple[KernelKey, Future[Kernel]]]:
    """Each kernel, its pipeline being compiled by `pool`, as soon as its shader is, while other shaders are still being compiled.

    batch  shaders of one call of the compiler, default the library's
    Raises CompileError with the faults of all shaders, after the kernels whose shaders have none.
    """
    users: dict[Variant, list[KernelKey]] = {}
    for key in wanted:
        users.setdefault(key[0], []).append(key)
    for variant, spirv in library.compile_each(users, batch):
        for key in users[variant]:
            yield key, pool.submit(_kernel, device, kernel_spec(library, spirv, *key))


def _kernel(device: Device, spec: KernelSpec) -> Kernel:
    return device.kernels([spec])[0]


def compile_kernels(
    device: Device, library: ShaderLibrary, dispatches: Iterable[Dispatch], on_kernel: OnKernel | None = None
) -> dict[KernelKey, Kernel]:
    """The kernels of dispatches.

    Raises CompileError with the faults of all shaders, or the device layer's error about the first kernel that it refuses.
    """
    wanted = kernel_keys(dispatches)
    under_way: dict[KernelKey, Future[Kernel]] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            for key, kernel in start_kernels(device, library, wanted, pool):
                under_way[key] = kernel
                if on_kernel is not None:
                    kernel.add_done_callback(lambda _: on_kernel())
            return {key: under_way[key].result() for key in wanted}
        finally:  # nobody waits for the others, where this is left early
            pool.shutdown(wait=False, cancel_futures=True)


class Kernels:
    """Compiles the kernels of dispatches in the background, each once: for those who know what they will run long before they run it."""

    def __init__(self, device: Device, library: ShaderLibrary, threads: int) -> None:
        self._device, self._library = device, library
        self._lock = Lock()
        self._found: dict[KernelKey, Future[Kernel]] = {}
        self._wanted: SimpleQueue[KernelKey | None] = SimpleQueue()
        self._closed = False
        self._pipelines = ThreadPoolExecutor(threads)
        self._shaders = Thread(target=self._compile, daemon=True)
        self._shaders.start()

    def start(self, dispatches: Iterable[Dispatch]) -> list[Future[Kernel]]:
        """Begin compiling what these dispatches need; a future for each."""
        started = []
        for d in dispatches:
            key = (d.kernel, len(d.args), len(d.push))
            with self._lock:
                if key not in self._found:
                    self._found[key] = Future()
                    self._wanted.put(key)
                started.append(self._found[key])
        return started

    def _compile(self) -> None:
        while (key := self._wanted.get()) is not None and not self._closed:
            batch = [key]
            while len(batch) < AHEAD_BATCH:
                try:
                    after = self._wanted.get_nowait()
                except Empty:
                    break
                if after is None:
                    return
                batch.append(after)
            left = dict.fromkeys(batch)
            with suppress(Exception):  # raised again below, for the kernel it is about
                for done in self._start(batch):
                    left.pop(done)
            for key in left:
                if self._closed:
                    return
                try:
                    for _ in self._start([key]):
                        pass
                except Exception as e:  # the thread that waits for the kernel gets it
                    self._found[key].set_exception(e)

    def _start(self, keys: Sequence[KernelKey]) -> Iterator[KernelKey]:
        """Start compiling pipelines, each as soon as its shader is compiled; the keys of those that were started."""
        for key, kernel in start_kernels(self._device, self._library, keys, self._pipelines, batch=AHEAD_BATCH):
            if self._closed:
                return
            kernel.add_done_callback(partial(_deliver, self._found[key]))
            yield key

    def trim(self, most: int) -> None:
        """Where more than `most` kernels are on the device, leave the half of it that was used last. Nothing may be running."""
        if len(self._found) <= most:
            return
        with self._lock:
            self._found = {key: kernel for key, kernel in self._found.items() if not kernel.done()}
        self._device.trim_kernels(most // 2)

    def close(self) -> None:
        """What has not begun is left."""
        self._closed = True
        self._wanted.put(None)
        self._shaders.join()
        self._pipelines.shutdown(cancel_futures=True)


def _deliver(target: Future[Kernel], made: Future[Kernel]) -> None:
    """What became of a pipeline, to the thread that waits for it; one that was never begun is left."""
    if made.cancelled():
        return
    if fault := made.exception():
        target.set_exception(fault)
    else:
        target.set_result(made.result())
