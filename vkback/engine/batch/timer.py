"""How fast a batch reads prompts and generates: what `vkbench batch` measures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vkback.engine.batch.batch import PAGE, Batch, Request
from vkback.engine.engine import Engine

if TYPE_CHECKING:
    from vkback.engine.split.timer import TurnsTimer


@dataclass(frozen=True)
class Times:
    """t_pp: seconds until all prompts were read, but for their last token; t_tg: from then until the last token of the last sequence; n_kv:
    rows of cache in use at the end."""

    t_pp: float
    t_tg: float
    n_kv: int


class Timer:
    """Runs sequences of random tokens, each time from empty caches."""

    def __init__(self, engine: Engine, max_sequences: int, n_kv_max: int) -> None:
        """n_kv_max: rows of all sequences; each may leave a page in part, and begins to need one before its last is full."""
        self._engine = engine
        rows = n_kv_max + 2 * PAGE * max_sequences
        # All prompts are read before the first step, as in llama-batched-bench.
        self._batch = Batch(engine, sequences=max_sequences, rows=rows, prompt_share=1.0, max_step_tokens=max_sequences, prefill=0)
        self._rng = np.random.default_rng(1)

    def time(self, pp: int, tg: int, pl: int, *, shared: bool, depth: int) -> Times:
        """pl sequences behind `depth` rows each: every one reads pp tokens, then generates tg. shared: one prompt for all of them."""
        batch = self._batch
        batch.prefixes.clear()
        before = [self._tokens(depth) for _ in range(pl)]
        prompts = [self._tokens(pp)] * pl if shared else [self._tokens(pp) for _ in range(pl)]
        batch.prepare([pl])
        self._engine.reset()
        self._engine.prepare(prompt=min(max(pp - 1, depth), self._engine.n_ctx))
        if depth:
            for tokens in before:
                batch.add(Request((*tokens, 0), 1, stop_at_eos=False))
            batch.run()
        begun = time.perf_counter()
        first = prompts[:1] if shared else prompts
        self._read([(*a, *b) for a, b in zip(before, first, strict=False)], tg)
        if shared and pl > 1:
            self._read([(*a, *b) for a, b in zip(before[1:], prompts[1:], strict=True)], tg)
        read = time.perf_counter()
        batch.run()
        return Times(read - begun, time.perf_counter() - read, (pp if shared else pl * pp) + pl * (depth + tg))

    def _read(self, prompts: list[tuple[int, ...]], tg: int) -> None:
        """Put texts in work, and return when all have been read."""
        for prompt in prompts:
            self._batch.add(Request(prompt, tg, stop_at_eos=False))
        self._batch.read_prompts()

    def _tokens(self, n: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self._engine.model.hp.n_vocab, n).tolist())

    def close(self) -> None:
        self._batch.close()


def open_timer(engine: Engine, max_sequences: int, n_kv_max: int) -> Timer | TurnsTimer:
    """Raises VkbackError where so many rows do not fit."""
    if len(engine.devices) > 1:
        from vkback.engine.split.timer import TurnsTimer

        return TurnsTimer(engine, max_sequences)
    return Timer(engine, max_sequences, n_kv_max)
