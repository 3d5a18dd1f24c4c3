"""How-to pages, followed: their files and diffs go into a copy of the tree, their commands run there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from processes import run_program

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(?P<kind>\w+)(?: (?P<path>\S+))?\n(?P<text>.*?)^```$", re.M | re.S)
PROGRAMS = {"python": (sys.executable,), "vkback": (sys.executable, "-m", "vkback.cli.main")}


def copy_tree(target: Path) -> Path:
    """The package, shaders, tables, tests and documents in another place; the built-in models by a link."""
    ignore = shutil.ignore_patterns("__pycache__", "builtin")
    for name in ("vkback", "shaders", "tuning", "tests", "docs"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    (target / "vkback/models/builtin").symlink_to(ROOT / "vkback/models/builtin")
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def follow(page: str, tree: Path) -> list[list[str]]:
    """Write a page's files and apply its diffs; its commands, split into words."""
    commands = []
    for block in BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8")):
        kind, path, text = block["kind"], block["path"], block["text"]
        if path:
            assert not (tree / path).exists(), f"{page}: {path} is there already"
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text, encoding="utf-8")
        elif kind == "diff":
            apply(text, tree)
        elif kind == "console":
            commands += [shlex.split(line[2:]) for line in text.splitlines() if line.startswith("$ ")]
    return commands


def apply(diff: str, tree: Path) -> None:
    """A unified diff whose hunks are found by their lines, each of which must be met once."""
    for part in re.split(r"^--- a/.*\n", diff, flags=re.M)[1:]:
        head, *hunks = re.split(r"^@@.*\n", part, flags=re.M)
        file = tree / head.strip().removeprefix("+++ b/")
        text = file.read_text(encoding="utf-8")
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            new = "".join(line[1:] for line in lines if line[0] != "-")
            assert text.count(old) == 1, f"{file.relative_to(tree)} has these lines {text.count(old)} times, expected once:\n{old}"
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")


def run(command: list[str], tree: Path) -> str:
    """What a command of a page prints, run in the tree. It must succeed."""
    program, *args = command
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(tree)
    done = run_program([*PROGRAMS[program], *args], cwd=tree, env=environment, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}"
    return done.stdout
