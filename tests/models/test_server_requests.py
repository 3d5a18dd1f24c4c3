"""Requests that usual clients send, and those that llama.cpp's own tests of its server are about, by kind: each with the status that it
gets and what stands in the reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_server import MODEL, Served

from vkback.api.chat_template import CHATML
from vkback.device import Device
from vkback.server.app import Limits

pytest.importorskip("llguidance", reason="vkback[json] is not installed")

ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
CHAT, TEXT, RESPONSES, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "Hello"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED: list[dict[str, Any]] = [
    HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
A_CALL = 300  # tokens: 39 to 50 of most calls drawn, 70 of some
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": [7]}}}

Body = dict[str, Any]
Check = Callable[[Any], Any] | None


def chat(**more: Any) -> tuple[str, Body]:
    return CHAT, {"model": MODEL, "messages": [HELLO], "max_tokens": 1} | more


def said(*messages: Body, **more: Any) -> tuple[str, Body]:
    return chat(messages=list(messages), **more)


def text(**more: Any) -> tuple[str, Body]:
    return TEXT, {"model": MODEL, "prompt": "It was", "max_tokens": 1} | more


def response(**more: Any) -> tuple[str, Body]:
    return RESPONSES, {"model": MODEL, "input": "Hello", "max_output_tokens": 1} | more


def claude(**more: Any) -> tuple[str, Body]:
    return CLAUDE, {"model": MODEL, "messages": [HELLO], "max_tokens": 1} | more


def native(**more: Any) -> tuple[str, Body]:
    return "/completion", {"prompt": "It was", "n_predict": 1} | more


def message(reply: Any) -> Any:
    return reply["choices"][0]["message"]


FIELDS: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 2),
    ("temperature", 5.5),
    ("top_p", 0.1),
    ("top_p", 1),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 1),
    ("min_p", 0.1),
    ("seed", -1),
    ("seed", 2**40),
    ("stop", None),
    ("stop", []),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", "x"),
    ("n", 2),
    ("presence_penalty", 2),
    ("frequency_penalty", -2.0),
    ("repeat_penalty", 1.1),
    ("logit_bias", {}),
    ("logit_bias", {"50": -100}),
    ("logit_bias", {"50": 5.5}),
    ("logprobs", True),
    ("logprobs", False),
    ("top_logprobs", 0),
    ("user", "me"),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("store", False),
    ("service_tier", "auto"),
    ("safety_identifier", "x"),
    ("prompt_cache_key", "x"),
    ("verbosity", "low"),
    ("modalities", ["text"]),
    ("prediction", None),
    ("audio", None),
    ("web_search_options", None),
    ("response_format", {"type": "text"}),
    ("reasoning_effort", "low"),
    ("reasoning_effort", "none"),
    ("enable_thinking", False),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("max_completion_tokens", 1),
    ("max_completion_tokens", None),
    ("stream_options", None),
    ("stream", False),
    ("parallel_tool_calls", True),
    ("tools", None),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("functions", []),
    ("function_call", "none"),
    ("ignore_eos", True),
    ("cache_prompt", True),
    ("id_slot", -1),
    ("min_tokens", 0),
    ("guided_json", None),
    ("repetition_penalty", 1.0),
    ("mirostat", 0),
    ("typical_p", 1.0),
    ("samplers", ["top_k"]),
    ("keep_alive", "5m"),
    ("options", {"num_ctx": 128}),
    ("model", "gpt-4o"),
    ("model", "anthropic/claude"),
    ("provider", {"order": []}),
    ("transforms", []),
    ("timings_per_token", True),
    ("return_progress", True),
    ("reasoning_format", "none"),
    ("thinking_forced_open", False),
    ("extra_body", {}),
    ("cache_control", {"type": "ephemeral"}),
]

TAKEN: dict[str, list[tuple[tuple[str, Body], Check]]] = {
    "fields of a chat": [(chat(**{name: value}), None) for name, value in FIELDS],
    "messages": [
        (said({"role": "system", "content": "Be brief."}, HELLO), None),
        (said({"role": "developer", "content": "Be brief."}, HELLO), None),
        (said(HELLO | {"name": "Ann"}), None),
        (said({"role": "user", "content": [{"type": "text", "text": "Hello"}]}), None),
        (said({"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}), None),
        (said({"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}), None),
        (said({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}), None),
        (said({"role": "user", "content": ""}), None),
        (said({"role": "user", "content": None}), None),
        (said(HELLO, {"role": "assistant", "content": "Hi"}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi"}), None),
        (said(HELLO, {"role": "assistant", "content": None, "refusal": None}, HELLO), None),
        (said(HELLO, {"role": "assistant"}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "tool_calls": None, "function_call": None}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "tool_calls": []}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": None, "reasoning": "Hm."}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "reasoning_details": []}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "", "refusal": "I will not."}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "annotations": [{"type": "url_citation"}]}, HELLO), None),
        (said(HELLO, {"role": "assistant", "content": "Hi", "id": "x", "provider_specific_fields": {}}, HELLO), None),
        (said(HELLO, HELLO), None),
        (said({"role": "system", "content": "Be brief."}, {"role": "system", "content": "Really."}, HELLO), None),
    ],
    "tools": [
        (chat(tools=[WEATHER]), None),
        (chat(tools=[WEATHER], tool_choice="auto"), None),
        (chat(tools=[WEATHER], tool_choice="none"), lambda r: not message(r).get("tool_calls")),
        (
            chat(tools=[WEATHER], tool_choice="required", max_tokens=A_CALL, parallel_tool_calls=False),
            lambda r: len(message(r)["tool_calls"]) == 1,
        ),
        (
            chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=A_CALL),
            lambda r: message(r)["tool_calls"][0]["function"]["name"] == "f" and r["choices"][0]["finish_reason"] == "tool_calls",
        ),
        (chat(tools=[WEATHER], tool_choice="f", max_tokens=A_CALL), lambda r: message(r)["content"] is None),
        (chat(tools=[{"type": "function", "function": {"name": "f"}}]), None),
        (chat(tools=[{"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}]), None),
        (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$schema": "x"}}}]), None),
        (chat(tools=[WEATHER], parallel_tool_calls=False), None),
        (chat(tools=[WEATHER], response_format=SCHEMA), None),
        (chat(messages=CALLED, tools=[WEATHER]), None),
        (chat(messages=CALLED), None),
        (chat(messages=[*CALLED, {"role": "assistant", "content": "7"}, HELLO], tools=[WEATHER]), None),
        (
            chat(messages=[HELLO, CALLED[1] | {"tool_calls": [CALL, CALL | {"id": "c2"}]}, CALLED[2], CALLED[2] | {"tool_call_id": "c2"}]),
            None,
        ),
        (chat(messages=[HELLO, CALLED[1] | {"content": "I look."}, CALLED[2]]), None),
        (chat(messages=[HELLO, CALLED[1], CALLED[2] | {"content": [{"type": "text", "text": "7"}]}]), None),
        (chat(messages=[HELLO, CALLED[1], CALLED[2] | {"name": "f"}]), None),
        (chat(functions=[WEATHER["function"]]), None),
        (
            chat(functions=[WEATHER["function"]], function_call={"name": "f"}, max_tokens=A_CALL),
            lambda r: message(r)["function_call"]["name"] == "f",
        ),
        (said(HELLO, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, HELLO), None),
        (said(HELLO, {"role": "function", "name": "f", "content": "7"}), None),
        (
            chat(
                tools=[WEATHER],
                tool_choice={
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
                },
            ),
            None,
        ),
    ],
    "JSON": [
        (chat(response_format=SCHEMA, max_tokens=20), lambda r: message(r)["content"] == "7"),
        (chat(response_format={"type": "json_object"}, max_tokens=1), None),
        (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}), None),
        (chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "description": None, "schema": {"enum": [1]}}}), None),
        (text(response_format={"type": "json_object"}), None),
    ],
    "completions": [
        (text(), lambda r: r["object"] == "text_completion" and r["usage"]["completion_tokens"] == 1),
        (text(prompt=["It was", "He"]), lambda r: [c["index"] for c in r["choices"]] == [0, 1]),
        (text(prompt=[5, 6, 7]), lambda r: r["usage"]["prompt_tokens"] == 3),
        (text(prompt=[[5, 6], [7]]), lambda r: len(r["choices"]) == 2),
        (text(n=2), lambda r: len(r["choices"]) == 2),
        (text(n=1, best_of=2), lambda r: len(r["choices"]) == 1),
        (text(echo=False), None),
        (text(echo=True), lambda r: r["choices"][0]["text"].startswith("It was")),
        (text(logprobs=0), lambda r: len(r["choices"][0]["logprobs"]["tokens"]) == 1),
        (text(logprobs=3), lambda r: len(r["choices"][0]["logprobs"]["top_logprobs"][0]) == 3),
        (text(suffix=None), None),
        (text(suffix=""), None),
        (text(max_tokens=0), lambda r: r["choices"][0]["text"] == "" and r["usage"]["completion_tokens"] == 0),
        (text(max_tokens=None, stop=["e"]), None),
        (text(user="me", stream=False), None),
        (text(stop=["\n", "x"]), None),
    ],
    "responses": [
        (response(), lambda r: r["object"] == "response" and r["output"][0]["type"] == "message"),
        (response(input=[HELLO]), None),
        (response(input=[HELLO | {"type": "message"}]), None),
        (response(input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]), None),
        (
            response(
                input=[
                    HELLO,
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
                ]
            ),
            None,
        ),
        (response(instructions="Be brief."), lambda r: r["instructions"] == "Be brief."),
        (response(tools=[{"type": "function", "name": "f", "parameters": {}}]), lambda r: r["tools"][0]["name"] == "f"),
        (
            response(
                tools=[{"type": "function", "name": "f"}], tool_choice="required", parallel_tool_calls=False, max_output_tokens=A_CALL
            ),
            lambda r: r["output"][0]["type"] == "function_call",
        ),
        (
            response(
                input=[
                    HELLO,
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "7"},
                ]
            ),
            None,
        ),
        (response(text={"format": {"type": "json_schema", "name": "x", "schema": {"enum": [7]}}}, max_output_tokens=20), None),
        (response(text={"format": {"type": "text"}, "verbosity": "low"}), None),
        (response(reasoning={"effort": "low", "summary": None}), None),
        (response(reasoning={"effort": "none"}, include=["reasoning.encrypted_content"]), None),
        (response(store=False, truncation="auto", metadata={}, user="me", service_tier="auto"), lambda r: r["store"] is False),
        (response(temperature=0, top_p=1, previous_response_id=None), lambda r: r["temperature"] == 0),
        (response(stream=False, background=False, tool_choice="auto", tools=[]), None),
    ],
    "messages of Anthropic": [
        (claude(), lambda r: r["type"] == "message" and r["stop_reason"] == "max_tokens"),
        (claude(system="Be brief."), None),
        (claude(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]), None),
        (claude(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]), None),
        (claude(messages=[HELLO, {"role": "assistant", "content": "I"}]), None),
        (claude(temperature=0.5, top_p=0.9, top_k=5), None),
        (claude(stop_sequences=["x"], metadata={"user_id": "me"}), None),
        (claude(stop_sequences=[], service_tier="auto"), None),
        (claude(tools=[{"name": "f", "input_schema": {"type": "object"}}]), None),
        (
            claude(
                tools=[{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
                tool_choice={"type": "tool", "name": "f"},
                max_tokens=A_CALL,
            ),
            lambda r: r["content"][0]["type"] == "tool_use",
        ),
        (claude(tools=[{"type": "custom", "name": "f", "input_schema": {}}], tool_choice={"type": "auto"}), None),
        (claude(thinking={"type": "disabled"}), None),
        (claude(thinking={"type": "enabled", "budget_tokens": 1024}), None),
        (
            claude(
                messages=[
                    HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7", "is_error": False}]},
                ]
            ),
            None,
        ),
        (claude(context_management={}, betas=["x"]), None),
        (("/v1/messages/count_tokens", {"model": "x", "messages": [HELLO]}), lambda r: r["input_tokens"] > 1),
    ],
    "llama-server's": [
        (native(), lambda r: r["stop"] and r["tokens_predicted"] == 1 and r["timings"]["predicted_n"] == 1),
        (native(prompt=[5, 6, 7]), lambda r: r["tokens_evaluated"] == 3),
        (native(prompt=[5, "It was"]), None),
        (native(n_predict=0), lambda r: r["content"] == ""),
        (native(n_probs=2), lambda r: len(r["completion_probabilities"]) == 1),
        (
            native(stop=["x"], seed=4, temperature=0.2, top_k=5, cache_prompt=True, id_slot=0),
            lambda r: r["generation_settings"]["seed"] == 4,
        ),
        (native(return_tokens=True), lambda r: len(r["tokens"]) == 1),
        (native(logit_bias=[[5, -1.5], [6, False]]), None),
        (native(json_schema={"enum": [7]}, n_predict=9), lambda r: r["content"] == "7"),
        (native(samplers=["top_k"], dry_multiplier=0, mirostat=0), None),
        (("/tokenize", {"content": "It was"}), lambda r: len(r["tokens"]) > 1),
        (("/tokenize", {"content": "It was", "with_pieces": True}), lambda r: "piece" in r["tokens"][0]),
        (("/detokenize", {"tokens": [5, 6]}), lambda r: isinstance(r["content"], str)),
        (("/apply-template", {"messages": [HELLO]}), lambda r: "Hello" in r["prompt"]),
        (("/chat/completions", {"messages": [HELLO], "max_tokens": 1}), None),
    ],
}

REFUSED: dict[str, list[tuple[tuple[str, Body], int, str]]] = {
    "values that cannot be": [
        (chat(temperature=-1), 400, "temperature"),
        (chat(top_p=2), 400, "top_p"),
        (chat(n=0), 400, "n"),
        (chat(messages=[]), 400, "messages"),
        (chat(messages="Hello"), 400, "messages"),
        (chat(messages=[{"role": "user"}]), 400, "messages.0"),
        (chat(messages=[{"content": "x"}]), 400, "messages.0.role"),
        (chat(top_logprobs=2), 400, ""),
        (chat(logit_bias={"x": 1}), 400, "logit_bias"),
        (chat(response_format={"type": "xml"}), 400, "response_format.type"),
        (chat(stream_options={"include_usage": True}), 400, "stream_options"),
        (chat(messages=[HELLO | {"content": "x " * 9000}]), 400, "messages"),
        (text(prompt=""), 400, "prompt"),
        (text(prompt=[99999]), 400, ""),
        (text(logprobs=50), 400, "logprobs"),
        (text(n=2, best_of=1), 400, ""),
        (text(suffix="x"), 400, "suffix"),
        (("/completion", {}), 400, "prompt"),
        (native(logit_bias=[5]), 400, "logit_bias"),
        (native(grammar="root ::= x"), 400, "grammar"),
        (("/infill", {"input_prefix": "a"}), 400, "input_prefix"),
        (response(input=[]), 400, "input"),
        (response(previous_response_id="resp_x"), 404, "previous_response_id"),
        (response(background=True), 400, "background"),
        (claude(messages=[]), 400, ""),
        (("/v1/nothing", {}), 404, ""),
    ],
    "what is not supported": [
        (said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}), 400, "messages.0.content.0"),
        (said({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}), 400, "messages.0.content.0"),
        (chat(tools=[{"type": "web_search"}]), 400, "tools"),
        (response(tools=[{"type": "file_search", "vector_store_ids": []}]), 400, "tools"),
        (chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice"),
    ],
}


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(), template=CHATML, n_ctx=512, strict=False)
    yield served
    served.close()


@pytest.mark.vulkan
@pytest.mark.parametrize("kind", TAKEN)
def test_what_clients_send_is_answered(kind: str, served: Served) -> None:
    failed = []
    for (path, body), check in TAKEN[kind]:
        reply = served.post(path, **body)
        if reply.status_code != 200 or (check is not None and not check(reply.json())):
            failed.append(f"{path} {json.dumps(body)[:200]}: {reply.status_code} {reply.text[:300]}")
    assert not failed, f"{len(failed)} of {len(TAKEN[kind])}:\n" + "\n".join(failed)


@pytest.mark.vulkan
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_said(kind: str, served: Served) -> None:
    failed = []
    for (path, body), status, param in REFUSED[kind]:
        reply = served.post(path, **body)
        error = reply.json()["error"]
        if reply.status_code != status or not error["message"] or (error.get("param") or "") != param:
            failed.append(f"{path} {json.dumps(body)[:200]}: {reply.status_code} {error}")
    assert not failed, f"{len(failed)} of {len(REFUSED[kind])}:\n" + "\n".join(failed)


STREAMED = [
    (chat, "data: [DONE]"),
    (text, "data: [DONE]"),
    (response, "response.incomplete"),
    (claude, "message_stop"),
    (native, '"stop": true'),
]


@pytest.mark.vulkan
@pytest.mark.parametrize(("request_of", "end"), STREAMED, ids=["chat", "text", "responses", "messages", "completion"])
def test_each_streams(request_of: Callable[..., tuple[str, Body]], end: str, served: Served) -> None:
    path, body = request_of(stream=True)
    reply = served.post(path, **body)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    assert end in reply.text.strip().split("\n\n")[-1]


def test_there_are_about_two_hundred() -> None:
    assert sum(map(len, TAKEN.values())) + sum(map(len, REFUSED.values())) + len(STREAMED) >= 200
