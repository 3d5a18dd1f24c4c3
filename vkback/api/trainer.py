"""Training from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vkback.api import given
from vkback.api.device import Device as ApiDevice
from vkback.api.model import LoadedModel, path_of, reported
from vkback.device import Device
from vkback.events import Report
from vkback.models.adapter import write_adapter
from vkback.models.registry import Model
from vkback.plan.training import Optimizer
from vkback.train.steps import TrainingAct
from vkback.train.trainer import Settings, StepTrainer, TrainError, lora_of

TRAINING_ACTS: tuple[TrainingAct, ...] = ("f16", "f32")


class Trainer(StepTrainer):
    """Trains a model on a device: all of its weights, as F32, or low-rank adapters (LoRA) beside weights that stay as they are.

        with vkback.Trainer("model.gguf", ctx=128, batch=4, lr=1e-3) as trainer:
            loss = trainer.step(tokens, targets)       # [4, 128] each; without targets, the next tokens
            gradient = trainer.grads()["blk.0.attn_q.weight"]

    `StepTrainer` (vkback/train/trainer.py) has the methods: step, gradients, update, loss, grads, weights, set_weight.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "demo-dense",
        *,
        ctx: int = 128,
        batch: int = 1,
        optimizer: Optimizer = "adamw",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float = 0.0,
        rank: int = 0,
        alpha: float | None = None,
        targets: Sequence[str] = (),
        checkpoint: bool = False,
        act: TrainingAct | None = None,
        seed: int = 0,
        device: ApiDevice | str | int | None = None,
        progress: bool | Report = False,
    ) -> None:
        """model: a GGUF file, a built-in model's name, or a loaded model, whose file and device are taken and whose memory is its own.

        ctx, batch  tokens of a text, and texts that go through the model at once
        optimizer   "adamw" or "sgd"; its numbers are PyTorch's; max_norm bounds the gradient's norm, 0: not
        rank        of adapters to train in place of the weights, 0: the weights; alpha (default 2 rank) and targets as of `vkback finetune`
        checkpoint  less memory, more time: what a layer made is made again for its gradients
        act         products with weights as the file has them: "f16" (default with adapters) or "f32", as --act of `vkback finetune`
        seed        of the adapters' first values
        Raises VkbackError for a broken file, an op without a backward rule, no device, or too little memory.
        """
        for name, value in (("ctx", ctx), ("batch", batch)):
            given.whole(name, value, "a whole number, 1 or more", 1, "train")
        for name, value in (("rank", rank), ("seed", seed)):
            given.whole(name, value, "a whole number, 0 or more", 0, "train")
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm, **({} if alpha is None else {"alpha": alpha})}
        for name, number in numbers.items():
            given.number(name, number, "a number", who="train")
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise given.wrong("betas", betas, "two numbers from 0 to below 1", "train")
        for number in betas:
            given.number("betas", number, "two numbers from 0 to below 1", who="train")
        act = None if act is None else given.choice("act", act, TRAINING_ACTS, "train")
        given.flag("checkpoint", checkpoint, "train")
        report = reported(progress, "train")
        if isinstance(targets, str):
            raise given.wrong("targets", targets, "a list of names", "train")
        if isinstance(model, LoadedModel):
            opened: Model = Model.open(model.engine.model.file.path)
            where = model.engine.device if device is None else device
        else:
            opened, where = Model.open(path_of(model)), device  # type: ignore[assignment]
        theirs = where.raw if isinstance(where, ApiDevice) else given.device("device", where, "train")
        found = theirs if isinstance(theirs, Device) else Device.open(theirs)
        self._own = found if found is not theirs else None
        settings = Settings(optimizer, lr, betas, eps, weight_decay, max_norm)
        try:
            lora = lora_of(opened, rank, alpha, targets) if rank else None
            super().__init__(
                opened,
                found,
                ctx=ctx,
                batch=batch,
                settings=settings,
                lora=lora,
                checkpoint=checkpoint,
                act=act,
                seed=seed,
                progress=report,
            )
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters as a file that `vkback.load(model, lora=...)` and llama.cpp load. Raises TrainError where there are none."""
        if self.lora is None:
            raise TrainError("[train] the weights themselves are trained, there are no adapters; make the trainer with rank=8, say")
        out = Path(path)
        write_adapter(out, self.model.file.arch, out.stem, self.lora.alpha, self.weights())

    def close(self) -> None:
        """Give everything back to the device."""
        super().close()
        if self._own is not None:
            self._own.close()
            self._own = None
