"""Shaders that the tests of a module want, compiled in a few runs of glslc before the first: a run takes 80 ms to start and 10 ms for most
shaders, and two thousand tests want one or two each.

What a test wants is found by calling it with a library that notes the first kernels it is asked for and ends the test there. Only tests
are called that get nothing but `device`, `library`, `ctx` and their parameters, so that there is nothing they could leave behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.ops.lowering import LowerContext
from vkback.shader import ShaderLibrary, Variant

if sys.platform != "win32":
    import fcntl

FEWEST = 4
"""Tests in a module that are worth the trouble."""


class NotedError(Exception):
    """Ends a test that is only asked what it wants."""


class Notebook(ShaderLibrary):
    """Compiles nothing. wanted: what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[Variant] = []

    def compile_each(self, variants: Iterable[Variant], batch: int | None = None) -> NoReturn:
        self.wanted += variants
        raise NotedError


def simple_tests(items: Iterable[pytest.Item], module: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Functions with their parameters: the tests of a module that get no other fixture than these three."""
    found = []
    for item in items:
        if isinstance(item, pytest.Function) and item.module is module and item.cls is None:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            takes = set(item._fixtureinfo.argnames) - params.keys()
            own = any(item._fixtureinfo.name2fixturedefs[name][-1].scope == "function" for name in takes)  # not those of conftest.py
            if "library" in takes and takes <= {"device", "library", "ctx"} and not own:
                found.append((item.obj, {**params, **dict.fromkeys(takes)}))
    return found


def wanted_by(tests: Iterable[tuple[Any, dict[str, Any]]], ctx: LowerContext) -> list[Variant]:
    """The kernels that each test asks for first."""
    notebook = Notebook()
    with Device.open() as device:
        fixtures = {"device": device, "library": notebook, "ctx": ctx}
        for function, arguments in tests:
            try:
                function(**{name: fixtures.get(name, value) for name, value in arguments.items()})
            except (Exception, pytest.fail.Exception, pytest.skip.Exception):
                continue  # NotedError, or what the test's own run will tell
    return notebook.wanted


def compile_ahead(request: pytest.FixtureRequest, shared: Path | None) -> None:
    """Compile what the chosen tests of the requesting module want. shared: a folder of this run's processes, of which one does it."""
    tests = simple_tests(request.session.items, request.module)
    if len(tests) < FEWEST:
        return
    with first_in(shared, request.module.__name__) as first:
        if first:
            try:
                library, ctx = request.getfixturevalue("library"), request.getfixturevalue("ctx")
                library.compile_many(wanted_by(tests, ctx))
            except VkbackError:
                return  # no Vulkan, or a shader with a fault: the tests that need it say so


@contextmanager
def first_in(folder: Path | None, name: str) -> Iterator[bool]:
    """Whether this process is the first to come here; a second one waits until the first is through. Where files cannot be locked so
    (Windows), each is."""
    if folder is None or sys.platform == "win32":
        yield True
        return
    with (folder / f"{name}.ahead").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first = file.tell() == 0
        file.write("done\n")
        yield first
