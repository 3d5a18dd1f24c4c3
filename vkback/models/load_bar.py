"""What a load is waiting for, on a terminal: a line for weights, and one for what is done meanwhile. Elsewhere nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class LoadBar:
    """Use as a context manager; it goes away at the end. All methods may be called from any thread."""

    def __init__(self, total_bytes: int, *, shown: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._shown = shown and self._console.is_terminal
        self._total, self._done = total_bytes, 0
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn(),
            console=self._console, transient=True, disable=not self._shown,
        )  # fmt: skip
        self._weights = self._bar.add_task("reading weights", total=total_bytes, count="")
        self._beside: TaskID | None = None

    def __enter__(self) -> LoadBar:
        self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def texts(self) -> list[str]:
        """The lines, without their bars: "uploading weights 1.2/4.7 GB", "compiling kernels 3/41"."""
        return [f"{task.description} {task.fields['count']}".strip() for task in self._bar.tasks]

    def advance(self, nbytes: int) -> None:
        """So many more bytes of the file have come."""
        with self._lock:
            self._done += nbytes
            self._bar.update(self._weights, completed=self._done, count=f"{self._done / 1e9:.1f}/{self._total / 1e9:.1f} GB")

    def waits_for(self, what: str) -> None:
        """What the weights are waiting for: "reading", "uploading", "repacking"."""
        self._bar.update(self._weights, description=f"{what} weights")

    def plans(self) -> None:
        """Kernels are chosen meanwhile."""
        self._meanwhile("planning", None, "")

    @contextmanager
    def compiles(self, total: int) -> Iterator[Callable[[], None]]:
        """Kernels are compiled meanwhile: a function to call, from any thread, for each of `total` that is ready."""
        ready = 0

        def on_kernel() -> None:
            nonlocal ready
            with self._lock:
                ready += 1
                self._meanwhile("compiling kernels", total, f"{ready}/{total}", ready)

        self._meanwhile("compiling kernels", total, f"0/{total}")
        yield on_kernel

    def _meanwhile(self, what: str, total: int | None, count: str, done: int = 0) -> None:
        if self._beside is None:
            self._beside = self._bar.add_task(what, total=total, count=count)
        self._bar.update(self._beside, description=what, total=total, completed=done, count=count)
