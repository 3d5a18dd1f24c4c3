"""Batch-invariant mode (--exact): that a token's logits keep their bits however many tokens go with it.

    python bench/exact.py MODEL.gguf [MODEL ...] [--tokens 600] [--act auto] [--cache-type-k f16] [--cache-type-v f16] [--requests [8]]

MODEL is a file or the name of a built-in model. The first 48 of the random tokens go through one at a time, then in programs of n = 2 to
16, then all of them in the programs that a prompt takes, and the last 48 once more one at a time behind the others. Status 1 where any bit
differs. What the mode costs: vkbench with and without --exact.

With --requests [N] it looks at exact="requests": texts of short and long prompts, of which some begin alike, made alone and then all of
them, N at a time, in two orders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import numpy as np

from vkback.cli.shell import model_path
from vkback.engine.batch.batch import Batch, Request
from vkback.engine.engine import Engine

SHORT = 48
"""A multiple of 16 and of most numbers below; with the others the last program holds padding."""


def same_bits(n: str, got: np.ndarray, want: np.ndarray) -> bool:
    """Whether the bits are the same, which is printed."""
    differ = (got.view(np.uint32) != want.view(np.uint32)).any(axis=1)
    largest = np.abs(got - want).max()
    print(f"{n:>24}: " + (f"OTHER BITS in {differ.sum()} of {len(differ)}, by {largest:.3g} at most" if differ.any() else "the same bits"))
    return not differ.any()


def one_by_one(engine: Engine, ids: Iterable[int]) -> np.ndarray:
    return np.stack([engine.decode_logits(t) for t in ids])


def holds(engine: Engine, tokens: int) -> bool:
    """Whether all ways to read `tokens` random tokens give the same bits."""
    ids = np.random.default_rng(0).integers(engine.model.hp.n_vocab, size=tokens).tolist()
    usual, short = engine.ubatch, ids[:SHORT]
    alone = one_by_one(engine, short)
    good = len(np.unique(alone, axis=0)) > len(short) // 2
    for n in range(2, 17):
        engine.resize(engine.n_ctx, ubatch=n)
        good &= same_bits(f"{n} at a time", engine.prompt_logits(short), alone)
    engine.resize(engine.n_ctx, ubatch=usual)
    whole = engine.prompt_logits(ids)
    good &= same_bits(f"a prompt of {tokens}", whole[: len(short)], alone)
    engine.reset()
    engine.prompt(ids[:-SHORT])
    return good & same_bits("alone behind a prompt", one_by_one(engine, ids[-SHORT:]), whole[-SHORT:])


def requests_hold(engine: Engine, tokens: int, sequences: int) -> bool:
    """Whether requests have the bits of their logits that each has alone."""
    rng, vocab = np.random.default_rng(0), engine.model.hp.n_vocab
    start = rng.integers(vocab, size=tokens).tolist()
    wanted = [
        Request((*start[: int(share * tokens)], *rng.integers(vocab, size=more).tolist()), 40, stop_at_eos=False, logits=True)
        for share, more in ((0, 1), (0, 7), (0, 40), (0.5, 9), (1, 5), (1, 17), (0.9, 3), (0, 100), (1, 60), (0.3, 2))
    ]

    def logits(batch: Batch, asked: list[Request]) -> list[np.ndarray]:
        found: dict[int, list[np.ndarray]] = {batch.add(request): [] for request in asked}
        for made in batch.run():
            found[made.id] += made.logits
        return [np.stack(rows) for rows in found.values()]

    good = True
    with Batch(engine, sequences=sequences) as batch:
        alone = []
        for request in wanted:
            batch.prefixes.clear()
            alone += logits(batch, [request])
        for order in (1, -1):
            for i, found in enumerate(logits(batch, wanted[::order])):
                request, want = wanted[::order][i], alone[::order][i]
                good &= same_bits(f"prompt of {len(request.tokens)}, beside others", found, want)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--act", choices=("auto", "f32", "q8_1"), default="auto")
    parser.add_argument("--cache-type-k", default="f16")
    parser.add_argument("--cache-type-v", default="f16")
    parser.add_argument("--plain", action="store_true", help="without --exact, to see that the comparison finds what it looks for")
    parser.add_argument("--requests", type=int, nargs="?", const=8, metavar="N", help='exact="requests", with N at once')
    parser.add_argument("--device")
    args = parser.parse_args()
    good = True
    for model in args.models:
        with Engine.load(
            model_path(model),
            args.device,
            n_ctx=args.tokens + (8 if args.requests is None else 128),
            act=args.act,
            progress=False,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
            exact="requests" if args.requests is not None and not args.plain else not args.plain,
        ) as engine:
            print(f"{engine.description}, {model}, on {engine.device.caps.name}")
            good &= holds(engine, args.tokens) if args.requests is None else requests_hold(engine, args.tokens, args.requests)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
