"""How a benchmark test runs: warm-up, then repetitions that each begin with an empty cache, timed on the wall clock."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import numpy as np

from vkback.cli.shell import EngineLike, make_sampler
from vkback.cli.vkbench_tests import BenchTest

Feed = Literal["self", "random"]
"""What generation is fed with. "self": each token is chosen from the one before, without leaving the device, as in use; "random": random
tokens one at a time, the host waiting for the logits of each, which is how llama-bench measures."""


WARMUP_TOKENS = 17
"""Generated tokens of a warm-up. llama-bench generates one; the engine groups tokens into submits and prepares each grouping on first use,
so the warm-up has to reach full groups and a remainder."""

WARMUP_NS = 1_000_000_000
"""A GPU is warmed up for this long: one that was idle runs at a fraction of its clock for the first 0.3 s (an H200 at 345 of 1980 MHz)."""


def measure(
    engine: EngineLike,
    test: BenchTest,
    repetitions: int,
    *,
    warmup: bool = True,
    feed: Feed = "self",
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
    clock: Callable[[], int] = time.perf_counter_ns,
    during: AbstractContextManager[object] | None = None,
) -> tuple[int, ...]:
    """Nanoseconds of each repetition. Compiling, and filling the cache to the test's depth, are not in the time.

    during  entered while repetitions run
    note  called with what is being done, for a progress display
    Random tokens come from `seed`, so every repetition and every run processes the same ones. Raises EngineError where the logits, or what
    the caches hold, are no numbers.
    """
    timed = TimedTest(engine, test, feed=feed, seed=seed, clock=clock)
    if warmup:
        note("warm-up")
        timed.warm_up()
    samples = []
    with during or nullcontext():
        for i in range(repetitions):
            note(f"run {i + 1}/{repetitions}")
            samples.append(timed.run())
    engine.check_caches()  # prompts make no logits, which would tell
    return tuple(samples)


class TimedTest:
    """A test with its kernels compiled and its tokens chosen, to be run as often as wanted. Arguments as those of `measure`."""

    def __init__(
        self, engine: EngineLike, test: BenchTest, *, feed: Feed = "self", seed: int = 0, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.engine, self.test = engine, test
        self._random = feed == "random"
        self._clock = clock
        vocabulary = engine.model.hp.n_vocab  # synthetic models have no tokenizer to ask
        rng = np.random.default_rng(seed)
        self._depth = rng.integers(vocabulary, size=test.n_depth).tolist()
        self._prompt = rng.integers(vocabulary, size=test.n_prompt).tolist()
        self._fed = rng.integers(vocabulary, size=max(test.n_gen, 1)).tolist()
        sampler = make_sampler() if test.n_gen and not self._random else None
        lengths = [len(t) for t in (self._prompt, self._depth) if t]
        engine.prepare(prompt=lengths, logits=bool(test.n_gen) and self._random, sampler=sampler)

    def _go(self, n_gen: int) -> None:
        if self._prompt:
            self.engine.prompt(self._prompt)
        if not n_gen:
            return
        if self._random:
            for token in self._fed[:n_gen]:
                self.engine.decode_logits(token)
        else:
            exhaust(self.engine.generate(self._fed[0], n_gen, sampler=make_sampler(), stop_at_eos=False))

    def warm_up(self) -> None:
        """Once on a CPU driver, on a GPU for WARMUP_NS."""
        begun = None  # the first turn may still record something, while the GPU idles: it does not count
        while begun is None or self._clock() - begun < WARMUP_NS:
            self.engine.reset()
            self._go(min(self.test.n_gen, WARMUP_TOKENS))
            if self.engine.device.caps.device_type == "cpu":
                break
            begun = begun or self._clock()

    def run(self) -> int:
        """Nanoseconds of one repetition, on caches that hold the test's depth."""
        self.engine.reset()
        if self._depth:
            self.engine.prompt(self._depth)
        start = self._clock()
        self._go(self.test.n_gen)
        return self._clock() - start


def exhaust(tokens: Iterable[int]) -> None:
    for _ in tokens:
        pass


def driver_text(engine: EngineLike) -> str:
    """Driver and version."""
    caps = engine.device.caps
    return f"{caps.driver_name} {caps.driver_info}".strip()


def where_it_ran(engine: EngineLike) -> str:
    """Device and driver."""
    return f"{device_names(engine)}, driver {driver_text(engine)}"


def device_names(engine: EngineLike) -> str:
    """Of all that have layers, in their order, as llama-bench lists them."""
    return ", ".join(device.caps.name for device in engine.devices)


def split_text(shares: Sequence[float] | None) -> str:
    """Shares of several devices, as llama-bench writes them."""
    return "/".join(f"{share:.2f}" for share in shares or (0.0,))


def cpu_name() -> str:
    """The processor as its maker calls it, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for text in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()
