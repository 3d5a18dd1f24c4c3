"""Where the commands start: an interrupt ends them quietly from the first moment, also while their modules are imported."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

INTERRUPTED = 130
"""What typer returns after a KeyboardInterrupt: the exit code of Ctrl-C."""


def vkback() -> None:
    _start("vkback.cli.main")


def vkbench() -> None:
    _start("vkback.cli.vkbench")


def _start(module: str) -> None:
    try:
        import_module(module).main()
    except SystemExit:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the exit code stands, and the interpreter is not ended within its own end
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        raise
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # threads of a half imported module may still run
