"""Prompts in programs of many tokens: how they are cut, and that neither the cuts, the padding nor the limits of a submit show."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_gguf import gpt_oss_metadata, gpt_oss_tensors, llama_metadata, llama_tensors, write_gguf
from prompt_kernels import logits_after
from rich.console import Console

from vkback.device import Arena, Device, OutOfDeviceMemory
from vkback.device import recorder as recorder_module
from vkback.engine import prompts as prompt_module
from vkback.engine.engine import Engine, EngineError
from vkback.engine.plans import Plans
from vkback.engine.prompts import next_size, program_sizes
from vkback.errors import ModelError
from vkback.evaluate.judge import nmse
from vkback.events import Reported
from vkback.ops.lowering import PlanError
from vkback.plan.cost.forecast import cuts, dispatch_us, low_costs
from vkback.plan.schedule import Schedule
from vkback.report.bars import Bars

FLOAT_NMSE = 1e-6
"""As in test_engine.py."""

N_CTX = 600

LENGTHS = (1, 15, 16, 17, 100, 513)

SIZES = [512, 256, 128, 64, 32, 16]


# --- how a prompt is cut ------------------------------------------------------------------------------------------------------------


def piece_sizes(count: int, sizes: Sequence[int]) -> list[int]:
    """Tokens of each program that a prompt of `count` tokens goes through."""
    out: list[int] = []
    while count > 0:
        out.append(next_size(count, sizes))
        count -= out[-1]
    return out


@pytest.mark.parametrize(
    ("ubatch", "n_ctx", "sizes"),
    [
        (512, 4096, SIZES),
        (512, 100, [100, 64, 32, 16]),
        (100, 4096, [100, 64, 32, 16]),
        (16, 512, [16]),
        (17, 512, [17, 16]),
        (5, 512, [5]),
        (1, 512, [1]),
        (512, 1, [1]),
        (1024, 2000, [1024, *SIZES]),
    ],
)
def test_programs_are_halved_down_to_sixteen_tokens(ubatch: int, n_ctx: int, sizes: list[int]) -> None:
    assert program_sizes(ubatch, n_ctx) == sizes


@pytest.mark.parametrize(
    ("count", "pieces"),
    [
        (1, [16]),
        (16, [16]),
        (17, [32]),
        (33, [32, 16]),
        (48, [64]),
        (50, [64]),
        (100, [128]),
        (300, [256, 32, 16]),
        (384, [512]),
        (383, [256, 128]),
        (512, [512]),
        (513, [512, 16]),
        (1400, [512, 512, 256, 128]),
    ],
)
def test_pieces_decrease_and_hold_little_padding(count: int, pieces: list[int]) -> None:
    assert piece_sizes(count, SIZES) == pieces


def test_every_length_is_cut_into_few_programs() -> None:
    for count in range(1, 1200):
        pieces = piece_sizes(count, SIZES)
        assert sorted(pieces, reverse=True) == pieces
        assert 0 <= sum(pieces) - count < max(16, pieces[-1] / 4 + 1, 17 * (pieces[-1] == 32))
        assert len(pieces) <= 2 + count // 512 + 4
        assert next_size(count, SIZES) == pieces[0]


# --- against token by token ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a context longer than the built-in models'."""
    folder = tmp_path_factory.mktemp("ubatch")
    return write_gguf(folder / "long.gguf", "llama", llama_metadata(context_length=N_CTX), llama_tensors(tied=False))


def ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(32, size=count)]


def load(path: Path, device: Device, *, ubatch: int = 512, n_ctx: int = N_CTX) -> Engine:
    return Engine.load(path, device, n_ctx=n_ctx, act="f32", progress=False, ubatch=ubatch)


@pytest.fixture(scope="module")
def engine(path: Path, device: Device) -> Iterator[Engine]:
    with load(path, device) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def one_by_one(engine: Engine) -> np.ndarray:
    """Logits after each of `ids(520)`, each token by itself."""
    engine.reset()
    return np.stack([engine.decode_logits(t) for t in ids(520)])


def schedule_of(engine: Engine, tokens: int) -> Schedule:
    """That of the program of a prompt of exactly `tokens` tokens."""
    return dict(engine.prompt_schedules(tokens))[tokens]


@pytest.mark.vulkan
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_of_any_length_is_token_by_token(length: int, engine: Engine, one_by_one: np.ndarray) -> None:
    engine.reset()
    assert nmse(engine.prompt_logits(ids(length)), one_by_one[:length]) <= FLOAT_NMSE
    assert engine.n_past == length
    assert nmse(engine.decode_logits(ids(520)[length]), one_by_one[length]) <= FLOAT_NMSE
    assert nmse(logits_after(engine, [ids(length + 1)]), one_by_one[length]) <= FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize("cuts", [(1,), (100,), (16, 17, 300), (256, 512)])
def test_a_prompt_in_several_calls_goes_on(cuts: Sequence[int], engine: Engine, one_by_one: np.ndarray) -> None:
    tokens = ids(514)
    pieces = [tokens[a:b] for a, b in zip((0, *cuts), (*cuts, 514), strict=True)]
    assert nmse(logits_after(engine, pieces), one_by_one[513]) <= FLOAT_NMSE


@pytest.mark.vulkan
def test_the_same_prompt_has_the_same_bits_whatever_ran_before(path: Path, engine: Engine, device: Device) -> None:
    engine.reset()
    first = engine.prompt_logits(ids(333))
    logits_after(engine, [ids(N_CTX)])
    engine.reset()
    assert np.array_equal(engine.prompt_logits(ids(333)), first)
    with load(path, device) as fresh:
        fresh.prompt(ids(20))
        fresh.reset()
        assert np.array_equal(fresh.prompt_logits(ids(333)), first)


@pytest.mark.vulkan
def test_padding_stores_nothing(engine: Engine) -> None:
    """Rows of the cache beyond the prompt stay as they are, though the last program has more tokens than are left."""
    engine.reset()
    engine.prompt(ids(N_CTX))
    rows = {name: engine.device.download(r, np.uint16).reshape(2, N_CTX, -1) for name, r in engine.state.items()}
    engine.reset()
    engine.prompt(ids(100)[::-1])  # one program of 128
    for name, r in engine.state.items():
        now = engine.device.download(r, np.uint16).reshape(2, N_CTX, -1)
        assert np.array_equal(now[:, 100:], rows[name][:, 100:])
        assert not np.array_equal(now[:, :100], rows[name][:, :100])


@pytest.mark.vulkan
@pytest.mark.parametrize("ubatch", [1, 5, 100, 4096])
def test_any_ubatch_gives_the_same_text(ubatch: int, path: Path, device: Device, one_by_one: np.ndarray) -> None:
    with load(path, device, ubatch=ubatch) as engine:
        assert engine.ubatch == ubatch
        count = 20 if ubatch < 10 else 250
        engine.prompt(ids(count))
        assert nmse(engine.decode_logits(ids(520)[count]), one_by_one[count]) <= FLOAT_NMSE
        assert {size for size, _ in engine.prompts.programs} <= set(program_sizes(ubatch, N_CTX))


@pytest.mark.vulkan
def test_a_model_with_windows_sinks_and_experts_too(tmp_path: Path, device: Device) -> None:
    path = write_gguf(tmp_path / "oss.gguf", "gpt-oss", gpt_oss_metadata(), gpt_oss_tensors())
    tokens = np.random.default_rng(3).integers(160, size=61).tolist()
    with load(path, device, n_ctx=64) as engine:
        want = np.stack([engine.decode_logits(t) for t in tokens])
        engine.reset()
        assert nmse(engine.prompt_logits(tokens), want) <= FLOAT_NMSE
        assert [size for size, _ in engine.prompts.programs] == [64]


@pytest.mark.vulkan
def test_a_program_is_made_when_first_used(path: Path, device: Device) -> None:
    with load(path, device) as engine:
        assert not engine.prompts.programs and not engine.prompts.memory
        engine.prompt(ids(10))
        assert [size for size, _ in engine.prompts.programs] == [16]
        engine.reset()
        engine.prepare(prompt=[300, 60])
        assert engine.n_past == 0
        before = engine.compiled
        for count in (300, 60):
            engine.reset()
            engine.prompt(ids(count))
        assert engine.compiled == before
        assert sorted(size for size, _ in engine.prompts.programs) == [16, 32, 64, 256]  # 10; 256 + 32 + 16; 64


@pytest.mark.vulkan
def test_logits_of_many_tokens_take_bounded_memory(
    path: Path, device: Device, one_by_one: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_module, "LOGITS_BYTES", 4 * 32 * 64)
    with load(path, device) as engine:
        assert nmse(engine.prompt_logits(ids(200)), one_by_one[:200]) <= FLOAT_NMSE
        assert max(size for size, _ in engine.prompts.programs) == 64
        assert engine.prompts.memory["logits of prompts"] == 4 * 32 * 64
        monkeypatch.setattr(prompt_module, "LOGITS_BYTES", 1)
        assert engine.prompts.sizes("all") == [16]


# --- limits of a submit -------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
def test_cuts_keep_every_submit_below_the_limit(engine: Engine) -> None:
    schedule = engine.schedule("prompt")
    costs = low_costs(engine.device.caps)
    flat = list(schedule.dispatches())
    whole = sum(dispatch_us(d, costs) for d in flat) + costs.stage_us * len(schedule.stages)
    assert cuts(schedule, costs, 2 * whole) == {0: pytest.approx(whole)}
    assert list(cuts(schedule, costs, 0.0)) == list(range(len(flat)))
    limit = max(dispatch_us(d, costs) for d in flat) + costs.stage_us
    submits = cuts(schedule, costs, limit)
    assert 2 < len(submits) < len(flat)
    assert max(submits.values()) <= limit
    begins = [*submits, len(flat)]
    for (a, b), us in zip(pairwise(begins), submits.values(), strict=True):
        assert sum(dispatch_us(d, costs) for d in flat[a:b]) <= us


@pytest.mark.vulkan
def test_a_prompt_cut_into_many_submits_has_the_same_bits(
    path: Path, engine: Engine, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    want = engine.prompt_logits(ids(150)), logits_after(engine, [ids(150)])
    with load(path, device) as cut:
        monkeypatch.setattr(prompt_module, "cuts", lambda schedule, costs, limit: cuts(schedule, costs, 0.0))
        found = cut.prompt_logits(ids(150)), logits_after(cut, [ids(150)])
        for recording in cut.prompts.recordings.values():
            assert len(recording.parts) == len(recording.predicted_us) > 12
    assert np.array_equal(found[0], want[0]) and np.array_equal(found[1], want[1])


@pytest.mark.vulkan
def test_every_submit_of_a_cut_program_begins_with_a_barrier_for_everything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what came before, for all shaders and copies; a cut between stages needs no other, one within a stage none at all."""
    engine.reset()
    engine.prompt(ids(10))
    program = engine.prompts.programs[16, "none"]
    stages = program.schedule.stages
    before: list[frozenset[str]] = []
    barrier = recorder_module.barrier_of

    def noted(kinds: frozenset[Any], after: frozenset[Any]) -> Any:
        before.append(kinds)
        return barrier(kinds, after)

    monkeypatch.setattr(recorder_module, "barrier_of", noted)
    starts = list(accumulate((len(stage) for stage in stages), initial=0))[:-1]
    apart = [start for i, start in enumerate(starts) if i not in program.schedule.barrier_free]
    for begins in ([0], starts, range(sum(map(len, stages))), [0, starts[2]], [0, starts[2] + 1]):
        before.clear()
        parts = program.record_parts("cut", begins)
        assert len(parts) == len(begins) == before.count(frozenset())
        assert len(before) == len({*begins, *apart}), "each stage or cut has one, but for barrier-free stages"
        for part in parts:
            part.destroy()


@pytest.mark.vulkan
def test_programs_slower_than_predicted_are_cut_anew(path: Path, device: Device, one_by_one: np.ndarray) -> None:
    with load(path, device, ubatch=64) as engine:
        prompts = engine.prompts
        engine.prompt(ids(64))
        before = len(prompts.recordings[64, "none"].parts)
        prompts.slowness = 2.0**40
        engine.reset()
        engine.prompt(ids(64))
        assert len(prompts.recordings[64, "none"].parts) > before
        assert nmse(engine.decode_logits(ids(65)[64]), one_by_one[64]) <= FLOAT_NMSE


@pytest.mark.vulkan
def test_one_submit_that_took_too_long_is_enough(path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run has more cuts, and what a device's own slowness asks for. That run counts too: the program is compiled already."""
    with load(path, device, ubatch=64) as engine:
        prompts = engine.prompts
        engine.prepare(prompt=64)
        whole = sum(prompts.recordings[64, "none"].predicted_us)
        clock = iter(range(10**6))
        monkeypatch.setattr(time, "perf_counter", lambda: 4e-6 * whole * next(clock))
        monkeypatch.setattr(prompt_module, "LONGEST_SUBMIT_US", whole)
        engine.prompt(ids(64))
        assert prompts.slowness == 4.0
        engine.reset()
        engine.prompt(ids(64))
        cut = prompts.recordings[64, "none"]
        assert len(cut.parts) > 1 and cut.runs == 3


@pytest.mark.vulkan
def test_one_slow_run_of_short_submits_is_not_enough(path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(path, device, ubatch=64) as engine:
        prompts = engine.prompts
        engine.prepare(prompt=64)
        whole = sum(prompts.recordings[64, "none"].predicted_us)
        clock = iter(range(10**6))
        monkeypatch.setattr(time, "perf_counter", lambda: 4e-6 * whole * next(clock))
        monkeypatch.setattr(prompt_module, "LONGEST_SUBMIT_US", 100 * whole)
        engine.prompt(ids(64))
        assert prompts.slowness == 1.0
        engine.reset()
        engine.prompt(ids(64))
        assert prompts.slowness > 4.0


@pytest.mark.vulkan
def test_a_kernel_too_long_for_a_submit_gets_fewer_tokens(
    path: Path, device: Device, one_by_one: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load(path, device) as engine:
        longest = max(dispatch_us(d, low_costs(device.caps)) for d in schedule_of(engine, 64).dispatches())
        monkeypatch.setattr(prompt_module, "LONGEST_SUBMIT_US", longest)
        caplog.clear()
        engine.prompt(ids(513))
        assert engine.ubatch == 64
        assert nmse(engine.decode_logits(ids(520)[513]), one_by_one[513]) <= FLOAT_NMSE
        assert all(max(r.predicted_us) <= longest + low_costs(device.caps).stage_us for r in engine.prompts.recordings.values())
    assert caplog.messages[0].startswith("one kernel over 512 tokens of a prompt may take over ")


@pytest.mark.vulkan
def test_a_program_beyond_a_limit_of_the_device_gives_way(
    path: Path, device: Device, one_by_one: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the largest storage buffer is too small for the activations of so many tokens."""
    plan = Plans.prompt

    def limited(self: Plans, tokens: int, head: Any) -> Schedule:
        if tokens > 128:
            raise PlanError(f"[plan] {tokens} tokens")
        return plan(self, tokens, head)

    monkeypatch.setattr(Plans, "prompt", limited)
    with load(path, device) as engine:
        engine.prepare(prompt=513)
        engine.prompt(ids(513))
        assert engine.ubatch == 128
        assert nmse(engine.decode_logits(ids(520)[513]), one_by_one[513]) <= FLOAT_NMSE
        assert "512 tokens of a prompt at a time exceed a limit of the device ([plan] 512 tokens); going on" in caplog.text


# --- memory -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
def test_too_little_memory_for_many_tokens_is_said_once_and_fewer_go_at_a_time(
    path: Path, device: Device, one_by_one: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load(path, device) as engine:
        most = schedule_of(engine, 128).activation_bytes
        arena = Device.arena

        def small(self: Device, purpose: str, nbytes: int, kind: Any = "device") -> Arena:
            if purpose == "activations of prompts" and nbytes > most:
                raise OutOfDeviceMemory(f"asked {nbytes} for {purpose}")
            return arena(self, purpose, nbytes, kind)

        monkeypatch.setattr(Device, "arena", small)
        for _ in range(2):
            engine.reset()
            engine.prompt(ids(513))
            assert nmse(engine.decode_logits(ids(520)[513]), one_by_one[513]) <= FLOAT_NMSE
        assert engine.ubatch == 128
        assert [line.split(";")[1] for line in caplog.messages if "no memory" in line] == [
            " going on with 256 (--ubatch 256)",
            " going on with 128 (--ubatch 128)",
        ]


@pytest.mark.vulkan
def test_too_little_memory_for_any_program_is_an_error(path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Device, purpose: str, nbytes: int, kind: str) -> Arena:
        raise OutOfDeviceMemory("nothing left")

    with load(path, device, ubatch=32) as engine:
        monkeypatch.setattr(Device, "arena", none)
        with pytest.raises(OutOfDeviceMemory, match="nothing left"):
            engine.prompt([1, 2, 3])
        assert engine.n_past == 0


@pytest.mark.vulkan
def test_programs_share_their_memory(path: Path, device: Device) -> None:
    before = device.live_objects().get("Arena", 0)
    with load(path, device) as engine:
        loaded = device.live_objects()["Arena"]
        engine.prompt(ids(300))  # 256, 64
        engine.reset()
        engine.prompt(ids(513))  # 512, 16
        found = engine.prompts.memory["activations of prompts"]
        assert found == schedule_of(engine, 512).activation_bytes
        counters = len(engine.prompts.programs)
        assert device.live_objects()["Arena"] <= loaded + 2 + counters + 2  # and the device's own for uploads
    assert device.live_objects().get("Arena", 0) <= before + 2


# --- errors, progress ---------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
def test_errors_name_what_was_asked(path: Path, engine: Engine, device: Device) -> None:
    with pytest.raises(ModelError, match=r"^\[model\] ubatch is 0 \(int\), expected a whole number, 1 or more, or None$"):
        load(path, device, ubatch=0)
    engine.reset()
    with pytest.raises(EngineError, match="prompt of 601 tokens after 0 does not fit the context of 600; load with a larger n_ctx"):
        engine.prompt(ids(601))
    with pytest.raises(EngineError, match="prompt of 601 tokens after 0"):
        engine.prepare(prompt=[5, 601])


def test_a_long_prompt_shows_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(np.arange(0.0, 100.0, 0.4))
    monkeypatch.setattr("vkback.report.bars.time.perf_counter", lambda: float(next(now)))

    def shown(terminal: bool, steps: int) -> str:
        out = io.StringIO()
        bars = Bars(prompts=True, console=Console(file=out, force_terminal=terminal, width=80))
        with Reported(bars, "prompt", 100) as prompt:
            for _ in range(steps):
                prompt.advance(100 / steps)
        return out.getvalue()

    assert shown(terminal=False, steps=10) == ""
    assert shown(terminal=True, steps=2) == "", "0.8 s"
    assert "prompt" in shown(terminal=True, steps=10)


def test_software_drivers_take_small_programs_by_default(ctx: Any) -> None:
    gpu = replace(ctx.caps, vendor="nvidia", device_type="discrete")
    assert prompt_module.default_ubatch(gpu) == 512
    assert prompt_module.default_ubatch(replace(ctx.caps, vendor="software", device_type="cpu")) == 64
