"""Options of a generation, as keywords."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypedDict, TypeVar

from vkback.api import given
from vkback.api.adapters import Chosen, LoraChoice, chosen
from vkback.api.errors import ModelError
from vkback.engine.constraint import Gbnf
from vkback.engine.host_loop import LogitsProcessor
from vkback.engine.sampler import FIRST, SAMPLERS, ChainSettings, Sampler
from vkback.errors import did_you_mean

Method = TypeVar("Method", bound=Callable[..., Any])

SEED_BITS = 32


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`, `stream` and `chat`.

    max_tokens   tokens at most; None: until an end-of-text token or the end of the context; 0: read the prompt and make none
    temperature  0 takes the most likely token
    top_k        choose among this many; 0 for all
    top_p        choose among the likeliest that make up this share; 1 for all
    min_p        drop tokens less likely than this share of the likeliest; 0 for none
    seed         the same seed gives the same text; None: another one each time, which the result tells
    stop         a string or several that end the text, which does not contain them, and token ids, which end it after them
    repeat_penalty, presence_penalty, frequency_penalty
                 of tokens that the last `penalty_last_n` tokens of the text have (-1: all of it); 1, 0 and 0 for none
    typical_p    keep tokens whose surprise is nearest to the entropy, that make up this share; 1 for all
    top_n_sigma  drop tokens whose logit is more than so many standard deviations below the largest; 0 or below for none
    xtc_probability, xtc_threshold
                 with this chance, of tokens at least as likely as the threshold keep the least likely alone; 0 for never
    dynatemp_range, dynatemp_exponent
                 temperature by the entropy, from temperature - range to temperature + range; 0 for the temperature alone
    mirostat, mirostat_tau, mirostat_eta
                 1 or 2: hold the surprise of tokens at tau bits, in place of all filters, learning by eta; 0 for none
    dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers
                 a token that would lengthen a repetition of n tokens of the last `dry_penalty_last_n` (-1: all) loses multiplier * base **
                 (n - allowed_length) of its logit; repetitions end at the breakers; multiplier 0 for none
    samplers     which of them run, in this order: names as llama.cpp has them, in a list or with ; between. Penalties and DRY come first
    logit_bias   token -> what is added to its logit; -inf bans it
    logprobs     None, or how many of the likeliest tokens to tell at each step beside the one chosen; costs speed, changes no token
    ignore_eos   go on after an end-of-text token
    logits_processor
                 a function or several that change the logits of each token in turn, before all else: (tokens so far, logits) -> logits, or
                 None where they were changed in place. The slow way: each token waits for its logits, and is picked on the host
    draft_max    drafts of a step at most, 0 for none; None: as the model was loaded
    lora         adapters of `load_adapter` that the text is made with: one, (adapter, scale), or a list of these; [] for none; None: all,
                 times the scale of each
    json_schema  the text is JSON of this schema, {"type": "object"} for any object, and ends when it is whole: a dict, JSON, or a class of
                 pydantic; needs `vkback[json]`
    grammar      the text is of this grammar, in llama.cpp's language, GBNF, and ends when nothing more may come; needs `vkback[json]`
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | int | Sequence[str | int] | None
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str]
    samplers: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    ignore_eos: bool
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    draft_max: int | None
    lora: LoraChoice
    json_schema: Mapping[str, Any] | str | type | None
    grammar: str | None


def with_keywords(method: Method) -> Method:
    """Decorator: `help` shows the keywords of GenerateOptions with the method."""
    method.__doc__ = f"{method.__doc__}\n\n        Keywords, all optional:\n{str(GenerateOptions.__doc__).partition(chr(10))[2]}"
    return method


@dataclass(frozen=True)
class Options(ChainSettings):
    """GenerateOptions with their defaults, checked."""

    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    stop: tuple[str | int, ...] = ()
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    logits_processor: tuple[LogitsProcessor, ...] = ()
    draft_max: int | None = None
    lora: Chosen | None = None
    json_schema: str | None = None
    grammar: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], n_vocab: int | None = None) -> Options:
        """n_vocab: ids are below it. Raises ModelError naming an option that there is not, or a value that cannot be."""
        known = list(CHECKS)
        for name in options:
            if name not in known:
                near = f" Did you mean {ELSEWHERE[name]}?" if name in ELSEWHERE else did_you_mean(name, known)
                raise ModelError(f"[model] no option is called {name!r}.{near} There are {', '.join(known)}")
        checked = cls(**{name: CHECKS[name](name, value) for name, value in options.items()})
        if checked.ignore_eos and checked.form is not None:
            which = "json_schema" if checked.grammar is None else "grammar"
            raise given.wrong("ignore_eos", True, f"False with {which}, which says where the text ends")
        if checked.grammar is not None and checked.json_schema is not None:
            raise ModelError("[model] json_schema and grammar exclude each other: each says what the text is; give one of them")
        for name, ids in (("logit_bias", checked.logit_bias or ()), ("stop", checked.stop_ids)):
            for token in ids:
                if n_vocab is not None and not 0 <= token < n_vocab:
                    raise ModelError(f"[model] {name}: token {token}, expected an id in 0..{n_vocab - 1}")
        return checked

    @property
    def sampler(self) -> Sampler:
        return Sampler(
            0.0 if self.top_k == 1 and self.samplers is None and not self.mirostat else self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.repeat_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.penalty_last_n,
            tuple(sorted((self.logit_bias or {}).items())),
            **self.settings,
        )

    @property
    def form(self) -> str | None:
        """What the text is held to: a JSON schema, or a Gbnf."""
        return self.json_schema if self.grammar is None else Gbnf(self.grammar)

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(s for s in self.stop if isinstance(s, str))

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(s for s in self.stop if isinstance(s, int))


def _count(name: str, value: Any) -> int | None:
    return None if value is None else given.whole(name, value, "a whole number, 0 or more, or None", 0)


def _seed(name: str, value: Any) -> int:
    return secrets.randbits(SEED_BITS) if value is None else given.whole(name, value, "a whole number, 0 or more, or None for any", 0)


def _penalty(name: str, value: Any) -> float:
    found = given.number(name, value, expected := "a number above 0 (1 for none)")
    if found <= 0.0:
        raise given.wrong(name, value, expected)
    return found


def _stop(name: str, value: Any) -> tuple[str | int, ...]:
    expected = "a string, a token id, or several of them"
    if value is None:
        return ()
    if isinstance(value, bytes | Mapping):
        raise given.wrong(name, value, expected)
    found: list[str | int] = []
    for each in value if isinstance(value, Iterable) and not isinstance(value, str) else (value,):
        if each == "":
            raise given.wrong(name, value, "strings that are not empty")
        found.append(each if isinstance(each, str) else given.whole(name, each, expected))
    return tuple(found)


SAMPLER_NAMES = {
    **{name: name for name in SAMPLERS},
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "min-p": "min_p",
    "typical": "typ_p",
    "typical_p": "typ_p",
    "typical-p": "typ_p",
    "typ": "typ_p",
    "typ-p": "typ_p",
    "top-n-sigma": "top_n_sigma",
    "temp": "temperature",
}
"""Names of samplers, and those that llama.cpp takes beside them."""

SAMPLER_LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p"} | {
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
"""As llama.cpp's --sampling-seq has them."""


def _samplers(name: str, value: Any) -> tuple[str, ...] | None:
    expected = f"names with ; between, or a list of them, each once: {', '.join(SAMPLERS)}; or letters, as edskypmxt"
    if value is None:
        return None
    if isinstance(value, str):
        letters = value not in SAMPLER_NAMES and all(letter in SAMPLER_LETTERS for letter in value)
        found = [SAMPLER_LETTERS[letter] for letter in value] if letters else [part.strip() for part in value.split(";")]
    elif isinstance(value, Iterable):
        found = list(value)
    else:
        raise given.wrong(name, value, expected)
    named = [SAMPLER_NAMES.get(each.lower()) if isinstance(each, str) else None for each in found]
    if None in named or len(set(named)) < len(named):
        raise given.wrong(name, value, expected)
    order = [each for each in named if each is not None]
    # Where they stand makes no difference for those.
    return tuple([each for each in FIRST if each in order] + [each for each in order if each not in FIRST])


def _breakers(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(each, str) for each in found):
        raise given.wrong(name, value, "a text, or a list of texts")
    return found


def _mirostat(name: str, value: Any) -> int:
    found = given.whole(name, value, expected := "0 (off), 1 or 2", 0)
    if found > 2:
        raise given.wrong(name, value, expected)
    return found


def _bias(name: str, value: Any) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise given.wrong(name, value, "a dict, token id -> number, as {42: -1.5}")
    found = {}
    for token, added in value.items():
        id = given.whole(f"{name}: a key", token, "a token id, as in {42: -1.5}")
        if not isinstance(added, Real) or isinstance(added, bool) or math.isnan(added) or added == math.inf:
            raise given.wrong(f"{name}[{id}]", added, "a number, or -inf to ban the token")
        found[id] = float(added)
    return found


def _processors(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    found = () if value is None else (value,) if callable(value) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(callable(each) for each in found):
        raise given.wrong(name, value, "a function (tokens, logits) -> logits, or several")
    return found


def _schema(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    expected = "a JSON schema: a dict, its text, or a class of pydantic"
    schema = value.model_json_schema() if isinstance(value, type) and hasattr(value, "model_json_schema") else value
    if not isinstance(schema, Mapping):
        raise given.wrong(name, value, expected)
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as e:
        raise given.wrong(name, value, f"{expected}; of this one JSON cannot be made: {e}") from e


def _grammar(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise given.wrong(name, value, 'a grammar of llama.cpp\'s, as root ::= "yes" | "no", or None')
    return value or None


_share = partial(given.number, expected="a number from 0 to 1", least=0.0, most=1.0)
_any = partial(given.number, expected="a number")

CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_tokens": _count,
    "temperature": partial(given.number, expected="a number, 0 or more", least=0.0),
    "top_k": partial(given.whole, expected="a whole number, 0 or more", least=0),
    "top_p": _share,
    "min_p": _share,
    "seed": _seed,
    "stop": _stop,
    "repeat_penalty": _penalty,
    "presence_penalty": _any,
    "frequency_penalty": _any,
    "penalty_last_n": partial(given.whole, expected="a whole number, 0 or more, or -1 for the whole text", least=-1),
    "typical_p": _share,
    "top_n_sigma": _any,
    "xtc_probability": _share,
    "xtc_threshold": partial(given.number, expected="a number above 0, up to 1", least=1e-9, most=1.0),
    "dynatemp_range": partial(given.number, expected="a number, 0 or more", least=0.0),
    "dynatemp_exponent": partial(given.number, expected="a number, 0 or more", least=0.0),
    "mirostat": _mirostat,
    "mirostat_tau": partial(given.number, expected="a number, 0 or more", least=0.0),
    "mirostat_eta": partial(given.number, expected="a number, 0 or more", least=0.0),
    "dry_multiplier": partial(given.number, expected="a number, 0 or more", least=0.0),
    "dry_base": partial(given.number, expected="a number, 1 or more", least=1.0),
    "dry_allowed_length": partial(given.whole, expected="a whole number, 1 or more", least=1),
    "dry_penalty_last_n": partial(given.whole, expected="a whole number, 0 or more, or -1 for the whole text", least=-1),
    "dry_sequence_breakers": _breakers,
    "samplers": _samplers,
    "logit_bias": _bias,
    "logprobs": _count,
    "ignore_eos": given.flag,
    "logits_processor": _processors,
    "draft_max": _count,
    "lora": chosen,
    "json_schema": _schema,
    "grammar": _grammar,
}
"""Each option's check: takes its name and what was given, returns what it stands for."""

ELSEWHERE = {
    "temp": "temperature",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "typ_p": "typical_p",
    "sampler_seq": "samplers",
    "n_probs": "logprobs",
    "repeat_last_n": "penalty_last_n",
    "stop_token_ids": "stop",
    "response_format": "json_schema",
    "logits_processors": "logits_processor",
    "top_logprobs": "logprobs",
    "spec_draft_n_max": "draft_max",
    "num_draft_tokens": "draft_max",
}
"""What other programs call them."""
