"""How many drafts each text of a step has: where the next column is expected to make the most tokens, in a step of the width that makes the
most tokens for its time. Numbers alone; what a text gains by drafts is known from its latest tokens (vkback/engine/drafts.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from vkback.engine.drafts import ENTRY, MOST, tokens_per_step

DRAFT_WIDTHS = (4, 8, 16, 32, 64)
"""Columns of steps that are made wider for drafts: more classes take longer to compile."""

COUNTS = (1, 2, 3, 5, 7, 11, 15)
"""Drafts of a text in a step that are thought of."""

GUESS = 0.35
"""A step of twice the columns is taken for 2^GUESS times as long before it was measured; on GPUs it takes less."""

WIDER = 2
"""A step is tried with so many times the columns of one that was measured, and no more."""


def gains_of(hits: Sequence[bool], most: int = MOST) -> tuple[float, ...]:
    """Tokens that steps with 0, 1, ... drafts make of a text of whose latest tokens each could (True) or could not be drafted; none where
    none could."""
    if not any(hits) or most < 1:
        return ()
    found = [1.0]
    for count in (c for c in COUNTS if c <= most):
        made = max(tokens_per_step(hits, count + 1), found[-1])
        missing = count + 1 - len(found)
        found += [found[-1] + (made - found[-1]) * (i + 1) / missing for i in range(missing)]
    return tuple(found)


def allocation(gains: Sequence[Sequence[float]], columns: int) -> list[tuple[float, list[int]]]:
    """For 0, 1, ... up to so many columns of drafts: the tokens expected beside one of each text, and the drafts of each.

    gains  of each text, as `gains_of` gives them
    """
    shares, total = [0] * len(gains), 0.0
    found = [(0.0, list(shares))]
    while len(found) <= columns:
        more = [(of[n + 1] - of[n], -n, -i) for i, (of, n) in enumerate(zip(gains, shares, strict=True)) if n + 1 < len(of)]
        best, _, last = max(more, default=(0.0, 0, 0))  # of equal ones who has the fewest
        if best <= 0:
            break
        text = -last
        shares[text] += 1
        total += best
        found.append((total, list(shares)))
    return found


def best_share(
    gains: Sequence[Sequence[float]], seconds: Mapping[int, float], plain: tuple[int, float], *, going: bool
) -> tuple[int, list[int]] | None:
    """Columns of the step, and the drafts of each text; None where no drafts pay.

    seconds  of a step by its columns, all more than there are texts; 0: not known
    plain    columns of the step without drafts, and its seconds
    going    the step before had drafts, so that they go on where they gain anything
    """
    if not seconds or not plain[1]:
        return None
    texts = len(gains)
    shared = allocation(gains, max(seconds) - texts)
    best, chosen = (1.0 if going else ENTRY) * texts / plain[1], None
    known, power = plain, GUESS
    for width, took in sorted(seconds.items()):
        if not took and width > max(WIDER * known[0], 4):
            break  # nobody knows what that takes: narrower ones tell first
        time = took or known[1] * max(1.0, width / known[0]) ** power
        if took and width > known[0]:
            known, power = (width, took), max(power, log(took / plain[1], 2) / max(log(width / plain[0], 2), 1.0))
        more, shares = shared[min(width - texts, len(shared) - 1)]
        if more and (texts + more) / time > best:
            best, chosen = (texts + more) / time, (width, shares)
    return chosen
