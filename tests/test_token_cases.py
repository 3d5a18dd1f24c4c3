"""Whole tokens of the built-in models against the twin."""

from __future__ import annotations

import pytest

from vkback.device import Device
from vkback.harness.token_cases import CASES, TokenCase, run
from vkback.shader import ShaderLibrary


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_case(case: TokenCase, device: Device, library: ShaderLibrary) -> None:
    verdict = run(case, device, library)
    assert verdict.ok, verdict.text
