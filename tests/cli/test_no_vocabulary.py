"""Models whose files have no vocabulary: token ids in, token ids out, and one error for text that says what works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import call
from make_gguf import llama_metadata, llama_tensors, write_gguf

import vkback
from vkback import VkbackError
from vkback.api import LoadedModel
from vkback.cli.main import main
from vkback.device import Device
from vkback.models import Model, TokenizerError

SAYS = r"the file has no vocabulary, so a text cannot be read; give token ids: --tokens 1,2,3 \(vkback run, perplexity\), a list of ids"


def without_text(path: Path) -> Path:
    return write_gguf(path, "llama", llama_metadata(context_length=64) | {"tokenizer.ggml.model": "no_vocab"}, llama_tensors())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_text(tmp_path_factory.mktemp("ids") / "ids.gguf")


@pytest.fixture(scope="module")
def model(path: Path, device: Device) -> Iterator[LoadedModel]:
    with vkback.load(path, ctx=64) as loaded:
        yield loaded


def test_the_tokenizer_knows_ids_alone(path: Path) -> None:
    found = Model.open(path).tokenizer
    assert (found.n_vocab, found.bos, found.eos_ids, found.encode("")) == (32, None, frozenset(), [])
    assert (found.decode([1, 2]), found.token_bytes(3, special=True), found.stream().feed(4)) == ("", b"", "")
    with pytest.raises(TokenizerError, match=SAYS):
        found.encode("Hello")
    with pytest.raises(TokenizerError, match="token id 32 is outside the vocabulary of 32"):
        found.decode([32])


@pytest.mark.vulkan
def test_generation_from_ids(model: LoadedModel) -> None:
    result = model.generate([1, 2, 3], max_tokens=8, temperature=0.0, logprobs=2)
    assert len(result.tokens) == 8 and result.text == "" and result.finish_reason == "length"
    assert [t.token for t in result.logprobs] == list(result.tokens) and result.logprobs[0].text == ""
    chunks = list(model.stream([1, 2, 3], max_tokens=8, temperature=0.0))
    assert [c.tokens for c in chunks] == [(t,) for t in result.tokens], "each token comes when it is made"
    assert model.logits([1, 2, 3]).shape == (3, 32)
    assert model.logits([1, 2, 3])[-1].argmax() == result.tokens[0]


@pytest.mark.vulkan
def test_sessions_of_ids(model: LoadedModel, tmp_path: Path) -> None:
    session = model.session()
    first = session.generate([1, 2, 3], max_tokens=4, temperature=0.0)
    session.save(tmp_path / "state")
    fork = session.fork()
    rest = session.generate([7], max_tokens=4, temperature=0.0)
    assert session.tokens == (1, 2, 3, *first.tokens, 7, *rest.tokens) and session.text == ""
    assert fork.generate([7], max_tokens=4, temperature=0.0).tokens == rest.tokens
    other = model.session()
    other.load(tmp_path / "state")
    assert other.generate([7], max_tokens=4, temperature=0.0).tokens == rest.tokens


@pytest.mark.vulkan
def test_perplexity_of_ids(model: LoadedModel) -> None:
    found = model.perplexity([i % 32 for i in range(64)], chunk=32)
    assert found.value > 1.0 and found.tokens == 30


@pytest.mark.vulkan
@pytest.mark.parametrize("what", ["generate", "stream", "logits", "perplexity", "chat", "json"])
def test_text_is_refused_by_what_works(model: LoadedModel, what: str) -> None:
    with pytest.raises(VkbackError) as error:
        if what == "chat":
            model.chat("Hello", template="plain")
        elif what == "json":
            model.generate([1], json_schema={"type": "object"})
        else:
            getattr(model, what)("Hello")
    assert "no vocabulary" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.vulkan
def test_the_command_line_takes_ids(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: Device
) -> None:
    run = ["run", "-m", str(path), "-n", "4", "--temp", "0"]
    assert call(monkeypatch, main, *run, "--tokens", "1,2,3") == 0
    *prompt, a, b, c, d = capsys.readouterr().out.rstrip("\n").split(",")
    assert prompt == ["1", "2", "3"]
    assert call(monkeypatch, main, *run, "--tokens", "1 2 3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["prompt"], said["prompt_tokens"], said["text"]) == (None, [1, 2, 3], "")
    assert said["tokens"] == [int(t) for t in (a, b, c, d)]
    for more, code, told in (
        (["-p", "Hello"], 1, "the file has no vocabulary, so a text cannot be read; give token ids: --tokens 1,2,3"),
        (["-p", "Hello", "--tokens", "1"], 2, "--tokens and a text exclude each other"),
        (["--tokens", "1,32"], 2, "--tokens: token 1 is 32, expected an id in 0..31"),
    ):
        assert call(monkeypatch, main, *run, *more) == code
        assert told in capsys.readouterr().err
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(str(i % 32) for i in range(64)) + "\n")
    assert call(monkeypatch, main, "perplexity", "-m", str(path), "--tokens", str(ids), "-c", "32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 30
    for args, said in (
        (("--tokens", "1,2,x"), "--tokens 1,2,x: expected token ids, as 1,2,3, or a file of them"),
        (("--tokens", ",".join(["32"] * 40)), "--tokens: token 0 is 32, expected an id in 0..31"),
        (("--tokens", "1", "-f", str(ids)), "perplexity needs a text, as -f FILE, or token ids, as --tokens FILE, and not both"),
    ):
        assert call(monkeypatch, main, "perplexity", "-m", str(path), "-c", "32", *args) == 2
        assert said in capsys.readouterr().err
    assert call(monkeypatch, main, "run", "--tokens", "40,41", "-n", "2") == 0  # a model with a vocabulary
    assert capsys.readouterr().out.strip()
    assert call(monkeypatch, main, "perplexity", "-m", str(path), "-f", str(ids)) == 1
    assert "the file has no vocabulary" in capsys.readouterr().err
