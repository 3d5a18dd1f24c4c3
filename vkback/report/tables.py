"""Tables of text in the forms that commands offer: for a terminal, markdown, csv, html and json."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from vkback.report.markdown import Column, head, line
from vkback.terminal import columns

MIN_WIDTH = 8
"""To so many characters a column that is aligned left may be cut."""

GAP = "  "

FORMS = ("table", "md", "csv", "html", "json")


def terminal(cells: pd.DataFrame, left: Collection[str], *, group: str = "", width: int | None = None) -> list[str]:
    """Lines with aligned columns, no wider than `width`, default the terminal: where they would be, the widest columns aligned left are
    cut, and end in "~".

    cells  of text
    left   names of the columns aligned left
    group  a column that becomes lines of their own above the rows that share it
    """
    width = width or columns()
    shown = cells.drop(columns=group) if group else cells
    widths = {name: max(len(str(name)), int(shown[name].str.len().max() or 0)) for name in shown}
    indent = GAP if group else ""

    def total() -> int:
        return len(indent) + sum(widths.values()) + len(GAP) * (len(widths) - 1)

    while total() > width:
        widest = max((name for name in widths if name in left and widths[name] > MIN_WIDTH), key=widths.__getitem__, default=None)
        if widest is None:
            break
        widths[widest] -= 1

    def row(texts: Mapping[str, str]) -> str:
        cut = {name: text if len(text) <= widths[name] else text[: widths[name] - 1] + "~" for name, text in texts.items()}
        return (indent + GAP.join(t.ljust(widths[n]) if n in left else t.rjust(widths[n]) for n, t in cut.items())).rstrip()

    lines = [row({str(name): str(name) for name in shown})]
    before = None
    for (_, texts), heading in zip(shown.iterrows(), cells[group] if group else [""] * len(cells), strict=True):
        if group and heading != before:
            lines += textwrap.wrap(heading, width, subsequent_indent=4 * " ", break_on_hyphens=False)
            before = heading
        lines.append(row({str(name): str(text) for name, text in texts.items()}))
    return lines


def markdown(cells: pd.DataFrame, left: Collection[str]) -> list[str]:
    """A markdown table whose columns line up."""
    columns = [Column(str(name), max(len(str(name)), 3, int(cells[name].str.len().max() or 0)), left=name in left) for name in cells]
    return head(columns) + [line(columns, [text.replace("|", "\\|") for text in row]) for row in cells.itertuples(index=False)]


def html(cells: pd.DataFrame, left: Collection[str], title: str) -> str:
    """A page of one table that needs nothing else."""
    return page([("", cells, left)], title)


def page(parts: Sequence[tuple[str, pd.DataFrame, Collection[str]]], title: str) -> str:
    """A page of tables, each with a heading, its cells, and its columns aligned left."""
    style = (
        ":root{color-scheme:light dark}body{font:15px/1.4 system-ui,sans-serif;margin:2rem}table{border-collapse:collapse;"
        "font-variant-numeric:tabular-nums}th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8886}.left{text-align:left}"
        "td,th{white-space:nowrap}td.long{white-space:normal;min-width:min(22rem,55vw)}div{overflow-x:auto}"
        "@media(max-width:600px){body{margin:1rem}h1{font-size:1.4rem}}"
    )
    body = "\n".join(f"{f'<h2>{escape(heading)}</h2>' if heading else ''}{_table(cells, left)}" for heading, cells, left in parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )


LONGEST = 60
"""Characters of a cell on a page that stay in one line, however narrow the window: names, days and speeds are not cut."""


def _table(cells: pd.DataFrame, left: Collection[str]) -> str:
    sides = [" class=left" * (name in left) for name in cells]

    def cell(side: str, text: str) -> str:
        held = ' class="left long"' if side and len(text) > LONGEST else side
        return f"<td{held}>{escape(text)}</td>"

    heads = "".join(f"<th{side}>{escape(str(name))}</th>" for side, name in zip(sides, cells, strict=True))
    rows = "".join(
        "<tr>" + "".join(cell(side, text) for side, text in zip(sides, row, strict=True)) + "</tr>\n"
        for row in cells.itertuples(index=False)
    )
    return f"<div><table><tr>{heads}</tr>\n{rows}</table></div>"


def machine(records: pd.DataFrame, form: str) -> str:
    """Records as csv or json; what is not known is empty, or null."""
    if form == "csv":
        return records.to_csv(index=False, lineterminator="\n").rstrip("\n")
    plain: Callable[[Any], Any] = lambda v: None if isinstance(v, float) and v != v else v  # noqa: E731
    return json.dumps([{k: plain(v) for k, v in record.items()} for record in records.to_dict("records")], indent=2)
