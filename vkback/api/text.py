"""The text that a generation makes of tokens, as they come: pieces of it, why it ends, log probabilities, timings. A stream has one, and
so has each text of a batch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vkback.api.message import MessageReader
from vkback.api.options import Options
from vkback.api.result import Chunk, FinishReason, Result, Timings, TokenLogprob
from vkback.engine.stop_strings import StopStrings
from vkback.models.registry import Model


class GeneratedText:
    """Takes tokens, gives pieces of text. Part of a character, and of what may be a stop string, is held back.

    made     tokens so far
    finish   why it ended; None: it goes on
    timings  what the caller knows of them
    """

    def __init__(self, model: Model, options: Options, reused: int = 0, reader: MessageReader | None = None) -> None:
        """reused: tokens of the prompt that were in the KV cache already. reader: of a reply that has thoughts beside the answer."""
        self._model, self._options = model, options
        self._reader = reader or MessageReader()
        self._stops = StopStrings(options.stops)
        self._decoder = model.tokenizer.stream()
        self._ends = frozenset() if options.ignore_eos or not model.has_text else model.tokenizer.eos_ids
        self.made: list[int] = []
        self.finish: FinishReason | None = None
        self.timings = Timings(reused_tokens=reused)
        self._logprobs: list[TokenLogprob] = []
        self._told = 0  # tokens that chunks have had

    @property
    def result(self) -> Result:
        """All so far; finish_reason of a text that has not come to its end is "closed"."""
        made, logprobs = tuple(self.made), tuple(self._logprobs)
        return self._reader.result(Result("", made, self.finish or "closed", self.timings, logprobs, self._options.seed))

    def take(self, token: int, logits: npt.NDArray[np.float32] | None = None) -> Chunk | None:
        """The next token, and the piece of text that it completes, if it does. It may end the text, whose last piece that is then.

        logits  F32 [n_vocab] that it was picked from, needed where the options ask for log probabilities
        """
        self.made.append(token)
        if self._options.logprobs is not None and logits is not None:
            self._logprobs.append(self._logprob(token, logits, self._options.logprobs))
        if token in self._ends or token in self._options.stop_ids:
            self.finish = "eos" if token in self._ends else "stop"
            return self.rest()
        text = self._stops.feed(self._decoder.feed(token))
        if self._stops.found:
            self.finish = "stop"
            return self._chunk(text, last=True)
        return self._chunk(text) if text or not self._model.has_text else None

    def end(self, reason: FinishReason) -> None:
        """It ends here, unless it has ended before."""
        if self.finish is None:
            self.finish = reason

    def rest(self) -> Chunk | None:
        """What was held back, at the end; None where that is nothing."""
        text = self._stops.feed(self._decoder.flush())
        if not self._stops.found:
            text += self._stops.flush()
        return self._chunk(text, last=True) if text or self._told < len(self.made) or self._reader.holds else None

    def _chunk(self, text: str, *, last: bool = False) -> Chunk | None:
        """None where the reader holds the text back."""
        piece = self._reader.feed(text)
        thoughts, answer, calls = piece.thoughts, piece.text, piece.calls
        if last:
            rest = self._reader.flush()
            thoughts, answer, calls = thoughts + rest.thoughts, answer + rest.text, calls + rest.calls
        elif text and not piece:
            return None
        first, self._told = self._told, len(self.made)
        return Chunk(answer, tuple(self.made[first:]), tuple(self._logprobs[first:]), thoughts, calls)

    def _logprob(self, token: int, logits: npt.NDArray[np.float32], count: int) -> TokenLogprob:
        x = logits.astype(np.float64)
        log_sum = float(x.max()) + math.log(float(np.exp(x - x.max()).sum()))
        top = tuple((int(i), self._spelled(int(i)), float(x[i]) - log_sum) for i in _largest(x, count))
        return TokenLogprob(token, self._spelled(token), float(x[token]) - log_sum, top)

    def _spelled(self, token: int) -> str:
        return self._model.tokenizer.token_bytes(token, special=True).decode("utf-8", "replace") if self._model.has_text else ""


def _largest(x: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest, the largest first; of equal ones the first comes first. Sorting all takes 10 ms of 128k values."""
    if not count:
        return np.empty(0, np.intp)
    among = np.flatnonzero(x >= np.partition(x, -count)[-count]) if count < len(x) else np.arange(len(x))
    return among[np.argsort(-x[among], kind="stable")][:count]
