"""Compiles the kernels of a model, with progress on stderr, and accounts for the time, which no speed may contain."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from vkback.device import Device
from vkback.engine.load_bar import LoadBar
from vkback.ops.dispatch import Dispatch
from vkback.program import CompileTotals, KernelKey, OnKernel, compile_kernels, kernel_keys
from vkback.shader import ShaderLibrary
from vkback.terminal import redraws
from vkback.units import counted


class KernelCompiler:
    """Compiles the kernels of one device once, and keeps count.

    totals  kernels made ready so far and the time that took
    """

    def __init__(self, device: Device, library: ShaderLibrary, *, progress: bool) -> None:
        """progress: show a bar, or where stderr is no terminal print a line, whenever something is compiled."""
        self.totals = CompileTotals()
        self._device, self._library, self._progress = device, library, progress
        self._known: set[KernelKey] = set()
        self._on_kernel: OnKernel | None = None
        self._load_bar: LoadBar | None = None

    @contextmanager
    def shown_by(self, bar: LoadBar) -> Iterator[None]:
        """The bar of a load tells of kernels that are compiled meanwhile."""
        self._load_bar = bar
        try:
            yield
        finally:
            self._load_bar = None

    @contextmanager
    def preparing(self, dispatches: Iterable[Dispatch]) -> Iterator[None]:
        """One bar for the kernels of these dispatches, which are compiled meanwhile. All time inside counts as compile time."""
        if self._on_kernel is not None:
            yield
            return
        begun = time.perf_counter()
        try:
            if self._load_bar is not None:
                self._load_bar.plans()
            missing = len(self._missing(dispatches))  # which plans what gives them
            with kernel_progress(missing, self._progress, self._load_bar) as self._on_kernel:
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
def kernel_progress(total: int, shown: bool, load_bar: LoadBar | None = None) -> Iterator[OnKernel]:
    """A function to call for each of `total` kernels that is ready. The bar goes away at the end; the line comes with the first kernel.
    load_bar: where there is one already, it tells."""
    if not (shown and total):
        yield lambda: None
        return
    if not redraws(sys.stderr):
        first = Lock()

        def say_once() -> None:
            if first.acquire(blocking=False):
                print(f"vkback: preparing {counted(total, 'kernel')}", file=sys.stderr, flush=True)

        yield say_once
        return
    if load_bar is not None:
        with load_bar.compiles(total) as on_kernel:
            yield on_kernel
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("kernels", total=total)

        def on_kernel() -> None:
            bar.advance(task)
            if bar.tasks[task].finished:  # drivers on the CPU compile to machine code when a kernel first runs
                bar.update(task, description="kernels, first run")

        yield on_kernel
