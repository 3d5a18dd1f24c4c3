"""Names of built-in models: whole ones, or what only one begins with, and then it is told which."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import call
from make_gguf import llama_metadata, llama_tensors, write_gguf

import vkback
from vkback import paths
from vkback.cli.main import main
from vkback.device import Device
from vkback.models import GgufFile
from vkback.models.naming import model_title


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("demo-dense", "demo-dense-Q4_K_M.gguf"),
        ("demo-moe", "demo-moe-MXFP4_MOE.gguf"),
        ("demo-dense-Q4_K_M", "demo-dense-Q4_K_M.gguf"),
        ("demo-dense-Q4_K_M.gguf", "demo-dense-Q4_K_M.gguf"),
    ],
)
def test_whole_names_are_taken_in_silence(name: str, file: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vkback")
    assert paths.builtin_model(name).name == file
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "stem"), [("demo-d", "demo-dense-Q4_K_M"), ("demo-m", "demo-moe-MXFP4_MOE"), ("demo-dense-Q4", "demo-dense-Q4_K_M")]
)
def test_the_beginning_of_one_name_is_told(name: str, stem: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vkback")
    assert paths.builtin_model(name).stem == stem
    assert caplog.messages == [f"{name} is the built-in model {stem}"]


@pytest.mark.parametrize("name", ["d", "demo", "demo-"])
def test_the_beginning_of_several_names_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(paths.MissingFileError, match=rf"'{name}' may be any of the built-in models demo-.*; give a whole name"):
        paths.builtin_model(name)
    with pytest.raises(vkback.VkbackError, match="give a whole name"):
        vkback.load(name)
    assert call(monkeypatch, main, "graph", "-m", name) == 2
    assert f"vkback: error: model {name}: '{name}' may be any of the built-in models" in capsys.readouterr().err


@pytest.mark.vulkan
def test_a_context_beyond_the_trained_one_is_told_in_a_line(tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata() | {"tokenizer.ggml.model": "no_vocab"}, llama_tensors())
    for ctx, said in ((32, []), (33, ["a context of 33 tokens, but the model was trained on 32: expect nothing of text beyond"])):
        vkback.load(path, ctx=ctx).close()
        assert caplog.messages == said


def test_a_title_has_the_file_s_name_and_its_true_parameters(tmp_path: Path) -> None:
    assert (
        model_title(GgufFile.open(paths.builtin_model("demo-dense"))) == "demo storyteller 7M, 6.95 M parameters, llama 6.95M Q4_K - Medium"
    )
    for name, shown in (("a\nb", ""), ("x" * 200, "x" * 80 + ", "), ("  ", "")):
        path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata() | {"general.name": name}, llama_tensors())
        assert model_title(GgufFile.open(path)).startswith(f"{shown}0.06 M parameters, llama 0.06M")
