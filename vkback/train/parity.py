"""Training on a device beside PyTorch: losses, gradients and updated weights, each within a band or named."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.train.trainer import StepTrainer

LOSS_BAND = 1e-6
"""Relative, of the first step: a mean of logarithms of f32 sums, each good to some 2^-24."""

LATER_LOSS_BAND = 1e-5
"""Relative, of later steps: weights differ by then in their last bits."""

GRADIENT_BAND = 1e-9
"""NMSE: f32 products and sums through all layers, in another order than PyTorch's. 3e-5 of a gradient's length."""

NOISE = 2.0**-24
"""What f32 leaves of a gradient that is zero, as a part of the length of all gradients together: such a gradient has no NMSE."""

SGD_BAND = 1e-7
"""Largest difference of an updated weight after a step of SGD: one unit in the last place of a weight from 0.5 to 1 is 6e-8."""

ADAMW_BAND = 1e-7
"""NMSE of a weight after steps of AdamW. A value whose gradient is near nothing may go the other way by the learning rate each step, since
AdamW divides a gradient by its own size; those are few."""


class ParityError(VkbackError):
    """The two trainers train different things."""


class Trains(Protocol):
    """What is compared with: TorchTrainer (vkback/train/torch_reference.py)."""

    def step(self, tokens: Any, targets: Any) -> float: ...
    def grads(self) -> dict[str, Any]: ...
    def weights(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from the reference's: the largest difference, and the error's energy over the reference's (0 where both are 0).

    error, size  lengths of the error and of the reference, as vectors
    """

    max_diff: float
    error: float
    size: float

    @property
    def nmse(self) -> float:
        return 0.0 if self.error == 0 else (self.error / self.size) ** 2 if self.size else math.inf


def difference(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> Difference:
    """Of two tensors of one shape; sums in float64."""
    delta = got.astype(np.float64) - want
    size = np.linalg.norm(np.asarray(want, np.float64).ravel())
    return Difference(float(np.abs(delta).max()), float(np.linalg.norm(delta.ravel())), float(size))


@dataclass(frozen=True)
class Step:
    """Losses of one step, before its update."""

    number: int
    ours: float
    theirs: float

    @property
    def relative(self) -> float:
        return abs(self.ours - self.theirs) / abs(self.theirs)

    @property
    def fits(self) -> bool:
        return self.relative <= (LATER_LOSS_BAND if self.number else LOSS_BAND)


@dataclass(frozen=True)
class Weight:
    """One weight: its gradient at the first step and itself after the last.

    length  of all gradients of the first step together
    """

    name: str
    gradient: Difference
    updated: Difference
    length: float
    optimizer: str
    steps: int

    @property
    def is_zero(self) -> bool:
        """Whether the gradient is zero but for rounding (as of a bias of keys without RoPE, which no softmax sees)."""
        return self.gradient.size <= NOISE * self.length

    @property
    def gradient_fits(self) -> bool:
        return self.gradient.nmse <= GRADIENT_BAND or (self.is_zero and self.gradient.error <= NOISE * self.length)

    @property
    def weight_fits(self) -> bool:
        if self.optimizer == "sgd":
            return self.updated.max_diff <= SGD_BAND * self.steps
        return self.is_zero or self.updated.nmse <= ADAMW_BAND


@dataclass(frozen=True)
class Report:
    """steps in order; weights in the order of the layers."""

    steps: list[Step]
    weights: list[Weight]

    @property
    def first_outside(self) -> str | None:
        """What leaves its band first: a loss, then a gradient or weight in the order of the layers. None: nothing."""
        for s in self.steps:
            if not s.fits:
                return f"the loss of step {s.number}: {s.ours:.9g}, torch {s.theirs:.9g}"
        for w in self.weights:
            if not w.gradient_fits:
                return f"the gradient of {w.name}: NMSE {w.gradient.nmse:.3e}, at most {GRADIENT_BAND:g}"
            if not w.weight_fits:
                return f"{w.name} after {w.steps} steps: max_diff {w.updated.max_diff:.3e}, NMSE {w.updated.nmse:.3e}"
        return None


def batches(n_vocab: int, ctx: int, batch: int, steps: int, seed: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Tokens and targets [batch, ctx] of each step: random ids, every target the token behind."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = rng.integers(0, n_vocab, (batch, ctx + 1))
        yield ids[:, :-1], ids[:, 1:]


def run(ours: StepTrainer, theirs: Trains, data: Iterable[tuple[Any, Any]]) -> Iterator[Step | Weight]:
    """Train both with the same batches: a Step after each, then the Weights. Raises ParityError where they train different weights."""
    gradients: dict[str, Difference] = {}
    steps = 0
    for tokens, targets in data:
        mine = ours.gradients(tokens, targets)
        yield Step(steps, mine, theirs.step(tokens, targets))
        if steps == 0:
            wanted = theirs.grads()
            names = {t.name for t in ours.training.trained}
            if names != set(wanted):
                raise ParityError(f"[parity] only one of the two trains {', '.join(sorted(names ^ set(wanted))[:3])}")
            gradients = {name: difference(ours.grad(name), wanted[name]) for name in _by_layer(names)}
        ours.update()
        steps += 1
    length = math.sqrt(sum(d.size**2 for d in gradients.values()))
    after = theirs.weights()
    for name, found in gradients.items():
        yield Weight(name, found, difference(ours.weight(name), after[name]), length, ours.settings.optimizer, steps)


def _by_layer(names: Iterable[str]) -> list[str]:
    """Embeddings first, then the layers, then the rest."""

    def place(name: str) -> tuple[int, int, str]:
        if name.startswith("blk."):
            return 1, int(name.split(".")[1]), name
        return (0 if "embd" in name else 2), 0, name

    return sorted(names, key=place)


def fingerprint(trainer: StepTrainer) -> str:
    """A hash of the bits of all that is trained."""
    found = hashlib.sha256()
    for t in trainer.training.trained:
        found.update(trainer.weight(t.name).tobytes())
    return found.hexdigest()
