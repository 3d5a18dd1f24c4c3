"""Saving, restoring and forking a text's state: how long it takes, how large it is, and that what follows keeps its bits.

    python bench/state.py MODEL.gguf [--depth 4000] [--tokens 200] [--cache-type-k f16] [--cache-type-v f16]

A prompt of `depth` random tokens, a generation that is left in its middle, a save to a file, a restore, other text, and once more: the rest
of the generation and the logits after it must be those of a generation that nothing interrupted. Then two forks of the saved text go on by
turns, with other seeds, and each must be the text that it is alone. Status 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler
from vkback.engine.snapshot import Snapshot, read_state, write_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--depth", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device")
    parser.add_argument("--cache-type-k", default="f16")
    parser.add_argument("--cache-type-v", default="f16")
    args = parser.parse_args()
    sampler = Sampler(temp=0.8, seed=1, repeat_penalty=1.1)
    with (
        Engine.load(
            args.model,
            args.device,
            n_ctx=args.depth + args.tokens + 8,
            progress=False,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
        ) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        ids = np.random.default_rng(1).integers(engine.model.hp.n_vocab, size=args.depth).tolist()
        file = Path(folder) / "state"
        engine.prompt(ids[:-1])
        whole = list(engine.generate(ids[-1], args.tokens, sampler=sampler, stop_at_eos=False))
        last = engine.decode_logits(whole[-1])
        engine.reset()
        engine.prompt(ids[:-1])
        text = engine.generate(ids[-1], args.tokens, sampler=sampler, stop_at_eos=False)
        made = [next(text) for _ in range(args.tokens // 2 + 3)]
        text.close()
        begun = time.perf_counter()
        snapshot = engine.snapshot()
        taken = time.perf_counter()
        write_state(file, snapshot, {}, {})
        written = time.perf_counter()
        read, _, _ = read_state(file)
        checked = time.perf_counter()
        for name in ("restored", "restored again, after other text"):
            engine.restore(read)
            restored = time.perf_counter()
            rest = list(engine.generate(made[-1], args.tokens - len(made), sampler=sampler, stop_at_eos=False))
            same = made + rest == whole and np.array_equal(engine.decode_logits(rest[-1]).view(np.uint32), last.view(np.uint32))
            print(f"{name}: {'the same bits' if same else 'OTHER BITS'}")
            if not same:
                sys.exit(1)
            if name == "restored":
                print(f"state of {len(snapshot.tokens)} tokens: {snapshot.nbytes / 2**20:.1f} MiB")
                print(
                    f"to the host {taken - begun:.3f} s, to the file {written - taken:.3f} s, from the file {checked - written:.3f} s, "
                    f"to the device {restored - checked:.3f} s"
                )
            engine.reset()
            engine.prompt(ids[::-1][:64])
        if not forks_are_apart(engine, read, made[-1], sampler):
            print("forks: OTHER BITS")
            sys.exit(1)
        print("forks that go on by turns: the same bits")


def forks_are_apart(engine: Engine, start: Snapshot, last: int, sampler: Sampler, tokens: int = 24) -> bool:
    """Whether two forks of one state give the text each gives alone, when stepped alternately."""
    samplers = [replace(sampler, seed=seed) for seed in (2, 3)]
    alone = []
    for one in samplers:
        engine.restore(start)
        alone.append(list(engine.generate(last, tokens, sampler=one, stop_at_eos=False)))
    forks, texts = [start, start], [[last], [last]]
    for _ in range(3):
        for i, one in enumerate(samplers):
            engine.restore(forks[i])
            texts[i] += engine.generate(texts[i][-1], tokens // 3, sampler=one, stop_at_eos=False)
            forks[i] = engine.snapshot()
    return [text[1:] for text in texts] == alone and alone[0] != alone[1]


if __name__ == "__main__":
    main()
