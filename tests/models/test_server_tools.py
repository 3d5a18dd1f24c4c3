"""Tools over HTTP, judged by OpenAI's own client: calls that must come, calls in what a model says, streams, and results put back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_server import MESSAGES, Served
from test_server_clients import CHAT, forced

from vkback.api.chat_template import CHATML
from vkback.device import Device
from vkback.server.app import Limits

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("llguidance", reason="vkback[json] is not installed")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "What the weather is.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(), template=CHATML, n_ctx=1024)
    yield served
    served.close()


@pytest.fixture
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "demo-dense-Q4_K_M", "messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 120, "seed": 3, **more}


@pytest.mark.vulkan
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_a_call_that_must_come_streamed_or_not(client: Any, choice: Any) -> None:
    (choice_,) = client.chat.completions.create(**asked(tool_choice=choice, parallel_tool_calls=False)).choices
    (call,) = choice_.message.tool_calls
    assert choice_.finish_reason == "tool_calls" and choice_.message.content is None and call.type == "function" and call.id
    if choice is NAMED:
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**asked(tool_choice=choice, parallel_tool_calls=False)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (streamed,) = final.message.tool_calls
    assert final.finish_reason == "tool_calls"
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


@pytest.mark.vulkan
def test_calls_in_what_the_model_says(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(served, monkeypatch, f"I look.\n{ROME}\n{ROME.replace('Rome', 'Oslo')}", end=True)
    (choice,) = client.chat.completions.create(**asked()).choices
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked(stream=True))]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "get_weather", ""),
        (0, None, '{"city": "Rome"}'),
        (1, "get_weather", ""),
        (1, None, '{"city": "Oslo"}'),
    ]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    withouts: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}]
    for without in withouts:
        (choice,) = client.chat.completions.create(**asked(**without)).choices
        assert "<tool_call>" in choice.message.content and choice.finish_reason == "stop" and choice.message.tool_calls is None


@pytest.mark.vulkan
def test_what_is_no_call_stays_content(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (ROME[:-30], ROME.replace("{", "("), "a <tool_call> b"):
        forced(served, monkeypatch, text, end=True)
        (choice,) = client.chat.completions.create(**asked()).choices
        assert choice.message.content == text and not choice.message.tool_calls
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked(stream=True)))
        assert streamed == text


@pytest.mark.vulkan
def test_a_reply_with_calls_and_their_results_go_back_as_they_came(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        forced(served, patch, ROME)
        message = client.chat.completions.create(**asked()).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain"}
    history = [*MESSAGES, message, result]
    assert client.chat.completions.create(**asked(messages=history, max_tokens=4)).usage.completion_tokens == 4
    text = served.post("/apply-template", messages=[*MESSAGES, message.model_dump(), result], tools=[WEATHER]).json()["prompt"]
    assert ROME in text and "<tool_response>\nRain\n</tool_response>" in text and '"name": "get_weather"' in text.partition("<tools>")[2]


@pytest.mark.vulkan
def test_strict_arguments_where_the_choice_is_free(served: Served, client: Any) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    begun = [*MESSAGES, {"role": "assistant", "content": "<tool_call>\n"}]
    assert client.chat.completions.create(**asked(tools=[strict], max_tokens=8)).choices[0].message.content
    (choice,) = client.chat.completions.create(**asked(tools=[strict], messages=begun, tool_choice=NAMED, max_tokens=200)).choices
    assert choice.message.tool_calls


@pytest.mark.vulkan
def test_json_or_a_call(client: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
    (choice,) = client.chat.completions.create(**asked(response_format=schema, max_tokens=200)).choices
    assert choice.message.tool_calls or json.loads(choice.message.content) == {"a": 1}


@pytest.mark.vulkan
def test_functions_as_they_were_before_tools(served: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"model": "m", "messages": MESSAGES, "functions": [WEATHER["function"]], "max_tokens": 100}
    forced(served, monkeypatch, ROME, end=True)
    (choice,) = client.chat.completions.create(**old | {"model": "demo-dense-Q4_K_M"}).choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("get_weather", '{"city": "Rome"}')
    history = [*MESSAGES, choice.message.model_dump(), {"role": "function", "name": "get_weather", "content": "Rain"}]
    assert served.post(CHAT, **asked(messages=history, max_tokens=2)).status_code == 200


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tool 0 is of type 'custom'", "tools"),
        ({"tools": [NOW, NOW]}, "two tools are called 'now'", "tools"),
        ({"tool_choice": "other"}, "tool_choice: there is no tool 'other'", "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools", "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_said(served: Served, body: dict[str, Any], said: str, param: str) -> None:
    reply = served.post(CHAT, **asked(**body))
    error = reply.json()["error"]
    assert reply.status_code == 400 and said in error["message"] and error["param"] == param
