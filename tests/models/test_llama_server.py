"""What clients of llama-server rely on, made anew from what its own tests look at: each behaviour is a check; ABSENT lists the others.

Of those that apply (no vision, no router of several models, no MCP, no tools of the server's own, no sleep) at least nine in ten are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from test_server import Served, stop_at_a_piece

from vkback.api.chat_template import CHATML
from vkback.device import Device
from vkback.server.app import Limits

pytest.importorskip("llguidance", reason="vkback[json] is not installed")

PROMPT = "It was a dark and stormy night"
ASK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
Check = Callable[[Served], object]
CHECKS: dict[str, Check] = {}

ABSENT = {
    "context shift": "a full context ends a text; nothing is shifted out of it silently",
    "slots are saved, restored and erased by their endpoint": "prefixes are kept by themselves; sessions of Python are saved to files",
    "return_progress and timings_per_token": "a stream that waits has comments, and the last event all timings",
    "post_sampling_probs": "probabilities are the model's own",
    "the stream of a request is resumed after its client has gone": "a request ends when its client leaves",
}
"""Behaviours that llama-server's tests look at and that are not had, and what there is instead."""


def check(function: Check) -> Check:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


def done(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def completion(served: Served, **body: Any) -> Any:
    return done(served.post("/completion", **{"prompt": PROMPT, "n_predict": 8, "temperature": 0, "seed": 1, **body}))


def chat(served: Served, **body: Any) -> Any:
    return done(served.post("/chat/completions", **{"messages": ASK, "max_tokens": 8, "temperature": 0, **body}))


def events(served: Served, path: str, **body: Any) -> list[Any]:
    reply = served.post(path, stream=True, **body)
    assert reply.status_code == 200, reply.text
    found = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


# --- the start, props, models, slots


@check
def _health_is_ok_without_a_key(served: Served) -> None:
    done(served.client.get("/health"))
    done(served.client.get("/v1/health"))


@check
def _props_have_slots_the_context_and_the_template(served: Served) -> None:
    props = done(served.client.get("/props"))
    settings = props["default_generation_settings"]
    assert props["total_slots"] == served.worker.parallel and settings["n_ctx"] == served.worker.n_ctx
    assert {"seed", "temperature", "top_k", "dry_multiplier", "samplers", "mirostat"} - {"seed"} <= set(settings["params"])
    assert "chat_template" in props and "model_path" in props and "bos_token" in props


@check
def _models_list_the_one(served: Served) -> None:
    for path in ("/models", "/v1/models"):
        (model,) = done(served.client.get(path))["data"]
        assert model["id"] == served.worker.model_name


@check
def _slots_are_listed(served: Served) -> None:
    slots = done(served.client.get("/slots"))
    assert len(slots) == served.worker.parallel and {"id", "n_ctx", "is_processing"} <= set(slots[0])


@check
def _the_page_is_at_the_root(served: Served) -> None:
    assert served.client.get("/").headers["content-type"].startswith("text/html")


@check
def _metrics_are_those_of_prometheus(served: Served) -> None:
    completion(served)
    found = served.client.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain") and re.search(r"^\w+tokens\w* [0-9.e+]+$", found.text, re.M)


# --- completion


@check
def _completion_counts_and_times(served: Served) -> None:
    body = completion(served)
    assert body["timings"]["predicted_n"] == body["tokens_predicted"] == 8 and body["tokens_evaluated"] > 4
    assert isinstance(body["has_new_line"], bool) and body["truncated"] is False and body["stop_type"] == "limit" and body["content"]
    timings = body["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == body["tokens_evaluated"]
    assert np.isfinite([timings["prompt_ms"], timings["predicted_ms"], timings["predicted_per_second"]]).all()


@check
def _completion_tokens_are_told_where_asked_for(served: Served) -> None:
    assert len(completion(served, return_tokens=True)["tokens"]) == 8 and completion(served)["tokens"] == []


@check
def _completion_streams(served: Served) -> None:
    found = events(served, "/completion", prompt=PROMPT, n_predict=8, temperature=0, seed=1)
    assert [e["stop"] for e in found] == [False] * (len(found) - 1) + [True]
    assert "".join(e["content"] for e in found) == completion(served)["content"]
    assert found[-1]["timings"]["predicted_n"] == 8 and found[-1]["stop_type"] == "limit"


@check
def _the_same_seed_gives_the_same_text(served: Served) -> None:
    texts = [completion(served, temperature=1.0, seed=42)["content"] for _ in range(3)]
    assert len(set(texts)) == 1


@check
def _another_seed_gives_another_text(served: Served) -> None:
    texts = [completion(served, temperature=1.5, min_p=0, top_k=0, top_p=1, seed=seed)["content"] for seed in range(4)]
    assert len(set(texts)) > 1


@check
def _a_prompt_without_cache_gives_the_same_text(served: Served) -> None:
    assert completion(served, cache_prompt=False)["content"] == completion(served, cache_prompt=True)["content"]


@check
def _a_prompt_that_was_there_is_not_read_again(served: Served) -> None:
    long = PROMPT * 12
    first, again = (completion(served, prompt=long) for _ in range(2))
    assert again["timings"]["prompt_n"] < first["tokens_evaluated"] and again["content"] == first["content"]


@check
def _a_prompt_may_be_tokens(served: Served) -> None:
    tokens = done(served.post("/tokenize", content=PROMPT, add_special=True))["tokens"]
    assert completion(served, prompt=tokens)["content"] == completion(served)["content"]


@check
def _a_prompt_may_be_texts_and_tokens_in_turn(served: Served) -> None:
    tokens = done(served.post("/tokenize", content=" and stormy night", add_special=False))["tokens"]
    assert completion(served, prompt=["It was a dark", *tokens])["tokens_evaluated"] == completion(served)["tokens_evaluated"]


@check
def _a_prompt_may_be_an_object_with_a_text(served: Served) -> None:
    assert completion(served, prompt={"prompt_string": PROMPT})["content"] == completion(served)["content"]


@check
def _several_prompts_are_several_replies(served: Served) -> None:
    both = completion(served, prompt=[PROMPT, "She said"])
    assert [len(each["content"]) > 0 for each in both] == [True, True] and both[0]["content"] == completion(served)["content"]


@check
def _requests_side_by_side_are_those_alone(served: Served) -> None:
    prompts = [PROMPT, "She said", "The old man", "At sea"]
    alone = [completion(served, prompt=prompt)["content"] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: completion(served, prompt=prompt)["content"], prompts)) == alone


@check
def _the_fields_of_a_reply_may_be_chosen(served: Served) -> None:
    found = completion(served, response_fields=["content", "generation_settings/n_predict", "timings"])
    assert set(found) == {"content", "n_predict", "timings"} and found["n_predict"] == 8


@check
def _n_probs_of_each_token(served: Served) -> None:
    told = completion(served, n_probs=5)["completion_probabilities"]
    assert len(told) == 8
    for each in told:
        assert {"id", "token", "bytes", "logprob"} <= set(each) and each["logprob"] <= 0 and len(each["top_logprobs"]) == 5
        assert each["token"] == bytes(each["bytes"]).decode("utf-8", "replace")


@check
def _n_probs_of_a_stream(served: Served) -> None:
    found = events(served, "/completion", prompt=PROMPT, n_predict=4, temperature=0, n_probs=3)
    told = [each for e in found for each in e.get("completion_probabilities", [])]
    assert len(told) == 4 and all(len(each["top_logprobs"]) == 3 for each in told)


@check
def _logit_bias_excludes_tokens(served: Served) -> None:
    first = completion(served, return_tokens=True, n_predict=1)["tokens"][0]
    for bias in ([[first, False]], [[first, -100.0]], {str(first): -100.0}):
        assert completion(served, return_tokens=True, n_predict=1, logit_bias=bias)["tokens"][0] != first


@check
def _logit_bias_may_name_texts(served: Served) -> None:
    first = completion(served, n_predict=1)["content"]
    assert completion(served, n_predict=1, logit_bias=[[first, False]])["content"] != first


@check
def _ignore_eos_goes_on(served: Served) -> None:
    assert completion(served, ignore_eos=True)["tokens_predicted"] == 8


@check
def _the_settings_are_told(served: Served) -> None:
    assert completion(served)["generation_settings"]["seed"] == 1


@check
def _n_predict_0_reads_the_prompt(served: Served) -> None:
    assert completion(served, n_predict=0)["tokens_predicted"] == 0


@check
def _several_texts_of_a_prompt(served: Served) -> None:
    found = completion(served, n=2, temperature=1.0)
    assert [each["index"] for each in found] == [0, 1] and found[0]["prompt"] == found[1]["prompt"] == PROMPT


@check
def _stop_texts_end_it(served: Served) -> None:
    text = completion(served, n_predict=16)["content"]
    stop = text[len(text) // 2 :][:4]
    found = completion(served, n_predict=16, stop=[stop])
    assert found["stop_type"] == "word" and found["stopping_word"] == stop and stop not in found["content"]


@check
def _n_predict_below_0_is_as_many_as_fit(served: Served) -> None:
    assert completion(served, n_predict=-1, stop=["e"])["stop"] is True


@check
def _samplers_by_name_and_by_letters(served: Served) -> None:
    one = completion(served, samplers=["top_k", "temperature"], temperature=0.9)["content"]
    assert completion(served, samplers="kt", temperature=0.9)["content"] == one


@check
def _samplers_that_are_off_by_default(served: Served) -> None:
    for how in ({"mirostat": 2}, {"xtc_probability": 1.0}, {"dry_multiplier": 1.0}, {"typical_p": 0.5}, {"dynatemp_range": 0.5}):
        assert completion(served, temperature=0.9, top_n_sigma=2.0, **how)["tokens_predicted"] == 8


@check
def _a_grammar_holds_a_completion(served: Served) -> None:
    assert completion(served, grammar='root ::= ("a" | "b"){3}', n_predict=20)["content"] in {
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    }


@check
def _a_schema_holds_a_completion(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    assert json.loads(completion(served, json_schema=schema, n_predict=40)["content"])["a"] in (1, 2)


@check
def _a_request_whose_client_has_gone_ends(served: Served) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception, match="timed out"):
        stop_at_a_piece(served, patch, PROMPT)
        served.client.post("/completion", json={"prompt": PROMPT, "n_predict": 100000, "ignore_eos": True}, timeout=0.3)
    served.wait("idle")


# --- chat


@check
def _chat_counts_and_ends(served: Served) -> None:
    body = chat(served)
    assert body["usage"]["completion_tokens"] == 8 and body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length" and body["id"].startswith("chatcmpl")
    assert body["object"] == "chat.completion" and body["model"] and body["system_fingerprint"]


@check
def _chat_tells_cached_tokens(served: Served) -> None:
    long = [{"role": "user", "content": "What is it? " * 30}]
    chat(served, messages=long)
    assert chat(served, messages=long)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@check
def _chat_streams(served: Served) -> None:
    body = {"messages": ASK, "max_tokens": 8, "temperature": 0, "stream_options": {"include_usage": True}}
    *found, last = events(served, "/chat/completions", **body)
    assert found[0]["choices"][0]["delta"]["role"] == "assistant" and found[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in found)
    assert text == chat(served)["choices"][0]["message"]["content"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8 and len({e["id"] for e in found}) == 1


@check
def _chat_gives_n_choices(served: Served) -> None:
    assert len(chat(served, n=2)["choices"]) == 2


@check
def _chat_takes_any_model_name(served: Served) -> None:
    chat(served, model="gpt-3.5-turbo")


@check
def _chat_goes_on_with_the_assistant_s_message(served: Served) -> None:
    messages = [*ASK, {"role": "assistant", "content": "The best is"}]
    prompt = done(served.post("/apply-template", messages=messages))["prompt"]
    assert prompt.endswith("The best is")
    chat(served, messages=messages)


@check
def _the_template_is_applied(served: Served) -> None:
    prompt = done(served.post("/apply-template", messages=ASK))["prompt"]
    assert prompt.startswith("<|im_start|>system\nBook<|im_end|>") and prompt.endswith("<|im_start|>assistant\n")


@check
def _the_template_without_a_place_for_the_reply(served: Served) -> None:
    prompt = done(served.post("/apply-template", messages=ASK, add_generation_prompt=False))["prompt"]
    assert not prompt.endswith("<|im_start|>assistant\n")


@check
def _chat_by_schemas_and_objects(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    forms: list[dict[str, Any]] = [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ]
    for form in forms:
        text = chat(served, response_format=form, max_tokens=40)["choices"][0]["message"]["content"]
        assert json.loads(text)["a"] in (1, 2)


@check
def _chat_by_a_grammar(served: Served) -> None:
    assert chat(served, grammar='root ::= "a"{5,5}', max_tokens=20)["choices"][0]["message"]["content"] == "aaaaa"


@check
def _a_grammar_that_is_none_is_400(served: Served) -> None:
    reply = served.post("/chat/completions", messages=ASK, grammar="root ::= [a-z", max_tokens=4)
    assert reply.status_code == 400 and "grammar" in reply.json()["error"]["message"]


@check
def _what_is_no_chat_is_400(served: Served) -> None:
    for messages in (None, "a text", [123], [{"content": "x"}], [{"role": "user", "content": [{"type": "nothing"}]}]):
        reply = served.post("/chat/completions", messages=messages)
        assert reply.status_code == 400 and reply.json()["error"]["message"] and reply.json()["error"]["code"]


@check
def _logprobs_of_a_chat(served: Served) -> None:
    told = chat(served, logprobs=True, top_logprobs=4)["choices"][0]["logprobs"]["content"]
    assert len(told) == 8 and all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 4 for each in told)


@check
def _logprobs_of_a_stream(served: Served) -> None:
    found = events(served, "/chat/completions", messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2)
    told = [t for e in found for t in (e["choices"][0].get("logprobs") or {}).get("content") or []]
    assert len(told) == 5


@check
def _the_openai_door_has_completions_too(served: Served) -> None:
    body = done(served.post("/v1/completions", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2))
    assert body["object"] == "text_completion" and body["choices"][0]["finish_reason"] == "length" and body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == completion(served)["content"]


@check
def _a_prompt_beyond_the_context(served: Served) -> None:
    long = [{"role": "user", "content": "x " * 2000}]
    asked: list[tuple[str, dict[str, Any]]] = [("/completion", {"prompt": PROMPT * 200}), ("/chat/completions", {"messages": long})]
    for path, body in asked:
        for stream in (False, True):
            error = served.post(path, stream=stream, **body)
            assert error.status_code == 400 and "context" in error.json()["error"]["message"]
            assert error.json()["error"]["n_prompt_tokens"] > error.json()["error"]["n_ctx"] == served.worker.n_ctx


@check
def _a_short_prompt_may_fill_the_context(served: Served) -> None:
    found = completion(served, prompt=PROMPT * 40, n_predict=-1, ignore_eos=True)
    assert not found["truncated"] and found["stop_type"] == "limit"
    assert found["tokens_predicted"] + found["tokens_evaluated"] >= served.worker.n_ctx


@check
def _tokens_of_a_chat_are_counted(served: Served) -> None:
    counted = done(served.post("/v1/chat/completions/input_tokens", messages=ASK))["input_tokens"]
    assert counted == chat(served)["usage"]["prompt_tokens"]


@check
def _tool_calls_are_forced(served: Served) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "get", "parameters": parameters}}]
    reply = chat(served, tools=tools, tool_choice="required", max_tokens=120, parallel_tool_calls=False)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get" and json.loads(call["function"]["arguments"]) == {"a": 1}


# --- tokens


@check
def _tokens_and_back(served: Served) -> None:
    tokens = done(served.post("/tokenize", content="What is the capital of France?"))["tokens"]
    assert len(tokens) > 5 and done(served.post("/detokenize", tokens=tokens))["content"].strip() == "What is the capital of France?"


@check
def _tokens_with_the_one_that_begins_a_text(served: Served) -> None:
    bare, whole = (done(served.post("/tokenize", content="x", add_special=special))["tokens"] for special in (False, True))
    assert whole[-len(bare) :] == bare


@check
def _tokens_with_pieces(served: Served) -> None:
    content = "This is a test string with unicode 媽 and emoji 🤗"
    tokens = done(served.post("/tokenize", content=content, with_pieces=True))["tokens"]
    spelled = b"".join(t["piece"].encode() if isinstance(t["piece"], str) else bytes(t["piece"]) for t in tokens)
    assert spelled.decode().strip() == content


# --- vectors


@check
def _vectors_have_length_1(served: Served) -> None:
    body = done(served.post("/v1/embeddings", input=["I believe", "the meaning of life"]))
    assert len(body["data"]) == 2 and all(np.linalg.norm(each["embedding"]) == pytest.approx(1, abs=1e-3) for each in body["data"])
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0


@check
def _vectors_of_tokens_and_texts(served: Served) -> None:
    tokens = done(served.post("/tokenize", content="I believe", add_special=True))["tokens"]
    vectors = [done(served.post("/v1/embeddings", input=given))["data"][0]["embedding"] for given in (tokens, "I believe")]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-3)


@check
def _vectors_of_content_in_llama_cpps_form(served: Served) -> None:
    two = done(served.post("/embedding", content=["I believe", "the meaning of life"]))
    assert [each["index"] for each in two] == [0, 1] and np.linalg.norm(two[0]["embedding"][0]) == pytest.approx(1, abs=1e-3)
    (plain,) = done(served.post("/embedding", content="I believe", embd_normalize=-1))
    vector = np.array(plain["embedding"][0])
    assert np.linalg.norm(vector) > 1.1
    np.testing.assert_allclose(vector / np.linalg.norm(vector), two[0]["embedding"][0], atol=1e-3)


@check
def _vectors_in_base64(served: Served) -> None:
    import base64

    plain, coded = (done(served.post("/v1/embeddings", input="x", encoding_format=f))["data"][0]["embedding"] for f in ("float", "base64"))
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), np.float32), plain, atol=1e-6)


@check
def _vectors_of_nothing_are_400(served: Served) -> None:
    wrong: list[Any] = ["", [], [[]], [1.5], None]
    for given in wrong:
        assert served.post("/v1/embeddings", input=given).status_code == 400, given


@check
def _vectors_of_too_long_texts_are_400(served: Served) -> None:
    reply = served.post("/v1/embeddings", input="This is a test. " * 512)
    assert reply.status_code == 400 and "maximum context length" in reply.json()["error"]["message"]


# --- what others may do


@check
def _pages_of_allowed_origins(served: Served) -> None:
    headers = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "Authorization"}
    reply = served.client.options("/v1/chat/completions", headers=headers)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://example.com"


@check
def _pages_of_other_origins_are_not_let_in(served: Served) -> None:
    headers = {"Origin": "https://elsewhere.com", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served.client.options("/v1/chat/completions", headers=headers).headers


@check
def _infill_needs_its_tokens(served: Served) -> None:
    reply = served.post("/infill", input_prefix="int main() {", input_suffix="}")
    assert (reply.status_code in (400, 501) and "infill" in reply.text) or "fill" in reply.text
    assert served.post("/infill", input_prefix="x", input_suffix="y", input_extra="a text").status_code == 400


@check
def _rerank_needs_a_reranker(served: Served) -> None:
    for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
        reply = served.post(path, query="a", documents=["b"])
        assert reply.status_code in (400, 501) and "rerank" in reply.text.lower()


@pytest.fixture(scope="module")
def served(device: Device) -> Iterator[Served]:
    served = Served(device, Limits(), template=CHATML, n_ctx=512, cors=["https://example.com"], strict=False, parallel=2, pooling="mean")
    yield served
    served.close()


@pytest.mark.exhaustive
@pytest.mark.vulkan
@pytest.mark.parametrize("name", CHECKS)
def test_as_llama_server(name: str, served: Served) -> None:
    CHECKS[name](served)


@pytest.mark.vulkan
def test_keys(device: Device) -> None:
    """Public endpoints, a wrong key, a right one in both headers."""
    served = Served(device, Limits(), api_key="sk-right", n_ctx=64)
    try:
        for path in ("/health", "/"):
            assert served.client.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}):
            reply = served.client.post("/completion", json={"prompt": "x", "n_predict": 1}, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer sk-right"}, {"X-Api-Key": "sk-right"}):
            assert served.client.post("/completion", json={"prompt": "x", "n_predict": 1}, headers=headers).status_code == 200
    finally:
        served.close()


def test_nine_in_ten_of_those_that_apply_are_there() -> None:
    assert len(CHECKS) >= 9 * len(ABSENT)
