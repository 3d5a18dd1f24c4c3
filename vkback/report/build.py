"""Which vkback this is: the commit of a checkout, the version of an installed package."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import vkback


@cache
def build_info() -> tuple[str, int]:
    """(commit, number of commits up to it) in a checkout, with "-dirty" where tracked files differ from it; else (version, 0)."""
    root = Path(vkback.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return vkback.__version__, 0
    try:
        commit = _git(root, "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*")
        return commit, int(_git(root, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return vkback.__version__, 0


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, encoding="utf-8", check=True).stdout.strip()
