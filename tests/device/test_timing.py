"""Warm-up before a timing: how long the device is kept busy; and what is timed as a floor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vkback.device import Commands, Device
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case, mul_mat_id_case
from vkback.shader import ShaderLibrary
from vkback.timing import launches
from vkback.timing.read_rate import plain_read_us


class Clockwork:
    """A device whose every submission takes 10 ms of a clock that nothing else moves."""

    def __init__(self, kind: str) -> None:
        self.caps = SimpleNamespace(device_type=kind)
        self.now = 100.0
        self.submissions = 0
        self.rested = 0.0

    def rest(self, seconds: float) -> None:
        self.rested += seconds
        self.now += seconds

    def submit(self, commands: object) -> Any:
        self.submissions += 1
        self.now += 0.01
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(kind: str) -> Clockwork:
        device = Clockwork(kind)
        monkeypatch.setattr("time.perf_counter", lambda: device.now)
        monkeypatch.setattr("time.sleep", device.rest)
        return device

    return start


def warm_up(device: Clockwork, seconds: float) -> float:
    """Seconds that a warm-up keeps the device busy."""
    before = device.now
    launches.warm_up(cast(Device, device), cast(Commands, None), seconds)
    return device.now - before


def test_an_idle_gpu_is_kept_busy_until_its_clocks_are_up(busy: Any) -> None:
    device = busy("discrete")
    assert warm_up(device, 0.05) == pytest.approx(launches.RISE_S, abs=0.011)
    assert warm_up(device, 0.05) == pytest.approx(0.05, abs=0.011), "it was busy a moment ago"
    device.now += launches.IDLE_S + 0.1
    assert warm_up(device, 0.05) == pytest.approx(launches.RISE_S, abs=0.011)
    assert warm_up(device, 2.0) == pytest.approx(2.0, abs=0.011), "never less than what was asked for"


def test_a_warm_up_rests_so_that_no_power_limit_lowers_the_clock(busy: Any) -> None:
    device = busy("discrete")
    warm_up(device, 2.0)
    assert device.rested == pytest.approx(launches.REST * (device.submissions - 1) * 0.01)
    assert device.rested > 0.1


def test_a_cpu_driver_runs_once(busy: Any) -> None:
    device = busy("cpu")
    warm_up(device, 0.05)
    assert device.submissions == 1


def test_of_a_stack_of_experts_a_launch_reads_those_chosen() -> None:
    assert launches.read_share(mul_mat_case("Q4_K", 16, 1, 256).build().node) == 1.0
    assert launches.read_share(mul_mat_id_case("Q4_K", 16, 4, 8, 1, 256, shared=True).build().node) == 0.25
    assert launches.read_share(mul_mat_id_case("Q4_K", 4, 2, 8, 5, 256, shared=True).build().node) == 1.0
    summed = fused_case("Q4_K", 8, 256, 1, ("ids", "expert_weights"), experts=6, used=3)
    assert launches.read_share(summed.build().node) == 0.5
    choosing = fused_case("Q4_K", 8, 256, 1, ("logits",), glu=True, experts=6, used=3)
    assert launches.read_share(choosing.build().node) == 0.5


@pytest.mark.vulkan
def test_a_plain_read_has_a_time(device: Device, library: ShaderLibrary) -> None:
    assert 0 < plain_read_us(device, library, 1 << 20) < 1e6
    with pytest.raises(ValueError, match="at least 65536 bytes, got 4096"):
        plain_read_us(device, library, 4096)
