"""Barrier-free stages on trial: what a program's first run makes must have the bits that all barriers give."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]

TIMED_OUT = "a spin-wait timed out"


class BarrierTrial:
    """Compares the first barrier-free run of each program with one that has all barriers. Programs go by a key."""

    def __init__(self) -> None:
        self._tried: set[Hashable] = set()

    def due(self, key: Hashable) -> bool:
        """Whether a program has had no trial yet."""
        return key not in self._tried

    def fault(self, key: Hashable, what: str, *, timed_out: bool, found: Callable[[], Values], with_barriers: Callable[[], Values]) -> str:
        """Why the run that has just ended is worth nothing, and barriers are needed; "" if it is sound.

        found          what it made
        with_barriers  runs the same with all barriers; what that made. Called after `found`, once for each key
        """
        if timed_out:
            return TIMED_OUT
        if not self.due(key):
            return ""
        self._tried.add(key)
        made, wanted = found(), with_barriers()
        same = np.array_equal(made.view(np.uint32), wanted.view(np.uint32))
        return "" if same else f"{what} differ from those with barriers"

    def forget(self) -> None:
        """Programs are made anew: each has its trial again."""
        self._tried.clear()
