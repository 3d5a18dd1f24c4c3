"""Case lines in a text: what test-backend-ops or this suite printed, on the console, as csv or as sql, or anything else that holds them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from io import StringIO

from vkback.harness.cases import find_case
from vkback.ops.case import Case
from vkback.ops.case_line import CaseLineError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r"(?<![\w.])([A-Z][A-Z0-9_]+)\(((?:\w+=)[^()]*)\)")
_INSERT = re.compile(r"INSERT\s+INTO\s+\w+\s*\(([^()]*)\)\s*VALUES\s*\(", re.IGNORECASE)
_LITERAL = re.compile(r"\s*('(?:[^']|'')*'|[^,()']+)\s*([,)])")

MAX_ERRORS = 10
"""Errors that are shown at once."""


def case_lines(text: str) -> list[tuple[int, str]]:
    """(number of the line, case) of every case in a text, each case once."""
    head = next((row for row in text.splitlines() if row.strip()), "")
    found = _of_csv(text) if "op_name" in head and "op_params" in head and "," in head and "(" not in head else _of_text(text)
    seen: dict[str, int] = {}
    for number, line in found:
        seen.setdefault(line, number)
    return [(number, line) for line, number in seen.items()]


def _of_csv(text: str) -> Iterator[tuple[int, str]]:
    rows = csv.DictReader(StringIO(text))
    for row in rows:
        if row.get("op_name"):
            yield rows.line_num, f"{row['op_name']}({row.get('op_params') or ''})"


def _of_text(text: str) -> Iterator[tuple[int, str]]:
    for number, row in enumerate(text.splitlines(), 1):
        insert = _INSERT.search(row)
        if insert is None:
            for match in _CASE.finditer(_COLOUR.sub("", row)):
                yield number, match[0]
            continue
        values, at = [], insert.end()
        while literal := _LITERAL.match(row, at):
            values.append(literal[1].strip())
            at = literal.end()
            if literal[2] == ")":
                break
        record = dict(zip((name.strip() for name in insert[1].split(",")), values, strict=False))
        if "op_name" in record and "op_params" in record:
            yield number, "{}({})".format(*(record[key][1:-1].replace("''", "'") for key in ("op_name", "op_params")))


def cases_of(text: str, source: str) -> list[Case]:
    """The cases in a text. Raises CaseLineError naming `source` and the lines that make none, or when there are none at all."""
    cases, errors = [], []
    for number, line in case_lines(text):
        try:
            cases.append(find_case(line))
        except CaseLineError as e:
            errors.append(f"{source}:{number}: {e}")
    if errors:
        more = f"\nand {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        raise CaseLineError("\n".join(errors[:MAX_ERRORS]) + more)
    if not cases:
        raise CaseLineError(f"{source}: no case in it; a case is written OP(key=value,...), as test-backend-ops prints it")
    return cases
