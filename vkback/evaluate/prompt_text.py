"""Whether a model goes on after a long prompt as it does where the same tokens went through it one by one.

The text is greedy, from the logits of token-by-token decode. It is then fed to the engine after it has read the prompt in programs of many
tokens. Both round, each in its own way, so a step counts only where the best logit leads by MARGIN times the rms difference of all logits.
That is more than six times the rms difference of two such errors, so chance makes no counted step another token; an error of some rows of
the cache or of a few logits does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse

MARGIN = 9.0
"""6 sqrt(2), and a little more."""


@dataclass(frozen=True)
class TextCheck:
    """steps: tokens generated; counted: those with a margin; wrong: counted ones whose best token is another, by number; nmse: of the
    logits after the prompt and along the text; rms: of their differences."""

    steps: int
    counted: int
    wrong: tuple[int, ...]
    nmse: float
    rms: float

    @property
    def text(self) -> str:
        return (
            f"{self.counted - len(self.wrong)} of {self.counted} tokens the same, {self.steps - self.counted} of {self.steps} too close to "
            f"tell (margin under {MARGIN * self.rms:.2g}); logits: NMSE {self.nmse:.1e}"
        )


def check_text(engine: Engine, ids: Sequence[int], steps: int) -> TextCheck:
    """Compare `steps` tokens after the prompt `ids`. The engine's context must hold both; what it held before is forgotten."""
    engine.reset()
    for token in ids[:-1]:
        engine.decode_logits(token)
    token, rows = ids[-1], []
    for _ in range(steps):
        rows.append(engine.decode_logits(token))
        token = int(rows[-1].argmax())
    want = np.stack(rows).astype(np.float64)
    text = want.argmax(axis=1)
    engine.reset()
    engine.prompt(ids[:-1])
    got = np.stack([engine.decode_logits(int(t)) for t in (ids[-1], *text[:-1])])
    return compared(got, want)


def compared(got: np.ndarray, want: np.ndarray) -> TextCheck:
    """Of logits [steps, n_vocab] after the same tokens."""
    rms = float(np.sqrt(np.mean(np.square(got - want))))
    best = np.sort(want, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > MARGIN * rms
    wrong = np.flatnonzero(clear & (got.argmax(axis=1) != want.argmax(axis=1)))
    return TextCheck(len(want), int(clear.sum()), tuple(int(i) for i in wrong), nmse(got, want), rms)
