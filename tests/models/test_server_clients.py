"""The server as clients meet it: values that they send as defaults, fields that there are not, thoughts, and endpoints beside OpenAI's."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from test_server import GREEDY, MESSAGES, MODEL, PROMPT, Served

from vkback.device import Device
from vkback.server.app import Limits
from vkback.server.errors import BadRequest
from vkback.server.schema import ChatRequest, CompletionRequest, parse

CHAT = "/v1/chat/completions"
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ reasoning_effort }}{% endif %}"
)


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(), template=THINKING, strict=False)
    yield served
    served.close()


def forced(served: Served, monkeypatch: pytest.MonkeyPatch, text: str, *, end: bool = False) -> list[int]:
    """Have the model say this. end: and then the end of the text."""
    ids: list[int] = served.worker.tokenizer.encode(text, add_bos=False)
    if end:
        ids.append(min(served.worker.tokenizer.eos_ids))
    monkeypatch.setattr(served.worker.model.engine, "generate", lambda *_, **__: (token for token in ids))
    return ids


# --- values


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 0},
        {"max_tokens": -1, "stop": "e"},
        {"max_tokens": 100_000, "stop": ["e"]},
        {"max_completion_tokens": 4096, "stop": ["e", "", None]},
        {"seed": -1},
        {"seed": 2**31},
        {"seed": 2**63},
        {"seed": -(2**40)},
        {"top_k": -1},
        {"temperature": 5.0},
        {"stop": ""},
        {"stop": []},
        {"stop": [f"stop {i}" for i in range(40)]},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"model": "gpt-4o"},
        {"verbosity": "low", "cache_prompt": True, "guided_json": None, "min_tokens": 1, "safety": {"a": [1]}},
        {"messages": [MESSAGES[0] | {"weight": 1}], "response_format": {"type": "text", "extra": 5}},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "documents": []},
        {"enable_thinking": True, "continue_final_message": True, "add_generation_prompt": False},
    ],
    ids=lambda given: json.dumps(given)[:40],
)
def test_what_clients_send_is_taken(served: Served, given: dict[str, Any]) -> None:
    reply = served.post(CHAT, **{"messages": MESSAGES, "max_tokens": 2} | given)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    made = reply.json()["usage"]["completion_tokens"]
    assert made == 0 and choice["finish_reason"] == "length" if given.get("max_tokens") == 0 else made > 0


def test_values_become_options() -> None:
    def options(**given: Any) -> Any:
        return parse(ChatRequest, json.dumps({"messages": MESSAGES} | given).encode()).options(100, 50)

    assert [options(max_tokens=n)["max_tokens"] for n in (-1, 0, 7, 99)] == [50, 0, 7, 50] and options()["max_tokens"] == 50
    assert options(top_k=-1)["top_k"] == 0 and options(stop=["", "a"])["stop"] == ["a"] and "stop" not in options(stop="")
    assert [options(seed=s)["seed"] for s in (5, 2**31 + 5, 2**32 + 5)] == [5, 2**31 + 5, 5]
    assert len({options(seed=-1)["seed"] for _ in range(4)}) == 4
    text = parse(CompletionRequest, json.dumps({"prompt": "x", "max_tokens": -1}).encode())
    assert text.options(100, 50)["max_tokens"] == 50


@pytest.mark.vulkan
def test_a_field_that_there_is_not_is_said_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("vkback.server")
    propagate, log.propagate = log.propagate, True
    try:
        with caplog.at_level(logging.INFO, logger="vkback.server"):
            for _ in range(3):
                body = {"messages": [MESSAGES[0] | {"colour": "red"}, MESSAGES[0] | {"colour": 1}], "max_tokens": 1, "tempreature": 1}
                assert served.post(CHAT, **body).status_code == 200
    finally:
        log.propagate = propagate
    said = [r.getMessage() for r in caplog.records if "is no field of this server" in r.getMessage()]
    assert len(said) == 2 and any("'messages.colour'" in s for s in said) and any("'tempreature'" in s for s in said)


def test_fields_that_there_are_not_and_values_that_cannot_be() -> None:
    found: list[str] = []
    body = {"messages": MESSAGES, "a": 1, "stream_options": {"b": {"c": 1}}, "temperature": "hot"}
    with pytest.raises(BadRequest, match='temperature: expected a number of at least 0; got "hot"'):
        parse(ChatRequest, json.dumps(body).encode(), found.append)
    assert sorted(found) == ["a", "stream_options.b"]


# --- thoughts


@pytest.mark.vulkan
def test_thoughts_are_apart_from_the_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = forced(served, monkeypatch, "<think>We add.</think>\n\n4 it is")
    body = served.post(CHAT, messages=MESSAGES, max_tokens=60).json()
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "4 it is", "reasoning_content": "We add.", "refusal": None}
    assert body["usage"]["completion_tokens"] == len(ids)
    events = served.events(CHAT, messages=MESSAGES, max_tokens=60)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "We add."
    assert "".join(d.get("content", "") for d in deltas) == "4 it is"
    as_it_came = served.post(CHAT, messages=MESSAGES, max_tokens=60, reasoning_format="none").json()["choices"][0]["message"]
    assert as_it_came["content"] == "<think>We add.</think>\n\n4 it is" and "reasoning_content" not in as_it_came
    again = served.post("/apply-template", messages=[*MESSAGES, message, *MESSAGES])
    assert again.json()["prompt"] == "[user]Hello[assistant](We add.)4 it is[user]Hello[assistant]", "back in the conversation as it came"


@pytest.mark.vulkan
def test_a_reply_that_ends_within_a_mark_loses_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(served, monkeypatch, "<thi")
    assert served.post(CHAT, messages=MESSAGES, max_tokens=9).json()["choices"][0]["message"]["content"] == "<thi"
    deltas = [event["choices"][0]["delta"] for event in served.events(CHAT, messages=MESSAGES, max_tokens=9)]
    assert "".join(d.get("content", "") for d in deltas) == "<thi"


@pytest.mark.vulkan
def test_variables_of_the_template_and_a_reply_that_is_gone_on_with(served: Served) -> None:
    def prompt(**given: Any) -> str:
        reply = served.post("/apply-template", **{"messages": MESSAGES} | given)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["prompt"])

    assert prompt() == "[user]Hello[assistant]"
    assert (
        prompt(enable_thinking=False) == prompt(chat_template_kwargs={"enable_thinking": False}) == "[user]Hello[assistant]<think></think>"
    )
    assert prompt(reasoning_effort="none") == "[user]Hello[assistant]<think></think>"
    assert prompt(reasoning_effort="high") == "[user]Hello[assistant]high"
    assert prompt(messages=[*MESSAGES, {"role": "assistant", "content": "So"}]) == "[user]Hello[assistant]So"
    assert prompt(add_generation_prompt=False) == "[user]Hello"
    refused = served.post("/apply-template", messages=MESSAGES, chat_template_kwargs={"messages": []})
    assert refused.status_code == 400 and "template_kwargs has messages" in refused.json()["error"]["message"]


# --- beside OpenAI's endpoints


@pytest.mark.vulkan
def test_tokens_of_a_text_and_back(served: Served) -> None:
    tokenizer = served.worker.tokenizer
    ids = tokenizer.encode(PROMPT, add_bos=False)
    assert served.post("/tokenize", content=PROMPT).json() == {"tokens": ids}
    assert served.post("/tokenize", content=PROMPT, add_special=True).json() == {"tokens": [tokenizer.bos, *ids]}
    assert served.post("/detokenize", tokens=ids).json() == {"content": PROMPT}
    assert served.post("/tokenize", content="").json() == {"tokens": []}
    pieces = served.post("/tokenize", content="a 😀", with_pieces=True).json()["tokens"]
    spelled = [bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces]
    assert b"".join(spelled).decode() == "a 😀" and any(isinstance(p["piece"], list) for p in pieces)
    assert tokenizer.eos_id is not None
    end = tokenizer.token_bytes(tokenizer.eos_id, special=True).decode()
    assert served.post("/tokenize", content=end).json() == {"tokens": [tokenizer.eos_id]}
    assert len(served.post("/tokenize", content=end, parse_special=False).json()["tokens"]) > 1
    wrong = served.post("/detokenize", tokens=[10**9])
    assert wrong.status_code == 400 and "outside the vocabulary" in wrong.json()["error"]["message"]
    assert "expected a list of token ids" in served.post("/detokenize", tokens="x").json()["error"]["message"]


@pytest.mark.vulkan
def test_what_is_served(served: Served) -> None:
    props = served.client.get("/props").json()
    assert props["chat_template"] == THINKING and props["default_generation_settings"]["n_ctx"] == 128
    assert props["model_alias"] == MODEL and props["bos_token"] and "/" not in props["model_path"]
    (model,) = served.client.get("/models").json()["data"]
    meta = model["meta"]
    assert meta["n_embd"] == 256 and meta["n_params"] > 4_000_000 and meta["size"] > 4_000_000 and meta["n_ctx_train"] > 0
    assert served.client.get("/v1/models/nothing").status_code == 404


@pytest.mark.vulkan
def test_timings(served: Served) -> None:
    def check(timings: dict[str, Any], made: int) -> None:
        assert timings["predicted_n"] == made and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0
        assert timings["prompt_n"] + timings["cache_n"] > 0
        assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / made, abs=0.01)

    check(served.text()["timings"], 6)
    check(served.events("/v1/completions", prompt=PROMPT, **GREEDY)[-1]["timings"], 6)
    check(served.post("/chat/completions", messages=MESSAGES, **GREEDY).json()["timings"], 6)


@pytest.mark.vulkan
def test_a_strict_server_and_a_key_in_either_header(device: Device) -> None:
    strict = Served(device, Limits(), api_key="secret", strict=True, template=THINKING, template_kwargs={"enable_thinking": False})
    try:
        for headers, status in (
            ({}, 401),
            ({"X-Api-Key": "secret"}, 200),
            ({"X-Api-Key": "wrong"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
            ({"Authorization": "Bearer wrong", "X-Api-Key": "secret"}, 401),
        ):
            for path in ("/v1/models", "/props"):
                assert strict.client.get(path, headers=headers).status_code == status, headers
        strict.client.headers["X-Api-Key"] = "secret"
        composed = strict.post("/apply-template", messages=MESSAGES).json()["prompt"]
        assert composed == "[user]Hello[assistant]<think></think>", "a variable of the server"
        composed = strict.post("/apply-template", messages=MESSAGES, enable_thinking=True).json()["prompt"]
        assert composed == "[user]Hello[assistant]", "which a request may change"
        named = strict.post(CHAT, messages=MESSAGES, max_tokens=1, model="gpt-4o")
        assert named.status_code == 404 and named.json()["error"]["code"] == "model_not_found"
        extra = strict.post("/tokenize", content="x", colour="red")
        assert extra.status_code == 400 and "colour: is no field of this endpoint" in extra.json()["error"]["message"]
    finally:
        strict.close()
