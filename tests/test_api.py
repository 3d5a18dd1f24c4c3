"""The Python interface to models: text, sessions, threads, errors. All on one small model, with two kinds of sampler."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import run_program

import vkback
from vkback.api import ChatTemplateError, ModelError
from vkback.api.chat_template import CHATML, PLAIN, render
from vkback.api.options import Options
from vkback.device import Device
from vkback.models.engine import Engine
from vkback.models.state import StateError
from vkback.models.stop_strings import StopStrings
from vkback.ops.penalties import Penalties, PenaltiesOp
from vkback.paths import builtin_model
from vkback.plan.forecast import Costs
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
        PROMPT, max_tokens=6, temperature=0, logit_bias={banned: float("-inf"), 40: 1.5}, repeat_penalty=1.4, presence_penalty=0.3,
        frequency_penalty=0.2, penalty_last_n=6,
    )  # fmt: skip
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
def test_a_state_of_another_model_or_setting_is_refused(
    model: vkback.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    session.generate(PROMPT, max_tokens=2)
    session.save(tmp_path / "state")
    own = dict(model.settings)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "settings", {**own, "act": "q8_1", "ctx": 64})
        with pytest.raises(StateError, match=r"ctx: 128, here 64; act: f32, here q8_1\. Use the same settings, or exact=False"):
            model.session().load(tmp_path / "state")
        loose = model.session()
        loose.load(tmp_path / "state", exact=False)
        assert loose.tokens == session.tokens
        patch.setattr(type(model), "settings", {**own, "model": "0", "name": "other.gguf"})
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


def test_messages_that_are_none_are_named() -> None:
    with pytest.raises(ChatTemplateError, match="message 1 is 'hello', expected a dict with role and content"):
        render(PLAIN, [{"role": "user", "content": "x"}, "hello"], model="m")  # type: ignore[list-item]
    with pytest.raises(ChatTemplateError, match="there are no messages"):
        render(PLAIN, [], model="m")


# --- errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temp": 1.0}, "no option is called 'temp'; there are max_tokens, temperature, top_k"),
        ({"temperature": -1.0}, r"temperature is -1\.0, expected 0 or more"),
        ({"top_p": 1.5}, r"top_p is 1\.5, expected 0 to 1"),
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1, or None"),
        ({"repeat_penalty": 0.0}, r"repeat_penalty is 0\.0, expected above 0"),
        ({"penalty_last_n": -2}, "penalty_last_n is -2, expected 0 or more, or -1"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, float], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        Options.of(options)


@pytest.mark.vulkan
def test_another_thread_is_told(model: vkback.LoadedModel) -> None:
    said: list[str] = []

    def use() -> None:
        try:
            model.logits([1, 2])
        except ModelError as error:
            said.append(str(error))

    with model.using("a long call", keep=True):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert len(said) == 1 and "is in a long call. One model is used from one thread at a time" in said[0]
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(said) == 1


@pytest.mark.vulkan
def test_what_a_model_refuses(model: vkback.LoadedModel, device: Device) -> None:
    with pytest.raises(ModelError, match=r"token 1 is 4096, expected an id in 0\.\.4095"):
        model.generate([1, 4096])
    with pytest.raises(ModelError, match=r"\[\] has no token"):
        model.generate([])
    with pytest.raises(ChatTemplateError, match=r"demo-dense-Q4_K_M\.gguf has no chat template; give one"):
        model.chat("Hello")
    with pytest.raises(ModelError, match=r"missing\.gguf: no such file"):
        vkback.load("missing.gguf", device=0)
    with pytest.raises(vkback.VkbackError, match="no built-in model is called 'nothing'"):
        vkback.load("nothing")
    assert "stages" in model.explain() and "GET_ROWS" in model.explain()


@pytest.mark.vulkan
def test_a_profile_has_a_phase_for_the_prompt_and_one_for_the_tokens(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_model, "device_costs", lambda *_: Costs(10.0, 5.0, 2.0, "stated"))
    monkeypatch.setattr(profile_model, "measure_math_rate", lambda device, library, way: MathRate(way, 1e11, "stated"))
    session = model.session()
    session.generate(PROMPT, max_tokens=2)
    want = session.fork().generate(max_tokens=1).tokens
    found = model.profile(PROMPT, tokens=2)
    assert [phase.name.split()[0] for phase in found.phases] == ["prefill", "decode"]
    assert found.speeds.tokens == 2 and found.model == model.description
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
