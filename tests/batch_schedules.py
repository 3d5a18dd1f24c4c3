"""Random schedules of a batch, and the simulated engine that carries them out and checks every action."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.scheduler import Action, Bring, Copy, Idle, Keep, Limits, Read, ScheduleError, Scheduler, State, Step, Text

VOCABULARY = 64
MODULUS = 1_000_003


def absorb(state: int, token: int) -> int:
    """The simulated model's state after a token. It depends on every token before."""
    return (state * 131 + token + 1) % MODULUS


def pick(state: int, seed: int) -> int:
    """The token that follows; token 0 ends a text."""
    return (state * 7 + seed * 13) // 5 % VOCABULARY


def continuation(tokens: list[int], seed: int, most: int) -> list[int]:
    """What a text is followed by when nobody else is served: at most so many tokens, up to token 0."""
    state = 0
    for token in tokens:
        state = absorb(state, token)
    made: list[int] = []
    while len(made) < most and (not made or made[-1]):
        made.append(pick(state, seed))
        state = absorb(state, made[-1])
    return made


def cells(tokens: list[int], first: int = 0) -> list[int]:
    """What rows hold: each its number and its token."""
    return [row * VOCABULARY + token for row, token in enumerate(tokens, first)]


@dataclass
class Column:
    """A text of the step before as the device knows it: its tokens, of which some are reported, and whether it has become a hole."""

    tokens: list[int]
    cells: list[int]
    state: int
    hole: bool = False


@dataclass
class SimulatedEngine:
    """Carries out actions when they are given; they are reported later. Each row of a page holds its number and its token, each slot the
    state of a recurrent model: after every row of its text."""

    scheduler: Scheduler
    seeds: dict[int, int]
    steps: deque[tuple[Step, dict[int, list[int]], dict[int, str]]] = field(default_factory=deque)
    read: Read | None = None
    columns: dict[int, Column] = field(default_factory=dict)
    staging: list[int] = field(default_factory=list)
    host: dict[int, tuple[list[list[int]], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limits, self.pool = self.scheduler.limits, self.scheduler.pool
        self.pages = [[-1] * self.limits.page for _ in range(self.pool.n_pages)]
        self.states: dict[int, int] = {}

    @property
    def in_flight(self) -> bool:
        return bool(self.steps or self.read)

    def carry_out(self, action: Action) -> None:
        match action:
            case Read():
                self.carry_out_read(action)
            case Step():
                self.carry_out_step(action)
            case Keep():
                assert all(t.arrival < action.text.arrival for t in self.scheduler.texts.values() if t.state is State.RUNNING)
                assert not action.text.submitted, "a preempted text waits for its steps in flight"
                self.host[action.text.id] = [self.pages[p][:] for p in action.pages], self.states.get(action.slot, 0)
                self.columns.pop(action.text.id, None)
            case Bring(text, restore):
                kept, state = self.host.pop(text.id)
                for index in restore:
                    self.write(text.pages[index], kept[index])
                self.states[text.slot] = state
            case Copy(text, from_slot, from_page, to_page):
                assert (from_page >= 0) == (to_page >= 0) == bool(text.rows % self.limits.page)
                if to_page >= 0:
                    self.write(to_page, self.pages[from_page])
                self.states[text.slot] = self.states.get(from_slot, 0)

    def write(self, page: int, rows: list[int], first: int = 0) -> None:
        assert self.pool.references(page) == 1, "a page that is written has one text"
        self.pages[page][first : first + len(rows)] = rows

    def carry_out_read(self, read: Read) -> None:
        text, rows = read.text, read.text.length - 1
        assert self.read is None and 1 <= read.count <= self.limits.piece and read.first + read.count <= rows
        assert not (read.matched and self.limits.recurrent)
        assert not (read.store and self.scheduler.kept), "kept texts run again before others begin to"
        if read.matched or not read.first:
            self.staging = [cell for page in read.matched for cell in self.pages[page]]
        assert len(self.staging) == read.first
        self.staging += cells(text.tokens[read.first : read.first + read.count], read.first)
        assert self.staging == cells(text.tokens[: len(self.staging)]), "the staging cache holds the text's own rows"
        page = self.limits.page
        for index in read.store:
            self.write(text.pages[index], self.staging[index * page : (index + 1) * page])
        assert (len(self.staging) == rows) == bool(read.store) or text.pages, "the last piece stores what was not found"
        if len(self.staging) == rows:
            assert text.slot >= 0 and len(text.pages) == -(-rows // page)
            state = 0
            for token in text.tokens[:rows]:
                state = absorb(state, token)
            self.states[text.slot] = state
        self.read = read

    def carry_out_step(self, step: Step) -> None:
        page, pages = self.limits.page, self.pages
        assert 1 <= len(step.columns) <= self.limits.max_step_tokens
        assert len(self.steps) < self.limits.in_flight and step.count == max(c.steps for c in step.columns)
        assert len({slot for _, slot, _ in step.columns}) == len(step.columns)
        self.columns = {text.id: self.columns[text.id] for text, _, _ in step.columns if text.id in self.columns}
        made: dict[int, list[int]] = {}
        ended: dict[int, str] = {}
        for text, slot, steps in step.columns:
            assert text.state is State.RUNNING and text.slot == slot < self.limits.slots and steps >= 1
            column = self.columns.get(text.id)
            if column is None:
                tokens = text.tokens
                assert text.submitted == steps and text.rows == len(tokens) - 1
                column = self.columns[text.id] = Column(tokens, cells(tokens[:-1]), 0)
                for token in tokens[:-1]:
                    column.state = absorb(column.state, token)
                if self.limits.recurrent:
                    assert not text.rows or self.states[slot] == column.state, "the slot holds the state of its own text"
            if column.hole:
                continue
            row = len(column.cells)
            assert row + steps <= min(len(text.pages) * page, self.limits.max_rows), "pages are assigned in advance"
            found: list[int] = []
            for held in text.pages[: -(-row // page)]:
                found += pages[held]
            assert found[:row] == column.cells, f"text {text.id} reads rows that are not its own"
            for written in text.pages[row // page : -(-(row + steps) // page)]:
                assert self.pool.references(written) == 1, "a page that is written has one text"
            new = made[text.id] = []
            for _ in range(steps):
                token, row = column.tokens[-1], len(column.cells)
                pages[text.pages[row // page]][row % page] = row * VOCABULARY + token
                column.cells.append(row * VOCABULARY + token)
                column.state = absorb(column.state, token)
                token = pick(column.state, self.seeds[text.id])
                column.tokens.append(token)
                new.append(token)
                if not token:
                    column.hole = True
                    ended[text.id] = "stop"
                    break
            self.states[slot] = column.state
        self.steps.append((step, made, ended))

    def report_read(self, seconds: float) -> None:
        assert self.read
        read, self.read = self.read, None
        self.scheduler.done_read(read, seconds)

    def report_step(self, seconds: float) -> None:
        step, made, ended = self.steps.popleft()
        self.scheduler.done_step(step, made, ended, seconds)


@dataclass
class Share:
    """Seconds of reads and of steps, and the most that reads beside running texts had above their share in any stretch of time."""

    share: float
    excess: float = 0.0
    worst: float = 0.0
    longest_read: float = 0.0

    def add_read(self, seconds: float, others_run: bool) -> None:
        self.longest_read = max(self.longest_read, seconds)
        if others_run and self.share < 1:
            self.excess += seconds
            self.worst = max(self.worst, self.excess)

    def add_step(self, seconds: float) -> None:
        if self.share < 1:
            self.excess = max(0.0, self.excess - seconds * self.share / (1 - self.share))

    def is_kept(self) -> bool:
        """Prompts may have saved one read, and one read may take longer than was expected."""
        return self.worst <= 2 * self.longest_read + 1e-9


SHARES = (1 / 3, 0.1, 0.5, 1.0)


def draws(seed: int) -> Iterator[float]:
    """Numbers in [0, 1)."""
    rng = np.random.default_rng((41, seed))
    while True:
        yield from rng.random(256).tolist()


class Schedule:
    """Random arrivals, forks, cancellations and reports. Every text that ends by itself ends with the tokens that it has alone."""

    def __init__(self, number: int) -> None:
        self.draws = draws(number)
        page = (1, 4, 4, 8)[self.below(4)]
        self.pool = PagePool(-(-self.between(8, 48) // page), page)
        self.cache = PrefixCache(self.pool)
        self.limits = Limits(
            slots=(1, 2, 3, 4, 5, 6, 7, 8)[self.below(8)],
            page=page,
            max_rows=self.between(12, 48),
            max_step_tokens=(1, 3, 8, 8)[self.below(4)],
            piece=(2, 5, 8, 16)[self.below(4)],
            prompt_share=SHARES[self.below(4)],
            in_flight=self.between(1, 3),
            recurrent=self.draw() < 0.15,
        )
        self.scheduler = Scheduler(self.limits, self.pool, self.cache)
        self.engine = SimulatedEngine(self.scheduler, {})
        self.step_seconds = (0.0004, 0.0006, 0.001, 0.002)[self.below(4)]
        self.expected: dict[int, list[int]] = {}
        self.texts: list[Text] = []
        self.share = Share(self.limits.prompt_share)
        self.seen: Counter[str] = Counter()
        self.crowded = self.draw() < 0.3
        """Texts that fit at first and grow: most are preempted."""
        self.beginnings = [[1 + self.below(VOCABULARY - 1) for _ in range(16)] for _ in range(2)]

    def draw(self) -> float:
        return next(self.draws)

    def below(self, n: int) -> int:
        return int(next(self.draws) * n)

    def between(self, low: int, high: int) -> int:
        return low + int(next(self.draws) * (high - low + 1))

    def accept(self, text: Text) -> None:
        seed = self.engine.seeds[text.id] = self.below(1000)
        self.expected[text.id] = text.made + continuation(text.tokens, seed, text.limit - len(text.made))
        self.texts.append(text)

    def arrive(self) -> None:
        beginning = self.beginnings[self.below(2)][: self.below(5 if self.crowded else 17)]
        prompt = (*beginning, *(1 + self.below(VOCABULARY - 1) for _ in range(self.between(0 if beginning else 1, 4))))
        text = Text(len(self.texts), "abc"[self.below(3)], prompt, self.between(20, 36) if self.crowded else self.between(1, 20))
        rows = len(prompt) - 1 + min(text.max_tokens, self.limits.max_rows - len(prompt) + 1)
        if len(prompt) > self.limits.max_rows or -(-rows // self.limits.page) > self.pool.n_pages:
            with pytest.raises(ScheduleError):
                self.scheduler.add(text)
        else:
            self.scheduler.add(text)
            self.accept(text)

    def fork(self) -> None:
        if texts := [t for t in self.texts if t.state is not State.ENDED and len(t.made) < t.limit]:
            running = [t for t in texts if t.state is State.RUNNING]
            text = (running or texts)[self.below(len(running or texts))]
            self.accept(self.scheduler.fork(text, len(self.texts)))

    def cancel(self) -> None:
        if self.texts:
            text = self.texts[self.below(len(self.texts))]
            in_work = text.state is not State.ENDED
            assert self.scheduler.cancel(text.id) == in_work
            if in_work:
                self.engine.host.pop(text.id, None)

    def report(self) -> None:
        if self.engine.read and (not self.engine.steps or self.draw() < 0.5):
            self.engine.report_read(self.read_seconds)
        else:
            seconds = self.step_seconds * self.engine.steps[0][0].count * (0.5 + self.draw())
            self.share.add_step(seconds)
            self.engine.report_step(seconds)

    def act(self) -> bool:
        """One action; False: there was none to take."""
        running = self.scheduler.running
        action = self.scheduler.next()
        if isinstance(action, Idle):
            return False
        self.engine.carry_out(action)
        self.count(action)
        if isinstance(action, Read):
            self.read_seconds = self.step_seconds * (0.5 + action.count / 4) * (0.5 + self.draw())
            self.share.add_read(self.read_seconds, running > 0)
        return True

    def count(self, action: Action) -> None:
        self.seen[type(action).__name__] += 1
        match action:
            case Read(matched=matched):
                self.seen["prefix"] += bool(matched)
            case Bring(text, restore):
                self.seen["brought in part"] += len(restore) < len(text.pages)

    def run(self) -> None:
        events: list[Callable[[], None]] = (
            [self.arrive] * (self.between(2, 4) if self.crowded else self.between(1, 4))
            + [self.fork] * self.below(3)
            + [self.cancel] * self.below(2)
        )
        events.sort(key=lambda _: self.draw())
        events.append(self.arrive)
        pace = 0.05 + 0.5 * self.draw()
        for _ in range(1000):
            kind = self.draw()
            if events and kind < pace:
                events.pop()()
            elif self.engine.in_flight and kind > 0.7:
                self.report()
            elif not self.act():
                if self.engine.in_flight:
                    self.report()
                elif events:
                    events.pop()()
                else:
                    break
        self.check_end()

    def check_end(self) -> None:
        assert not self.scheduler.texts, "nobody starves: whoever is in work has work to do"
        for text in self.texts:
            assert text.state is State.ENDED and not text.pages and text.slot < 0 and not text.submitted
            if text.reason == "cancelled":
                assert text.made == self.expected[text.id][: len(text.made)]
            else:
                assert text.made == self.expected[text.id]
                assert text.reason == ("stop" if text.made[-1] == 0 else "length")
        assert self.share.is_kept(), "prompts keep to their share of the time"
        assert not self.engine.host
        assert self.scheduler.waiting == self.scheduler.running == self.scheduler.kept == 0
        assert self.pool.available == self.pool.n_pages
        self.cache.clear()
        assert self.pool.free == self.pool.n_pages
        assert sorted(self.scheduler.slots) == list(range(min(self.limits.slots, self.limits.max_step_tokens)))
