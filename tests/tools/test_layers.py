"""Imports point one way, as docs/architecture.md says: between packages, and between the modules of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import vkback

ROOT = Path(vkback.__file__).parent

LAYERS = {
    "errors": 0,
    "events": 0,
    "units": 0,
    "records": 0,
    "arrays": 0,
    "constants": 0,
    "terminal": 0,
    "checks": 1,
    "systems": 0,
    "paths": 1,
    "kept": 2,
    "device": 2,
    "graph": 3,
    "shader": 3,
    "quants": 3,
    "ops": 4,
    "gguf": 4,
    "tuning": 5,
    "compilers": 5,
    "plan": 6,
    "models": 7,
    "program": 7,
    "engine": 8,
    "timing": 9,
    "train": 9,
    "evaluate": 10,
    "harness": 11,
    "report": 12,
    "api": 13,
    "autotune": 13,
    "server": 14,
    "cluster": 14,
    "cli": 15,
    "__main__": 16,
}
"""A module imports from lower layers, and from its own package."""


IMPORT = re.compile(r"^( *)(?:from ([\w.]+) )?import (\([^)]*\)|.+)$", re.MULTILINE)


@cache
def modules() -> dict[str, str]:
    """The text of every module of vkback by name; a package goes by the name of its folder."""
    names = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in sorted(ROOT.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path.read_text("utf-8") for path, parts in names.items()}


def imported(text: str, *, at_start: bool = False) -> Iterator[str]:
    """Modules that a module names in its imports; at_start: of these only the ones that run when it is imported itself."""
    for indent, source, listed in IMPORT.findall(text):
        if at_start and indent:
            continue
        for name in re.findall(r"[\w.]+", re.sub(r"#.*| as \w+", "", listed)):
            inner = f"{source}.{name}" if source else name
            yield inner if not source or inner in modules() else source


def package(module: str) -> str:
    return module.split(".")[1]


def test_packages_import_from_lower_layers() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, text in modules().items()
        if name != "vkback"
        for other in imported(text)
        if other.startswith("vkback.") and package(other) != package(name)
        if LAYERS[package(other)] >= LAYERS[package(name)]
    ]
    assert not wrong


def test_only_the_device_knows_the_binding() -> None:
    users = {package(name) for name, text in modules().items() if any(m.split(".")[0] == "vulkan" for m in imported(text))}
    assert users == {"device"}


def test_graphs_and_quants_know_nothing_of_devices() -> None:
    found = {
        package(other)
        for name, text in modules().items()
        if name.startswith(("vkback.graph", "vkback.quants"))
        for other in imported(text)
        if other.startswith("vkback.")
    }
    assert found <= {"graph", "quants", "errors"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Raises CycleError with the modules of a circle. A package's face stands for what it hands on, so it is left out."""
    faces = {name for name in modules() if any(other.startswith(f"{name}.") for other in modules())}
    graph = {name: {m for m in imported(text, at_start=True) if m in modules()} - faces for name, text in modules().items()}
    assert list(TopologicalSorter(graph).static_order())
