"""Times training steps: tokens per second of the device, of PyTorch on the same GPU where it is installed, and the memory taken.

    python bench/train_step.py MODEL [--ctx 512] [--batch 1] [--steps 5] [--optimizer adamw] [--rank 0] [--checkpoint] [--torch]

A step is forward, backward and optimizer, of random tokens; two go before the timed ones. --rank trains adapters beside the weights as the
file has them. --torch: the same model by vkback/train/torch_reference.py in float32 on CUDA, eager and compiled, in the same call.
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
from vkback.plan.flops import prompt_flops
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    model = Model.open(args.model)
    ids = np.random.default_rng(0).integers(0, model.hp.n_vocab, (args.batch, args.ctx + 1))
    tokens, targets, count = ids[:, :-1], ids[:, 1:], args.batch * args.ctx
    lora = lora_of(model, args.rank) if args.rank else None
    with (
        Device.open() as device,
        StepTrainer(
            model, device, ctx=args.ctx, batch=args.batch, settings=Settings(args.optimizer), lora=lora, checkpoint=args.checkpoint,
            progress=True,
        ) as trainer,
    ):  # fmt: skip
        assert isinstance(trainer.steps, DeviceSteps)
        where = f"{device.caps.name}, driver {device.caps.driver_info}"
        print(f"{model.description}, {args.ctx} tokens x {args.batch}, {args.optimizer}, {where}")
        ours = timed("vkback", count, args.steps, lambda: trainer.step(tokens, targets))
        forward = prompt_flops(model.graph(1, args.ctx, head="none"), count, 0)
        print(f"{'':24} {trainer.steps.nbytes / 2**30:10.2f} GiB; the forward pass alone is {1e-12 * forward:.3f} TFLOP")
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
