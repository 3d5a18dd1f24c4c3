"""The numpy twin against llama.cpp and itself, and perplexity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkback import quants
from vkback.evaluate.perplexity import Logits, PerplexityError, perplexity
from vkback.evaluate.twin import NumpyTwin, TwinError
from vkback.paths import builtin_model

DATA = Path(__file__).parents[1] / "data"
LLAMA_CPP = json.loads((DATA / "llama_cpu.json").read_text())


@pytest.fixture(scope="module")
def twins() -> dict[str, NumpyTwin]:
    return {name: NumpyTwin(builtin_model(name)) for name in LLAMA_CPP}


# --- twin ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_logits_are_those_of_llama_cpp(name: str, twins: dict[str, NumpyTwin]) -> None:
    """Its CPU rounds activations to 8 bits before every product, an error of up to 1 part in 254 of the largest of 32. Through the layers
    of these models that moved logits by 0.085 at most; their standard deviation is about 3."""
    for prompt in LLAMA_CPP[name]["prompts"]:
        logits = twins[name].forward(prompt["ids"], head="last")["result_output"][0]
        for token, theirs in prompt["top10"]:
            assert abs(logits[token] - theirs) < 0.12
        assert len(np.flatnonzero(logits > prompt["top10"][-1][1] + 0.12)) < 10


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_greedy_text_is_that_of_llama_cpp_until_a_margin_is_narrow(name: str, twins: dict[str, NumpyTwin]) -> None:
    steps = 0
    for prompt in LLAMA_CPP[name]["prompts"]:
        narrow = next((i for i, m in enumerate(prompt["margin_to_second"]) if m < 0.1), 48)
        ids, margins = twins[name].generate_greedy(prompt["ids"], narrow)
        assert ids == prompt["greedy"][:narrow]
        assert len(margins) == narrow
        steps += narrow
    assert steps > 25, "margins so narrow that hardly a step was compared"


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_every_step_along_the_text_of_llama_cpp_has_its_margin(name: str, twins: dict[str, NumpyTwin]) -> None:
    """240 steps with its own text fed, so that one narrow margin does not end the comparison."""
    differences = []
    for prompt in LLAMA_CPP[name]["prompts"]:
        twins[name].reset()
        logits = twins[name].forward(prompt["ids"] + prompt["greedy"][:-1])["result_output"][len(prompt["ids"]) - 1 :]
        for row, best, theirs in zip(logits, prompt["greedy"], prompt["margin_to_second"], strict=True):
            mine = row[best] - np.delete(row, best).max()
            assert mine > 0 or theirs < 0.1
            differences.append(mine - theirs)
    # Measured 0.045 (dense) and 0.033 (experts); a margin is the difference of two logits that each move by a few hundredths.
    assert np.std(differences) < 0.06


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_perplexity_is_that_of_llama_cpp(name: str, twins: dict[str, NumpyTwin]) -> None:
    theirs = LLAMA_CPP[name]["perplexity"]
    twin = twins[name]
    ids = twin.model.tokenizer.encode((DATA / "war_of_the_worlds.txt").read_text())[:4096]
    sofar: list[float] = []
    got = perplexity(ids, one_by_one(twin.logits), bos=twin.model.tokenizer.bos, on_chunk=sofar.append)
    assert got.tokens == theirs["tokens_scored"]
    # Measured 0.02 % and 0.03 %; rounding of activations moves single losses both ways.
    assert got.value == pytest.approx(theirs["ppl"], rel=0.005)
    assert sofar[-1] == got.value and len(sofar) == 8


def test_tokens_at_once_equal_tokens_one_by_one(twins: dict[str, NumpyTwin]) -> None:
    for name, twin in twins.items():
        tokens = LLAMA_CPP[name]["prompts"][0]["ids"]
        twin.reset()
        together = twin.forward(tokens)["result_output"]
        twin.reset()
        twin.forward(tokens[:4], head="none")
        apart = [twin.forward([t], 4 + i)["result_output"][0] for i, t in enumerate(tokens[4:])]
        # Both in float64; a value of the cache may round to F16 either way when its sums were ordered otherwise.
        np.testing.assert_allclose(together[4:], apart, atol=2e-3)
        twin.reset()
        np.testing.assert_allclose(twin.forward(tokens, head="last")["result_output"][0], together[-1], atol=2e-3)


def test_padding_changes_nothing(twins: dict[str, NumpyTwin]) -> None:
    twin = twins["demo-moe-MXFP4_MOE.gguf"]
    tokens = LLAMA_CPP["demo-moe-MXFP4_MOE.gguf"]["prompts"][2]["ids"]
    twin.reset()
    alone = twin.forward(tokens)["result_output"]
    twin.reset()
    padded = {"tokens": np.array([*tokens, 7, 7], np.int32), "pos": np.array([0, 1, 2, 3, -1, -1], np.int32)}
    graph = twin.model.graph(6, twin.n_ctx, head="all")
    np.testing.assert_allclose(twin.run(graph, padded, ["result_output"])["result_output"][:4], alone, atol=2e-3)


def test_wanted_values_and_weights_decoded_anew(twins: dict[str, NumpyTwin]) -> None:
    name = "demo-dense-Q4_K_M.gguf"
    twin = twins[name]
    twin.reset()
    values = twin.forward([0, 5], wanted=["inp_embd", "ffn_out-0", "cache_k_l0"])
    assert {k: v.shape for k, v in values.items()} == {
        "inp_embd": (2, 256),
        "ffn_out-0": (2, 256),
        "cache_k_l0": (2, 512, 64),
        "result_output": (2, 4096),
    }
    row = quants.decode("Q6_K", twin.model.file.tensors["token_embd.weight"].data[5])
    np.testing.assert_array_equal(values["inp_embd"][1], row)
    frugal = NumpyTwin(twin.model, keep_bytes=0).forward([0, 5])
    np.testing.assert_array_equal(frugal["result_output"], values["result_output"])


def test_twin_errors(twins: dict[str, NumpyTwin]) -> None:
    twin = twins["demo-dense-Q4_K_M.gguf"]
    with pytest.raises(TwinError, match="3 tokens at position 510 do not fit a context of 512"):
        twin.forward([1, 2, 3], 510)
    with pytest.raises(TwinError, match="0 tokens at position 0"):
        twin.forward([])
    with pytest.raises(TwinError, match="token id 4096 is outside the vocabulary of 4096"):
        twin.forward([1, 4096])
    with pytest.raises(TwinError, match="no value called ffn_out-99"):
        twin.forward([1], wanted=["ffn_out-99"])


def test_greedy_stops_at_a_stop_id(twins: dict[str, NumpyTwin]) -> None:
    prompt = LLAMA_CPP["demo-dense-Q4_K_M.gguf"]["prompts"][0]
    ids, _ = twins["demo-dense-Q4_K_M.gguf"].generate_greedy(prompt["ids"], 9, stop=[prompt["greedy"][2]])
    assert ids == prompt["greedy"][:3]


def one_by_one(logits: Callable[[Sequence[int], int], np.ndarray]) -> Logits:
    return lambda chunks, first: (logits(chunk, first) for chunk in chunks)


# --- perplexity ---------------------------------------------------------------------------------------------------------------------


def test_perplexity_of_known_distributions() -> None:
    seen: list[tuple[list[int], int]] = []

    def uniform(ids: Any, first: int) -> np.ndarray:
        seen.append((list(ids), first))
        return np.zeros((len(ids) - first, 50))

    got = perplexity(list(range(20)), one_by_one(uniform), bos=49, n_ctx=8)
    assert got.value == pytest.approx(50) and got.error == pytest.approx(0)
    assert got.tokens == 2 * 3, "of 8 positions those from 4 to 6 predict the next token; the rest of the text is left out"
    assert seen == [([49, *range(1, 8)], 4), ([49, *range(9, 16)], 4)]

    def half_sure(ids: Any, first: int) -> np.ndarray:
        # The right next token has probability 1/2: logit log(49) against 49 others with 0.
        logits = np.zeros((len(ids) - first, 50))
        for row, target in enumerate(ids[first + 1 :]):
            logits[row, target] = math.log(49)
        return logits

    assert perplexity(list(range(20)), one_by_one(half_sure), bos=None, n_ctx=8, n_chunks=1).value == pytest.approx(2)


def test_perplexity_of_a_short_text_is_refused() -> None:
    with pytest.raises(PerplexityError, match="the text has 3 tokens, one chunk takes 512"):
        perplexity([1, 2, 3], lambda chunks, first: iter(()), bos=0)
