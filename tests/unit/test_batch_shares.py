"""Which text of a step has how many drafts."""

from __future__ import annotations

import random

import pytest

from vkback.engine.batch.pages import PagePool, PrefixCache
from vkback.engine.batch.scheduler import KEPT_IDS, Column, Limits, Read, Scheduler, Step, Text
from vkback.engine.batch.shares import allocation, best_share, gains_of
from vkback.engine.batch.state import RING
from vkback.engine.drafts import tokens_per_step


def test_gains_are_the_tokens_that_steps_would_have_made() -> None:
    assert gains_of([False] * 16) == () == gains_of([True] * 16, 0)
    assert gains_of([True] * 12, 3) == (1.0, 2.0, 3.0, 4.0)
    hits = [True, True, True, False] * 4
    found = gains_of(hits)
    assert len(found) == 16 and list(found) == sorted(found)
    assert found[3] == pytest.approx(tokens_per_step(hits, 4)) == 4.0 == found[15]


def test_a_column_goes_where_it_makes_the_most() -> None:
    gains = [(), (1.0, 1.2, 1.3), (1.0, 2.0, 2.9, 3.0), (1.0, 2.0)]
    found = allocation(gains, 9)
    assert [shares for _, shares in found[:4]] == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 2, 1]]
    total, shares = found[-1]
    assert total == pytest.approx(1.0 + 0.9 + 1.0 + 0.1 + 0.3) and shares == [0, 2, 3, 1], "as many as gain something"
    rng = random.Random(3)
    for _ in range(50):
        gains = [gains_of([rng.random() < p for _ in range(16)]) for p in (0.2, 0.6, 0.9)]
        found = allocation(gains, 12)
        assert all(sum(shares) == n for n, (_, shares) in enumerate(found))
        totals = [total for total, _ in found]
        assert totals == sorted(totals)


def test_drafts_are_had_only_where_they_pay() -> None:
    gains = [(1.0, 2.0, 3.0, 4.0), (1.0, 1.5)]
    assert best_share(gains, {4: 1.5, 8: 4.0}, (2, 1.0), going=False) == (4, [2, 0])
    assert best_share(gains, {4: 1.5, 8: 1.6}, (2, 1.0), going=False) == (8, [3, 1])
    assert best_share(gains, {4: 1.95, 8: 9.0}, (2, 1.0), going=False) is None, "a gain of less than a tenth does not begin"
    assert best_share(gains, {4: 1.95, 8: 9.0}, (2, 1.0), going=True) == (4, [2, 0]), "but goes on"
    assert best_share(gains, {4: 2.1, 8: 9.0}, (2, 1.0), going=True) is None
    assert best_share(gains, {4: 0.0}, (2, 1.0), going=False) == (4, [2, 0]), "a time that is not known is guessed"
    assert best_share(gains, {4: 1.0}, (2, 0.0), going=False) is None, "nothing is known yet"
    many = [tuple(1.0 + i for i in range(16))] * 2
    assert best_share(many, {4: 0.0, 8: 0.0, 64: 0.0}, (2, 1.0), going=False) == (4, [1, 1]), (
        "no step of a width that is far from all known"
    )
    assert best_share(many, {4: 1.2, 8: 0.0, 64: 0.0}, (2, 1.0), going=True) == (8, [3, 3])
    assert best_share(many, {4: 1.9, 8: 0.0, 64: 0.0}, (2, 1.0), going=True) == (8, [3, 3]), (
        "steps that take as long as their columns are many"
    )
    assert best_share(many, {4: 3.0, 8: 0.0}, (2, 1.0), going=True) is None
    assert best_share([(), ()], {4: 1.0}, (2, 1.0), going=True) is None


def limits(**others: object) -> Limits:
    return Limits(slots=4, page=16, max_rows=400, max_step_tokens=16, piece=64, classes=(1, 2, 4, 8, 16), **others)  # type: ignore[arg-type]


def scheduler(pages: int = 200, **others: object) -> Scheduler:
    pool = PagePool(pages, 16)
    return Scheduler(limits(**others), pool, PrefixCache(pool))


def steps_of(s: Scheduler, makes: object = None) -> list[Step]:
    """All steps until every text has ended, each of whose columns makes one token, and one for each second draft."""
    found = []
    while s.texts:
        action = s.next()
        if isinstance(action, Step):
            found.append(action)
            made = {c.text.id: [7] * min(c.steps * (1 + c.drafts // 2), c.text.limit - len(c.text.made)) for c in action.columns}
            s.done_step(action, made, {}, 0.001 * action.width**0.3 * action.count)
        elif isinstance(action, Read):
            s.done_read(action, 0.001)
        else:
            raise AssertionError(action)
    return found


def test_the_scheduler_shares_out_what_a_step_has_left() -> None:
    s = scheduler()
    for i in range(3):
        s.add(Text(i, "", (1,), 120, gains=(1.0, 1.9, 2.7, 3.4, 4.0) if i != 1 else ()))
    found = steps_of(s)
    drafted = [step for step in found if any(c.drafts for c in step.columns)]
    assert drafted and not any(c.drafts for step in found for c in step.columns if c.text.id == 1)
    for step in drafted:
        assert sum(1 + c.drafts for c in step.columns) <= step.width
        assert all(step.count * (1 + c.drafts) <= 64 for c in step.columns), "a loop keeps so many tokens"
    taken = {i: sum(c.steps for step in found for c in step.columns if c.text.id == i) for i in range(3)}
    assert 2 * taken[1] == 240 > 3 * taken[0]


def test_drafts_that_cost_time_rest() -> None:
    s = scheduler()
    for i in range(2):
        s.add(Text(i, "", (1,), 300, gains=tuple(1.0 + k for k in range(8))))
    drafted = plain = 0
    while s.texts:
        action = s.next()
        assert isinstance(action, Step)
        has = any(c.drafts for c in action.columns)
        drafted, plain = drafted + has * action.count, plain + (not has) * action.count
        seconds = action.count * (1.9 if has else 1.0)  # none of them is right
        s.done_step(action, {c.text.id: [7] * min(c.steps, c.text.limit - len(c.text.made)) for c in action.columns}, {}, seconds)
    assert 0 < drafted < 60 and plain > 240


def test_a_lack_of_pages_takes_drafts_before_texts() -> None:
    s = scheduler(pages=20)
    for i in range(3):
        s.add(Text(i, "", (1,), 80, gains=tuple(1.0 + k for k in range(16))))
    found = steps_of(s)
    assert found and not s.texts and s.preemptions == 0


def test_a_step_that_the_host_waits_for_has_drafts() -> None:
    s = scheduler()
    s.most_steps = 1
    for i in range(2):
        s.add(Text(i, "", (1,), 40, gains=(1.0, 2.0, 3.0)))
    steps = steps_of(s)
    assert all(step.count == 1 for step in steps) and any(c.drafts for step in steps for c in step.columns)


def test_more_tokens_than_steps_and_drafts_are_refused() -> None:
    s = scheduler()
    s.add(Text(0, "", (1,), 40))
    action = s.next()
    assert isinstance(action, Step)
    step = Step(tuple(Column(*c[:5], drafts=0) for c in action.columns), action.count, action.width)
    assert step.columns == action.columns
    with pytest.raises(Exception, match=r"made 9 tokens in 1 steps with 0 drafts; expected one a step, one more for each draft"):
        s.done_step(action, {0: [1] * 9}, {}, 0.1)


def test_a_submit_makes_no_more_of_a_text_than_its_loop_keeps() -> None:
    assert KEPT_IDS == RING


def test_a_class_that_was_slow_once_is_tried_again() -> None:
    """Measured while others had the machine, it would never be seen again."""
    s, widths = scheduler(), list[int]()
    s.probed(2, 1.0)
    for i in range(2):
        s.add(Text(i, "", (1,), 2000, gains=(1.0, 2.0, 3.0)))
    while s.texts:
        action = s.next()
        assert isinstance(action, Step)
        drafts = any(c.drafts for c in action.columns)
        widths.append(action.width if drafts else 0)
        slow = drafts and len([w for w in widths if w]) <= 4
        made = {c.text.id: [1] * min(c.steps * (1 + c.drafts), c.text.limit - len(c.text.made)) for c in action.columns}
        s.done_step(action, made, {}, action.count * (4.5 if slow else 1.1))
    assert len([w for w in widths[-100:] if w]) > 50
