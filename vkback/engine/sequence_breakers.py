"""What breaks the repetitions that DRY counts: texts, which tokens may hold, or begin."""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from vkback.engine.sampler import SamplerError
from vkback.models.registry import Model
from vkback.ops.sampling.dry import MAX_TAILS, TAIL_WORDS, Breakers


class SequenceBreakers:
    """Of a model's vocabulary. A token breaks alone where its text holds a breaker; where it ends in the beginning of one, the tokens of
    the rest must follow."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.of = lru_cache(8)(self._of)

    @cached_property
    def _spelled(self) -> list[bytes]:
        tokenizer, n_vocab = self._model.tokenizer, self._model.hp.n_vocab
        return [tokenizer.token_bytes(i, special=True) if i < tokenizer.n_vocab else b"" for i in range(n_vocab)]

    def _of(self, texts: tuple[str, ...]) -> Breakers:
        """Raises SamplerError for more beginnings than there is room for."""
        words = np.zeros(self._model.hp.n_vocab, np.int32)
        if not self._model.has_text:
            return Breakers(words)
        breakers = [text.encode() for text in texts if text]
        parts = list(dict.fromkeys((b[:n], b[n:]) for b in breakers for n in range(1, len(b))))
        if len(parts) > MAX_TAILS:
            raise SamplerError(
                f"[sampler] dry_sequence_breakers: {len(parts)} bytes behind the first of each, at most {MAX_TAILS} are supported; give "
                "fewer or shorter ones"
            )
        tokenizer = self._model.tokenizer
        rests = (tokenizer.encode(rest.decode("utf-8", "replace"), add_bos=False, add_end=False) for _, rest in parts)
        tails = tuple(tuple(rest[: TAIL_WORDS - 1]) for rest in rests)
        for token, spelled in enumerate(self._spelled):
            if any(b in spelled for b in breakers):
                words[token] = 1
                continue
            for i, (head, _) in enumerate(parts):
                if spelled.endswith(head):
                    words[token] |= np.int32(np.uint32(2 << i).view(np.int32))
        return Breakers(words, tails)
