"""A model in training: steps of stochastic gradient descent or AdamW, of all its weights or of adapters beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.events import Report
from vkback.graph import Graph, Tensor
from vkback.models.registry import Model
from vkback.plan.autodiff import gradient
from vkback.plan.passes.lora import A, Lora
from vkback.plan.training import (
    D_LOSS,
    OPTIMIZERS,
    PARAMS,
    TARGETS,
    Optimizer,
    TrainingGraph,
    moments,
    optimizer_graph,
    optimizer_params,
    training_graph,
)
from vkback.train.steps import DeviceSteps, HostSteps, Steps, TrainingAct

Floats = npt.NDArray[np.float32]
Tokens = Sequence[Sequence[int]] | npt.NDArray[Any]


class TrainError(VkbackError):
    """Tokens of another shape than the trainer was made for, or a setting that makes no sense."""


@dataclass(frozen=True)
class Settings:
    """How weights are changed; names and meaning are PyTorch's.

    max_norm  the gradient is scaled so that its norm is at most this; 0: it is not
    """

    optimizer: Optimizer = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise TrainError(f"[train] optimizer {self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
        if not (self.lr >= 0 and self.eps > 0 and self.weight_decay >= 0 and self.max_norm >= 0):
            raise TrainError(f"[train] {self}: expected no negative number, and an eps above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise TrainError(f"[train] betas {self.betas}: expected numbers from 0 to below 1")


class StepTrainer:
    """Training of one model on one device. Use as a context manager, or call `close`.

    model     an open model; without adapters all of its weights become F32 and are trained
    ctx       tokens of a text
    batch     texts that go through the model at once
    lora      adapters to train in place of the weights, which stay as they are in the file
    device    None: float64 numpy on the host, which the device is measured against
    checkpoint  what a layer made is made again for its gradients, in place of being kept: less memory, more time, the same bits
    act       products with weights as the file has them: "f16" by cooperative matrices of f16, "f32" without. Default: f16 with adapters.
              Weights in F32, and so all that is trained, are always multiplied in f32
    seed      of the adapters' first values
    Loss and gradients are those of the mean over all targets that count.
    """

    def __init__(
        self,
        model: Model,
        device: Device | None,
        *,
        ctx: int,
        batch: int = 1,
        settings: Settings | None = None,
        lora: Lora | None = None,
        checkpoint: bool = False,
        act: TrainingAct | None = None,
        seed: int = 0,
        progress: Report | None = None,
    ) -> None:
        if ctx < 1 or batch < 1:
            raise TrainError(f"[train] ctx {ctx}, batch {batch}: expected at least 1 of each")
        self.model, self.ctx, self.batch = model, ctx, batch
        self.settings = settings or Settings()
        self.lora = lora
        self.t = 0
        """Steps done."""
        built = model.graph(ctx * batch, ctx, head="all")
        self.training: TrainingGraph = training_graph(built, sequences=batch, lora=lora, checkpoint=checkpoint)
        more = training_graph(built, sequences=batch, lora=lora, checkpoint=checkpoint, accumulate=True)
        graphs: dict[str, Graph] = {
            "gradients": self.training.graph,
            "more gradients": more.graph,
            "loss": self.training.loss,
            "optimizer": optimizer_graph(self.training.trained, self.settings.optimizer, self.settings.max_norm),
        }
        chosen: TrainingAct = act or ("f16" if lora else "f32")
        self.steps: Steps = (
            HostSteps(model.file, graphs) if device is None else DeviceSteps(model.file, graphs, device, act=chosen, progress=progress)
        )
        for name, value in self._first_values(seed).items():
            self.steps.write(self._trained(name), value)

    def _first_values(self, seed: int) -> dict[str, Floats]:
        """Of adapters: A uniform in +-1 / sqrt(k), B zeros, so that the model is at first what it was."""
        rng = np.random.default_rng(seed)
        found = {}
        for t in self.training.trained if self.lora else ():
            bound = 1.0 / math.sqrt(t.shape[-1]) if t.name.endswith(A) else 0.0
            found[t.name] = rng.uniform(-bound, bound, t.shape).astype(np.float32)
        return found

    def _trained(self, name: str) -> Tensor:
        found = next((t for t in self.training.trained if t.name == name), None)
        if found is None:
            known = ", ".join(t.name for t in self.training.trained[:4])
            raise TrainError(f"[train] no trained weight is called {name}; there are {known}, ...")
        return found

    # -- steps

    def gradients(self, tokens: Tokens, targets: Tokens | None = None) -> float:
        """The loss of texts, and their gradients, which the next `update` uses.

        tokens   [k * batch, ctx]: k batches, whose gradients are added up
        targets  of the same shape, what each token should be followed by; a negative one does not count. None: the next token of each
        Raises TrainError for other shapes or ids.
        """
        fed, wanted = self._checked(tokens, targets)
        loss, counted = 0.0, int((wanted >= 0).sum())
        for i in range(0, len(fed), self.batch):
            part = wanted[i : i + self.batch]
            share = int((part >= 0).sum()) / counted
            (found,) = self.steps.run("more gradients" if i else "gradients", self._inputs(fed[i : i + self.batch], part, share))
            loss += share * float(found[0])
        return loss

    def update(self, lr: float | None = None) -> float | None:
        """Change the weights by the gradients; gives the gradient's norm where it is bounded. lr: of this step, else the settings'."""
        s = self.settings
        self.t += 1
        values = optimizer_params(s.optimizer, self.t, s.lr if lr is None else lr, s.betas, s.eps, s.weight_decay)
        found = self.steps.run("optimizer", {PARAMS: values})
        return float(found[0][0]) if found else None

    def step(self, tokens: Tokens, targets: Tokens | None = None) -> float:
        """One step; the loss is that before it. Arguments as of `gradients`."""
        loss = self.gradients(tokens, targets)
        self.update()
        return loss

    def loss(self, tokens: Tokens, targets: Tokens | None = None) -> float:
        """The loss of texts [k * batch, ctx], without gradients."""
        fed, wanted = self._checked(tokens, targets)
        total, counted = 0.0, int((wanted >= 0).sum())
        for i in range(0, len(fed), self.batch):
            part = wanted[i : i + self.batch]
            share = int((part >= 0).sum()) / counted
            (found,) = self.steps.run("loss", self._inputs(fed[i : i + self.batch], part, share))
            loss = float(found[0])
            total += share * loss if share else 0.0
        return total

    def _inputs(self, tokens: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], share: float) -> dict[str, Any]:
        return {
            "tokens": tokens.ravel(),
            "pos": np.tile(np.arange(self.ctx, dtype=np.int32), self.batch),
            TARGETS: targets.ravel(),
            D_LOSS: np.array([share], np.float32),
        }

    def _checked(self, tokens: Tokens, targets: Tokens | None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        fed = np.asarray(tokens)
        if fed.ndim == 1:
            fed = fed[None]
        if fed.ndim != 2 or fed.shape[1] != self.ctx or len(fed) == 0 or len(fed) % self.batch:
            raise TrainError(f"[train] tokens {list(fed.shape)}: expected [k * {self.batch}, {self.ctx}], texts of {self.ctx} tokens each")
        if targets is None:
            wanted = np.concatenate([fed[:, 1:], np.full((len(fed), 1), -1)], axis=1)
        else:
            wanted = np.asarray(targets).reshape(-1, self.ctx) if np.size(targets) == fed.size else np.asarray(targets)
        n_vocab = self.model.hp.n_vocab
        if wanted.shape != fed.shape:
            raise TrainError(f"[train] targets {list(wanted.shape)}: expected one for each of the tokens {list(fed.shape)}")
        if fed.min() < 0 or fed.max() >= n_vocab or wanted.max() >= n_vocab:
            raise TrainError(f"[train] a token or target is outside the vocabulary of {n_vocab}")
        if wanted.max() < 0:
            raise TrainError("[train] no target counts: expected at least one that is not negative")
        return fed.astype(np.int32), wanted.astype(np.int32)

    # -- values

    def grads(self) -> dict[str, Floats]:
        """Gradients of the last `step` or `gradients` by the weights' names, before any bound on their norm."""
        return {t.name: self._read(gradient(t)) for t in self.training.trained}

    def grad(self, name: str) -> Floats:
        """One of `grads`."""
        return self._read(gradient(self._trained(name)))

    def weights(self) -> dict[str, Floats]:
        """What is trained, by name."""
        return {t.name: self._read(t) for t in self.training.trained}

    def weight(self, name: str) -> Floats:
        """One of `weights`."""
        return self._read(self._trained(name))

    def set_weight(self, name: str, value: npt.NDArray[Any]) -> None:
        """Replace one of `weights`."""
        t = self._trained(name)
        if np.shape(value) != t.shape:
            raise TrainError(f"[train] {name}: a value of shape {list(np.shape(value))}, expected {list(t.shape)}")
        self.steps.write(t, value)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """All that later steps depend on beside the settings, with all its bits: what is trained and the optimizer's states, by name."""
        return {t.name: self.steps.read(t) for t in (*self.training.trained, *self._moments())}

    def set_state(self, values: Mapping[str, npt.NDArray[Any]], t: int) -> None:
        """Put back a `state` after t steps. Raises TrainError where something is missing."""
        for tensor in (*self.training.trained, *self._moments()):
            if tensor.name not in values or values[tensor.name].shape != tensor.shape:
                raise TrainError(f"[train] the saved state has no {tensor.name} of shape {list(tensor.shape)}: it is of another run")
            self.steps.write(tensor, values[tensor.name])
        self.t = t

    def _moments(self) -> list[Tensor]:
        return [m for t in self.training.trained for m in moments(t)] if self.settings.optimizer == "adamw" else []

    def _read(self, tensor: Tensor) -> Floats:
        return np.asarray(self.steps.read(tensor), np.float32)

    def close(self) -> None:
        """Give memory back."""
        self.steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lora_of(model: Model, rank: int, alpha: float | None = None, targets: Sequence[str] = ()) -> Lora:
    """Adapters of a model's matrices: all of its layers', or of those whose names have one of `targets` as a part (attn_q, ffn_down).

    alpha  default: 2 * rank. Raises TrainError for a target that no matrix has.
    """
    if rank < 1:
        raise TrainError(f"[train] rank {rank}: expected at least 1")
    products = [node.inputs[0] for node in model.graph(1, 1, head="all").nodes if node.op == "MUL_MAT"]
    layers = [w.name for w in products if w.name.startswith("blk.") and w.name in model.file.tensors]
    # A part of a tensor that holds several weights has no name of its own in the file, which an adapter file could speak of.
    whole = [name for name in layers if model.file.is_whole(name)]
    found = [name for name in whole if not targets or set(targets) & set(name.split("."))]
    unknown = sorted(set(targets) - {part for name in found for part in name.split(".")})
    if unknown or not found:
        known = ", ".join(dict.fromkeys(name.split(".")[2] for name in whole))
        raise TrainError(f"[train] no matrix of a layer is called {' or '.join(unknown)}; there are {known}")
    return Lora(dict.fromkeys(found, rank), 2.0 * rank if alpha is None else alpha)


__all__ = ["Settings", "StepTrainer", "TrainError", "lora_of"]
