"""Weights in memory of the host, beside all of them on the device.

    python bench/host_memory.py MODEL.gguf --ngl 16,0 [--device 0] [--tests tg128,pp512] [-r 3]
    python bench/host_memory.py MODEL.gguf [--device 0] [--share 0.6] [--skew 0.6] [--temp 1] [--tests tg128,pp512] [-r 3]

With --ngl whole layers: the table has tokens a second with so many layers on the device, what the forecast said of them, and how often a
piece of a prompt, or a token, has read the weights of the others: the time that it took longer, by the time that one read of them takes. 1
is the least; a product of many tokens reads a weight once for each of its tiles of tokens where the device does not keep it in its cache.

Without it experts, with and without a cache of them on the device. MODEL is a mixture of experts, one that `vkback synth` made for this,
since --skew changes it in place: the rows of each layer's router are multiplied by exp(skew * z), z normal, so that some experts are chosen
often, as in a trained model. --skew 0 leaves it alone. Tokens are drawn at --temp, each run others: the likeliest of random weights soon
repeat, and so do their experts.

Prints what host and device read a second, and a table: tokens a second with everything on the device; with as many layers' experts in host
memory as leave --share of the model's bytes on the device; with the experts of all layers there; with these and a cache that fills --share.
Of the third the speed that the host's rate allows, of the last how often experts were in the cache. Texts must be the same.
docs/host_memory.md has more.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from split import warmed

from vkback.api.model import host_rates
from vkback.cli.vkbench_tests import plan_tests
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.host_weights import Forecast
from vkback.engine.load_options import ALL_LAYERS, LoadOptions
from vkback.gguf.file import GgufFile
from vkback.units import size_text

TEXT_TOKENS = 48


@dataclass(frozen=True)
class Run:
    """Tokens a second of each test, how often experts were in the cache (None: there was none), device memory of the weights, a text."""

    speeds: dict[str, float]
    share: float | None
    nbytes: int
    text: list[int]


def skew(path: Path, sigma: float) -> None:
    """Multiply the rows of all routers, which are F32."""
    rng = np.random.default_rng(1)
    routers = [t for name, t in GgufFile.open(path).tensors.items() if name.endswith("ffn_gate_inp.weight")]
    rows = [(t.offset, np.array(t.data).view(np.float32).reshape(t.shape[0], -1)) for t in routers if t.type == "F32"]
    with path.open("r+b") as out:
        for offset, values in rows:
            out.seek(offset)
            out.write((values * np.exp(sigma * rng.standard_normal(values.shape[0]))[:, None]).astype(np.float32).tobytes())


def measured(path: Path, device: Device, options: LoadOptions, tests: list[str], repetitions: int, temp: float = 0.0) -> Run:
    """One way to load it. temp: of the tokens that are timed."""
    begun = time.perf_counter()
    with Engine.open(path, device, options) as engine:
        loaded = time.perf_counter() - begun
        purposes = device.memory_use().purposes
        nbytes = sum(purposes.get(name, (0, 0))[0] for name in ("weights", "cache of experts"))
        rng, speeds = np.random.default_rng(0), {}
        share = None
        for test in plan_tests(tests, [], [], [], []):
            run = warmed(engine, test, rng, temp)
            before = engine.count_experts()
            speeds[test.name] = (test.n_prompt + test.n_gen) / statistics.median(run() for _ in range(repetitions))
            if engine.caches_experts and test.n_gen:
                share = (engine.count_experts() - before).share
        engine.reset()
        text = list(engine.generate(5, TEXT_TOKENS, stop_at_eos=False))
        rule, size = engine.host_weights.rule, size_text(engine.host_weights.nbytes)
        told = f"{loaded:.1f} s to load; {rule.layers} whole layers, experts of {engine.host_weights.expert_layers}, {size} in host memory"
        print(f"{told}; {speeds}; {share}", flush=True)
    return Run(speeds, share, nbytes, text)


def whole_layers(
    path: Path, device: Device, layers: list[int], tests: list[str], rates: tuple[float, float], args: argparse.Namespace
) -> None:
    """The table of --ngl."""
    own, host = rates
    whole = measured(path, device, LoadOptions(ctx=args.ctx, n_gpu_layers="all"), tests, args.repetitions)
    rows = []
    for n in layers:
        how = LoadOptions(ctx=args.ctx, n_gpu_layers=n)
        found = measured(path, device, how, tests, args.repetitions)
        with Engine.open(path, device, how) as engine:
            forecast = Forecast.of(engine.schedule("decode"), engine.host_weights.names, own, host)
            pieces = {test.name: len(engine.prompt_schedules(test.n_prompt)) + test.n_gen for test in plan_tests(tests, [], [], [], [])}
        per_read = forecast.host / host / 1e9
        times = {t.name: (t.n_prompt + t.n_gen) for t in plan_tests(tests, [], [], [], [])}
        longer = {name: times[name] / found.speeds[name] - times[name] / whole.speeds[name] for name in times}
        reads = {name: longer[name] / pieces[name] / per_read for name in times}
        rows.append((n, found, forecast, reads))
    print(
        f"\n| {path.name} | {' | '.join(f'{t}, t/s' for t in tests)} | x of all | forecast, t/s | host bytes a token | reads | same text |"
    )
    print("|---" * (len(tests) + 6) + "|")
    print(f"| all on the device | {' | '.join(f'{v:.1f}' for v in whole.speeds.values())} | 1 | | 0 | | |")
    for n, found, forecast, reads in rows:
        x = " / ".join(f"{found.speeds[t] / whole.speeds[t]:.4f}" for t in found.speeds)
        often = " / ".join(f"{each:.2f}" for each in reads.values())
        speeds = " | ".join(f"{v:.2f}" for v in found.speeds.values())
        told = f"{forecast.tokens_per_s:.2f} | {forecast.host / 1e6:.0f} MB"
        print(f"| -ngl {n} | {speeds} | {x} | {told} | {often} | {found.text == whole.text} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ngl", default="", help="layers on the device, with commas")
    parser.add_argument("--device")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--skew", type=float, default=0.6)
    parser.add_argument("--temp", type=float, default=1.0, help="of tokens that are timed with experts in host memory; 0: the likeliest")
    parser.add_argument("--tests", default="tg128,pp512")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    tests = args.tests.split(",")
    if args.skew and not args.ngl:
        skew(args.model, args.skew)
    with Device.open(args.device) as device:
        own, host = host_rates(device)
        print(f"{device.caps.name}: reads {own:.0f} GB/s of its own memory, {host:.1f} GB/s of the host's", flush=True)

        if args.ngl:
            whole_layers(args.model, device, [int(n) for n in args.ngl.split(",")], tests, (own, host), args)
            return

        def run(**how: int) -> Run:
            return measured(args.model, device, LoadOptions(ctx=args.ctx, **how), tests, args.repetitions, args.temp)  # type: ignore[arg-type]

        whole = run(n_cpu_moe=0)
        all_there = run(n_cpu_moe=ALL_LAYERS)
        with Engine.open(args.model, device, LoadOptions(ctx=args.ctx, n_cpu_moe=ALL_LAYERS)) as engine:
            layers, experts, used = engine.host_weights.with_experts, engine.model.hp.n_expert, engine.model.hp.n_expert_used
            there = engine.host_weights.nbytes
            read = Forecast.of(engine.schedule(), engine.host_weights.names, own, host).host
        room = max(args.share * whole.nbytes - all_there.nbytes, 0.0) / there
        slots, kept = max(int(room * experts), used), int(room * len(layers))
        some = run(n_cpu_moe=layers[len(layers) - kept] if kept else ALL_LAYERS)
        cached = run(n_cpu_moe=ALL_LAYERS, expert_cache=min(slots, experts))
    allowed = 1.0 / (read / host / 1e9)
    print(f"\n| {args.model.name} | {' | '.join(f'{t}, t/s' for t in tests)} | x of all on the device | weights there | in the cache |")
    print("|---" * (len(tests) + 4) + "|")
    names = (
        "all on the device",
        f"experts of {len(layers) - kept} layers in host memory",
        "experts of all layers",
        f"these, {slots} in a cache",
    )
    for name, each in zip(names, (whole, some, all_there, cached), strict=True):
        x = " / ".join(f"{each.speeds[t] / whole.speeds[t]:.3f}" for t in each.speeds)
        hits = "" if each.share is None else f"{each.share:.1%}"
        print(f"| {name} | {' | '.join(f'{v:.1f}' for v in each.speeds.values())} | {x} | {size_text(each.nbytes)} | {hits} |")
    print(f"\nexperts of a token: {read / 1e6:.1f} MB, so {host:.1f} GB/s allow {allowed:.1f} t/s")
    print(f"the same texts: {[each.text == whole.text for each in (some, all_there, cached)]}")


if __name__ == "__main__":
    main()
