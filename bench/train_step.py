"""Times training steps: tokens per second of the device, of PyTorch on the same GPU where it is installed, and the memory taken.

    python bench/train_step.py MODEL [--ctx 512] [--batch 1] [--steps 5] [--optimizer adamw] [--rank 0] [--act f16] [--checkpoint]
                               [--stages] [--torch]

A step is forward, backward and optimizer, of random tokens; two go before the timed ones. --rank trains adapters beside the weights as the
file has them. --stages: where the time goes, the most expensive kinds of kernels by GPU timestamps. --torch: the same model by
vkback/train/torch_reference.py in float32 on CUDA, eager and compiled, in the same call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vkback.device import Device
from vkback.models import Model
from vkback.ops.dispatch import Dispatch
from vkback.plan.cost.flops import prompt_flops
from vkback.plan.cost.forecast import Costs, dispatch_us
from vkback.report.bars import Bars
from vkback.train.steps import DeviceSteps
from vkback.train.trainer import Settings, StepTrainer, lora_of


def timed(what: str, tokens: int, steps: int, step: Callable[[], float]) -> float:
    """Print and give the median tokens per second of a step."""
    for _ in range(2):
        step()
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    speed = tokens / statistics.median(seconds)
    low, middle, high = (1e3 * s for s in (min(seconds), statistics.median(seconds), max(seconds)))
    print(f"{what:24} {speed:10.1f} t/s, {middle:9.2f} ms a step (from {low:.2f} to {high:.2f})")
    return speed


STAGES = 44
"""Kinds of kernels that --stages lists."""

ROUGHLY = Costs(2000.0, 0.0, 0.0, "to divide the time of a stage among its dispatches", 100_000.0)


def kind_of(dispatch: Dispatch) -> str:
    """What the kernels of different layers have in common: op, shader, the shapes of what it reads first and of what it writes."""
    shader = dispatch.kernel.source.removesuffix(".comp")
    read = next((a.tensor for a in dispatch.args if a.tensor.kind == "weight"), dispatch.args[0].tensor)
    written = [a.tensor for a in dispatch.args if "w" in a.access]
    return f"{dispatch.op} {shader}: {read.type} {list(read.shape)} -> {list(written[0].shape) if written else ''}"


def median_ms(count: int, action: Callable[[], object]) -> float:
    """Milliseconds of the host's clock."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        action()
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found)


def stages(trainer: StepTrainer, steps: DeviceSteps, step: Callable[[], float], half: Callable[[], float]) -> None:
    """Print where the time of a step goes. half: of a step what makes the gradients."""
    programs = [steps.program(graph).record(graph) for graph in ("gradients", "optimizer")]
    alone = [median_ms(5, lambda c=commands: steps.device.submit(c).wait()) for commands in programs]  # type: ignore[misc]
    parts = len(steps.parts("gradients"))
    print(f"by the host's clock: gradients {median_ms(5, half):.2f} ms in {parts} submits, {alone[0]:.2f} as one submit without inputs and")
    print(f"results; optimizer {median_ms(5, trainer.update):.2f} ms, {alone[1]:.2f} as a submit; a step {median_ms(5, step):.2f} ms")
    whole: dict[str, list[float]] = {}
    for graph in ("gradients", "optimizer"):
        program = steps.program(graph)
        stamped = program.record("stages", timestamps=True)
        times = []
        for _ in range(3):
            steps.device.submit(stamped).wait()
            times.append(np.diff([ns for _, ns in stamped.timestamps()]) / 1e6)
        spent = np.median(times, axis=0)
        print(f"{graph}: {spent.sum():.2f} ms in {len(spent)} stages, by timestamps with the barriers that there are anyway")
        for stage, ms in zip(program.schedule.stages, spent, strict=True):
            shares = [dispatch_us(d, ROUGHLY) + 1e-3 for d in stage]
            for d, share in zip(stage, shares, strict=True):
                row = whole.setdefault(kind_of(d), [0.0, 0, 0, 0])
                for i, value in enumerate((ms * share / sum(shares), 1, d.flops, d.nbytes)):
                    row[i] += value
    total = sum(row[0] for row in whole.values())
    print(f"{'ms':>9} {'share':>6} {'times':>5} {'TFLOP/s':>8} {'GB/s':>7}")
    for kind, (ms, times_, flops, moved) in sorted(whole.items(), key=lambda item: -item[1][0])[:STAGES]:
        print(f"{ms:9.3f} {ms / total:6.1%} {times_:5.0f} {flops / ms / 1e9:8.2f} {moved / ms / 1e6:7.0f}  {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--act", choices=("f32", "f16"))
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    model = Model.open(args.model)
    ids = np.random.default_rng(0).integers(0, model.hp.n_vocab, (args.batch, args.ctx + 1))
    tokens, targets, count = ids[:, :-1], ids[:, 1:], args.batch * args.ctx
    lora = lora_of(model, args.rank) if args.rank else None
    with (
        Device.open() as device,
        StepTrainer(
            model,
            device,
            ctx=args.ctx,
            batch=args.batch,
            settings=Settings(args.optimizer),
            lora=lora,
            checkpoint=args.checkpoint,
            act=args.act,
            progress=Bars(),
        ) as trainer,
    ):
        assert isinstance(trainer.steps, DeviceSteps)
        where = f"{device.caps.name}, driver {device.caps.driver_info}"
        print(f"{model.description}, {args.ctx} tokens x {args.batch}, {args.optimizer}, {where}")
        ours = timed("vkback", count, args.steps, lambda: trainer.step(tokens, targets))
        forward = prompt_flops(model.graph(1, args.ctx, head="none"), count, 0)
        print(f"{'':24} {trainer.steps.nbytes / 2**30:10.2f} GiB; the forward pass alone is {1e-12 * forward:.3f} TFLOP")
        if args.stages:
            stages(trainer, trainer.steps, lambda: trainer.step(tokens, targets), lambda: trainer.gradients(tokens, targets))
    if args.torch:
        import torch

        from vkback.train.torch_reference import TorchModel, TorchTrainer

        for kind in ("eager", "compiled"):
            reference = TorchModel(args.model, device="cuda")
            if kind == "compiled":
                reference.forward = torch.compile(reference.forward)  # type: ignore[method-assign]
            theirs = TorchTrainer(reference, args.optimizer, 1e-3)
            speed = timed(f"PyTorch {kind}", count, args.steps, lambda theirs=theirs: theirs.step(tokens, targets))  # type: ignore[misc]
            print(f"{'':24} vkback is {ours / speed:.2f} times as fast")


if __name__ == "__main__":
    main()
