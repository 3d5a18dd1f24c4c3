"""vkback train-parity: a training step on a device beside PyTorch's, weight by weight."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from vkback.cli.shell import DeviceOption, ModelOption, UsageError, bars, model_path, one_of

AGAINST = ("torch",)
OPTIMIZERS = ("sgd", "adamw")


def train_parity(
    model: ModelOption = None,
    against: Annotated[str, typer.Option("--against", help="What to compare with: torch (pip install 'vkback[references]').")] = "torch",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the optimizer.")] = 1,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Learning rate.")] = 1e-4,
    ctx: Annotated[int, typer.Option("-c", "--ctx", min=1, help="Tokens of a text.")] = 2,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Texts of a step.")] = 1,
    optimizer: Annotated[str, typer.Option("--optimizer", help=", ".join(OPTIMIZERS))] = "sgd",
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0, help="Of the optimizer.")] = 0.0,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Train adapters (LoRA) of this rank beside the weights; 0: the weights.")] = 0,
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, help="Of the random tokens.")] = 0,
    ir: Annotated[bool, typer.Option("--ir/--no-ir", help="Print the forward and backward IR.")] = True,
    rerun: Annotated[bool, typer.Option("--rerun", help="Train twice, and say whether all bits are equal.")] = False,
    twin: Annotated[bool, typer.Option("--twin", help="In place of a device the numpy twin, in float64.")] = False,
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Losses and weights as JSON, without the IR.")] = False,
) -> None:
    """Train a model on a device and in PyTorch with the same random tokens. Prints both IRs, both losses of each step, then of every weight
    the largest difference and NMSE of its gradient (first step) and of itself (after the last), and what leaves its band first. Weights
    that are quantized are decoded to F32 on both sides. Exit code 1 where something is outside its band."""
    one_of(against, AGAINST, "--against")
    one_of(optimizer, OPTIMIZERS, "--optimizer")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("--against torch: PyTorch is not installed here; pip install 'vkback[references]', the CPU build is enough")
    from vkback.device import Device
    from vkback.models.registry import Model
    from vkback.report import graph_ir
    from vkback.train import parity
    from vkback.train.torch_reference import TorchModel, TorchTrainer
    from vkback.train.trainer import Settings, StepTrainer, lora_of

    path = model_path(model)
    opened = Model.open(path)
    settings = Settings(optimizer=optimizer, lr=lr, weight_decay=weight_decay)  # type: ignore[arg-type]
    lora = lora_of(opened, rank) if rank else None
    data = list(parity.batches(opened.hp.n_vocab, ctx, batch, steps, seed))
    found_steps: list[parity.Step] = []
    weights: list[parity.Weight] = []
    say = (lambda *_: None) if as_json else print
    with ExitStack() as stack:
        where = None if twin else stack.enter_context(Device.open(device))
        if where is not None:
            say(where.summary_line())

        def trainer() -> StepTrainer:
            return StepTrainer(opened, where, ctx=ctx, batch=batch, settings=settings, lora=lora, act="f32", progress=bars())

        with trainer() as ours:
            if ir:
                forward = graph_ir.forward(opened.hp, ours.training.forward, ctx)
                say("\n".join([*forward, "", *graph_ir.backward(opened.hp, ours.training, ctx), ""]))
            theirs = TorchTrainer(
                TorchModel(path, ours.weights() if lora else None, lora.alpha / rank if lora else 1.0),
                optimizer,
                lr,
                weight_decay=weight_decay,
            )
            begun = time.perf_counter()
            for found in parity.run(ours, theirs, data):
                if isinstance(found, parity.Step):
                    found_steps.append(found)
                    say(_step_line(found))
                    continue
                if not weights:
                    say(f"vkback loss: {found_steps[-1].ours:.7f} | Torch loss: {found_steps[-1].theirs:.7f}")
                weights.append(found)
                say(_weight_line(found))
            seconds = time.perf_counter() - begun
            bits = parity.fingerprint(ours) if rerun else ""
        equal = None
        if rerun:
            with trainer() as again:
                redone = [again.step(*each) for each in data]
                equal = redone == [s.ours for s in found_steps] and parity.fingerprint(again) == bits
    outside = parity.Report(found_steps, weights).first_outside
    if as_json:
        print(json.dumps(_as_data(found_steps, weights, outside, equal), indent=1))
    say(f"{len(weights)} weights, {len(found_steps)} steps in {seconds:.1f} s, PyTorch's included")
    say("all within their bands" if outside is None else f"first outside its band: {outside}")
    if equal is not None:
        say("a second run: all losses and weights are equal bit for bit" if equal else "a second run differs in its bits")
    if outside is not None or equal is False:
        raise typer.Exit(1)


def _mark(fits: bool) -> str:
    return "" if fits else "  outside"


def _step_line(s: Any) -> str:
    return f"step {s.number} loss={s.ours:.7f} torch={s.theirs:.7f} relative={s.relative:.2e}{_mark(s.fits)}"


def _weight_line(w: Any) -> str:
    zero = "  (a zero gradient: rounding alone)" if w.is_zero and w.gradient.nmse > 1e-9 else ""
    return (
        f"{w.name:28} max_diff={w.updated.max_diff:.3e} nmse={w.updated.nmse:.1e} "
        f"grad: max_diff={w.gradient.max_diff:.3e} nmse={w.gradient.nmse:.1e}{zero}{_mark(w.gradient_fits and w.weight_fits)}"
    )


def _as_data(steps: list[Any], weights: list[Any], outside: str | None, equal: bool | None) -> dict[str, Any]:
    def figures(d: Any) -> dict[str, float | None]:
        return {"max_diff": d.max_diff, "nmse": d.nmse if math.isfinite(d.nmse) else None}

    return {
        "steps": [{"step": s.number, "loss": s.ours, "torch": s.theirs, "relative": s.relative} for s in steps],
        "weights": [{"name": w.name, "gradient": figures(w.gradient), "updated": figures(w.updated)} for w in weights],
        "first_outside": outside,
        "bit_equal": equal,
    }
