"""Python functions that change the logits of each token, and top_k with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from processor_kit import PROMPT, Floats, Ids, judge_alone, judge_in_a_batch, nothing

from vkback import LoadedModel, Result
from vkback.api.errors import ModelError
from vkback.api.options import Options
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import SamplerError
from vkback.paths import builtin_model


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[LoadedModel]:
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)) as loaded:
        yield loaded


OPTIONS: list[dict[str, Any]] = [  # chains and DRY: test_samplers.py, which compiles their kernels
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "temperature": 1.4, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
    {"seed": 5, "repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "penalty_last_n": 5, "logit_bias": {5: 2.0}},
    {"temperature": 0, "json_schema": {"enum": ["Moby", "Dick"]}},
    {"seed": 6, "logprobs": 2, "stop": "e"},
    {"temperature": 0, "ignore_eos": True},
]


@pytest.mark.vulkan
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_function_that_changes_nothing_gives_the_text_of_the_device(model: LoadedModel, options: dict[str, Any]) -> None:
    judge_alone(model, options)


@pytest.mark.vulkan
def test_functions_see_the_text_and_change_the_choice_in_their_order(model: LoadedModel) -> None:
    seen: list[list[int]] = []

    def only(ids: Ids, logits: Floats) -> Floats:
        seen.append(ids.tolist())
        changed = np.full_like(logits, -np.inf)
        changed[[7, 9]] = 0.0, 1.0
        return changed

    def ban(ids: Ids, logits: Floats) -> None:
        logits[9] = -np.inf

    prompt = model.tokenizer.encode(PROMPT)
    assert model.generate(PROMPT, max_tokens=3, temperature=0, logits_processor=only).tokens == (9, 9, 9)
    assert seen == [prompt, [*prompt, 9], [*prompt, 9, 9]]
    assert model.generate(PROMPT, max_tokens=3, logits_processor=[only, ban]).tokens == (7, 7, 7)
    session = model.session()
    session.generate(PROMPT, max_tokens=2, temperature=0, logits_processor=ban)
    continued = session.generate(max_tokens=3, temperature=0)
    assert continued.timings.reused_tokens == len(prompt) + 1, "the session goes on"
    whole = model.generate(list(session.tokens[: len(prompt) + 2]), max_tokens=3, temperature=0)
    assert continued.tokens == whole.tokens


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda ids, logits: logits[:-1], r"gave float32 \[4095\], expected float32 \[4096\] or None"),
        (lambda ids, logits: logits.astype(np.int32), r"gave int32 \[4096\], expected float32 \[4096\]"),
        (lambda ids, logits: logits * np.nan, "gave logits that are NaN or infinite"),
        (lambda ids, logits: np.full_like(logits, -np.inf), "no token is left after logits_processor"),
    ],
)
def test_what_cannot_be_chosen_from_is_named(model: LoadedModel, processor: Any, says: str) -> None:
    with pytest.raises(SamplerError, match=says):
        model.generate(PROMPT, max_tokens=2, logits_processor=processor)
    assert len(model.generate(PROMPT, max_tokens=2, temperature=0).tokens) == 2, "the model goes on"


@pytest.mark.vulkan
def test_an_error_of_a_function_is_its_own(model: LoadedModel) -> None:
    def broken(ids: Ids, logits: Floats) -> Floats:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate(PROMPT, max_tokens=2, logits_processor=broken)


def test_what_is_no_function_is_refused() -> None:
    for wrong in (5, [nothing, "x"], "nothing"):
        with pytest.raises(ModelError, match=r"logits_processor is .*expected a function \(tokens, logits\) -> logits, or several"):
            Options.of({"logits_processor": wrong})
    assert Options.of({"logits_processor": None}).logits_processor == () and Options.of({"logits_processor": [nothing]}).logits_processor
    with pytest.raises(ModelError, match="Did you mean logits_processor"):
        Options.of({"logits_processors": nothing})


@pytest.mark.vulkan
def test_top_k_of_one_is_one(model: LoadedModel) -> None:
    """Of equals, too: the k with the lowest ids are kept."""

    def equal(ids: Ids, logits: Floats) -> Floats:
        return np.where(np.arange(len(logits)) < 8, 1.0, 0.0).astype(np.float32)

    def drawn(top_k: int) -> set[int]:
        return {
            token
            for seed in range(4)
            for token in model.generate(PROMPT, max_tokens=6, top_k=top_k, top_p=1.0, min_p=0.0, seed=seed, logits_processor=equal).tokens
        }

    assert drawn(1) == {0} and drawn(2) == {0, 1}
    greedy = model.generate(PROMPT, max_tokens=8, temperature=0).tokens
    assert model.generate(PROMPT, max_tokens=8, top_k=1, temperature=1.5, seed=9).tokens == greedy


@pytest.mark.vulkan
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_texts_of_a_batch_have_functions_of_their_own(model: LoadedModel, options: dict[str, Any]) -> None:
    judge_in_a_batch(model, options)


@pytest.mark.vulkan
def test_an_error_of_a_function_ends_its_text_alone(model: LoadedModel) -> None:
    def broken(ids: Ids, logits: Floats) -> Floats:
        raise KeyError("mine")

    async def side_by_side() -> list[Result | BaseException]:
        asked = [model.agenerate(PROMPT, max_tokens=6, temperature=0, logits_processor=each) for each in (broken, None)]
        return await asyncio.gather(*asked, return_exceptions=True)

    failed, whole = asyncio.run(side_by_side())
    assert isinstance(failed, KeyError) and failed.args == ("mine",)
    assert isinstance(whole, Result) and whole.tokens == model.generate(PROMPT, max_tokens=6, temperature=0).tokens
