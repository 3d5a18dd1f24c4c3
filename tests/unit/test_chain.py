"""The references of chains of samplers, beside their rules written out plainly, and draws beside their odds."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from vkback.ops.sampling.chain import EXAMPLES, Chain, mirostat_k, odds, pick_chain
from vkback.ops.sampling.dry import Breakers, Dry, repetitions
from vkback.ops.sampling.sample import Params, pick

PARAMS = Params(1.0, 40, 0.9, 0.05, 1, ())
LOGITS = np.array([0.0, 1.0, -1.0, 2.0, 0.5, 1.9, -3.0], np.float32)


def softmax(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return np.asarray(e / e.sum())


def kept(chain: Chain, params: Params = PARAMS, logits: npt.NDArray[np.float32] = LOGITS) -> set[int]:
    return set(np.flatnonzero(odds(logits, params, chain)).tolist())


def test_typical_keeps_what_is_nearest_to_the_entropy() -> None:
    p = softmax(LOGITS)
    surprise = -np.log(p)
    order = np.argsort(np.abs(surprise - (p * surprise).sum()))
    for share in (0.1, 0.3, 0.6, 0.9):
        wanted, sum_ = set(), 0.0
        for token in order:
            wanted.add(int(token))
            sum_ += p[token]
            if sum_ >= share:
                break
        assert kept(Chain(("typ_p",), typ_p=share)) == wanted


def test_top_n_sigma_xtc_and_min_p() -> None:
    sigma = LOGITS.std()
    assert kept(Chain(("top_n_sigma",), top_n_sigma=0.8)) == set(np.flatnonzero(2 - 0.8 * sigma <= LOGITS).tolist())
    p = softmax(LOGITS)
    likely = np.flatnonzero(p >= 0.1)
    least = likely[np.argmin(p[likely])]
    assert len(likely) == 3 and kept(Chain(("xtc",), xtc_probability=1.0, xtc_threshold=0.1)) == set(range(7)) - (set(likely) - {least})
    assert kept(Chain(("xtc",), xtc_probability=1.0, xtc_threshold=0.5)) == set(range(7))  # one token at most is as likely
    cold = softmax(LOGITS / 0.5)
    wanted = set(np.flatnonzero(cold >= 0.05 * cold.max()).tolist())
    assert kept(Chain(("temperature", "min_p"), temp=0.5)) == wanted != kept(Chain(("min_p", "temperature"), temp=0.5))


def test_dynamic_temperature_follows_the_entropy() -> None:
    p = softmax(LOGITS)
    share = -(p * np.log(p)).sum() / np.log(7)
    temp = 0.3 + (1.7 - 0.3) * share**2
    found = odds(LOGITS, PARAMS, Chain(("temperature",), temp=1.0, dynatemp_range=0.7, dynatemp_exponent=2.0))
    np.testing.assert_allclose(found, softmax(LOGITS / temp), rtol=1e-5)


def test_mirostat_cuts_and_learns() -> None:
    p = softmax(LOGITS)
    chain = Chain(("temperature", "mirostat_v2"), mu=2.5, tau=1.0, eta=0.5)
    assert kept(chain) == set(np.flatnonzero(-np.log2(p) <= 2.5).tolist())
    picked, after = pick_chain(LOGITS, PARAMS, chain, 3)
    left = odds(LOGITS, PARAMS, chain)
    assert after.mu == pytest.approx(2.5 - 0.5 * (-np.log2(left[picked.token]) - 1.0), rel=1e-5)
    # Zipf's law with its own exponent: k follows from the paper's formula.
    s, n, mu = 1.2, 1000, 6.0
    y = s * np.log(np.arange(1, n + 1))
    e = s - 1
    assert mirostat_k(y, mu, n) == pytest.approx(((e * 2**mu) / (1 - n**-e)) ** (1 / s), rel=1e-6)


def test_mirostat_holds_the_surprise() -> None:
    """The mean surprise of 1500 tokens comes to tau within a tenth: eta 0.1 forgets a token after ten."""
    rng = np.random.default_rng(1)
    logits = (2 * rng.standard_normal(300)).astype(np.float32)
    for name in ("mirostat", "mirostat_v2"):
        chain, found = Chain(("temperature", name), mu=6.0, tau=3.0, eta=0.1), []
        for pos in range(1500):
            before = chain
            _, chain = pick_chain(logits, PARAMS, chain, pos)
            found.append(before.tau - (chain.mu - before.mu) / before.eta)
        assert np.mean(found[100:]) == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("number", [i for i, chain in enumerate(EXAMPLES) if "xtc" not in chain.order], ids=str)
def test_draws_have_their_odds(number: int) -> None:
    """Chi-squared of 3000 positions, tokens with fewer than 5 expected draws in one; bounds are passed once in ten thousand."""
    chain = dataclasses.replace(EXAMPLES[number], eta=0.0)
    logits = (2 * np.random.default_rng(4).standard_normal(30)).astype(np.float32)
    wanted = 3000 * odds(logits, PARAMS, chain)
    counts = np.bincount([pick_chain(logits, PARAMS, chain, pos)[0].token for pos in range(3000)], minlength=30)
    assert not counts[wanted == 0].any()
    small = wanted < 5
    cells = [*zip(counts[~small], wanted[~small], strict=True)]
    if wanted[small].sum() >= 5:
        cells.append((counts[small].sum(), wanted[small].sum()))
    freedom = len(cells) - 1
    chi = sum((found - expected) ** 2 / expected for found, expected in cells)
    assert chi <= freedom + 2 * np.sqrt(freedom * np.log(1e4)) + 2 * np.log(1e4)  # Laurent and Massart's bound of the tail


def test_xtc_has_its_chance() -> None:
    chain = Chain(("xtc",), xtc_probability=0.3, xtc_threshold=0.1)
    hidden = 5  # of the three that are likely, one of the two that XTC leaves out
    p = softmax(LOGITS)
    found = np.mean([pick_chain(LOGITS, PARAMS, chain, pos)[0].token == hidden for pos in range(4000)])
    assert found == pytest.approx(0.7 * p[hidden], abs=4 * np.sqrt(0.21 / 4000))


def test_top_k_is_exact() -> None:
    equal = np.zeros(50, np.float32)
    assert {pick(equal, dataclasses.replace(PARAMS, top_k=3, top_p=1.0, min_p=0.0), pos).token for pos in range(200)} == {0, 1, 2}
    assert kept(Chain(("top_k",)), dataclasses.replace(PARAMS, top_k=3), equal) == {0, 1, 2}


def test_repetitions() -> None:
    none = Breakers(np.zeros(10, np.int32))
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 2, 3]
    assert repetitions(text, Dry(1.0, 1.5, 2, 100), none) == {4: 2, 5: 2}
    assert repetitions([*text[:-2], 1, 2, 3], Dry(1.0, 1.5, 2, 100), none) == {4: 3, 5: 4}
    assert repetitions(text, Dry(1.0, 1.5, 3, 100), none) == {}
    assert repetitions(text, Dry(1.0, 1.5, 2, 7), none) == {5: 2}  # of the last seven: 1 2 3 5 9 2 3
    words = np.zeros(10, np.int32)
    words[2] = 1
    assert repetitions(text, Dry(1.0, 1.5, 2, 100), Breakers(words)) == {}  # a repetition is 3 alone
    assert repetitions(text, Dry(1.0, 1.5, 1, 100), Breakers(words)) == {4: 1, 5: 1}
    words[:] = 0
    words[9] = 2
    assert repetitions(text, Dry(1.0, 1.5, 2, 100), Breakers(words, ((2,),))) == {}  # 9 2 breaks, 3 is left
    words[:] = 0
    words[4] = 1
    assert repetitions(text, Dry(1.0, 1.5, 2, 100), Breakers(words)) == {5: 2}  # 4 breaks alone and is never lost
