"""Many prompts at once in Python: each text is that of its prompt alone, whatever ends it, and a text that fails ends alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny
from waiting import wait_until

import vkback
from vkback.api import ModelError
from vkback.api.errors import ContextLengthError
from vkback.api.options import Options
from vkback.checks import OptionError
from vkback.device import Device
from vkback.engine.constraint import Ahead, ConstraintError
from vkback.engine.engine import Engine, EngineError
from vkback.paths import builtin_model

PROMPTS = ["It was a dark and stormy night, and", "Another", "Who goes there", "The sea was calm", "She said"]

MARGIN = 2e-3
"""Of the logits' deviation: a step of several columns adds in another order than one of one column; in f32 that changes them by less than
1e-5 of it, and by 1e-3 where a value of the cache is rounded the other way."""


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[vkback.LoadedModel]:
    with vkback.LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32")) as loaded:
        yield loaded


def assert_greedy(model: vkback.LoadedModel, prompt: str | Sequence[int], tokens: Sequence[int]) -> None:
    """Each token has the largest logit, or one that rounding may put there."""
    ids = model.ids(prompt, start=True)
    rows = model.logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
    for row, token in zip(rows, tokens, strict=True):
        assert row.max() - row[token] <= MARGIN * row.std(), (prompt, token, int(row.argmax()))


def assert_pages_come_back(model: vkback.LoadedModel) -> None:
    """Soon nobody holds pages but the prefix cache, and nobody has the model."""

    def came_back() -> bool:
        with model.stepping("test"):
            batch = model.batched().paged
            if not batch.busy:
                batch.prefixes.clear()
                assert batch.pool.free == batch.pool.n_pages
            return not batch.busy

    wait_until(came_back)


@pytest.mark.vulkan
def test_texts_are_those_of_each_prompt_alone_in_the_order_of_the_prompts(model: vkback.LoadedModel) -> None:
    found = model.batch(PROMPTS, max_tokens=8, temperature=0)
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert_greedy(model, prompt, result.tokens)
        assert result.finish_reason == "length" and result.text == model.tokenizer.decode(result.tokens)
        timings = result.timings
        assert (timings.prompt_tokens + timings.reused_tokens, timings.decode_tokens) == (len(model.ids(prompt, start=True)), 8)
        assert timings.prompt_s > 0 and timings.decode_s > 0
    ids = [model.ids(prompt, start=True) for prompt in PROMPTS]
    assert [r.tokens for r in model.generate(ids, max_tokens=8, temperature=0)] == [r.tokens for r in found]
    assert model.batch([], max_tokens=8) == []


@pytest.mark.vulkan
def test_n_texts_of_a_prompt_have_seeds_that_follow_each_other(model: vkback.LoadedModel) -> None:
    found = model.batch(PROMPTS[:2], n=3, max_tokens=4, seed=7)
    assert [r.seed for r in found] == [7, 8, 9] * 2
    assert [r.tokens for r in found] == [model.generate(p, max_tokens=4, seed=s).tokens for p in PROMPTS[:2] for s in (7, 8, 9)]


@pytest.mark.vulkan
def test_best_of_gives_the_texts_whose_tokens_are_the_likeliest(model: vkback.LoadedModel) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "seed": 7, "temperature": 1.5, "ignore_eos": True}
    every = model.batch(PROMPTS[:2], n=4, logprobs=0, **options)
    expected = []
    for own in (every[:4], every[4:]):
        expected += sorted(own, key=lambda r: -sum(t.logprob for t in r.logprobs))[:2]
    found = model.batch(PROMPTS[:2], n=2, best_of=4, **options)
    assert [(r.seed, r.tokens) for r in found] == [(r.seed, r.tokens) for r in expected]
    assert all(not r.logprobs for r in found), "nobody asked for them"
    one = model.generate(PROMPTS[0], best_of=4, logprobs=2, **options)
    assert one.tokens == expected[0].tokens and len(one.logprobs[0].top) == 2
    assert asyncio.run(model.agenerate(PROMPTS[0], best_of=4, **options)).tokens == one.tokens
    assert [r.tokens for r in model.generate(PROMPTS[0], n=2, best_of=4, **options)] == [r.tokens for r in expected[:2]]
    with pytest.raises(ModelError, match=r"best_of is 1 \(int\), expected a whole number, at least n, which is 2"):
        model.batch(PROMPTS, n=2, best_of=1)


@pytest.mark.vulkan
def test_pieces_come_as_they_are_made_and_results_hold_all(model: vkback.LoadedModel) -> None:
    with model.batch_stream(PROMPTS, max_tokens=24, temperature=0, logprobs=2) as stream:
        pieces = list(stream)
    assert None not in stream.results and len(stream.results) == len(PROMPTS)
    for index, result in enumerate(stream.finished()):
        own = [chunk for i, chunk in pieces if i == index]
        assert "".join(chunk.text for chunk in own) == result.text
        assert [t for chunk in own for t in chunk.tokens] == list(result.tokens)
        assert [t for chunk in own for t in chunk.logprobs] == list(result.logprobs)
        alone = model.generate(PROMPTS[index], max_tokens=24, temperature=0, logprobs=2)
        assert [t.logprob for t in result.logprobs] == pytest.approx([t.logprob for t in alone.logprobs], abs=0.01)
        assert all([t.token, t.logprob] == [t.top[0][0], t.top[0][2]] for t in result.logprobs)
    first = [i for i, _ in pieces].index(1)
    assert 0 in [i for i, _ in pieces[first:]], "the second text begins before the first has ended"


@pytest.mark.vulkan
def test_a_session_keeps_its_text_and_a_batch_goes_on_whatever_is_called_meanwhile(model: vkback.LoadedModel) -> None:
    def text(between: bool) -> str:
        session = model.session()
        session.generate("The old man", max_tokens=4, temperature=0)
        if between:
            model.batch(PROMPTS, max_tokens=2)
        return session.generate(" and", max_tokens=4, temperature=0).text

    assert text(between=True) == text(between=False)
    stream = model.batch_stream(PROMPTS, max_tokens=20, temperature=0, sequences=3)
    assert next(stream)[0] in range(len(PROMPTS))
    assert model.batch(PROMPTS[:1], max_tokens=3, temperature=0)[0].tokens == model.generate(PROMPTS[0], max_tokens=3, temperature=0).tokens
    for prompt, result in zip(PROMPTS, stream.finished(), strict=True):
        assert_greedy(model, prompt, result.tokens)
    left = model.batch_stream(PROMPTS, max_tokens=100, ignore_eos=True)
    next(left)
    del left
    assert_pages_come_back(model)


@pytest.mark.vulkan
def test_what_ends_a_text(model: vkback.LoadedModel) -> None:
    (whole,) = model.batch(PROMPTS[:1], max_tokens=12, temperature=0)
    stop = whole.text.strip()[2:5]
    stopped, *_ = model.batch(PROMPTS[:2], max_tokens=12, temperature=0, stop=stop)
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    by_id, *_ = model.batch(PROMPTS[:2], max_tokens=12, temperature=0, stop=whole.tokens[2])
    assert (by_id.tokens, by_id.finish_reason) == (whole.tokens[:3], "stop")
    (nothing,) = model.batch(PROMPTS[:1], max_tokens=0)
    assert (nothing.text, nothing.tokens, nothing.finish_reason) == ("", (), "length")
    long = [*range(200, 280)]
    read, again = (model.batch([long, [3]], max_tokens=0)[0] for _ in range(2))
    assert (read.finish_reason, read.timings.prompt_tokens, read.timings.reused_tokens) == ("length", 80, 0) and read.timings.prompt_s > 0
    assert (again.finish_reason, again.timings.reused_tokens) == ("length", 64)
    banned = dict.fromkeys(model.tokenizer.eos_ids, float("-inf"))
    full = model.batch(["word " * 45, "x"], logit_bias=banned)
    assert [r.finish_reason for r in full] == ["context", "context"]
    assert [len(model.ids(p, start=True)) + len(r.tokens) for p, r in zip(["word " * 45, "x"], full, strict=True)] == [129, 129]


@pytest.mark.vulkan
def test_json_of_a_schema_beside_penalties(model: vkback.LoadedModel) -> None:
    pytest.importorskip("llguidance", reason="vkback[json] is not installed")
    names = ["Moby Dick", "Ahab"]
    found = model.batch(PROMPTS, max_tokens=30, json_schema={"enum": names}, temperature=1.5, repeat_penalty=1.2)
    assert all(json.loads(result.text) in names and result.finish_reason == "stop" for result in found)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("prompts", "options", "error", "said"),
    [
        ("It was", {}, OptionError, r"prompts is 'It was' \(str\), expected a list of texts"),
        ([1, 2], {}, OptionError, "expected a list of texts, or of lists of token ids; generate takes one"),
        (["x", [1, -1]], {}, ModelError, r"prompts\[1\]: token 1 is -1, expected an id"),
        (["x", [1, "a"]], {}, ModelError, r"prompts\[1\]"),
        (["x"], {"n": 0}, OptionError, "n is 0"),
        (["x"], {"sequences": 0}, OptionError, "sequences is 0"),
        (["x"], {"tempreature": 0}, ModelError, "Did you mean temperature"),
        (["x", [1] * 200], {}, ContextLengthError, r"prompts\[1\]: 200 tokens, the context has 128"),
    ],
)
def test_what_cannot_be_asked_for_is_said_before_any_text_begins(
    model: vkback.LoadedModel, prompts: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        model.batch_stream(prompts, **options)


class _Ends:
    """A constraint that allows everything, and cannot go on after two tokens."""

    ended = False

    def __init__(self, n_vocab: int) -> None:
        self._words, self._left = -(-n_vocab // 32), 2

    def mask(self) -> Any:
        return np.full(self._words, -1, np.int32)

    def take(self, token: int) -> None:
        self._left -= 1
        if not self._left:
            raise ConstraintError("[json] the text cannot go on within its schema")

    def ahead(self, tokens: Sequence[int], most: int) -> Ahead:
        return Ahead()


@pytest.mark.vulkan
def test_a_text_that_fails_ends_alone(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constraint cannot go on; its prompt cannot be read; its logits are not numbers."""
    options = Options(max_tokens=6, temperature=0.0)
    read = model.engine.prompt
    unreadable = model.ids("Another that nobody can read, for it is longer than what goes through the steps of other texts", start=True)

    def prompt(tokens: Sequence[int], meanwhile: Callable[[], object] | None = None) -> None:
        if list(tokens) == unreadable[:-1]:
            raise EngineError("[engine] logits are not numbers")
        read(tokens, meanwhile)

    ended: dict[Any, list[Any]] = {}
    with model.using("test") as engine:
        monkeypatch.setattr(engine, "prompt", prompt)
        texts = model.batched()
        good = [texts.add(model.ids(p, start=True), options) for p in PROMPTS[:2]]
        constrained = texts.add(model.ids(PROMPTS[2], start=True), options, _Ends(model.n_vocab))
        broken = texts.add(unreadable, options)
        nan = texts.add(model.ids(PROMPTS[3], start=True), Options(max_tokens=6, temperature=0.0, logit_bias={5: float("nan")}))
        while texts.busy:
            for text, event in texts.advance():
                ended.setdefault(text, []).append(event)
        batch = texts.paged
        batch.run()
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages
    for text, prompt_text in zip(good, PROMPTS, strict=False):
        assert_greedy(model, prompt_text, ended[text][-1].tokens)
    assert isinstance(ended[constrained][-1], ConstraintError) and len(constrained.out.made) == 2
    assert [str(e) for e in ended[broken]] == ["[engine] logits are not numbers"]
    assert re.search(r"\[batch\] .*: sequence \d: logits are not numbers at position", str(ended[nan][-1]))


@pytest.mark.vulkan
def test_a_prompt_that_begins_like_a_text_before_is_read_from_there(model: vkback.LoadedModel) -> None:
    model.batched().paged.prefixes.clear()
    ids = [model.tokenizer.bos or 1, *range(100, 190)]
    first, again = (model.batch([ids], max_tokens=2, temperature=0)[0] for _ in range(2))
    assert (first.timings.reused_tokens, again.timings.reused_tokens) == (0, 64), "a page"
    assert first.timings.prompt_tokens == 91 and again.timings.prompt_tokens == 27 and again.tokens == first.tokens


@pytest.mark.vulkan
def test_models_with_recurrent_states_make_many_texts_too(tmp_path: Path, device: Device) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    with vkback.LoadedModel(Engine.load(tiny("granitehybrid", tmp_path), device, n_ctx=64)) as model:
        found = model.batch(prompts, n=2, max_tokens=3, seed=1)
        assert [r.tokens for r in found] == [model.generate(p, max_tokens=3, seed=s).tokens for p in prompts for s in (1, 2)]


@pytest.mark.vulkan
def test_requests_have_the_same_text_whatever_they_are_called_by() -> None:
    """exact="requests": alone, in a batch, and as the next turn of a session."""
    prompts = ["The old man", "She said", "It was the best of times, it was the worst of times, it was the age of wisdom."]
    options: vkback.GenerateOptions = {"max_tokens": 10, "seed": 3}
    with vkback.load("demo-dense", ctx=192, exact="requests") as model:
        alone = [model.generate(prompt, **options).tokens for prompt in prompts]
        assert [result.tokens for result in model.batch(prompts, **options)] == alone
        session = model.session()
        assert session.generate(prompts[0], **options).tokens == alone[0]
        turn = session.generate(" and then", **options).tokens
        whole = [*model.ids(prompts[0], start=True), *alone[0], *model.ids(" and then", start=False)]
        assert model.generate(whole, **options).tokens == turn
