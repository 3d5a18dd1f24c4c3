"""Which steps a text is made by: what drafts would have been right, what pays, and what they may cost. No device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from vkback.engine.drafts import LONGEST_PAUSE, LOSS, LOSS_SHARE, DraftCounts, DraftError, Drafts, Pace, Probe, StepTimes, tokens_per_step
from vkback.ops.sampling.lookup import drafts_of

TIMES = StepTimes({4: 1.25, 8: 1.3, 16: 1.65})


def test_tokens_of_a_step() -> None:
    assert tokens_per_step([False] * 6, 8) == 1
    assert tokens_per_step([True] * 16, 4) == 4
    assert tokens_per_step([True, True, False] * 4, 8) == 3
    assert tokens_per_step([True, False, False] * 4, 4) == 1.5


def hits(text: Sequence[int], begin: int) -> list[bool]:
    probe, found = Probe(text[:begin]), []
    for token in text[begin:]:
        probe.take(token)
        found.append(probe.hits[-1])
    return found


def test_the_probe_knows_what_could_have_been_drafted() -> None:
    assert hits([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 9, 1], 7) == [True] * 6
    assert hits([1, 2, 3, 4, 1, 7, 3], 5) == [False, False]
    assert not any(hits(list(range(100)), 10))
    probe = Probe([8, 9], [1, 2, 3, 8, 9, 4, -1])
    probe.take(4)
    assert list(probe.hits) == [True], "from an earlier text"
    probe = Probe([5, 6, 7, 8, 9], [])
    for _ in range(5000):  # its memory grows
        probe.take(6 if probe.hits and len(probe.hits) % 2 else 7)
    assert all(probe.hits)


def test_the_probe_finds_what_the_device_finds() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 4, 300)
    for end in range(20, 300, 7):
        probe = Probe(text[:end].tolist())
        wanted = drafts_of(text[:end], 0, 0, 1, 1)
        probe.take(wanted[0])
        assert list(probe.hits) == [True]


def run(pace: Pace, tokens: Sequence[int], rights: Sequence[bool], times: StepTimes) -> tuple[list[int], float]:
    """Columns of the steps of a text, and the time it takes. rights: which of its tokens are drafted rightly."""
    at, end, took, columns = 0, len(tokens), 0.0, []
    flying: list[tuple[int, int]] = []
    while at < end:
        while len(flying) < 2 and (size := pace.next()) is not None:
            flying.append((size.columns, size.steps))
        width, steps = flying.pop(0)
        begin = at
        for _ in range(steps):
            columns.append(width)
            took += times.of[width] if width > 1 else 1.0
            accepted = 0
            while accepted < width - 1 and at < end - 1 and rights[at]:
                at, accepted = at + 1, accepted + 1
            at = min(at + 1, end)
        pace.take(tokens[begin:at])
    return columns, took


def pace_of(tokens: Sequence[int], prompt: Sequence[int] = (1, 2, 3)) -> Pace:
    return Pace(Drafts(), len(tokens), 8, Probe(prompt), TIMES)


def test_a_copy_is_made_by_wide_steps_and_all_else_by_steps_without_drafts() -> None:
    source = list(range(10, 400))
    columns, took = run(pace := pace_of(source, [*source, 9]), source, [True] * len(source), TIMES)
    assert pace.made == len(source) and columns.count(16) > 10 and took < len(source) / 3
    new = list(range(1000, 1300))
    columns, took = run(pace_of(new), new, [False] * 300, TIMES)
    assert set(columns) == {1} and took == 300


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_drafts_never_cost_more_than_their_share(share: float) -> None:
    """Tokens that look as if they could be drafted, and then cannot."""
    rng = np.random.default_rng(2)
    tokens = [int(t) for t in rng.choice([7, 8], 2000, p=[share, 1 - share])]
    probe, rights = Probe([7, 8, 7]), []
    for token in tokens:
        probe.take(token)
        rights.append(probe.hits[-1])
    wrong = [False] * len(rights)  # the device finds none of them right
    _, took = run(pace_of(tokens, [7, 8, 7]), tokens, wrong, TIMES)
    assert took <= len(tokens) * (1 + LOSS_SHARE) + LOSS + 2 * 4 * (1.65 - 1) + 1


def test_tries_that_fail_become_few() -> None:
    """A text that looks copied, none of whose drafts is right: 0.98 of the speed without drafts is asked for 256 tokens. A step that is
    submitted alone takes 0.12 more of a step without drafts than TIMES says (bench/results/2026-11-28_h200_580-159-04_drafts.md)."""
    same = [7] * 256
    columns, took = run(pace_of(same), same, [False] * 256, TIMES)
    tries = [i for i, c in enumerate(columns) if c > 1]
    assert 256 / (took + 0.12 * len(tries)) >= 0.98
    assert {columns[i] for i in tries} == {8}, "what costs little, until a draft was right"
    assert max(np.diff(tries)) <= LONGEST_PAUSE + 2 * 8, "it is tried again: a pause, and two submits that are in flight"


def test_experts_lose_little_to_drafts_that_are_wrong() -> None:
    """A step of several tokens of a model of experts takes three to five times one without drafts (gpt-oss 20B and qwen3moe 30B, H200)."""
    for times in ({4: 3.0, 8: 3.3, 16: 3.95}, {4: 2.55, 8: 3.4, 16: 5.05}):
        pace = Pace(Drafts(), 256, 8, Probe([1, 2, 3]), StepTimes(times))
        columns, took = run(pace, [7] * 256, [False] * 256, StepTimes(times))
        assert 256 / (took + 0.12 * sum(c > 1 for c in columns)) >= 0.97


def test_a_copy_behind_tries_that_fail_has_drafts_again() -> None:
    same = [7] * 1000
    pace = pace_of(same)
    columns, took = run(pace, same, [i >= 300 for i in range(1000)], TIMES)
    first = sum(columns[i] == 1 for i in range(len(columns)))
    assert first <= 300 + LONGEST_PAUSE + 2 * 8 and took < 300 + LONGEST_PAUSE + 2 * 8 + 700 / 8


@pytest.mark.parametrize("length", [2, 3, 4])
def test_drafts_that_pay_have_no_pauses(length: int) -> None:
    """Of so many tokens all but one are drafted rightly: as many steps with drafts as without the rule."""
    tokens, rights = [7] * 400, [i % length != length - 1 for i in range(400)]
    with_rule, _ = run(pace_of(tokens), tokens, rights, TIMES)
    pace = pace_of(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{Pace.__module__}.LONGEST_PAUSE", 0)
        without, _ = run(pace, tokens, rights, TIMES)
    assert with_rule == without


def test_a_text_asks_for_programs_only_where_drafts_pay() -> None:
    pace = Pace(Drafts(), 200, 8, Probe([1, 2, 3]), None)
    pace.next()
    pace.take([5, 6, 9, 4, 11, 12, 13, 14])
    assert not pace.wants_drafts
    pace.next()
    pace.take([1, 2, 3, 5, 6, 9, 4, 11])
    pace.next()
    pace.take([12, 13, 14, 1, 2, 3, 5, 6])
    assert pace.wants_drafts


def test_pinned_steps_have_one_width() -> None:
    tokens = list(range(40))
    columns, _ = run(Pace(Drafts(pinned=8), 40, 8, None, None), tokens, [True] * 40, TIMES)
    assert set(columns) == {8}


@pytest.mark.parametrize("length", [1, 3, 4])
def test_pinned_steps_end_with_the_text(length: int) -> None:
    """Where each step makes as many tokens, no step is in flight when the text is there."""
    tokens, rights = list(range(192)), [i % length != length - 1 for i in range(192)]
    columns, _ = run(pace := Pace(Drafts(3, pinned=4), 192, 8, None, None), tokens, rights, TIMES)
    assert pace.made == 192 and len(columns) == 192 // length and not pace.flying


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(DraftError, match="expected 0 <= least <= most"):
        Drafts(most=3, least=4)
    with pytest.raises(DraftError, match="5 columns of every step; expected one of 4, 8, 16, or 0"):
        Drafts(pinned=5)
    assert (
        Drafts(most=0).classes == ()
        and Drafts(most=3).classes == (4,)
        and Drafts(most=4).classes == (4, 8)
        and Drafts().classes == (4, 8, 16)
    )


def test_counts_add_up() -> None:
    a, b = DraftCounts(1, 3, 2, ((1, 1), (1, 1), (1, 0))), DraftCounts(2, 2, 1, ((2, 1),))
    assert a + b == b + a == DraftCounts(3, 5, 3, ((3, 2), (1, 1), (1, 0)))
