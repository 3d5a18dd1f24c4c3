"""The granitehybrid architecture: sizes, states across prompts, generation and rewinding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models.synth import planned_tensors

FLOAT_NMSE = 1e-6
"""Float path, as in test_engine.py."""


def tokens(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(0, 300, n)]


# --- weights ------------------------------------------------------------------------------------------------------------------------


def test_small_tensors_of_a_recurrence_are_f32() -> None:
    types = {t.name: t.type for t in planned_tensors("granite-4-h-1b-Q4_K_S", layers=1)}
    f32 = {"ssm_a", "ssm_d", "ssm_dt.bias", "ssm_conv1d.bias", "ssm_conv1d.weight"}
    f32 |= {"ssm_norm.weight", "attn_norm.weight", "ffn_norm.weight"}
    assert {name.removeprefix("blk.0.") for name, type in types.items() if type == "F32"} == {*f32, "output_norm.weight"}


# --- on a device --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], device: Device) -> Iterator[Engine]:
    with Engine.load(tiny("tiny-granitehybrid"), device, n_ctx=128, act="f32", ubatch=32, progress=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def twin(tiny: Callable[[str], Path]) -> NumpyTwin:
    return NumpyTwin(tiny("tiny-granitehybrid"), n_ctx=128)


@pytest.mark.vulkan
def test_a_prompt_of_several_programs_and_then_tokens(engine: Engine, twin: NumpyTwin) -> None:
    """75 tokens in programs of 32, 32 and 16 with padding, then tokens, then a second prompt of an even and one of an odd length."""
    ids = tokens(100)
    want = twin.logits(ids)
    engine.reset()
    got = [engine.prompt_logits(ids[:75]), *(engine.decode_logits(t)[None] for t in ids[75:80])]
    got += [engine.prompt_logits(ids[80:90]), engine.prompt_logits(ids[90:97]), *(engine.decode_logits(t)[None] for t in ids[97:])]
    assert nmse(np.concatenate(got), want) <= FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize("when", [(0,), (2,), (2, 3)])
def test_tokens_that_run_again_find_the_states_of_those_before(
    when: tuple[int, ...], tiny: Callable[[str], Path], device: Device, twin: NumpyTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an overflow of f16, in which run of a program it may be, one of the repeated ones, too."""
    text = tokens(40)
    with Engine.load(tiny("tiny-granitehybrid"), device, n_ctx=64, act="f32", progress=False, ubatch=16) as engine:
        found = iter([{"x.overflow": 1e5} if run in when else {} for run in range(100)])
        monkeypatch.setattr(engine.prompts, "_overflowed", lambda recording: next(found))
        engine.prompt(text[:16])
        got = engine.prompt_logits(text[16:])
        assert engine.n_past == len(text) and engine.ctx.f16_scales
        assert nmse(got, twin.logits(text)[16:]) <= FLOAT_NMSE


@pytest.mark.vulkan
def test_a_new_sequence_forgets_the_old_one(engine: Engine) -> None:
    ids = tokens(20)
    engine.reset()
    want = [engine.decode_logits(t) for t in ids]
    engine.reset()
    assert np.array_equal(np.array([engine.decode_logits(t) for t in ids]), want)
    engine.reset()
    first = engine.prompt_logits(ids)
    engine.reset()
    assert np.array_equal(engine.prompt_logits(ids), first)


@pytest.mark.vulkan
def test_preparing_in_the_middle_of_a_text_changes_nothing(engine: Engine) -> None:
    """It runs a token at the first free position, and padding."""
    ids = tokens(12)
    engine.reset()
    want = [engine.decode_logits(t) for t in ids]
    engine.reset()
    got = [engine.decode_logits(t) for t in ids[:7]]
    engine.prepare(prompt=16, logits=True)
    assert np.array_equal(np.array([*got, *(engine.decode_logits(t) for t in ids[7:])]), want)


@pytest.mark.vulkan
def test_greedy_text_is_the_twin_s(engine: Engine, twin: NumpyTwin) -> None:
    ids = tokens(19)
    want, margins = twin.generate_greedy(ids, 40)
    sure = next((i for i, margin in enumerate(margins) if margin < 1e-3), 40)
    assert sure >= 10
    engine.reset()
    engine.prompt(ids[:-1])
    assert list(engine.generate(ids[-1], 40))[:sure] == want[:sure]


@pytest.mark.vulkan
@pytest.mark.parametrize("taken", [1, 8, 11])
def test_a_generation_left_early_is_rewound(taken: int, engine: Engine, twin: NumpyTwin) -> None:
    """The device is up to two submits ahead of the tokens that were taken: its states have seen tokens that the text does not have."""
    ids = tokens(9)
    engine.reset()
    engine.prompt(ids[:-1])
    text = engine.generate(ids[-1], 40)
    made = [next(text) for _ in range(taken)]
    text.close()
    assert engine.n_past == len(ids) - 1 + taken
    fed = [*ids, *made[:-1]]
    more = tokens(30)[20:]
    want = twin.logits([*fed, *more])[len(fed) :]
    assert nmse(np.stack([engine.decode_logits(t) for t in more]), want) <= FLOAT_NMSE
