"""Divergence of two runs: its figures, and the base file between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vkback.evaluate.kl import HEAD, MAGIC, VERSION, BaseReader, BaseWriter, Divergences, KlError, describe_text, log_softmax

RNG = np.random.default_rng(3)
LOGITS = (2 * RNG.standard_normal((40, 300))).astype(np.float32)
OTHER = LOGITS + (0.05 * RNG.standard_normal(LOGITS.shape)).astype(np.float32)
TARGETS = RNG.integers(0, 300, 40)
TEXT = describe_text(range(100), 20, 4, 300)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with BaseWriter(tmp_path / "base", TEXT, {"model": "m"}) as writer:
        writer.add(LOGITS[:15])
        writer.add(LOGITS[15:])
    return tmp_path / "base"


def test_a_base_comes_back_within_its_steps(file: Path) -> None:
    with BaseReader(file) as reader:
        reader.check(TEXT)
        found = np.concatenate([reader.rows(25), reader.rows(15)])
        assert reader.header["about"] == {"model": "m"}
        # Half a step of 24 / 65535.
        np.testing.assert_allclose(found, log_softmax(LOGITS), atol=2e-4)
        with pytest.raises(KlError, match="ends before the text does"):
            reader.rows(1)


def test_figures_are_those_of_their_definitions(file: Path) -> None:
    p, q = log_softmax(LOGITS), log_softmax(OTHER)
    kl = np.array([sum(np.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)])
    for base, bound in ((p, 1e-12), (BaseReader(file).rows(40), 2e-5)):
        gathered = Divergences()
        gathered.add(base[:9], OTHER[:9], TARGETS[:9])
        gathered.add(base[9:], OTHER[9:], TARGETS[9:])
        d = gathered.result()
        assert d.tokens == 40 and d.mean == pytest.approx(kl.mean(), abs=bound)
        assert d.median == pytest.approx(np.median(kl), abs=10 * bound) and d.most == pytest.approx(kl.max(), abs=10 * bound)
        assert d.error == pytest.approx(kl.std(ddof=1) / np.sqrt(40), abs=bound)
        assert d.same_top == np.mean(LOGITS.argmax(-1) == OTHER.argmax(-1))
        assert d.log_ratio == pytest.approx(np.mean([p[i, t] - q[i, t] for i, t in enumerate(TARGETS)]), abs=1e-4)


def test_a_run_differs_from_itself_by_nothing(file: Path) -> None:
    same = Divergences()
    with BaseReader(file) as reader:
        same.add(reader.rows(40), LOGITS, TARGETS)
    # Rounding to steps s of 3.7e-4 leaves s^2 / 24, 6e-9 a token.
    assert 0 <= same.result().mean < 1e-7 and same.result().same_top == 1.0


def test_a_base_of_something_else_is_refused(file: Path, tmp_path: Path) -> None:
    with BaseReader(file) as reader:
        with pytest.raises(KlError, match="its n_ctx is 20, here 64: the base must be of the same text"):
            reader.check(describe_text(range(100), 64, 1, 300))
        with pytest.raises(KlError, match=r"its text is [0-9a-f]{64}, here"):
            reader.check(describe_text(range(1, 101), 20, 4, 300))
    (tmp_path / "other").write_bytes(b"GGUF and so on, long enough for a head")
    with pytest.raises(KlError, match="other: is no base of log probabilities; write one with --save-kl-base"):
        BaseReader(tmp_path / "other")
    file.write_bytes(file.read_bytes()[:8] + b"\x07" + file.read_bytes()[9:])
    with pytest.raises(KlError, match="has version 7, expected 1"):
        BaseReader(file)
    with pytest.raises(KlError, match="cannot be read: No such file"):
        BaseReader(tmp_path / "nothing")


@pytest.mark.parametrize(("length", "header"), [(9, b'{"n_voca'), (1, b"3"), (2**64 - 1, b"{}"), (3, b"\xff\xff\xff")])
def test_a_base_with_a_damaged_head(length: int, header: bytes, tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(HEAD.pack(MAGIC, VERSION, length) + header)
    with pytest.raises(KlError, match=r"base: the file is damaged or cut short: .*; write it anew with --save-kl-base$"):
        BaseReader(tmp_path / "base")


def test_a_base_that_fails_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of another kind"), BaseWriter(tmp_path / "base", TEXT, {}) as writer:
        writer.add(LOGITS)
        raise ValueError("of another kind")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KlError, match="cannot be written"):
        BaseWriter(tmp_path / "no" / "base", TEXT, {})
