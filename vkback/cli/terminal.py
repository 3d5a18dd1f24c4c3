"""What commands print of kernels, in lines that fit a terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from vkback.terminal import NARROWEST, columns, redraws

if TYPE_CHECKING:
    from rich.progress import Progress

    from vkback.device import Capabilities
    from vkback.shader import Variant

WIDTH = NARROWEST

TABLE = 120
"""Columns of a table in a file."""

CONTINUED = " " * 12
"""Before what did not fit the line."""

Parameters = tuple[tuple[str, str], ...]

PARAMETERS: dict[str, Parameters] = {
    "gemv/gemv": (("WG", "threads"), ("LANES", "lanes"), ("ROWS", "rows")),
    "attention/decode/attention": (("WG_SIZE", "threads"), ("HEADS", "heads"), ("SPLITS", "splits")),
    "norm/norm": (("WG_SIZE", "threads"), ("WIDTH", "wide"), ("ROUNDS", "rounds")),
    "rope/rope": (("WG_SIZE", "threads"), ("ROUNDS", "rounds")),
    "topk/router": (("WG_SIZE", "threads"), ("EXPERTS", "experts"), ("USED", "used")),
    "moe/moe_reduce": (("WG_SIZE", "threads"), ("WIDTH", "wide"), ("USED", "experts")),
    "probe/read": (("WG", "threads"), ("UNROLL", "loads")),
}
"""By kernel the defines that matter most, and what they are called. lanes: threads that share a row; rows: rows that such a group of lanes
takes; wide: values that a thread loads at once."""

OTHERS: Parameters = (("WG_SIZE", "threads"), ("WIDTH", "wide"), ("PER_THREAD", "values a thread"))


def kernel_text(variant: Variant) -> str:
    """A kernel's name and up to three parameters: "gemv 1024 threads 16 lanes 4 rows"."""
    name, known = _parameters(variant)
    return " ".join([name, *(f"{value} {word}" for word, value in known)])


def brief_kernel_text(variant: Variant) -> str:
    """The same for a column of a table: "gemv 1024 lanes=16 rows=4", the threads of a workgroup first."""
    name, known = _parameters(variant)
    return " ".join([name, *(str(value) if word == "threads" else f"{word}={value}" for word, value in known)])


def _parameters(variant: Variant) -> tuple[str, list[tuple[str, str | int]]]:
    """A kernel's name, and what its parameters that matter are called, with their values."""
    family = variant.source.removesuffix(".comp")
    defines = dict(variant.defines)
    known = [(word, defines[key]) for key, word in PARAMETERS.get(family, OTHERS) if key in defines]
    return family.rpartition("/")[2], known


def defines_text(variant: Variant) -> str:
    """All defines of a kernel but lists of constants, and the subgroup size it demands."""
    parts = [f"{key}={value}" for key, value in variant.defines if "," not in str(value)]
    if variant.subgroup_size is not None:
        parts.append(f"subgroup size {variant.subgroup_size}")
    return "defines: " + (", ".join(parts) or "none")


def unknown_lines(caps: Capabilities) -> list[str]:
    """What a plan for a recorded device had to guess, and what hangs on it; nothing where all is known."""
    if not caps.unknown:
        return []
    from vkback.device.capabilities import DECIDES

    by_choice: dict[str, list[str]] = {}
    for name in caps.unknown:
        by_choice.setdefault(DECIDES.get(name, ""), []).append(name)
    none = by_choice.pop("", [])
    return [
        f"not known of this device, so that it may itself choose other kernels ({len(caps.unknown)} facts; a feature counts as absent, a "
        "limit as the least that Vulkan allows):",
        *(f"  {', '.join(names)}: decides {choice}" for choice, names in by_choice.items()),
        *([f"  {', '.join(none)}: decides no kernel"] if none else []),
    ]


def unknown_data(caps: Capabilities) -> dict[str, str | None]:
    """The same as plain values: by name what it decides, null where that is no kernel."""
    from vkback.device.capabilities import DECIDES

    return {name: DECIDES.get(name) for name in caps.unknown}


def fit(line: str) -> Iterator[str]:
    """A line cut between words where it is wider than the terminal; whole in a file or a pipe."""
    yield from textwrap.wrap(line, columns(), subsequent_indent=CONTINUED, break_long_words=False, break_on_hyphens=False) or [""]


def shortened(text: str, width: int) -> str:
    """A text of at most `width` characters, its end kept: the ends of node names tell them apart."""
    return text if len(text) <= width else "~" + text[1 - width :]


CLEARED = "\r\x1b[2K"
"""Clears the line of a terminal that the cursor is in."""


class StatusLine:
    """One line on stderr that says how far a long work is, rewritten in place and gone at the end; nothing where stderr is no terminal.
    Code that prints below it clears it first."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._on = wanted and redraws(sys.stderr)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def say(self, text: str) -> None:
        self._put(text if len(text) < 80 else text[:78] + "~")

    def clear(self) -> None:
        self._put("")

    def _put(self, text: str) -> None:
        if self._on:
            print(f"{CLEARED}{text}", end="", file=sys.stderr, flush=True)


def progress_bar(*, share: bool = False, shown: bool = True) -> Progress:
    """A bar on stderr with what is left, gone when it is done; none where that is no terminal. It says how many of how many; with
    `share` percent."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    amount = TaskProgressColumn() if share else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
