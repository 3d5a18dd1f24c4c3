"""The workflow for hosted runners, which nothing here can run: it parses, a push starts it, and what its steps call exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkback.cli import main

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / ".github/workflows/systems.yml"
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
SYSTEMS: dict[str, Any] = WORKFLOW.get("jobs", {})

HOSTED = {"ubuntu-24.04", "ubuntu-24.04-arm", "windows-2025", "macos-15"}
"""Runners that a fork has without asking."""
BROUGHT = {"sudo", "apt-get", "brew", "choco", "gh", "7z", "echo", "make", "python"}
"""Programs of their images, and Python of actions/setup-python."""

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="needs a checkout, not an sdist")


def steps(system: dict[str, Any]) -> Iterator[list[str]]:
    """The commands of a system, in words; what a shell would put into them stays as it is."""
    for step in system["steps"]:
        for line in step.get("run", "").splitlines():
            words = shlex.split(line)
            yield words[1:] if words[0] == "sudo" else words


def test_a_push_of_any_branch_starts_it() -> None:
    """YAML 1.1 reads the key `on` as true."""
    events = WORKFLOW[True]
    assert events["push"] is None and "workflow_dispatch" in events
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "secrets." not in FILE.read_text(encoding="utf-8"), "a fork has none"


def test_every_hosted_system_is_there() -> None:
    found = set()
    for name, system in SYSTEMS.items():
        of = [system["runs-on"]]
        if "matrix.os" in of[0]:
            of = system["strategy"]["matrix"]["os"]
        found |= set(of)
        assert 0 < system["timeout-minutes"] <= 120, name
    assert found == HOSTED


def test_pythons_are_the_first_and_the_last_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    for name in ("linux", "windows", "macos"):
        assert SYSTEMS[name]["strategy"]["matrix"]["python"] == [named[0], named[-1]], name


@pytest.mark.parametrize("system", ["linux", "windows", "macos"])
def test_a_system_starts_the_wheel_runs_the_commands_the_ops_and_the_tests(system: str) -> None:
    ran = [" ".join(words) for words in steps(SYSTEMS[system])]
    for wanted in ("tools/first_start.py dist/*.whl", "tools/smoke.py", "vkback test-ops", "pytest"):
        assert any(wanted in line for line in ran), wanted
    names = [step.get("name", "") for step in SYSTEMS[system]["steps"]]
    assert names.index("First start of the wheel") < names.index("Install"), "it is about a machine that has nothing else"


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_system_calls_exists(system: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for program, *args in steps(SYSTEMS[system]):
        assert program in BROUGHT, program
        if program == "make":
            assert re.search(rf"^{args[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), args
        if program != "python":
            continue
        if args[0] == "-m" and args[1] == "vkback":
            assert args[2] in main.COMMANDS, args
        elif args[0] == "-m":
            assert importlib.util.find_spec(args[1]), args
        else:
            script = (ROOT / args[0]).read_text(encoding="utf-8")
            assert all(f'"{arg}"' in script for arg in args[1:] if arg.startswith("--")), args
        for wanted in re.findall(r"\[(\w+)\]", " ".join(args)):
            assert wanted in extras, args
