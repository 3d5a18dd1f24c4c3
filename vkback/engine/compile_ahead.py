"""Schedules and kernels that a text may come to want, planned and compiled by threads beside what runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from threading import Thread

from vkback.device import Device, Kernel
from vkback.errors import VkbackError
from vkback.plan.schedule import Schedule
from vkback.program.compile import Kernels
from vkback.shader import ShaderLibrary


class CompileAhead:
    """Begins at once, and takes one processor at most. Faults are those of whoever needs the kernel later."""

    def __init__(self, device: Device, library: ShaderLibrary, schedules: Sequence[Callable[[], Schedule]]) -> None:
        """schedules: what plans them, called by another thread one after the other."""
        self._kernels = Kernels(device, library, threads=1)
        self._schedules, self._begun = schedules, list[Future[Kernel]]()
        self._closed = False
        self._planner = Thread(target=self._run, daemon=True)
        self._planner.start()

    def _run(self) -> None:
        for make in self._schedules:
            if self._closed:
                return
            with suppress(VkbackError):
                self._begun += self._kernels.start(make().dispatches())

    def wait(self) -> None:
        """Until all that can be compiled is."""
        self._planner.join()
        for kernel in self._begun:
            with suppress(VkbackError, CancelledError):
                kernel.result()

    def close(self) -> None:
        """What has not begun is left."""
        self._closed = True
        self._planner.join()
        self._kernels.close()
