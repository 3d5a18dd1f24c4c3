"""Low-rank adapters: their files, models that run with them, merging, and fine-tuning that a kill cannot disturb."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_kit import call
from gguf import GGUFReader, GGUFWriter
from tiny_models import tiny, tiny_with_text

from vkback import quants
from vkback.api import LoadedModel
from vkback.cli import main
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.snapshot import StateError
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models import GgufError, GgufFile, Model
from vkback.models.adapter import AdapterError, Given, given, merge, read_adapter, with_adapters, write_adapter
from vkback.paths import only_writer
from vkback.plan.passes.lora import adapters
from vkback.report.loss_plot import plot
from vkback.train.finetune import FineTune, Plan
from vkback.train.trainer import TrainError, lora_of

TOKENS = list(range(7, 29))
PLAN = Plan(rank=2, alpha=4.0, targets=("attn_v", "ffn_down"), ctx=8, batch=1, accumulate=2, steps=5, lr=4e-2, warmup=1, eval_every=3)


def adapter(path: Path, folder: Path, rank: int = 4, size: float = 0.1) -> Path:
    """An adapter of all matrices of a tiny model, with values as training gives them."""
    model = Model.open(path)
    lora = lora_of(model, rank)
    rng = np.random.default_rng(2)
    values = {
        t.name: (size * rng.standard_normal(t.shape)).astype(np.float32)
        for name in lora.ranks
        for t in adapters(model.hp.weights[name], rank)
    }
    write_adapter(folder / "adapter.gguf", model.file.arch, "test", lora.alpha, values)
    return folder / "adapter.gguf"


def adapter_bytes(path: Path) -> list[bytes]:
    """Of all tensors of an adapter file."""
    return [np.asarray(t.data).tobytes() for t in GgufFile.open(path).tensors.values()]


def plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """With lists in the place of arrays."""
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}


def ids(n: int = 200) -> list[int]:
    """A text that can be learned: a short sequence over and over, with noise."""
    rng = np.random.default_rng(4)
    return [int(t) for t in np.where(rng.random(n) < 0.1, rng.integers(0, 331, n), np.tile([5, 17, 200, 31, 8], n)[:n])]


def test_an_adapter_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path = adapter(tiny("llama", tmp_path), tmp_path)
    reader = GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if "." in key and not key.startswith("GGUF")}
    assert keys == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "general.name": "test",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    shapes = {t.name: tuple(map(int, t.shape)) for t in reader.tensors}  # ggml's order: the contiguous axis first
    assert shapes["blk.0.ffn_down.weight.lora_a"] == (160, 4) and shapes["blk.0.ffn_down.weight.lora_b"] == (4, 96)
    assert len(shapes) == 2 * 3 * 7


def test_a_model_with_an_adapter_is_the_merged_model(tmp_path: Path) -> None:
    """Of F32 weights nothing is rounded; of Q8_0 what a block's step rounds away."""
    path = tiny("qwen3", tmp_path)
    found = adapter(path, tmp_path)
    wanted = NumpyTwin(with_adapters(Model.open(path), [Given(found)])).logits(TOKENS)
    changed = merge(path, [Given(found)], tmp_path / "merged.gguf")
    assert len(changed) == 3 * 7 and max(each.nmse for each in changed) < 1e-4
    got = NumpyTwin(tmp_path / "merged.gguf").logits(TOKENS)
    plain = NumpyTwin(path).logits(TOKENS)
    assert nmse(got, wanted) < 5e-4 < 0.05 < nmse(plain, wanted)
    half = with_adapters(Model.open(path), [Given(found, 0.5)])
    assert half.lora is not None and half.lora.scale("blk.0.attn_q.weight") == 1.0
    base, sum = GgufFile.open(path), GgufFile.open(tmp_path / "merged.gguf")
    for name, t in base.tensors.items():
        same = np.array_equal(t.data, sum.tensor(name).data)
        assert same == (name not in {each.name for each in changed}), name


def test_a_merge_in_another_type_keeps_the_adapter(tmp_path: Path) -> None:
    """A small one, which a block's step of Q8_0 rounds away in part; the rest of the file stays as it is."""
    path = tiny("qwen3", tmp_path)
    found = adapter(path, tmp_path, size=0.01)
    wanted = NumpyTwin(with_adapters(Model.open(path), [Given(found)])).logits(TOKENS)
    rounded = merge(path, [Given(found)], tmp_path / "Q8_0.gguf")
    kept = merge(path, [Given(found)], tmp_path / "F16.gguf", type="F16")
    assert max(each.loss for each in kept) < 0.1 < min(each.loss for each in rounded)
    far, near = (nmse(NumpyTwin(tmp_path / f"{type}.gguf").logits(TOKENS), wanted) for type in ("Q8_0", "F16"))
    assert near < 0.01 * far
    base, made = GgufFile.open(path), GgufFile.open(tmp_path / "F16.gguf")
    assert plain(made.metadata) == plain({**base.metadata, "general.file_type": 1})
    assert list(made.tensors) == list(base.tensors)
    for name, t in base.tensors.items():
        same = name not in {each.name for each in kept}
        assert np.array_equal(t.data, made.tensor(name).data) if same else made.tensor(name).type == "F16", name


def test_a_sum_that_the_type_cannot_hold_is_named(tmp_path: Path) -> None:
    path, out = tiny("qwen3", tmp_path), tmp_path / "sum.gguf"
    large = adapter(path, tmp_path, size=3e3)
    with pytest.raises(quants.QuantRangeError, match=r"blk\.0\.attn_k\.weight: weights of up to .* are beyond what F16 holds"):
        merge(path, [Given(large)], out, type="F16")
    assert not out.exists()
    assert merge(path, [Given(large)], out, type="BF16")


def adapter_of(path: Path, out: Path, weights: Sequence[str], *, rank: int = 4, alpha: float | None = 8.0, seed: int = 5) -> Path:
    """An adapter of some matrices; alpha: None for a file without it."""
    f = GgufFile.open(path)
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(out, f.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name in weights:
        m, k = f.tensor(name).shape
        shapes = ((m, rank), (k, rank)) if name == "token_embd.weight" else ((rank, k), (m, rank))
        for which, shape in zip("ab", shapes, strict=True):
            writer.add_tensor(f"{name}.lora_{which}", (0.1 * rng.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def several(path: Path, folder: Path) -> list[Given]:
    """Adapters of different ranks and alphas, with weights that one, two or all of them have."""
    q, v, down = (f"blk.0.{stem}.weight" for stem in ("attn_q", "attn_v", "ffn_down"))
    return [
        Given(adapter_of(path, folder / "a.gguf", [q, v], rank=4, seed=1), 0.5),
        Given(adapter_of(path, folder / "b.gguf", [q, down], rank=2, alpha=1.0, seed=2), -3.0),
        Given(adapter_of(path, folder / "c.gguf", [q], rank=3, alpha=0.0, seed=3)),
    ]


def merged_logits(path: Path, files: Sequence[Given], folder: Path) -> np.ndarray:
    """Of the model with adapters merged by numpy, in F32: what is stored is what is meant."""
    merge(path, files, folder / "sum.gguf", type="F32")
    return NumpyTwin(folder / "sum.gguf").logits(TOKENS)


def test_several_adapters_are_added_up_each_with_its_scale(tmp_path: Path) -> None:
    path = tiny("qwen3", tmp_path)
    files = several(path, tmp_path)
    f, made = GgufFile.open(path), tmp_path / "sum.gguf"
    found = merge(path, files, made, type="F32")
    assert {each.name for each in found} == {f"blk.0.{stem}.weight" for stem in ("attn_q", "attn_v", "ffn_down")}
    q = "blk.0.attn_q.weight"
    wanted = quants.decode("Q8_0", f.tensor(q).data).astype(np.float64)
    for one, scale in zip(files, (0.5 * 8 / 4, -3.0 * 1 / 2, 1.0), strict=True):  # alpha 0: not divided by the rank
        a, b = (np.asarray(GgufFile.open(one.path).tensor(f"{q}.lora_{x}").data).view(np.float32) for x in "ab")
        wanted = wanted + scale * (b.astype(np.float64) @ a)
    assert np.allclose(quants.decode("F32", GgufFile.open(made).tensor(q).data), wanted, rtol=1e-6, atol=1e-6)
    beside = with_adapters(Model.open(path), files)
    assert len(beside.graph(1, 1, head="all").nodes) == len(Model.open(path).graph(1, 1, head="all").nodes) + 3 * 4
    assert nmse(NumpyTwin(beside).logits(TOKENS), NumpyTwin(made).logits(TOKENS)) < 1e-10  # A and B as float32
    alone = NumpyTwin(with_adapters(Model.open(path), files[-1:])).logits(TOKENS)
    assert nmse(alone, NumpyTwin(made).logits(TOKENS)) > 1e-3, "the last alone is something else"


@pytest.mark.parametrize("alpha", [0.0, None])
def test_an_adapter_without_alpha_has_the_scale_1(alpha: float | None, tmp_path: Path) -> None:
    path = tiny("qwen3", tmp_path)
    q = "blk.0.attn_q.weight"
    found = read_adapter(adapter_of(path, tmp_path / "a.gguf", [q], alpha=alpha), GgufFile.open(path), 2.0)
    assert found.lora.scale(q) == 2.0
    divided = read_adapter(adapter_of(path, tmp_path / "b.gguf", [q], alpha=4.0), GgufFile.open(path), 2.0)
    assert divided.lora.scale(q) == 2.0
    assert np.array_equal(found.delta(q), divided.delta(q)) and np.any(found.delta(q))


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_an_adapter_of_the_embedding_table_changes_what_a_merge_changes(arch: str, tmp_path: Path) -> None:
    """qwen3's table is the output weight, too. A and B lie as llama.cpp's converter writes them, or as of any other matrix."""
    path = tiny(arch, tmp_path)
    f = GgufFile.open(path)
    assert ("output.weight" in f.tensors) == (arch == "llama")
    files = [Given(adapter_of(path, tmp_path / "table.gguf", ["token_embd.weight"]), 0.5)]
    wanted = merged_logits(path, files, tmp_path)
    assert nmse(NumpyTwin(with_adapters(Model.open(path), files)).logits(TOKENS), wanted) < 1e-10
    assert nmse(NumpyTwin(path).logits(TOKENS), wanted) > 1e-3
    table = GgufFile.open(files[0].path)
    a, b = (np.asarray(table.tensor(f"token_embd.weight.lora_{x}").data).view(np.float32) for x in "ab")
    merged = quants.decode("F32", GgufFile.open(tmp_path / "sum.gguf").tensor("token_embd.weight").data)
    assert np.allclose(merged, quants.decode("Q8_0", f.tensor("token_embd.weight").data) + 0.5 * 2.0 * (a @ b.T), atol=1e-5)
    plain = {"token_embd.weight.lora_a": b.T, "token_embd.weight.lora_b": a}
    write_adapter(tmp_path / "plain.gguf", arch, "plain", 8.0, plain)
    other = [Given(tmp_path / "plain.gguf", 0.5)]
    assert nmse(NumpyTwin(with_adapters(Model.open(path), other)).logits(TOKENS), wanted) < 1e-10
    assert nmse(merged_logits(path, other, tmp_path), wanted) < 1e-10


@pytest.mark.vulkan
@pytest.mark.parametrize("fusion", ["all", "none"])
def test_the_device_runs_several_adapters_and_one_of_the_table(fusion: str, tmp_path: Path, device: Device) -> None:
    path = tiny("qwen3", tmp_path)
    files = [*several(path, tmp_path), Given(adapter_of(path, tmp_path / "table.gguf", ["token_embd.weight"]))]
    want = NumpyTwin(with_adapters(Model.open(path), files), n_ctx=32).logits(TOKENS)
    with Engine.load(path, device, n_ctx=32, act="f32", fusion=fusion, lora=files, progress=False) as engine:
        got = np.vstack([engine.prompt_logits(TOKENS[:-1]), engine.decode_logits(TOKENS[-1])[None]])
    assert nmse(got, want) < 1e-6


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("arch", "weights"),
    [
        ("qwen35", ("blk.1.attn_q", "blk.0.attn_qkv", "blk.0.ssm_alpha", "blk.0.ssm_out", "blk.1.ffn_down")),
        ("qwen3next", ("blk.1.attn_q", "blk.0.ssm_ba", "blk.0.attn_gate", "blk.1.ffn_down_shexp")),
    ],
)
def test_an_adapter_follows_weights_whose_rows_take_turns(arch: str, weights: tuple[str, ...], tmp_path: Path, device: Device) -> None:
    """attn_q holds query and gate of each head in turn, ssm_ba shares and decays of each group; the shared expert's product is one of a
    choice without an adapter."""
    path = tiny(arch, tmp_path)
    files = [Given(adapter_of(path, tmp_path / "a.gguf", [f"{name}.weight" for name in weights]))]
    model = with_adapters(Model.open(path), files)
    want = NumpyTwin(model, n_ctx=32).logits(TOKENS)
    assert nmse(want, merged_logits(path, files, tmp_path)) < 1e-6 < 1e-3 < nmse(want, NumpyTwin(path, n_ctx=32).logits(TOKENS))
    with Engine.load(path, device, n_ctx=32, act="f32", lora=files, progress=False) as engine:
        got = np.vstack([engine.prompt_logits(TOKENS[:-1]), engine.decode_logits(TOKENS[-1])[None]])
    assert nmse(got, want) < 1e-6


@pytest.mark.vulkan
def test_a_saved_session_knows_its_adapters(tmp_path: Path, device: Device) -> None:
    path = tiny_with_text(tmp_path / "model.gguf")
    files = [Given(adapter_of(path, tmp_path / f"{name}.gguf", ["blk.0.attn_q.weight"], seed=i)) for i, name in enumerate("ab")]
    state = tmp_path / "state"

    def loaded(lora: Sequence[Given], scale: float = 1.0) -> LoadedModel:
        return LoadedModel(Engine.load(path, device, n_ctx=16, act="f32", lora=lora, lora_scale=scale, progress=False))

    with loaded(files) as model:
        session = model.session()
        session.generate("ab", max_tokens=2)
        session.save(state)
    with loaded(files) as model:
        model.session().load(state)
    for others, scale in ((files[:1], 1.0), (files, 0.5)):
        with loaded(others, scale) as model, pytest.raises(StateError, match=r"with a\.gguf \w{12} times 1, b\.gguf \w{12} times 1; this"):
            model.session().load(state)


def test_what_adapters_a_caller_asks_for() -> None:
    a, b = Path("a.gguf"), Path("b.gguf")
    assert given(None) == ()
    assert given("a.gguf") == given(a) == given([a]) == (Given(a),)
    assert given(("a.gguf", 0.5), 2.0) == (Given(a, 1.0),)
    both: Any = ["a.gguf", (b, 0.5)]
    assert given(both) == given([a, b], [1.0, 0.5]) == (Given(a), Given(b, 0.5))
    wrong: Any
    for wrong, scale, text in (
        ([a, b], [1.0], "1 scales for 2 adapters; expected one for all, or one for each"),
        ([a, 5], 1.0, r"5: expected an adapter file, or \(file, scale\)"),
        (a, float("nan"), "adapter a.gguf: times nan, expected a number"),
    ):
        with pytest.raises(AdapterError, match=text):
            given(wrong, scale)


def test_an_adapter_that_is_on_only_behind_some_tokens_is_refused(tmp_path: Path) -> None:
    path = tiny("qwen3", tmp_path)
    writer = GGUFWriter(tmp_path / "a.gguf", "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_array("adapter.alora.invocation_tokens", [1, 2])
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((2, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(AdapterError, match=r"adapter\.alora\.invocation_tokens: it is on only behind some tokens"):
        read_adapter(tmp_path / "a.gguf", GgufFile.open(path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--lora", "none.gguf"), "--lora none.gguf: no such file; expected an adapter file"),
        (("--lora", "."), "--lora .: is a folder; expected an adapter file"),
        (("--lora", __file__), f"[lora] adapter {__file__}: not a GGUF file: it begins with"),
        (("--lora-scaled", "a.gguf"), "--lora-scaled a.gguf: expected a file and a number, as adapter.gguf:0.5"),
        (("--lora-scaled", f"{__file__}:half"), ":half: expected a file and a number"),
        (("--lora", __file__, "--lora-scale", "nan"), "'--lora-scale': nan, expected a finite number"),
        (("--lora", __file__, "--lora-scale", "1", "--lora-scale", "2"), "--lora-scale is given 2 times, --lora 1 times"),
    ],
)
@pytest.mark.parametrize("command", [("run", "-p", "x"), ("merge", "-o", "out.gguf")])
def test_an_adapter_that_cannot_be_used_is_named_by_its_option(
    command: tuple[str, ...],
    options: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_with_text(tmp_path / "model.gguf")
    assert call(monkeypatch, main.main, *command, "-m", str(path), *options) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_merge_takes_every_adapter_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("qwen3", tmp_path)
    files = several(path, tmp_path)
    merge(path, files, tmp_path / "wanted.gguf", type="F32")
    a, b, c = (str(each.path) for each in files)
    for name, options in (
        ("pairs.gguf", ("--lora", a, "--lora", b, "--lora", c, "--lora-scale", "0.5", "--lora-scale", "-3", "--lora-scale", "1")),
        ("scaled.gguf", ("--lora-scaled", f"{a}:0.5", "--lora-scaled", f"{b}:-3,{c}:1")),
    ):
        assert call(monkeypatch, main.main, "merge", "-m", str(path), *options, "--type", "F32", "-o", str(tmp_path / name)) == 0
        assert (tmp_path / name).read_bytes() == (tmp_path / "wanted.gguf").read_bytes()
    assert call(monkeypatch, main.main, "merge", "-m", str(path), "-o", str(tmp_path / "none.gguf")) == 2


@pytest.mark.vulkan
@pytest.mark.parametrize("fusion", ["all", "none"])
def test_the_device_runs_an_adapter_as_the_twin_does(fusion: str, tmp_path: Path, device: Device) -> None:
    path = tiny("qwen3", tmp_path)
    found = adapter(path, tmp_path)
    want = NumpyTwin(with_adapters(Model.open(path), [Given(found)]), n_ctx=32).logits(TOKENS)
    with Engine.load(path, device, n_ctx=32, act="f32", fusion=fusion, lora=found, progress=False) as engine:
        got = np.vstack([engine.prompt_logits(TOKENS[:-1]), engine.decode_logits(TOKENS[-1])[None]])
    assert nmse(got, want) < 1e-6


def test_what_is_no_adapter_of_the_model_is_named(tmp_path: Path) -> None:
    path = tiny("llama", tmp_path)
    base = GgufFile.open(path)
    found = adapter(path, tmp_path)
    with pytest.raises(GgufError, match="expected an adapter file"):
        read_adapter(path, base)
    with pytest.raises(GgufError, match="an adapter for 'llama', the model is 'qwen3'"):
        read_adapter(found, GgufFile.open(tiny("qwen3", tmp_path)))
    values = {name: quants.decode(t.type, t.data).reshape(t.shape) for name, t in GgufFile.open(found).tensors.items()}
    a, b = "blk.1.attn_q.weight.lora_a", "blk.1.attn_q.weight.lora_b"
    for changes, text in (
        ({b: None}, f"{a} stands alone"),
        ({a: values[a][:, :32]}, r"expected \[rank, 96\] and \[96, rank\]"),
        ({"blk.7.attn_q.weight.lora_a": values[a]}, "the model has no matrix blk.7.attn_q.weight"),
    ):
        given = {name: v for name, v in {**values, **changes}.items() if v is not None}
        write_adapter(tmp_path / "wrong.gguf", "llama", "wrong", 8.0, given)
        with pytest.raises(GgufError, match=text):
            read_adapter(tmp_path / "wrong.gguf", base)
    for name, text in (
        ("blk.0.attn_norm.weight", "tensor 'blk.0.attn_norm.weight': it replaces a norm's weights, which vkback cannot do"),
        ("blk.0.attn_q.bias", "tensor 'blk.0.attn_q.bias': expected the name of a weight with .lora_a or .lora_b"),
    ):
        write_adapter(tmp_path / "wrong.gguf", "llama", "wrong", 8.0, {**values, name: np.ones(96, np.float32)})
        with pytest.raises(AdapterError, match=text):
            read_adapter(tmp_path / "wrong.gguf", base)
    (tmp_path / "text").write_text("no GGUF")
    with pytest.raises(AdapterError, match=r"^\[lora\] adapter .*text: not a GGUF file: it begins with"):
        read_adapter(tmp_path / "text", base)
    experts = tiny("qwen3moe", tmp_path)
    name = "blk.0.ffn_up_exps.weight"
    write_adapter(tmp_path / "moe.gguf", "qwen3moe", "moe", 8.0, {f"{name}.lora_{x}": np.ones((1, 2, 2), np.float32) for x in "ab"})
    with pytest.raises(AdapterError, match="holds a matrix for each expert; adapters of experts cannot be applied"):
        read_adapter(tmp_path / "moe.gguf", GgufFile.open(experts))
    with pytest.raises(TrainError, match="no matrix of a layer is called nothing; there are attn_q, attn_k"):
        lora_of(Model.open(path), 4, targets=("attn_v", "nothing"))
    assert set(lora_of(Model.open(path), 4, targets=("attn_q",)).ranks) == {f"blk.{il}.attn_q.weight" for il in range(3)}


NAMED = {"gpt2": {"attn_output", "ffn_up", "ffn_down"}, "phi3": {"attn_output", "ffn_down"}}


@pytest.mark.parametrize("arch", NAMED)
def test_a_tensor_of_several_weights(arch: str, tmp_path: Path) -> None:
    """Q, K and V of gpt2 and phi3 are one tensor of the file, and phi3's gate and up, named as the second: an adapter file cannot name a
    part, so none is trained. What others have trained of the whole runs as the merged model."""
    path = tiny(arch, tmp_path)
    model = Model.open(path)
    base = GgufFile.open(path)
    assert {name.split(".")[2] for name in lora_of(model, 4).ranks} == NAMED[arch]
    rng = np.random.default_rng(3)
    whole = [f"blk.{il}.{stem}.weight" for il in range(2) for stem in ("attn_qkv", "ffn_up", "ffn_down")]
    values = {
        f"{name}.lora_{x}": (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name in whole
        for m, k in [base.tensor(name).shape]
        for x, shape in (("a", (4, k)), ("b", (m, 4)))
    }
    write_adapter(tmp_path / "whole.gguf", arch, "whole", 8.0, values)
    merge(path, [Given(tmp_path / "whole.gguf")], tmp_path / "merged.gguf")
    wanted = NumpyTwin(tmp_path / "merged.gguf").logits(TOKENS)
    assert (
        nmse(NumpyTwin(with_adapters(model, [Given(tmp_path / "whole.gguf")])).logits(TOKENS), wanted)
        < 5e-4
        < 0.05
        < nmse(NumpyTwin(path).logits(TOKENS), wanted)
    )


def test_a_run_that_was_cut_off_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = Model.open(tiny("llama", tmp_path))
    whole = FineTune(model, None, ids(), PLAN)
    record = whole.run()
    assert len(record.losses) == 5 and [at for at, _ in record.evaluations] == [0, 3, 5]
    assert record.gain > 0.1, "the held-back part is learned"
    assert record.best == min(record.evaluations[1:], key=lambda each: each[1])

    class KilledError(Exception):
        pass

    def kill(step: int, _: float) -> None:
        if step == 3:
            raise KilledError

    state = tmp_path / "run.state"
    first = FineTune(model, None, ids(), PLAN)
    with pytest.raises(KilledError):
        first.run(on_step=kill, save_every=2, save=lambda: first.save(state))
    second = FineTune(model, None, ids(), PLAN)
    second.resume(state)
    assert second.trainer.t == 2
    assert second.run() == record
    for name, wanted in whole.trainer.weights().items():
        assert np.array_equal(second.trainer.weight(name), wanted), name


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    model = Model.open(tiny("llama", tmp_path))
    run = FineTune(model, None, ids(), PLAN)
    state = tmp_path / "run.state"
    run.save(state)
    with pytest.raises(TrainError, match=r"is of a run with lr 0\.04; give the same settings"):
        FineTune(model, None, ids(), replace(PLAN, lr=0.5)).resume(state)
    with pytest.raises(TrainError, match="another text"):
        FineTune(model, None, ids(180), PLAN).resume(state)
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(TrainError, match="no state of a run that can be read"):
        run.resume(state)
    with pytest.raises(TrainError, match="the text has 15 tokens, two windows of 8 take 17"):
        FineTune(model, None, ids(15), PLAN)
    with pytest.raises(TrainError, match=f"windows of 100000 tokens: the model's context is {model.hp.n_ctx_train}"):
        FineTune(model, None, ids(), replace(PLAN, ctx=100000))


@pytest.fixture
def trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`vkback finetune` by the twin, of a tiny model and a text, with losses of the held-back part that are given."""
    model = tiny_with_text(tmp_path / "model.gguf")
    (tmp_path / "text.txt").write_text("abcab cdb " * 12)

    def run(out: Path, *options: str, losses: Sequence[float] = ()) -> int:
        left = iter(losses)

        class Twin(FineTune):
            def __init__(self, model: Model, device: Device | None, ids: Sequence[int], plan: Plan, *, progress: bool = False) -> None:
                super().__init__(model, None, ids, plan)

            def evaluate(self) -> float:
                return next(left)

        monkeypatch.setattr("vkback.train.finetune.FineTune", Twin)
        monkeypatch.setattr(Device, "open", lambda _: nullcontext(SimpleNamespace(caps=SimpleNamespace(name="twin"))))
        given = {
            "-m": str(model),
            "--data": str(tmp_path / "text.txt"),
            "-o": str(out),
            "-c": "8",
            "-b": "1",
            "--rank": "2",
            "--steps": "4",
            "--eval-every": "1",
            "--save-every": "1",
            "--lr": "0.1",
        }
        usual = [word for name, value in given.items() if name not in options for word in (name, value)]
        return call(monkeypatch, main.main, "finetune", *usual, *options)

    return run


def test_the_file_is_that_of_the_lowest_loss(trains: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole, least, killed = tmp_path / "whole.gguf", tmp_path / "least.gguf", tmp_path / "killed.gguf"
    assert trains(whole, losses=[5, 4.5, 4, 4.2, 4.6]) == 0
    assert "held-back loss 5.0000 -> 4.0000 after step 2, 20.0 % lower" in capsys.readouterr().out
    assert trains(least, losses=[5, 4, 3, 2, 1]) == 0
    assert adapter_bytes(whole) != adapter_bytes(least)
    with pytest.raises(StopIteration):
        trains(killed, losses=[5, 4.5, 4])
    assert trains(killed, "--resume", losses=[4.2, 4.6]) == 0
    assert adapter_bytes(killed) == adapter_bytes(whole)
    assert "going on after step 2" in capsys.readouterr().out
    assert trains(least, losses=[5, 7, 6, 7, 7]) == 0
    assert "20.0 % higher\nnothing was gained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("out", "options", "text"),
    [
        ("none/a.gguf", (), "there is no folder"),
        ("text.txt", (), "is not overwritten"),
        ("model.gguf", (), "is not overwritten"),
        (".", (), "is a folder"),
        ("a.gguf", ("--data", "nothing.txt"), "--data nothing.txt: cannot be read: No such file or directory"),
        ("a.gguf", ("--resume",), "--resume: there is no"),
        ("a.gguf", ("--targets", "attn_q, attn_w"), "no matrix of a layer is called attn_w; there are attn_q, attn_k"),
        ("a.gguf", ("--alpha", "0"), "alpha is 0.0, expected a number above 0"),
        ("a.gguf", ("-c", "33"), "windows of 33 tokens: the model's context is 32"),
    ],
)
def test_what_cannot_be_trained_is_said_at_once(
    out: str, options: tuple[str, ...], text: str, trains: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, error = trains(tmp_path / out, *options), capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert code == (1 if "error: [" in error else 2)  # what the command itself refuses: 2


def test_a_second_run_with_the_same_output_is_refused(
    trains: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would write over the other's state."""
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "a.gguf"
    with only_writer(out, pytest.fail):
        assert trains(out, losses=[5, 4, 3, 2, 1]) == 2
    assert f"-o {out}: another finetune run is writing it; wait for its end, or give another name" in capsys.readouterr().err
    assert trains(out, losses=[5, 4, 3, 2, 1]) == 0


def test_the_learning_rate_rises_and_falls() -> None:
    plan = Plan(steps=110, warmup=10, lr=1.0, lr_end=0.1)
    rates = [plan.lr_at(step) for step in range(110)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_every_window_is_seen_once_an_epoch(tmp_path: Path) -> None:
    run = FineTune(Model.open(tiny("llama", tmp_path)), None, ids(), PLAN)
    n = len(run.train)
    seen = [json.dumps(w.tolist()) for step in range(n) for w in run.batch_at(step)]  # two windows a step: two epochs
    for epoch in range(2):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == sorted(json.dumps(w.tolist()) for w in run.train)
    assert seen[:n] != seen[n : 2 * n]


def test_a_plot_shows_the_first_and_the_last_loss() -> None:
    lines = plot([4.0, 3.0, 2.0, 1.0], [(0, 4.5), (4, 1.5)], height=8)
    assert lines[0].startswith("   4.500 |o") and lines[7].startswith("   1.000 |   ·")
    assert lines[-2].endswith("4 steps") and plot([], []) == []
    assert plot([2.0], [(1, 2.5)])[-2].split() == ["0", "1", "steps"]
