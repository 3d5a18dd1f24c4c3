"""Drafts of a text's next tokens, on the host: what is asked for, how well they would have done, and how wide the next step is.

A step of n columns takes the text's last token and n - 1 drafts through the model, and accepts the drafts that the model picks itself
(vkback/ops/sampling/lookup.py, drafts.py). It pays where the tokens it makes are more than its time is that of a step without drafts. The
host sees every token, and so knows without running anything how many drafts would have been right: it looks them up as the device does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vkback.errors import VkbackError
from vkback.ops.case import Array
from vkback.ops.sampling.lookup import ACCEPTED, ACCEPTED_AT, DRAFTED, DRAFTED_AT, STEPS

CLASSES = (4, 8, 16)
"""Columns of a step with drafts. More classes take longer to compile; between these the time of a step hardly differs."""

MOST = CLASSES[-1] - 1

WINDOW = 16
"""Latest tokens whose drafts tell how well the next ones will do."""

ENOUGH = 8
"""Tokens before anything is concluded."""

ENTRY = 1.1
"""Gain at which drafts begin; they go on down to 1."""


CHEAP = 1.5
"""Of a step without drafts: what one may take before a draft of the text was right. Where all take more, it is the narrowest."""

KEPT_SHARE = 0.9
"""Of the weight of a step's drafts when the next one is counted."""

LOSS, LOSS_SHARE = 3.0, 0.01
"""Most that drafts may cost a text: tokens' time, and share of it. What is lost before a text is known to go another way is within."""

PAUSE, LONGEST_PAUSE = 16, 64
"""Tokens without drafts after two tries in a row none of whose drafts was right, where drafts have lost so far; twice as many after each
further one. Two tries are in flight before the first one's result is known."""

MAX_RECURRENT = 8
"""Columns of a step of a recurrent model, unless it is pinned: each column keeps a state of all layers."""

KEPT_BYTES = 1 << 29
"""Of recurrent states that are kept to go back to, at most: narrower steps need fewer."""

SEARCHED = 8192
"""Latest tokens in which the host looks for matches; the device looks through all."""


class DraftError(VkbackError):
    """Drafts that cannot be had as asked."""


@dataclass(frozen=True)
class Drafts:
    """What a text asks for.

    most     drafts of a step; 0: none
    least    fewer than so many are not tried
    match    tokens that must agree before a place of the text is copied from
    pinned   columns of every step, also of those without drafts: every token then has the same bits whatever the drafts are. 0: as pays
    earlier  drafts also from texts that the engine has left
    model    drafts are those of the draft model, which the engine has
    p_min    probability that it must give to a draft; the first one that has less, and those behind it, are none
    known    drafts by position of the text, -1 for none, in place of those that are found: for tests and measurements
    """

    most: int = MOST
    least: int = 0
    match: int = 1
    pinned: int = 0
    earlier: bool = False
    model: bool = False
    p_min: float = 0.0
    known: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.match < 1:
            raise DraftError(
                f"[drafts] at most {self.most} drafts of a step, at least {self.least}, matches of {self.match}; "
                "expected 0 <= least <= most, and a match of 1 or more"
            )
        if self.pinned and self.pinned not in CLASSES:
            raise DraftError(f"[drafts] {self.pinned} columns of every step; expected one of {', '.join(map(str, CLASSES))}, or 0")

    def at_most(self, count: int | None) -> Drafts:
        """The same with no more than so many drafts of a step; None: the same."""
        most = self.most if count is None else min(count, self.most)
        return replace(self, most=most, least=min(self.least, most))

    def of_text(self) -> Drafts:
        """The same without a draft model."""
        return replace(self, model=False)

    @property
    def classes(self) -> tuple[int, ...]:
        """Columns of the steps that may run: the smallest that takes `most` drafts, and those below."""
        if self.pinned:
            return (self.pinned,)
        enough = next((c for c in CLASSES if c > self.most), CLASSES[-1])
        if self.model and self.most:
            return (enough,)
        return tuple(c for c in CLASSES if c <= enough) if self.most else ()


def kept_slots(drafts: Drafts | None, slot_bytes: int) -> int:
    """Slots of recurrent states, of so many bytes each, that steps with these drafts need: one for each column, and the one that is read.
    Two where there are no drafts, or the states are too large for them; a pinned step has what it needs."""
    if drafts is None or not drafts.classes:
        return 2
    fit = [c + 1 for c in drafts.classes if c == drafts.pinned or (c <= MAX_RECURRENT and (c + 1) * slot_bytes <= KEPT_BYTES)]
    return max(fit, default=2)


@dataclass(frozen=True)
class DraftCounts:
    """Of a text so far. by_place: (drafts, accepted ones) of column 1, 2, ..."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_place: tuple[tuple[int, int], ...] = ()

    @classmethod
    def read(cls, words: Array) -> DraftCounts:
        places = zip(words[DRAFTED_AT:][:MOST].tolist(), words[ACCEPTED_AT:][:MOST].tolist(), strict=True)
        return cls(int(words[STEPS]), int(words[DRAFTED]), int(words[ACCEPTED]), tuple(p for p in places if p[0]))

    def __add__(self, other: DraftCounts) -> DraftCounts:
        more, fewer = sorted((self.by_place, other.by_place), key=len, reverse=True)
        padded = [*fewer, *[(0, 0)] * (len(more) - len(fewer))]
        by_place = tuple((a + c, b + d) for (a, b), (c, d) in zip(more, padded, strict=True))
        return DraftCounts(self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted, by_place)


def tokens_per_step(hits: Sequence[bool], columns: int) -> float:
    """Tokens that steps of so many columns make of a text, of whose tokens each could (True) or could not be drafted."""
    steps = at = 0
    while at < len(hits):
        steps += 1
        end = at + columns - 1
        while at < min(end, len(hits)) and hits[at]:
            at += 1
        at += 1  # what the last column picks is made in any case
    return at / steps if steps else 1.0


class Probe:
    """Tells of each token of a text whether it could have been drafted."""

    def __init__(self, text: Sequence[int], earlier: Sequence[int] = ()) -> None:
        """earlier: tokens of earlier texts, each followed by -1."""
        begin = [*earlier[-SEARCHED:], -1, *text[-SEARCHED:]]
        self._ids = np.full(2 * len(begin) + 1024, -1, np.int64)
        self._ids[: len(begin)] = begin
        self._end = len(begin)
        self._next = self._match()
        self.hits: deque[bool] = deque(maxlen=WINDOW)

    def take(self, token: int) -> None:
        """This one came."""
        hit = self._next > 0 and int(self._ids[self._next]) == token
        self.hits.append(hit)
        if self._end == len(self._ids):
            kept = self._ids[max(self._end - 2 * SEARCHED, 0) : self._end]
            self._next -= self._end - len(kept)
            self._ids = np.concatenate([kept, np.full(len(kept) + 1024, -1, np.int64)])
            self._end = len(kept)
        self._ids[self._end] = token
        self._end += 1
        self._next = self._next + 1 if hit and self._next >= 0 else self._match()

    def ahead(self, count: int) -> list[int]:
        """At most so many tokens that may follow."""
        first, found = self._next, list[int]()
        period = self._end - first
        while first > 0 and len(found) < count and (token := int(self._ids[first + len(found) % period])) >= 0:
            found.append(token)
        return found

    def _match(self) -> int:
        """Where what may come next stands; 0: nowhere."""
        ids, end = self._ids, self._end
        first = max(end - 2 * SEARCHED, 0)
        places = np.flatnonzero(ids[first : end - 1] == ids[end - 1]) + first
        if not len(places) or ids[end - 1] < 0:
            return 0
        for back in range(1, 32):
            longer = places[ids[places - back] == ids[end - 1 - back]] if back < end - 1 else places[:0]
            longer = longer[longer >= back]
            if not len(longer) or ids[end - 1 - back] < 0:
                break
            places = longer
        return int(places[-1]) + 1


@dataclass(frozen=True)
class StepTimes:
    """Time of a step by its columns, in that of a step without drafts."""

    of: Mapping[int, float]

    @classmethod
    def of_seconds(cls, plain: float, by_class: Mapping[int, float]) -> StepTimes:
        """Rounded to a twentieth, so that a text's steps do not hang on noise."""
        return cls({c: max(round(20 * s / plain) / 20, 0.05) for c, s in by_class.items()})


GUESSED = StepTimes({4: 1.5, 8: 1.7, 16: 2.0})
"""Before anything was measured: drafts that do not pay with these are not worth the time that measuring takes."""


def steps_at_once(tokens: int) -> int:
    """Steps of a submit once drafts have paid, where it may have so many tokens without: a step with drafts takes up to twice as long."""
    return max(1, tokens // 2)


@dataclass
class Submitted:
    """Steps in flight: their columns (1: without drafts), how many, and how many tokens they are expected to make."""

    columns: int
    steps: int
    expected: float


class Pace:
    """What the next submit of a text of n tokens is.

    times   None: no drafts yet. A text's first ones begin with a new Pace, which may have to wait until they are compiled and measured; so
            the same text is made by the same steps whether or not they were
    """

    def __init__(self, drafts: Drafts | None, n: int, at_once: int, probe: Probe | None, times: StepTimes | None) -> None:
        """at_once: tokens of a submit without drafts. probe: None where the width is given."""
        self._drafts, self._n, self._at_once, self.probe, self._times = drafts, n, at_once, probe, times
        self._columns = 1
        self._most_steps = steps_at_once(at_once)
        self._saved = 0.0  # time of a token, so often
        self._failed = self._pause = self._paused_to = 0
        self._proven = False  # a draft of the latest step that had any was right
        self._recent: deque[float] = deque(maxlen=WINDOW)  # tokens of a step with drafts, by submit
        self.made = 0
        self.flying: deque[Submitted] = deque()

    def take(self, tokens: Iterable[int]) -> None:
        """What the oldest submit in flight has made."""
        count = 0
        for token in tokens:
            count += 1
            if self.probe is not None:
                self.probe.take(token)
        self.made += count
        done = self.flying.popleft()
        if done.columns > 1:
            self._recent.append(count / done.steps)
        if done.columns > 1 and self._times is not None and self.made < self._n:
            self._saved += count - done.steps * self._times.of[done.columns]
            self._note(right=count > done.steps)

    def _note(self, *, right: bool) -> None:
        """Of a submit with drafts: whether any was right."""
        self._proven = right
        if right:
            self._failed = self._pause = self._paused_to = 0
            return
        self._failed += 1
        if self._failed > 1 and self._saved < 0:
            self._pause = min(max(2 * self._pause, PAUSE), LONGEST_PAUSE)
            self._paused_to = self.made + self._pause

    @property
    def wants_drafts(self) -> bool:
        """Whether drafts would pay for the first time."""
        return self._times is None and self.probe is not None and self._n - self.made >= 2 * WINDOW and self._best(GUESSED) > 1

    def next(self) -> Submitted | None:
        """None: only once something in flight has ended."""
        flying, n = self.flying, self._n
        if self.made + sum(f.steps for f in flying) >= n or (flying and self.made + sum(f.expected for f in flying) >= n):
            return None
        pinned = self._drafts.pinned if self._drafts is not None else 0
        columns = pinned or self._chosen()
        left = n - self.made - sum(f.expected for f in flying)
        if columns > 1:
            rate = self._rate(columns)
            steps = self._most_steps if (self._saved > 0 or pinned) and self._most_steps * rate <= left else 1
            chosen = Submitted(columns, steps, steps * rate)
        else:
            most = self.made + sum(f.steps * f.columns for f in flying)  # steps without drafts do not know where to end
            if most + 1 > n:
                return None
            steps = self._at_once if most + self._at_once <= n else 1
            chosen = Submitted(1, steps, steps)
        self._columns = columns
        flying.append(chosen)
        return chosen

    def _chosen(self) -> int:
        if self._pause and (self.made < self._paused_to or any(f.columns > 1 for f in self.flying)):
            return 1  # behind a pause one try at a time
        return self._best(self._times) if self._times is not None else 1

    def _rate(self, columns: int) -> float:
        """Tokens that a step of so many columns is expected to make. Too few, and steps are in flight when a text ends, and waited for."""
        if self.probe is not None and self.probe.hits:
            return tokens_per_step(list(self.probe.hits), columns)
        return sum(self._recent) / len(self._recent) if self._recent else 1.0

    def _best(self, times: StepTimes) -> int:
        """Columns of the step that makes the most tokens in its time; until a draft was right, of one that costs little if none is."""
        if self._drafts is None or self.probe is None or len(self.probe.hits) < ENOUGH or self._saved < -(LOSS + LOSS_SHARE * self.made):
            return 1
        hits = list(self.probe.hits)
        gains = {c: tokens_per_step(hits, min(c, self._drafts.most + 1)) / times.of[c] for c in self._drafts.classes if c in times.of}
        enough = 1.0 if self._columns > 1 else ENTRY
        pay = {c: gain for c, gain in gains.items() if gain > enough}
        if not self._proven:
            pay = {c: gain for c, gain in pay.items() if times.of[c] <= CHEAP} or dict(list(pay.items())[:1])
        return max(pay, key=lambda c: pay[c], default=1)


LONGEST_REST = 31
"""Tokens before the next guess, at most, where guesses have no part in a step again and again."""


class Rest:
    """Of a text with a constraint: whether the host guesses at what comes next. A mask for each guess takes time, so that guesses without
    use are made ever more seldom. What alone may come is no guess."""

    def __init__(self) -> None:
        self._left = self._next = 0

    def note(self, *, used: bool) -> None:
        """Drafts were found, and had a part in a step or none."""
        if used or self._left < 0:
            self._next = 0 if used else min(2 * self._next + 1, LONGEST_REST)
            self._left = self._next

    def over(self) -> bool:
        """Call it once a token."""
        self._left = max(self._left - 1, -1)
        return self._left < 0


class HostPace:
    """Of a text between whose tokens the host is needed: it looks drafts up itself, and a submit is one step.

    times  of steps; None: none were measured, and `wants_drafts` says when they should be
    rest   of its guesses
    """

    def __init__(self, drafts: Drafts, times: StepTimes | None) -> None:
        self._drafts, self._times = drafts, times
        self.rest = Rest()
        self._right, self._tried = 1.0, 1.25  # of the latest drafts; at first most are
        self._saved, self._made = 0.0, 0

    def take(self, drafts: Sequence[int], made: Sequence[int], columns: int) -> None:
        """A step with these drafts, or one that had none though these were found, has made these tokens."""
        right = next((i for i, (a, b) in enumerate(zip(drafts, made, strict=False)) if a != b), min(len(drafts), len(made)))
        tried = min(right + 1, len(drafts), len(made))
        if tried:
            self._right, self._tried = KEPT_SHARE * self._right + right, KEPT_SHARE * self._tried + tried
        self._made += len(made)
        if drafts:
            self.rest.note(used=columns > 1)
        if columns > 1 and self._times is not None:
            self._saved += len(made) - self._times.of[columns]

    def columns(self, count: int) -> int:
        """Of a step for which so many drafts are found."""
        if self._drafts.pinned:
            return self._drafts.pinned
        return self._best(count, self._times) if self._times is not None else 1

    def wants_drafts(self, count: int, left: int) -> bool:
        """Whether drafts would pay for the first time, with so many tokens to come."""
        return self._times is None and not self._drafts.pinned and left >= 2 * WINDOW and self._best(count, GUESSED) > 1

    def _best(self, count: int, times: StepTimes) -> int:
        if not count or count < self._drafts.least or self._saved < -(LOSS + LOSS_SHARE * self._made):
            return 1
        share = self._right / self._tried
        best, gain = 1, ENTRY
        for c in (c for c in self._drafts.classes if c in times.of):
            tokens = sum(share**i for i in range(min(count, c - 1) + 1))
            if tokens / times.of[c] > gain:
                best, gain = c, tokens / times.of[c]
        return best


class ModelPace(Pace):
    """Of a text whose drafts a model makes, with a class of step: all steps have it while that pays."""

    def __init__(self, drafts: Drafts, n: int, at_once: int, columns: int, times: StepTimes | None) -> None:
        super().__init__(drafts, n, at_once, None, times)
        self._width = columns

    @property
    def lost(self) -> bool:
        """Whether steps without drafts are faster."""
        if self._times is None or len(self._recent) < ENOUGH:
            return False
        return self._rate(self._width) < self._times.of[self._width] or self._saved < -(LOSS + LOSS_SHARE * self.made)

    def _chosen(self) -> int:
        return self._width
