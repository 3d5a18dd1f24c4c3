"""The warning when other programs take the memory that a model counted on. Drivers of CPUs tell no budget: here the test tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

import vkback
from vkback.device import Device
from vkback.engine import memory_watch
from vkback.engine.memory_watch import MemoryWatch
from vkback.models.synth import synthesize

GIB = 1 << 30


class Budget:
    """What the driver leaves to this process, given how much this takes itself: all but what others have."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others, self.size = 0, 16 * GIB + device.own_bytes  # what other tests left on the device aside
        monkeypatch.setattr(Device, "budget_left", lambda device: self.size - self.others - device.own_bytes)
        monkeypatch.setattr(memory_watch, "CHECK_S", 0.0)


@pytest.fixture
def budget(device: Device, monkeypatch: pytest.MonkeyPatch) -> Budget:
    return Budget(device, monkeypatch)


@pytest.mark.vulkan
def test_what_a_load_takes_itself_is_not_others(device: Device, budget: Budget, caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch(device, "model.gguf")
    with device.arena("weights", 200 << 20, "device"):
        watch.loaded()
        assert not caplog.records
        budget.others = 3 * GIB
        watch.loaded()
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(
        f"other programs took 3.00 GiB of {device.caps.name} while model.gguf was loaded; 12.80 GiB are left. The driver"
    )


@pytest.mark.vulkan
def test_a_shortage_is_told_once_and_again_after_it_ended(device: Device, budget: Budget, caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch(device, "model.gguf")
    with device.arena("weights", 200 << 20, "device"):
        for others, lines in ((0, 0), (15 * GIB, 0), (16 * GIB, 1), (17 * GIB, 1), (0, 1), (17 * GIB, 2)):
            budget.others = others
            watch.look()
            assert len(caplog.records) == lines, others
    said = caplog.records[0].getMessage()
    assert "that model.gguf has; 200.00 MiB more are in use than the driver leaves to this process" in said


@pytest.mark.vulkan
def test_a_driver_that_tells_no_budget_says_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Device, "budget_left", lambda device: None)
    watch = MemoryWatch(device, "model.gguf")
    watch.loaded()
    watch.look()
    assert not caplog.records


@pytest.mark.vulkan
def test_the_end_of_a_text_looks(tmp_path: Path, device: Device, budget: Budget, caplog: pytest.LogCaptureFixture) -> None:
    synthesize("tiny-llama-Q8_0", path := tmp_path / "model.gguf")
    with vkback.load(path, device.index, ctx=64, act="f32") as model:
        model.generate([1, 2, 3], max_tokens=2)
        assert not caplog.records
        budget.others = 17 * GIB
        for _ in range(2):
            model.generate([1, 2, 3], max_tokens=2)
    assert [r.getMessage().startswith("other programs take memory of") for r in caplog.records] == [True]
