"""Which cases there are: ops by type of their weights or operands, and by what decides which kernel runs, as one table."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from vkback.ops.case import Case

COLUMNS = ("one", "few", "many")
"""Tokens at once: 1, 2 to 16, and more, which take other kernels."""

CONDITIONS = ("exact", "sync", "tuning", "range")
"""Of `Case.where`."""

TYPES = ("type_a", "type_K", "type_k", "type", "type_src", "type_dst")
"""Parameters that name the type of a case, the first that it has."""


def coverage(cases: Iterable[Case]) -> pd.DataFrame:
    """A row for each op and type: the number of its cases, of those of one, few and many tokens, and of those under each condition."""
    rows = []
    for case in cases:
        p = case.params
        kind = next((str(p[name]).upper() for name in TYPES if name in p), "F32")
        n = p.get("n") if case.op.startswith(("MUL_MAT", "LINEAR")) else None
        tokens = None if not isinstance(n, int) else "one" if n == 1 else "few" if n <= 16 else "many"
        rows.append(
            {"op": case.op, "type": kind, "cases": 1}
            | {name: int(tokens == name) for name in COLUMNS}
            | {name: int(name in p) for name in CONDITIONS}
        )
    return pd.DataFrame(rows).groupby(["op", "type"], as_index=False).sum()


def cells(found: pd.DataFrame) -> pd.DataFrame:
    """The table's texts; nothing where there is none."""
    texts = found.map(lambda value: "" if value == 0 else str(value))
    again = texts["op"].eq(texts["op"].shift())
    return texts.assign(op=texts["op"].where(~again, ""))
