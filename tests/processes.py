"""How tests start programs: with the signals, streams and terminals that they need, whatever those of the shell that runs the tests are.

`nohup make test &` leaves SIGINT and SIGHUP ignored in all that it starts, a builder of packages gives no terminal. A test that is about
either must not depend on it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from waiting import PATIENCE_S

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a program, unless it or its caller says otherwise."""


def run_program(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with no input; what it prints as text. The signals of ENDING end it. It has several times as long under
    Windows, where Wine alone takes 5 to 20 s for a program with numpy."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=timeout * (4 if sys.platform == "win32" else 1),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        check=check,
        preexec_fn=None if sys.platform == "win32" else let_signals_end,
    )


def free_port() -> int:
    """A port of 127.0.0.1 for a program that is about to start: none of those that systems give to whoever asks for any, which one of the
    programs beside this one may do before it has started."""
    for port in range(20000 + 31 * os.getpid() % 10000, 32000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port from 20000 to 32000 is free")


def let_signals_end() -> None:
    """In a process that is about to become another program: what the caller ignores or blocks, this one does not."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextmanager
def signals_as_usual() -> Iterator[None]:
    """Meanwhile the signals of ENDING do in this process what they do in one that a terminal started."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number in ENDING:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def new_terminal() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Both sides of a terminal: the one that shows, and the one that programs write to, closed before the first is read to its end. Skips
    the test where there are none to be had."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    try:
        ours, theirs = pty.openpty()
    except OSError as e:
        pytest.skip(f"no pseudo-terminal can be opened here: {e}")
    with open(ours, "rb", buffering=0) as shows, open(theirs, "wb", buffering=0) as written:  # noqa: PTH123  descriptors
        yield shows, written
