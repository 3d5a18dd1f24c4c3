"""Picking tokens on the device, and the generation loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import BufferRange, Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, Params, Sample, noise, pick
from vkback.ops.storage import nbytes
from vkback.plan.schedule import Schedule, allocate, into_stages
from vkback.program import Program
from vkback.shader import ShaderLibrary

SAMPLE = Sample()
CASES = list(SAMPLE.cases())
EVERYTHING = Params(1.0, 0, 1.0, 0.0, 1, ())


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [c for c in CASES if c.params["vocab"] < 5000 and c.params["temp"] > 0], ids=lambda c: c.line)
@pytest.mark.parametrize(("wg_size", "per_thread"), [(32, 4), (256, 2)])
def test_many_workgroups(case: Case, wg_size: int, per_thread: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size, per_thread=per_thread))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
def test_without_subgroups(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, CASES[6], without_subgroups(ctx))
    assert outcome.ok, outcome.text


def run_loop(
    device: Device,
    library: ShaderLibrary,
    ctx: LowerContext,
    logits: np.ndarray,
    sampler: Params,
    submits: list[int],
    *,
    greedy: bool = False,
) -> dict[str, np.ndarray]:
    """The loop's state after submits of so many tokens each, all of the same logits."""
    capacity = 8
    shapes = {"loop": LOOP_RING + capacity, "tokens": 1, "pos": 1}
    state = tuple(Tensor(name, "I32", (size,), "input") for name, size in shapes.items())
    inputs = (Tensor("logits", "F32", (1, logits.size), "input"), *state)
    node = Node("SAMPLE", inputs, state, {"capacity": capacity, "greedy": greedy})
    values = {"logits": logits.astype(np.float32), "loop": sampler.words(capacity), "tokens": np.zeros(1, np.int32)}
    values["pos"] = np.array([10], np.int32)
    stages = into_stages(SAMPLE.lower(node, ctx))
    slots, size = allocate(stages)
    with device.arena("loop", 1 << 20, "device") as arena:
        ranges: dict[str, BufferRange] = {}
        for t in inputs:
            ranges[t.name] = arena.alloc(nbytes(t), t.name)
            device.upload(ranges[t.name], values[t.name].reshape(-1).view(np.uint8))
        program = Program(device, library, Schedule(stages, slots, size), ranges, {})
        for repeat in submits:
            device.submit(program.record(f"x{repeat}", repeat=repeat)).wait(60)
        out = {t.name: device.download(ranges[t.name]).view(np.int32) for t in state}
        program.close()
    return out


@pytest.mark.vulkan
def test_tokens_do_not_depend_on_the_submits(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    logits = 2 * np.random.default_rng(1).standard_normal(500)
    sampler = Params(1.0, 50, 0.95, 0.02, 3, ())
    one, all_at_once = (run_loop(device, library, ctx, logits, sampler, s) for s in ([1] * 6, [6]))
    np.testing.assert_array_equal(one["loop"], all_at_once["loop"])
    ring = one["loop"][LOOP_RING : LOOP_RING + 6]
    assert len(set(ring.tolist())) > 1
    expected = [pick(logits, sampler, 10 + i) for i in range(6)]
    assert [p.token for p in expected if p.sure] == [t for t, p in zip(ring, expected, strict=True) if p.sure]
    assert one["pos"][0] == 16 and one["loop"][0] == 6 and one["tokens"][0] == ring[5]


@pytest.mark.vulkan
def test_any_mix_of_filters(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Logits from peaked to flat; filters that bind first, second or not at all."""
    rng = np.random.default_rng(5)
    use = with_params(ctx, wg_size=32, per_thread=4)
    compared = 0
    for _ in range(40):
        logits = rng.choice([0.5, 2.0, 6.0]) * rng.standard_normal(600)
        top_k, top_p, min_p = int(rng.choice([0, 1, 20, 300])), float(rng.choice([1.0, 0.95, 0.5])), float(rng.choice([0.0, 0.02, 0.2]))
        sampler = Params(float(rng.choice([0.3, 1.0, 4.0])), top_k, top_p, min_p, int(rng.integers(2**32)), ())
        want = pick(logits, sampler, 10)
        if want.sure:
            got = run_loop(device, library, use, logits, sampler, [1])
            assert got["tokens"][0] == want.token, sampler
            compared += 1
    assert compared > 25


@pytest.mark.vulkan
@pytest.mark.parametrize("greedy", [True, False])
def test_the_loop_stops_at_the_end_of_text_and_wraps_around(
    greedy: bool, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    logits = np.zeros(64)
    logits[41] = 5.0
    end = run_loop(device, library, ctx, logits, Params(0.0, 0, 1.0, 0.0, 1, (7, 41)), [3], greedy=greedy)
    assert end["loop"][:2].tolist() == [1, STATUS_EOS] and end["pos"][0] == 11 and end["tokens"][0] == 41
    free = run_loop(device, library, ctx, logits, Params(0.0, 0, 1.0, 0.0, 1, (7,)), [11], greedy=greedy)
    assert free["loop"][:2].tolist() == [11, 0] and free["pos"][0] == 21
    assert (free["loop"][LOOP_RING:] == 41).all()


def test_noise_has_gumbels_distribution() -> None:
    """Over ids, over positions and over seeds; Kolmogorov-Smirnov at 20000 draws: 0.0115 is passed by chance one time in a hundred."""
    n = 20000
    ids = np.arange(n)
    draws = {
        "ids": noise(1, 1, ids),
        "positions": np.array([noise(1, p, np.array([5]))[0] for p in range(n)]),
        "seeds": np.array([noise(s, 1, np.array([5]))[0] for s in range(n)]),
    }
    for over, values in draws.items():
        uniform = np.sort(np.exp(-np.exp(-values)))
        distance = np.abs(uniform - (ids + 0.5) / n).max()
        assert distance < 0.0115, f"over {over}: {distance}"


def test_draws_have_the_odds_of_the_softmax() -> None:
    """Chi-squared over 5 tokens, 4000 positions: 18.5 is passed by chance one time in a thousand (4 degrees of freedom)."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5], np.float32)
    sampler = dataclasses.replace(EVERYTHING, temp=0.7)
    counts = np.bincount([pick(logits, sampler, p).token for p in range(4000)], minlength=5)
    odds = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    assert ((counts - 4000 * odds) ** 2 / (4000 * odds)).sum() < 18.5


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {3, 1}),
        ({"top_p": 0.6}, {3, 1}),  # 0.55 is not enough
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.0}, {3}),
        ({"min_p": 0.3}, {3, 1}),
        ({"min_p": 0.2}, {3, 1, 4}),
        ({"top_k": 3, "top_p": 0.65}, {3, 1}),  # of the three left: 0.63 is not enough for one, is for two
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_of_the_reference(filters: dict[str, Any], kept: set[int]) -> None:
    """Softmax of the logits: 0.075, 0.203, 0.027, 0.551, 0.123 (ids 0..4)."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5], np.float32)
    sampler = dataclasses.replace(EVERYTHING, **filters)
    assert {pick(logits, sampler, p).token for p in range(300)} == kept


def test_close_calls_are_told() -> None:
    logits = np.array([1.0, 0.0], np.float32)
    share = float(1 / (1 + np.exp(-1)))
    assert not pick(logits, dataclasses.replace(EVERYTHING, top_p=share), 0).sure
    assert not pick(logits, dataclasses.replace(EVERYTHING, min_p=float(np.exp(-1))), 0).sure
    assert pick(logits, dataclasses.replace(EVERYTHING, top_p=share - 0.05), 0).sure


def sample_node(vocab: int, words: int, n: int = 1) -> Node:
    state = (Tensor("loop", "I32", (words,), "input"), Tensor("tokens", "I32", (1,), "input"), Tensor("pos", "I32", (1,), "input"))
    return Node("SAMPLE", (Tensor("logits", "F32", (n, vocab)), *state), state, {"capacity": 16, "greedy": False})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (sample_node(100, 40), "expected 48 words for a ring of 16"),
        (sample_node(100, 48, 2), "picks one token, got logits"),
        (sample_node(2**18 + 1, 48), "262145 tokens, sampling takes at most 262144; use temperature 0"),
    ],
)
def test_what_is_refused(wrong: Node, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        SAMPLE.lower(wrong, planned_for("nvidia_h200_linux"))


def test_greedy_is_one_dispatch() -> None:
    ctx = planned_for("nvidia_h200_linux")
    greedy = SAMPLE.build_case(128256, EVERYTHING.temp, 40, 0.95, 0.05, 1, greedy=True).build().node
    assert len(SAMPLE.lower(greedy, ctx)) == 1
    sampled = SAMPLE.build_case(3000, EVERYTHING.temp, 40, EVERYTHING.top_p, EVERYTHING.min_p, EVERYTHING.seed).build().node
    assert len(into_stages(SAMPLE.lower(sampled, ctx))) == 3
