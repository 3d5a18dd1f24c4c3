"""One file to send: what a device is, and what tuning found on it. It tells no UUIDs and no home folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vkback.autotune.search import SweepError
from vkback.device import Capabilities
from vkback.paths import new_file_or
from vkback.report.community import without_names
from vkback.tuning.lookup import device_table

SHARE_FORMAT = 1


def shared(caps: Capabilities, report: str, folder: Path) -> dict[str, Any]:
    """Device report, journal of sweeps (its lines as values) and own table of a device, from the folder of its own tables.

    Raises SweepError when nothing was tuned on it yet.
    """
    table = folder / device_table(caps)
    journal = table.with_suffix(".journal")
    if not journal.exists():
        raise SweepError(f"[tune] nothing to share: {journal} is missing. Run vkback tune on {caps.name} first")
    lines = []
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(without_names(line)))
        except ValueError:  # cut short with the run that wrote it
            continue
    return {
        "format": SHARE_FORMAT,
        "device": {**caps.to_dict(), "uuid": "", "driver_uuid": ""},
        "report": without_names(report),
        "journal": lines,
        "table": without_names(table.read_text(encoding="utf-8")) if table.exists() else "",
    }


def share(caps: Capabilities, report: str, folder: Path, file: Path) -> None:
    """Write what `shared` gives. Raises SweepError when there is nothing, or when the file cannot be written."""
    text = json.dumps(shared(caps, report, folder), indent=1) + "\n"
    with new_file_or(SweepError, f"[tune] --share {file}:", file) as part:
        part.write_text(text, encoding="utf-8")
