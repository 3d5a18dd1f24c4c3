"""Shared fixtures: one device and one shader library for all tests that need Vulkan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from cli_kit import engine  # noqa: F401  a fixture
from device_kit import arena, spirv  # noqa: F401  fixtures
from model_files import BUILT_IN, hollow

from vkback.device import Capabilities, Device
from vkback.models import Model
from vkback.models import engine as engine_module
from vkback.ops.base import LowerContext
from vkback.paths import builtin_model
from vkback.plan.tuning import Overrides, Tuning
from vkback.shader import ShaderLibrary

os.environ["VKBACK_TUNING"] = os.devnull  # tables this machine's user made by tuning change which kernels are chosen


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


@pytest.fixture
def barrier_free(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Engines loaded from here on run stages barrier-free, which the tables of a CPU driver do not choose. An indirect parameter says who
    chooses the experts."""
    params = {"sync": "sentinel"} | ({"router": request.param} if hasattr(request, "param") else {})

    def tables(caps: Capabilities) -> Overrides:
        return Overrides(Tuning.for_device(caps), {"schedule": params}, "test")

    monkeypatch.setattr(engine_module, "Tuning", SimpleNamespace(for_device=tables))
