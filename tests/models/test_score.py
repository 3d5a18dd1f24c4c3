"""Given texts: how likely they are, lists of them, and sessions that go back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import vkback
from vkback import LoadedModel
from vkback.api.errors import ContextLengthError, ModelError
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.paths import builtin_model

TEXT = "It was a dark and stormy night, and the old man said"


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[LoadedModel]:
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=256, act="f32", ubatch=32, progress=False)) as loaded:
        yield loaded


@pytest.mark.vulkan
def test_a_score_is_that_of_the_logits(model: LoadedModel) -> None:
    """Of the rows that `logits` gives; pieces of other sizes add up in another order, to 1e-4 of a logit."""
    logits = model.logits(TEXT * 5).astype(np.float64)
    ids = model.ids(TEXT * 5, start=True)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    wanted = np.log([p[i, token] for i, token in enumerate(ids[1:])])
    found = model.score(TEXT * 5)
    assert isinstance(found, vkback.Score) and len(found.tokens) > 64
    shift = len(ids) - 1 - len(found.tokens)
    np.testing.assert_allclose(found.logprobs, wanted[shift:], atol=1e-3)
    assert found.tokens == tuple(ids[1 + shift :]) and found.mean == pytest.approx(found.sum / len(found.tokens))
    rest = model.score(ids[20:], after=ids[:20])
    np.testing.assert_allclose(rest.logprobs, wanted[19:], atol=1e-3)


@pytest.mark.vulkan
def test_lists(model: LoadedModel) -> None:
    texts = [TEXT, "She said"]
    for one, many in zip(map(model.logits, texts), model.logits(texts), strict=True):
        np.testing.assert_array_equal(one, many)
    assert [s.logprobs for s in model.score(texts)] == [model.score(text).logprobs for text in texts]
    long = [TEXT * 8, "He said " * 40]
    assert [p.value for p in model.perplexity(long, chunk=32)] == [model.perplexity(text, chunk=32).value for text in long]
    with pytest.raises(ContextLengthError):
        model.score(TEXT * 100)
    with pytest.raises(ModelError):
        model.score("")


@pytest.mark.vulkan
def test_a_session_goes_back(model: LoadedModel) -> None:
    session = model.session()
    session.generate(TEXT, max_tokens=0)  # reads the prompt alone
    length = len(session)
    first = session.generate(max_tokens=6, temperature=0)
    session.rewind(length)
    assert len(session) == length
    again = session.generate(max_tokens=6, temperature=0)
    assert again.tokens == first.tokens and again.timings.reused_tokens == length - 1
    session.rewind(-6)
    assert len(session) == length
    session.rewind(0)
    assert session.generate(TEXT, max_tokens=6, temperature=0).tokens == first.tokens
    with pytest.raises(ModelError, match=r"n is 999 \(int\), expected a whole number, from -\d+ to \d+: how many of the session's tokens"):
        session.rewind(999)
