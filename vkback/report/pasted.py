"""Tables of speeds in a text that was pasted from a thread: of llama-bench or vkbench, in markdown or as a browser copies them.

What stands around a table says what it is of: `ggml_vulkan: 0 = DEVICE (driver) | ...` or a heading names the device, a line "before:" or
"after:" the side, and a command line the repetitions (`-r`, 5 in llama-bench). A table may have both sides itself, as `t/s (before)` and
`t/s (after)`, and further columns as `t/s (ROCm)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vkback.report.markdown import row_cells

SIDES = ("before", "after")

USUAL_REPETITIONS = 5
"""Of llama-bench."""

_SPEED = r"[\d.]+ ± [\d.]+"
_HEADER = re.compile(r"model\s+size\s+params\s+(?P<settings>.*?)\s*\btest\s+(?P<speeds>t/s.*)")
_ROW = re.compile(
    r"(?P<model>\S.*?)\s+(?P<size>[\d.]+ [KMGT]?i?B)\s+(?P<params>[\d.]+ [KMBT])\s+(?P<settings>.*?)\s*"
    rf"(?P<test>(?:pp|tg)\d\S*(?: @ d\d+)?)\s+(?P<speeds>{_SPEED}.*)"
)
_DEVICE = re.compile(r"\w+:\s+(?:Device )?0\s*[=:]\s*(?P<name>[^|]+?)(?: \([^()]*\))?\s*(?:[|,].*)?")
_COMMAND = re.compile(r"\b(?:llama-bench|vkbench)\b")
_REPETITIONS = re.compile(r"(?:^|\s)(?:-r|--repetitions)[ =](\d+)")
_BUILD = re.compile(r"build: (\S+) \((\d+)\)")


@dataclass(frozen=True)
class PastedTable:
    """rows: cells by the column's name, speeds as `t/s` or `t/s (NAME)`. device, side: "" where the text does not say; repetitions: None
    likewise; block: tables of the same number stand below the same "before:" or "after:"."""

    device: str
    side: str
    rows: Sequence[Mapping[str, str]]
    repetitions: int | None
    build: tuple[str, str] | None
    block: int


def pasted_tables(text: str) -> list[PastedTable]:
    """All tables of speeds in a text, in its order."""
    found: list[PastedTable] = []
    device = heading = side = ""
    repetitions: int | None = None
    tables_before = 0
    block, names, rows = 0, [""], list[dict[str, str]]()
    build: tuple[str, str] | None = None

    def end() -> None:
        if rows:
            found.append(PastedTable(device or heading, side, tuple(rows), repetitions, build, block))
            rows.clear()

    for line in (each.strip() for each in text.splitlines()):
        if row := _cells(line, names):
            rows.append(row)
        elif header := _names(line):
            end()
            names = header
        elif line and set(line) <= set("|-: "):
            continue
        elif line:
            end()
            if word := next((s for s in SIDES if re.fullmatch(rf"\W*{s}\W*", line, re.IGNORECASE)), ""):
                side, device, heading, block = word, "", "", block + 1
            elif named := _DEVICE.fullmatch(line):
                device = named["name"]
            elif _COMMAND.search(line):
                given = _REPETITIONS.search(line)
                repetitions, tables_before = int(given[1]) if given else USUAL_REPETITIONS, len(found)
                device = ""
            elif made := _BUILD.match(line):
                found[-1:] = [_with_build(table, made) for table in found[-1:]]
            elif len(line) <= 80:
                heading, device = line.strip("#*_: `").strip(), ""
                if len(found) > tables_before:  # those of a command whose table has come are not those of what follows a heading
                    repetitions = None
    end()
    return found


def _with_build(table: PastedTable, made: re.Match[str]) -> PastedTable:
    return PastedTable(table.device, table.side, table.rows, table.repetitions, (made[1], made[2]), table.block)


def _names(line: str) -> list[str]:
    """The columns that a header names; none for other lines."""
    if line.startswith("|"):
        cells = row_cells(line)
        return cells if {"model", "size", "params", "test"} <= {*cells} and any(c.startswith("t/s") for c in cells) else []
    match = _HEADER.fullmatch(line)
    if not match:
        return []
    speeds = re.findall(r"t/s(?: \([^)]*\))?|\S+", match["speeds"])
    return ["model", "size", "params", *match["settings"].split(), "test", *speeds]


def _cells(line: str, names: Sequence[str]) -> dict[str, str]:
    """A row below such a header; {} for other lines."""
    if "test" not in names:
        return {}
    if line.startswith("|"):
        cells = row_cells(line)
        return dict(zip(names, cells, strict=True)) if len(cells) == len(names) and re.search(_SPEED, line) else {}
    match = _ROW.fullmatch(line)
    if not match:
        return {}
    at = names.index("test")
    settings, speeds = match["settings"].split(), re.findall(rf"{_SPEED}|\S+", match["speeds"])
    if len(settings) != at - 3 or len(speeds) != len(names) - at - 1:
        return {}
    return dict(zip(names, [match["model"], match["size"], match["params"], *settings, match["test"], *speeds], strict=True))


def columns_of(table: PastedTable) -> dict[str, PastedTable]:
    """A table for each column of speeds, by its name: "before", "after", "ROCm"; "" where the one column says t/s alone."""
    named = [name for name in table.rows[0] if name.startswith("t/s (")]
    return {name[5:-1]: _column(table, name[5:-1]) for name in named} or {table.side: table}


def pairs_of(tables: Sequence[PastedTable]) -> Iterator[tuple[str, dict[str, list[PastedTable]]]]:
    """Tables of one device that belong together, by column: "before", "after", and what others are called. Those of a block "before:" go
    with those of the block behind it."""
    seen: set[tuple[int, str]] = set()
    for table in tables:
        if any(f"t/s ({side})" in table.rows[0] for side in SIDES):
            yield table.device, {name: [column] for name, column in columns_of(table).items()}
        elif table.side == "before" and (table.block, table.device) not in seen:
            seen.add((table.block, table.device))
            before, after = (
                [t for t in tables if (t.side, t.block, t.device) == (side, block, table.device)]
                for side, block in (("before", table.block), ("after", table.block + 1))
            )
            if after:
                yield table.device, {"before": before, "after": after}


def _column(table: PastedTable, name: str) -> PastedTable:
    """One column of speeds of a table with several."""
    alike = [{k: v for k, v in row.items() if not k.startswith("t/s") and k != "diff"} for row in table.rows]
    rows = [{**same, "t/s": row[f"t/s ({name})"]} for same, row in zip(alike, table.rows, strict=True)]
    return PastedTable(table.device, table.side, rows, table.repetitions, table.build, table.block)
