"""vkback profile --against: the same profile of another build, in turn with this one, or an earlier --json."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vkback.cli.shell import UsageError, read_text
from vkback.cli.terminal import StatusLine
from vkback.cli.vkbench_sides import ROOT, checkout, commit_by_name, run_build
from vkback.errors import VkbackError
from vkback.report.pairs import in_turn


class AgainstError(VkbackError):
    """A build that could not be profiled, with what it said."""


def earlier(path: Path) -> dict[str, Any]:
    """What `vkback profile --json` or --save wrote. Raises UsageError."""
    try:
        found = json.loads(read_text(path, "--against"))
        if not isinstance(found, dict) or "phases" not in found:
            raise ValueError("it has no phases")
    except (ValueError, RecursionError) as e:
        raise UsageError(f"--against {path}: expected what vkback profile --json writes: {e}") from e
    return found


def build_of(against: str, stack: ExitStack) -> Path:
    """The folder of the build that --against names. Raises UsageError where it is none."""
    path = Path(against)
    if commit := commit_by_name(against):
        return stack.enter_context(checkout(commit))
    if path.is_dir() and (path / "vkback" / "__init__.py").is_file():
        return path.absolute()
    raise UsageError(f"--against {against}: expected FILE.json of an earlier profile, a folder with a build, or a commit of this checkout")


def in_turns(folder: Path, options: Sequence[str], rounds: int, quiet: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Profiles of the other build and of this one, by a process each, in pairs of which chance decides what comes first."""
    sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    with StatusLine(wanted=not quiet) as status:
        for turn, pair in enumerate(in_turn(rounds, secrets.randbits(64)), 1):
            for which in pair:
                status.say(f"vkback: profiling {'the other build' if which == 0 else 'this build'}: pair {turn}/{rounds}")
                sides[which].append(profile_of(folder if which == 0 else ROOT, options))
    return sides


def profile_of(folder: Path, options: Sequence[str]) -> dict[str, Any]:
    found, status, last = run_build(folder, ["-m", "vkback", "profile", *options, "--json"])
    if status:
        said = last.removeprefix("vkback: error: ")
        raise AgainstError(f"--against {folder}: vkback profile ended with exit code {status}: {said}")
    return dict(json.loads(found))
