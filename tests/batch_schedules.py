"""Random schedules of a batch, and the simulated engine that carries them out and checks every action."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.scheduler import Action, Bring, Copy, Idle, Keep, Limits, Read, ScheduleError, Scheduler, State, Step, Text

Kernel = tuple[int, int]

STEP: Kernel = (-1, 0)

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
    staged: list[Kernel] = field(default_factory=list)
    host: dict[int, tuple[list[tuple[list[int], list[Kernel]]], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limits, self.pool = self.scheduler.limits, self.scheduler.pool
        self.pages = [[-1] * self.limits.page for _ in range(self.pool.n_pages)]
        self.kernels = [[STEP] * self.limits.page for _ in range(self.pool.n_pages)]
        """What made a row: a step, or a read that began at a row and had so many tokens."""
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
                kept = [(self.pages[p][:], self.kernels[p][:]) for p in action.pages]
                self.host[action.text.id] = kept, self.states.get(action.slot, 0)
                self.columns.pop(action.text.id, None)
            case Bring(text, restore):
                kept, state = self.host.pop(text.id)
                for index in restore:
                    self.write(text.pages[index], *kept[index])
                self.states[text.slot] = state
            case Copy(text, from_slot, from_page, to_page):
                assert (from_page >= 0) == (to_page >= 0) == bool(text.rows % self.limits.page)
                if to_page >= 0:
                    self.write(to_page, self.pages[from_page], self.kernels[from_page])
                self.states[text.slot] = self.states.get(from_slot, 0)

    def write(self, page: int, rows: list[int], kernels: list[Kernel]) -> None:
        assert self.pool.references(page) == 1, "a page that is written has one text"
        self.pages[page][: len(rows)] = rows
        self.kernels[page][: len(rows)] = kernels

    def carry_out_read(self, read: Read) -> None:
        text, rows = read.text, read.text.length - 1
        assert self.read is None and 1 <= read.count <= self.limits.piece and read.first + read.count <= rows
        assert not (read.matched and self.limits.recurrent)
        assert not (read.store and self.scheduler.kept), "kept texts run again before others begin to"
        if read.matched or not read.first:
            self.staging = [cell for page in read.matched for cell in self.pages[page]]
            self.staged = [kernel for page in read.matched for kernel in self.kernels[page]]
        assert len(self.staging) == read.first
        self.staging += cells(text.tokens[read.first : read.first + read.count], read.first)
        self.staged += [(read.first, read.count)] * read.count
        assert self.staging == cells(text.tokens[: len(self.staging)]), "the staging cache holds the text's own rows"
        page = self.limits.page
        for index in read.store:
            part = slice(index * page, (index + 1) * page)
            self.write(text.pages[index], self.staging[part], self.staged[part])
        assert (len(self.staging) == rows) == bool(read.store) or text.pages, "the last piece stores what was not found"
        if len(self.staging) == rows:
            assert text.slot >= 0 and len(text.pages) == -(-rows // page)
            state = 0
            for token in text.tokens[:rows]:
                state = absorb(state, token)
            self.states[text.slot] = state
        self.read = read

    def carry_out_step(self, step: Step) -> None:
        limits = self.limits
        taken = sum(c.tokens for c in step.columns)
        assert 1 <= len(step.columns) <= taken <= min(limits.max_step_tokens, step.width), "a column for each token"
        assert step.width in (limits.classes or [taken]), "there is a program of that width"
        assert len(self.steps) < limits.in_flight and step.count == max(1, *(c.steps for c in step.columns))
        assert len({c.slot for c in step.columns}) == len(step.columns)
        self.columns = {c.text.id: self.columns[c.text.id] for c in step.columns if c.text.id in self.columns}
        made: dict[int, list[int]] = {}
        ended: dict[int, str] = {}
        for text, slot, steps, tokens, first, _ in step.columns:
            assert text.state is State.RUNNING and text.slot == slot < limits.slots and steps >= 0 and tokens >= 1
            column = self.columns.get(text.id)
            if column is None:
                known = text.tokens
                assert first == len(known) - tokens if steps else first + tokens < len(known), "it begins where its rows end"
                assert tokens == 1 or (tokens <= limits.prefill and not limits.recurrent)
                column = Column(known[: first + 1], cells(known[:first]), 0)
                for token in known[:first]:
                    column.state = absorb(column.state, token)
                if steps:
                    self.columns[text.id] = column
                if limits.recurrent:
                    assert not first or self.states[slot] == column.state, "the slot holds the state of its own text"
                for row in range(first, first + tokens - (steps > 0)):  # these make no token
                    self.take(text, column, steps)
                    column.tokens.append(known[row + 1])
            if column.hole or not steps:
                continue
            new = made[text.id] = []
            for left in range(steps, 0, -1):
                self.take(text, column, left)
                token = pick(column.state, self.seeds[text.id])
                column.tokens.append(token)
                new.append(token)
                if not token:
                    column.hole = True
                    ended[text.id] = "stop"
                    break
            self.states[slot] = column.state
        self.steps.append((step, made, ended))

    def take(self, text: Text, column: Column, steps: int) -> None:
        """The last token of a column goes through the model: it reads the rows of its text, and stores its own; `steps` - 1 follow."""
        page, pages, row, token = self.limits.page, self.pages, len(column.cells), column.tokens[-1]
        assert row + max(steps, 1) <= min(len(text.pages) * page, self.limits.max_rows), "pages are assigned in advance"
        found: list[int] = []
        for held in text.pages[: -(-row // page)]:
            found += pages[held]
        assert found[:row] == column.cells, f"text {text.id} reads rows that are not its own"
        if self.limits.pinned:
            made_by = [kernel for held in text.pages[: -(-row // page)] for kernel in self.kernels[held]][:row]
            assert made_by == self.kernels_alone(text, row), f"text {text.id} reads rows that it would not have alone"
        written = text.pages[row // page]
        assert self.pool.references(written) == 1, "a page that is written has one text"
        pages[written][row % page] = row * VOCABULARY + token
        self.kernels[written][row % page] = STEP
        column.cells.append(row * VOCABULARY + token)
        column.state = absorb(column.state, token)

    def kernels_alone(self, text: Text, rows: int) -> list[Kernel]:
        """What makes the first rows of a text when nobody else is served, and nobody was before."""
        read, piece = len(text.prompt) - 1, self.limits.piece
        if read < min(self.limits.prefill, self.limits.border):
            read = 0
        pieces = [(first, min(piece, read - first)) for first in range(0, read, piece)]
        return [piece for piece in pieces for _ in range(piece[1])] + [STEP] * (rows - read)

    def report_read(self, seconds: float) -> None:
        assert self.read
        read, self.read = self.read, None
        self.scheduler.done_read(read, seconds)

    def report_step(self, seconds: float) -> None:
        step, made, ended = self.steps.popleft()
        self.scheduler.done_step(step, made, ended, seconds)


@dataclass
class Share:
    """Seconds of prompts (reads, and what they add to steps) and of steps, and the most that prompts beside running texts had above their
    share in any stretch of time."""

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
        """Prompts may have saved one read or wide step, and one read may take longer than was expected."""
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
            classes=((), (1, 2, 4, 8), (1, 2, 4, 6, 8, 16), (1, 2, 3, 6, 8))[self.below(4)],
            prefill=(0, 3, 8, 40)[self.below(4)],
            waiting_weight=(0.0, 4.0)[self.below(2)],
            pinned=self.draw() < 0.35,
        )
        if self.limits.recurrent:
            self.limits = replace(self.limits, prefill=0)
        self.scheduler = Scheduler(self.limits, self.pool, self.cache)
        self.engine = SimulatedEngine(self.scheduler, {})
        self.step_seconds = (0.0004, 0.0006, 0.001, 0.002)[self.below(4)]
        self.probed = self.draw() < 0.5 and bool(self.limits.classes)
        if self.probed:
            for width in self.limits.classes:
                self.scheduler.probed(width, self.seconds_of(width))
        self.expected: dict[int, list[int]] = {}
        self.texts: list[Text] = []
        self.share = Share(self.limits.prompt_share)
        self.share_holds = not self.limits.waiting_weight and (self.probed or not self.limits.prefill)
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
        """Not with pinned steps: whether a fork shares rows that steps made, or reads them, depends on when it is admitted."""
        if self.limits.pinned:
            return
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
            step = self.engine.steps[0][0]
            others = sum(c.steps > 0 and c.tokens == 1 for c in step.columns)
            alone = self.seconds_of(self.scheduler.width(others)) if others else 0.0
            prompts = self.seconds_of(step.width) - alone
            seconds = step.count * alone * (0.5 + self.draw())
            self.share.add_read(prompts, others > 0)
            self.share.add_step(seconds)
            self.engine.report_step(seconds + prompts)

    def seconds_of(self, width: int) -> float:
        """Of a step with a program of so many columns; one of six is slower than the next."""
        return self.step_seconds * (1 + (width + 3 * (width == 6)) / 8)

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
                self.seen["prefix of pinned pieces"] += bool(matched) and self.limits.pinned
            case Bring(text, restore):
                self.seen["brought in part"] += len(restore) < len(text.pages)
            case Step(columns=columns, width=width):
                prefilled = [c for c in columns if c.tokens > 1 or not c.steps]
                self.seen["prefilled"] += bool(prefilled)
                self.seen["prefilled beside others"] += 0 < len(prefilled) < len(columns)
                self.seen["prefilled in pieces"] += any(not c.steps for c in prefilled)
                self.seen["several prefilled at once"] += len(prefilled) > 1
                self.seen["a wider program than the next"] += width > min(
                    (n for n in self.limits.classes if n >= sum(c.tokens for c in columns)), default=width
                )

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
        assert self.share.is_kept() or not self.share_holds, "prompts keep to their share of the time"
        assert not self.engine.host
        assert self.scheduler.waiting == self.scheduler.running == self.scheduler.kept == 0
        assert self.pool.available == self.pool.n_pages
        self.cache.clear()
        assert self.pool.free == self.pool.n_pages
        assert sorted(self.scheduler.slots) == list(range(min(self.limits.slots, self.limits.max_step_tokens)))
