"""vkback chat, vkback perplexity, and how vkback run picks tokens."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_kit import REPOSITORY, FakeEngine, call

from vkback.api import LoadedModel, chat_template
from vkback.cli import chat, main, perplexity
from vkback.cli.interrupts import NotedInterrupts
from vkback.cli.sampling import logit_bias
from vkback.cli.shell import UsageError
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.models.adapter import Given
from vkback.paths import builtin_model

TEXT = REPOSITORY / "tests/data/war_of_the_worlds.txt"


@pytest.fixture(scope="module")
def loaded(device: Device) -> Iterator[LoadedModel]:
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)) as model:
        yield model


@pytest.fixture
def commands(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Commands get the model that is loaded; what they asked for."""
    asked: list[dict[str, Any]] = []

    def load_model(path: Path, device: str | None, options: LoadOptions) -> Any:
        asked.append(vars(options))
        return nullcontext(loaded)

    monkeypatch.setattr(chat, "load_model", load_model)
    monkeypatch.setattr(perplexity, "load_model", load_model)
    return asked


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


PLAIN = ("--chat-template", "plain", "-n", "4", "--temp", "0")


@pytest.mark.vulkan
def test_a_conversation_is_kept_saved_and_loaded(
    commands: list[dict[str, Any]], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "talk")
    lines = ["Hello", "/stats", f"/save {file}", "And now?", "/reset", f"/load {file}", "And now?"]
    lines += ["/reset", "/stats", "//x", "/nothing", "/save", "/exit", "no"]
    type_in(monkeypatch, *lines)
    assert call(monkeypatch, main.main, "chat", *PLAIN) == 0
    out, err = capsys.readouterr()
    first = loaded.chat("Hello", template="plain", max_tokens=4, temperature=0).text
    assert out.startswith(first + "\n")
    replies = out[len(first) + 1 :]
    second = (
        loaded.session()
        .chat(
            [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}],
            template="plain",
            max_tokens=4,
            temperature=0,
        )
        .text
    )
    assert replies.startswith(2 * (second + "\n"))
    assert "known before" in err and "messages" in err and "of 128 tokens" in err
    assert "/nothing: no such command; /help lists them, and //nothing is a message" in err
    assert "/save needs a file: /save FILE" in err


@pytest.mark.vulkan
def test_a_model_without_a_template_is_told_before_the_first_line(
    commands: list[dict[str, Any]], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    type_in(monkeypatch, "Hello")
    with monkeypatch.context() as patch:
        patch.setitem(loaded.__dict__, "_builtin", False)
        assert call(monkeypatch, main.main, "chat") == 1
    assert "vkback: error: [chat] demo-dense-Q4_K_M.gguf has no chat template; give one" in capsys.readouterr().err
    assert call(monkeypatch, main.main, "chat", "--chat-template", str(tmp_path / "no")) == 2
    assert "neither plain nor chatml nor a file that can be read" in capsys.readouterr().err
    (tmp_path / "own").write_text("{{ messages[-1].content }}:")
    type_in(monkeypatch, "/help")
    assert call(monkeypatch, main.main, "chat", "--chat-template", str(tmp_path / "own")) == 0
    assert "/save FILE   write it to a file" in capsys.readouterr().err


@pytest.mark.vulkan
def test_variables_of_the_template_and_a_system_message_without_a_place(
    commands: list[dict[str, Any]], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}{{ level }}")
    seen: list[str] = []
    compose = chat_template.compose

    def noted(*args: Any, **given: Any) -> chat_template.Prompt:
        seen.append((made := compose(*args, **given)).text)
        return made

    monkeypatch.setattr(chat_template, "compose", noted)
    type_in(monkeypatch, "Who?")
    asked = ("chat", "--chat-template", str(own), "-sys", "Be brief.", "-n", "2", "--chat-template-kwargs")
    assert call(monkeypatch, main.main, *asked, '{"level": 3}') == 0
    assert seen[-1] == "Be brief.\nWho?3"
    err = capsys.readouterr().err
    assert err.count("the chat template has no place for a system message") == 1 and "Warning" not in err
    assert call(monkeypatch, main.main, *asked, "{") == 2 and "--chat-template-kwargs {: is no JSON" in capsys.readouterr().err
    assert call(monkeypatch, main.main, *asked, "[1]") == 2 and "expected an object" in capsys.readouterr().err


@pytest.mark.vulkan
def test_a_conversation_is_mended(
    commands: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A message of several lines, another reply, a message taken back, another system message."""
    own = tmp_path / "own"
    own.write_text("{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}")
    seen: list[str] = []
    compose, seeds = chat_template.compose, []

    def noted(*args: Any, **given: Any) -> chat_template.Prompt:
        seen.append((made := compose(*args, **given)).text)
        return made

    reply = chat.Conversation.reply

    def with_seed(self: chat.Conversation, text: str) -> None:
        seeds.append(self.options["seed"])
        reply(self, text)

    monkeypatch.setattr(chat_template, "compose", noted)
    monkeypatch.setattr(chat.Conversation, "reply", with_seed)
    lines = ["/undo", '"""/one', "", '  two"""', "/retry", "/undo", "/system Be brief.", "three", "/system", "/retry", '"""open', "end"]
    type_in(monkeypatch, *lines)
    assert call(monkeypatch, main.main, "chat", "--chat-template", str(own), "-n", "2", "--temp", "1", "-s", "7") == 0
    err = capsys.readouterr().err
    assert "/undo: nothing has been said yet" in err and "/system needs a text: /system TEXT" in err
    assert seen[1:5] == ["[u:/one\n\n  two]"] * 2 + ["[s:Be brief.][u:three]"] * 2
    assert seen[5].startswith("[s:Be brief.][u:three][a:") and seen[5].endswith("[u:open\nend]")
    assert seeds == [7, 8, 8, 9, 9] and "vkback: seed 9" in err


@pytest.mark.vulkan
def test_a_conversation_has_a_seed_of_its_own(
    commands: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the same question gets the same reply each time; the seed that is printed gives the conversation again."""
    drawn = iter((7, 8))
    monkeypatch.setattr("secrets.randbits", lambda bits: next(drawn))

    def talk(*more: str) -> tuple[str, list[str]]:
        type_in(monkeypatch, "Hello", "/reset", "Hello", "/exit")
        assert call(monkeypatch, main.main, "chat", "--chat-template", "plain", "-n", "12", "--temp", "2", *more) == 0
        out, err = capsys.readouterr()
        return out, [line for line in err.splitlines() if "seed" in line]

    replies, seeds = talk()
    assert seeds == ["vkback: seed 7", "vkback: seed 8"]
    same, seeds = talk("--seed", "7")
    first = same[: len(same) // 2]
    assert same == first * 2 and not seeds
    assert replies.startswith(first) and replies != same
    type_in(monkeypatch, "Hello")
    assert call(monkeypatch, main.main, "chat", "--chat-template", "plain", "-l", "9999999=1") == 2
    assert "--logit-bias 9999999: no token of this model, expected an id in 0..4095" in capsys.readouterr().err


@pytest.mark.vulkan
def test_chat_without_options_talks_to_the_built_in_model(
    commands: list[dict[str, Any]], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "Hello")
    assert call(monkeypatch, main.main, "chat", "-n", "4", "--temp", "0") == 0
    out, err = capsys.readouterr()
    assert 'demo-dense-Q4_K_M.gguf has no chat template: taken is --chat-template plain, and "User:" ends a reply' in err
    assert out == loaded.chat("Hello", template="plain", max_tokens=4, temperature=0).text + "\n"


def test_ctrl_c_ends_a_reply_and_not_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    class Stream:
        """Interrupts itself at its second piece, as the user's terminal does."""

        result = SimpleNamespace(text="a b", finish_reason="stop", reasoning="")
        closed = False

        def __iter__(self) -> Iterator[Any]:
            for text in ("a", " b", " c"):
                if text == " b":
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)
                yield SimpleNamespace(text=text, reasoning="")

        def close(self) -> None:
            signal.raise_signal(signal.SIGINT)  # while the device ends what it does
            self.closed = True

    stream = Stream()
    with NotedInterrupts() as interrupts:
        assert chat.show(stream, interrupts) is True  # type: ignore[arg-type]
    assert capfd.readouterr() == ("a b\n", "\nvkback: ending the reply\n") and stream.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_a_text_without_a_character_has_no_perplexity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "perplexity", "-f", os.devnull) == 2
    assert capsys.readouterr().err == f"vkback: error: -f {os.devnull}: the file is empty, expected a text\n"


@pytest.mark.vulkan
def test_perplexity_and_divergence_from_a_base(
    commands: list[dict[str, Any]], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = str(tmp_path / "base")
    options = ("perplexity", "-f", str(TEXT), "-c", "32", "--chunks", "2", "--act", "f32")
    assert call(monkeypatch, main.main, *options, "--save-kl-base", base) == 0
    out = capsys.readouterr().out
    want = loaded.perplexity(TEXT.read_text(), chunk=32, n_chunks=2)
    assert f"perplexity {want.value:.4f} +- {want.error:.4f}, 30 tokens scored in 2 chunks of 32" in out
    assert commands[-1] | {"progress": None} == vars(LoadOptions(ctx=32, act="f32"))
    adapter = tmp_path / "a.gguf"
    adapter.touch()
    assert call(monkeypatch, main.main, *options, "--kl-base", base, "--lora", str(adapter), "--lora-scale", "0.5") == 0
    assert commands[-1]["lora"] == (Given(adapter, 0.5),)
    out = capsys.readouterr().out
    assert "KL divergence          0.000000 +- 0.000000 nats" in out and "same likeliest token   100.000 %" in out
    assert call(monkeypatch, main.main, *options[:-4], "--chunks", "1", "--kl-base", base) == 1
    assert "its chunks is 2, here 1: the base must be of the same text" in capsys.readouterr().err
    assert call(monkeypatch, main.main, *options, "--kl-base", base, "--save-kl-base", base) == 2
    assert f"--save-kl-base {base}: is an input, which is not overwritten" in capsys.readouterr().err
    assert call(monkeypatch, main.main, "perplexity", "-f", str(tmp_path)) == 2
    assert re.search("cannot be read: (Is a directory|Permission denied)", capsys.readouterr().err)


# --- run


def test_run_hands_its_options_to_the_sampler_and_stops(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--repeat-penalty", "1.2", "--presence-penalty", "0.5", "--frequency-penalty", "0.25", "--repeat-last-n", "-1")
    assert call(monkeypatch, main.main, "run", "-p", "Once", "-n", "50", *options, "-l", "7=-inf", "-l", "3=1.5", "-r", ", né, n") == 0
    assert capsys.readouterr().out == "Once" + "né" + "\n"
    used = engine.sampler
    assert (used.repeat_penalty, used.presence_penalty, used.frequency_penalty, used.penalty_last_n) == (1.2, 0.5, 0.25, -1)
    assert used.logit_bias == ((3, 1.5), (7, float("-inf")))


@pytest.mark.vulkan
def test_run_and_python_make_the_same_of_the_same_options(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, tokens, and why it ended: by a limit, a stop string, the end of the context."""
    prompt = "Once upon a time there was a king"
    for stop, n in ((), 24), ((" the",), 100), ((), None):
        options = ("-c", "128", "--act", "f32", "-s", "7", "--repeat-penalty", "1.1", *(x for s in stop for x in ("-r", s)))
        count = () if n is None else ("-n", str(n))
        assert call(monkeypatch, main.main, "run", "--json", "-p", prompt, *options, *count) == 0
        made = json.loads(capsys.readouterr().out)
        want = loaded.generate(prompt, max_tokens=n or 128, seed=7, repeat_penalty=1.1, stop=stop)
        assert (made["text"], tuple(made["tokens"]), made["finish_reason"]) == (want.text, want.tokens, want.finish_reason)
        assert made["timings"]["decode_tokens"] == len(want.tokens) and made["timings"]["prompt_tokens"] == len(made["prompt_tokens"])


@pytest.mark.vulkan
def test_run_without_fusion_plans_each_op_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for fusion in ("all", "none"):
        options = ("-m", "demo-dense", "-n", "4", "--temp", "0", "--act", "f32", "--fusion", fusion)
        assert call(monkeypatch, main.main, "run", "--json", "It was a dark", *options) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != ""
    assert call(monkeypatch, main.main, "run", "It was a dark", "--fusion", "some") == 2
    assert "--fusion some: expected one of all, none" in capsys.readouterr().err


def test_a_bias_that_is_none_is_named() -> None:
    for wrong in ("7", "a=1", "7=x"):
        with pytest.raises(UsageError, match=f"--logit-bias {wrong}: expected ID=VALUE, as 42=-1.5"):
            logit_bias([wrong])
