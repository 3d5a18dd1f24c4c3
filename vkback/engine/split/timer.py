"""How fast several texts run over layers on several devices, in turn: what `vkbench batch -ts` measures."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from vkback.engine.batch.timer import Times
from vkback.engine.engine import Engine
from vkback.engine.split.layers import SplitError


class TurnsTimer:
    """As `Timer` of vkback/engine/batch/timer.py: sequences of random tokens, each with a cache of its own, at most one a device."""

    def __init__(self, engine: Engine, max_sequences: int) -> None:
        """Raises SplitError for more sequences than run at once, and OutOfDeviceMemory where there is none for their caches."""
        count = len(engine.devices)
        if max_sequences > count:
            raise SplitError(
                f"[split] {max_sequences} sequences at once: layers on {count} devices make {count} texts at once, in turn; expected at "
                f"most -npl {count}, or one --device, where all share a step"
            )
        self._undo = ExitStack()
        self._engines = [engine]
        self._rng = np.random.default_rng(1)
        try:
            for _ in range(max_sequences - 1):
                self._engines.append(self._undo.enter_context(engine.beside()))
        except BaseException:
            self._undo.close()
            raise

    def time(self, pp: int, tg: int, pl: int, *, shared: bool, depth: int) -> Times:
        """As of `Timer`, but for `shared`, which needs a cache of all sequences. Prompts are read one after another, each by all devices;
        then the texts take turns."""
        assert not shared
        engines = self._engines[:pl]
        for engine in engines:
            engine.reset()
            engine.prepare(prompt=min(max(pp - 1, depth), engine.n_ctx))
            if depth:
                engine.prompt(self._tokens(engine, depth))
        prompts = [self._tokens(engine, pp) for engine in engines]
        begun = time.perf_counter()
        for engine, prompt in zip(engines, prompts, strict=True):
            engine.prompt(prompt[:-1])
        read = time.perf_counter()
        texts = [e.generate(prompt[-1], tg, stop_at_eos=False) for e, prompt in zip(engines, prompts, strict=True)]
        while texts:
            texts = [text for text in texts if next(text, None) is not None]
        return Times(read - begun, time.perf_counter() - read, pl * (pp + depth + tg))

    def _tokens(self, engine: Engine, n: int) -> list[int]:
        found: list[int] = self._rng.integers(0, engine.model.hp.n_vocab, n).tolist()
        return found

    def close(self) -> None:
        self._undo.close()
