"""Compiles the kernels of a model, reports how far it is, and accounts for the time, which no speed may contain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from vkback.device import Device
from vkback.events import Report, Reported, progress_log
from vkback.ops.dispatch import Dispatch
from vkback.program import CompileTotals, KernelKey, OnKernel, compile_kernels, kernel_keys
from vkback.shader import ShaderLibrary
from vkback.units import counted


class KernelCompiler:
    """Compiles the kernels of one device once, and keeps count.

    totals  kernels made ready so far and the time that took
    """

    def __init__(self, device: Device, library: ShaderLibrary, report: Report | None) -> None:
        self.totals = CompileTotals()
        self._device, self._library, self._report = device, library, report
        self._known: set[KernelKey] = set()
        self._on_kernel: OnKernel | None = None

    @contextmanager
    def preparing(self, dispatches: Iterable[Dispatch]) -> Iterator[None]:
        """One report for the kernels of these dispatches, which are compiled meanwhile. All time inside counts as compile time."""
        if self._on_kernel is not None:
            yield
            return
        begun = time.perf_counter()
        try:
            with reported_kernels(self._report, lambda: len(self._missing(dispatches))) as self._on_kernel:
                yield
        finally:
            self._on_kernel = None
            self.totals += CompileTotals(seconds=time.perf_counter() - begun)

    def compile(self, dispatches: Iterable[Dispatch]) -> None:
        """The kernels of dispatches, into the device's cache. Raises as `compile_kernels`."""
        dispatches = list(dispatches)
        missing = self._missing(dispatches)
        if not missing:
            return
        with self.preparing(dispatches):
            compile_kernels(self._device, self._library, [d for d in dispatches if kernel_keys([d])[0] in missing], self._on_kernel)
        self._known |= missing
        made = sum((variant.source, variant.defines) in self._library.compiled for variant, _, _ in missing)
        self.totals += CompileTotals(len(missing), made)

    def _missing(self, dispatches: Iterable[Dispatch]) -> set[KernelKey]:
        return set(kernel_keys(dispatches)) - self._known


@contextmanager
def reported_kernels(report: Report | None, expected: Callable[[], int]) -> Iterator[OnKernel]:
    """A function to call for each of so many kernels that is ready. expected: may take its time, as it plans what it counts."""
    first = Lock()
    with Reported(report, "compile") as work:
        total = expected()
        if total:
            work.expect(total)

        def on_kernel() -> None:
            if first.acquire(blocking=False):
                progress_log.info("preparing %s", counted(total, "kernel"))
            work.advance()

        yield on_kernel
