"""Results that people send: one file of a card (`vkbench --submit`, `vkback tune --share`), checked, and a table of all cards.

A file holds what the device is, its tuning table, benchmark results and the suite's verdict, and nothing of who measured: no
UUIDs, no folders, no names of files but the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vkback.device import Capabilities, DeviceError
from vkback.paths import home_dir
from vkback.report.result_table import ReportError
from vkback.units import with_size

SUBMIT_FORMAT = 1

PERSONAL = re.compile(r"(/home/|/Users/|/root/|[A-Za-z]:\\+Users\\+)[^\s\"',]*")
"""Paths that tell a name."""

RESULT_FIELDS = ("build_commit", "model_type", "model_size", "test", "avg_ts", "stddev_ts", "test_time", "driver_info")

WHERE = "Put it into bench/community/ of the repository by a pull request, or attach it to an issue (docs/vendors.md)."


def submission(
    caps: Capabilities, report: str, table: str, results: Sequence[Mapping[str, Any]], suite: Mapping[str, Any]
) -> dict[str, Any]:
    """All of a card. results: rows of vkbench with `samples_ts`; table: its tuning table; suite: cases right, wrong and not supported."""
    found = {
        "format": SUBMIT_FORMAT,
        "device": {**caps.to_dict(), "uuid": "", "driver_uuid": ""},
        "report": report,
        "table": table,
        "bench": [{**row, "model_filename": re.split(r"[/\\]", str(row.get("model_filename", "")))[-1], "command": ""} for row in results],
        "suite": dict(suite),
    }
    clean: dict[str, Any] = json.loads(without_names(json.dumps(found)))
    return clean


def without_names(text: str) -> str:
    """A text without home folders and UUIDs."""
    home = str(home_dir())
    text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text
    text = PERSONAL.sub("~", text)
    return re.sub(r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "", text)


def read(path: Path) -> dict[str, Any]:
    """A file that somebody sent. Raises ReportError naming the file, what is wrong in it and what was expected."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ReportError(f"{path}: no file of vkbench --submit, which is JSON: {e}") from e
    if not isinstance(found, dict) or found.get("format") != SUBMIT_FORMAT:
        raise ReportError(f"{path}: format {found.get('format') if isinstance(found, dict) else None!r}, expected {SUBMIT_FORMAT}")
    try:
        Capabilities.from_dict(found["device"])
    except (DeviceError, KeyError, TypeError) as e:
        raise ReportError(f"{path}: device: {e}") from e
    if "journal" in found and "bench" not in found:  # of vkback tune --share
        found |= {"bench": [], "suite": {}}
    for number, row in enumerate(found.get("bench", []), 1):
        if missing := [name for name in RESULT_FIELDS if name not in row]:
            raise ReportError(f"{path}: result {number}: {', '.join(missing)} missing; expected rows of vkbench")
        if not isinstance(row["avg_ts"], int | float) or row["avg_ts"] <= 0:
            raise ReportError(f"{path}: result {number}: avg_ts {row['avg_ts']!r}, expected tokens per second above 0")
    if name := PERSONAL.search(json.dumps(found)):
        raise ReportError(f"{path}: holds a folder that tells a name, {name[0][:20]}...; remove it")
    return found


COLUMNS = ("device", "driver", "model", "test", "t/s", "t/s/W", "suite", "build")
CARDS_LEFT = ("device", "driver", "model", "build")
"""Columns that are aligned left."""


def cards(files: Sequence[Path]) -> pd.DataFrame:
    """The table of cards, by device, model and test: texts. Raises ReportError as `read`."""
    rows = []
    for path in files:
        found = read(path)
        suite = found["suite"]
        verdict = f"{suite['right']}/{suite['right'] + suite['wrong']}" if suite else ""
        for row in found["bench"]:
            per_watt = row.get("ts_per_watt")
            rows.append(
                (
                    found["device"]["name"],
                    row["driver_info"],
                    with_size(row["model_type"], row["model_n_params"]) if "model_n_params" in row else row["model_type"],
                    row["test"],
                    f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
                    "" if per_watt is None else f"{per_watt:.3g}",
                    verdict,
                    row["build_commit"],
                )
            )
    return pd.DataFrame(sorted(rows), columns=list(COLUMNS))
