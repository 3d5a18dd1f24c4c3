"""Markdown tables with fixed column widths, so that rows can be printed as they come and still line up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """header: its name; width: visible characters of a cell, longer ones push the rest of their row; left: aligned left, else right."""

    header: str
    width: int
    left: bool = False


def line(columns: Sequence[Column], cells: Sequence[str]) -> str:
    """One row; as many cells as columns."""
    padded = (cell.ljust(c.width) if c.left else cell.rjust(c.width) for c, cell in zip(columns, cells, strict=True))
    return "| " + " | ".join(padded) + " |"


def head(columns: Sequence[Column]) -> list[str]:
    """The header row and the row of dashes below it, which ends in a colon over columns aligned right."""
    names = line(columns, [c.header for c in columns])
    dashes = line(columns, ["-" * (c.width - 1) + ("-" if c.left else ":") for c in columns])
    return [names, dashes]
