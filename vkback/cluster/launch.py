"""Starts workers, one a device, and starts those anew that end: their device was lost, a driver took the process with it, or the
scheduler went away and may come back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from vkback.cluster.errors import ClusterError
from vkback.cluster.worker import LOST_DEVICE, LOST_SCHEDULER
from vkback.device import devices_for
from vkback.harness.suite import blocked_interrupts, one_blas_thread

QUICK_S = 10.0
"""A worker that ends before has not worked."""
QUICK_ENDS = 4
"""So often in a row it may, then it is left alone."""
END_S = 5.0


@dataclass
class _Child:
    selector: str
    name: str
    process: subprocess.Popen[bytes]
    begun: float
    quick: int = 0
    again_at: float = 0.0


@dataclass(frozen=True)
class Placed:
    """A device that gets a worker. selector: what opens it; name: of the worker."""

    selector: str
    name: str
    software: bool


def placed(selectors: Sequence[str] | None, count: int | None = None) -> list[Placed]:
    """Devices to be given a worker each.

    selectors  index, part of a name, or UUID; one that comes twice gets two workers; None: every GPU, or where there is none the CPU driver
    count      so many workers, dealt out over these
    Raises NoDevice and UnknownDevice.
    """
    listed = devices_for(selectors)
    wanted = [listed[i % len(listed)] for i in range(count)] if count else listed
    host, seen, found = socket.gethostname(), dict[str, int](), []
    for index, caps in wanted:
        again = seen[caps.uuid] = seen.get(caps.uuid, 0) + 1
        name = f"{host}/{index}/{caps.uuid[:8]}" + (f"/{again}" if again > 1 else "")
        found.append(Placed(str(index), name, caps.software))
    return found


class Launcher:
    """Workers of this machine for a scheduler. A context manager: at its end they end.

    told  gets a line for whatever happens to one
    """

    def __init__(
        self,
        scheduler: str,
        where: Sequence[Placed],
        told: Callable[[str], None],
        *,
        once: bool = False,
        ended: Callable[[str, str], object] | None = None,
    ) -> None:
        """once: workers end with their scheduler, and do not wait for another. ended: told the name of a worker that has ended and is
        started again, and why it has, in place of `told`."""
        self._scheduler, self._told, self._once = scheduler, told, once
        self._ended = ended or (lambda name, why: told(f"{name}: {why}"))
        self._threads = max(1, (os.cpu_count() or 1) // len(where))
        self._children = [self._started(each.selector, each.name) for each in where]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._children:
            if child.process.stdin is not None:
                child.process.stdin.close()
        until = time.monotonic() + END_S
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
            child.process.kill()
            child.process.wait()

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def _started(self, selector: str, name: str) -> _Child:
        # A CPU driver takes all cores for itself: workers share them.
        env = {**os.environ, "LP_NUM_THREADS": os.environ.get("LP_NUM_THREADS") or str(self._threads)}
        with one_blas_thread() if self._threads == 1 else nullcontext(), blocked_interrupts():
            env = {**os.environ, **env}
            process = subprocess.Popen(
                [sys.executable, "-m", "vkback.cluster", self._scheduler, selector, name, *(["once"] if self._once else [])],
                stdin=subprocess.PIPE,
                env=env,
            )
        return _Child(selector, name, process, time.monotonic())

    def look(self) -> int:
        """Start anew what has ended; how many there are that work or will again."""
        now, left = time.monotonic(), 0
        for i, child in enumerate(self._children):
            code = child.process.poll()
            if code is None:
                left += 1
                continue
            if self._once and code == LOST_SCHEDULER:
                child.again_at = float("inf")
            if not child.again_at:
                quick = child.quick + 1 if now - child.begun < QUICK_S and code != LOST_SCHEDULER else 0
                if quick >= QUICK_ENDS:
                    child.again_at = float("inf")
                    self._told(f"{child.name}: ended {quick} times at once, exit code {code}; it is left alone")
                else:
                    child.quick, child.again_at = quick, now + min(8.0, 0.5 * 2**quick)
                    self._ended(child.name, f"{_why(code)}; it is started again")
            if child.again_at <= now:
                new = self._started(child.selector, child.name)
                new.quick = child.quick
                self._children[i] = new
            left += child.again_at != float("inf")
        return left

    def watch(self, every_s: float = 0.5) -> None:
        """Until nothing is left. Raises ClusterError then."""
        while self.look():
            time.sleep(every_s)
        raise ClusterError("[hosts] no worker of this machine works any more; the lines above say why")


def _why(code: int) -> str:
    if code == LOST_SCHEDULER:
        return "the scheduler is gone"
    if code == LOST_DEVICE:
        return "its device was lost or could not be opened"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
