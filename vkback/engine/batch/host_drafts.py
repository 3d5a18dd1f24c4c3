"""Drafts of a text of a batch that the host looks up between two steps, since it has to see every token: a grammar's masks, logits for the
caller. Numbers alone; a step of the batch verifies them on the device as it does others (docs/drafts.md)."""

from __future__ import annotations

from collections.abc import Sequence

from vkback.engine.constraint import Ahead, Constraint, only_token
from vkback.engine.drafts import KEPT_SHARE, Drafts, Probe, Rest


class HostDrafts:
    """Of one text.

    ahead  drafts for its next step, with the masks of its constraint
    used   how many of them the step that was submitted last has
    gains  tokens that a step with 0, 1, ... of them is expected to make; none without any
    """

    def __init__(self, drafts: Drafts, constraint: Constraint | None, text: Sequence[int]) -> None:
        """text: its tokens so far."""
        self._drafts, self._constraint = drafts, constraint
        self._probe = Probe(text) if drafts.known is None else None
        self._length = len(text)
        self._right, self._tried = 1.0, 1.25  # of the latest guesses; at first most are
        self._rest = Rest()
        self.ahead = Ahead()
        self.used = 0
        self.gains: tuple[float, ...] = ()

    def take(self, made: Sequence[int]) -> None:
        """The step that was submitted last has made these tokens. Drafts that had no part in it tell, too, how well they would do."""
        right = tried = 0
        for i, (guess, token) in enumerate(zip(self.ahead.tokens, made, strict=False)):
            if not self._sure(i):
                tried += 1
                right += guess == token
            if guess != token:
                break
        if tried:
            self._right, self._tried = KEPT_SHARE * self._right + right, KEPT_SHARE * self._tried + tried
        if self.ahead.tokens:
            self._rest.note(used=self.used > 0)
        if self._probe is not None:
            for token in made:
                self._probe.take(token)
        self._length += len(made)

    def look(self, most: int) -> None:
        """Find at most so many drafts, and the mask of the next token in any case."""
        most = min(most, self._drafts.most)
        guesses = [] if self._constraint is not None and not self._rest.over() else self._guesses(most)
        self.ahead = Ahead(guesses) if self._constraint is None else self._constraint.ahead(guesses, most)
        self.used, gains, chance = 0, [1.0], 1.0
        for i in range(len(self.ahead.tokens)):
            chance *= 1.0 if self._sure(i) else self._right / self._tried
            gains.append(gains[-1] + chance)
        self.gains = tuple(gains) if len(gains) > max(1, self._drafts.least) else ()

    def _sure(self, i: int) -> bool:
        """Whether nothing but draft i can come in its place."""
        return self._drafts.known is not None or (bool(self.ahead.masks) and only_token(self.ahead.masks[i]) >= 0)

    def _guesses(self, most: int) -> list[int]:
        if self._probe is not None:
            return self._probe.ahead(most)
        known = [*(self._drafts.known or ())[self._length :][:most]]
        return known[: next((i for i, token in enumerate(known) if token < 0), len(known))]
