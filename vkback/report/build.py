"""Which vkback this is: the commit of a checkout, or of the checkout that an installed package was made of."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import vkback

BUILD_FILE = "_build.json"
"""What tools/build_hook.py writes into a package."""


@cache
def build_info() -> tuple[str, int]:
    """(commit, number of commits up to it), with "-dirty" where tracked files differ from it; (version, 0) where nobody knows."""
    package = Path(vkback.__file__).resolve().parent
    root = package.parent
    if not (root / ".git").exists():
        return _packed(package / BUILD_FILE)
    try:
        commit = _git(root, "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*")
        return commit, int(_git(root, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return vkback.__version__, 0


def _packed(file: Path) -> tuple[str, int]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return str(found["commit"]), int(found["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return vkback.__version__, 0


def _git(root: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout.strip()
