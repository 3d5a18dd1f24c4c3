"""Samplers that are off unless asked for: beside the references in numpy, on their own and in a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from processor_kit import PROMPT, judge_alone, judge_in_a_batch

from vkback import LoadedModel
from vkback.api.errors import ModelError
from vkback.api.options import Options
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import SAMPLERS, Sampler, SamplerError, loop_kind
from vkback.paths import builtin_model

ALL: list[dict[str, Any]] = [
    {"typical_p": 0.5},
    {"top_n_sigma": 0.2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.7},
    {"mirostat": 1, "mirostat_tau": 2.0},
    {"mirostat": 2, "mirostat_tau": 2.0},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1},
    {"samplers": "temperature;top_k"},
]


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[LoadedModel]:
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=256, act="f32", progress=False), sequences=4) as loaded:
        yield loaded


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_each_changes_texts_and_is_the_same_again(model: LoadedModel) -> None:
    plain = [model.generate(PROMPT, max_tokens=16, seed=seed).tokens for seed in range(3)]
    for options in ALL:
        texts = [model.generate(PROMPT, max_tokens=16, seed=seed, **options).tokens for seed in range(3)]
        assert texts != plain, options
        assert model.generate(PROMPT, max_tokens=16, seed=2, **options).tokens == texts[2], options


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_batch_has_the_texts_of_each_alone_and_leaves_plain_ones_as_they_are(model: LoadedModel) -> None:
    """One column and two: those of two add up alike, whoever the other is."""
    plain = model.batch([PROMPT] * 4, max_tokens=16, seed=1)[0].tokens
    for options in ALL:
        alone = model.batch([PROMPT], max_tokens=16, seed=5, **options)[0].tokens
        assert model.batch([PROMPT], n=2, max_tokens=16, seed=5, **options)[0].tokens == alone, options
    assert model.batch([PROMPT] * 4, max_tokens=16, seed=1)[0].tokens == plain  # slots keep nothing of texts before


@pytest.mark.vulkan
def test_plain_texts_beside_chains(model: LoadedModel) -> None:
    """Requests of other kinds share the steps: a text without a chain has the bits that it has beside its like."""
    from concurrent.futures import ThreadPoolExecutor

    wanted = model.batch([PROMPT] * 2, max_tokens=20, seed=1)[0].tokens
    asked: list[dict[str, Any]] = [{}, {"xtc_probability": 1.0, "mirostat": 2}, {"dry_multiplier": 2.0}]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda how: model.batch([PROMPT], max_tokens=20, seed=1, **how)[0].tokens, asked))
    assert found[0] == wanted


BY_HOST: list[dict[str, Any]] = [
    {"seed": 7, "typical_p": 0.6, "top_n_sigma": 3.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"seed": 8, "mirostat": 1, "mirostat_tau": 3.0},
    {"seed": 9, "mirostat": 2, "mirostat_tau": 3.0},
    {"seed": 10, "dynatemp_range": 0.6, "samplers": "top_k;min_p;temperature"},
    {"seed": 11, "dry_multiplier": 2.0, "dry_allowed_length": 1, "repeat_penalty": 1.1},
    {"temperature": 0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"temperature": 0, "xtc_probability": 1.0, "xtc_threshold": 0.05},
]


@pytest.mark.vulkan
@pytest.mark.parametrize("options", BY_HOST, ids=str)
def test_the_device_picks_what_numpy_picks(model: LoadedModel, options: dict[str, Any]) -> None:
    judge_alone(model, options)
    judge_in_a_batch(model, options)


@pytest.mark.vulkan
def test_xtc_and_dry_do_what_they_are_for(model: LoadedModel) -> None:
    logits = model.logits(PROMPT)[-1].astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    likely = np.flatnonzero(p >= 0.02)
    assert len(likely) > 1
    kept = int(likely[np.argmin(p[likely])])
    first = {
        model.generate(PROMPT, max_tokens=1, seed=s, temperature=1, top_p=1, min_p=0, xtc_probability=1, xtc_threshold=0.02).tokens[0]
        for s in range(12)
    }
    assert not first & (set(likely.tolist()) - {kept})
    looped = model.generate("one two three one two three one two", max_tokens=40, temperature=0).tokens
    dried = model.generate("one two three one two three one two", max_tokens=40, temperature=0, dry_multiplier=5.0).tokens

    def repeated(tokens: Any) -> int:
        return max(Counter(zip(tokens, tokens[1:], tokens[2:], strict=False)).values())

    assert repeated(dried) < repeated(looped)


def test_a_request_without_them_is_what_it_was() -> None:
    assert loop_kind(Options().sampler) == "sample"
    assert loop_kind(Options.of({"samplers": ";".join(SAMPLERS)}).sampler) == "sample"
    assert loop_kind(Options.of({"samplers": "edskypmxt"}).sampler) == "sample"
    assert loop_kind(Options.of({"temperature": 0, "typical_p": 0.5, "mirostat": 2}).sampler) == "greedy"
    assert loop_kind(Options.of({"temperature": 0, "xtc_probability": 0.1}).sampler) == "sample, chain"
    assert loop_kind(Options.of({"dry_multiplier": 1}).sampler) == "sample, penalties, dry"
    assert loop_kind(Options.of({"repeat_penalty": 2, "samplers": ["top_k"]}).sampler) == "sample, chain"


def test_the_order_is_the_given_one() -> None:
    def order(**options: Any) -> tuple[str, ...]:
        return Options.of(options).sampler.chain.order

    assert order(samplers="temp;top-k;typ_p", typical_p=0.5) == ("temperature", "top_k", "typ_p")
    assert order(samplers=["min_p", "top_k"]) == ("min_p", "top_k")
    assert order(samplers="tk") == ("temperature", "top_k")
    assert order(xtc_probability=0.5, typical_p=0.9) == ("top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
    assert order(mirostat=1, typical_p=0.9) == ("temperature", "mirostat")
    assert order(samplers="top_k", top_k=0, temperature=3.0) == ("temperature",)
    assert Options.of({"samplers": "top_k", "top_k": 0, "temperature": 3.0}).sampler.chain.temp == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samplers": "top_k;nonsense"}, r"samplers is .* expected names with ; between, or a list of them, each once: penalties, dry"),
        ({"samplers": "top_k;top_k"}, "each once"),
        ({"samplers": 3}, "expected names"),
        ({"mirostat": 3}, r"mirostat is 3 \(int\), expected 0 \(off\), 1 or 2"),
        ({"dry_base": 0.5}, "dry_base is 0.5 .* expected a number, 1 or more"),
        ({"dry_allowed_length": 0}, "expected a whole number, 1 or more"),
        ({"dry_sequence_breakers": 5}, "expected a text, or a list of texts"),
        ({"typical_p": 1.5}, "expected a number from 0 to 1"),
        ({"typ_p": 0.5}, "Did you mean typical_p"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        Options.of(options)


@pytest.mark.vulkan
def test_breakers(model: LoadedModel) -> None:
    """A token that holds one breaks alone; one that ends in the beginning of one before the tokens of the rest."""
    engine, tokenizer = model.engine, model.tokenizer
    newline = engine.dry_words(Sampler(dry_multiplier=1.0, dry_sequence_breakers=("\n",)), 100)[256 : 256 + model.n_vocab]
    for token in range(0, tokenizer.n_vocab, 7):
        assert bool(newline[token] & 1) == (b"\n" in tokenizer.token_bytes(token, special=True))
    words = engine.dry_words(Sampler(dry_multiplier=1.0, dry_sequence_breakers=("xyz",)), 100)
    (x,) = tokenizer.encode("x", add_bos=False, add_end=False)[-1:]
    assert words[256 + x] & 2 and words[8] == len(tokenizer.encode("yz", add_bos=False, add_end=False))
    with pytest.raises(SamplerError, match=r"dry_sequence_breakers: 39 bytes behind the first of each, at most 31"):
        model.generate(PROMPT, max_tokens=1, dry_multiplier=1.0, dry_sequence_breakers=["abcdefghij" * 4])
