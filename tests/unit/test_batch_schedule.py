"""The scheduler of a batch: 10 000 random schedules on a simulated engine, and its rules one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from batch_schedules import Schedule, SimulatedEngine, continuation

from vkback.checks import OptionError
from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.scheduler import Action, Bring, Copy, Idle, Keep, Limits, Read, ScheduleError, Scheduler, State, Step, Text

RULES = ("Keep", "Bring", "Copy", "prefix", "brought in part", "prefilled", "prefilled beside others", "prefilled in pieces")
MORE_RULES = ("several prefilled at once", "prefix of pinned pieces", "a wider program than the next")


@pytest.mark.parametrize("thousand", [*range(3), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(3, 10))])
def test_random_schedules(thousand: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(thousand * 1000, thousand * 1000 + 1000):
        schedule = Schedule(number)
        try:
            schedule.run()
        except Exception as e:
            e.add_note(f"in Schedule({number})")
            raise
        seen += schedule.seen
    few = {what: n for what in (*RULES, *MORE_RULES) if (n := seen[what]) < 25}
    assert not few, "each rule has work in a thousand schedules"


class Batch:
    """A scheduler and its simulated engine, driven by hand. The model never ends a text: seeds are chosen so."""

    def __init__(self, n_pages: int = 64, **limits: Any) -> None:
        self.limits = Limits(**{"slots": 8, "page": 4, "max_rows": 200, "max_step_tokens": 8, "piece": 8, **limits})
        self.pool = PagePool(n_pages, self.limits.page)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(self.limits, self.pool, self.cache)
        self.engine = SimulatedEngine(self.scheduler, {})

    def add(self, text_id: int, prompt: int | list[int], max_tokens: int = 40, client: str = "a") -> Text:
        """prompt: its tokens, or how many of its own."""
        tokens = [1 + (text_id * 17 + row) % 50 for row in range(prompt)] if isinstance(prompt, int) else prompt
        self.engine.seeds[text_id] = next(s for s in range(1000) if 0 not in continuation(tokens, s, max_tokens))
        self.scheduler.add(text := Text(text_id, client, tuple(tokens), max_tokens))
        return text

    def next(self) -> Action:
        action = self.scheduler.next()
        self.engine.carry_out(action)
        return action

    def report(self, read: float = 0.0, step: float = 0.004) -> None:
        """Reports all that is in flight. step: seconds of one step: by default they come one a submit."""
        if self.engine.read:
            self.engine.report_read(read)
        while self.engine.steps:
            self.engine.report_step(step * self.engine.steps[0][0].count)

    def log(self, most: int = 1000) -> list[Action]:
        """Actions up to the end of all work, each reported at once."""
        actions: list[Action] = []
        while len(actions) < most and not isinstance(action := self.next(), Idle):
            actions.append(action)
            self.report()
        return actions

    def step_until(self, text: Text, made: int) -> None:
        while len(text.made) < made:
            self.next()
            self.report()


def running(action: Action) -> list[int]:
    """Ids of the texts in a step."""
    assert isinstance(action, Step)
    return [c.text.id for c in action.columns]


def reads(actions: list[Action]) -> list[tuple[int, int, int, int]]:
    """Of each read the text, the first row, the count, and how many pages were matched."""
    return [(a.text.id, a.first, a.count, len(a.matched)) for a in actions if isinstance(a, Read)]


def test_a_prompt_is_read_in_pieces_and_its_last_token_is_the_first_step() -> None:
    batch = Batch()
    text = batch.add(1, 20, max_tokens=3)
    actions = batch.log()
    assert reads(actions) == [(1, 0, 8, 0), (1, 8, 8, 0), (1, 16, 3, 0)]
    assert [a.store for a in actions if isinstance(a, Read)] == [range(0), range(0), range(5)]
    assert [type(a) for a in actions[3:]] == [Step] * 3 and text.reason == "length"


def test_a_prompt_of_one_token_needs_no_read() -> None:
    batch = Batch()
    batch.add(1, 1, max_tokens=2)
    assert [running(a) for a in batch.log()] == [[1], [1]]


def test_full_pages_that_are_known_are_not_read_again() -> None:
    batch = Batch()
    batch.add(1, prompt := list(range(1, 15)), max_tokens=8)
    batch.log()
    assert reads(batch.log()) == [] and len(batch.cache) == 5, "14 + 8 tokens have 21 rows, 5 full pages"
    batch.add(2, [*prompt[:10], 40, 41], max_tokens=1)
    batch.add(3, prompt[:9], max_tokens=1)
    actions = batch.log()
    assert reads(actions) == [(2, 8, 3, 2)], "text 3 has all of its 8 rows in known pages"
    assert (batch.cache.lookups, batch.cache.hits, batch.cache.tokens_reused) == (3, 2, 16)


def test_a_running_text_shares_its_prompt_already() -> None:
    batch = Batch()
    first = batch.add(1, list(range(1, 15)))
    batch.step_until(first, 1)
    second = batch.add(2, list(range(1, 15)))
    batch.step_until(second, 1)
    assert first.pages[:3] == second.pages[:3] and first.pages[3] != second.pages[3]


def test_recurrent_models_reuse_no_prefix() -> None:
    batch = Batch(recurrent=True)
    batch.add(1, list(range(1, 15)), max_tokens=1)
    batch.log()
    batch.add(2, list(range(1, 15)), max_tokens=1)
    assert reads(batch.log()) == [(2, 0, 8, 0), (2, 8, 5, 0)] and batch.cache.lookups == len(batch.cache) == 0


def test_clients_take_turns() -> None:
    batch = Batch(slots=1)
    for text_id, client in enumerate("aaaabbca"):
        batch.add(text_id, 2, max_tokens=1, client=client)
    order = [i for i, *_ in reads(batch.log(10))]
    assert order == [0, 4, 6, 1, 5], "a, b, c, a, b"
    batch.add(8, 2, max_tokens=1, client="d")
    assert [i for i, *_ in reads(batch.log())] == [2, 8, 3, 7]


def test_no_more_texts_run_than_slots_or_columns() -> None:
    for limits in ({"slots": 2}, {"max_step_tokens": 2}):
        batch = Batch(**limits)
        for text_id in range(5):
            batch.add(text_id, 2, max_tokens=4)
        assert max(len(running(a)) for a in batch.log() if isinstance(a, Step)) == 2


def test_prompts_are_read_back_to_back_while_nobody_runs() -> None:
    batch = Batch(max_rows=2000, n_pages=500)
    batch.add(1, 400, max_tokens=1)
    actions = batch.log()
    assert len(actions) == 51 and all(isinstance(a, Read) for a in actions[:-1])


@pytest.mark.parametrize("share", [1 / 4, 0.1, 0.6])
def test_streams_slow_down_by_the_share_of_prompts_at_most(share: float) -> None:
    """A prompt of 4 000 tokens comes while a text runs: steps of 3 ms, pieces of 25 ms."""
    batch = Batch(page=64, max_rows=8192, piece=512, prompt_share=share, n_pages=300)
    batch.add(1, 10, max_tokens=3000)
    for _ in range(100):
        batch.next()
        batch.report(0.025, 0.003)
    text = batch.add(2, 4000)
    clock, began, stall, read_seconds, first = 0.0, 0.0, 0.0, 0.0, None
    while text.state is not State.RUNNING:
        action = batch.next()
        if isinstance(action, Read):
            clock += 0.025
            read_seconds += 0.025
            first = clock if first is None else first
        else:
            assert isinstance(action, Step)
            stall = max(stall, clock - began)
            clock += 0.003 * action.count
            began = clock
        batch.report(0.025, 0.003)
    assert first == 0.025, "a read is saved up while nobody waits, so that a prompt begins at once"
    assert (read_seconds - 0.025) / (clock - 0.025) == pytest.approx(share, rel=0.12)
    assert stall <= 0.0251, "one piece at a time"


def test_a_share_of_one_reads_prompts_first() -> None:
    batch = Batch(prompt_share=1.0)
    batch.step_until(batch.add(1, 2), 3)
    batch.add(2, 30, max_tokens=1)
    for _ in range(4):
        assert isinstance(batch.next(), Read)
        batch.report(read=1.0)


def test_the_text_that_came_last_makes_room() -> None:
    """Three texts grow; pages for two are there. Who came before is never preempted for who came after."""
    batch = Batch(n_pages=16)
    texts = [batch.add(text_id, 9, max_tokens=24) for text_id in (1, 2, 3)]
    actions = batch.log()
    keeps = [a.text.id for a in actions if isinstance(a, Keep)]
    assert keeps[0] == 3 and 1 not in keeps and batch.scheduler.preemptions == len(keeps)
    assert [a.text.id for a in actions if isinstance(a, Bring)] == keeps
    for text in texts:
        assert text.reason == "length" and text.made == continuation(list(text.prompt), batch.engine.seeds[text.id], 24)


def test_the_prefix_cache_loses_pages_before_a_text_is_preempted() -> None:
    batch = Batch(n_pages=16)
    batch.add(1, 30, max_tokens=20)
    batch.log()
    assert batch.cache.idle == 12
    batch.add(2, 9, max_tokens=20)
    batch.add(3, 9, max_tokens=20)
    assert not any(isinstance(a, Keep) for a in batch.log()) and batch.cache.evictions > 0


def test_the_last_text_makes_room_for_itself() -> None:
    """The text in need came last: it is kept, and those before it go on."""
    batch = Batch(n_pages=8, in_flight=1)
    first = batch.add(1, 1, max_tokens=16)
    batch.step_until(first, 3)
    second = batch.add(2, 12, max_tokens=16)
    batch.step_until(second, 1)
    while second.state is State.RUNNING:
        action = batch.next()
        batch.report()
    assert isinstance(action, Keep) and action.text is second and first.state is State.RUNNING
    batch.log()
    assert first.reason == second.reason == "length"


def test_a_text_with_steps_in_flight_is_kept_after_them() -> None:
    batch = Batch(n_pages=8, in_flight=2)
    first, second = batch.add(1, 8, max_tokens=20), batch.add(2, 8, max_tokens=20)
    while first.state is second.state is State.RUNNING or not first.made:
        action = batch.next()
        if isinstance(action, Keep):
            break
        if isinstance(action, Idle) or batch.engine.read:
            batch.report() if batch.engine.read else batch.engine.report_step(0.004)
    assert isinstance(action, Keep) and action.text is second and not second.submitted
    assert len(action.pages) * 4 >= second.rows == second.length - 1 and second.pages == [] and second.slot == -1


def test_pages_of_a_text_that_ends_are_waited_for() -> None:
    """Text 1 lacks a page, but text 2 is at its limit with its last step in flight: nobody is preempted, nor left out of a step, for the
    device runs a column until it is told otherwise."""
    batch = Batch()
    first, second, third = batch.add(1, 1), batch.add(2, 1), batch.add(3, 1)
    while not third.made or first.rows % 4 != 2:
        batch.next()
        batch.report()
    second.limit = len(second.made) + 1
    assert running(batch.next()) == [1, 2, 3] and third.rows % 4 < 2
    held = batch.pool.take(batch.pool.free)
    assert isinstance(batch.next(), Idle)
    batch.report()
    assert second.state is State.ENDED and running(batch.next()) == [1, 3] and batch.scheduler.preemptions == 0
    batch.pool.release(held)


def test_kept_texts_come_back_before_others_are_admitted() -> None:
    batch = Batch(n_pages=12)
    first, second = batch.add(1, 9, max_tokens=30), batch.add(2, 9, max_tokens=30)
    while second.state is not State.KEPT:
        batch.next()
        batch.report()
    third = batch.add(3, 2, max_tokens=2)
    order: list[Text] = []
    for _ in range(500):
        batch.next()
        batch.report()
        assert {second.state, third.state} != {State.KEPT, State.READING}
        order += [t for t in (second, third) if t.state is State.RUNNING and t not in order]
    assert order == [second, third] and first.reason == second.reason == third.reason == "length"


def test_a_later_text_takes_no_page_that_an_earlier_one_lacks() -> None:
    """One page is free. Text 1 lacks two for its next steps, text 2 one, and text 3, which is to make room, has a step in flight."""
    batch = Batch(page=1)
    first, second, third = (batch.add(text_id, 1, max_tokens=30) for text_id in (1, 2, 3))
    while not third.made or first.submitted:
        batch.next()
        batch.report(step=0.002)
    second.limit = len(second.made) + 3
    assert running(batch.next()) == [1, 2, 3] and (first.left > 2, second.left) == (True, 1)
    held = batch.pool.take(batch.pool.free - 1)
    assert isinstance(batch.next(), Idle)
    batch.report(step=0.002)
    keep = batch.next()
    assert isinstance(keep, Keep) and keep.text is third
    assert running(batch.next()) == [1, 2]
    batch.pool.release(held)
    batch.log()
    assert first.reason == second.reason == third.reason == "length"


def test_a_cancelled_text_holds_its_pages_while_steps_are_in_flight() -> None:
    batch = Batch()
    text = batch.add(1, 9)
    batch.step_until(text, 4)
    batch.next()
    batch.next()
    held = len(text.pages)
    assert batch.scheduler.cancel(1) and text.state is State.ENDED and text.reason == "cancelled"
    assert len(text.pages) == held and batch.scheduler.texts and isinstance(batch.scheduler.next(), Idle)
    batch.engine.report_step(0.004)
    assert text.pages
    batch.engine.report_step(0.004)
    assert not text.pages and not batch.scheduler.texts and len(text.made) == 4
    assert batch.cache.idle == len(batch.cache) == 3, "9 + 4 tokens have 12 rows"
    assert not batch.scheduler.cancel(1) and not batch.scheduler.cancel(7)


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
def test_a_text_that_is_read_can_be_cancelled(pieces: int) -> None:
    batch = Batch()
    text = batch.add(1, 20)
    for _ in range(pieces):
        batch.report()
        batch.next()
    assert batch.scheduler.cancel(1)
    batch.report()
    assert text.slot == -1 and not text.pages and not batch.scheduler.texts and batch.pool.available == 64
    assert len(batch.cache) == (4 if pieces == 3 else 0), "what was read and stored is known"
    batch.add(2, 5, max_tokens=2)
    assert len(batch.log()) == 3


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    batch = Batch()
    text = batch.add(1, 9)
    batch.step_until(text, 3)
    batch.next()
    fork = batch.scheduler.fork(text, 2)
    batch.engine.seeds[2] = batch.engine.seeds[1]
    action = batch.next()
    assert isinstance(action, Copy) and (action.from_page, action.to_page) == (text.pages[2], fork.pages[2])
    assert fork.pages[:2] == text.pages[:2] and fork.made == text.made and fork.slot != text.slot
    assert fork.rows == 11 and running(batch.next()) == [1, 2]
    batch.report()
    batch.log()
    assert fork.made == text.made and len(text.made) == 40


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    batch = Batch()
    text = batch.add(1, 9)
    batch.step_until(text, 4)
    fork = batch.scheduler.fork(text, 2)
    batch.engine.seeds[2] = batch.engine.seeds[1]
    assert running(batch.next()) == [1, 2] and fork.pages[:3] == text.pages[:3]


def test_forks_of_a_text_that_waits_are_read_with_it() -> None:
    batch = Batch()
    text = batch.add(1, 7, max_tokens=4)
    forks = [batch.scheduler.fork(text, text_id) for text_id in (2, 3)]
    batch.engine.seeds |= {2: batch.engine.seeds[1], 3: batch.engine.seeds[1]}
    actions = batch.log()
    assert reads(actions) == [(1, 0, 6, 0)] and sum(isinstance(a, Copy) for a in actions) == 2
    assert all(fork.made == text.made for fork in forks)


def test_forks_of_a_recurrent_text_copy_its_state_or_are_read() -> None:
    batch = Batch(recurrent=True)
    text = batch.add(1, 9, max_tokens=20)
    early = batch.scheduler.fork(text, 2)
    batch.engine.seeds[2] = batch.engine.seeds[3] = batch.engine.seeds[1]
    assert [type(a) for a in batch.log(3)] == [Read, Copy, Step]
    batch.next()
    late = batch.scheduler.fork(text, 3)
    assert reads([batch.next()]) == [(3, 0, 8, 0)], "the state has gone on with the step in flight"
    batch.report()
    batch.log()
    assert early.made == late.made == text.made


def test_refusals_say_what_does_not_fit() -> None:
    batch = Batch(n_pages=10, max_rows=100)
    with pytest.raises(
        ScheduleError, match="20 tokens of prompt and 30 new ones fill 49 rows, which are 13 pages of 4; expected at most 10"
    ):
        batch.add(1, 20, max_tokens=30)
    with pytest.raises(ScheduleError, match="text 1: has 101 tokens; expected at most 100, the rows of a sequence"):
        batch.scheduler.add(Text(1, "a", (1,) * 101, 1))
    with pytest.raises(ScheduleError, match="text 1: has an empty prompt; expected at least one token"):
        batch.scheduler.add(Text(1, "a", (), 1))
    with pytest.raises(ScheduleError, match="text 1: max_tokens is 0; expected more than the 0 tokens"):
        batch.scheduler.add(Text(1, "a", (1,), 0))
    assert not batch.scheduler.texts and not batch.scheduler.waiting
    text = batch.add(1, 3, max_tokens=1)
    with pytest.raises(ScheduleError, match="text 1: is in work already"):
        batch.add(1, 3)
    batch.log()
    with pytest.raises(ScheduleError, match=r"text 1: was in work before \(ended\)"):
        batch.scheduler.add(text)
    with pytest.raises(ScheduleError, match="text 1: is not in work, so that it cannot be forked"):
        batch.scheduler.fork(text, 2)
    with pytest.raises(ScheduleError, match="pages have 4 rows; expected 8"):
        Scheduler(Limits(1, 8, 8), batch.pool, batch.cache)
    with pytest.raises(OptionError, match="slots is 0"):
        Limits(0, 8, 8)
    with pytest.raises(OptionError, match="prompt_share is 0 "):
        Limits(1, 8, 8, prompt_share=0)


def test_a_text_ends_when_the_rows_of_a_sequence_are_full() -> None:
    batch = Batch(max_rows=12)
    text = batch.add(1, 9, max_tokens=40)
    batch.log()
    assert len(text.made) == 4 and text.rows == 12 and text.reason == "length"


def test_reports_that_fit_nothing_are_refused_and_change_nothing() -> None:
    batch = Batch()
    batch.step_until(batch.add(1, 2), 1)
    step, second = batch.next(), batch.next()
    assert isinstance(step, Step) and isinstance(second, Step) and isinstance(batch.next(), Idle)
    with pytest.raises(ScheduleError, match="not the oldest in flight"):
        batch.scheduler.done_step(second, {1: [1]}, {}, 0.1)
    with pytest.raises(ScheduleError, match="text 1: made 0 tokens in 1 steps"):
        batch.scheduler.done_step(step, {}, {}, 0.1)
    with pytest.raises(ScheduleError, match="text 1: made 2 tokens in 1 steps"):
        batch.scheduler.done_step(step, {1: [1, 2]}, {}, 0.1)
    with pytest.raises(OptionError, match="seconds is -1"):
        batch.scheduler.done_step(step, {1: [1]}, {}, -1)
    with pytest.raises(ScheduleError, match="this read is not in flight"):
        batch.scheduler.done_read(Read(Text(1, "a", (1, 2), 1), 0, 1, (), range(1)), 0.1)
    batch.report()
    assert len(batch.scheduler.texts[1].made) == 3


def test_steps_of_a_submit_make_about_four_milliseconds() -> None:
    scheduler = Batch().scheduler
    assert [scheduler.steps_per_submit(s) for s in (0.0, 0.0001, 0.0005, 0.001, 0.0013, 0.002, 0.003, 0.1)] == [1, 8, 8, 4, 3, 2, 1, 1]
    batch = Batch()
    batch.add(1, 2, max_tokens=30)
    counts = []
    while not isinstance(action := batch.next(), Idle):
        counts += [action.count] if isinstance(action, Step) else []
        batch.report(step=0.001)
    assert counts == [1, 4, 4, 4, 4, 4, 4, 4, 1], "the last one is no longer than the text"


def test_memory_is_flat_over_many_texts() -> None:
    batch = Batch(n_pages=8)
    for text_id in range(300):
        batch.add(text_id, 6, max_tokens=2, client=f"client {text_id}")
        batch.log()
    scheduler = batch.scheduler
    assert not scheduler.texts and not scheduler.waiting and len(batch.cache) <= 8 and len(batch.cache.leaves) <= 80


def test_prompts_take_more_of_the_time_while_many_texts_wait() -> None:
    """One long prompt slows running texts by half at most; many short ones do not wait for the steps of a few."""
    pool = PagePool(64, 4)
    scheduler = Scheduler(Limits(8, 4, 64, waiting_weight=4.0), pool, PrefixCache(pool))
    shares = []
    for id in range(5):
        scheduler.add(Text(id, "a", (1, 2, 3), 4))
        shares.append(scheduler.share)
    assert shares == [1 / 4, 4 / 5, 8 / 9, 12 / 13, 16 / 17]
    pool = PagePool(64, 4)
    even = Scheduler(Limits(8, 4, 64), pool, PrefixCache(pool))
    for id in range(5):
        even.add(Text(id, "a", (1, 2, 3), 4))
    assert even.share == 1 / 4


def test_without_reuse_no_text_begins_with_the_pages_of_another() -> None:
    """Forks share pages all the same."""
    batch = Batch(reuse=False)
    batch.add(1, [*range(1, 20)])
    batch.log()
    again = batch.add(2, [*range(1, 20)])
    assert not len(batch.cache) and (action := batch.next()) and isinstance(action, Read) and action.first == 0 and not action.matched
    batch.report()
    batch.log()
    assert again.reason == "length" and batch.pool.free == batch.pool.n_pages


def prefilled(actions: list[Action]) -> list[list[tuple[int, int, int]]]:
    """Of each step the texts, with how many tokens each gives and makes."""
    return [[(c.text.id, c.tokens, c.steps) for c in a.columns] for a in actions if isinstance(a, Step)]


def test_the_fastest_program_that_has_the_columns_is_taken() -> None:
    scheduler = Batch(classes=(1, 2, 4, 8)).scheduler
    assert [scheduler.width(n) for n in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8], "without times the smallest"
    for width, seconds in ((4, 0.003), (8, 0.002)):
        scheduler.probed(width, seconds)
    assert [scheduler.width(n) for n in (1, 2, 3, 5)] == [1, 2, 8, 8], "where all that fit are known"
    scheduler.probed(2, 0.001)
    scheduler.probed(1, 0.0015)
    assert [scheduler.width(n) for n in (1, 2, 3, 5)] == [2, 2, 8, 8]


def test_short_prompts_take_the_columns_that_steps_have_left() -> None:
    batch = Batch(prefill=8, classes=(1, 2, 4, 8), prompt_share=0.01)
    for width in (1, 2, 4, 8):
        batch.scheduler.probed(width, 0.001 * width)
    batch.step_until(batch.add(1, 1), 2)
    batch.step_until(batch.add(2, 1), 1)
    batch.step_until(batch.add(3, 1), 1)
    batch.add(4, 6, max_tokens=2)
    actions: list[Action] = []
    while not batch.scheduler.texts[4].made:
        actions.append(batch.next())
        batch.report(step=0.004)
    assert [[c for c in step if c[0] == 4] for step in prefilled(actions)] == [[(4, 1, 0)]] * 5 + [[(4, 1, 1)]]
    assert {a.width for a in actions if isinstance(a, Step)} == {4}, "a program of eight columns would take time of the others"
    assert not reads(actions) and batch.scheduler.prefilled == 5


def test_short_prompts_are_prefilled_together_where_nobody_runs() -> None:
    batch = Batch(prefill=8, classes=(1, 2, 4, 8))
    for text_id in (1, 2, 3):
        batch.add(text_id, 4, max_tokens=2)
    actions = batch.log()
    assert prefilled(actions)[:2] == [[(1, 4, 1), (2, 4, 1)], [(1, 1, 1), (2, 1, 1), (3, 4, 1)]]


def test_what_the_prefix_cache_lacks_is_prefilled() -> None:
    batch = Batch(prefill=4)
    batch.add(1, prompt := list(range(1, 19)), max_tokens=1)
    assert reads(batch.log()) == [(1, 0, 8, 0), (1, 8, 8, 0), (1, 16, 1, 0)]
    batch.add(2, [*prompt[:16], 40, 41], max_tokens=1)
    assert prefilled(batch.log()) == [[(2, 2, 1)]] and batch.cache.tokens_reused == 16
    batch.add(3, [*prompt[:12], 40, 41, 42, 43, 44], max_tokens=1)
    assert reads(batch.log()) == [(3, 12, 4, 3)], "five tokens are more than four"


def test_a_prompt_is_read_where_steps_would_take_longer() -> None:
    batch = Batch(prefill=8, classes=(1, 2, 4, 8))
    for width in (1, 2, 4, 8):
        batch.scheduler.probed(width, 0.01 * width)
    batch.add(1, 20, max_tokens=30)
    batch.next()
    batch.report(read=0.02)
    batch.next()
    batch.report(read=0.02)
    batch.next()
    batch.report(read=0.02)
    batch.add(2, 7, max_tokens=1)
    batch.add(3, 2, max_tokens=1)
    actions = batch.log()
    assert [text for text, *_ in reads(actions)] == [2], "0.07 s more for seven columns, 0.02 s for a read; 0.01 s for two columns"


def test_a_preempted_text_goes_on_with_its_prompt() -> None:
    batch = Batch(n_pages=8, prefill=40, max_step_tokens=2, slots=2, in_flight=1, prompt_share=1.0)
    batch.step_until(batch.add(1, 1, max_tokens=24), 1)
    second = batch.add(2, 16, max_tokens=2)
    seen = []
    while second.state is not State.ENDED:
        action = batch.next()
        seen.append(type(action))
        if isinstance(action, Keep):
            assert action.text is second and 0 < second.rows < 15
        batch.report()
    assert Keep in seen and Bring in seen and second.reason == "length"
