"""Fine-tuning of adapters on a text: batches, learning rate, evaluation, and a state that a later run continues bit for bit.

The text's tokens are cut into windows of `ctx` tokens, some of which, evenly spread, are held back for evaluation. An epoch takes the
others in a random order that follows from seed and epoch alone, so a run that was cut off goes on with the same batches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.arrays import read_arrays
from vkback.device import Device
from vkback.events import Report
from vkback.gguf.fingerprint import fingerprint
from vkback.models.adapter import write_adapter
from vkback.models.registry import Model
from vkback.paths import new_file_or
from vkback.train.steps import TrainingAct
from vkback.train.trainer import Settings, StepTrainer, TrainError, lora_of

Windows = npt.NDArray[np.int32]

VERSION = 1
"""Of state files."""


@dataclass(frozen=True)
class Plan:
    """All that a run's losses depend on, beside model, text and device.

    rank, alpha, targets  of the adapters (`lora_of`)
    ctx, batch            tokens of a window, windows that go through the model at once
    accumulate            batches whose gradients are added up for a step
    steps                 of the optimizer
    lr, warmup            the learning rate rises to lr in the first `warmup` steps, then falls as a cosine to `lr_end` of it
    held_back             part of the windows that is not trained on
    eval_every            steps between evaluations; 0: only before the first and after the last
    checkpoint            recompute layers in the backward pass
    act                   how products with the stored weights are made (`StepTrainer`)
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    ctx: int = 128
    batch: int = 4
    accumulate: int = 1
    steps: int = 100
    lr: float = 1e-3
    warmup: int = 10
    lr_end: float = 0.1
    weight_decay: float = 0.0
    max_norm: float = 1.0
    held_back: float = 0.1
    eval_every: int = 10
    checkpoint: bool = False
    act: TrainingAct = "f16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "ctx", "batch", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise TrainError(f"[finetune] {name} is {getattr(self, name)}, expected at least 1")
        if not 0 < self.alpha < math.inf:
            raise TrainError(f"[finetune] alpha is {self.alpha}, expected a number above 0")
        for name in ("lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TrainError(f"[finetune] {name} is {getattr(self, name)}, expected a number of 0 or more")
        if not 0 < self.held_back < 1:
            raise TrainError(f"[finetune] held back: {self.held_back}, expected a part of the text between 0 and 1")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.lr_end + (1.0 - self.lr_end) * 0.5 * (1.0 + math.cos(math.pi * done)))


@dataclass
class Record:
    """What a run has done so far: the loss of each step, and (steps done, held-back loss) of each evaluation."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[int, float]:
        """The evaluation with the lowest loss of those after the first step; before there is one, the one before it."""
        return min(self.evaluations[1:] or self.evaluations, key=lambda found: found[1])

    @property
    def gain(self) -> float:
        """By what part the held-back loss fell to `best`; below 0 where no evaluation was below the first."""
        return 1.0 - self.best[1] / self.evaluations[0][1]


def windows(ids: Sequence[int], plan: Plan) -> tuple[Windows, Windows]:
    """Windows [n, ctx + 1] to train on, and those held back: tokens with the one behind. Raises TrainError for a text that is too short."""
    found = (len(ids) - 1) // plan.ctx
    held = max(1, round(found * plan.held_back))
    if found - held < 1:
        raise TrainError(
            f"[finetune] the text has {len(ids)} tokens, two windows of {plan.ctx} take {2 * plan.ctx + 1}: give more, or a smaller --ctx"
        )
    cut = np.stack([np.asarray(ids[i * plan.ctx : (i + 1) * plan.ctx + 1], np.int32) for i in range(found)])
    held_out = np.zeros(found, bool)
    held_out[[(2 * i + 1) * found // (2 * held) for i in range(held)]] = True
    return cut[~held_out], cut[held_out]


class FineTune:
    """One run. `run` goes on from where the state file, if one was given to `resume`, left it."""

    def __init__(self, model: Model, device: Device | None, ids: Sequence[int], plan: Plan, *, progress: Report | None = None) -> None:
        """device: None for the numpy twin."""
        trained_on = model.hp.n_ctx_train
        if plan.ctx > trained_on:
            raise TrainError(f"[finetune] windows of {plan.ctx} tokens: the model's context is {trained_on}; give a smaller --ctx")
        self.plan, self.model = plan, model
        self.record = Record()
        self.train, self.held = windows(ids, plan)
        self.lora = lora_of(model, plan.rank, plan.alpha, plan.targets)
        settings = Settings("adamw", plan.lr, weight_decay=plan.weight_decay, max_norm=plan.max_norm)
        self.trainer = StepTrainer(
            model,
            device,
            ctx=plan.ctx,
            batch=plan.batch,
            settings=settings,
            lora=self.lora,
            checkpoint=plan.checkpoint,
            act=plan.act,
            seed=plan.seed,
            progress=progress,
        )
        self._about = {
            "version": VERSION,
            "model": fingerprint(model.file),
            "text": hash_of(ids),
            "plan": json.loads(json.dumps(asdict(plan))),
        }

    @property
    def parameters(self) -> int:
        """Values that are trained."""
        return sum(t.elements for t in self.trainer.training.trained)

    def batch_at(self, step: int) -> Windows:
        """Windows [accumulate * batch, ctx + 1] of a step: the next in the order of the epoch, and then of the one after."""
        count = self.plan.batch * self.plan.accumulate
        places = range(step * count, (step + 1) * count)
        orders: dict[int, npt.NDArray[np.int64]] = {}
        chosen = []
        for place in places:
            epoch, at = divmod(place, len(self.train))
            if epoch not in orders:
                orders[epoch] = np.random.default_rng([self.plan.seed, epoch]).permutation(len(self.train))
            chosen.append(self.train[orders[epoch][at]])
        return np.stack(chosen)

    def evaluate(self) -> float:
        """Mean loss of the windows that are held back."""
        batch, found = self.plan.batch, self.held
        missing = -len(found) % batch
        tokens = np.concatenate([found[:, :-1], np.zeros((missing, self.plan.ctx), np.int32)])
        targets = np.concatenate([found[:, 1:], np.full((missing, self.plan.ctx), -1, np.int32)])
        return self.trainer.loss(tokens, targets)

    def run(
        self,
        *,
        on_step: Callable[[int, float], None] | None = None,
        on_evaluation: Callable[[int, float], None] | None = None,
        save_every: int = 0,
        save: Callable[[], None] | None = None,
    ) -> Record:
        """The steps that are left. save: called after every `save_every` steps, and at the end."""
        plan, record = self.plan, self.record

        def evaluate(step: int) -> None:
            loss = self.evaluate()
            if not math.isfinite(loss):
                cure = f"lower the learning rate ({plan.lr:g}) or --max-norm" if step else "`vkback doctor -m MODEL` looks for the cause"
                raise TrainError(f"[finetune] the held-back loss after step {step} is {loss}: {cure}")
            record.evaluations.append((step, loss))
            if on_evaluation is not None:
                on_evaluation(*record.evaluations[-1])

        if not record.evaluations:
            evaluate(0)
        for step in range(self.trainer.t, plan.steps):
            given = self.batch_at(step)
            loss = self.trainer.gradients(given[:, :-1], given[:, 1:])
            if not math.isfinite(loss):
                raise TrainError(f"[finetune] the loss of step {step} is {loss}: lower the learning rate ({plan.lr:g}) or --max-norm")
            self.trainer.update(plan.lr_at(step))
            record.losses.append(loss)
            if on_step is not None:
                on_step(step + 1, loss)
            last = step + 1 == plan.steps
            if last or (plan.eval_every and (step + 1) % plan.eval_every == 0):
                evaluate(step + 1)
            if save is not None and (last or (save_every and (step + 1) % save_every == 0)):
                save()
        return record

    # -- files

    def write(self, out: Path) -> None:
        """The adapters as they are, as a file that `vkback run --lora` and llama.cpp load."""
        write_adapter(out, self.model.file.arch, out.stem, self.plan.alpha, self.trainer.weights())

    def save(self, path: Path) -> None:
        """Everything that a later run needs to go on, whole or not at all."""
        about = self._about | {"t": self.trainer.t, "losses": self.record.losses, "evaluations": self.record.evaluations}
        with new_file_or(TrainError, f"[finetune] {path}: the state", path, durable=True) as part, part.open("wb") as f:
            np.savez(f, about=np.array(json.dumps(about)), **self.trainer.state())  # type: ignore[arg-type]

    def resume(self, path: Path) -> None:
        """Go on from a state that `save` wrote. Raises TrainError where it is of another model, text or plan."""
        try:
            values: dict[str, Any] = read_arrays(path)
            about = dict(json.loads(str(values.pop("about"))))
        except (ValueError, KeyError, TypeError) as e:
            raise TrainError(f"[finetune] {path}: no state of a run that can be read ({e}); begin anew without --resume") from e
        for key, what in (("version", "version of vkback"), ("model", "model"), ("text", "text")):
            if about.get(key) != self._about[key]:
                raise TrainError(f"[finetune] {path} is of a run with another {what}; begin anew without --resume")
        wanted = self._about["plan"]
        other = [name for name in wanted if about["plan"].get(name) != wanted[name]]
        if other:
            was = ", ".join(f"{name} {about['plan'].get(name)}" for name in other)
            raise TrainError(f"[finetune] {path} is of a run with {was}; give the same settings, or begin anew without --resume")
        self.trainer.set_state(values, about["t"])
        self.record = Record(list(about["losses"]), [(int(at), float(loss)) for at, loss in about["evaluations"]])

    def close(self) -> None:
        """Give memory back."""
        self.trainer.close()


def hash_of(ids: Sequence[int]) -> str:
    """Of token ids."""
    return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()
