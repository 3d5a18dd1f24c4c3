"""Whole models under the Khronos validation layer, with and without its synchronization checks: not one message."""

from __future__ import annotations

from typing import Any

import pytest

from vkback.device import Device, FeatureMissing, Recorder
from vkback.device.instance import VALIDATION_LAYER
from vkback.models.engine import PROMPT_TOKENS, Engine, Sampler
from vkback.paths import builtin_models

pytestmark = pytest.mark.vulkan


def validated(mode: Any) -> Device:
    """A device under the layer; skips where the layer is not installed (tools/setup.sh test installs it)."""
    try:
        return Device.open(validation=mode)
    except FeatureMissing as missing:
        assert VALIDATION_LAYER in str(missing)
        pytest.skip(f"{VALIDATION_LAYER} is not installed: tools/setup.sh test installs it")


def use(engine: Engine) -> None:
    """Every program of an engine: a prompt in two pieces, logits of all and of one, both ways of generating, many submits in flight."""
    engine.prompt(list(range(1, PROMPT_TOKENS + 5)))
    made = list(engine.generate(7, 27, stop_at_eos=False))
    made += engine.generate(made[-1], 9, sampler=Sampler(temp=0.8), stop_at_eos=False)
    engine.decode_logits(made[-1])
    engine.reset()
    engine.prompt_logits(made[: PROMPT_TOKENS + 1])


@pytest.mark.parametrize("path", builtin_models(), ids=lambda p: p.stem)
@pytest.mark.parametrize("mode", [True, "sync"], ids=["core", "sync"])
def test_a_model_runs_without_a_message(mode: Any, path: Any) -> None:
    with validated(mode) as device:
        for fusion in ("all", "none"):
            with Engine.load(path, device, n_ctx=96, fusion=fusion, progress=False) as engine:
                use(engine)
    assert device.live_objects() == {}
    assert [str(m) for m in device.validation_messages] == []


def test_a_missing_barrier_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The synchronization checks do see the buffers of our dispatches."""
    device = validated("sync")
    with Engine.load(builtin_models()[0], device, n_ctx=96, progress=False) as engine:
        monkeypatch.setattr(Recorder, "barrier", lambda self: None)
        engine.decode_logits(1)
    device.close(check_validation=False)
    assert any("SYNC-HAZARD-READ-AFTER-WRITE" in str(m) for m in device.validation_messages)
