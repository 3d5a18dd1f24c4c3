"""Shared fixtures: one device and one shader library for all tests that need Vulkan."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from vkback.device import Device
from vkback.ops.base import LowerContext
from vkback.plan.tuning import Tuning
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
