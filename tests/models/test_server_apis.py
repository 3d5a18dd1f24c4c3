"""The server in the forms of other APIs, judged by OpenAI's and Anthropic's own clients and types; llama-server's endpoints; CORS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_server import MESSAGES, PROMPT, Served
from test_server_clients import forced
from test_server_tools import PARAMETERS, ROME

from vkback.api.chat_template import CHATML
from vkback.device import Device
from vkback.server import responses as responses_module
from vkback.server.app import Limits
from vkback.server.llama_cpp import Fill
from vkback.server.responses import KeptResponses, NoResponse

openai = pytest.importorskip("openai", reason="openai is not installed")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
pytest.importorskip("llguidance", reason="vkback[json] is not installed")

MODEL = "demo-dense-Q4_K_M"
THOUGHT = "<think>Hm.</think>Yes."
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
CLAUDE_WEATHER = {"name": "get_weather", "description": "What the weather is.", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(), template=CHATML, n_ctx=1024, cors=["https://example.com"])
    yield served
    served.close()


@pytest.fixture
def gpt(served: Served) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(served: Served) -> Any:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{served.port}", api_key="none", max_retries=0)


# --- OpenAI's responses


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hello", "max_output_tokens": 6, "temperature": 0, **more}


@pytest.mark.vulkan
def test_a_response_streamed_or_not(gpt: Any) -> None:
    whole = gpt.responses.create(**ask(instructions="Be brief."))
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens" and whole.instructions == "Be brief."
    assert whole.usage.output_tokens == 6 and whole.usage.total_tokens == whole.usage.input_tokens + 6 and whole.output_text
    events = list(gpt.responses.create(**ask(instructions="Be brief.", stream=True)))
    final = events[-1].response
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(e.type for e in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert final.output_text == whole.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")


@pytest.mark.vulkan
def test_responses_go_on_from_those_before(served: Served, gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gpt.responses.create(**ask())
    second = gpt.responses.create(**ask(input="And?", previous_response_id=first.id))
    repeated = [{"role": "user", "content": "Hello"}, *[item.model_dump(exclude_none=True) for item in first.output]]
    again = gpt.responses.create(**ask(input=[*repeated, {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}]))
    assert second.output_text == again.output_text and second.previous_response_id == first.id
    assert second.usage.input_tokens == again.usage.input_tokens > first.usage.input_tokens
    assert gpt.responses.retrieve(first.id).output_text == first.output_text
    gpt.responses.delete(first.id)
    for id in (first.id, gpt.responses.create(**ask(store=False)).id):
        with pytest.raises(openai.NotFoundError, match="is kept here"):
            gpt.responses.create(**ask(previous_response_id=id))


def test_the_responses_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_module, "MAX_KEPT", 3)
    monkeypatch.setattr(responses_module, "MAX_KEPT_CHARS", 1000)
    kept = KeptResponses()

    def there(id: str) -> bool:
        try:
            return bool(kept.body(id))
        except NoResponse:
            return False

    for i in range(5):
        kept.keep({"id": str(i)}, [])
    assert [there(str(i)) for i in range(5)] == [False, False, True, True, True]
    kept.keep({"id": "large"}, [{"content": "x" * 2000}])
    assert there("large") and not there("4")


@pytest.mark.vulkan
def test_tools_thoughts_and_json_of_responses(served: Served, gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    response = gpt.responses.create(**ask(tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=120))
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "get_weather", "completed") and "city" in json.loads(call.arguments)
    history = [{"role": "user", "content": "Hello"}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}]
    assert gpt.responses.create(**ask(input=history, tools=[WEATHER])).output_text
    with monkeypatch.context() as patch:
        forced(served, patch, f"{THOUGHT}\n{ROME}", end=True)
        with gpt.responses.stream(**ask(tools=[WEATHER], max_output_tokens=200)) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "Hm." and final.output_text == "Yes." and final.output[2].arguments == '{"city": "Rome"}'
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {*kinds}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [{"a": 1}]}}}
    assert json.loads(gpt.responses.create(**ask(text=form, max_output_tokens=60)).output_text) == {"a": 1}


@pytest.mark.vulkan
def test_what_is_wrong_with_a_request_for_a_response(served: Served) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"type": "item_reference", "id": "x"}]}, 'input.0.type: expected "message", "function_call"'),
        ({"input": [{"role": "user"}]}, "input.0: content is missing in an item of the type message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "images are not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tool 0 is of type 'web_search'"),
        ({}, "input: is missing"),
    ]
    for body, said in bodies:
        reply = served.post("/v1/responses", **body)
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


# --- Anthropic's messages


def say(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "extra_body": {"temperature": 0}, **more}


@pytest.mark.vulkan
def test_a_message_streamed_or_not(claude: Any, gpt: Any) -> None:
    whole = claude.messages.create(**say(system="Be brief."))
    same = gpt.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES], max_tokens=6, temperature=0
    )
    assert (whole.role, whole.stop_reason, whole.content[0].type) == ("assistant", "max_tokens", "text")
    assert whole.content[0].text == same.choices[0].message.content and whole.usage.output_tokens == 6
    with claude.messages.stream(**say(system=[{"type": "text", "text": "Be brief."}])) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 6
    counted = claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=MESSAGES).input_tokens
    assert counted == same.usage.prompt_tokens


@pytest.mark.vulkan
def test_tools_and_thoughts_of_messages(served: Served, claude: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    message = claude.messages.create(**say(tools=[CLAUDE_WEATHER], tool_choice=choice, max_tokens=120))
    (block,) = message.content
    assert message.stop_reason == "tool_use" and (block.type, block.name) == ("tool_use", "get_weather") and block.input["city"]
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Rain"}, {"type": "text", "text": "So?"}],
    }
    history = [*MESSAGES, {"role": "assistant", "content": message.content}, result]
    assert claude.messages.create(**say(messages=history, tools=[CLAUDE_WEATHER])).content
    forced(served, monkeypatch, f"{THOUGHT}\n{ROME}", end=True)
    with claude.messages.stream(**say(tools=[CLAUDE_WEATHER], max_tokens=200)) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"] and final.stop_reason == "tool_use"
    assert (final.content[0].thinking, final.content[1].text, final.content[2].input) == ("Hm.", "Yes.", {"city": "Rome"})
    assert claude.messages.create(**say(messages=[*MESSAGES, {"role": "assistant", "content": final.content}, result])).content


@pytest.mark.vulkan
def test_stop_sequences_prefill_and_errors_of_messages(served: Served, claude: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        forced(served, patch, "one two three")
        message = claude.messages.create(**say(stop_sequences=["three", " two"], max_tokens=50))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one", "stop_sequence", " two")
    assert claude.messages.create(**say(messages=[*MESSAGES, {"role": "assistant", "content": "I am"}])).content
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: is missing") as told:
        claude.post("/v1/messages", body={"messages": MESSAGES, "model": MODEL}, cast_to=object)
    assert told.value.body["type"] == "error" and told.value.body["error"]["type"] == "invalid_request_error"
    reply = served.post("/v1/messages", max_tokens=6, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    assert reply.status_code == 400 and "images are not supported" in reply.json()["error"]["message"]


# --- llama-server's endpoints


@pytest.mark.vulkan
def test_completion_streamed_or_not(served: Served) -> None:
    asked = {"prompt": PROMPT, "n_predict": 6, "temperature": 0}
    whole = served.post("/completion", **asked).json()
    assert whole["stop"] and whole["stop_type"] == "limit" and whole["tokens_predicted"] == 6 and whole["tokens"] == []
    assert whole["content"] == served.text(max_tokens=6)["choices"][0]["text"] and whole["prompt"] == PROMPT
    ids = served.post("/tokenize", content=PROMPT, add_special=True).json()["tokens"]
    assert len(ids) == whole["tokens_evaluated"]
    assert served.post("/completion", **asked | {"prompt": ids, "return_tokens": True}).json()["content"] == whole["content"]
    mixed = served.post("/completion", **asked | {"prompt": [*ids[:2], PROMPT]})
    assert mixed.status_code == 200, mixed.text
    lines = [json.loads(line[6:]) for line in served.post("/completion", stream=True, **asked).text.split("\n\n") if line]
    assert "".join(line["content"] for line in lines) == whole["content"] and [line["stop"] for line in lines] == [False] * (
        len(lines) - 1
    ) + [True]
    probs = served.post("/completion", n_probs=2, **asked).json()["completion_probabilities"]
    assert len(probs) == 6 and len(probs[0]["top_logprobs"]) == 2 and probs[0]["id"] == probs[0]["top_logprobs"][0]["id"]
    word = served.post("/completion", **asked | {"stop": ["the"], "n_predict": 60, "json_schema": None}).json()
    assert word["stop_type"] in ("word", "limit", "eos")
    banned = served.post("/completion", **asked | {"logit_bias": [[probs[0]["id"], False]], "return_tokens": True}).json()
    assert banned["tokens"][0] != probs[0]["id"]
    assert json.loads(served.post("/completion", **asked | {"json_schema": {"enum": [7]}, "n_predict": 20}).json()["content"]) == 7


@pytest.mark.vulkan
def test_infill_needs_a_model_that_can(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, body in (("/infill", {"input_prefix": "a", "input_suffix": "b"}), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        reply = served.post(path, **body)
        assert reply.status_code == 400 and "no tokens to fill in a text" in reply.json()["error"]["message"]


@pytest.mark.vulkan
def test_what_is_filled_in(served: Served) -> None:
    tokenizer = served.worker.tokenizer

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=False)

    start = [tokenizer.bos] if tokenizer.add_bos else []
    fill = Fill(10, 11, 12, sep=13)
    assert fill.ids(tokenizer, "a", "b") == [*start, 10, *ids("a"), 11, *ids("b"), 12]
    assert Fill(10, 11, None).ids(tokenizer, "a", "b") == [*start, 11, *ids("b"), 10, *ids("a")]
    named = fill.ids(tokenizer, "a", "b", [("x.py", "x = 1")])
    assert named == [*start, 13, *ids("x.py\nx = 1"), 13, *ids("file\n"), 10, *ids("a"), 11, *ids("b"), 12]


@pytest.mark.vulkan
def test_slots_echo_and_fingerprint(served: Served) -> None:
    assert served.client.get("/slots").json() == [{"id": 0, "n_ctx": 1024, "is_processing": False}]
    plain = served.text()
    echoed = served.text(echo=True, n=2, prompt=[PROMPT, "So"])["choices"]
    assert [choice["text"].startswith(p) for choice, p in zip(echoed, (PROMPT, PROMPT, "So", "So"), strict=True)] == [True] * 4
    assert echoed[0]["text"] == PROMPT + plain["choices"][0]["text"] and plain["system_fingerprint"].startswith("fp_")
    events = served.events("/v1/completions", prompt=PROMPT, echo=True, max_tokens=4, temperature=0)
    assert events[0]["choices"][0]["text"] == PROMPT
    reply = served.post("/v1/completions", prompt=PROMPT, echo=True, logprobs=1)
    assert reply.status_code == 400 and "echo with logprobs is not supported" in reply.json()["error"]["message"]


@pytest.mark.vulkan
def test_pages_of_allowed_origins_may_use_it(served: Served) -> None:
    asked = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    reply = served.client.options("/v1/chat/completions", headers=asked)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://example.com"
    assert served.client.options("/v1/chat/completions", headers=asked | {"Origin": "https://other.com"}).status_code == 400
    reply = served.client.get("/v1/models", headers={"Origin": "https://example.com"})
    assert reply.headers["access-control-allow-origin"] == "https://example.com"
