"""What a drafter that reads what the target keeps of a text must hold, an MTP block as an EAGLE-3 head: it changes no text, and goes by the
rows that a prompt would have left."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler
from vkback.models.mtp import HIDDEN

N_CTX = 96
PROMPT = (5, 6, 7, 5, 6, 8, 5, 6, 7)

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(temp=0.8, top_k=20, seed=3),
    "penalties": Sampler(temp=0.7, repeat_penalty=1.2, penalty_last_n=-1, seed=5),
}


def text_of(engine: Engine, sampler: Sampler, drafts: Drafts | None, n: int = 30) -> list[int]:
    engine.reset()
    engine.prompt(PROMPT[:-1])
    return list(engine.generate(PROMPT[-1], n, sampler=sampler, stop_at_eos=False, drafts=drafts))


def check_texts(engine: Engine, samplers: Mapping[str, Sampler]) -> list[int]:
    """The text of each sampler is the same without drafts, with three a step of the drafter, and with wrong ones; that of the last one."""
    text: list[int] = []
    for name, sampler in samplers.items():
        text = text_of(engine, sampler, Drafts(pinned=4, known=(-1,)))
        assert text_of(engine, sampler, Drafts(3, pinned=4, model=True)) == text, name
        counts = engine.draft_counts
        assert counts.drafted >= 3 * (counts.steps - 2), "three a step"
        wrong = tuple((t + 1) % engine.model.hp.n_vocab for t in (*PROMPT, *text))
        assert text_of(engine, sampler, Drafts(pinned=4, known=wrong)) == text, name
    return text


def check_rows(engine: Engine, text: list[int], block: int) -> None:
    """What the drafter has of the text that the engine has just made is what it has where that is a prompt. block: of its K and V."""
    rows, found = engine.n_past, engine.snapshot().arrays
    engine.reset()
    engine.prompt([*PROMPT, *text][:rows])
    read = engine.snapshot().arrays
    for key in (HIDDEN, f"cache_k_l{block}", f"cache_v_l{block}"):
        same = np.asarray(read[key], np.float64)[:, : rows - (key != HIDDEN)]  # the last entry is that of the last token
        here = np.asarray(found[key], np.float64)[:, : same.shape[1]]
        assert np.square(here - same).sum() < 1e-5 * np.square(same).sum(), key
