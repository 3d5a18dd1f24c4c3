"""Tools from Python, on a model: calls that must come, those that are read from what it says, and rounds of calls and results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import vkback
from vkback.api.errors import ModelError

pytest.importorskip("llguidance", reason="vkback[json] is not installed")
pytest.importorskip("pydantic", reason="vkback[serve] is not installed")


@pytest.fixture(scope="module")
def model() -> Iterator[vkback.LoadedModel]:
    with vkback.load("demo-dense", ctx=1024, act="f32") as loaded:
        yield loaded


def roll(sides: int) -> int:
    """Roll a die.

    Args:
        sides: how many it has
    """
    return sides + 1


def says(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Have the model say these, one after the other."""
    replies = iter(texts)

    def generate(*_: object, **__: object) -> Iterator[int]:
        yield from model.tokenizer.encode(next(replies), add_bos=False)

    monkeypatch.setattr(model.engine, "generate", generate)


CALL = '<tool_call>\n{"name": "roll", "arguments": {"sides": 6}}\n</tool_call>'


@pytest.mark.vulkan
def test_a_call_that_must_come(model: vkback.LoadedModel) -> None:
    strict = {"type": "object", "properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"], "additionalProperties": False}
    result = model.chat("Roll", tools=[{"name": "roll", "parameters": strict, "strict": True}], tool_choice="roll", max_tokens=100)
    (call,) = result.tool_calls
    assert call.name == "roll" and call.values["sides"] in (6, 20) and not result.text and result.finish_reason == "stop"
    assert result.messages == ({"role": "assistant", "content": "", "tool_calls": [call.plain()]},)


@pytest.mark.vulkan
def test_calls_are_read_from_what_it_says(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    says(model, monkeypatch, f"I roll.\n{CALL}")
    with model.stream_chat("Roll", tools=[roll]) as stream:
        pieces = list(stream)
    assert "".join(p.text for p in pieces) == "I roll." == stream.result.text
    assert [c.values for p in pieces for c in p.tool_calls] == [{"sides": 6}] == [c.values for c in stream.result.tool_calls]
    says(model, monkeypatch, CALL)
    assert model.chat("Roll").text == CALL  # there are no tools


@pytest.mark.vulkan
def test_rounds_of_calls_and_results(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    says(model, monkeypatch, CALL, CALL.replace("6", '"x"'), "It is 7.")
    result = model.chat("Roll", tools=[roll], max_rounds=3)
    assert result.text == "It is 7." and not result.tool_calls
    kinds = [(m["role"], m["content"]) for m in result.messages]
    assert kinds[1] == ("tool", "7") and kinds[-1] == ("assistant", "It is 7.") and len(kinds) == 5
    assert str(kinds[3][1]).startswith("error: the arguments do not fit: sides")
    says(model, monkeypatch, CALL, CALL)
    result = model.chat("Roll", tools=[roll], max_rounds=1)
    assert len(result.tool_calls) == 1 and [m["role"] for m in result.messages] == ["assistant", "tool", "assistant"]


@pytest.mark.vulkan
def test_what_is_refused(model: vkback.LoadedModel) -> None:
    with pytest.raises(ModelError, match="there is no tool 'other'"):
        model.chat("Roll", tools=[roll], tool_choice="other")
    with pytest.raises(ModelError, match="max_rounds"):
        model.chat("Roll", tools=[roll], max_rounds=-1)
