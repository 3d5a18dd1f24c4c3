"""What a load is waiting for, on a terminal: a line for weights, and one for what is done meanwhile. Elsewhere nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vkback.terminal import redraws

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Line = Literal["weights", "meanwhile"]


@dataclass
class _Shown:
    """A line of the bar. total: None where the end is not known."""

    text: str
    count: str
    done: int
    total: int | None
    task: TaskID | None = None


class LoadBar:
    """Use as a context manager; it goes away at the end. All methods may be called from any thread."""

    def __init__(self, total_bytes: int, *, shown: bool) -> None:
        self._shown = shown and redraws(sys.stderr)
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._lines: dict[Line, _Shown] = {"weights": _Shown("reading weights", "", 0, total_bytes)}

    def __enter__(self) -> LoadBar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
            self._bar = self._stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
            self._show("weights")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def texts(self) -> list[str]:
        """The lines, without their bars: "uploading weights 1.2/4.7 GB", "compiling kernels 3/41"."""
        return [f"{line.text} {line.count}".strip() for line in self._lines.values()]

    def advance(self, nbytes: int) -> None:
        """So many more bytes of the file have come."""
        with self._lock:
            line = self._lines["weights"]
            line.done += nbytes
            unit, size, digits = ("GB", 1e9, 1) if (line.total or 0) >= 1e9 else ("MB", 1e6, 0)
            line.count = f"{line.done / size:.{digits}f}/{(line.total or 0) / size:.{digits}f} {unit}"
            self._show("weights")

    def waits_for(self, what: str) -> None:
        """What the weights are waiting for: "reading", "uploading", "repacking"."""
        with self._lock:
            self._lines["weights"].text = f"{what} weights"
            self._show("weights")

    def plans(self) -> None:
        """Kernels are chosen meanwhile."""
        with self._lock:
            self._meanwhile("planning", "", 0, None)

    @contextmanager
    def compiles(self, total: int) -> Iterator[Callable[[], None]]:
        """Kernels are made ready meanwhile: a function to call, from any thread, for each of `total` that is ready."""
        ready = 0

        def on_kernel() -> None:
            nonlocal ready
            with self._lock:
                ready += 1
                self._meanwhile("preparing kernels", f"{ready}/{total}", ready, total)

        with self._lock:
            self._meanwhile("preparing kernels", f"0/{total}", 0, total)
        yield on_kernel

    def _meanwhile(self, text: str, count: str, done: int, total: int | None) -> None:
        task = self._lines["meanwhile"].task if "meanwhile" in self._lines else None
        self._lines["meanwhile"] = _Shown(text, count, done, total, task)
        self._show("meanwhile")

    def _show(self, which: Line) -> None:
        if self._bar is None:
            return
        line = self._lines[which]
        if line.task is None:
            line.task = self._bar.add_task(line.text, total=line.total, count=line.count)
        self._bar.update(line.task, description=line.text, total=line.total, completed=line.done, count=line.count)
