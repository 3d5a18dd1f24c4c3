"""What tests of drafts in batches share: prompts, and steps of which drafts always pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from vkback.engine.batch import scheduler
from vkback.engine.batch.shares import best_share

PROMPTS = (tuple(range(40, 63)), (5, 6, 7, 5, 6, 8, 5, 6, 7), (100, 101), tuple(range(9, 50)))


@pytest.fixture(autouse=True)
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that others use, too, drafts would pay at times and at times not. For each test of a module that imports it."""

    def shared(
        gains: Sequence[Sequence[float]], seconds: Mapping[int, float], plain: tuple[int, float], *, going: bool
    ) -> tuple[int, list[int]] | None:
        return best_share(gains, dict.fromkeys(seconds, 1.0), (plain[0], 1.0), going=True)

    monkeypatch.setattr(scheduler, "best_share", shared)
    monkeypatch.setattr(scheduler, "LOST_STEPS", 1e9)
