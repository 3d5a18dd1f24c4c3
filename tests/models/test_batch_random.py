"""Random arrivals, copies of a prompt, forks, cancellations, page shortage and preemption on a real model: every text right, every page
returned, no step over its bound. tests/unit/test_batch_schedule.py has thousands of them on a simulated engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_batch import PAGE, judged

from vkback.device import Device
from vkback.engine.batch.batch import Batch, Request
from vkback.engine.batch.scheduler import MAX_STEPS, Step
from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler
from vkback.models.synth import synthesize

MOST = 40
"""Most tokens made of a text."""
BLOCK = 500
"""Schedules of one exhaustive test; twenty of them are 10 000, which `-n` hands to several processes."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("random") / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    with Engine.load(path, device, n_ctx=96, act="f32") as engine:
        yield engine


@pytest.fixture(scope="module")
def texts_alone(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    """Prompts, some of which begin alike, and what the engine makes of each."""
    rng = np.random.default_rng(0)
    start, found = rng.integers(0, 300, 40).tolist(), {}
    for i, length in enumerate((1, 2, 9, 16, 17, 20, 25, 33, 40, 48)):
        tokens = tuple([*start[: length // 2 * (i % 2)], *rng.integers(0, 300, length).tolist()][:length])
        engine.reset()
        engine.prompt(tokens[:-1])
        found[tokens] = list(engine.generate(tokens[-1], MOST, stop_at_eos=False))
    return found


class Bounded:
    """Looks at each action of a batch's scheduler."""

    def __init__(self, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits, self._next = batch.limits, batch.scheduler.next
        self.seen: Counter[str] = Counter()
        self.cancelled = self.forked = 0
        monkeypatch.setattr(batch.scheduler, "next", self.next)

    def next(self, **how: Any) -> Any:
        action = self._next(**how)
        self.seen[type(action).__name__] += 1
        if isinstance(action, Step):
            assert sum(c.tokens for c in action.columns) <= action.width <= self.limits.max_step_tokens and action.count <= MAX_STEPS
        return action


def run(batch: Batch, engine: Engine, texts_alone: dict[tuple[int, ...], list[int]], seed: int, bounded: Bounded) -> None:
    """One schedule."""
    rng = np.random.default_rng(seed)
    prompts, texts = list(texts_alone), dict[int, tuple[Request, list[int]]]()
    waiting = [
        Request(prompts[int(rng.integers(len(prompts)))], int(rng.integers(0, MOST + 1)), stop_at_eos=False, client=f"{i % 3}")
        for i in range(int(rng.integers(3, 12)))
    ]
    ended: dict[int, str] = {}
    begins: dict[int, list[int]] = {}
    """Of forks: the tokens made that they begin with."""
    gone: set[int] = set()
    while waiting or batch.busy:
        if waiting and rng.random() < 0.4:
            request = waiting.pop()
            for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
                texts[batch.add(request)] = request, []
        running = [id for id in texts if id not in ended]
        if running and rng.random() < 0.05:
            gone.add(id := int(rng.choice(running)))
            batch.cancel(id)
        growing = [id for id in running if id not in begins and id not in gone and 0 < len(texts[id][1]) < texts[id][0].max_tokens]
        if growing and len(texts) < 24 and rng.random() < 0.15:
            request, so_far = texts[source := int(rng.choice(growing))]
            sampler = Sampler(temp=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=seed) if rng.random() < 0.5 else request.sampler
            request = replace(request, sampler=sampler, max_tokens=int(rng.integers(len(so_far) + 1, MOST + 1)))
            fork = batch.fork(source, sampler=sampler, max_tokens=request.max_tokens)
            texts[fork] = request, []
            begins[fork] = list(so_far)
            bounded.forked += 1
        for made in batch.advance():
            if made.id in begins and not texts[made.id][1] and made.tokens:
                assert list(made.tokens) == begins[made.id]
            texts[made.id][1].extend(made.tokens)
            if made.reason:
                assert made.id not in ended and made.reason in ("length", "cancelled")
                ended[made.id] = made.reason
    assert set(ended) == set(texts)
    if rng.random() < 0.5:
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages
    assert batch.pool.available == batch.pool.n_pages and len(batch.scheduler.slots) == batch.limits.slots
    for id, (request, made_tokens) in texts.items():
        assert len(made_tokens) == request.max_tokens or (ended[id] == "cancelled" and len(made_tokens) <= request.max_tokens)
        if request.sampler.temp:  # a fork that goes its own way
            made_tokens, rest = begins[id], made_tokens[len(begins[id]) :]
            judged(engine, Request((*request.tokens, *made_tokens), len(rest), request.sampler, stop_at_eos=False), rest)
        if made_tokens != texts_alone[request.tokens][: len(made_tokens)]:
            judged(engine, Request(request.tokens, len(made_tokens), stop_at_eos=False), made_tokens)
    bounded.cancelled += list(ended.values()).count("cancelled")


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("first", "many"), [(0, 12), *(pytest.param(first, BLOCK, marks=pytest.mark.exhaustive) for first in range(0, 20 * BLOCK, BLOCK))]
)
def test_random_schedules_on_a_model(
    first: int, many: int, engine: Engine, texts_alone: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Batch(engine, sequences=6, page=PAGE, rows=13 * PAGE) as batch:
        bounded = Bounded(batch, monkeypatch)
        for seed in range(first, first + many):
            try:
                run(batch, engine, texts_alone, seed, bounded)
            except Exception as e:
                e.add_note(f"in the schedule with seed {seed}")
                raise
        assert bounded.cancelled and bounded.forked > many and batch.scheduler.preemptions and batch.prefixes.hits
        assert all(bounded.seen[name] for name in ("Read", "Step", "Keep", "Bring", "Copy")), bounded.seen
