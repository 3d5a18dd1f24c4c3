"""Training steps: gradients by finite differences, the backward IR, the device against the twin, and PyTorch where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny_models import changed, tiny
from typer.testing import CliRunner

from vkback.cli.main import app
from vkback.cli.shell import UsageError
from vkback.device import Capabilities, Device
from vkback.device.queue import CPU_WAIT_S, WAIT_S, Queue
from vkback.evaluate.judge import nmse
from vkback.models import Model
from vkback.models.synth import write_outline
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.f16_range import F16RangeError
from vkback.ops.family import Choice
from vkback.ops.lowering import PlanError
from vkback.ops.matmul.linear_cases import MATRICES
from vkback.plan.autodiff import gradient
from vkback.plan.training import training_graph
from vkback.report import graph_ir
from vkback.train import parity
from vkback.train.steps import DeviceSteps
from vkback.train.trainer import Settings, StepTrainer, TrainError, lora_of
from vkback.tuning.lookup import Overrides, Tuning

ARCHES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "phi3", "smollm3")
CTX, BATCH = 12, 2


def trainer(path: Path, device: Device | None = None, *, rank: int = 0, batch: int = BATCH, **more: Any) -> StepTrainer:
    model = Model.open(path)
    settings = Settings(more.pop("optimizer", "sgd"), more.pop("lr", 1e-2), max_norm=more.pop("max_norm", 0.0))
    return StepTrainer(model, device, ctx=CTX, batch=batch, settings=settings, lora=lora_of(model, rank) if rank else None, **more)


def texts(n: int = BATCH, seed: int = 3) -> tuple[Any, Any]:
    """Tokens and targets [n, CTX], with repeated tokens and a target that does not count."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 40, (n, CTX)), rng.integers(0, 331, (n, CTX))
    targets[0, 5] = -1
    return tokens, targets


# -- the graph


@pytest.mark.parametrize("shape", ["smollm-135m-Q8_0", "tiny-gpt2-Q8_0", "tiny-gemma3-Q8_0", "tiny-qwen3-Q8_0"])
def test_the_backward_ir_has_the_forward_steps_from_the_last_to_the_first(shape: str, tmp_path: Path) -> None:
    write_outline(shape, tmp_path / "outline.gguf")
    model = Model.open(tmp_path / "outline.gguf")
    training = training_graph(model.graph(2, 2, head="all"))
    forward = list(graph_ir.forward(model.hp, training.forward, 2))
    assert forward == list(graph_ir.forward(model.hp, model.graph(1, 2, head="last"), 2)), "training has the steps of inference"
    backward = list(graph_ir.backward(model.hp, training, 2))
    assert backward[:2] == ["=== Backward IR ===", forward[1]]
    layers = [line.split()[:3] for line in forward[2:]]
    wanted = [[layer, number, f"{name}_BWD"] for layer, number, name in reversed(layers)]
    assert [line.split()[:3] for line in backward[2:]] == wanted
    listed = {name for line in backward for name in line.partition("grads=[")[2].rstrip("]").split(",") if name}
    assert listed == {t.name.split(".", 2)[2] for t in training.trained if t.name.startswith("blk.")}


def test_a_backward_step_reads_the_gradients_that_later_steps_make(tmp_path: Path) -> None:
    write_outline("smollm-135m-Q8_0", tmp_path / "outline.gguf")
    model = Model.open(tmp_path / "outline.gguf")
    lines = list(graph_ir.backward(model.hp, training_graph(model.graph(2, 2, head="all")), 2))[2:12]
    assert lines[0] == "  L29 N9 ADD_BWD        outputs=[L29:N9:0,L29:N9:1] inputs=[OUT]"
    assert lines[1] == "  L29 N8 LINEAR_BWD     outputs=[L29:N8:0] inputs=[L29:N9:1] saved=[L29:N7] grads=[ffn_down.weight]"
    assert lines[6] == "  L29 N3 ADD_BWD        outputs=[L29:N3:0,L29:N3:1] inputs=[L29:N4:0,L29:N9:0]"


def test_an_op_without_a_rule_and_a_quantized_weight_are_named(tmp_path: Path) -> None:
    for shape, op in (("tiny-qwen3moe-Q8_0", "MOE_REDUCE"), ("tiny-gpt-oss-Q8_0", "sinks")):
        write_outline(shape, tmp_path / "outline.gguf")
        with pytest.raises(PlanError, match=op):
            training_graph(Model.open(tmp_path / "outline.gguf").graph(2, 2, head="all"))
    write_outline("tiny-llama-Q8_0", tmp_path / "outline.gguf")
    with pytest.raises(PlanError, match="a quantized weight cannot be trained"):
        training_graph(Model.open(tmp_path / "outline.gguf").graph(2, 2, head="all"), f32=False)


# -- the twin


@pytest.mark.parametrize("arch", [*ARCHES, "llama, softcapped"])
def test_gradients_are_the_slopes_of_the_loss(arch: str, tmp_path: Path) -> None:
    """Along a random direction through all weights at once, for two architectures along each kind of weight: central differences."""
    path = tiny(arch.partition(",")[0], tmp_path)
    twin = trainer(changed(path, metadata={"final_logit_softcapping": 2.0}) if "softcapped" in arch else path)
    tokens, targets = texts()
    twin.gradients(tokens, targets)
    rng = np.random.default_rng(5)
    kept = {t.name: twin.steps.read(t) for t in twin.training.trained}
    slopes = {t.name: twin.steps.read(gradient(t)) for t in twin.training.trained}
    kinds = {name.split(".")[-2] for name in kept} if arch in ("gemma3", "gpt2") else set()
    for kind in (None, *sorted(kinds)):
        direction = {name: rng.standard_normal(w.shape) for name, w in kept.items() if kind in (None, name.split(".")[-2])}
        found = []
        for step in (1e-6, -1e-6):
            for t in twin.training.trained:
                twin.steps.write(t, kept[t.name] + step * direction.get(t.name, 0.0))
            found.append(twin.loss(tokens, targets))
        slope = (found[0] - found[1]) / 2e-6
        wanted = sum(float(np.sum(slopes[name] * d)) for name, d in direction.items())
        assert slope == pytest.approx(wanted, rel=1e-5, abs=1e-6), kind


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_checkpoints_and_cuts_of_a_batch_change_no_gradient(arch: str, tmp_path: Path) -> None:
    path = tiny(arch, tmp_path)
    tokens, targets = texts(4)
    whole = trainer(path, batch=4)
    loss = whole.gradients(tokens, targets)
    again = trainer(path, batch=4, checkpoint=True)
    assert again.gradients(tokens, targets) == loss
    parts = trainer(path, batch=2)
    assert parts.gradients(tokens, targets) == pytest.approx(loss, rel=1e-12)
    for name, wanted in whole.grads().items():
        assert np.array_equal(again.grad(name), wanted), name
        assert nmse(parts.grad(name), wanted) <= 1e-12 or np.abs(wanted).max() < 1e-12, name
    assert len(again.training.backward.nodes) > len(whole.training.backward.nodes)


def test_what_cannot_be_trained_on_is_named(tmp_path: Path) -> None:
    twin = trainer(tiny("llama", tmp_path))
    for tokens, targets, text in (
        (np.zeros((2, 5)), None, r"tokens \[2, 5\]: expected \[k \* 2, 12\]"),
        (np.zeros((3, CTX)), None, r"tokens \[3, 12\]"),
        (np.full((2, CTX), 400), None, "outside the vocabulary of 331"),
        (np.zeros((2, CTX)), np.full((2, CTX), -1), "no target counts"),
        (np.zeros((2, CTX)), np.zeros((2, 4)), r"targets \[2, 4\]"),
    ):
        with pytest.raises(TrainError, match=text):
            twin.step(tokens, targets)
    with pytest.raises(TrainError, match="optimizer 'rmsprop': expected one of sgd, adamw"):
        Settings("rmsprop")  # type: ignore[arg-type]
    with pytest.raises(TrainError, match="no trained weight is called nothing"):
        twin.grad("nothing")


# -- the device


@pytest.mark.vulkan
@pytest.mark.parametrize(("arch", "optimizer", "rank"), [("llama", "sgd", 0), ("gpt2", "adamw", 0), ("qwen3", "adamw", 4)])
def test_a_step_on_the_device_is_the_twins(arch: str, optimizer: str, rank: int, tmp_path: Path, device: Device) -> None:
    as_the_twin(tiny(arch, tmp_path), device, optimizer, rank)


class Tuned:
    """In place of Tuning in vkback/train/steps.py: these parameters whatever the tables say, or only where a product is as narrow."""

    def __init__(self, params: dict[str, Any], narrow: int = 0) -> None:
        self.params, self.narrow = params, narrow

    def for_device(self, caps: Capabilities) -> Tuned:
        self.plain = Tuning.for_device(caps)
        self.tuned = Overrides.everywhere(self.plain, self.params, "test")
        return self

    def pick(self, family: str, **query: Any) -> Choice:
        return (self.plain if self.narrow and query.get("n", 0) > self.narrow else self.tuned).pick(family, **query)


@pytest.mark.vulkan
def test_a_step_waits_as_long_as_the_device_s_queue_does(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}
    wait = Queue.wait

    def noting(self: Queue, value: int, timeout_s: float, label: str, spin_s: float = 0.0) -> None:
        limits[label] = timeout_s
        wait(self, value, timeout_s, label, spin_s)

    monkeypatch.setattr(Queue, "wait", noting)
    with trainer(tiny("llama", tmp_path), device, optimizer="sgd") as on_device:
        on_device.step(*texts())
    assert {"gradients", "optimizer"} <= limits.keys()
    assert set(limits.values()) == {CPU_WAIT_S if device.caps.software else WAIT_S}


@pytest.mark.vulkan
def test_adapters_by_kernels_of_low_rank_are_the_twins(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums fused into their products, as on GPUs."""
    monkeypatch.setattr("vkback.train.steps.Tuning", Tuned({"tiles": "shared"}, narrow=3))
    path = tiny("llama", tmp_path)
    as_the_twin(path, device, "adamw", 3)
    with trainer(path, device, rank=3, act="f32") as ours:
        dispatches = [d for schedule in cast("DeviceSteps", ours.steps).schedules.values() for d in schedule.dispatches()]
    found = {d.kernel.source for d in dispatches if "low_rank" in d.kernel.source}
    assert found == {f"gemm_f32/low_rank_{name}.comp" for name in ("down", "up", "outer")}
    assert {d.op for d in dispatches if d.kernel.source == "gemm_f32/low_rank_up.comp"} == {"LINEAR", "MUL_MAT_BACK"}, "sums are fused"


@pytest.mark.vulkan
def test_matrices_train_nearly_as_f32(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """f16 rounds operands by 2^-12 in the mean square, 1e-7 of a product's energy; some twenty products lie between a weight and the loss
    and back, and attention adds to that: 1e-5 of a gradient's energy, and ten times that for few values."""
    if matrix_shape(device.caps) is None:
        pytest.skip(f"{device.caps.name} has no cooperative matrices")
    monkeypatch.setattr("vkback.train.steps.Tuning", Tuned({**MATRICES, "tiles": "shared"}))
    path, (tokens, targets) = tiny("llama", tmp_path), texts()
    found = {}
    for act in ("f32", "f16"):
        with trainer(path, device, rank=4, act=act) as ours:
            kernels = {d.kernel.source for d in cast("DeviceSteps", ours.steps).schedules["gradients"].dispatches()}
            assert ("gemm/coop_mat.comp" in kernels) == (act == "f16")
            found[act] = ours.gradients(tokens, targets), ours.grads()
            if act == "f16":
                ours.set_weight("blk.0.ffn_down.weight.lora_b", np.full(ours.weight("blk.0.ffn_down.weight.lora_b").shape, np.inf))
                with pytest.raises(F16RangeError, match="infinite or no numbers"):
                    ours.gradients(tokens, targets)
    assert found["f16"][0] == pytest.approx(found["f32"][0], rel=1e-3)
    both = [np.concatenate([g.ravel() for g in grads.values()]) for _, grads in found.values()]
    assert nmse(both[1], both[0]) <= 1e-4


def as_the_twin(path: Path, device: Device, optimizer: str, rank: int) -> None:
    """Two steps of two batches each, with and without checkpoints: losses, gradients and weights."""
    twin = trainer(path, optimizer=optimizer, rank=rank, max_norm=0.5)
    results = []
    for checkpoint in (False, True):
        with trainer(path, device, optimizer=optimizer, rank=rank, max_norm=0.5, checkpoint=checkpoint, act="f32") as ours:
            losses: list[float] = []
            gradients: dict[str, Any] = {}
            for seed in (1, 2):
                losses.append(ours.step(*texts(4, seed)))
                gradients = gradients or ours.grads()
            results.append((losses, gradients, ours.weights()))
    (losses, gradients, weights), again = results
    assert losses == again[0]
    assert all(np.array_equal(weights[name], again[2][name]) for name in weights), "recomputed layers have the same bits"
    wanted = [twin.gradients(*texts(4, 1))]
    expected = twin.grads()
    twin.update()
    wanted.append(twin.step(*texts(4, 2)))
    assert losses == pytest.approx(wanted, rel=1e-6)
    length = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()))
    for name, want in expected.items():
        error = np.linalg.norm(gradients[name].astype(np.float64) - want)
        assert error <= np.sqrt(parity.GRADIENT_BAND) * np.linalg.norm(want) or error <= parity.NOISE * length, name
        if np.linalg.norm(want) > parity.NOISE * length:  # AdamW turns the rounding of a zero gradient into steps
            assert np.abs(weights[name] - twin.weight(name)).max() <= (1e-6 if optimizer == "sgd" else 1e-3), name


# -- PyTorch


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'vkback[references]'")
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize(("optimizer", "rank"), [("sgd", 0), ("adamw", 4)])
def test_the_twin_trains_as_torch_does(arch: str, optimizer: Any, rank: int, tmp_path: Path) -> None:
    from vkback.train.torch_reference import TorchModel, TorchTrainer

    path = tiny(arch, tmp_path)
    ours = trainer(path, optimizer=optimizer, lr=1e-4, rank=rank)
    lora = ours.lora
    model = TorchModel(path, ours.weights() if lora else None, lora.alpha / rank if lora else 1.0)
    found = list(parity.run(ours, TorchTrainer(model, optimizer, 1e-4), [texts(BATCH, seed) for seed in range(3)]))
    steps = [f for f in found if isinstance(f, parity.Step)]
    weights = [f for f in found if isinstance(f, parity.Weight)]
    assert len(steps) == 3 and len(weights) == len(ours.training.trained)
    assert parity.Report(steps, weights).first_outside is None


def test_a_difference_beyond_its_band_is_the_first_that_is_named() -> None:
    right, wrong = parity.Difference(1e-9, 1e-9, 1.0), parity.Difference(1e-2, 1e-3, 1.0)
    steps = [parity.Step(0, 10.0, 10.0)]

    def first(*weights: parity.Weight) -> str | None:
        return parity.Report(steps, list(weights)).first_outside

    good = parity.Weight("a", right, right, 1.0, "sgd", 1)
    assert first(good) is None
    assert (first(good, parity.Weight("b", wrong, right, 1.0, "sgd", 1)) or "").startswith("the gradient of b: NMSE 1.000e-06")
    assert (first(good, parity.Weight("c", right, wrong, 1.0, "sgd", 1)) or "").startswith("c after 1 steps: max_diff 1.000e-02")
    assert (parity.Report([parity.Step(0, 10.0, 10.1)], [good]).first_outside or "").startswith("the loss of step 0")
    zero = parity.Weight("d", parity.Difference(1e-9, 1e-9, 1e-9), wrong, 1.0, "adamw", 1)
    assert zero.is_zero and first(zero) is None


# -- the command


def test_train_parity_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for given, text in (
        ([], "PyTorch is not installed here; pip install 'vkback"),
        (["--against", "jax"], "--against jax: expected one of torch"),
        (["--optimizer", "rmsprop"], "--optimizer rmsprop: expected one of sgd, adamw"),
    ):
        result = CliRunner().invoke(app, ["train-parity", *given])
        assert isinstance(result.exception, UsageError) and text in str(result.exception)
