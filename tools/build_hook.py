"""Hatch's build hook: writes the commit that a wheel or an sdist is made of into it, as vkback/_build.json.

A wheel that is made of an sdist takes the sdist's file. An editable install reads its checkout instead, which changes.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "vkback/_build.json"


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the file to what is packed; nothing where there is no commit to name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        try:
            commit = self._git("describe", "--always", "--dirty", "--abbrev=9", "--exclude=*")
            number = int(self._git("rev-list", "--count", "HEAD"))
        except (OSError, subprocess.CalledProcessError):
            return  # no git, or no commit yet: the version has to do
        self._folder = tempfile.TemporaryDirectory()
        made = Path(self._folder.name) / "build.json"
        made.write_text(json.dumps({"commit": commit, "number": number}) + "\n", encoding="utf-8")
        build_data["force_include"][str(made)] = NAME

    def _git(self, *args: str) -> str:
        return subprocess.run(["git", "-C", self.root, *args], capture_output=True, encoding="utf-8", check=True).stdout.strip()
