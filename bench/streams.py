"""How a batch serves, without a server: streams while a long prompt is read, and clients that send the next request when one is done.

    python bench/streams.py MODEL.gguf [--streams 1,8] [--long 4000] [--clients 8,32] [--prompt 34,512] [--gen 128] [--exact] [--prefill N]

The first table: streams with prompts of 34 tokens run alone, then while another text's prompt of `--long` tokens is read. Milliseconds
between tokens (ITL) by percentiles, and how many times as long a token takes on average, which is to be 1.5 at most. The second: output
tokens a second of clients with random prompts of one length, TTFT and ITL, and the share of what `vkbench batch` would give: all prompts,
then all steps. Random tokens, greedy. --prefill 0 reads short prompts by programs, too.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np

from vkback.cli.shell import model_path
from vkback.engine.batch.batch import Batch, Request, Update
from vkback.engine.engine import Engine

SETTLE_S = 1.0
"""Of streams alone, before their time counts, and as long as it counts; on a CPU driver a few tokens take as long."""

SHORT = 34


@dataclass
class Times:
    """Seconds by text: when it was added and last told of; first: to the first token; gaps: between tokens, an update's in equal parts."""

    added: dict[int, float] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0

    def note(self, made: Update) -> None:
        now, count = time.perf_counter(), len(made.tokens)
        if not count:
            return
        if made.id in self.told:
            self.gaps += [(now - self.told[made.id]) / count] * count
        elif made.id in self.added:
            self.first.append(now - self.added[made.id])
        self.told[made.id] = now
        self.tokens += count


def ms(values: list[float], *shares: int) -> str:
    return " ".join(f"{1e3 * np.percentile(values, share):8.2f}" for share in shares) if values else "-"


class Bench:
    """A batch, and random requests to it."""

    def __init__(self, engine: Engine, sequences: int, prefill: int | None) -> None:
        self.engine, self.rng = engine, np.random.default_rng(1)
        self.batch = Batch(engine, sequences=sequences, prefill=prefill)
        self.batch.prepare_prompts()
        self.batch.prepare()

    def add(self, times: Times, prompt: int, gen: int) -> int:
        tokens = tuple(self.rng.integers(0, self.engine.model.hp.n_vocab, prompt).tolist())
        id = self.batch.add(Request(tokens, gen, stop_at_eos=False))
        times.added[id] = time.perf_counter()
        return id

    def streams(self, count: int, long: int) -> None:
        """A row of the first table."""
        times, room = Times(), self.batch.max_rows - SHORT
        ids = {self.add(times, SHORT, room) for _ in range(count)}

        def run(seconds: float, until: int | None = None) -> list[float]:
            times.gaps.clear()
            begun, ended = time.perf_counter(), False
            while not ended and (until is not None or time.perf_counter() - begun < seconds):
                for made in self.batch.advance():
                    if made.id in ids:
                        times.note(made)
                    ended |= made.id == until and bool(made.tokens)
            return list(times.gaps)

        run(SETTLE_S)
        alone = run(SETTLE_S)
        self.batch.prefixes.clear()
        begun = time.perf_counter()
        beside = run(0.0, self.add(Times(), long, 1))
        took = time.perf_counter() - begun
        for id in ids:
            self.batch.cancel(id)
        self.batch.run()
        slower = np.mean(beside) / np.mean(alone) if beside and alone else np.nan
        print(f"{count:7} {ms(alone, 50, 90, 99)}   {ms(beside, 50, 90, 99, 100)}   {slower:5.2f}  {1e3 * took:8.0f}", flush=True)

    def clients(self, count: int, prompt: int, gen: int, rounds: int) -> None:
        """A row of the second table."""
        together = self.together(count, prompt, gen)
        times, left = Times(), (rounds - 1) * count
        counters = self.batch.counters
        steps, columns, prefilled = counters.steps, counters.columns, self.batch.scheduler.prefilled
        begun = time.perf_counter()
        for _ in range(count):
            self.add(times, prompt, gen)
        while self.batch.busy:
            for made in self.batch.advance():
                times.note(made)
                if made.reason and left:
                    left -= 1
                    self.add(times, prompt, gen)
        speed = times.tokens / (time.perf_counter() - begun)
        filled = (counters.columns - columns) / max(1, counters.steps - steps)
        print(
            f"{count:7} {prompt:6} {speed:8.0f} {100 * speed * together / (count * gen):5.0f} %   {ms(times.first, 50, 99)}   "
            f"{ms(times.gaps, 50, 90, 99)}   {filled:6.1f} {self.batch.scheduler.prefilled - prefilled:9}",
            flush=True,
        )

    def together(self, count: int, prompt: int, gen: int) -> float:
        """Seconds of all prompts and then all steps."""
        with Batch(self.engine, sequences=count, rows=count * (prompt + gen + 128), prompt_share=1.0, prefill=0) as batch:
            batch.prepare([count])
            for repeat in range(2):
                for _ in range(count):
                    tokens = tuple(self.rng.integers(0, self.engine.model.hp.n_vocab, prompt).tolist())
                    batch.add(Request(tokens, gen, stop_at_eos=False))
                begun = time.perf_counter()
                batch.run()
                if repeat:
                    return time.perf_counter() - begun
        raise AssertionError


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=numbers, default=[1, 8], help="at once, beside the long prompt")
    parser.add_argument("--long", type=int, default=4000, help="its tokens")
    parser.add_argument("--clients", type=numbers, default=[8, 32], help="at once")
    parser.add_argument("--prompt", type=numbers, default=[34, 512], help="tokens of their prompts")
    parser.add_argument("--gen", type=int, default=128, help="tokens that they want")
    parser.add_argument("--rounds", type=int, default=4, help="requests of a client")
    parser.add_argument("--exact", action="store_true", help='exact="requests"')
    parser.add_argument("--prefill", type=int, help="most tokens of a prompt that go through steps")
    parser.add_argument("--device")
    args = parser.parse_args()
    n_ctx = max(args.long + 64, max(args.prompt) + args.gen)
    with Engine.load(model_path(args.model), args.device, n_ctx=-(-n_ctx // 64) * 64, exact="requests" if args.exact else False) as engine:
        bench = Bench(engine, max([*(n + 1 for n in args.streams), *args.clients]), args.prefill)
        limits, known = bench.batch.limits, bench.batch.scheduler.step_seconds
        print(f"{engine.description} on {engine.device.caps.name}; prompts of up to {limits.prefill} tokens go through steps")
        print(
            "ms of a step of holes: "
            + ", ".join(f"{n}: {1e3 * known(n):.2f} (runs {bench.batch.scheduler.width(n)})" for n in limits.classes)
        )
        print("\nstreams  ITL ms alone: 50, 90, 99 %   beside a long prompt: 50, 90, 99, 100 %    slower   TTFT ms of it")
        for count in args.streams:
            bench.streams(count, args.long)
        print("\nclients prompt      t/s of batch     TTFT ms: 50, 99 %      ITL ms: 50, 90, 99 %     columns prefilled")
        for prompt in args.prompt:
            for count in args.clients:
                bench.clients(count, prompt, args.gen, args.rounds)
        bench.batch.close()


if __name__ == "__main__":
    main()
