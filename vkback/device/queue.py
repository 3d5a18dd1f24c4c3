"""The queue: submission, completion in order on one timeline semaphore, bounded waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vkback.device.driver import NULL, Driver, Handle, check, ffi, struct, vk
from vkback.device.errors import DeviceLost, Timeout

if TYPE_CHECKING:
    from vkback.device.recorder import Commands

WAIT_S = 60.0
"""Default time limit of every wait. Drivers reset a hung GPU after 2 to 10 s, so a wait this long means a hang that no driver noticed."""

CPU_WAIT_S = 3600.0
"""The same for a CPU driver: no watchdog stops it, and other processes may occupy the machine for minutes."""

SLICE_S = 0.1
"""Waits are cut into slices so that Ctrl-C gets through."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """One submission; done when the queue's timeline reaches `value`."""

    queue: Queue
    value: int
    label: str

    @property
    def done(self) -> bool:
        """Whether the device has finished; never waits. Raises DeviceLost."""
        return self.queue.completed() >= self.value

    def wait(self, timeout_s: float | None = None, *, spin_s: float = 0.0) -> None:
        """Block until done. Raises Timeout after `timeout_s` (default: the queue's), DeviceLost if the device stopped.

        spin_s  poll for so long before sleeping: waking up takes tens of microseconds
        """
        self.queue.wait(self.value, self.queue.wait_s if timeout_s is None else timeout_s, self.label, spin_s)


class Gate:
    """A timeline semaphore that the host signals, and that submissions may wait for: they are queued before it is known when they may run,
    which a submit at that time would cost tens of microseconds more."""

    def __init__(self, driver: Driver) -> None:
        """Use `Device.gate`."""
        self._driver = driver
        self.handle = timeline(driver)
        self._signal = struct("VkSemaphoreSignalInfo", semaphore=self.handle)
        self.value = 0
        self.last_value = 0

    def next(self) -> int:
        """The value that the next submission waits for."""
        self.last_value += 1
        return self.last_value

    def open(self, value: int) -> None:
        """Let what waits for `value`, or less, run. What the host wrote before this is visible to it (`Recorder.host_writes`)."""
        if value > self.value:
            self._signal.value = value
            self._driver.call("vkSignalSemaphore", self._driver.device, self._signal)
            self.value = value

    def destroy(self) -> None:
        """Nothing may wait for it."""
        self._driver.destroy("Semaphore", self.handle)


def timeline(driver: Driver) -> Handle:
    """A timeline semaphore at 0."""
    kind = struct("VkSemaphoreTypeCreateInfo", semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
    return driver.create("Semaphore", struct("VkSemaphoreCreateInfo", kind))


class Queue:
    """The device's one queue. Submissions complete in order; each sees the memory of those before it (see `Recorder`)."""

    def __init__(self, driver: Driver, handle: Handle, explain_loss: Callable[[], str], wait_s: float = WAIT_S) -> None:
        self._driver, self._handle, self._explain_loss = driver, handle, explain_loss
        self.wait_s = wait_s
        self._semaphore = timeline(driver)
        self._lock = threading.Lock()
        self._submitted = 0
        self._completed = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=64)
        self._signal = ffi.new("uint64_t *")
        self._semaphores = ffi.new("VkSemaphore[]", [self._semaphore])
        signals = struct("VkTimelineSemaphoreSubmitInfo", signalSemaphoreValueCount=1, pSignalSemaphoreValues=self._signal)
        self._info = struct("VkSubmitInfo", signals, signalSemaphoreCount=1, pSignalSemaphores=self._semaphores)
        self._wait_value, self._gate = ffi.new("uint64_t *"), ffi.new("VkSemaphore[1]")
        self._gate_stage = ffi.new("uint32_t *", vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | vk.VK_PIPELINE_STAGE_TRANSFER_BIT)
        gated = struct(
            "VkTimelineSemaphoreSubmitInfo",
            signalSemaphoreValueCount=1,
            pSignalSemaphoreValues=self._signal,
            waitSemaphoreValueCount=1,
            pWaitSemaphoreValues=self._wait_value,
        )
        self._gated_info = struct(
            "VkSubmitInfo",
            gated,
            signalSemaphoreCount=1,
            pSignalSemaphores=self._semaphores,
            waitSemaphoreCount=1,
            pWaitSemaphores=self._gate,
            pWaitDstStageMask=self._gate_stage,
        )

    @property
    def last(self) -> Ticket:
        """The ticket of everything submitted so far."""
        return Ticket(self, self._submitted, "all submitted work")

    def submit(self, commands: Sequence[Commands], gate: Gate | None = None) -> Ticket:
        """Submit recordings in order. One that is still in flight from an earlier submit is waited for first. gate: they run once it is
        opened with its `last_value`."""
        for c in commands:
            c.check_usable()
            c.wait()
        label = " + ".join(c.name for c in commands)
        with self._lock:
            buffers = ffi.new("VkCommandBuffer[]", [c.buffer for c in commands])
            self._signal[0] = self._submitted + 1
            info = self._info
            if gate is not None:
                info, self._gate[0], self._wait_value[0] = self._gated_info, gate.handle, gate.last_value
            info.commandBufferCount = len(commands)
            info.pCommandBuffers = buffers
            code = self._driver.fn.vkQueueSubmit(self._handle, 1, info, NULL)
            self._check(code, "vkQueueSubmit", label)
            self._submitted += 1
            ticket = Ticket(self, self._submitted, label)
            self._recent.append((ticket.value, label))
        for c in commands:
            c.ticket = ticket
        return ticket

    def completed(self) -> int:
        """The current value of the timeline."""
        now = ffi.new("uint64_t *")
        self._check(self._driver.fn.vkGetSemaphoreCounterValue(self._driver.device, self._semaphore, now), "vkGetSemaphoreCounterValue", "")
        self._completed = max(self._completed, int(now[0]))
        return self._completed

    def wait(self, value: int, timeout_s: float, label: str, spin_s: float = 0.0) -> None:
        """Block until the timeline reaches `value`; poll for the first `spin_s`.

        A slice counts as no more than its length: a process that was stopped, or slept with its machine, has not waited meanwhile.
        """
        if value <= self._completed:
            return
        start = time.monotonic()
        while time.monotonic() < start + min(spin_s, timeout_s):
            if self.completed() >= value:
                return
        target = ffi.new("uint64_t *", value)
        info = struct("VkSemaphoreWaitInfo", semaphoreCount=1, pSemaphores=self._semaphores, pValues=target)
        left = timeout_s
        while True:
            begun, length = time.monotonic(), min(max(left, 0.0), SLICE_S)
            code = self._driver.fn.vkWaitSemaphores(self._driver.device, info, int(length * 1e9))
            if code != vk.VK_TIMEOUT:
                self._check(code, "vkWaitSemaphores", label)
                self._completed = max(self._completed, value)
                return
            if not length:
                raise Timeout(
                    f"vkWaitSemaphores failed: VK_TIMEOUT: {label} has not finished after {timeout_s:g} s (submission {value}, the "
                    f"device has finished {self.completed()}). Submit less at once or raise timeout_s",
                    call="vkWaitSemaphores",
                    result="VK_TIMEOUT",
                )
            left -= min(time.monotonic() - begun, length)

    def destroy(self) -> None:
        """Destroy the semaphore; nothing may be in flight."""
        self._driver.destroy("Semaphore", self._semaphore)

    def _check(self, code: int, call: str, label: str) -> None:
        if code == vk.VK_ERROR_DEVICE_LOST:
            unfinished = ", ".join(f"{value}: {name}" for value, name in self._recent if value > self._completed) or label or "none"
            raise DeviceLost(
                f"{call} failed: VK_ERROR_DEVICE_LOST: the device stopped; submissions not known to be finished: {unfinished}."
                f"{self._explain_loss()} Close this Device and open it again",
                call=call,
                result="VK_ERROR_DEVICE_LOST",
            )
        check(code, call, label)
