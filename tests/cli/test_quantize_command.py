"""vkback quantize on the command line: what it prints, where it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_kit import call
from test_split_files import split
from tiny_models import tiny, tiny_with_text

from vkback import quants
from vkback.api.device import Device
from vkback.api.encoder import DeviceEncoder
from vkback.cli.main import main
from vkback.gguf.file import GgufFile


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("source"))


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    return call(monkeypatch, main, "quantize", *map(str, words))


def test_a_dry_run_says_types_and_size_and_writes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_device: None
) -> None:
    assert run(monkeypatch, source, tmp_path / "out.gguf", "Q4_0", "--allow-requantize", "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tensors"]["blk.0.attn_q.weight"] == "Q4_0"
    assert run(monkeypatch, source, tmp_path / "out.gguf", "Q4_0", "--allow-requantize", "--no-kl", "--encode", "host") == 0
    assert GgufFile.open(tmp_path / "out.gguf").size_bytes == said["bytes"]


def test_a_split_model_becomes_one_file_of_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = split(source, tmp_path / "parts", 3, "tiny-F32")[0]
    assert run(monkeypatch, first, "f16", "--allow-requantize", "--no-kl") == 0
    made = GgufFile.open(first.with_name("tiny-F16.gguf"))
    assert not [key for key in made.metadata if key.startswith("split.")]
    assert made.tensors.keys() == GgufFile.open(source).tensors.keys()
    assert "16.00 bits per weight" in " ".join(capsys.readouterr().out.split()) or made.n_params


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("out.gguf", "Q4_0", "Q5_0"), "quantize takes IN, OUT and TYPE"),
        (("out.gguf", "Q4_0", "--tensor-type", "Q8_0"), "--tensor-type Q8_0: expected PATTERN=TYPE"),
        (("out.gguf", "Q4_0", "--encode", "gpu"), "--encode gpu: expected auto, host or device"),
        (("out.gguf", "Q4"), "Q4: no such type"),
        (("missing/out.gguf", "Q4_0", "--allow-requantize"), "there is no folder"),
        (("out.gguf", "Q4_0", "--imatrix", "none.gguf"), "none.gguf: cannot be read"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], said: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, source, *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_source_is_not_overwritten(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_device: None
) -> None:
    before = source.read_bytes()
    assert run(monkeypatch, source, source, "Q4_0", "--allow-requantize") == 2
    assert "is an input, which is not overwritten" in capsys.readouterr().err
    assert source.read_bytes() == before


@pytest.mark.vulkan
def test_the_result_is_compared_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_with_text(tmp_path / "tiny.gguf")
    assert run(monkeypatch, source, tmp_path / "out.gguf", "Q4_0", "--allow-requantize", "--kl", "--json") == 0
    found = json.loads(capsys.readouterr().out)["kl"]
    assert found["tokens"] > 500 and 0 < found["mean"] < 1


@pytest.mark.vulkan
def test_a_device_encodes_rows_of_a_file() -> None:
    x = np.random.default_rng(3).standard_normal((24, 512), np.float32)
    with DeviceEncoder(Device()) as encoder:
        raw = encoder("Q4_K", x)
        assert encoder("Q8_0", x) is None, "the host rounds as the reference does to the bit"
    assert raw is not None and raw.shape == (24, quants.row_bytes("Q4_K", 512))
    mine, host = (float(np.square(quants.decode("Q4_K", r) - x).mean()) for r in (raw, quants.encode("Q4_K", x)))
    assert mine < 1.1 * host, "the device's search is shorter: 1.04 on trained weights"
