"""The examples of README and docs/: code blocks and command lines, as tests and tools/smoke.py read them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "bench/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
FOLLOWED = {f"docs/{path.stem.removeprefix('test_')}.md" for path in (ROOT / "tests").rglob("test_adding_*.py")}
"""How-to pages, each with a test that writes its files, applies its diffs and runs its commands."""

FENCE = re.compile(r"^```(?P<kind>\w*)(?: \S+)?\n(?P<text>.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:^|(?<=\n\n))(?:    .*\n|\n(?=    ))+")
COMMAND = re.compile(r"(?:\$ )?(?P<program>(?:\.venv/bin/)?vkback|(?:\.venv/bin/)?vkbench|make|pip|curl|python|cat)(?: |$)")


@dataclass(frozen=True)
class Block:
    """page, kind ("" for an indented one) and text."""

    page: str
    kind: str
    text: str

    def commands(self) -> list[str]:
        """Of a block of a shell; lines that are continued by a backslash are one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [re.sub(r"^\$ ", "", line.strip()) for line in lines if COMMAND.match(line.strip())]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        found += [Block(page, match["kind"], match["text"]) for match in FENCE.finditer(text)]
        rest = FENCE.sub("", text)
        found += [Block(page, "", re.sub(r"^    ", "", match[0], flags=re.M)) for match in INDENTED.finditer(rest)]
    return found


def commands() -> list[tuple[str, str]]:
    """Page and command line of every command, but those of the pages that tests follow."""
    shell = (block for block in blocks() if block.kind in ("", "console") and block.page not in FOLLOWED)
    return sorted({(block.page, command) for block in shell for command in block.commands()})


def words(command: str) -> list[str]:
    """Of a command line, without its comment and the redirections, with what stands in [brackets], which may be left out."""
    kept = re.sub(r"\s{2,}#.*|\s> \S+", "", command.replace("[", "").replace("]", "") if " [" in command else command)
    return shlex.split(kept)
