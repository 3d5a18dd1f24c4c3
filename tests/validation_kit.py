"""Devices under the Khronos validation layer, and everything an engine can run."""

from __future__ import annotations

from typing import Any

import pytest

from vkback.device import Device, FeatureMissing
from vkback.device.instance import VALIDATION_LAYER
from vkback.engine.engine import Engine
from vkback.engine.prompts import SMALLEST
from vkback.engine.sampler import Sampler


def validated(mode: Any) -> Device:
    """A device under the layer; skips where the layer is not installed (tools/setup.sh test installs it)."""
    try:
        return Device.open(validation=mode)
    except FeatureMissing as missing:
        assert VALIDATION_LAYER in str(missing)
        pytest.skip(f"{VALIDATION_LAYER} is not installed: tools/setup.sh test installs it")


def use(engine: Engine) -> None:
    """Every program of an engine: a prompt in two pieces, logits of all and of one, both ways of generating, many submits in flight."""
    engine.prompt(list(range(1, SMALLEST + 5)))
    made = list(engine.generate(7, 27, stop_at_eos=False))
    made += engine.generate(made[-1], 9, sampler=Sampler(temp=0.8), stop_at_eos=False)
    engine.decode_logits(made[-1])
    engine.reset()
    engine.prompt_logits(made[: SMALLEST + 1])
