"""Power of a device: from a made-up tree of hwmon, from a made-up pynvml, and in vkbench's table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from device_kit import profile
from typer.testing import CliRunner

from vkback.cli import vkbench
from vkback.report.bench_table import BENCH
from vkback.timing.power import Meter, PowerSource, power_source

CARD = profile("amd_rx_7900_xtx_radv")


def sensors(root: Path, number: int, vendor: int, device: int, **files: int) -> Path:
    folder = root / f"hwmon{number}"
    (folder / "device").mkdir(parents=True)
    (folder / "device" / "vendor").write_text(f"{vendor:#06x}\n")
    (folder / "device" / "device").write_text(f"{device:#06x}\n")
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    return folder


def clock(*times: float) -> Iterator[float]:
    yield from times


def test_the_card_s_own_sensor_is_read_and_no_other(tmp_path: Path) -> None:
    sensors(tmp_path, 0, 0x8086, 0x1234, power1_average=1_000_000)
    sensors(tmp_path, 1, CARD.vendor_id, CARD.device_id, power1_average=250_000_000)
    (tmp_path / "hwmon2").mkdir()  # a sensor of no PCI device
    source, why = power_source(CARD, tmp_path)
    assert source and source.watts and source.name == "hwmon, power1_average" and why == ""
    assert source.watts() == 250.0


def test_a_counter_of_energy_is_taken_before_a_power(tmp_path: Path) -> None:
    folder = sensors(tmp_path, 0, CARD.vendor_id, CARD.device_id, energy1_input=5_000_000, power1_input=1)
    source, _ = power_source(CARD, tmp_path)
    assert source and source.joules and source.joules() == 5.0
    times = clock(10.0, 12.0)
    with Meter(source, lambda: next(times)) as meter:
        (folder / "energy1_input").write_text("605000000")
    assert meter.watts == 300.0


@pytest.mark.parametrize(("cards", "said"), [(0, "no sensor of AMD Radeon RX 7900 XTX"), (2, "2 cards like AMD Radeon RX 7900 XTX")])
def test_without_a_sensor_or_with_two_alike_it_says_so(cards: int, said: str, tmp_path: Path) -> None:
    for number in range(cards):
        sensors(tmp_path, number, CARD.vendor_id, CARD.device_id, power1_average=1)
    source, why = power_source(CARD, tmp_path)
    assert source is None and why.startswith(said)


def test_a_cpu_driver_has_no_power_of_its_own(tmp_path: Path) -> None:
    source, why = power_source(profile("llvmpipe_mesa_26"), tmp_path)
    assert source is None and "CPU driver" in why


class NVMLError(Exception):
    pass


def nvml(uuids: list[str], *, counter: bool = True, power: bool = True) -> SimpleNamespace:
    """What nvidia-ml-py has of these cards; the second one draws 400 W."""
    energy = iter(range(1_000_000, 10_000_000, 800_000))

    def by_uuid(uuid: str) -> str:
        if uuid not in uuids:
            raise NVMLError("Not Found")
        return uuid

    def total(card: str) -> int:
        if not counter:
            raise NVMLError("Not Supported")
        return next(energy)

    def usage(card: str) -> int:
        if not power:
            raise NVMLError("Not Supported")
        return 400_000

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=lambda i: uuids[i],
        nvmlDeviceGetUUID=lambda card: card,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetTotalEnergyConsumption=total,
        nvmlDeviceGetPowerUsage=usage,
    )


H200 = profile("nvidia_h200_linux", uuid="00000000-0000-0000-0000-00000000000B")


def test_nvml_is_asked_for_the_card_with_vulkan_s_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = ["GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(cards))
    source, _ = power_source(H200)
    assert source and source.joules and source.name == "NVML, counter of energy"
    times = clock(0.0, 2.0)
    with Meter(source, lambda: next(times)) as meter:
        pass
    assert meter.watts == 400.0
    monkeypatch.setitem(sys.modules, "pynvml", nvml(cards, counter=False))
    source, _ = power_source(H200)
    assert source and source.watts and source.watts() == 400.0
    monkeypatch.setitem(sys.modules, "pynvml", nvml(cards, counter=False, power=False))
    assert power_source(H200) == (None, "NVML tells no power of NVIDIA H200: Not Supported")
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["GPU-x", "GPU-y"]))
    assert power_source(H200) == (None, "NVML tells nothing of NVIDIA H200: Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'vkback[power]'" in power_source(H200)[1]


def test_a_power_is_read_again_and_again_and_a_short_run_has_none() -> None:
    readings = iter([100.0] + [300.0] * 1000)
    source = PowerSource("made up", watts=lambda: next(readings))
    times = clock(0.0, 1.0)
    with Meter(source, lambda: next(times)) as meter:
        pass
    assert meter.watts is not None and meter.watts >= 100.0
    short = clock(0.0, 0.1)
    with Meter(PowerSource("made up", joules=lambda: 5.0), lambda: next(short)) as meter:
        pass
    assert meter.watts is None
    with Meter(None) as meter:
        pass
    assert meter.watts is None


@pytest.mark.vulkan
def test_vkbench_shows_tokens_a_joule_beside_tokens_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vkback.timing.power.MIN_S", 0.0)
    monkeypatch.setattr(vkbench, "power_of", lambda engine: PowerSource("made up", watts=lambda: 50.0))
    save = tmp_path / "r.json"
    options = ["-m", "demo-dense", "-p", "0", "-n", "4", "-r", "2", "--read-rate", "0", "--power", "--save", str(save)]
    ran = CliRunner().invoke(vkbench.app, options)
    assert ran.exit_code == 0, ran.exception
    head, _, row = [line for line in ran.stdout.splitlines() if line.startswith("|")]
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in row.split("|")), strict=True))
    (result,) = json.loads(save.read_text())
    assert cells["W"] == "50.0" and result["watts"] == 50.0
    assert result["ts_per_watt"] == pytest.approx(result["avg_ts"] / 50) and float(cells["t/s/W"]) == pytest.approx(
        result["avg_ts"] / 50, rel=0.01
    )


def test_results_without_power_say_nothing_of_it() -> None:
    probe = replace(BENCH.probes[0], watts=None)
    assert probe.row()["ts_per_watt"] is None
    assert {"W", "t/s/W"} <= set(BENCH.optional)
