"""Chat templates: what transformers makes of the same ones, and bounds on what one may take."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import run_program

from vkback.api import chat_template, template_process
from vkback.api.chat_template import CHATML, PLAIN, ChatTemplateError, ChatTemplateWarning, Prompt, compose, render
from vkback.api.errors import ContextLengthError
from vkback.api.model import LoadedModel, load
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.gguf.tokenizer import Tokenizer
from vkback.paths import builtin_model

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hé <b>you</b> & I"},
    {"role": "assistant", "content": "So"},
    {"role": "user", "content": "Then?"},
]

USER = [{"role": "user", "content": "x"}]

CASES: dict[str, tuple[str, str]] = {
    "plain": (PLAIN, "System:  Be brief. \nUser: Hé <b>you</b> & I\nAssistant: So\nUser: Then?\nAssistant:"),
    "chatml": (
        CHATML,
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHé <b>you</b> & I<|im_end|>\n<|im_start|>assistant\nSo<|im_end|>\n"
        "<|im_start|>user\nThen?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "generation": (
        "{% set x = 'outer' %}\n{%- for m in messages %}\n{% if m.role == 'assistant' %}\n    {% generation %}\n{% set x = 'inner' %}"
        "{{ '<' ~ x ~ m.content ~ eos_token ~ '>' }}\n    {% endgeneration %}\n{% else %}\n[{{ m.content | trim }}]\n{% endif %}\n"
        "{% endfor %}\n{{- x }}",
        "[Be brief.]\n[Hé <b>you</b> & I]\n<innerSo</s>>\n[Then?]\nouter",
    ),
    "generation cut": ("a {%- generation -%} b {%- endgeneration -%} c", "abc"),
    "break and continue": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m['role'] }},"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
        "user,assistant,",
    ),
    "tojson": ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Hé <b>you</b> & I"}'),
    "tojson keywords": (
        "{{ {'b': 'é', 'a': [1, none, true]} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
        '{"a":[1,null,true],"b":"\\u00e9"}',
    ),
    "tojson in place": ("{{ {'b': 'é'} | tojson(true, 2) }}", '{\n  "b": "\\u00e9"\n}'),
    "tojson indent": ("{{ {'a': {'b': []}} | tojson(indent=4) }}", '{\n    "a": {\n        "b": []\n    }\n}'),
    "no tools": (
        "{{ tools is defined }} {{ tools is none }} {{ documents is none }} {% if tools is not none %}tools{% endif %}"
        "{{ custom_tools is defined }}",
        "True True True False",
    ),
    "strftime_now": ("{{ strftime_now('%%Y') }} {{ strftime_now('%Y') | length }}", "%Y 4"),
    "names": (
        "{% set ns = namespace(n=0) %}{% macro say(x) %}({{ x }}){% endmacro %}{% for m in messages if m.role != 'system' %}"
        "{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ say(ns.n) }}{{ dict(a=1).a }}{{ messages[::-1][0].content }}",
        "(24)1Then?",
    ),
    "methods": (
        "{{ messages[0].content.strip().split(' ')[-1] }}{{ messages[0].get('tool_calls', 'none') }}{{ messages[0].tool_calls is defined }}"
        "{{ '%s|%d' | format('a', 3) }}{{ messages | map(attribute='role') | join(',') }}{{ bos_token ~ add_generation_prompt }}",
        "brief.noneFalsea|3system,user,assistant,user<s>True",
    ),
}
"""Name -> template, and the text that transformers 5.24 makes of it and MESSAGES."""


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_name_that_the_template_reads(name: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "y", name: "Hm."}]
    for read in ("reasoning_content", "thinking"):
        assert render("{{ messages[1]." + read + " }}", messages, model="a test") == "Hm."
    assert render("{{ messages[1].thinking is defined }}", [*USER, *USER], model="a test") == "False"


@pytest.mark.parametrize("name", CASES)
def test_templates_give_what_transformers_gives(name: str) -> None:
    template, text = CASES[name]
    assert render(template, MESSAGES, model="m", bos="<s>", eos="</s>") == text


def test_the_texts_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    for name, (template, text) in CASES.items():
        compiled = utils._compile_jinja_template(template)
        given = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
        assert compiled.render(messages=MESSAGES, **given) == text, name


def test_a_break_may_stand_in_a_generation() -> None:
    own = "{% for m in messages %}{% generation %}{{ m.role }}{% if loop.index == 2 %}{% break %}{% endif %}{% endgeneration %}"
    own += " {% endfor %}"
    assert render(own, MESSAGES, model="m") == "system user"


# --- messages


def test_values_that_json_has_not_are_named() -> None:
    with pytest.raises(ChatTemplateError, match=r"as JSON has them: Object of type object is not JSON serializable"):
        render(PLAIN, [{"role": "user", "content": "x", "further": object()}], model="m")


def test_tools_documents_and_any_other_variable_reach_the_template() -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.parameters | tojson }}){% endfor %}"
        "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ level }}"
        "{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    variables = {"tools": [tool], "documents": [{"title": "A", "text": "b"}], "enable_thinking": False, "level": 3}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [tool]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    made = compose(template, messages, model="m", variables=variables)
    assert made == Prompt('add({"type": "object"})[A: b]x<add>4<think></think>3')
    assert compose(template, messages[:2], model="m", variables={"level": 4}).text == "x<add>4", "calls that wait are not gone on with"
    assert compose(template, USER, model="m", variables={"add_generation_prompt": False, "level": 3}).text == "x"


PREFILLS = {
    "plain": (CHATML, "So it", "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nSo it"),
    "white space": (CHATML, "So ", "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nSo "),
    "the text of another message": (CHATML, "x", "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nx"),
    "a template that trims": ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}.{% endfor %}", "So ", "[user]x.[assistant]So"),
    "a template that drops it": (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
        "So ",
        "xA:So ",
    ),
    "an empty one": (CHATML, "", "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
}


@pytest.mark.parametrize("name", PREFILLS)
def test_a_last_message_of_the_assistant_is_gone_on_with(name: str) -> None:
    template, begun, text = PREFILLS[name]
    assert compose(template, [*USER, {"role": "assistant", "content": begun}], model="m") == Prompt(text, begun)


def test_prefills_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    for name, (template, begun, text) in PREFILLS.items():
        if begun and "drops" not in name:
            chat = [*USER, {"role": "assistant", "content": begun}]
            made, _ = utils.render_jinja_template([chat], chat_template=template, continue_final_message=True, tools=None, documents=None)
            assert made == [text], name


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
LOSES_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [NO_SYSTEM, LOSES_SYSTEM])
def test_a_system_message_is_never_lost_nor_refused(template: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert compose(template, [system, *USER], model="m") == Prompt("[user]Be brief.\nx", moved_system=True)
    assert compose(template, [{"role": "developer", "content": "Be brief."}, *USER], model="m").moved_system
    assert compose(template, [system], model="m").text == "[user]Be brief."
    assert compose(template, USER, model="m") == Prompt("[user]x")
    assert compose(CHATML, [system, *USER], model="m") == Prompt(render(CHATML, [system, *USER], model="m"))


def test_the_developer_is_the_system_where_a_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *USER]
    assert compose(PLAIN, messages, model="m").text == "System: Be brief.\nUser: x\nAssistant:"
    own = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}"
    assert compose(own, messages, model="m").text == "Duser"


def test_a_template_that_reads_parts_alone_gets_them() -> None:
    template = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
    messages: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "y"}, "z"]},
    ]
    assert compose(template, messages, model="m").text == render(template, messages, model="m") == "x;;yz;"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], r"template_kwargs is \[1\], expected a dict"),
        ({"messages": []}, "template_kwargs has messages, which the template has from the conversation and the model"),
        ({"tools": {1}}, "as JSON has them: Object of type set"),
    ],
)
@pytest.mark.vulkan
def test_variables_that_cannot_be_are_named(model: LoadedModel, given: Any, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        model.chat("x", template="plain", template_kwargs=given)


@pytest.mark.vulkan
def test_chat_tells_thoughts_and_answer_apart(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = model.tokenizer.encode("<think>We add.</think>\n\n4", add_bos=False)
    monkeypatch.setattr(model.engine, "generate", lambda *_, **__: (token for token in forced))
    whole = model.chat("2+2", template="chatml", max_tokens=40)
    assert (whole.reasoning, whole.text, whole.tokens) == ("We add.", "4", tuple(forced))
    pieces = list(stream := model.stream_chat("2+2", template="chatml", max_tokens=40))
    assert "".join(p.reasoning for p in pieces) == "We add." and "".join(p.text for p in pieces) == "4"
    assert tuple(t for p in pieces for t in p.tokens) == tuple(forced) and stream.result.reasoning == "We add."
    assert model.generate("2+2", max_tokens=40).text == "<think>We add.</think>\n\n4", "but not a text that goes on"
    stopped = model.chat("2+2", template="chatml", max_tokens=40, stop="dd")
    assert (stopped.reasoning, stopped.text) == ("We a", "")


@pytest.mark.vulkan
def test_the_reader_is_told_of_what_the_template_does(model: LoadedModel) -> None:
    opened = model.chat_prompt("x", CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}")
    assert opened.marks.inside == "</think>" and opened.text.endswith("<think>\n")
    with pytest.warns(ChatTemplateWarning, match="no place for a system message"):
        model.chat([{"role": "system", "content": "Be brief."}, *USER], template=NO_SYSTEM, max_tokens=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.chat([{"role": "system", "content": "Be brief."}, *USER], template=NO_SYSTEM, max_tokens=0)


# --- bounds

CHARS = r"makes more than \d+ characters of messages that have 1; give one: --chat-template"
MEMORY = "needs more than 512 MiB of memory"
TIME = "takes more than 1 s"

HUNGRY = [
    ("{{ 'a' * 10**8 }}", CHARS),
    ("{{ 'a' * 10**15 }}", MEMORY),
    ("{{ 'a' * 10**30 }}", MEMORY),
    ("{{ 'a'.ljust(10**10) }}", MEMORY),
    ("{{ '%2000000000d' % 5 }}", MEMORY),
    ("{{ 'a' | center(10**10) }}", MEMORY),
    ("{{ [[1] * 10**6] * 10**6 | length }}", MEMORY),
    ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}", MEMORY),
    ("{% for i in range(99999) %}{% for j in range(99999) %}0123456789{% endfor %}{% endfor %}", CHARS),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    ("{{ 9**(9**9) }}", f"{TIME}|{MEMORY}"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: maximum recursion depth"),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "fails: "),
]


@pytest.mark.skipif(sys.platform != "linux", reason="only here does the system bound a process's address space")
@pytest.mark.parametrize(("template", "said"), HUNGRY, ids=[template[:30] for template, _ in HUNGRY])
def test_a_template_that_wants_too_much_is_one_error(monkeypatch: pytest.MonkeyPatch, template: str, said: str) -> None:
    resource = pytest.importorskip("resource", reason="Windows counts no memory of a process so")
    monkeypatch.setattr(chat_template, "TIME_S", 1.0 if TIME in said else 30.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match=f"m: its chat template ({said})"):
        render(template, USER, model="m")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB of this process"
    monkeypatch.undo()
    assert render(PLAIN, USER, model="m") == "User: x\nAssistant:", "the next one is rendered"


def test_long_messages_may_be_long_texts() -> None:
    long = "word " * 2_000_000
    assert len(render("{{ messages[0].content * 3 }}", [{"role": "user", "content": long}], model="m")) == 3 * len(long)


def test_threads_take_turns_and_ctrl_c_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def one(i: int) -> None:
        texts.append(render("{{ messages[0].content }}", [{"role": "user", "content": str(i)}], model="m"))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [str(i) for i in range(8)]

    def interrupt() -> None:
        time.sleep(0.3)
        if sys.platform == "win32":
            signal.raise_signal(signal.SIGINT)  # os.kill would end the process
        else:
            os.kill(os.getpid(), signal.SIGINT)  # to the process, as a terminal does: its main thread no longer waits

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt).start()
            render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}old", USER, model="m")
    finally:
        signal.signal(signal.SIGINT, before)
    assert render("new", USER, model="m") == "new"


FORKING = """
import os
from vkback.api.chat_template import PLAIN, _renderer, render

messages = [{"role": "user", "content": "x"}]
render(PLAIN, messages, model="m")
own = _renderer._process.pid
if (child := os.fork()) == 0:
    ok = render("{{ 1 + 1 }}", messages, model="m") == "2" and _renderer._process.pid != own
    _renderer.close()
    os._exit(not ok)
assert os.waitpid(child, 0)[1] == 0
assert render("{{ 2 + 2 }}", messages, model="m") == "4" and _renderer._process.pid == own
print(own)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_renders_by_itself_and_the_process_ends_with_its_own() -> None:
    done = run_program([sys.executable, "-c", FORKING])
    assert done.returncode == 0 and not done.stderr, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_program_without_a_python_beside_it_renders_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert render(PLAIN, USER, model="m") == "User: x\nAssistant:"


def begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next template begin a process of its own."""
    monkeypatch.setattr(chat_template, "_renderer", chat_template._Renderer())


def test_a_process_that_cannot_be_begun_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin_anew(monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ChatTemplateError, match=r"cannot be begun: .*nothing: No such file"):
        render(PLAIN, USER, model="m")
    monkeypatch.undo()
    begin_anew(monkeypatch)
    monkeypatch.setattr(template_process, "__file__", str(tmp_path / "nothing.py"))
    with pytest.raises(ChatTemplateError, match=r"cannot be begun: .*nothing\.py ended with status 2"):
        render(PLAIN, USER, model="m")


# --- of a model


@pytest.fixture(scope="module")
def model(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A copy of the built-in dense model: nobody's own, and without a template."""
    path = tmp_path_factory.mktemp("models") / "copy.gguf"
    shutil.copy(builtin_model("demo-dense"), path)
    with LoadedModel(Engine.load(path, device, n_ctx=128, act="f32", progress=False)) as model:
        yield model


@pytest.mark.vulkan
def test_the_built_in_models_take_plain_and_end_before_the_user_speaks(model: LoadedModel, device: Device) -> None:
    with pytest.raises(ChatTemplateError, match=r"copy\.gguf has no chat template; give one: --chat-template plain, chatml or FILE"):
        model.chat("Hello")
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)) as own:
        assert own.chat_format() == chat_template.ChatFormat(PLAIN, ("User:",)) and own.chat_format("plain").stops == ()
        banned = {token: float("-inf") for token in own.tokenizer.eos_ids}
        forced = own.tokenizer.encode(" A User: B", add_bos=False)
        ids = own.chat_ids([{"role": "user", "content": "Hello"}], None)
        assert ids == own.chat_ids([{"role": "user", "content": "Hello"}], "plain")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own.engine, "generate", lambda *_, **__: (token for token in forced))
            assert own.chat("Hello", logit_bias=banned, stop=["never"]).text == " A "
            assert own.chat("Hello", template="plain").text == " A User: B"


@pytest.mark.vulkan
def test_eos_token_is_the_file_s(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first id of all that end a text: Qwen's template closes messages by <|im_end|>, and <|endoftext|> has a lower id."""
    own = model.tokenizer
    tokenizer = Tokenizer(own._vocabulary, own._tokens, own._types, bos=None, eos_ids=[7, 5], add_bos=False, strip_space=False)
    assert tokenizer.eos_id == 7 and tokenizer.eos_ids >= {5, 7}
    seen: list[str] = []
    monkeypatch.setattr(LoadedModel, "tokenizer", tokenizer)

    def compose_noted(*_: Any, eos: str, **__: Any) -> chat_template.Prompt:
        seen.append(eos)
        return chat_template.Prompt("x")

    monkeypatch.setattr(chat_template, "compose", compose_noted)
    model.chat_ids([{"role": "user", "content": "Hello"}], "plain")
    assert seen == [tokenizer.token_bytes(7, special=True).decode()]


@pytest.mark.vulkan
def test_load_warns_of_a_template_that_is_broken(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(LoadedModel, "template", property(lambda self: "{% if %}"))
    with pytest.warns(ChatTemplateWarning, match=r"demo-dense-Q4_K_M\.gguf: its chat template is broken, .*Expected an expression"):
        load("demo-dense", device.index, 64).close()
    monkeypatch.setattr(LoadedModel, "template", property(lambda self: "{{ 'a' * 10**15 }}{% generation %}{% endgeneration %}"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("demo-dense", device.index, 64).close()


@pytest.mark.vulkan
def test_a_text_that_cannot_fit_is_not_tokenized(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """10^8 characters would take 15 GB."""
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    long = "word " * 10_000_000
    least = len(long) // model.tokenizer.longest
    for call in (lambda: model.generate(long), lambda: model.session().stream_from(long), lambda: model.chat(long, template="plain")):
        with pytest.raises(ContextLengthError, match=r"would have at least \d+ tokens, the context has 128") as error:
            call()
        assert error.value.n_ctx == 128 and error.value.tokens >= least
