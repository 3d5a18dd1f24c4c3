"""Vocabularies of synthetic models: valid ones of the right kind, with which text goes in and comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import call
from gguf import GGUFWriter

import vkback
from vkback.cli.main import main
from vkback.device import Device
from vkback.gguf.pre_tokenizers import PRE_TOKENIZERS
from vkback.models import GgufFile, Model, Tokenizer
from vkback.models.architecture import ARCHITECTURES
from vkback.models.synth import SHAPES, synthesize, write_outline
from vkback.models.synth_vocabulary import SPM, WORD_PIECE, add_vocabulary, made_vocabulary

TEXT = "Hello there, the world!  1234\n\tné 日本 🙂"


def kind_of(shape: str) -> str:
    return SHAPES[shape].vocabulary or ARCHITECTURES[SHAPES[shape].arch].vocabulary


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_vocabulary_of_its_size(shape: str) -> None:
    made = made_vocabulary(kind_of(shape), SHAPES[shape].n_vocab)
    assert len(made.tokens) == len(set(made.tokens)) == len(made.types) == SHAPES[shape].n_vocab
    assert kind_of(shape) in (SPM, WORD_PIECE, *PRE_TOKENIZERS)


@pytest.mark.parametrize(("kind", "n_vocab"), sorted({(kind_of(shape), SHAPES[shape].n_vocab) for shape in SHAPES if "tiny" in shape}))
def test_text_goes_in_and_comes_out(kind: str, n_vocab: int, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "v.gguf", "llama")
    add_vocabulary(writer, kind, n_vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = Tokenizer.from_gguf(GgufFile.open(tmp_path / "v.gguf"))
    if kind == WORD_PIECE:
        text = "hello there the world 1234 ne"
        ids = found.encode(text)
        assert found.decode(ids) == f" {text}" and max(ids) < n_vocab == found.n_vocab
        assert ids[0] == found.bos and ids[-1] == found.end and len(found.encode("the cat", add_bos=False)) < 8
        assert found.pieces(found.encode("Ab, 日本", add_bos=False)) == [" ab", "[UNK]", "[UNK]", "[UNK]"], "no letters, no tokens"
        return
    ids = found.encode(TEXT)
    assert found.decode(ids) == TEXT and max(ids) < n_vocab == found.n_vocab
    assert len(found.encode(" the cat", add_bos=False)) < 8, "words of two letters are tokens"
    assert found.bos is not None and len(found.eos_ids) == 1
    assert all(found.token_bytes(i) or found.token_bytes(i, special=True) for i in range(n_vocab)), "every token has a text"


def test_too_few_tokens_for_all_bytes_are_refused() -> None:
    for kind in (SPM, "gpt-2"):
        with pytest.raises(ValueError, match="a vocabulary of 200 tokens, expected at least 2"):
            made_vocabulary(kind, 200)


def test_an_outline_has_none(tmp_path: Path) -> None:
    write_outline("tiny-llama-Q8_0", tmp_path / "outline.gguf")
    assert not Model.open(tmp_path / "outline.gguf").has_text


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
def test_a_synthetic_model_runs_with_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: Device
) -> None:
    path = tmp_path / "m.gguf"
    synthesize(f"{name}-Q8_0", path)
    with vkback.load(path, ctx=64) as model:
        result = model.generate("Hello", max_tokens=8, ignore_eos=True)
        assert len(result.tokens) == 8 and result.text
    (tmp_path / "text").write_text("It was a dark and stormy night; the rain fell in torrents. " * 8)
    assert call(monkeypatch, main, "run", "-m", str(path), "-p", "Hello", "-n", "8", "-c", "64") == 0
    assert capsys.readouterr().out.startswith("Hello")
    assert call(monkeypatch, main, "perplexity", "-m", str(path), "-f", str(tmp_path / "text"), "-c", "64") == 0
