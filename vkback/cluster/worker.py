"""A worker: one process with one device, which runs units of work for whoever is connected to the same scheduler.

It ends when the scheduler is gone or when its launcher is; a device that was lost ends it, too. The launcher (vkback/cluster/launch.py)
then starts it anew, so that a new process opens the device.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

import vkback
from vkback.autotune.journal import kernel_identity
from vkback.device import Device
from vkback.device.errors import DeviceLost
from vkback.device.errors import Timeout as DeviceTimeout
from vkback.errors import VkbackError
from vkback.report.build import build_info
from vkback.shader import ShaderLibrary
from vkback.shader.compiler import stop_programs

T = TypeVar("T")

LOST_SCHEDULER, LOST_DEVICE, LOST_LAUNCHER = 3, 4, 5
"""Exit codes."""

WATCH_S = 0.2
ONCE_S = 15.0
"""How long a worker looks for its scheduler that is not to wait for one."""
RETRY_S = 1.0
"""Between two attempts to reach a scheduler that is not there."""


class AbandonedError(VkbackError):
    """Nobody waits for this unit any more."""


@dataclass
class Station:
    """What units of a worker share.

    device   the selector of its device
    threads  cores that are this worker's
    """

    device: str
    threads: int
    about: Mapping[str, Any]
    _kept: tuple[Any, ExitStack, Any] | None = field(default=None, repr=False)

    def kept(self, key: Any, make: Callable[[ExitStack], T]) -> T:
        """What `make` made for this key, now or for a unit before; what was made for another key is closed first."""
        if self._kept is not None and self._kept[0] != key:
            self.close()
        if self._kept is None:
            stack = ExitStack()
            try:
                self._kept = key, stack, make(stack)
            except BaseException:
                stack.close()
                raise
        made: T = self._kept[2]
        return made

    def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()


Tell = Callable[[Mapping[str, Any]], None]
"""Sends a message, plain values, to the command that the unit is for. Raises AbandonedError where that is gone."""

_station: Station | None = None


def describe() -> dict[str, Any]:
    """Of a worker: host, device, driver, build, kernels, and the device's capabilities."""
    assert _station is not None
    return dict(_station.about)


def execute(function: str, args: Mapping[str, Any], topic: str) -> dict[str, Any]:
    """Run a unit: {"value": what it came to}, or {"error": why not, "lost": whether the device is lost}.

    function  "module:name" within vkback: of a Station, the arguments and a Tell
    """
    assert _station is not None
    module, _, name = function.partition(":")
    if not module.startswith("vkback."):
        return {"error": f"[hosts] {function}: expected a function of vkback", "lost": False}
    try:
        made = getattr(import_module(module), name)(_station, args, _teller(topic))
        return {"value": json.loads(json.dumps(made))}  # plain, as a journal would give it back
    except (DeviceLost, DeviceTimeout) as e:
        threading.Timer(1.0, os._exit, (LOST_DEVICE,)).start()  # once the answer is on its way
        return {"error": str(e), "lost": True}
    except VkbackError as e:
        return {"error": str(e), "lost": False}
    except Exception as e:  # a fault of one unit must not take the others with it
        traceback.print_exc()
        return {"error": f"[hosts] {type(e).__name__}: {e}", "lost": False}


def _teller(topic: str) -> Tell:
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def tell(message: Mapping[str, Any]) -> None:
        task = worker.state.tasks.get(key)
        if task is None or task.state == "cancelled":
            raise AbandonedError(f"[hosts] nobody waits for {key} any more")
        worker.log_event(topic, {**message, "unit": key})

    return tell


def about_device(selector: str) -> dict[str, Any]:
    """What `describe` tells. Raises what opening the device raises."""
    with Device.open(selector or None, compile_only="auto") as opened:
        caps = opened.caps
        return {
            "host": socket.gethostname(),
            "device": caps.name,
            "driver": f"{caps.driver_name} {caps.driver_info}".strip(),
            "uuid": caps.uuid,
            "index": opened.index,
            "software": caps.software,
            "build": build_info()[0],
            "version": vkback.__version__,
            "kernels": kernel_identity(ShaderLibrary()),
            "caps": caps.to_dict(),
        }


def serve(scheduler: str, selector: str, name: str, *, once: bool = False) -> None:
    """Run as a worker of a scheduler until that, or the launcher, is gone; never returns. once: end where no scheduler is there, too."""
    global _station
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, and its end this process
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        about = about_device(selector)
    except VkbackError as e:
        print(f"vkback worker: {e}", file=sys.stderr, flush=True)
        os._exit(LOST_DEVICE)
    threads = int(os.environ.get("LP_NUM_THREADS") or 0) or os.cpu_count() or 1
    _station = Station(selector, threads, {**about, "name": name, "pid": os.getpid()})
    asyncio.run(_work(scheduler, name, once))


def _end_with_launcher() -> None:
    """The launcher holds the other end of stdin."""
    with suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1):
            pass
    _end(LOST_LAUNCHER)


def _end(code: int) -> None:
    stop_programs()
    time.sleep(WATCH_S)  # in which the folders of compilers that were stopped are removed
    os._exit(code)


async def _work(scheduler: str, name: str, once: bool) -> None:
    from distributed import Worker
    from distributed.core import Status

    for logger in ("distributed", "tornado"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # what matters of these, launcher and command say
    said = False
    with tempfile.TemporaryDirectory(prefix="vkback-worker-", ignore_cleanup_errors=True) as folder:
        while True:
            worker = Worker(
                scheduler, name=name, nthreads=1, local_directory=folder, memory_limit=0, dashboard=False, dashboard_address=None
            )
            try:
                await asyncio.wait_for(worker.start(), ONCE_S if once else None)  # else it tries for ever itself
                break
            except Exception as e:  # whatever a connection raises
                if once:
                    _end(LOST_SCHEDULER)
                if not said:
                    print(
                        f"vkback worker: {name}: no scheduler at {scheduler} yet ({type(e).__name__}); it is tried again", file=sys.stderr
                    )
                said = True
                with suppress(Exception):
                    await worker.close(timeout=1, executor_wait=False)
                await asyncio.sleep(RETRY_S)
        print(f"vkback worker at {worker.address}: {name}", file=sys.stderr, flush=True)
        while worker.status in (Status.running, Status.paused, Status.init):
            await asyncio.sleep(WATCH_S)
    _end(LOST_SCHEDULER)
