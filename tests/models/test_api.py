"""The Python interface to models: text, sessions, threads, errors. All on one small model, with two kinds of sampler."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import os
import pickle
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_program

import vkback
from vkback.api import ChatTemplateError, ModelError
from vkback.api.chat_template import CHATML, PLAIN, named, render
from vkback.api.options import CHECKS, GenerateOptions, Options
from vkback.checks import OptionError
from vkback.cli import compare as compare_model
from vkback.cli import loading, shell
from vkback.cli import plan as plan_command
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.snapshot import StateError
from vkback.engine.stop_strings import StopStrings
from vkback.ops.lowering import ACTS
from vkback.ops.sampling.penalties import Penalties, PenaltiesOp
from vkback.paths import builtin_model
from vkback.plan.cost.forecast import Costs
from vkback.plan.passes.fuse import FUSIONS
from vkback.report.profile_page import page
from vkback.report.profile_text import report
from vkback.timing import profile_model
from vkback.timing.math_rate import MathRate

PROMPT = "It was a dark and stormy night, and"


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[vkback.LoadedModel]:
    engine = Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)
    with vkback.LoadedModel(engine) as loaded:
        yield loaded


# --- text


@pytest.mark.vulkan
def test_generate_stream_and_the_engine_agree(model: vkback.LoadedModel) -> None:
    result = model.generate(PROMPT, max_tokens=12, temperature=0)
    pieces = list(stream := model.stream(PROMPT, max_tokens=12, temperature=0))
    assert "".join(p.text for p in pieces) == result.text == str(result) == stream.result.text
    assert [t for p in pieces for t in p.tokens] == list(result.tokens) == list(stream.tokens)
    assert result.finish_reason == "length" and result.logprobs == ()
    engine = model.engine
    engine.reset()
    ids = model.tokenizer.encode(PROMPT)
    engine.prompt(ids[:-1])
    assert list(engine.generate(ids[-1], 12)) == list(result.tokens)
    timings = result.timings
    assert (timings.prompt_tokens, timings.decode_tokens, timings.reused_tokens) == (len(ids), 12, 0)
    assert timings.decode_tokens_per_s > 0 and timings.prompt_tokens_per_s > 0


@pytest.mark.vulkan
def test_the_same_seed_gives_the_same_text_whatever_ran_before(model: vkback.LoadedModel) -> None:
    first = model.generate(PROMPT, max_tokens=4, seed=4)
    model.generate("Something else", max_tokens=1)
    assert model.generate(PROMPT, max_tokens=4, seed=4).tokens == first.tokens
    assert model.generate(PROMPT, max_tokens=4, seed=5).tokens != first.tokens
    assert model.generate(model.tokenizer.encode(PROMPT), max_tokens=4, seed=4).tokens == first.tokens


@pytest.mark.vulkan
def test_log_probabilities_are_those_of_the_logits_and_change_no_token(model: vkback.LoadedModel) -> None:
    plain = model.generate(PROMPT, max_tokens=5, temperature=0, repeat_penalty=1.2)
    result = model.generate(PROMPT, max_tokens=5, temperature=0, repeat_penalty=1.2, logprobs=3)
    assert result.tokens == plain.tokens and len(result.logprobs) == 5
    ids = model.tokenizer.encode(PROMPT)
    logits = model.logits([*ids, *result.tokens[:-1]])[len(ids) - 1 :].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for step, row in zip(result.logprobs, want, strict=True):
        # Prompt and decode kernels round differently: 1e-4 is a hundred times what f32 sums of 256 leave in logits of size 10.
        assert step.logprob == pytest.approx(row[step.token], abs=1e-3)
        assert [i for i, _, _ in step.top] == list(np.argsort(-row, kind="stable")[:3])
        assert step.text == model.tokenizer.token_bytes(step.token).decode()


@pytest.mark.vulkan
def test_a_perplexity_is_that_of_the_logits(model: vkback.LoadedModel) -> None:
    """Of two chunks of 16 tokens the second half but for its last: 7 tokens each, by the logits of a chunk that begins anew with BOS."""
    ids = model.tokenizer.encode("It was a dark and stormy night. She said that the old man had gone to the sea. " * 3)[:32]
    assert len(ids) == 32
    found = model.perplexity(ids, chunk=16)
    losses = []
    for chunk in (ids[:16], ids[16:32]):
        fed = [model.tokenizer.bos or 0, *chunk[1:]]
        logits = model.logits(fed)[8:15].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses += [-log_p[i, token] for i, token in enumerate(chunk[9:])]
    # Programs of 8 and of 16 tokens round differently: 1e-4 of a logit.
    assert found.tokens == len(losses) == 14 and found.value == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)


@pytest.mark.vulkan
def test_penalties_and_biases_are_those_of_the_reference(model: vkback.LoadedModel) -> None:
    """Greedy text with penalties, one step after another by the float64 reference, on logits that the device makes."""
    ids = model.tokenizer.encode(PROMPT)
    plain = model.generate(PROMPT, max_tokens=6, temperature=0)
    banned = plain.tokens[0]
    got = model.generate(
        PROMPT,
        max_tokens=6,
        temperature=0,
        logit_bias={banned: float("-inf"), 40: 1.5},
        repeat_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        penalty_last_n=6,
    )
    assert banned not in got.tokens and got.tokens != plain.tokens
    engine = model.engine
    engine.reset()
    engine.prompt(ids[:-1])
    bias = np.zeros(model.n_vocab, np.float32)
    bias[[banned, 40]] = -np.inf, 1.5
    text = list(ids)
    for token in got.tokens:
        seen = Penalties(1.4, 0.3, 0.2, 6).words(text[:-1], model.n_vocab, 128)
        inputs = [engine.decode_logits(text[-1])[None], bias, seen, np.zeros(40, np.int32), np.array(text[-1:]), np.array([len(text) - 1])]
        x = PenaltiesOp().reference(inputs, {})[0][0]
        best, second = np.sort(x)[-1], np.sort(x)[-2]
        assert token == int(np.argmax(x)) or best - second < 1e-4
        text.append(token)


@pytest.mark.vulkan
def test_what_ends_a_text(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = model.generate(PROMPT, max_tokens=12, temperature=0).text
    stop = text[9:12]
    stopped = model.generate(PROMPT, max_tokens=12, temperature=0, stop=[stop, "never in there"])
    assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(stop)]
    pieces = [model.tokenizer.token_bytes(token).decode() for token in stopped.tokens]
    across = model.generate(PROMPT, max_tokens=12, temperature=0, stop=pieces[0][-2:] + pieces[1][:2])
    assert across.finish_reason == "stop" and across.text == pieces[0][:-2] and len(across.tokens) == 2
    with monkeypatch.context() as patch:
        third = model.generate(PROMPT, max_tokens=3, temperature=0).tokens[2]
        patch.setattr(model.tokenizer, "eos_ids", frozenset({third}))
        ended = model.generate(PROMPT, max_tokens=12, temperature=0)
        assert ended.finish_reason == "eos" and len(ended.tokens) <= 3 and ended.tokens[-1] == third
        assert len(model.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).tokens) == 4
    long = model.tokenizer.encode(PROMPT * 100)[:124]
    full = model.generate(long, temperature=0, ignore_eos=True)
    assert full.finish_reason == "context" and len(full.tokens) == 5
    with pytest.raises(ModelError, match=r"would have 129 tokens, the context has 128"):
        model.generate((long * 2)[:129])


@pytest.mark.vulkan
def test_a_token_may_end_a_text(model: vkback.LoadedModel) -> None:
    plain = model.generate(PROMPT, max_tokens=6, temperature=0)
    at = next(i for i, t in enumerate(plain.tokens) if i and t not in plain.tokens[:i])
    stops: tuple[int | list[str | int], ...] = plain.tokens[at], [plain.tokens[at], "never in there"]
    for stop in stops:
        ended = model.generate(PROMPT, max_tokens=6, temperature=0, stop=stop)
        assert ended.finish_reason == "stop" and ended.tokens == plain.tokens[: at + 1]
        assert ended.text == model.tokenizer.decode(plain.tokens[:at]), "as at an end-of-text token"


@pytest.mark.vulkan
def test_no_token_reads_the_prompt(model: vkback.LoadedModel) -> None:
    session = model.session()
    read = session.generate(PROMPT, max_tokens=0)
    count = len(model.tokenizer.encode(PROMPT))
    assert (read.text, read.tokens, read.finish_reason) == ("", (), "length")
    assert (read.timings.prompt_tokens, read.timings.decode_tokens, len(session)) == (count, 0, count) and read.timings.prompt_s > 0
    after = session.generate(max_tokens=3, seed=2)
    assert after.timings.reused_tokens == count - 1
    assert after.tokens == model.generate(PROMPT, max_tokens=3, seed=2).tokens


@pytest.mark.vulkan
def test_any_seed_is_told_and_gives_its_text_again(model: vkback.LoadedModel) -> None:
    results = [model.generate(PROMPT, max_tokens=6, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=None) for _ in range(4)]
    assert len({r.seed for r in results}) == len({r.tokens for r in results}) == 4
    again = model.generate(PROMPT, max_tokens=6, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=results[1].seed)
    assert again == dataclasses.replace(results[1], timings=again.timings)


@pytest.mark.vulkan
def test_a_stream_that_is_left_says_so(model: vkback.LoadedModel) -> None:
    stream = model.stream(PROMPT, max_tokens=8, temperature=0)
    assert stream.result.finish_reason == "closed"
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "closed" and stream.result.tokens and list(stream) == []
    cut = model.stream(PROMPT, max_tokens=8)
    next(cut)
    model.logits([1])
    assert cut.result.finish_reason == "closed"
    with model.stream(PROMPT, max_tokens=2) as whole:
        list(whole)
    assert whole.result.finish_reason == "length", "closed after its end"


def test_stop_strings_hold_back_no_more_than_they_must() -> None:
    stops = StopStrings(["</s>", "\nUser:"])
    assert [stops.feed(t) for t in ("a<", "b</", "s", "x\n", "Us")] == ["a", "<b", "", "</sx", ""]
    assert stops.feed("er: more") == "" and stops.found
    assert StopStrings([]).feed("all of it") == "all of it"
    held = StopStrings(["abc"])
    assert (held.feed("xab"), held.flush(), held.found) == ("x", "ab", False)


# --- sessions


@pytest.mark.vulkan
def test_sessions_take_turns_and_share_nothing(model: vkback.LoadedModel) -> None:
    alone = model.session()
    alone.generate(PROMPT, max_tokens=2)
    want = alone.generate(" She said", max_tokens=4).text
    one, two = model.session(), model.session()
    one.generate(PROMPT, max_tokens=2)
    two.generate("The whale", max_tokens=2)
    fork = one.fork()
    fork.generate(" He said", max_tokens=2)
    model.generate("Something else", max_tokens=1)
    assert one.generate(" She said", max_tokens=4).text == want
    assert fork.text.count(" He said") == 1 and " She said" not in fork.text and two.text.startswith("The whale")
    assert len(one) == len(alone) and one.tokens == alone.tokens
    one.reset()
    assert one.tokens == ()
    assert one.generate(max_tokens=1, temperature=0).timings.prompt_tokens == 1


@pytest.mark.vulkan
def test_a_text_after_save_and_load_is_the_text_without(model: vkback.LoadedModel, tmp_path: Path) -> None:
    session = model.session()
    stream = session.stream(PROMPT, max_tokens=17, seed=3)
    for _ in range(5):
        next(stream)
    session.save(tmp_path / "state")
    with pytest.raises(ModelError, match=r"this stream was ended by a later call, session\.save"):
        next(stream)
    want = session.generate(max_tokens=4, seed=3)
    assert (*stream.tokens, *want.tokens) == model.generate(PROMPT, max_tokens=len(stream.tokens) + 4, seed=3).tokens
    other = model.session()
    other.generate("Something else", max_tokens=3)
    other.load(tmp_path / "state")
    assert other.generate(max_tokens=4, seed=3).tokens == want.tokens
    assert other.tokens == session.tokens


@pytest.mark.vulkan
def test_a_state_of_another_model_or_setting_is_refused(model: vkback.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.session()
    session.generate(PROMPT, max_tokens=2)
    session.save(tmp_path / "state")
    own = dict(model.settings)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "settings_of", lambda *_: {**own, "act": "q8_1", "ctx": 64})
        with pytest.raises(StateError, match=r"ctx: 128, here 64; act: f32, here q8_1\. Use the same settings, or exact=False"):
            model.session().load(tmp_path / "state")
        loose = model.session()
        loose.load(tmp_path / "state", exact=False)
        assert loose.tokens == session.tokens
        patch.setattr(type(model), "settings_of", lambda *_: {**own, "model": "0", "name": "other.gguf"})
        with pytest.raises(StateError, match=r"is of another model, demo-dense-Q4_K_M\.gguf; this one is other\.gguf"):
            model.session().load(tmp_path / "state", exact=False)


@pytest.mark.vulkan
def test_a_state_with_any_byte_flipped_is_refused(model: vkback.LoadedModel, tmp_path: Path) -> None:
    """A thousand places of a session's file; test_state.py flips every byte of a small one."""
    session = model.session()
    session.generate(PROMPT, max_tokens=2)
    session.save(tmp_path / "state")
    raw = bytearray((tmp_path / "state").read_bytes())
    rng = np.random.default_rng(1)
    for at in (0, 9, 13, 50, len(raw) - 1, *rng.integers(len(raw), size=995)):
        raw[at] ^= (flip := int(rng.integers(1, 256)))
        (tmp_path / "damaged").write_bytes(raw)
        with pytest.raises(StateError):
            session.load(tmp_path / "damaged")
        raw[at] ^= flip
    before = session.tokens
    session.load(tmp_path / "state")
    assert session.tokens == before


@pytest.mark.vulkan
def test_a_conversation_reads_only_what_is_new(model: vkback.LoadedModel) -> None:
    session = model.session()
    messages = [{"role": "user", "content": "Who is there?"}]
    first = session.chat(messages, template="plain", max_tokens=8, temperature=0, stop="\n")
    assert first.timings.reused_tokens == 0
    assert model.chat("Who is there?", template="plain", max_tokens=8, temperature=0, stop="\n").text == first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And why?"}]
    before = len(model.chat_ids(messages[:1], "plain"))
    second = session.chat(messages, template="plain", max_tokens=4)
    assert second.timings.reused_tokens >= before - 1
    assert second.timings.reused_tokens + second.timings.prompt_tokens == len(model.chat_ids(messages, "plain"))


# --- templates


def test_templates_render_as_their_models_expect() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render(PLAIN, messages, model="m") == "System: Be brief.\nUser: Hi\nAssistant:"
    assert render(CHATML, messages, model="m", add_generation_prompt=False).endswith("<|im_start|>user\nHi<|im_end|>\n")
    own = "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | tojson }}{% endfor %}"
    own += "{{ eos_token }}"
    assert render(own, messages, model="m", bos="<s>", eos="</s>") == '<s>"Hi"</s>'


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "m: its chat template fails: roles must alternate"),
        ("{% if %}", "m: its chat template fails: Expected an expression"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "m: its chat template fails: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "m: its chat template fails: access to attribute 'append'"),
        ("{{ 1 / 0 }}", "m: its chat template fails: division by zero"),
    ],
)
def test_templates_that_fail_or_reach_out_are_one_error(template: str, text: str) -> None:
    with pytest.raises(ChatTemplateError, match=text):
        render(template, [{"role": "user", "content": "x"}], model="m")


@pytest.mark.parametrize("name", ["llama3", "", "chat-ml", 5])
def test_a_word_is_no_template(name: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"plain, chatml"):
        named(name)
    assert named("plain") == PLAIN and named("{{ messages }}") == "{{ messages }}"


def test_content_may_come_in_parts() -> None:
    parts: list[Any] = [{"type": "text", "text": "H"}, {"text": "i"}, "!"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert render(PLAIN, messages, model="m") == "User: Hi!\nAssistant: \nAssistant:"
    assert messages[0]["content"] is parts
    assert render(PLAIN, [{"role": "assistant"}], model="m", add_generation_prompt=False) == "Assistant: \n"
    with pytest.raises(ChatTemplateError, match=r"message 0 is .*expected a dict with role and content"):
        render(PLAIN, [{"role": "user"}], model="m")
    for content, text in (
        ([{"type": "image_url", "image_url": {}}], "message 0 has a part 'image_url', expected .*models here read text"),
        ([5], "message 0 has a part 5"),
        (5, "the content of message 0 is 5, expected a text, or a list of its parts"),
        ({"type": "text"}, "the content of message 0 is {'type': 'text'}"),
    ):
        with pytest.raises(ChatTemplateError, match=text):
            render(PLAIN, [{"role": "user", "content": content}], model="m")


def test_messages_that_are_none_are_named() -> None:
    for messages in ({"role": "user", "content": "x"}, 5, None):
        with pytest.raises(ChatTemplateError, match=r"the messages are .*, expected a list, as \[\{'role'"):
            render(PLAIN, messages, model="m")  # type: ignore[arg-type]
    with pytest.raises(ChatTemplateError, match="message 1 is 'hello', expected a dict with role and content"):
        render(PLAIN, [{"role": "user", "content": "x"}, "hello"], model="m")  # type: ignore[list-item]
    with pytest.raises(ChatTemplateError, match="there are no messages"):
        render(PLAIN, [], model="m")


# --- errors


class Person:
    """As a class of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temp": 1.0}, r"no option is called 'temp'\. Did you mean temperature\? There are max_tokens, temperature, top_k"),
        ({"max_new_tokens": 1}, r"Did you mean max_tokens\?"),
        ({"temprature": 1}, r"Did you mean temperature\?"),
        ({"temperature": -1.0}, r"temperature is -1\.0 \(float\), expected a number, 0 or more"),
        ({"temperature": "1"}, r"temperature is '1' \(str\), expected a number, 0 or more"),
        ({"temperature": math.inf}, r"temperature is inf \(float\), expected a number, 0 or more"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 1.5}, r"top_p is 1\.5 \(float\), expected a number from 0 to 1"),
        ({"min_p": None}, r"min_p is None \(NoneType\), expected a number from 0 to 1"),
        ({"top_k": 2.5}, r"top_k is 2\.5 \(float\), expected a whole number, 0 or more"),
        ({"max_tokens": -1}, r"max_tokens is -1 \(int\), expected a whole number, 0 or more, or None"),
        ({"max_tokens": "8"}, r"max_tokens is '8' \(str\), expected a whole number"),
        ({"max_tokens": True}, r"max_tokens is True \(bool\)"),
        ({"seed": "x"}, r"seed is 'x' \(str\), expected a whole number, 0 or more, or None for any"),
        ({"repeat_penalty": 0.0}, r"repeat_penalty is 0\.0 \(float\), expected a number above 0"),
        ({"presence_penalty": math.nan}, r"presence_penalty is nan \(float\), expected a number"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'"),
        ({"penalty_last_n": -2}, r"penalty_last_n is -2 \(int\), expected a whole number, 0 or more, or -1"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\] is nan \(float\), expected a number, or -inf to ban the token"),
        ({"logit_bias": {5: math.inf}}, r"logit_bias\[5\] is inf"),
        ({"logit_bias": {"a": 1}}, r"logit_bias: a key is 'a' \(str\), expected a token id"),
        ({"logit_bias": [5]}, r"logit_bias is \[5\] \(list\), expected a dict"),
        ({"logit_bias": {9: 1.0}}, r"logit_bias: token 9, expected an id in 0\.\.8"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias: token -1, expected an id in 0\.\.8"),
        ({"stop": 9}, r"stop: token 9, expected an id in 0\.\.8"),
        ({"stop": ["a", 2.5]}, r"stop is 2\.5 \(float\), expected a string, a token id, or several of them"),
        ({"stop": [""]}, r"stop is \[''\] \(list\), expected strings that are not empty"),
        ({"stop": b"x"}, r"stop is b'x' \(bytes\), expected a string"),
        ({"logprobs": True}, r"logprobs is True \(bool\)"),
        ({"ignore_eos": "no"}, r"ignore_eos is 'no' \(str\), expected True or False"),
        ({"ignore_eos": True, "json_schema": "{}"}, "ignore_eos is True .*expected False with json_schema"),
        ({"json_schema": 5}, r"json_schema is 5 \(int\), expected a JSON schema: a dict, its text, or a class of pydantic"),
        ({"json_schema": {"enum": {1}}}, "of this one JSON cannot be made: Object of type set"),
        ({"json_schema": int}, "json_schema is <class 'int'>"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        Options.of(options, 9)


def test_options_that_can_be_are_taken() -> None:
    given = {
        "max_tokens": np.int64(8),
        "temperature": np.float32(0.5),
        "top_p": 1,
        "seed": np.uint8(3),
        "stop": ("a", np.int32(5)),
        "logit_bias": {np.int64(2): np.float32(1), 3: -math.inf},
        "ignore_eos": np.True_,
        "logprobs": None,
    }
    found = Options.of(given, 9)
    assert (found.max_tokens, found.temperature, found.top_p, found.seed) == (8, 0.5, 1.0, 3)
    assert (found.stops, found.stop_ids, found.ignore_eos) == (("a",), frozenset({5}), True)
    assert found.sampler.logit_bias == ((2, 1.0), (3, -math.inf))
    assert Options.of({"json_schema": Person}).json_schema == '{"type": "object"}'
    assert (Options.of({"stop": "ab"}).stops, Options.of({"stop": None}).stop, Options.of({"stop": 7}).stop) == (("ab",), (), (7,))
    assert len({Options.of({"seed": None}).seed for _ in range(4)}) > 1 and Options.of({}).seed == 0


def test_every_option_is_checked_and_shown_by_help() -> None:
    assert list(CHECKS) == list(GenerateOptions.__annotations__)
    assert set(CHECKS) == {f.name for f in dataclasses.fields(Options)}
    for method in (vkback.LoadedModel.generate, vkback.LoadedModel.stream_chat, vkback.Session.stream, vkback.Session.chat):
        assert all(re.search(rf"^ +.*\b{name}\b", method.__doc__ or "", re.M) for name in CHECKS)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (None, r"the prompt is None \(NoneType\), expected a text, or token ids"),
        (5, "the prompt is 5"),
        (b"It was", r"the prompt is b'It was' \(bytes\)"),
        (["It was", "The"], "this is a list of texts, and this call goes on from one: `batch` takes several"),
        ([1.5], r"the prompt\[0\] is 1\.5 \(float\), expected a token id in 0\.\.4095"),
        (np.array([1.0]), r"the prompt\[0\] is np\.float64\(1\.0\)"),
        ([[1, 2]], r"the prompt\[0\] is \[1, 2\] \(list\)"),
        ({"role": "user"}, r"the prompt is .*\(dict\)"),
    ],
)
def test_prompts_that_are_none_are_named(prompt: Any, text: str, model: vkback.LoadedModel) -> None:
    session = model.session()
    several: tuple[Any, ...] = ()
    if not isinstance(prompt, list) or isinstance(prompt[0], float):  # else they take a list of them
        several = model.generate, model.stream, model.logits, model.perplexity
    for call in (*several, session.generate, session.stream_from, model.profile):
        with pytest.raises(ModelError, match=text):
            call(prompt)
    assert len(model.generate(np.array([5, 6]), max_tokens=1).tokens) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"act": "f16"}, r"act is 'f16' \(str\), expected one of auto, f32, q8_1$"),
        ({"act": "int8"}, "act is 'int8'"),
        ({"act": None}, "act is None"),
        ({"cache_type_k": "q5_0"}, r"cache_type_k is 'q5_0' \(str\), expected one of f16, q8_0, q4_0, f32\. Did you mean q8_0\?"),
        ({"cache_type_v": None}, "cache_type_v is None"),
        ({"ctx": "256"}, r"ctx is '256' \(str\), expected a whole number, 0 or more, or None"),
        ({"ctx": -1}, "ctx is -1"),
        ({"ubatch": 1.5}, r"ubatch is 1\.5"),
        ({"exact": 1}, r"exact is 1 \(int\), expected True or False"),
        ({"progress": "no"}, "progress is 'no'"),
        ({"lora": "a", "lora_scale": math.nan}, "adapter a: times nan, expected a number"),
        ({"lora": "a", "lora_scale": "2"}, r"the scale is '2', expected a number, or one for each adapter"),
        ({"lora": 5}, r"5: expected an adapter file, \(file, scale\), or a list of these"),
        ({"model": None}, "model is None"),
        ({"device": 1.5}, r"device is 1\.5 \(float\), expected an index, part of a name, a UUID, a vkback\.Device, or None"),
    ],
)
def test_what_load_refuses(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model was opened"))
    with pytest.raises(vkback.VkbackError, match=text):
        vkback.load(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"act": "q8_1"}, r"\[train\] act is 'q8_1' \(str\), expected one of f16, f32"),
        ({"ctx": "128"}, r"\[train\] ctx is '128' \(str\), expected a whole number, 1 or more"),
        ({"batch": 0}, "batch is 0"),
        ({"rank": 1.5}, r"rank is 1\.5"),
        ({"lr": "1e-3"}, r"lr is '1e-3' \(str\), expected a number"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": 0.9}, r"betas is 0\.9 \(float\), expected two numbers"),
        ({"seed": None}, "seed is None"),
        ({"checkpoint": "no"}, "checkpoint is 'no'"),
        ({"targets": "attn_q"}, r"targets is 'attn_q' \(str\), expected a list of names"),
        ({"device": 1.5}, r"device is 1\.5"),
        ({"model": 5}, "model is 5"),
    ],
)
def test_what_a_trainer_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        vkback.Trainer(**options)


def test_choices_are_those_of_the_command_line() -> None:
    assert shell.ACTS == ACTS and plan_command.FUSIONS == compare_model.FUSIONS == FUSIONS
    for act in ACTS:
        assert shell.act_of(act) == act
    for other in ("f16", "int8", ""):
        with pytest.raises(shell.UsageError, match="expected one of auto, f32, q8_1"):
            shell.act_of(other)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ctx": -1}, r"ctx is -1 \(int\), expected a whole number, 0 or more, or None"),
        ({"ubatch": "8"}, r"ubatch is '8' \(str\), expected a whole number"),
        ({"act": "F32"}, r"act is 'F32' \(str\), expected one of auto, f32, q8_1\. Did you mean f32\?"),
        ({"cache_type_k": 8}, r"cache_type_k is 8 \(int\), expected one of "),
        ({"exact": "yes"}, r"exact is 'yes' \(str\), expected True, False or \"requests\""),
        ({"lora": 3}, r"\[lora\] 3: expected an adapter file"),
        ({"progress": True}, r"progress is True \(bool\), expected a function, or None"),
    ],
)
def test_load_options_are_checked_when_they_are_made(given: dict[str, Any], text: str) -> None:
    """The same for command line, server, Python and the engine."""
    with pytest.raises(vkback.VkbackError, match=text) as raised:
        LoadOptions(**given)
    if isinstance(raised.value, OptionError):
        (name,) = given
        with pytest.raises(shell.UsageError, match=f"^--{name.replace('_', '-')} {given[name]}: expected "):
            loading.load_options(**given)


def test_load_options_are_plain_values() -> None:
    options = LoadOptions(ctx=np.int64(64), cache_type_v="Q8_0", exact=np.bool_(True))  # type: ignore[arg-type]
    assert options == LoadOptions(ctx=64, cache_type_v="q8_0", exact=True)
    assert type(options.ctx) is int and type(options.exact) is bool


@pytest.mark.vulkan
def test_an_engine_takes_no_choice_that_there_is_not(device: Device) -> None:
    for options, text in (
        ({"act": "f16"}, r"act is 'f16' \(str\), expected one of auto, f32, q8_1"),
        ({"fusion": "some"}, r"fusion is 'some' \(str\), expected one of all, none"),
        ({"repack": "gpu"}, r"repack is 'gpu' \(str\), expected one of device, host"),
    ):
        with pytest.raises(ModelError, match=text):
            Engine.load(builtin_model("demo-dense"), device, **options)  # type: ignore[arg-type]


@pytest.mark.vulkan
def test_another_thread_waits_for_its_turn_and_a_call_inside_another_is_told(model: vkback.LoadedModel) -> None:
    want = model.logits([1, 2])
    with ThreadPoolExecutor(1) as pool:
        with model.using("a long call", keep=True):
            waits = pool.submit(model.logits, [1, 2])
            with pytest.raises(ModelError, match="logits was called inside a long call, by a function that this one calls"):
                model.logits([1, 2])
            assert not waits.done()
        assert np.array_equal(waits.result(), want)

    def processor(ids: Any, logits: Any) -> Any:
        return model.logits([1])

    with pytest.raises(ModelError, match="logits was called inside stream"):
        model.generate(PROMPT, max_tokens=2, logits_processor=processor)


@pytest.mark.vulkan
def test_what_a_model_refuses(model: vkback.LoadedModel, device: Device) -> None:
    with pytest.raises(ModelError, match=r"token 1 is 4096, expected an id in 0\.\.4095"):
        model.generate([1, 4096])
    with pytest.raises(ModelError, match=r"\[\] has no token"):
        model.generate([])
    with pytest.raises(ModelError, match=r"missing\.gguf: no such file"):
        vkback.load("missing.gguf", device=0)
    with pytest.raises(vkback.VkbackError, match="no built-in model is called 'nothing'"):
        vkback.load("nothing")
    assert "stages" in model.explain() and "GET_ROWS" in model.explain()


@pytest.mark.vulkan
def test_a_profile_has_a_phase_for_the_prompt_and_one_for_the_tokens(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_model, "device_costs", lambda *_: Costs(10.0, 5.0, 2.0, "stated"))
    monkeypatch.setattr(profile_model, "measure_math_rate", lambda device, library, kernel: MathRate(kernel, 1e11, "stated"))
    session = model.session()
    session.generate(PROMPT, max_tokens=2)
    want = session.fork().generate(max_tokens=1).tokens
    found = model.profile(PROMPT, tokens=2)
    assert [phase.name.split()[0] for phase in found.phases] == ["prefill", "decode"]
    heading = model.engine.model.heading
    assert found.speeds.tokens == 2 and found.model == heading and "6.95M" in heading
    shown = str(found)
    assert shown == "\n".join(report(found)) and "Kernels chosen" in shown and max(map(len, shown.splitlines())) <= 80
    assert repr(found) == f"<profile of {heading} on {found.device}: {', '.join(p.name for p in found.phases)}; print() shows it>"
    with monkeypatch.context() as on:
        on.setattr("sys.stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
        print(found, flush=True)
        plain = written.getvalue().decode("ascii")
    assert not shown.isascii() and [*map(len, plain.splitlines())] == [*map(len, shown.splitlines())]
    html = found._repr_html_()
    assert html.startswith('<iframe srcdoc="') and unescape(html.split('"')[1]) == page(found)
    assert session.generate(max_tokens=1).tokens == want


@pytest.mark.vulkan
def test_a_closed_model_says_so(device: Device) -> None:
    before = device.live_objects()
    model = vkback.LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=64, progress=False))
    session = model.session()
    model.close()
    model.close()
    for call in (lambda: model.generate("x"), lambda: session.generate("x"), lambda: model.logits([1]), session.fork, model.session):
        with pytest.raises(ModelError, match=r"demo-dense-Q4_K_M\.gguf is closed: .* needs an open one"):
            call()
    left = device.live_objects()
    assert {k: left[k] - before.get(k, 0) for k in left if left[k] > before.get(k, 0) and k in ("Arena", "Commands")} == {}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, vkback; print([m for m in ('numpy', 'rich', 'typer', 'pandas', 'jinja2', 'vulkan') if m in sys.modules])"
    done = run_program([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "[]"
    assert "load" in dir(vkback)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vkback.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_ctx": 64}, r"load has no n_ctx\. Did you mean ctx\? It has model, device, ctx, act"),
        ({"ubach": 64}, r"load has no ubach\. Did you mean ubatch\?"),
        ({"n_threads": 4}, r"load has no n_threads, expected none: the host computes nothing\. Leave it out"),
        ({"model": "HuggingFaceTB/SmolLM2"}, r"HuggingFaceTB.SmolLM2: no such file\. `vkback pull HuggingFaceTB/SmolLM2` fetches"),
        ({"model": "hf:a/b"}, r"`vkback pull a/b` fetches a model of Hugging Face and prints its path"),
    ],
)
def test_what_load_has_not_is_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(vkback.ModelError, match=said):
        vkback.load(**options)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders, and seldom allows links")
def test_what_is_no_file_of_a_model_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to("gone.gguf")
    for name, said in (("pipe.gguf", "a pipe or a device, expected a file"), ("link.gguf", "a link to gone.gguf"), (".", "a folder")):
        with pytest.raises(vkback.ModelError, match=said):
            vkback.load(tmp_path / name)


@pytest.mark.vulkan
def test_a_model_is_loaded_in_each_process_and_not_sent(model: vkback.LoadedModel) -> None:
    for thing in (model, model.session()):
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(vkback.ModelError, match=r"Q4_K_M\.gguf cannot be copied or sent to another process: load it"):
                way(thing)
    with vkback.Device() as device, pytest.raises(vkback.ModelError, match="a device cannot be copied"):
        copy.copy(device)


@pytest.mark.vulkan
def test_a_conversation_of_one_message_may_be_the_message(model: vkback.LoadedModel) -> None:
    message = {"role": "user", "content": "Who is there?"}
    texts = [model.chat_prompt(each, "plain").text for each in (message, [message], "Who is there?")]
    assert len(set(texts)) == 1
