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


def tables_of(text: str) -> list[list[dict[str, str]]]:
    """The tables of a text: their rows, cells by the column's name. A table begins with its names above a row of dashes."""
    found: list[list[dict[str, str]]] = []
    lines = [each.strip() for each in text.splitlines()]
    names: list[str] = []
    for before, each in zip(["", *lines], lines, strict=False):
        if not (each.startswith("|") and each.endswith("|")):
            names = []
        elif set(each) <= set("|-: ") and "-" in each:
            names = row_cells(before)
            found.append([])
        elif names:
            found[-1].append(dict(zip(names, row_cells(each), strict=False)))
    return [table for table in found if table]


def row_cells(row: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def head(columns: Sequence[Column]) -> list[str]:
    """The header row and the row of dashes below it, which ends in a colon over columns aligned right."""
    names = line(columns, [c.header for c in columns])
    dashes = line(columns, ["-" * (c.width - 1) + ("-" if c.left else ":") for c in columns])
    return [names, dashes]
