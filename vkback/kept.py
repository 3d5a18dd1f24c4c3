"""What is kept in the cache folder: how much it is, its removal, and the bound on its size."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vkback.errors import VkbackError
from vkback.events import log
from vkback.paths import cache_dir
from vkback.units import size_text

PARTS = {
    "shaders": "SPIR-V of kernels, by the hash of their source",
    "pipelines": "what drivers made of it, by device and driver",
    "compilers": "the GLSL compiler's machine code, and versions of others",
}
"""Folders of the cache that may be removed at any time. Locks are not among them: another process may hold one."""

DEFAULT_LIMIT_MB = 2048
REACHED = 0.75
"""Of the limit, once files are removed: not again for a while."""

DAY_S = 86400.0
STAMP = "bounded"


class LimitError(VkbackError):
    """VKBACK_CACHE_MB is no number."""

    exit_code = 2


@dataclass(frozen=True)
class CachedFile:
    """A file. used_s: when it was read or written, as far as the file system says."""

    path: Path
    size: int
    used_s: float


def files_of(part: str) -> list[CachedFile]:
    found = []
    for folder, _, names in os.walk(cache_dir() / part):
        for name in names:
            with contextlib.suppress(OSError):  # another process may have removed it
                stat = (Path(folder) / name).stat()
                found.append(CachedFile(Path(folder) / name, stat.st_size, max(stat.st_atime, stat.st_mtime)))
    return found


def limit_bytes() -> int:
    """Of VKBACK_CACHE_MB; 0: no limit. Raises LimitError."""
    asked = os.environ.get("VKBACK_CACHE_MB", "")
    try:
        limit = int(asked) if asked else DEFAULT_LIMIT_MB
    except ValueError:
        limit = -1
    if limit < 0:
        raise LimitError(f"[cache] VKBACK_CACHE_MB is {asked!r}; expected a number of megabytes, or 0 for no limit")
    return limit * 10**6


def remove(files: Iterable[CachedFile]) -> tuple[int, int]:
    """Remove files and the folders that are empty then; how many went, and their bytes. What another process holds stays."""
    number = size = 0
    for file in files:
        try:
            file.path.unlink()
        except OSError:
            continue
        number, size = number + 1, size + file.size
        with contextlib.suppress(OSError):
            file.path.parent.rmdir()
    return number, size


def bound(now: Callable[[], float] = time.time) -> tuple[int, int]:
    """Remove the files that were used the longest ago, where all of them take more than the limit; what `remove` says.

    Looks at most once a day, since it has to look at every file. Raises LimitError.
    """
    limit, stamp = limit_bytes(), cache_dir() / STAMP
    with contextlib.suppress(OSError):
        if now() - stamp.stat().st_mtime < DAY_S:
            return 0, 0
    try:
        stamp.touch()
    except OSError:
        return 0, 0  # what cannot be written does not grow
    files = sorted((file for part in PARTS for file in files_of(part)), key=lambda file: file.used_s)
    size = sum(file.size for file in files)
    if not limit or size <= limit:
        return 0, 0
    oldest, over = [], size - int(REACHED * limit)
    for file in files:
        if over <= 0:
            break
        oldest.append(file)
        over -= file.size
    number, gone = remove(oldest)
    log.info("the cache %s had %s: removed %d files used the longest ago, %s", cache_dir(), size_text(size), number, size_text(gone))
    return number, gone
