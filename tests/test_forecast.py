"""What a schedule should take, and what its stages wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.base import Arg, Dispatch
from vkback.plan.forecast import Costs, Wait, moved_bytes, predicted_us, waits
from vkback.plan.schedule import Schedule, into_stages
from vkback.shader import Variant
from vkback.timing.stages import profile_costs


def launch(args: tuple[Arg, ...], nbytes: int = 0) -> Dispatch:
    return Dispatch(Variant("x.comp"), args, b"", (1, 1, 1), "X", "x", nbytes=nbytes)


A, B, C = (Tensor(name, "F32", (8,)) for name in "abc")
CACHE = Tensor("cache", "F16", (2, 100, 8), "state")


def test_a_stage_takes_its_bytes_and_a_fixed_cost() -> None:
    costs = Costs(read_gb_s=100.0, stage_us=2.0, barrier_free_us=0.5, source="")
    assert predicted_us([launch((), 300_000), launch((), 100_000)], costs, 1) == pytest.approx(2.0 + 4.0)


def test_of_a_cache_only_the_rows_in_use_are_read() -> None:
    whole = 2 * 100 * 8 * 2
    assert moved_bytes(launch((Arg(CACHE), Arg(A)), whole + 32), 25) == whole // 4 + 32
    assert moved_bytes(launch((Arg(CACHE), Arg(A)), whole + 32), 1000) == whole + 32
    assert moved_bytes(launch((Arg(CACHE, "w"), Arg(A)), 64), 25) == 64


def test_stages_wait_for_what_is_written_and_for_what_is_still_read() -> None:
    """a is read by stages 1 and 2 and written again by 3, which b of 1 does not hold up."""
    stages = into_stages([
        launch((Arg(A, "w"),)), launch((Arg(A), Arg(B, "w"))), launch((Arg(A), Arg(B), Arg(C, "w"))), launch((Arg(A, "w"),)),
    ])  # fmt: skip
    assert waits(Schedule(stages)) == [
        [], [Wait(0, "a", "write")], [Wait(1, "b", "write"), Wait(0, "a", "write")], [Wait(2, "a", "read")],
    ]  # fmt: skip


def test_parts_of_a_tensor_do_not_wait_for_each_other() -> None:
    upper, lower = launch((Arg(A, "w", part="upper"),)), launch((Arg(B), Arg(A, "w", part="lower")))
    schedule = Schedule([[upper, launch((Arg(B, "w"),))], [lower], [launch((Arg(A),))]])
    assert waits(schedule) == [[], [Wait(0, "b", "write")], [Wait(1, "a", "write")]]


def test_a_profile_without_a_peak_says_that_its_rate_is_a_guess() -> None:
    name = "broadcom_v3d_7_1_pi5"
    costs = profile_costs(name, Capabilities.from_profile(name))
    assert costs.read_gb_s == 60.0
    assert costs.source.startswith("a guess for a device of type integrated, whose peak is not known; ")


def test_a_profile_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"peak_bandwidth_gb_s": 200}')
    assert profile_costs(str(file), Capabilities.from_profile("nvidia_h200_linux")).read_gb_s == pytest.approx(190.0)
