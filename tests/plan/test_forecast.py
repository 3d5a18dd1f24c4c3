"""What a schedule should take, and what its stages wait for."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_paths import planned_for

from vkback.device import Capabilities
from vkback.device.capabilities import profile_ids
from vkback.engine.generation import TOKENS_PER_SUBMIT
from vkback.engine.prompts import LONGEST_SUBMIT_US, UBATCH
from vkback.graph import Tensor
from vkback.models import Model
from vkback.models.synth import outline
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.storage import nbytes
from vkback.paths import builtin_model
from vkback.plan.cost.forecast import Costs, Wait, cuts, low_costs, moved_bytes, predicted_us, repeats, waits
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, into_stages
from vkback.quants import row_bytes
from vkback.shader import Variant
from vkback.timing.stages import profile_costs


def launch(args: tuple[Arg, ...], moved: int = 0) -> Dispatch:
    return Dispatch(Variant("x.comp"), args, b"", (1, 1, 1), "X", "x", nbytes=moved)


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
    assert moved_bytes(launch((Arg(CACHE, "w"), Arg(A)), whole + 64), 25) == whole + 64


def test_stages_wait_for_what_is_written_and_for_what_is_still_read() -> None:
    """a is read by stages 1 and 2 and written again by 3, which b of 1 does not hold up."""
    stages = into_stages(
        [launch((Arg(A, "w"),)), launch((Arg(A), Arg(B, "w"))), launch((Arg(A), Arg(B), Arg(C, "w"))), launch((Arg(A, "w"),))]
    )
    assert waits(Schedule(stages)) == [[], [Wait(0, "a", "write")], [Wait(1, "b", "write"), Wait(0, "a", "write")], [Wait(2, "a", "read")]]


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


@pytest.mark.parametrize(("name", "used"), [("demo-dense", 1.0), ("demo-moe", 0.25)])
def test_weight_bytes_are_those_of_the_matrices_that_a_token_reads(name: str, used: float) -> None:
    """Each matrix once, of experts those used, of the embedding one row; no norm, no bias, no activation."""
    model = Model.open(builtin_model(name))
    assert not model.hp.n_expert or model.hp.n_expert_used / model.hp.n_expert == used
    for profile, fusion in (("nvidia_h200_linux", "all"), ("llvmpipe_mesa_26", "all"), ("llvmpipe_mesa_26", "none")):
        s = plan(model.graph(1, 64, head="last"), planned_for(profile), fusion=fusion)
        read = {a.tensor.name: a.tensor for d in s.dispatches() if d.op != "GET_ROWS" for a in d.args if a.tensor.kind == "weight"}
        matrices = [t for t in read.values() if len(t.shape) > 1]
        (embedding,) = (a.tensor for d in s.dispatches() if d.op == "GET_ROWS" for a in d.args if a.tensor.kind == "weight")
        whole = sum(nbytes(t) * (used if len(t.shape) == 3 else 1) for t in matrices)
        assert s.weight_bytes == whole + row_bytes(embedding.type, embedding.shape[-1])
        assert s.weight_bytes < sum(d.nbytes for d in s.dispatches() if d.weight_bytes)


def test_as_many_tokens_go_into_a_submit_as_it_has_time_for() -> None:
    """A token of 100 ms: 8 take 0.8 s, 4 take 0.4 s."""
    costs = Costs(read_gb_s=1.0, stage_us=0.0, barrier_free_us=0.0, source="", gflops=1.0)
    schedule = Schedule([[launch((), 60_000_000)], [launch((), 40_000_000)]])
    assert [repeats(schedule, costs, limit, 8) for limit in (8e5, 7.9e5, 3.9e5, 1.9e5, 1.0)] == [8, 4, 2, 1, 1]


WATCHDOG_US = 2e6
"""Windows resets a driver that works on a submit for so long (TdrDelay)."""


@pytest.mark.parametrize("profile", [name for name in profile_ids() if name.endswith("_windows")])
@pytest.mark.parametrize("name", ["llama-8b-Q4_K_M", "gpt-oss-20b-MXFP4"])
def test_no_submit_is_predicted_to_wake_the_watchdog_of_windows(name: str, profile: str) -> None:
    """A prompt's largest piece over a full cache, in submits, and tokens; by the low rates of a device that was not measured."""
    ctx = planned_for(profile)
    model, costs = Model.of(outline(name)), low_costs(ctx.caps)
    prompt = plan(model.graph(UBATCH, 4096, head="none"), ctx)
    assert max(cuts(prompt, costs, LONGEST_SUBMIT_US).values()) < WATCHDOG_US
    token = plan(model.graph(1, 4096, head="last"), ctx)
    (of_one,) = cuts(token, costs, WATCHDOG_US).values()
    assert of_one * repeats(token, costs, LONGEST_SUBMIT_US, TOKENS_PER_SUBMIT) < WATCHDOG_US
