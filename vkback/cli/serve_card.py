"""The process of one card of a server on several: `python -m vkback.cli.serve_card ARGS` is `vkback ARGS` that ends with its front."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress


def _end_with_front() -> None:
    """The front holds the other end of stdin."""
    with suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    threading.Thread(target=_end_with_front, daemon=True).start()
    from vkback.cli.start import vkback

    vkback()


if __name__ == "__main__":
    main()
