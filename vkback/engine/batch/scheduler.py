"""What a batch does next: which text is read, which texts take a step, which text makes room for others.

Only policy: nothing here touches a device, starts a thread or looks at a clock. The caller asks `Scheduler.next` for an action, carries it
out, and reports reads and steps with the seconds they took. Actions take effect in the order in which they were given, as the submits of
one queue do: a page that one action frees (Keep, the pages that a Read matched) may be written by the next.

A text of n tokens (prompt and made) has n - 1 rows in its pages: its last token is the input of its next step, which stores row n - 1 and
makes token n + 1. So a prompt of P tokens is read up to row P - 2.

Prompts are read in two ways. A Read runs a program of many tokens, beside which no step runs. A short prompt, or what the prefix cache does
not have of one, is *prefilled in steps*: its tokens are columns of the steps of the texts that run, several in one step. Only the column of
its last token makes a token.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from math import lcm
from typing import NamedTuple

from vkback.checks import number, whole
from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.shares import DRAFT_WIDTHS, best_share
from vkback.engine.drafts import LOSS_SHARE
from vkback.errors import ModelError

SUBMIT_SECONDS = 0.004
"""Work of one submit: long enough that submitting costs little of it, short enough that a client that leaves is noticed."""
LOST_STEPS = 8
"""Steps whose time drafts may cost before they rest."""
FORGET = 0.99
"""What is left of a class's seconds with drafts after each step without: what was measured while others had the machine is tried again."""
KEPT_IDS = 64
"""Tokens that a text may make in a submit: as many as its loop keeps."""
MAX_STEPS = 8
"""Most steps in a submit."""
SMOOTHING = 0.5
"""Weight of the latest time among those measured before."""


class ScheduleError(ModelError):
    """A text that cannot be served, or a report that fits no action in flight."""


class State(Enum):
    """Where a text is. KEPT: preempted, its pages are on the host."""

    WAITING = "waiting"
    READING = "reading"
    RUNNING = "running"
    KEPT = "kept"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Text:
    """A request in work. The first four fields are the caller's, the others the scheduler's.

    id: unique among the texts in work. client: whose text it is; clients take turns. prompt: at least one token. max_tokens: most tokens
    made. made: tokens made and reported. pages: physical pages of its rows, by row / page; they only grow while it runs. slot: its row of
    the page table, -1 without one. rows: while it is read those in the staging cache; then those in its pages (kept: on the host), as
    reported. submitted: steps submitted and not reported yet, each of which makes a token. ahead: rows that what is submitted and not
    reported stores. reason: why it ended. limit: most tokens made, its rows considered. arrival: its place in the order of arrival.
    source: the text whose pages a fork shares when it is admitted. gains: the caller's: tokens that a step is expected to make of it with
    0, 1, ... drafts; none: it takes no drafts. root: of its pages in the prefix cache (the caller's, too).
    """

    id: int
    client: str
    prompt: tuple[int, ...]
    max_tokens: int
    made: list[int] = field(default_factory=list)
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    rows: int = 0
    submitted: int = 0
    ahead: int = 0
    reason: str = ""
    limit: int = 0
    arrival: int = 0
    source: Text | None = field(default=None, repr=False)
    gains: tuple[float, ...] = field(default=(), repr=False)
    root: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and tokens made."""
        return [*self.prompt, *self.made]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.prompt) + len(self.made)

    @property
    def left(self) -> int:
        """Steps that may still be submitted."""
        return self.limit - len(self.made) - self.submitted

    @property
    def rest(self) -> int:
        """Tokens that its next step could take: more than one while it is prefilled in steps."""
        return 1 if self.submitted else self.length - self.rows - self.ahead

    @property
    def most_rows(self) -> int:
        """Rows that it has when it ends at its limit."""
        return len(self.prompt) - 1 + self.limit


@dataclass(frozen=True)
class Limits:
    """slots: rows of the page table. page: rows of a page. max_rows: most rows of a sequence. max_step_tokens: most columns of a step; so
    many texts run at most. classes: columns of the programs of steps, in order; none: there is one for each number. piece: most prompt
    tokens of a read. prefill: most tokens of a text that are prefilled in steps; 0: all prompts are read. prompt_share: most share of the
    time for prompts while others run, above 0; 1: prompts go first. waiting_weight: of a text that waits behind the one that is read,
    against a running one, in the share that prompts take; 0: none. in_flight: most steps submitted and not reported. recurrent: the model
    has states beside the pages, so that no prefix is reused, and a step takes no more than one token of a text. pinned: how a prompt is
    read depends on its length alone: all pieces but the last have `piece` tokens, and texts share only rows of such pieces
    (docs/batch_invariance.md). reuse: a text may begin with pages of others. Raises OptionError for a value that cannot be."""

    slots: int
    page: int
    max_rows: int
    max_step_tokens: int = 64
    piece: int = 512
    prompt_share: float = 1 / 4
    in_flight: int = 2
    waiting_weight: float = 0.0
    recurrent: bool = False
    classes: tuple[int, ...] = ()
    prefill: int = 0
    pinned: bool = False
    reuse: bool = True

    @property
    def border(self) -> int:
        """Texts share rows up to a multiple of it."""
        return lcm(self.page, self.piece) if self.pinned else self.page

    def __post_init__(self) -> None:
        for name in ("slots", "page", "max_rows", "max_step_tokens", "piece", "in_flight"):
            whole(name, getattr(self, name), "a whole number of at least 1", 1, "batch")
        number("prompt_share", self.prompt_share, "a number from 0.01 to 1", 0.01, 1, "batch")
        whole("prefill", self.prefill, "a whole number, 0 or more", 0, "batch")


@dataclass(frozen=True, eq=False)
class Read:
    """Read tokens [first, first + count) of a text into rows of the same numbers of the staging cache. matched: before that, copy these
    pages to rows [0, len(matched) * page) of the staging cache; the first piece may have them. store: after that, copy the rows of
    text.pages[i], i in store, from the staging cache to that page, and recurrent states to text.slot; the last piece has them, and after
    it the text runs."""

    text: Text
    first: int
    count: int
    matched: tuple[int, ...]
    store: range


class Column(NamedTuple):
    """A text in a step. steps: how many of the submit's steps it takes, each of which makes a token; fewer than all where it is at its
    limit then; 0: it is prefilled, and more of it is to come. tokens: of the text that the first of these steps takes, a column of the
    device for each: text.tokens[first : first + tokens], at rows of the same numbers. first -1: one token, which the step before makes.
    drafts: further columns, of which each step may make a token more."""

    text: Text
    slot: int
    steps: int
    tokens: int
    first: int
    drafts: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """Run `count` steps of these texts in one submit, with a program of `width` columns. Where a text's first row is row 0, recurrent
    states begin at zero. Who made tokens in the step before and is not in this one has become a hole. Pages for all rows are assigned.
    prefill_seconds: of it that prompts were charged for."""

    columns: tuple[Column, ...]
    count: int
    width: int
    prefill_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Keep:
    """Preempt a text: copy its rows (text.rows; pages: where they are) and the state in its slot to the host. Page and slot may then be
    another's."""

    text: Text
    pages: tuple[int, ...]
    slot: int


@dataclass(frozen=True, eq=False)
class Bring:
    """A kept text runs again: copy the rows of text.pages[i], i in restore, and the state of text.slot back from the host. The other pages
    were found in the prefix cache."""

    text: Text
    restore: range


@dataclass(frozen=True, eq=False)
class Copy:
    """A fork runs: copy page from_page to to_page (-1, -1: none) and, for recurrent models, the state of slot from_slot to text.slot."""

    text: Text
    from_slot: int
    from_page: int
    to_page: int


@dataclass(frozen=True, eq=False)
class Idle:
    """Nothing to do before the next report or the next text."""


Action = Read | Step | Keep | Bring | Copy | Idle


class Scheduler:
    """Decides for the texts in work.

    Clients take turns at admission; within a client the first text comes first. One text is read at a time; any number are prefilled in
    steps. While others run, reads, and the columns that prompts add to steps, take at most prompt_share of the time. When pages are short,
    the prefix cache loses pages first; then the running text that came last is kept on the host. Kept texts come back before others are
    admitted. Counters: preemptions; prefilled: tokens of prompts in steps, but for the last of each.
    """

    def __init__(self, limits: Limits, pool: PagePool, cache: PrefixCache) -> None:
        """cache: over this pool. Raises ScheduleError where the pool has pages of another size than the limits say."""
        if pool.page != limits.page:
            raise ScheduleError(f"[batch] the pool's pages have {pool.page} rows; expected {limits.page}, as the limits say")
        self.limits, self.pool, self.cache = limits, pool, cache
        self.texts: dict[int, Text] = {}
        """Texts in work by id; one that has ended is no longer here when its pages are released."""
        self.preemptions = self.prefilled = 0
        self.most_steps = MAX_STEPS
        """Of a submit; 1 where the host has to see every step."""
        self._arrivals = 0
        self.slots = list(range(min(limits.slots, limits.max_step_tokens)))
        """Rows of the page table that nobody has, the least first."""
        heapify(self.slots)
        self._waiting: OrderedDict[str, dict[int, Text]] = OrderedDict()
        """Texts by client, the client whose turn is next first."""
        self._running: dict[int, Text] = {}
        self._kept: dict[int, Text] = {}
        self._copies: deque[Copy] = deque()
        self._steps: deque[Step] = deque()
        """Those in flight, the oldest first."""
        self._reader: Text | None = None
        """The text that is read, or that has been read and waits for pages."""
        self._known = 0
        """Pages that the prefix cache had of it when last looked up."""
        self._read: Read | None = None
        """The read in flight."""
        self._charged: float | None = None
        """Seconds of it that prompts were charged for; None: nobody ran."""
        self._read_seconds: dict[int, float] = {}
        """Of a read, by the bits of its number of tokens."""
        self._step_seconds: dict[int, float] = {}
        """Of a step, by the columns of its program."""
        self._draft_seconds: dict[int, float] = {}
        """The same, of steps with drafts."""
        self._draft_widths: set[int] = set()
        """Columns of steps with drafts that were run."""
        self._draft_saved = 0.0
        """Seconds that steps with drafts took less than others would have, where they took more."""
        self._drafted = False
        """Whether the last step had drafts."""
        self._probed: dict[int, float] = {}
        """The same, of steps of nothing but holes."""
        self._credit = 0.0
        """Seconds that prompts may take while others run."""

    @property
    def waiting(self) -> int:
        """Texts that wait for admission."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Texts that take steps."""
        return len(self._running)

    @property
    def kept(self) -> int:
        """Texts that are on the host."""
        return len(self._kept)

    def add(self, text: Text) -> None:
        """Puts a text in work. Where a sequence has no rows for max_tokens, the text ends when they are full. Raises ScheduleError for a
        text that can never be served."""
        who, length, limits = f"[batch] text {text.id}", len(text.prompt), self.limits
        if text.id in self.texts:
            raise ScheduleError(f"{who}: is in work already; expected an id of its own")
        if text.state is not State.WAITING or text.rows or text.arrival:
            raise ScheduleError(f"{who}: was in work before ({text.state.value}); expected a new Text")
        if not length:
            raise ScheduleError(f"{who}: has an empty prompt; expected at least one token")
        if text.max_tokens <= len(text.made):
            raise ScheduleError(f"{who}: max_tokens is {text.max_tokens}; expected more than the {len(text.made)} tokens that it has made")
        if length + len(text.made) > limits.max_rows:
            raise ScheduleError(
                f"{who}: has {length + len(text.made)} tokens; expected at most {limits.max_rows}, the rows of a sequence; "
                "shorten it or load the model with a larger context"
            )
        text.limit = min(text.max_tokens, limits.max_rows - length + 1)
        if (pages := self.pool.pages_for(text.most_rows)) > self.pool.n_pages:
            raise ScheduleError(
                f"{who}: {length} tokens of prompt and {text.limit} new ones fill {text.most_rows} rows, which are {pages} pages of "
                f"{limits.page}; expected at most {self.pool.n_pages} pages, all that there are; "
                "ask for fewer tokens or give the caches more memory"
            )
        self._arrivals += 1
        text.arrival = self._arrivals
        self.texts[text.id] = text
        self._waiting.setdefault(text.client, {})[text.id] = text

    def fork(self, text: Text, new_id: int, max_tokens: int | None = None) -> Text:
        """Puts a second text with the same tokens so far in work, of the same client. Where the first one runs when the second is admitted,
        they share full pages; else it is read like others. max_tokens: most made, those so far included; default: as of the first one.
        Raises ScheduleError where the first one has ended."""
        if self.texts.get(text.id) is not text or text.state is State.ENDED:
            raise ScheduleError(f"[batch] text {text.id}: is not in work, so that it cannot be forked; expected one that has not ended")
        most = text.max_tokens if max_tokens is None else max_tokens
        fork = Text(new_id, text.client, text.prompt, most, list(text.made), source=text, root=text.root)
        self.add(fork)
        return fork

    def cancel(self, text_id: int, reason: str = "cancelled") -> bool:
        """Ends a text: no action that follows is for it. False: no such text is in work."""
        text = self.texts.get(text_id)
        if text is None or text.state is State.ENDED:
            return False
        self._end(text, reason)
        return True

    def steps_per_submit(self, step_seconds: float) -> int:
        """Steps that make about SUBMIT_SECONDS of work, 1 to MAX_STEPS."""
        return max(1, min(MAX_STEPS, round(SUBMIT_SECONDS / step_seconds))) if step_seconds > 0 else 1

    def probed(self, width: int, seconds: float) -> None:
        """Reports how long a step of nothing but holes takes with a program of so many columns."""
        self._probed[width] = number("seconds", seconds, "seconds of work, at least 0", 0, who="batch")

    def width(self, columns: int) -> int:
        """Columns of the program for a step of so many: where all that hold them were probed, those of the fastest; else the fewest."""
        fit = [n for n in self.limits.classes if n >= columns]
        if not fit:
            return columns
        return min(fit, key=lambda n: self._probed[n]) if all(n in self._probed for n in fit) else fit[0]

    def step_seconds(self, width: int) -> float:
        """Of a step with a program of so many columns: as they took, else as it was probed, else 0."""
        return self._step_seconds.get(width) or self._probed.get(width, 0.0)

    def prefill_seconds(self, before: int, after: int) -> float:
        """By how much a step takes longer with a program of more columns (before 0: there would be no step), as far as that is known."""
        for known in (self._probed, self._step_seconds):
            if before < after and after in known and (before in known or not before):
                return max(0.0, known[after] - known.get(before, 0.0))
        return 0.0

    def next(self, *, reads: bool = True) -> Action:
        """What to do now. It may be called before the actions before are reported; then it never gives more than one read and
        limits.in_flight steps that are not reported. reads: one may be next."""
        if self._copies:
            return self._next_copy()
        if action := self._bring():
            return action
        self._admit()
        if self._copies:
            return self._next_copy()
        return (self._next_read() if reads else None) or self._next_step() or Idle()

    def done_read(self, action: Read, seconds: float) -> None:
        """Reports a read. seconds: of work on the device. Raises ScheduleError where it is not in flight."""
        if action is not self._read:
            raise ScheduleError("[batch] this read is not in flight; expected the one that `next` gave last, reported once")
        seconds = number("seconds", seconds, "seconds of work, at least 0", 0, who="batch")
        bits = action.count.bit_length()
        self._read_seconds[bits] = _smooth(self._read_seconds.get(bits), seconds)
        if self._charged is not None:
            self._credit += self._charged - seconds
        self._read, text = None, action.text
        text.rows = action.first + action.count
        if text.state is State.ENDED:
            self._leave(text)
        elif text.pages:
            self._run(text)
            self._register(text)

    def failed_read(self, action: Read, reason: str) -> None:
        """Ends a text whose read failed: what its pages have is worth nothing. Raises ScheduleError where the read is not in flight."""
        if action is not self._read:
            raise ScheduleError("[batch] this read is not in flight; expected the one that `next` gave last, reported once")
        self._read, text = None, action.text
        if self._charged is not None:
            self._credit += self._charged
        self.pool.release(text.pages)
        text.pages = []
        if not self.cancel(text.id, reason):
            self._leave(text)

    def done_step(self, action: Step, made: Mapping[int, Sequence[int]], ended: Mapping[int, str], seconds: float) -> None:
        """Reports a step. made: tokens that each text made in it, by id; those of a text that ended or was cancelled before do not count.
        ended: texts that end here, with the reason; a text at its limit ends by itself ("length"). seconds: of work on the device. Raises
        ScheduleError, and changes nothing, where the step is not the oldest in flight or a text made fewer or more tokens than it can."""
        if not self._steps or action is not self._steps[0]:
            raise ScheduleError("[batch] this step is not the oldest in flight; expected steps to be reported in order, each once")
        seconds = number("seconds", seconds, "seconds of work, at least 0", 0, who="batch")
        for text, _, steps, _, _, drafts in action.columns:
            count = len(made.get(text.id, ()))
            if count > steps * (1 + drafts) or (count < steps and text.state is not State.ENDED and text.id not in ended):
                raise ScheduleError(
                    f"[batch] text {text.id}: made {count} tokens in {steps} steps with {drafts} drafts; expected one a step, one more for "
                    "each draft, or fewer and a reported end"
                )
        self._steps.popleft()
        if not any(c.drafts for c in action.columns):
            self._step_seconds[action.width] = _smooth(self._step_seconds.get(action.width), seconds / action.count)
            self._draft_saved = min(self._draft_saved + LOSS_SHARE * seconds, 0.0)
            least = self._step_seconds[action.width]
            self._draft_seconds = {n: max(FORGET * s, min(s, least)) for n, s in self._draft_seconds.items()}
        elif action.width in self._draft_widths:
            self._draft_seconds[action.width] = _smooth(self._draft_seconds.get(action.width), seconds / action.count)
            texts = len(action.columns)
            plain = self.step_seconds(self.width(texts)) / texts
            self._draft_saved = min(self._draft_saved + plain * sum(map(len, made.values())) - seconds, 0.0)
        else:  # drivers compile in the first one what they put off
            self._draft_widths.add(action.width)
        if self.limits.prompt_share < 1:
            share = self.share
            earned = max(0.0, seconds - action.prefill_seconds) * share / (1 - share)
            self._credit = min(self._credit + earned, max(self._credit, self._most_prompt_seconds()))
        for text, _, steps, count, _, drafts in action.columns:
            stored = count - (steps > 0)  # rows of its prompt, beside one for each token made
            text.submitted -= steps
            text.ahead -= stored + steps * (1 + drafts)
            if text.state is State.ENDED:
                if not text.ahead:
                    self._leave(text)
                continue
            tokens = made.get(text.id, ())
            text.made += tokens
            text.rows += stored + len(tokens)
            if stored:
                self._register(text)
            if text.id in ended:
                self._end(text, ended[text.id])
            elif len(text.made) == text.limit:
                self._end(text, "length")

    # Texts come and go

    def _admit(self) -> None:
        """Admits waiting texts: forks that share pages and those that are prefilled in steps at once, and one to be read."""
        while self.slots and not self._kept and self._waiting:
            client, texts = next(iter(self._waiting.items()))
            text = next(iter(texts.values()))
            full, rest = divmod(text.length - 1, self.limits.page)
            if source := self._shared_source(text):
                if source.rows + source.ahead < text.length - 1:
                    return  # it is being prefilled
                if any(c.text is source for c in self._copies) or not self._room(self._pages_to_run(text) - full):
                    return
                text.pages = source.pages[:full]
                self.pool.share(text.pages)
                if rest:
                    text.pages += self.pool.take(1)
                text.rows, text.slot = text.length - 1, heappop(self.slots)
                if rest or self.limits.recurrent:
                    pages = (source.pages[full], text.pages[full]) if rest else (-1, -1)
                    self.pool.share(source.pages[full : full + bool(rest)])
                    self._copies.append(Copy(text, source.slot, *pages))
                self._run(text)
            elif self._prefills(text):
                if not self._room(self._pages_to_run(text) - self._look_up(text)):
                    return
                text.pages = self._match(text)
                text.rows, text.slot = len(text.pages) * self.limits.page, heappop(self.slots)
                if self._reuses:
                    self.cache.count(len(text.pages))
                self._run(text)
            elif self._reader is None:
                self._reader, text.state, text.slot = text, State.READING, heappop(self.slots)
                self._known = self._look_up(text)
            else:
                return
            text.source = None
            del texts[text.id]
            if texts:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]

    def _prefills(self, text: Text) -> bool:
        """Whether a text is prefilled in steps: what the prefix cache does not have of it is short, and, as far as that is known, wider
        steps take no longer than a read would."""
        most = self.limits.prefill
        if self.limits.pinned:
            return text.length <= min(most, self.limits.border)
        if not most or text.length - len(self.cache) * self.limits.page > most:
            return False
        rest = text.length - self._look_up(text) * self.limits.page
        read, now = self._expected_seconds(rest - 1), max(1, len(self._running))
        room = self.limits.max_step_tokens - now
        if rest > most or rest == 1 or not read or room <= 0:
            return rest <= most
        full, last = divmod(rest - 1, room)
        before = self.width(now)
        return full * self.prefill_seconds(before, self.width(now + room)) + self.prefill_seconds(before, self.width(now + last)) <= read

    def _shared_source(self, text: Text) -> Text | None:
        """The text that a fork shares pages with: it runs, and the state of a recurrent model is that of the fork's last row."""
        source = text.source
        if source is None or source.state is not State.RUNNING:
            return None
        return None if self.limits.recurrent and source.rows + source.submitted != text.length - 1 else source

    def _next_copy(self) -> Copy:
        copy = self._copies.popleft()
        self._drop_source(copy)
        return copy

    def _drop_source(self, copy: Copy) -> None:
        if copy.from_page >= 0:
            self.pool.release([copy.from_page])

    def _run(self, text: Text) -> None:
        text.state = State.RUNNING
        self._running[text.id] = text
        if text is self._reader:
            self._reader = None

    def _end(self, text: Text, reason: str) -> None:
        if text.state is State.WAITING:
            texts = self._waiting[text.client]
            del texts[text.id]
            if not texts:
                del self._waiting[text.client]
        elif text is self._reader:
            self._reader = None
        for copy in [c for c in self._copies if c.text is text]:
            self._copies.remove(copy)
            self._drop_source(copy)
        self._running.pop(text.id, None)
        self._kept.pop(text.id, None)
        text.state, text.reason, text.source = State.ENDED, reason, None
        if not text.ahead and not (self._read and self._read.text is text):
            self._leave(text)

    def _leave(self, text: Text) -> None:
        """An ended text that no action in flight holds."""
        self._give_back(text)
        del self.texts[text.id]

    def _give_back(self, text: Text) -> None:
        """Its pages, full ones to the prefix cache first, and its slot."""
        self._register(text)
        self.pool.release(text.pages)
        text.pages = []
        if text.slot >= 0:
            heappush(self.slots, text.slot)
            text.slot = -1

    @property
    def _reuses(self) -> bool:
        return self.limits.reuse and not self.limits.recurrent

    def _register(self, text: Text) -> None:
        if text.pages and self._reuses and text.reason != "error":
            rows = text.rows
            if self.limits.pinned:
                rows = min(rows, (len(text.prompt) - 1) // self.limits.border * self.limits.border)
            self.cache.insert(text.tokens[:rows], text.pages, text.root)

    def _look_up(self, text: Text) -> int:
        """Pages that the prefix cache has of a text now."""
        pages = self._match(text)
        self.pool.release(pages)
        return len(pages)

    def _match(self, text: Text) -> list[int]:
        if not self._reuses:
            return []
        rows = len(text.prompt) - 1 if self.limits.pinned else text.length - 1  # steps made what comes behind the prompt
        pages = self.cache.match(text.tokens[:rows], count=False, root=text.root)
        beyond = len(pages) % (self.limits.border // self.limits.page)
        self.pool.release(pages[len(pages) - beyond :])
        return pages[: len(pages) - beyond]

    # Pages

    def _room(self, pages: int) -> bool:
        """Whether a text can take so many pages: the running ones that grow keep one each, or as many as a submit needs, so that the text
        is not preempted at once."""
        reserved = 0
        for text in self._running.values():
            grows = self.pool.pages_for(text.most_rows) > len(text.pages)
            reserved += max(grows, self._need(text, text.rest, MAX_STEPS))
        return self.pool.available >= pages + reserved

    def _pages_to_run(self, text: Text) -> int:
        """Pages of a text with the rows of its first submit."""
        return self.pool.pages_for(min(text.length + MAX_STEPS, text.most_rows))

    def _bring(self) -> Bring | None:
        if not self._kept or not self.slots or not self._room(0):
            return None
        text = min(self._kept.values(), key=lambda t: t.arrival)
        pages = self._match(text)
        missing = max(0, self.pool.pages_for(text.rows) - len(pages))
        if not self._room(self._pages_to_run(text) - len(pages)):
            self.pool.release(pages)
            return None
        del self._kept[text.id]
        text.pages, text.slot = pages + self.pool.take(missing), heappop(self.slots)
        text.rows = max(text.rows, len(pages) * self.limits.page)  # others may have read more of its prompt meanwhile
        self._run(text)
        return Bring(text, range(len(pages), len(text.pages)))

    def _keep(self, text: Text) -> Keep:
        action = Keep(text, tuple(text.pages), text.slot)
        self._give_back(text)
        del self._running[text.id]
        text.state = State.KEPT
        self._kept[text.id] = text
        self.preemptions += 1
        return action

    # Reads

    def _next_read(self) -> Read | None:
        text = self._reader
        if text is None or self._read:
            return None
        rows, page, begins = text.length - 1, self.limits.page, not text.rows
        first = self._known * page if begins else text.rows
        if not self._may_read(min(self.limits.piece, rows - first)) or not self._may_end(text, first, self._known):
            return None
        matched = self._match(text) if begins or first + self.limits.piece >= rows else []
        if begins:
            first = len(matched) * page
        count = 0 if len(matched) * page == rows else min(self.limits.piece, rows - first)
        store = range(0)
        if first + count == rows or not count:
            self._known = len(matched)
            if not self._may_end(text, first, len(matched)):
                self.pool.release(matched)
                return None
            text.pages = matched + self.pool.take(self.pool.pages_for(rows) - len(matched))
            store = range(len(matched), len(text.pages))
        else:
            self.pool.release(matched)
        if begins and self._reuses:
            self.cache.count(len(matched))
        if not count:
            text.rows = rows
            self._run(text)
            return None
        self._charged = None
        if self._running and self.limits.prompt_share < 1:
            self._charged = self._expected_seconds(count)
            self._credit -= self._charged
        self._read = Read(text, first, count, tuple(matched) if begins else (), store)
        return self._read

    def _may_end(self, text: Text, first: int, known: int) -> bool:
        """Whether a piece from row `first` on can be given: the last one needs pages for all rows, `known` of which are there."""
        if first + self.limits.piece < text.length - 1:
            return True
        return not self._kept and self._room(self._pages_to_run(text) - known)

    @property
    def share(self) -> float:
        """Most share of the time for prompts now: more than prompt_share while many texts wait, for steps of few texts make few tokens."""
        prefilled = sum(text.rest > 1 for text in self._running.values())
        behind = self.limits.waiting_weight * max(0, self.waiting + (self._reader is not None) + prefilled - 1)
        return max(self.limits.prompt_share, behind / (behind + max(1, self.running - prefilled))) if behind else self.limits.prompt_share

    def _may_read(self, count: int) -> bool:
        """Whether prompts have time for a piece of so many tokens."""
        if not count or not self._running or self.limits.prompt_share == 1:
            return True
        return self._credit >= min(self._expected_seconds(count), self._most_prompt_seconds())

    def _expected_seconds(self, count: int) -> float:
        """Of a read of so many tokens: as those of its size took; else as the next larger ones; else as the largest, in proportion."""
        known, bits = self._read_seconds, count.bit_length()
        if larger := [b for b in known if b >= bits]:
            return known[min(larger)]
        return known[max(known)] * 2.0 ** (bits - max(known)) if known else 0.0

    def _most_prompt_seconds(self) -> float:
        """The most that a read, or a step's columns of prompts, may take."""
        read = max(self._read_seconds.values(), default=0.0)
        return max(read, self.prefill_seconds(self.width(1), self.width(self.limits.max_step_tokens)) if self.limits.prefill else 0.0)

    # Steps

    def _next_step(self) -> Step | Keep | None:
        if len(self._steps) >= self.limits.in_flight:
            return None
        ready = sorted((t for t in self._running.values() if t.left > 0), key=lambda t: t.arrival)
        width, parts, charged = self._columns(ready)
        if not parts:
            return None
        count, drafts = 1, [0] * len(parts)
        if all(taken == rest == 1 for _, taken, rest in parts):
            count = min(self.most_steps, self.steps_per_submit(self.step_seconds(width)), max(t.left for t in ready))
            wider, shares = self._shares([text for text, *_ in parts], width)
            fewer = min(count, KEPT_IDS // (1 + max(shares)))
            needs = [self._need(text, 1, fewer, own) for (text, *_), own in zip(parts, shares, strict=True)]
            if any(shares) and sum(needs) <= self.pool.available:
                width, count, drafts = wider, fewer, shares
        self._drafted = any(drafts)
        needs = [
            self._need(text, taken, count if taken == rest else 0, own) for (text, taken, rest), own in zip(parts, drafts, strict=True)
        ]
        if sum(needs) > self.pool.available:
            # A text runs on in its column until the host takes it out, so that none can be left out of a step. What is in flight
            # is reported first, which may free pages; then the last one makes room.
            return None if self._steps else self._keep(ready[-1])
        self._credit -= charged
        columns = []
        for (text, taken, rest), need, own in zip(parts, needs, drafts, strict=True):
            text.pages += self.pool.take(need)
            steps = min(count, text.left) if taken == rest else 0
            columns.append(Column(text, text.slot, steps, taken, -1 if text.submitted else text.rows + text.ahead, own))
            stored = taken - (steps > 0)
            text.submitted += steps
            text.ahead += stored + steps * (1 + own)
            self.prefilled += stored
        step = Step(tuple(columns), max(1, *(c.steps for c in columns)), width, charged)
        self._steps.append(step)
        return step

    def _columns(self, ready: Sequence[Text]) -> tuple[int, list[tuple[Text, int, int]], float]:
        """Of the next step: columns of its program; texts, each with how many tokens it takes of those that are left of it; and the seconds
        that prompts are charged for. Texts that are prefilled get the columns that the others leave, who came first first. A program with
        more columns than the others need is taken where prompts have time for it."""
        rests = [text.rest for text in ready]
        others = sum(rest == 1 for rest in rests)
        alone = self.width(others) if others else 0
        width = self.width(min(sum(rests), self.limits.max_step_tokens))
        charged = self.prefill_seconds(alone, width) if others and self.limits.prompt_share < 1 else 0.0
        if charged and self._credit < min(charged, self._most_prompt_seconds()):
            width, charged = alone, 0.0
        left = min(width, self.limits.max_step_tokens) - others
        parts = []
        for text, rest in zip(ready, rests, strict=True):
            taken = 1 if rest == 1 else min(rest, left)
            if rest > 1:
                left -= taken
            if taken:
                parts.append((text, taken, rest))
        return width, parts, charged

    def _shares(self, texts: Sequence[Text], width: int) -> tuple[int, list[int]]:
        """Columns of the program for a step of these texts with drafts, and the drafts of each; none where they do not pay."""
        limits, none = self.limits, (width, [0] * len(texts))
        if not any(text.gains for text in texts):
            return none
        if self._draft_saved < -LOST_STEPS * self.step_seconds(width):
            return none
        widths = [n for n in limits.classes if len(texts) < n and (n in DRAFT_WIDTHS or n == width)]
        seconds = {n: self._draft_seconds.get(n, 0.0) or self.step_seconds(n) for n in widths}
        found = best_share([text.gains[: text.left] for text in texts], seconds, (width, self.step_seconds(width)), going=self._drafted)
        return none if found is None else found

    def _need(self, text: Text, tokens: int, count: int, drafts: int = 0) -> int:
        """Pages that a text lacks for a step that takes so many of its tokens, the first of `count` steps with so many drafts each, and for
        the row after these, which the device looks up at the end of the last. count 0: the step makes no token of it."""
        rows = text.rows + text.ahead + tokens
        if count:
            rows = min(rows + min(count, text.left) * (1 + drafts), text.most_rows)
        return max(0, self.pool.pages_for(rows) - len(text.pages))


def _smooth(before: float | None, latest: float) -> float:
    return latest if before is None else before + SMOOTHING * (latest - before)
