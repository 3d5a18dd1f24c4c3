"""Synthetic files: sizes, names, seeds, faults."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vkback import quants
from vkback.evaluate.twin import NumpyTwin
from vkback.graph import Tensor
from vkback.models import Model, synth
from vkback.models.synth import SynthError, planned_tensors, synthesize, synthetic_names, synthetic_size
from vkback.paths import builtin_model
from vkback.units import params_text, size_text

# --- synthetic files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "params"),
    [
        ("llama-1b-Q2_K", "546.50 MiB", "1.24 B"),
        ("llama-1b-Q3_K_S", "604.50 MiB", "1.24 B"),
        ("llama-3b-Q5_K_M", "2.16 GiB", "3.21 B"),
        ("llama-3b-Q8_0", "3.18 GiB", "3.21 B"),
        ("llama-8b-Q2_K", "2.95 GiB", "8.03 B"),
        ("llama-8b-Q3_K_S", "3.41 GiB", "8.03 B"),
        ("llama-8b-Q4_K_S", "4.36 GiB", "8.03 B"),
        ("llama-8b-Q4_K_M", "4.58 GiB", "8.03 B"),
        ("llama-8b-Q6_K", "6.14 GiB", "8.03 B"),
        ("llama2-7b-Q4_0", "3.56 GiB", "6.74 B"),
        ("mistral-small-24b-Q5_K_S", "15.18 GiB", "23.57 B"),
        ("mistral-22b-Q4_K_M", "12.42 GiB", "22.24 B"),
        ("mistral-large-123b-Q2_K", "42.09 GiB", "122.61 B"),
        ("mixtral-8x7b-Q4_K_M", "26.49 GiB", "46.70 B"),
        ("smollm-135m-Q8_0", "136.40 MiB", "134.52 M"),
        ("qwen2-7b-Q2_K", "2.80 GiB", "7.62 B"),
        ("qwen2-14b-Q4_K_M", "8.37 GiB", "14.77 B"),
        ("qwen3-0.6b-Q8_0", "604.15 MiB", "596.05 M"),
        ("phi3-3b-Q4_K_M", "2.23 GiB", "3.82 B"),
        ("smollm3-3b-Q4_K_M", "1.78 GiB", "3.08 B"),
        ("qwen3moe-30b-a3b-Q2_K", "10.48 GiB", "30.53 B"),
        ("gpt-oss-20b-MXFP4", "11.27 GiB", "20.91 B"),
        ("gemma3-1b-Q4_K_M", "762.49 MiB", "999.89 M"),
        ("gemma3-4b-Q4_K_M", "2.31 GiB", "3.88 B"),
        ("deci-49b-Q4_K_S", "26.66 GiB", "49.87 B"),
        ("deepseek2-16b-Q4_K_M", "9.65 GiB", "15.71 B"),
        ("granite-4-h-1b-Q4_K_S", "828.80 MiB", "1.46 B"),
        ("granite-4-h-tiny-Q4_K_S", "3.72 GiB", "6.94 B"),
    ],
)
def test_sizes_are_what_llama_bench_prints_for_the_real_files(name: str, size: str, params: str) -> None:
    nbytes, elements = synthetic_size(name)
    assert (size_text(nbytes), params_text(elements)) == (size, params)


def test_every_name_has_a_type_for_every_tensor() -> None:
    names = synthetic_names()
    assert len(names) == len(set(names)) >= 7 * 8
    for name in names:
        tensors = planned_tensors(name)
        assert all(t.shape[-1] % quants.quant(t.type).block_values == 0 for t in tensors)
        assert len(tensors) == len({t.name for t in tensors})


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in shapes with all layers, but narrow."""
    for name in ("llama-8b", "qwen3moe-30b-a3b", "gpt-oss-20b"):
        narrow = dataclasses.replace(
            synth.SHAPES[name], n_embd=256, n_ff=512, n_head=4, n_head_kv=2, head_dim=64, n_ff_expert=256, n_expert_used=2
        )
        experts = 4 if narrow.n_expert else 0
        monkeypatch.setitem(synth.SHAPES, name, dataclasses.replace(narrow, n_expert=experts, n_vocab=40960, n_ctx=64))


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("llama-8b-Q4_K_S", "llama 8B Q4_K - Small"),
        ("qwen3moe-30b-a3b-Q2_K", "qwen3moe 30B.A3B Q2_K - Medium"),
        ("gpt-oss-20b-MXFP4", "gpt-oss 20B MXFP4 MoE"),
    ],
)
def test_a_synthetic_file_opens_as_the_model_it_stands_for(tmp_path: Path, name: str, description: str) -> None:
    written: list[int] = []
    synthesize(name, tmp_path / "m.gguf", on_bytes=written.append)
    model = Model.open(tmp_path / "m.gguf")
    assert model.description == description
    assert (model.file.size_bytes, model.file.n_params) == synthetic_size(name)
    assert sum(written) == model.file.size_bytes
    assert {t.name: (t.type, t.shape) for t in model.file.tensors.values()} == {t.name: (t.type, t.shape) for t in planned_tensors(name)}


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("name", ["llama-8b-Q3_K_M", "qwen3moe-30b-a3b-Q5_K_M", "gpt-oss-20b-MXFP4"])
def test_synthetic_logits_are_finite_and_of_ordinary_size(tmp_path: Path, name: str) -> None:
    synthesize(name, tmp_path / "m.gguf", layers=4)
    logits = NumpyTwin(tmp_path / "m.gguf").forward([1, 2, 3])["result_output"]
    assert np.isfinite(logits).all() and 0.3 < logits.std() < 3


@pytest.mark.usefixtures("small_shapes")
def test_the_seed_alone_decides_the_bytes(tmp_path: Path) -> None:
    for out, seed, threads in (("a", 1, 1), ("b", 1, 5), ("c", 2, 5)):
        synthesize("llama-8b-Q4_K_M", tmp_path / out, layers=2, seed=seed, threads=threads)
    a, b, c = ((tmp_path / out).read_bytes() for out in "abc")
    assert a == b and len(a) == len(c) and a != c


def test_rope_divisors_of_llama3() -> None:
    """Published for 8B: 1 for the 29 fastest pairs, 8 from the 36th on, the smooth ramp between."""
    d = synth.rope_divisors(synth.SHAPES["llama-8b"])
    assert d.dtype == np.float32 and len(d) == 64
    assert (d[:29] == 1).all() and (d[35:] == 8).all() and (np.diff(d[28:36]) > 0).all()


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.skipif(not hasattr(os, "pwrite"), reason="the system has no os.pwrite, whose failure this is about")
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.gguf"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SynthError, match=r"m\.gguf: cannot be written: the disk is full"):
        synthesize("llama-8b-Q4_K_S", out, layers=1)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(SynthError, match=r"llama-8b-Q4_K_S takes 4\.36 GiB, .* has 1\.00 GiB free"):
        synthesize("llama-8b-Q4_K_S", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_synth_names_and_layers_are_checked(tmp_path: Path) -> None:
    for name, near in (("llama-9b-Q4_K_S", r" Did you mean llama-8b-Q4_K_S\?"), ("", "")):
        with pytest.raises(SynthError, match=rf"no model is called .*\.{near} Names are a shape, a dash and a type: of \d+ shapes the nea"):
            planned_tensors(name)
    with pytest.raises(SynthError, match="llama-8b-Q4_K_S has 32 layers, 33 were asked for"):
        synthesize("llama-8b-Q4_K_S", tmp_path / "m.gguf", layers=33)


def test_hparams_hold_every_tensor_as_a_weight() -> None:
    model = Model.open(builtin_model("demo-dense"))
    weight = model.hp.weight("blk.0.ffn_down.weight", (256, 1024))
    assert isinstance(weight, Tensor) and weight.recipe is not None
    assert (weight.kind, weight.recipe.how, weight.recipe.sources) == ("weight", "plain", ("blk.0.ffn_down.weight",))
