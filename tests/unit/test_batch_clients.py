"""Clients that send the next request when one is done, on a simulated device with the times of an H200: what they get of a batch's speed
(bench/streams.py looks at a real one)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from vkback.engine.batch.batch import PREFILL, WAITING_WEIGHT
from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.scheduler import Idle, Limits, Read, Scheduler, Step, Text

STEP_S = {1: 0.0015, 2: 0.0016, 4: 0.00175, 8: 0.00203, 16: 0.00265, 24: 0.0036, 32: 0.00437, 48: 0.0064, 64: 0.00808}
"""Seconds of a step of 8B Q4_K_S by its columns (bench/results/2026-11-27_h200_580-159-04_batch.md); 24 and 48 lie between the others."""

READ_S = {16: 0.0026, 32: 0.0036, 64: 0.005, 128: 0.0085, 256: 0.014, 512: 0.0255}
"""Of a program of a prompt."""

COPY_S, HOST_S = 0.0006, 0.0003
"""Of the copies of pages behind a read; from the end of a read to the next submit."""


@dataclass
class Clients:
    """Each has one request at a time."""

    count: int
    prompt: int
    tokens: int
    prefill: int = PREFILL
    now: float = 0.0
    free_at: float = 0.0
    asked: dict[int, float] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        pool = PagePool(40 * self.count, 64)
        limits = Limits(32, 64, 2048, waiting_weight=WAITING_WEIGHT, classes=tuple(STEP_S), prefill=self.prefill)
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool))
        for width, seconds in STEP_S.items():
            self.scheduler.probed(width, seconds)
        self.rng = random.Random(1)
        self.flying: deque[tuple[Step, float, float]] = deque()

    def ask(self, client: int, prompt: int, tokens: int) -> Text:
        text = Text(len(self.asked), f"client {client}", tuple(self.rng.randrange(10**6) for _ in range(prompt)), tokens)
        self.asked[text.id] = self.now
        self.scheduler.add(text)
        return text

    def run(self, requests: int) -> Clients:
        for client in range(self.count):
            self.ask(client, self.prompt, self.tokens)
        while self.scheduler.texts:
            self.advance(requests)
        return self

    def advance(self, requests: int) -> None:
        reads = True
        while len(self.flying) < 2 and not isinstance(action := self.scheduler.next(reads=reads), Idle):
            if isinstance(action, Read):
                begun = max(self.now, self.free_at)
                while self.flying:
                    self.collect(requests)
                seconds = min(s for n, s in READ_S.items() if n >= action.count) + COPY_S
                self.free_at = begun + seconds
                self.now, reads = self.free_at + HOST_S, False
                self.scheduler.done_read(action, seconds)
            else:
                assert isinstance(action, Step)
                seconds = STEP_S[action.width] * action.count
                self.free_at = max(self.now, self.free_at) + seconds
                self.flying.append((action, self.free_at, seconds))
        if self.flying:
            self.collect(requests)

    def collect(self, requests: int) -> None:
        step, ends, seconds = self.flying.popleft()
        self.now = max(self.now, ends)
        self.scheduler.done_step(step, {c.text.id: [1] * c.steps for c in step.columns}, {}, seconds)
        for text, _, steps, *_ in step.columns:
            if not steps:
                continue
            if text.id in self.told:
                self.gaps.append((self.now - self.told[text.id]) / steps)
            else:
                self.waits.append(self.now - self.asked[text.id])
            self.told[text.id] = self.now
            self.made += steps
            if text.reason and len(self.asked) < requests:
                self.ask(int(text.client.split()[1]), self.prompt, self.tokens)

    @property
    def share(self) -> float:
        """Of the speed that all of them at once have, one prompt after another and then all steps."""
        read = min(s for n, s in READ_S.items() if n >= self.prompt) + COPY_S
        together = self.count * read + self.tokens * min(s for n, s in STEP_S.items() if n >= self.count)
        return self.made / self.now / (self.count * self.tokens / together)


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share))


@pytest.mark.parametrize("count", [8, 32])
def test_clients_get_most_of_what_a_batch_gives(count: int) -> None:
    clients = Clients(count, prompt=512, tokens=128).run(6 * count)
    assert clients.share > 0.88 and percentile(clients.gaps, 50) < 1.1 * STEP_S[count]


@pytest.mark.parametrize("count", [8, 32])
def test_short_prompts_in_steps_are_faster_than_programs(count: int) -> None:
    steps, programs = (Clients(count, 34, 128, prefill=prefill).run(6 * count) for prefill in (PREFILL, 0))
    assert steps.share > 1.0 and steps.made / steps.now > 1.06 * programs.made / programs.now
    assert np.mean(steps.waits) < 0.95 * np.mean(programs.waits)
    assert steps.scheduler.prefilled == 33 * 6 * count and programs.scheduler.prefilled == 0


def test_streams_slow_down_by_half_at_most_while_a_long_prompt_is_read() -> None:
    clients = Clients(8, prompt=34, tokens=1500)
    texts = [clients.ask(client, 34, 1500) for client in range(8)]
    while any(len(text.made) < 300 for text in texts):
        clients.advance(0)
    alone = np.mean(clients.gaps[-1000:])
    clients.gaps.clear()
    long = clients.ask(9, 2000, 2)
    while not long.made:
        clients.advance(0)
    assert np.mean(clients.gaps) < 1.55 * alone
