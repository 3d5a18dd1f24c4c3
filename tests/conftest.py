"""Shared fixtures: one device and one shader library for all tests that need Vulkan."""

from __future__ import annotations

import quiet_blas  # isort: skip  # noqa: F401  before anything imports numpy

import gc
import logging
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ahead import compile_ahead
from cli_kit import engine, no_device  # noqa: F401  fixtures
from device_kit import arena, spirv  # noqa: F401  fixtures
from each_choice import mark_exhaustive
from make_gguf import gpt_oss_metadata, gpt_oss_tensors, write_gguf
from model_files import BUILT_IN, hollow
from waiting import PATIENCE_S

from vkback.device import Capabilities, Device
from vkback.engine import engine as engine_module
from vkback.engine.draft_programs import DraftPrograms
from vkback.engine.drafts import StepTimes
from vkback.errors import VkbackError
from vkback.models import Model
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model
from vkback.shader import ShaderLibrary
from vkback.timing import read_rate
from vkback.tuning.lookup import Overrides, Tuning

os.environ["VKBACK_TUNING"] = os.devnull  # tables this machine's user made by tuning change which kernels are chosen

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("LP_NUM_THREADS", "0")
    """llvmpipe then runs workgroups in the thread that submits: a quarter less processor time, since the other processes of a run keep the
    other processors busy, and a small dispatch wakes no thread."""

os.environ["TERM"] = "xterm"
os.environ["COLUMNS"] = "80"
for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
"""What is written to a terminal depends on the terminal that a test gives, not on the one that started it, or on none."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests are a million objects that live to the end: no garbage collection looks through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


LEFT_OUT = pytest.StashKey[int]()
"""Tests marked `exhaustive` that were not chosen to run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest looks at -m."""
    mark_exhaustive(items)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the one that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "not exhaustive" in config.option.markexpr and (left_out := config.stash.get(LEFT_OUT, 0)):
        terminalreporter.write_line(f"{left_out} that only cross what these run were left out (marked exhaustive): make test-all runs all")


@pytest.fixture(scope="session", autouse=True)
def quick_shaders() -> Iterator[None]:
    """Set before any shader library is made. On GPUs tests run what users run; on CPU drivers test_shipped.py does."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            with Device.open() as opened:
                software = opened.caps.software
        except VkbackError:
            software = False
        patch.setattr(ShaderLibrary, "quick", software)
        patch.setattr(read_rate, "SOFTWARE_BYTES", 1 << 20)  # no test asks how fast memory is
        if "PYTEST_XDIST_WORKER" in os.environ:  # the other processes keep the other processors busy
            patch.setattr(ShaderLibrary, "compilers", 1)
        yield


@pytest.fixture(autouse=True)
def quiet_log() -> None:
    """A command that an earlier test left in a thread may still show infos; what a test finds in caplog does not depend on it."""
    for name in ("vkback", "vkback.server"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    server = logging.getLogger("vkback.server")  # to which a command adds a handler of its own, and none else then hears it
    server.propagate = True
    server.handlers.clear()


@pytest.fixture(autouse=True)
def seeds_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that a request leaves to chance are the same in each run of a test: a text of a rare length fails always or never."""
    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture(autouse=True)
def patient_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams have no comments between their events since a busy machine took seconds for one; tests of comments set their own time."""
    for name in ("vkback.server.app", "vkback.server.front"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "KEEP_ALIVE_S", PATIENCE_S)


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    with Device.open() as opened:
        yield opened


@pytest.fixture(scope="session")
def library() -> ShaderLibrary:
    return ShaderLibrary()


@pytest.fixture(scope="session")
def ctx(device: Device) -> LowerContext:
    return LowerContext(device.caps, Tuning.for_device(device.caps))


@pytest.fixture(scope="module", autouse=True)
def kernels_ahead(request: pytest.FixtureRequest, quick_shaders: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The module's shaders compiled together (tests/ahead.py)."""
    several = "PYTEST_XDIST_WORKER" in os.environ
    compile_ahead(request, tmp_path_factory.getbasetemp().parent if several else None)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Built-in models by name, and synthetic ones without their weights (`model_files.hollow`)."""
    known: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in known:
            path = builtin_model(name) if name in BUILT_IN else hollow(name, tmp_path_factory.mktemp("hollow") / "model.gguf")
            known[name] = Model.open(path)
        return known[name]

    return get


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Files of tiny models by name, `tiny-gpt2`: those that tests/references compares, in Q8_0; and `tiny-gpt-oss-MXFP4`, of the types that
    gpt-oss files have."""
    known: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("tiny") / f"{name}.gguf"
            if name == "tiny-gpt-oss-MXFP4":
                write_gguf(known[name], "gpt-oss", gpt_oss_metadata(), gpt_oss_tensors())
            else:
                synthesize(f"{name}-Q8_0", known[name])
        return known[name]

    return get


@pytest.fixture
def barrier_free(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Engines loaded from here on run stages barrier-free, which the tables of a CPU driver do not choose. An indirect parameter says who
    chooses the experts."""
    params = {"sync": "sentinel"} | ({"router": request.param} if getattr(request, "param", None) else {})

    def tables(caps: Capabilities) -> Overrides:
        return Overrides(Tuning.for_device(caps), {"schedule": params}, "test")

    monkeypatch.setattr(engine_module, "Tuning", SimpleNamespace(for_device=tables))


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts take 1.2 of a step without, on a busy machine, too. Each runs once where a time of several would be measured."""

    def measure(self: DraftPrograms, kind: str, classes: Sequence[int], at_once: int, seconds: Callable[[int, int], float]) -> None:
        for columns in (1, *classes):
            seconds(columns, 1)
        self.times[kind] = StepTimes(dict.fromkeys(classes, 1.2))

    monkeypatch.setattr(DraftPrograms, "measure", measure)


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines loaded from here on run delta nets and Mamba-2 scans in chunks of 16 tokens, so that short prompts have several."""
    params = {"kernel": "chunks", "chunk": 16, "rows": 16, "tokens": 1}
    chunks = {"delta_net": params, "ssm_scan": params | {"columns": 16}}

    def tables(caps: Capabilities) -> Overrides:
        return Overrides(Tuning.for_device(caps), chunks, "test")

    monkeypatch.setattr(engine_module, "Tuning", SimpleNamespace(for_device=tables))
