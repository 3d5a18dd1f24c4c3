"""Chains of samplers that requests ask for, of SAMPLE and SAMPLE_COLUMNS with an input more (shaders/sample/chain.glsl).

    chain  F32 [32], of columns [n_slots, 32]: 0 samplers (0: SAMPLE's own filters), 1 mu, 2 typ_p, 3 xtc_probability, 4 xtc_threshold,
           5 top_n_sigma, 6 dynatemp_range, 7 dynatemp_exponent, 8 tau, 9 eta, 10 temp; 16..31 the numbers of the samplers in order

The samplers run in the order given, each over the tokens that the one before has left. Tokens stand by their distance below the largest
logit, of equal distance by id; y is the distance from the nearest token that is left, divided by the temperature so far (1 before any), and
p = exp(-y) / sum(exp(-y)).

    top_k        the k nearest
    top_p        the nearest whose p make up top_p
    min_p        y up to -ln(min_p)
    typ_p        those whose -ln(p) is nearest to the entropy, that make up typ_p (Meister et al., "Locally Typical Sampling", 2022)
    top_n_sigma  distances up to top_n_sigma standard deviations of the logits (Tang et al., "Top-n sigma", 2024)
    xtc          with the chance xtc_probability: of tokens with p of at least xtc_threshold the last alone, and all behind it
    temperature  divides distances; with a range by a number from temp - range (at least 0) to temp + range, as far between as the entropy's
                 share of ln(tokens) ** exponent; 0 leaves the nearest
    mirostat     the nearest k, of an estimate of Zipf's exponent (Basu et al., "Mirostat", 2020); mirostat_v2: -log2(p) up to mu. Last in a
                 chain; mu moves by eta * (tau - the surprise of the token drawn, -log2 of its p among those left)

The draw is SAMPLE's, over what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from vkback.ops.case import Array
from vkback.ops.sampling.sample import FARTHEST, STEPS, Params, Pick, noise, unit

CHAIN_WORDS, CHAIN_ORDER = 32, 16

LONGEST = CHAIN_WORDS - CHAIN_ORDER
"""Samplers of a chain, at most."""

NAMES = ("top_k", "top_p", "min_p", "typ_p", "top_n_sigma", "xtc", "temperature", "mirostat", "mirostat_v2")
"""Of the samplers, in the order of their numbers, from 1."""

NEAREST = 100
"""Tokens that mirostat estimates its exponent from."""


@dataclass(frozen=True)
class Chain:
    """The samplers of a text, and what they go by. order: of NAMES; none: SAMPLE's own filters."""

    order: tuple[str, ...] = ()
    mu: float = 0.0
    typ_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_n_sigma: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    tau: float = 5.0
    eta: float = 0.1
    temp: float = 1.0

    @property
    def moves(self) -> bool:
        """Whether a token that is drawn changes how the next one is: with mirostat."""
        return self.order[-1:] in (("mirostat",), ("mirostat_v2",))

    def words(self) -> npt.NDArray[np.float32]:
        """Float32 [32]."""
        words = np.zeros(CHAIN_WORDS, np.float32)
        words[0] = len(self.order)
        words[1:11] = [getattr(self, field.name) for field in fields(self)[1:]]
        words[CHAIN_ORDER : CHAIN_ORDER + len(self.order)] = [NAMES.index(name) + 1 for name in self.order]
        return words

    @classmethod
    def read(cls, words: Array) -> Chain:
        order = tuple(NAMES[int(i) - 1] for i in words[CHAIN_ORDER : CHAIN_ORDER + int(words[0])])
        return cls(order, *map(float, words[1:11]))


@dataclass
class _Left:
    """Tokens that are left, nearest first: ids, their distances in steps, what distances are multiplied by. sure: as of Pick."""

    ids: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    scale: float = 1.0
    sure: bool = True

    @property
    def y(self) -> npt.NDArray[np.float64]:
        return np.asarray((self.steps - self.steps[0]) / STEPS * self.scale)

    @property
    def p(self) -> npt.NDArray[np.float64]:
        w = np.exp(-self.y)
        return np.asarray(w / w.sum())

    @property
    def entropy(self) -> float:
        p, y = self.p, self.y
        return float(np.log(np.exp(-y).sum()) + (p * y).sum())

    def keep(self, first: int, end: int) -> None:
        self.ids, self.steps = self.ids[first:end], self.steps[first:end]

    def keep_up_to(self, distance: float) -> None:
        """Those up to so many logits behind the nearest. Not sure within 64 steps, and a 10^5-th of it, of the bound."""
        bound = int(self.steps[0]) + int(np.clip(distance, 0, FARTHEST) * STEPS)
        self.sure &= not (np.abs(self.steps - bound) <= 64 + 1e-5 * distance * STEPS).any()
        self.keep(0, max(1, int(np.searchsorted(self.steps, bound, "right"))))

    def share(self, keys: npt.NDArray[np.int64], share: float) -> int:
        """The smallest key up to which tokens have this share of p."""
        values, at = np.unique(keys, return_inverse=True)
        sums = np.cumsum(np.bincount(at, weights=self.p))
        self.sure &= bool(np.abs(sums / sums[-1] - share).min() > 1e-4)
        return int(values[np.searchsorted(sums, max(share, 1e-9) * sums[-1])])


def mirostat_k(y: npt.NDArray[np.float64], mu: float, n_vocab: int) -> float:
    """How many of the nearest tokens mirostat keeps, before rounding down. y: distances of those that it goes by."""
    i = np.arange(min(NEAREST, len(y)) - 1)
    t, b = np.log((i + 2) / (i + 1)), np.diff(y[: len(i) + 1])
    s = max(float((t * b).sum() / (t * t).sum()) if len(i) else 0.0, 0.01)
    e = 1e-3 if abs(s - 1) < 1e-3 else s - 1
    with np.errstate(over="ignore"):
        return float(np.clip(np.float64(e * 2.0**mu / (1 - float(n_vocab) ** -e)) ** (1 / s), 1, n_vocab))


def _apply(left: _Left, name: str, chain: Chain, params: Params, pos: int, n_vocab: int) -> None:
    """One sampler."""
    if name == "top_k":
        left.keep(0, params.top_k)
    elif name == "top_p":
        bound = left.share(left.steps, params.top_p)
        left.keep(0, int(np.searchsorted(left.steps, bound, "right")))
    elif name == "min_p":
        left.keep_up_to(-np.log(params.min_p) / left.scale)
    elif name == "typ_p":
        centre = int(left.steps[0]) + int((left.p * left.y).sum() / left.scale * STEPS)
        keys = np.abs(left.steps - centre)
        width = left.share(keys, chain.typ_p)
        # A device finds the centre to some steps, which moves who is nearer to it.
        order = np.sort(keys)
        at = int(np.searchsorted(order, width))
        left.sure &= at == 0 or order[at] - order[at - 1] > 256
        left.sure &= at + 1 == len(order) or order[at + 1] - order[at] > 256
        kept = np.flatnonzero(keys <= width)
        left.keep(int(kept[0]), int(kept[-1]) + 1)
    elif name == "top_n_sigma":
        left.keep_up_to(chain.top_n_sigma * float(np.std(left.steps / STEPS)))
    elif name == "xtc":
        chance = unit(params.seed, pos, np.array([2**32 - 1]))[0]
        left.sure &= bool(abs(chance - chain.xtc_probability) > 1e-6)
        if chance <= chain.xtc_probability:
            p = left.p
            left.sure &= bool(np.abs(p / chain.xtc_threshold - 1).min() > 1e-4)
            likely = int((p >= chain.xtc_threshold).sum())
            if likely > 1:
                left.keep(int(np.searchsorted(left.steps, left.steps[likely - 1])), len(left.ids))
    elif name == "temperature":
        temp = chain.temp
        if chain.dynatemp_range > 0:
            least, most = max(temp - chain.dynatemp_range, 0.0), temp + chain.dynatemp_range
            spread = min(max(left.entropy / np.log(len(left.ids)), 0.0), 1.0) if len(left.ids) > 1 else 0.0
            temp = least + (most - least) * float(spread**chain.dynatemp_exponent if spread > 0 else 0.0)
        if temp > 0:
            left.scale /= temp
        else:
            left.keep(0, int(np.searchsorted(left.steps, left.steps[0], "right")))
    elif name == "mirostat":
        k = mirostat_k(left.y, chain.mu, n_vocab)
        left.sure &= abs(k - round(k)) > 1e-3 * k or k in (1, n_vocab)
        left.keep(0, max(int(k), 1))
    else:
        left.keep_up_to((chain.mu * np.log(2) - np.log(np.exp(-left.y).sum())) / left.scale)


def pick_chain(logits: Array, params: Params, chain: Chain, pos: int) -> tuple[Pick, Chain]:
    """The next token in float64, by the rules at the top of this file, and the chain after it. Close calls are those of `pick`, of the
    bounds of each sampler."""
    x = np.asarray(logits, np.float32)
    if np.isnan(x).any():
        return Pick(-1, True), chain
    top = x.max()
    if np.isinf(top):
        return Pick(int(np.argmax(x)), True), chain
    steps = (np.minimum(top - x, FARTHEST) * np.float32(STEPS)).astype(np.int64)
    order = np.argsort(steps, kind="stable")
    order = order[np.isfinite(x[order])]
    left = _Left(order, steps[order])
    for name in chain.order:
        _apply(left, name, chain, params, pos, len(x))
    kept = np.sort(left.ids)
    scores = -(top - x[kept]).astype(np.float64) * left.scale + noise(params.seed, pos, kept)
    best = np.argsort(-scores, kind="stable")[:2]
    sure = left.sure
    if len(best) > 1:
        first, second = scores[best]
        sure &= bool(first - second > 1e-4 * max(1.0, abs(first), abs(second)))
    token = int(kept[best[0]])
    if chain.moves:
        surprise = -np.log2(left.p[left.ids == token][0])
        chain = replace(chain, mu=chain.mu - chain.eta * (float(surprise) - chain.tau))
    return Pick(token, sure), chain


def odds(logits: Array, params: Params, chain: Chain, pos: int = 0) -> npt.NDArray[np.float64]:
    """The probability of each token, float64 [vocab]: what draws of many seeds come to. Not with xtc, which has a chance of its own."""
    x = np.asarray(logits, np.float32)
    steps = (np.minimum(x.max() - x, FARTHEST) * np.float32(STEPS)).astype(np.int64)
    order = np.argsort(steps, kind="stable")
    left = _Left(order, steps[order])
    for name in chain.order:
        _apply(left, name, chain, params, pos, len(x))
    found = np.zeros(len(x))
    found[left.ids] = left.p
    return found


EXAMPLES: Sequence[Chain] = (
    Chain(("top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"), typ_p=0.9, xtc_probability=0.6, xtc_threshold=0.05, temp=0.8),
    Chain(("typ_p", "temperature"), typ_p=0.7, temp=1.2),
    Chain(("xtc", "temperature"), xtc_probability=1.0, xtc_threshold=0.02, temp=1.0),
    Chain(("top_n_sigma", "temperature"), top_n_sigma=2.0, temp=1.3),
    Chain(("temperature", "top_p", "min_p"), temp=0.6),
    Chain(("top_p", "temperature"), temp=1.5),
    Chain(("min_p", "temperature"), temp=0.7, dynatemp_range=0.5, dynatemp_exponent=1.5),
    Chain(("temperature", "mirostat"), mu=8.0, tau=4.0, temp=0.9),
    Chain(("temperature", "mirostat_v2"), mu=6.0, tau=3.0, temp=1.1),
    Chain(("temperature",), temp=0.0),
    Chain(("min_p", "top_k", "top_p", "top_n_sigma"), top_n_sigma=1.5),
    Chain(("xtc", "typ_p", "top_k", "temperature"), xtc_probability=1.0, xtc_threshold=0.01, typ_p=0.8, temp=0.9),
)
"""Of cases."""
