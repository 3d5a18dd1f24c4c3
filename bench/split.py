"""A model over several devices, layer by layer, beside one of them: speeds, texts, and what a transfer between devices costs.

    python bench/split.py MODEL.gguf [--devices 0,1] [--shares 1,1] [--tests tg128,pp512,pp4096] [--ubatches 512,256] [-r 5]
    python bench/split.py mistral-large-123b-Q4_K_M --tests tg64,pp2048    # of zeros, for a model that one device may not hold

Prints a table of medians: tokens a second of one device (the first), of all of them, their ratio; of two texts beside each other over all
devices; whether all texts and logits have the same bits, and where the first that differ are; microseconds of a transfer of a row from the
first device to the second and back, by themselves. docs/several_devices.md has what they are for.

With a name of `vkback synth --list`, or llama-70b, in place of a file, weights are zeros, and take no disk. One device then has a quarter
of the layers, and half of them; what it would do with all of them is a line through both.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.cli.vkbench_tests import BenchTest, plan_tests
from vkback.device import Commands, Device, selectors
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.split.border import HostStaging
from vkback.engine.split.relay import Relay
from vkback.evaluate.judge import nmse
from vkback.models.synth import SHAPES, write_outline

Floats = npt.NDArray[np.float32]

LLAMA_70B: dict[str, Any] = {"n_layer": 80, "n_embd": 8192, "n_ff": 28672, "n_head": 64}
"""In which Llama 3.1 70B is not the 8B."""

TOKENS = 128
WARM_S = 1.0
ROW_BYTES = 16 << 10


def transfer_us(first: Device, second: Device, rows: int = 400) -> float:
    """Microseconds of a row of 4096 floats from one device to the other: half of there and back, with nothing to do between."""
    there, back = (HostStaging(a, [b], "rows", ROW_BYTES) for a, b in ((first, second), (second, first)))
    shared = there.shared and back.shared
    relay = Relay([first, second], None if shared else lambda at: (there, back)[at].carry())
    commands: list[list[Commands]] = []
    arenas = []
    for device, read, written in ((first, back.read[0], there.written), (second, there.read[0], back.written)):
        arenas.append(arena := device.arena("row", ROW_BYTES, "device"))
        row, own = arena.alloc(ROW_BYTES, "row"), []
        for i in range(4):
            rec = device.recorder(f"pass a row on {i}")
            rec.host_writes()
            rec.copy(read, row)
            rec.barrier()
            rec.copy(row, written)
            rec.barrier()
            rec.fill(*relay.mark(len(commands), i))
            rec.host_barrier()
            own.append(rec.finish())
        commands.append(own)
    samples = []
    flights = [relay.submit([[own[0]] for own in commands], 0)]
    for i in range(1, rows):
        flights.append(relay.submit([[own[i % 4]] for own in commands], i % 4))
        begun = time.perf_counter()
        flights.pop(0).wait()
        samples.append(time.perf_counter() - begun)
    flights[-1].wait()
    relay.close()
    for own in commands:
        for each in own:
            each.destroy()
    for arena in arenas:
        arena.destroy()
    there.close()
    back.close()
    return statistics.median(samples[20:]) * 1e6 / 2


def speeds(engine: Engine, tests: list[str], repetitions: int) -> dict[str, float]:
    """Tokens a second of each test, as vkbench runs them."""
    found, rng = {}, np.random.default_rng(0)
    for test in plan_tests(tests, [], [], [], []):
        run = warmed(engine, test, rng)
        found[test.name] = (test.n_prompt + test.n_gen) / statistics.median(run() for _ in range(repetitions))
    return found


def warmed(engine: Engine, test: BenchTest, rng: np.random.Generator, temp: float = 0.0) -> Callable[[], float]:
    """What runs a test and gives its seconds, on a warm card. temp: of generated tokens; over 0 each run makes another text."""
    seeds = count(1)
    prompt = rng.integers(engine.model.hp.n_vocab, size=test.n_prompt).tolist()
    engine.prepare(prompt=[test.n_prompt] if prompt else 0, sampler=Sampler(temp=temp) if test.n_gen else None)

    def run() -> float:
        engine.reset()
        sampler = Sampler(temp=temp, seed=next(seeds)) if temp else Sampler()
        begun = time.perf_counter()
        if prompt:
            engine.prompt(prompt)
        for _ in engine.generate(1, test.n_gen, sampler=sampler, stop_at_eos=False) if test.n_gen else ():
            pass
        return time.perf_counter() - begun

    warm(run, engine)
    return run


def warm(run: Callable[[], object], engine: Engine) -> None:
    """An idle card runs at a fifth of its clock, and takes a second to rise."""
    begun = time.perf_counter()
    run()
    while not engine.device.caps.software and time.perf_counter() - begun < WARM_S:
        run()


def two_texts(engine: Engine, repetitions: int) -> float:
    """Tokens a second of two texts beside each other."""

    with engine.beside() as other:
        other.prepare(sampler=Sampler())

        def run() -> float:
            for each in (engine, other):
                each.reset()
            texts = [each.generate(1 + i, TOKENS, stop_at_eos=False) for i, each in enumerate((engine, other))]
            begun = time.perf_counter()
            while texts:
                texts = [text for text in texts if next(text, None) is not None]
            return time.perf_counter() - begun

        warm(run, engine)
        return 2 * TOKENS / statistics.median(run() for _ in range(repetitions))


@dataclass
class TextAndCaches:
    """What an engine makes of a prompt. caches: behind the prompt; logits: of its last token, then of a text's last; alone: of one token
    behind another engine's caches, [] for none."""

    caches: Mapping[str, npt.NDArray[Any]]
    first: Floats
    text: list[int]
    last: Floats
    alone: Floats


def made(engine: Engine, theirs: Mapping[int, TextAndCaches] | None = None) -> dict[int, TextAndCaches]:
    """Behind prompts of so many tokens. Pieces of up to 64 tokens (the last ones of 700) have kernels that norm what the next layer reads,
    which at the border is done by others."""
    found = {}
    for length in (640, 700):
        engine.reset()
        tokens = np.random.default_rng(1).integers(engine.model.hp.n_vocab, size=length + 1).tolist()
        engine.prompt(tokens[:-1])
        behind = engine.snapshot()
        first = engine.decode_logits(tokens[-1])
        text = list(engine.generate(5, 48, stop_at_eos=False))
        last, alone = engine.decode_logits(text[-1]), np.zeros(0, np.float32)
        if theirs is not None:
            engine.restore(replace(behind, arrays=theirs[length].caches))
            alone = engine.decode_logits(tokens[-1])
        found[length] = TextAndCaches(behind.arrays, first, text, last, alone)
    return found


def compared(length: int, one: TextAndCaches, split: TextAndCaches) -> str:
    """Which bits are the same."""
    other = [name for name, rows in one.caches.items() if not np.array_equal(rows, split.caches[name])]
    where = ""
    if other:
        a, b = one.caches[other[0]], split.caches[other[0]]
        where = f", the first in {other[0]}"
        if a.ndim == 3:
            rows = np.flatnonzero((a != b).any(axis=(0, 2)))
            where += f", {len(rows)} rows from {rows[0]} to {rows[-1]}"
    bits = [bool(np.array_equal(a, b)) for a, b in ((one.first, split.first), (one.last, split.last), (one.first, split.alone))]
    return (
        f"prompt of {length}: the same text: {one.text == split.text}; {len(other)} of {len(one.caches)} caches differ behind the prompt"
        f"{where}; bits of logits behind it: {bits[0]}, behind the text: {bits[1]}, of a token behind one device's caches: {bits[2]}; NMSE "
        f"{nmse(split.first, one.first):.1e}"
    )


def said(begun: float, what: str) -> None:
    print(f"{time.perf_counter() - begun:6.1f} s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--shares", default="1,1")
    parser.add_argument("--tests", default="tg128,pp512,pp4096")
    parser.add_argument("--ctx", type=int, default=4608)
    parser.add_argument("--ubatches", default="512", help="of the devices together, as 512,256; one device has the first")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # activations that are scaled, stages that need barriers
    begun, chosen, tests = time.perf_counter(), selectors(args.devices), args.tests.split(",")
    shares, ubatches = tuple(map(float, args.shares.split(","))), [int(each) for each in args.ubatches.split(",")]

    def over(model: Path, selected: list[Any], ubatch: int, **how: Any) -> Engine:
        return Engine.open(model, selected, LoadOptions(ctx=args.ctx, ubatch=ubatch, **how))

    def on_all(
        model: Path, theirs: Mapping[int, TextAndCaches] | None
    ) -> tuple[dict[int, dict[str, float]], dict[int, TextAndCaches], float, float]:
        rates, found, both, us = {}, dict[int, TextAndCaches](), 0.0, 0.0
        for ubatch in ubatches:
            with over(model, chosen, ubatch, tensor_split=shares) as engine:
                said(begun, f"loaded on {', '.join(d.caps.name for d in engine.devices)}: {engine.parts}, {ubatch} tokens at once")
                rates[ubatch] = speeds(engine, [t for t in tests if ubatch == ubatches[0] or t.startswith("pp")], args.repetitions)
                if ubatch == ubatches[0]:
                    us = transfer_us(engine.devices[0], engine.devices[1])
                    found = made(engine, theirs) if theirs is not None else {}
                    both = two_texts(engine, args.repetitions)
                said(begun, "all devices measured")
        return rates, found, both, us

    if Path(args.model).exists():
        with over(Path(args.model), chosen[:1], ubatches[0]) as engine:
            said(begun, f"loaded on {engine.device.caps.name}")
            one, its_own = speeds(engine, tests, args.repetitions), made(engine)
        said(begun, "one device measured")
        rates, found, both, us = on_all(Path(args.model), its_own)
    else:
        with tempfile.TemporaryDirectory() as folder:
            SHAPES["llama-70b"] = replace(SHAPES["llama-8b"], **LLAMA_70B)
            layers = SHAPES[args.model.rpartition("-")[0]].n_layer
            some = {}
            for few in (layers // 4, layers // 2):
                write_outline(args.model, file := Path(folder) / f"{few}.gguf", layers=few)
                with over(file, chosen[:1], ubatches[0]) as engine:
                    said(begun, f"loaded {few} of {layers} layers on {engine.device.caps.name}")
                    some[few] = {test: 1 / rate for test, rate in speeds(engine, tests, args.repetitions).items()}
            a, b = some
            one = {t: 1 / (some[b][t] + (some[b][t] - some[a][t]) / (b - a) * (layers - b)) for t in tests}
            write_outline(args.model, file := Path(folder) / "all.gguf")
            its_own = dict[int, TextAndCaches]()
            rates, found, both, us = on_all(file, None)
    print(f"\n| {Path(args.model).name} | one device, t/s | {len(chosen)} devices, t/s | x |\n|---|---:|---:|---:|")
    for ubatch, measured in rates.items():
        for test, rate in measured.items():
            print(f"| {test}, {ubatch} at once | {one[test]:.1f} | {rate:.1f} | {rate / one[test]:.3f} |")
    alone = next((one[test] for test in tests if test.startswith("tg")), None)
    if alone is not None:
        print(f"| two texts of {TOKENS} | {alone:.1f} | {both:.1f} | {both / alone:.3f} |")
    print()
    for length, theirs in found.items():
        print(compared(length, its_own[length], theirs))
    print(f"a transfer takes {us:.1f} us")


if __name__ == "__main__":
    main()
