"""Writing a figure of matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vkback.paths import new_file_or
from vkback.report.result_table import ReportError


def save(figure: Any, file: Path, dpi: int) -> None:
    """Write a figure in the form that the file's ending names, whole or not at all. Raises ReportError where it cannot be written."""
    with new_file_or(ReportError, f"{file}: the picture", file) as part:
        figure.savefig(part, dpi=dpi, format=file.suffix.lstrip("."))
