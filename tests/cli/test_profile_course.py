"""What vkback profile says beside one run: the course of a decode, sums by role, memory, and which kernel got slower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.cli import profile_against
from vkback.cli.vkbench_sides import ROOT
from vkback.device import Capabilities, Device, MemoryUse
from vkback.ops.dispatch import Dispatch
from vkback.plan.cost.forecast import Costs
from vkback.report import profile_compare as compare
from vkback.report import profile_course, profile_page, profile_text
from vkback.shader import Variant
from vkback.timing.modules import Share
from vkback.timing.profile import AWAKE_S, KernelCost, Phase, awake_s
from vkback.timing.profile_model import Memory, Profile, Speeds

RUNS = 64


def kernel(source: str, path: tuple[str, ...], each: list[float]) -> KernelCost:
    """A kernel that took so many microseconds in each run."""
    dispatch = Dispatch(Variant(source), (), b"", (1, 1, 1), "OP", f"{path[-1]}-{path[1]}")
    total = sum(each)
    return KernelCost(
        0,
        dispatch.label,
        "OP",
        dispatch,
        (Share(path, 1.0, "w" if "gemv" in source else ""),),
        (),
        len(each),
        total,
        1.0,
        10,
        10,
        total,
        0.0,
        1.0,
        tuple(each),
    )


@pytest.fixture
def grown() -> Profile:
    """Attention takes 10 us more with every token; all else is flat."""
    attention = kernel("attention/decode/attention.comp", ("blk", "0", "attn"), [1000.0 + 10 * i for i in range(RUNS)])
    flat = [kernel("gemv/gemv.comp", ("blk", str(layer), "ffn", "down"), [500.0] * RUNS) for layer in range(3)]
    rows = tuple(range(65, 65 + RUNS))
    phase = Phase(f"decode ({RUNS} tokens)", 1, RUNS, (attention, *flat), 2e5, 2e5, "timestamps", rows=rows)
    use = MemoryUse({"weights": (3 << 30, 2), "KV cache": (1 << 29, 1)}, 4 << 30)
    memory = Memory(8 << 30, 4 << 30, use, 16 << 30)
    speeds = Speeds(2.0, 0.5, 4, 1, 9, 256, 0.3, 0.2, 40.0, {"driver": 0.5, "weights": 1.5})
    return Profile(
        "llama 1B Q8_0", "GPU", "driver", 3, 64, 128, "auto", 3 << 30, speeds, (phase,), Costs(1.0, 2.0, 1.0, ""), None, "", memory
    )


def test_the_course_shows_what_grows_and_what_is_flat(grown: Profile) -> None:
    found = profile_course.course(grown.phases[0], 4)
    assert found and len(found.rows) == 16 and found.rows[0] == 68 and found.rows[-1] == 128
    assert found.total[0] == pytest.approx(4 * (1.0 + 1.5) + 0.06)
    growth = dict(zip(("total", *found.names), found.growth, strict=True))
    assert growth["attention/decode/attention"] == pytest.approx(1.6, abs=0.02)
    assert growth["gemv:ffn.down"] == pytest.approx(1.0)
    lines = list(profile_text.report(grown, every=4))
    at = next(i for i, line in enumerate(lines) if line.startswith("Course of decode (64 tokens): ms of 4 runs together"))
    assert lines[at + 1].strip() == "1: gemv:ffn.down" and lines[at + 2].strip() == "2: attention/decode/attention"
    assert lines[at + 20].split() == ["growth", "x1.24", "x1.00", "x1.59"]
    assert not any(line.startswith("Course") for line in profile_text.report(grown))
    data = profile_text.as_data(grown, 4)
    assert data["course"]["rows"] == list(found.rows) and data["course"]["kernels_ms"]["gemv:ffn.down"] == [6.0] * 16
    page = profile_page.page(grown, 4)
    assert "Course: milliseconds of 4 runs together" in page and page.count("<polyline") >= 3
    assert profile_course.course(grown.phases[0], 40) is None, "one whole part is no course"


def test_kernels_of_all_layers_are_summed_in_the_text(grown: Profile) -> None:
    lines = list(profile_text.report(grown))
    at = next(i for i, line in enumerate(lines) if line.startswith("All layers together"))
    assert lines[at + 1].split() == ["gemv:ffn.down", "96.000", "53.3", "192"]
    assert profile_text.as_data(grown)["phases"][0]["roles"]["gemv:ffn.down"] == pytest.approx(96000.0)


def test_memory_and_the_parts_of_a_load_are_told(grown: Profile) -> None:
    text = " ".join(" ".join(profile_text.report(grown)).split())
    assert "memory 3.50 GiB in 3 buffers, at most 4.00 GiB at once, of 16.00 GiB; free 8.00 GiB before the load, 4.00 GiB now" in text
    assert "weights 3.00 GiB (2 buffers); KV cache 512.00 MiB" in text
    assert "driver 500 ms; weights 1500 ms" in text
    data = profile_text.as_data(grown)
    assert data["memory"]["buffers"] == 3 and data["memory"]["purposes"]["weights"] == {"bytes": 3 << 30, "buffers": 2}


@pytest.mark.vulkan
def test_a_device_keeps_account_of_its_memory(device: Device) -> None:
    before = device.memory_use()
    with device.arena("a purpose", 5 << 20), device.arena("a purpose", 1 << 20):
        use = device.memory_use()
        assert use.purposes["a purpose"] == (6 << 20, 2) and use.buffers == before.buffers + 2
        assert use.nbytes == before.nbytes + (6 << 20)
    after = device.memory_use()
    assert "a purpose" not in after.purposes and after.nbytes == before.nbytes and after.peak >= use.nbytes


def test_a_plan_tells_what_memory_it_takes() -> None:
    ran = CliRunner().invoke(cli.app, ["plan", "--shape", "llama-8b-Q4_K_M", "--profile", "nvidia_h200_linux", "--json"])
    memory = json.loads(ran.stdout)["summary"]["memory"]
    assert memory["weights"] == pytest.approx(4.58 * 2**30, rel=0.01) and memory["caches"] == 512 << 20
    assert memory["bytes"] == memory["weights"] + memory["caches"] + memory["activations"] and memory["buffers"] >= 3
    assert memory["device"] == max(h.size for h in Capabilities.from_profile("nvidia_h200_linux").heaps if h.device_local)


def saved(**us: float) -> dict[str, Any]:
    return {
        "phases": [
            {"name": "decode (4 tokens)", "kernels": [{"name": f"{n}:L{i}", "gpu_us": u, "runs": 4} for n, u in us.items() for i in (0, 1)]}
        ]
    }


def test_the_kernel_that_got_slower_is_named_and_no_other() -> None:
    before = [saved(down=400 + i, up=800 + i) for i in range(5)]
    after = [saved(down=440 + i, up=800 + i) for i in range(5)]
    found = compare.compared(before, after)
    assert [(c.kernel, compare.verdict(c)) for c in found] == [("down", "slower"), ("up", "no")]
    text = "\n".join(compare.text(found, ("old", "this")))
    assert "down                                         201.00     221.00   +10.0% slower" in text
    assert "0.79 of 100 kernels" in text
    one = compare.compared(before[:1], after[:1])
    assert {compare.verdict(c) for c in one} == {"?"} and "knows nothing of load and clocks" in "\n".join(compare.text(one, ("a", "b")))
    gone = compare.compared(before, [saved(up=800.0)] * 5)
    assert {c.kernel: compare.verdict(c) for c in gone} == {"down": "gone", "up": "no"}


def test_two_builds_are_profiled_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order = []

    def one(folder: Path, options: list[str]) -> dict[str, Any]:
        order.append(folder)
        return saved(down=500.0 if folder == ROOT else 400.0)

    (tmp_path / "vkback").mkdir()
    (tmp_path / "vkback" / "__init__.py").write_text("")
    monkeypatch.setattr(profile_against, "profile_of", one)
    ran = CliRunner().invoke(cli.app, ["profile", "--against", str(tmp_path), "--rounds", "4", "--json"])
    assert ran.exit_code == 0, ran.exception
    assert json.loads(ran.stdout) == [
        {"phase": "decode (4 tokens)", "kernel": "down", "before_us": [200.0] * 4, "after_us": [250.0] * 4, "verdict": "slower"}
    ]
    pairs = [order[i : i + 2] for i in range(0, 8, 2)]
    assert all(set(pair) == {tmp_path, ROOT} for pair in pairs)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "expected what vkback profile --json writes"), ("[]", "it has no phases"), (None, "expected FILE.json of an earlier profile")],
)
def test_what_is_no_profile_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    ran = CliRunner().invoke(cli.app, ["profile", "--against", str(file)])
    assert said in str(ran.exception)


def test_a_device_works_for_most_of_the_time_however_long_the_host_reads() -> None:
    """A card lowers its clock by how much of the last second it worked: with a pause of fixed work the share fell as marks grew in number,
    and a decode seemed to slow down over 256 runs."""

    def least_share(work: float | None) -> float:
        spans = [(0.0 if run == 0 else 0.002 + 0.0002 * run) for run in range(256)]  # the host takes longer and longer
        at = [(idle, awake_s(idle) if work is None else work) for idle in spans]
        windows = [at[i : i + 16] for i in range(len(at) - 15)]
        return min(sum(w for _, w in some) / sum(i + w for i, w in some) for some in windows)

    assert least_share(AWAKE_S) < 0.35 < 2 / 3 <= least_share(None) + 1e-9
