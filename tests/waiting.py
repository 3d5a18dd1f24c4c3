"""How tests wait for what another thread or process does. A busy machine may stop either for seconds at any place: no test counts on how
long something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 300.0
"""What must happen has happened after so long, or it never will. A test that passes waits no longer than it takes."""


def wait_until(happened: Callable[[], Any], what: str | Callable[[], object] = "it", seconds: float = PATIENCE_S) -> Any:
    """What `happened` returns as soon as that is true. Raises AssertionError, which says `what` did not happen."""
    until = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < until, f"{what if isinstance(what, str) else what()} did not happen within {seconds:g} s"
        time.sleep(0.002)
    return found
