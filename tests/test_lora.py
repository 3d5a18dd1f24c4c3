"""Low-rank adapters: their files, models that run with them, merging, and fine-tuning that a kill cannot disturb."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_kit import call
from gguf import GGUFReader
from tiny_models import tiny, tiny_with_text

from vkback import quants
from vkback.cli import main
from vkback.device import Device
from vkback.harness.judge import nmse
from vkback.models import GgufError, GgufFile, Model
from vkback.models.adapter import merge, read_adapter, with_adapter, write_adapter
from vkback.models.engine import Engine
from vkback.models.twin import NumpyTwin
from vkback.plan.lora import adapters
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
    values = {t.name: (size * rng.standard_normal(t.shape)).astype(np.float32)
              for name in lora.ranks for t in adapters(model.hp.weights[name], rank)}
    write_adapter(folder / "adapter.gguf", model.file.arch, "test", lora.alpha, values)
    return folder / "adapter.gguf"


def adapter_bytes(path: Path) -> list[bytes]:
    """Of all tensors of an adapter file."""
    return [np.asarray(t.data).tobytes() for t in GgufFile.open(path).tensors.values()]


def ids(n: int = 200) -> list[int]:
    """A text that can be learned: a short sequence over and over, with noise."""
    rng = np.random.default_rng(4)
    return [int(t) for t in np.where(rng.random(n) < 0.1, rng.integers(0, 331, n), np.tile([5, 17, 200, 31, 8], n)[:n])]


def test_an_adapter_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path = adapter(tiny("llama", tmp_path), tmp_path)
    reader = GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if "." in key and not key.startswith("GGUF")}
    assert keys == {
        "general.architecture": "llama", "general.type": "adapter", "general.name": "test", "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }  # fmt: skip
    shapes = {t.name: tuple(map(int, t.shape)) for t in reader.tensors}  # ggml's order: the contiguous axis first
    assert shapes["blk.0.ffn_down.weight.lora_a"] == (160, 4) and shapes["blk.0.ffn_down.weight.lora_b"] == (4, 96)
    assert len(shapes) == 2 * 3 * 7


def test_a_model_with_an_adapter_is_the_merged_model(tmp_path: Path) -> None:
    """Of F32 weights nothing is rounded; of Q8_0 what a block's step rounds away."""
    path = tiny("qwen3", tmp_path)
    found = adapter(path, tmp_path)
    wanted = NumpyTwin(with_adapter(Model.open(path), found)).logits(TOKENS)
    changed = merge(path, found, tmp_path / "merged.gguf")
    assert len(changed) == 3 * 7 and max(each.nmse for each in changed) < 1e-4
    got = NumpyTwin(tmp_path / "merged.gguf").logits(TOKENS)
    plain = NumpyTwin(path).logits(TOKENS)
    assert nmse(got, wanted) < 5e-4 < 0.05 < nmse(plain, wanted)
    half = with_adapter(Model.open(path), found, 0.5)
    assert half.lora is not None and half.lora.scale("blk.0.attn_q.weight") == 1.0
    base, sum = GgufFile.open(path), GgufFile.open(tmp_path / "merged.gguf")
    for name, t in base.tensors.items():
        same = np.array_equal(t.data, sum.tensor(name).data)
        assert same == (name not in {each.name for each in changed}), name


def test_a_merge_in_another_type_keeps_the_adapter(tmp_path: Path) -> None:
    """A small one, which a block's step of Q8_0 rounds away in part; the rest of the file stays as it is."""
    path = tiny("qwen3", tmp_path)
    found = adapter(path, tmp_path, size=0.01)
    wanted = NumpyTwin(with_adapter(Model.open(path), found)).logits(TOKENS)
    rounded = merge(path, found, tmp_path / "Q8_0.gguf")
    kept = merge(path, found, tmp_path / "F16.gguf", type="F16")
    assert max(each.loss for each in kept) < 0.1 < min(each.loss for each in rounded)
    far, near = (nmse(NumpyTwin(tmp_path / f"{type}.gguf").logits(TOKENS), wanted) for type in ("Q8_0", "F16"))
    assert near < 0.01 * far
    base, made = GgufFile.open(path), GgufFile.open(tmp_path / "F16.gguf")
    assert made.metadata == {**base.metadata, "general.file_type": 1}
    assert list(made.tensors) == list(base.tensors)
    for name, t in base.tensors.items():
        same = name not in {each.name for each in kept}
        assert np.array_equal(t.data, made.tensor(name).data) if same else made.tensor(name).type == "F16", name


def test_a_sum_that_the_type_cannot_hold_is_named(tmp_path: Path) -> None:
    path, out = tiny("qwen3", tmp_path), tmp_path / "sum.gguf"
    large = adapter(path, tmp_path, size=3e3)
    with pytest.raises(quants.QuantRangeError, match=r"blk\.0\.attn_k\.weight: weights of up to .* are beyond what F16 holds"):
        merge(path, large, out, type="F16")
    assert not out.exists()
    assert merge(path, large, out, type="BF16")


@pytest.mark.vulkan
@pytest.mark.parametrize("fusion", ["all", "none"])
def test_the_device_runs_an_adapter_as_the_twin_does(fusion: str, tmp_path: Path, device: Device) -> None:
    path = tiny("qwen3", tmp_path)
    found = adapter(path, tmp_path)
    want = NumpyTwin(with_adapter(Model.open(path), found), n_ctx=32).logits(TOKENS)
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
    table = {f"token_embd.weight.lora_{x}": np.ones(shape, np.float32) for x, shape in (("a", (2, 96)), ("b", (331, 2)))}
    write_adapter(tmp_path / "table.gguf", "llama", "table", 8.0, table)
    with pytest.raises(GgufError, match="does not multiply activations"):
        with_adapter(Model.open(path), tmp_path / "table.gguf")
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
    values = {f"{name}.lora_{x}": (0.1 * rng.standard_normal(shape)).astype(np.float32)
              for name in whole for m, k in [base.tensor(name).shape] for x, shape in (("a", (4, k)), ("b", (m, 4)))}
    write_adapter(tmp_path / "whole.gguf", arch, "whole", 8.0, values)
    merge(path, tmp_path / "whole.gguf", tmp_path / "merged.gguf")
    wanted = NumpyTwin(tmp_path / "merged.gguf").logits(TOKENS)
    assert nmse(NumpyTwin(with_adapter(model, tmp_path / "whole.gguf")).logits(TOKENS), wanted) < 5e-4 < 0.05 < nmse(
        NumpyTwin(path).logits(TOKENS), wanted
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
        small = ("-c", "8", "-b", "1", "--rank", "2", "--steps", "4", "--eval-every", "1", "--save-every", "1", "--lr", "0.1")
        files = ("-m", str(model), "--data", str(tmp_path / "text.txt"), "-o", str(out))
        return call(monkeypatch, main.main, "finetune", *files, *small, *options)

    return run


def test_the_file_is_that_of_the_lowest_loss(
    trains: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
