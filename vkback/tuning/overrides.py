"""Rows of tuning tables from a command line: parameters to try without a file."""

from __future__ import annotations

from vkback.ops.family import table_word
from vkback.tuning.row import Row
from vkback.tuning.table import parse_table, row_lines

OVERRIDES = "device_override.toml"
"""The file that such rows say they are of."""


def override_rows(text: str) -> list[Row]:
    """The rows of `FAMILY key=value ... : parameter=value ...`, several joined by `;`, checked as those of any table.

    "attention : wg_size=512 steps=2"      "gemv experts=each : wg=512 x_in_shared=true; schedule : sync=barrier"

    Raises TuningError.
    """
    lines: list[str] = []
    for part in filter(str.strip, text.split(";")):
        keys, _, params = part.partition(":")
        family, *match = keys.split() or [""]
        lines += row_lines(family, _values(match), _values(params.split()), "command line")
    return parse_table("\n".join(lines), OVERRIDES)


def _values(words: list[str]) -> dict[str, int | str | bool]:
    """Of `key=value` texts: numbers, true and false, and words."""
    booleans = {"true": True, "false": False}
    pairs = [word.partition("=") for word in words]
    return {key: int(value) if value.isdigit() else booleans.get(value, value) for key, _, value in pairs}


def row_text(row: Row) -> str:
    """A row as it was written."""
    keys = [f"{key}={table_word(value)}" for key, value in row.match.items()]
    return f"{' '.join([row.family, *keys])} : {' '.join(f'{key}={table_word(value)}' for key, value in row.set.items())}"
