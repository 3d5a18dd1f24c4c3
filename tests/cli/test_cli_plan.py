"""vkback plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_kit import call

from vkback.cli import main
from vkback.cli.terminal import CONTINUED, WIDTH, shortened
from vkback.device import Capabilities, Device
from vkback.tuning.lookup import device_table


def whole_lines(text: str) -> list[str]:
    """Lines of a listing, what did not fit one put back into it."""
    return text.replace("\n" + CONTINUED, " ").splitlines()


def test_plan_is_made_for_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64") == 0
    lines = whole_lines(capsys.readouterr().out)
    assert lines[0].startswith("vkback: 0 = NVIDIA H200")
    stages = [int(text.split()[0]) for text in lines[2:-2] if not text.lstrip().startswith(("barrier:", "barrier-free:"))]
    assert stages == sorted(stages)
    assert "      barrier: waits for inp_embd (written by 0)" in lines
    assert lines[-2].startswith(f"{stages[-1] + 1} stages (30 barrier-free), {len(stages)} dispatches, ")
    assert lines[-1].startswith("predicted: ")
    assert " by 4560.0 GB/s and 3.00 us a stage (95% of the published 4800 GB/s; 3 us a stage as an H200 takes), " in lines[-1]


@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "llvmpipe_mesa_26", "broadcom_v3d_4_2_pi4"])
@pytest.mark.parametrize("model", ["demo-dense", "demo-moe"])
def test_plan_fits_a_terminal(profile: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--profile", profile, "-m", model, "-c", "64")
    assert call(monkeypatch, main.main, *arguments) == 0
    short = capsys.readouterr().out
    assert call(monkeypatch, main.main, *arguments, "--json") == 0
    dispatches = [d for s in json.loads(capsys.readouterr().out)["stages"] for d in s["dispatches"]]
    assert call(monkeypatch, main.main, *arguments, "--verbose") == 0
    verbose = capsys.readouterr().out
    assert max(map(len, (short + verbose).splitlines())) <= WIDTH
    rows = [line for line in short.splitlines() if re.match(r" {,4}\d+ \S+ +[a-z_]+ \d+", line)]
    assert len(rows) == len(dispatches)
    assert all(d["kernel"].partition("[")[0].rpartition("/")[2] in row for row, d in zip(rows, dispatches, strict=True))
    assert re.search(r" gemv \d+ lanes=\d+ rows=\d+ ", short)
    assert "defines:" not in short and "QUANT_FILE=" in verbose and "PATH_INT=" in verbose
    assert "ROPE_FREQUENCIES" not in short + verbose and "uvec2" not in short + verbose
    assert all(row in verbose for row in rows)


def test_the_ends_of_long_names_are_shown() -> None:
    assert shortened("ffn_moe_swiglu-0.q8_1", 20) == "~n_moe_swiglu-0.q8_1"
    assert shortened("ffn_out-0", 20) == "ffn_out-0"


def test_plan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["device"] == "NVIDIA H200"
    assert made["summary"]["stages"] == len(made["stages"])
    assert made["summary"]["bytes"] == sum(d["bytes"] for s in made["stages"] for d in s["dispatches"])
    assert made["summary"]["predicted_us"] == pytest.approx(sum(s["predicted_us"] for s in made["stages"]))
    (angles,) = (d for d in made["stages"][0]["dispatches"] if d["op"] == "ROPE_ANGLES")
    assert made["stages"][2]["waits_for"] == [
        {"stage": 1, "tensor": "Qcur_rope-0.qkv", "after": "write", "spins": "part"},
        {"stage": 0, "tensor": angles["node"], "after": "write", "spins": ""},
    ]
    assert made["summary"]["measured_us"] is None


def test_plan_tells_what_lies_in_host_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 26 GiB on a card of 24 GB (deci-49b has 80 layers)."""
    plan = ("plan", "--profile", "amd_rx_7900_xtx_radv", "--shape", "deci-49b-Q4_K_S", "-c", "2048")
    assert call(monkeypatch, main.main, *plan, "-ngl", "auto", "--json") == 0
    host = json.loads(capsys.readouterr().out)["host"]
    assert 60 < host["n_gpu_layers"] < 81 and host["device_bytes"] < 24 << 30 < host["device_bytes"] + host["bytes"]
    assert 4 < host["tokens_per_s"] < 8  # 24 GiB at 912 GB/s and 4 at 25: 28 and 170 ms
    assert call(monkeypatch, main.main, *plan, "-ngl", "40") == 0
    last = whole_lines(capsys.readouterr().out)[-1]
    said = r"weights: [\d.]+ GiB on the device, the first 41 of 80 layers in host memory \([\d.]+ GiB\); forecast about [\d.]+ t/s "
    assert re.match(said, last), last
    assert call(monkeypatch, main.main, *plan, "-ngl", "all") == 0
    assert re.match(r"weights: [\d.]+ GiB on the device, nothing in host memory$", whole_lines(capsys.readouterr().out)[-1])


def sentinel_table(folder: Path, caps: Capabilities) -> str:
    """A folder with a device's own table, by which its stages run barrier-free."""
    (folder / device_table(caps)).write_text('[[schedule]]\nset = { sync = "sentinel" }\nmeasured = "a test"\n')
    return str(folder)


def test_plan_tells_barrier_free_stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("VKBACK_TUNING", sentinel_table(tmp_path, Capabilities.from_profile("nvidia_h200_linux")))
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64") == 0
    lines = whole_lines(capsys.readouterr().out)
    assert "      barrier: waits for inp_embd (written by 0)" in lines
    said = r"      barrier-free: spins on part of Qcur_rope-0\.qkv \(written by 1\); happened before: rope_angles\.\w+ \(written by 0\)"
    assert any(re.fullmatch(said, line) for line in lines)
    assert lines[-2].startswith("32 stages (30 barrier-free), ")
    assert lines[-1].endswith(", 1.00 a barrier-free one (a third of it, as on an H200)")
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert [s["stage"] for s in made["stages"] if s["barrier_free"]] == list(range(2, 32))
    assert made["stages"][2]["waits_for"][0] == {"stage": 1, "tensor": "Qcur_rope-0.qkv", "after": "write", "spins": "part"}
    assert made["summary"]["barrier_free"] == 30
    assert made["summary"]["predicted_us"] == pytest.approx(2 * 3 + 30 + made["summary"]["bytes"] / made["costs"]["read_gb_s"] / 1e3)


@pytest.mark.vulkan
def test_plan_measures_barrier_free_stages_with_barriers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, device: Device
) -> None:
    monkeypatch.setenv("VKBACK_TUNING", sentinel_table(tmp_path, device.caps))
    assert call(monkeypatch, main.main, "plan", "-m", "demo-moe", "-c", "64", "--measure") == 0
    assert " us stage by stage with barriers before all; " in whole_lines(capsys.readouterr().out)[-1]


@pytest.mark.vulkan
def test_plan_measures_every_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "plan", "-m", "demo-moe", "-c", "64", "-d", "5", "--measure", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["costs"]["read_gb_s"] > 0
    assert made["costs"]["source"] == "both just measured"
    assert all(s["measured_us"] > 0 for s in made["stages"])
    assert made["summary"]["measured_us"] == pytest.approx(sum(s["measured_us"] for s in made["stages"]))
    assert made["summary"]["measured_tokens_per_s"] == pytest.approx(1e6 / made["summary"]["measured_together_us"])
    assert call(monkeypatch, main.main, "plan", "-m", "demo-moe", "-c", "64", "-d", "64", "--measure") == 2
    assert capsys.readouterr().err.strip().endswith("vkback: error: --ctx 64: 1 tokens behind 64 others need 65 rows")


def test_plan_of_a_shape_needs_no_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "plan", "--shape", "tiny-llama-Q8_0"
    assert call(monkeypatch, main.main, *shape, "--profile", "nvidia_h200_linux", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "tiny-llama-Q8_0" and data["summary"]["stages"] > 3
    assert call(monkeypatch, main.main, *shape, "--measure") == 2
    assert "--measure and --shape exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--device 0", "--measure"])
def test_plan_refuses_a_device_that_is_and_is_not_here(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", *other.split()) == 2
    assert capsys.readouterr().err.startswith(f"vkback: error: {' and '.join(sorted((other.split()[0], '--profile')))} exclude each other")
