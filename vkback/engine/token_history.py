"""The tokens that a model has taken in, and those of texts before."""

from __future__ import annotations

from collections.abc import Sequence

from vkback.engine.sampler import EARLIER


class TokenHistory:
    """What the first rows of the caches hold.

    tokens   of the text so far, in the order of the rows
    earlier  of texts that were left, each with -1 behind it: drafts may be taken from them
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.earlier: list[int] = []

    @property
    def n_past(self) -> int:
        """Tokens so far, and the position of the next one."""
        return len(self.tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens have gone through the model."""
        self.tokens += tokens

    def leave(self, n: int) -> None:
        """Only the first n tokens stay; the others are of an earlier text from here on."""
        if n < len(self.tokens):
            self.earlier = [*self.earlier, *self.tokens[n:][-EARLIER:], -1][-EARLIER:]
        del self.tokens[n:]

    def go_back(self, n: int) -> list[int]:
        """Forget the tokens behind the first n, which the model is going to take in once more; these tokens."""
        again = self.tokens[n:]
        del self.tokens[n:]
        return again
