"""Tells when other programs take memory of the device that a model counted on: its driver then moves memory to the host, without a word."""

from __future__ import annotations

import time

from vkback.device import Device
from vkback.events import log
from vkback.units import size_text

SLACK = 64 << 20
"""Bytes that a driver may take itself."""

CHECK_S = 5.0
"""Between two looks at the budget while texts are made: one takes microseconds, and at the end of a text."""


class MemoryWatch:
    """Compares what the driver leaves to this process (VK_EXT_memory_budget) with what it left before. Where it does not tell, there is
    nothing to say.

    One line is logged for each time that memory runs short, none while it stays so.
    """

    def __init__(self, device: Device, what: str) -> None:
        """what: that is on the device, for the lines."""
        self._device, self._what = device, what
        self._left, self._own = device.budget_left(), device.own_bytes
        self._short = False
        self._looked = time.monotonic()

    def loaded(self) -> None:
        """After a load: whether others took memory meanwhile that the plan counted on."""
        left, own = self._device.budget_left(), self._device.own_bytes
        if left is None or self._left is None:
            return
        taken = self._left - (own - self._own) - left
        if taken > SLACK:
            self._say(f"other programs took {size_text(taken)} of {self._device.caps.name} while {self._what} was loaded", left)
            self._short = left < 0

    def look(self) -> None:
        """At a cheap moment: whether less is left than this process has taken. At most every CHECK_S seconds."""
        now = time.monotonic()
        if self._left is None or now - self._looked < CHECK_S:
            return
        self._looked = now
        left = self._device.budget_left()
        short = left is not None and left < -SLACK
        if short and not self._short and left is not None:
            self._say(f"other programs take memory of {self._device.caps.name} that {self._what} has", left)
        self._short = short

    def _say(self, what: str, left: int) -> None:
        rest = f"{size_text(left)} are left" if left >= 0 else f"{size_text(-left)} more are in use than the driver leaves to this process"
        log.warning(
            "%s; %s. The driver may move memory to the host, and speed drop: end them, or load with less (--ctx, --n-cpu-moe)", what, rest
        )
