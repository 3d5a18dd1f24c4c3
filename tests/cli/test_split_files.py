"""Models that are split into several files: read as one, and every way in which their files do not belong together is named."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_kit import call
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from tiny_models import changed, tiny, tiny_with_text

import vkback
from vkback.cli.main import main
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import split_name
from vkback.gguf.fingerprint import fingerprint
from vkback.models import GgufError, GgufFile, Model
from vkback.models.adapter import Given, merge, write_adapter

TOKENS = [3, 17, 250, 8, 91, 4]


def split(path: Path, folder: Path, count: int, stem: str = "model", *, bare_first: bool = False) -> list[Path]:
    """A model's file cut into `count` by the gguf package. bare_first: the first has no tensor."""
    reader = GGUFReader(path)
    per_file = math.ceil(len(reader.tensors) / (count - bare_first))
    folder.mkdir(exist_ok=True)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(folder / f"{stem}.gguf", arch, split_max_tensors=per_file, small_first_shard=bare_first)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], (*field.types, None)[1])
    for t in reader.tensors:
        kind = GGMLQuantizationType(t.tensor_type)
        writer.add_tensor(t.name, np.array(t.data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = [folder / split_name(stem, number, count) for number in range(1, count + 1)]
    assert sorted(folder.glob(f"{stem}-*.gguf")) == found
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> Callable[[int], list[Path]]:
    return lambda count: split(whole, tmp_path / f"in_{count}", count)


@pytest.mark.parametrize("count", [2, 5])
def test_a_split_model_is_read_as_one(count: int, parts: Callable[[int], list[Path]], whole: Path) -> None:
    first, *_ = parts(count)
    opened, one = Model.open(first), Model.open(whole)
    assert opened.file.tensors.keys() == one.file.tensors.keys()
    assert len(opened.file.files) == count and [f.path for f in opened.file.files] == parts(count)
    assert (opened.file.size_bytes, opened.file.n_params, opened.description) == (one.file.size_bytes, one.file.n_params, one.description)
    assert np.array_equal(NumpyTwin(opened, n_ctx=32).logits(TOKENS), NumpyTwin(one, n_ctx=32).logits(TOKENS))
    assert fingerprint(opened.file) == fingerprint(Model.open(first).file)


def test_the_first_file_may_have_no_tensor(whole: Path, tmp_path: Path) -> None:
    first = split(whole, tmp_path / "bare", 3, bare_first=True)[0]
    assert not GgufFile._open(first).tensors
    assert np.array_equal(NumpyTwin(first, n_ctx=32).logits(TOKENS), NumpyTwin(whole, n_ctx=32).logits(TOKENS))


@pytest.mark.vulkan
@pytest.mark.parametrize("repack", ["host", "device"])
def test_a_split_model_comes_to_a_device(repack: str, parts: Callable[[int], list[Path]], whole: Path, device: Device) -> None:
    logits = []
    for path in (parts(5)[0], whole):
        with Engine.load(path, device, n_ctx=32, act="f32", progress=False, repack=repack) as engine:  # type: ignore[arg-type]
            logits.append(engine.prompt_logits(TOKENS))
    assert np.array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))


@pytest.mark.vulkan
def test_a_file_that_changes_before_the_load_is_named(parts: Callable[[int], list[Path]], device: Device) -> None:
    files = parts(2)
    opened = Model.open(files[0])
    os.utime(files[1], ns=(1, 1))
    with pytest.raises(GgufError, match=rf"{files[1].name}: the file has changed since it was opened"):
        Engine(opened, device, LoadOptions(ctx=32, act="f32", repack="device"))


def refused(path: Path, message: str) -> None:
    with pytest.raises(GgufError, match=message) as error:
        Model.open(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(parts: Callable[[int], list[Path]]) -> None:
    files = parts(5)
    files[3].unlink()
    refused(files[0], rf"{files[3].name}: file 4 of 5 of the split model {files[0].name} is missing\. Put all 5 files into one folder")


def test_another_file_than_the_first_says_which_to_give(parts: Callable[[int], list[Path]]) -> None:
    files = parts(5)
    refused(files[2], rf"{files[2].name}: is file 3 of 5 files of a split model; give the first, {files[0].name}")


def test_swapped_files_are_named(parts: Callable[[int], list[Path]]) -> None:
    files = parts(5)
    aside = files[1].with_name("aside")
    files[1].rename(aside)
    files[2].rename(files[1])
    aside.rename(files[2])
    refused(files[0], rf"{files[1].name}: file 2 of 5 .* says that it is number 3 of 5 .*, expected number 2 of 5")


def test_a_renamed_first_file_says_how_it_must_be_called(parts: Callable[[int], list[Path]]) -> None:
    first = parts(2)[0]
    other = first.rename(first.with_name("renamed.gguf"))
    refused(other, r"renamed\.gguf: is the first of 2 files of a split model, which are found by their names: call it renamed-00001")


def test_a_file_of_a_model_with_other_tensors_is_named(parts: Callable[[int], list[Path]], tmp_path: Path) -> None:
    files = parts(2)
    other = split(tiny("qwen2", tmp_path), tmp_path / "other", 2)
    shutil.copy(other[1], files[1])
    refused(files[0], rf"{files[1].name}: file 2 of 2 .* says that it is number 2 of 2 with \d+ tensors in all, expected number 2 of 2")


def test_a_file_of_a_model_of_as_many_tensors_is_named(parts: Callable[[int], list[Path]], tmp_path: Path) -> None:
    """All that tells is the shape of its tensors."""
    files = parts(2)
    other = split(changed(tiny("llama", tmp_path), cut="blk.2.attn_q.weight"), tmp_path / "other", 2)
    shutil.copy(other[1], files[1])
    refused(files[0], rf"{files[1].name}: tensor blk\.2\.attn_q\.weight has shape \[95, 96\], the hyperparameters say \[96, 96\]")


def test_a_truncated_file_is_named(parts: Callable[[int], list[Path]]) -> None:
    files = parts(2)
    files[1].write_bytes(files[1].read_bytes()[:-100])
    refused(files[0], rf"{files[1].name}: truncated")


def test_adapters_are_merged_into_one_file(parts: Callable[[int], list[Path]], whole: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    m, k = Model.open(whole).file.tensor("blk.2.attn_q.weight").shape
    values = {"blk.2.attn_q.weight.lora_a": rng.standard_normal((4, k)), "blk.2.attn_q.weight.lora_b": rng.standard_normal((m, 4))}
    adapter = tmp_path / "adapter.gguf"
    write_adapter(adapter, "llama", "test", 4.0, {name: value.astype(np.float32) for name, value in values.items()})
    for type in (None, "F16"):
        outs = [tmp_path / f"{name}.gguf" for name in ("of_split", "of_whole")]
        for source, out in zip((parts(5)[0], whole), outs, strict=True):
            merge(source, [Given(adapter)], out, type=type)
        logits = [NumpyTwin(out, n_ctx=32).logits(TOKENS) for out in outs]
        assert np.array_equal(logits[0], logits[1])
        assert not any(key.startswith("split.") for key in GgufFile.open(outs[0]).metadata)


def test_no_file_of_the_model_is_overwritten(
    parts: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = parts(2)
    assert call(monkeypatch, main, "merge", "--lora", __file__, "-m", str(files[0]), "-o", str(files[1])) == 2
    assert f"-o {files[1]}: is an input, which is not overwritten" in capsys.readouterr().err


@pytest.mark.vulkan
def test_python_and_the_command_line_take_the_first_file(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny_with_text(tmp_path / "text.gguf")
    first = split(one, tmp_path / "text", 2)[0]
    with vkback.load(first, ctx=32) as a, vkback.load(one, ctx=32) as b:
        assert a.generate("abc", max_tokens=8, seed=1).tokens == b.generate("abc", max_tokens=8, seed=1).tokens
    for args in (["run", "-p", "abc", "-n", "4", "-c", "32", "-m"], ["graph", "-m"], ["compare", "-p", "abc", "-m"]):
        assert call(monkeypatch, main, *args, str(first)) == 0
