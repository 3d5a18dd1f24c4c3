"""Writing a figure of matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vkback.paths import new_file, reason
from vkback.report.bench_table import ReportError


def save(figure: Any, file: Path, dpi: int) -> None:
    """Write a figure in the form that the file's ending names, whole or not at all. Raises ReportError where it cannot be written."""
    try:
        with new_file(file) as part:
            figure.savefig(part, dpi=dpi, format=file.suffix.lstrip("."))
    except OSError as e:
        raise ReportError(f"{file}: the picture cannot be written: {reason(e)}") from e
