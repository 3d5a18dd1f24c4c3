"""Options of a generation, as keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from vkback.api.errors import ModelError
from vkback.models.sampler import Sampler


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`, `stream` and `chat`.

    max_tokens   tokens at most; None: until an end-of-text token or the end of the context
    temperature  0 takes the most likely token
    top_k        choose among this many; 0 for all
    top_p        choose among the likeliest that make up this share; 1 for all
    min_p        drop tokens less likely than this share of the likeliest; 0 for none
    seed         the same seed gives the same text
    stop         strings that end the text, which does not contain them
    repeat_penalty, presence_penalty, frequency_penalty
                 of tokens that the last `penalty_last_n` tokens of the text have (-1: all of it); 1, 0 and 0 for none
    logit_bias   token -> what is added to its logit; -inf bans it
    logprobs     None, or how many of the likeliest tokens to tell at each step beside the one chosen; costs speed, changes no token
    ignore_eos   go on after an end-of-text token
    json_schema  the text is JSON of this schema, {"type": "object"} for any object, and ends when it is whole; needs `vkback[json]`
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    ignore_eos: bool
    json_schema: Mapping[str, Any] | str | None


@dataclass(frozen=True)
class Options:
    """GenerateOptions with their defaults, checked."""

    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    stop: str | Sequence[str] = ()
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Raises ModelError naming an option that there is not, or a value that cannot be."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise ModelError(f"[model] no option is called {name!r}; there are {', '.join(known)}")
        options = cls(**given)
        for name, ok, expected in (
            ("max_tokens", options.max_tokens is None or options.max_tokens >= 1, "at least 1, or None"),
            ("temperature", options.temperature >= 0.0, "0 or more"),
            ("top_k", options.top_k >= 0, "0 or more"),
            ("top_p", 0.0 <= options.top_p <= 1.0, "0 to 1"),
            ("min_p", 0.0 <= options.min_p <= 1.0, "0 to 1"),
            ("seed", options.seed >= 0, "0 or more"),
            ("repeat_penalty", options.repeat_penalty > 0.0, "above 0 (1 for none)"),
            ("penalty_last_n", options.penalty_last_n >= -1, "0 or more, or -1 for the whole text"),
            ("logprobs", options.logprobs is None or options.logprobs >= 0, "0 or more, or None"),
            ("ignore_eos", not options.ignore_eos or options.json_schema is None, "False with json_schema, which says where the text ends"),
        ):
            if not ok:
                raise ModelError(f"[model] {name} is {getattr(options, name)!r}, expected {expected}")
        return options

    @property
    def sampler(self) -> Sampler:
        return Sampler(
            self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.repeat_penalty, self.presence_penalty,
            self.frequency_penalty, self.penalty_last_n, tuple(sorted((self.logit_bias or {}).items())),
        )  # fmt: skip

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
