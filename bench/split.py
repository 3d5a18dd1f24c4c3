"""A model over several devices, layer by layer, beside one of them: speeds, texts, and what a transfer between devices costs.

    python bench/split.py MODEL.gguf [--devices 0,1] [--shares 1,1] [--tests tg128,pp512,pp4096] [-r 5]

Prints a table of medians: tokens a second of one device (the first), of all of them, their ratio; of two texts beside each other over all
devices; whether all texts and logits have the same bits; microseconds of a transfer of a row from the first device to the second and back,
by themselves. docs/several_devices.md has what they are for.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkback.cli.vkbench_tests import plan_tests
from vkback.device import Commands, Device, selectors
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.split.border import HostStaging
from vkback.engine.split.relay import Relay
from vkback.evaluate.judge import nmse

Floats = npt.NDArray[np.float32]

TOKENS = 128
WARM_S = 1.0
ROW_BYTES = 16 << 10


def transfer_us(first: Device, second: Device, count: int = 400) -> float:
    """Microseconds of a row of 4096 floats from one device to the other: half of there and back, with nothing to do between."""
    there, back = (HostStaging(a, [b], "rows", ROW_BYTES) for a, b in ((first, second), (second, first)))
    relay = Relay([first, second], lambda at: (there, back)[at].carry())
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
    for i in range(1, count):
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
        prompt = rng.integers(engine.model.hp.n_vocab, size=test.n_prompt).tolist()
        engine.prepare(prompt=[test.n_prompt] if prompt else 0, sampler=Sampler() if test.n_gen else None)

        def run(n_gen: int = test.n_gen, prompt: list[int] = prompt) -> float:
            engine.reset()
            begun = time.perf_counter()
            if prompt:
                engine.prompt(prompt)
            for _ in engine.generate(1, n_gen, stop_at_eos=False) if n_gen else ():
                pass
            return time.perf_counter() - begun

        warm(run, engine)
        found[test.name] = (test.n_prompt + test.n_gen) / statistics.median(run() for _ in range(repetitions))
    return found


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


def made(engine: Engine) -> dict[int, tuple[list[int], Floats, Floats]]:
    """Behind prompts of so many tokens: a text, the logits of the prompt's last token and those behind the text. Pieces of up to 64 tokens
    (the last ones of 700) have kernels that norm what the next layer reads, which at the border is done by others."""
    found = {}
    for length in (640, 700):
        engine.reset()
        tokens = np.random.default_rng(1).integers(engine.model.hp.n_vocab, size=length + 1).tolist()
        engine.prompt(tokens[:-1])
        first = engine.decode_logits(tokens[-1])
        text = list(engine.generate(5, 48, stop_at_eos=False))
        found[length] = text, first, engine.decode_logits(text[-1])
    return found


def said(begun: float, what: str) -> None:
    print(f"{time.perf_counter() - begun:6.1f} s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--shares", default="1,1")
    parser.add_argument("--tests", default="tg128,pp512,pp4096")
    parser.add_argument("--ctx", type=int, default=4608)
    parser.add_argument("--ubatch", type=int)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # activations that are scaled, stages that need barriers
    begun, chosen, tests = time.perf_counter(), selectors(args.devices), args.tests.split(",")
    shares = tuple(map(float, args.shares.split(",")))

    def over(selected: list[str], **how: object) -> Engine:
        return Engine.open(args.model, selected, LoadOptions(ctx=args.ctx, ubatch=args.ubatch, **how))  # type: ignore[arg-type]

    with over(chosen[:1]) as engine:
        said(begun, f"loaded on {engine.device.caps.name}")
        one, its_own = speeds(engine, tests, args.repetitions), made(engine)
    said(begun, "one device measured")
    with over(chosen, tensor_split=shares) as engine:
        said(begun, f"loaded on {', '.join(d.caps.name for d in engine.devices)}: {engine.parts}")
        us = transfer_us(engine.devices[0], engine.devices[1])
        all_of_them, found = speeds(engine, tests, args.repetitions), made(engine)
        said(begun, "all devices measured")
        both = two_texts(engine, args.repetitions)
    print(f"\n| {args.model.name} | one device, t/s | {len(chosen)} devices, t/s | x |\n|---|---:|---:|---:|")
    for test in tests:
        print(f"| {test} | {one[test]:.1f} | {all_of_them[test]:.1f} | {all_of_them[test] / one[test]:.3f} |")
    if "tg128" in one:
        print(f"| two texts of {TOKENS} | {one['tg128']:.1f} | {both:.1f} | {both / one['tg128']:.3f} |")
    print()
    for length, (text, first, last) in found.items():
        own_text, own_first, own_last = its_own[length]
        bits = np.array_equal(first, own_first), np.array_equal(last, own_last)
        print(f"prompt of {length}: the same text: {text == own_text}; bits of logits: {bits}; NMSE {nmse(first, own_first):.1e}")
    print(f"a transfer takes {us:.1f} us")


if __name__ == "__main__":
    main()
