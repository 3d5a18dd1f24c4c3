"""The launcher of workers on a host that distributed's SSHCluster has reached: it takes the place of the worker that this expects there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

from vkback.cluster.launch import Launcher, placed


class HostWorkers:
    """Workers for the devices of this host, as `distributed.cli.dask_spec` starts and ends them. devices: selectors, [] for all."""

    def __init__(self, scheduler: str, devices: Sequence[str] = (), name: Any = None) -> None:
        self._scheduler, self._devices = scheduler, list(devices)
        self._stack = ExitStack()
        self._ended = asyncio.Event()

    def __await__(self) -> Generator[Any, None, HostWorkers]:
        return self._start().__await__()

    async def _start(self) -> HostWorkers:
        def report(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        self._launcher = self._stack.enter_context(Launcher(self._scheduler, placed(self._devices or None), report, once=True))
        print("vkback worker at this host", file=sys.stderr, flush=True)  # what SSHCluster waits for
        return self

    async def finished(self) -> None:
        while not self._ended.is_set() and self._launcher.look():
            await asyncio.sleep(0.5)

    async def close(self, **_: Any) -> None:
        self._ended.set()
        await asyncio.to_thread(self._stack.close)
