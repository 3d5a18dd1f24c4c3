"""Progress on stderr: bars on a terminal for a load, for kernels and for a long prompt; elsewhere one line about kernels."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vkback.events import Progress
from vkback.terminal import redraws
from vkback.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Drawn
    from rich.progress import TaskID

PROMPT_AFTER_S = 1.0
"""Prompts that are read sooner have no bar."""

Line = Literal["weights", "meanwhile"]


@dataclass
class _Shown:
    """A line of a load's bar. total: None where the end is not known."""

    text: str
    count: str
    done: float
    total: int | None
    task: TaskID | None = None


class Bars:
    """A `Report` (vkback/events.py) that draws. A bar goes away when its work ends; what is compiled during a load is a second line of its
    bar.

    texts  lines of the load, without their bars: "uploading weights 1.2/4.7 GB", "preparing kernels 3/41"
    """

    def __init__(self, *, prompts: bool = False, console: Console | None = None) -> None:
        """prompts: of prompts, too. console: other than stderr."""
        self._prompts, self._console = prompts, console
        self._draws = console.is_terminal if console is not None else redraws(sys.stderr)
        self._lock = threading.Lock()
        self._lines: dict[Line, _Shown] = {}
        self._load_bar: Drawn | None = None
        self._kernels: Drawn | None = None
        self._prompt: Drawn | None = None
        self._prompt_begun: float | None = None
        self._line_printed = False

    def __call__(self, event: Progress) -> None:
        with self._lock:
            if event.work == "load":
                self._on_load(event)
            elif event.work == "compile":
                self._on_compile(event)
            elif self._prompts:
                self._on_prompt(event)

    @property
    def texts(self) -> list[str]:
        return [f"{line.text} {line.count}".strip() for line in self._lines.values()]

    def _on_load(self, event: Progress) -> None:
        if event.ended:
            self._lines.clear()
            _end(self._load_bar)
            self._load_bar = None
            return
        unit, size, digits = ("GB", 1e9, 1) if event.total >= 1e9 else ("MB", 1e6, 0)
        count = f"{event.done / size:.{digits}f}/{event.total / size:.{digits}f} {unit}" if event.done else ""
        self._set("weights", f"{event.waits_for} weights", count, event.done, event.total)

    def _on_compile(self, event: Progress) -> None:
        if event.ended:
            _end(self._kernels)
            self._kernels, self._line_printed = None, False
        elif self._lines and not event.total:
            self._set("meanwhile", "planning", "", 0, None)
        elif self._lines and self._draws:
            self._set("meanwhile", "preparing kernels", f"{event.done:g}/{event.total}", event.done, event.total)
        elif self._draws and event.total:
            if self._kernels is None:
                self._kernels = self._counting("kernels", event.total)
            # Drivers on the CPU compile to machine code when a kernel first runs.
            text = "kernels, first run" if event.done >= event.total else "kernels"
            self._kernels.update(self._kernels.task_ids[0], completed=event.done, description=text)
        elif event.done and not self._line_printed:
            self._line_printed = True
            print(f"vkback: preparing {counted(event.total, 'kernel')}", file=sys.stderr, flush=True)

    def _on_prompt(self, event: Progress) -> None:
        if event.ended:
            _end(self._prompt)
            self._prompt = self._prompt_begun = None
            return
        now = time.perf_counter()
        self._prompt_begun = now if self._prompt_begun is None else self._prompt_begun
        if self._prompt is None and self._draws and now - self._prompt_begun > PROMPT_AFTER_S:
            self._prompt = self._counting("prompt", event.total)
        if self._prompt is not None:
            self._prompt.update(self._prompt.task_ids[0], completed=int(event.done + 1e-6))

    def _counting(self, what: str, total: int) -> Drawn:
        """A bar with a count."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        bar = self._begun(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar.add_task(what, total=total)
        return bar

    def _set(self, which: Line, text: str, count: str, done: float, total: int | None) -> None:
        task = self._lines[which].task if which in self._lines else None
        line = self._lines[which] = _Shown(text, count, done, total, task)
        if not self._draws:
            return
        if self._load_bar is None:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

            self._load_bar = self._begun(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()
            )
        if line.task is None:
            line.task = self._load_bar.add_task(text, total=total, count=count)
        self._load_bar.update(line.task, description=text, total=total, completed=done, count=count)

    def _begun(self, *columns: object) -> Drawn:
        from rich.console import Console
        from rich.progress import Progress as Drawn

        bar = Drawn(*columns, console=self._console or Console(stderr=True), transient=True)  # type: ignore[arg-type]
        bar.start()
        return bar


def _end(bar: Drawn | None) -> None:
    """Take a bar away."""
    if bar is not None:
        bar.stop()
