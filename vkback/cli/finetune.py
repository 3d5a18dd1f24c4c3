"""vkback finetune: low-rank adapters for a model, trained on a text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vkback.cli.shell import DeviceOption, JsonOption, ModelOption, UsageError, bars, model_path, one_of, output_file, read_text
from vkback.cli.terminal import fit, progress_bar
from vkback.paths import only_writer

if TYPE_CHECKING:
    from vkback.train.finetune import Record
    from vkback.train.steps import TrainingAct


def finetune(
    data: Annotated[Path, typer.Option("--data", help="The text to train on, UTF-8.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The adapter file to write (GGUF).")],
    model: ModelOption = None,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapters.")] = 8,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Adapters are multiplied by alpha / rank [default: 2 rank].")] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", help="Weights that get one, as attn_q,ffn_down [default: all matrices of the layers].")
    ] = None,
    ctx: Annotated[int, typer.Option("-c", "--ctx", min=2, help="Tokens of a window of the text.")] = 128,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Windows that go through the model at once.")] = 4,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Batches whose gradients are added up for a step.")] = 1,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of AdamW.")] = 100,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Largest learning rate; it falls as a cosine.")] = 1e-3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps in which the learning rate rises.")] = 10,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0, help="Of AdamW.")] = 0.0,
    max_norm: Annotated[float, typer.Option("--max-norm", min=0.0, help="Bound on the gradient's norm; 0: none.")] = 1.0,
    held_back: Annotated[float, typer.Option("--held-back", help="Part of the text, in windows evenly spread, to evaluate on.")] = 0.1,
    eval_every: Annotated[int, typer.Option("--eval-every", min=0, help="Steps between evaluations; 0: before and after.")] = 10,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Keep less of the forward pass and make it again: less memory.")] = False,
    act: Annotated[
        str, typer.Option("--act", help="Products with stored weights: f16 (by cooperative matrices, where the device has them) or f32.")
    ] = "f16",
    save_every: Annotated[int, typer.Option("--save-every", min=0, help="Steps between states for --resume; 0: at the end.")] = 25,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the state beside the adapter file, with the same settings.")] = False,
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, help="Of the adapters and of the order of windows.")] = 0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train adapters (LoRA) beside the weights of a model, which stay as they are in the file, quantized or not. Writes an adapter file
    that `vkback run --lora` and llama.cpp load, as it was at the lowest held-back loss, and beside it OUT.state, from which --resume goes
    on bit for bit."""

    from vkback.device import Device
    from vkback.models.registry import Model
    from vkback.report.loss_plot import plot
    from vkback.train.finetune import FineTune, Plan

    text = read_text(data, "--data")
    path = model_path(model)
    state = out.with_name(f"{out.name}.state")
    for written in (out, state):
        output_file(written, "-o", data, path)
    opened = Model.open(path)
    named = tuple(name.strip() for name in (targets or "").split(",") if name.strip())
    plan = Plan(
        rank,
        2.0 * rank if alpha is None else alpha,
        named,
        ctx,
        batch,
        accumulate,
        steps,
        lr,
        warmup,
        weight_decay=weight_decay,
        max_norm=max_norm,
        held_back=held_back,
        eval_every=eval_every,
        checkpoint=checkpoint,
        act=cast("TrainingAct", one_of(act, ("f16", "f32"), "--act")),
        seed=seed,
    )
    if resume and not state.is_file():
        raise UsageError(f"--resume: there is no {state}; begin without it")

    def say(line: str) -> None:
        print("\n".join(fit(line)), file=sys.stderr if as_json else sys.stdout)

    def busy() -> None:
        raise UsageError(f"-o {out}: another finetune run is writing it; wait for its end, or give another name")

    with ExitStack() as stack:
        stack.enter_context(only_writer(out, busy))
        where = stack.enter_context(Device.open(device))
        run = FineTune(opened, where, opened.tokenizer.encode(text), plan, progress=bars())
        stack.callback(run.close)
        say(f"{opened.heading} on {where.caps.name}: {run.parameters} values in {len(run.lora.ranks)} adapters of rank {rank}")
        say(f"{len(run.train)} windows of {ctx} tokens to train on, {len(run.held)} held back")
        if resume:
            run.resume(state)
            if run.record.best[0] and not out.is_file():
                raise UsageError(f"--resume: {out}, which held the adapters of step {run.record.best[0]}, is gone; begin without it")
            say(f"going on after step {run.trainer.t}")
        begun, first = time.perf_counter(), run.trainer.t
        with progress_bar() as bar:
            task = bar.add_task("finetune", total=steps, completed=first)

            def on_step(step: int, loss: float) -> None:
                bar.update(task, completed=step, description=f"loss {loss:.4f}")

            def on_evaluation(step: int, loss: float) -> None:
                best = step and run.record.best[0] == step
                if best:
                    run.write(out)
                bar.console.print(f"step {step:5}: held-back loss {loss:.6f}{', written' if best else ''}", highlight=False)

            def save() -> None:
                if len(run.record.evaluations) == 1:  # none of what is trained yet: as far as it came
                    run.write(out)
                run.save(state)

            record = run.run(on_step=on_step, on_evaluation=on_evaluation, save_every=save_every, save=save)
        seconds = time.perf_counter() - begun
    done = (steps - first) * batch * accumulate * ctx
    if as_json:
        made = {"model": opened.description, "device": where.caps.name, "adapter": str(out), "parameters": int(run.parameters)}
        print(json.dumps({**made, "tokens": done, "seconds": seconds, **curves(record)}, indent=1))
        return
    print("\n".join(plot(record.losses, record.evaluations)))
    for line in verdict(record):
        say(line)
    speed = f"{done} tokens in {seconds:.1f} s, {done / seconds if seconds else 0.0:.1f} t/s"
    say(f"{out}: the adapters of step {record.best[0]} of {steps}; {speed} with evaluation and compile time")


def curves(record: Record) -> dict[str, Any]:
    """The losses of a run as plain values."""
    return {
        "losses": [float(loss) for loss in record.losses],
        "evaluations": [{"step": step, "loss": float(loss)} for step, loss in record.evaluations],
        "best": {"step": record.best[0], "loss": float(record.best[1])},
        "gain": float(record.gain),
    }


def verdict(record: Record) -> Iterator[str]:
    """What the training gained."""
    before, (at, least) = record.evaluations[0][1], record.best
    change = f"{100 * abs(record.gain):.1f} % {'lower' if record.gain >= 0 else 'higher'}"
    yield f"held-back loss {before:.4f} -> {least:.4f} after step {at}, {change}"
    if record.gain <= 0:
        yield "nothing was gained: try a lower --lr, or a text that the model does not know yet"
