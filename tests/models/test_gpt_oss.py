"""The gpt-oss architecture: its ops by hand, a tiny model on a device against the numpy twin and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_gguf import gpt_oss_metadata, gpt_oss_tensors, write_gguf

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.ops.op import OPS

FLOAT_NMSE = 1e-6
"""Float path, as in test_engine.py."""

Q8_1_NMSE = 3e-4
"""Activations rounded to 8 bits, as in test_engine.py."""


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], Path]) -> Path:
    return tiny("tiny-gpt-oss-MXFP4")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a window longer than the context."""
    metadata = gpt_oss_metadata(attention__sliding_window=128)
    return write_gguf(tmp_path_factory.mktemp("gpt_oss") / "wide.gguf", "gpt-oss", metadata, gpt_oss_tensors())


def tokens(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(0, 160, n)]


# --- references by hand -------------------------------------------------------------------------------------------------------------


def ref(op: str, *inputs: Any, **params: Any) -> np.ndarray:
    return OPS[op].reference([np.asarray(x) for x in inputs], params)[0]


def test_the_clamped_unit_by_hand() -> None:
    gate, up = [0.0, 1.0, 9.0, -9.0], [3.0, -8.0, 8.0, 0.5]
    want = [0.0, -6.0 / (1 + np.exp(-1.702)), 7.0 / (1 + np.exp(-1.702 * 7)) * 8.0, -9.0 / (1 + np.exp(1.702 * 9)) * 1.5]
    np.testing.assert_allclose(ref("SWIGLU_OAI", gate, up, alpha=1.702, limit=7.0), want)


def test_biases_follow_their_experts() -> None:
    assert ref("ADD_ID", [[[1.0, 2.0], [3.0, 4.0]]], [10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [[2, 0]]).tolist() == [[[51, 62], [13, 24]]]


def test_the_chosen_experts_alone_share_the_softmax() -> None:
    weights, ids = OPS["TOPK_MOE"].reference(
        [np.log([[1.0, 4.0, 2.0, 3.0]])], dict(n_used=2, norm=True, gating="softmax_weight", scale=1.0)
    )
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]])


def test_a_sink_takes_its_share_and_a_window_hides_the_past() -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((1, 1, 4)), rng.standard_normal((1, 6, 4)), rng.standard_normal((1, 6, 4))
    sink = 0.7
    for window, first in ((0, 0), (9, 0), (2, 3)):
        p = np.exp(0.5 * k[0, first:5] @ q[0, 0])
        got = ref("FLASH_ATTN_EXT", q, k, v, np.array([4]), [sink], scale=0.5, window=window)[0]
        np.testing.assert_allclose(got, p / (p.sum() + np.exp(sink)) @ v[0, first:5])
        plain = ref("FLASH_ATTN_EXT", q, k, v, np.array([4]), scale=0.5, window=window)[0]
        np.testing.assert_allclose(plain, p / p.sum() @ v[0, first:5])


# --- on a device --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin(path: Path) -> NumpyTwin:
    return NumpyTwin(path, n_ctx=64)


LLAMA_CPP: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "llama_gpt_oss.json").read_text())

TO_PEER = 1e-3
"""Largest difference of a logit to llama.cpp, which computes in F32: measured 3e-4 to the twin."""


def differences_to_llama_cpp(logits: np.ndarray) -> np.ndarray:
    return np.array([[abs(row[token] - theirs) for token, theirs in top] for row, top in zip(logits, LLAMA_CPP["top4"], strict=True)])


def test_the_twin_s_logits_are_llama_cpp_s(twin: NumpyTwin) -> None:
    logits = twin.logits(LLAMA_CPP["ids"])
    assert differences_to_llama_cpp(logits).max() < TO_PEER
    assert logits.argmax(axis=1).tolist() == [top[0][0] for top in LLAMA_CPP["top4"]]


def decoded(engine: Engine, ids: list[int]) -> np.ndarray:
    engine.reset()
    return np.stack([engine.decode_logits(t) for t in ids])


@pytest.mark.vulkan
@pytest.mark.parametrize(("act", "bound"), [("f32", FLOAT_NMSE), ("q8_1", Q8_1_NMSE)])
@pytest.mark.parametrize("fusion", ["all", "none"])
def test_prompt_and_decode_are_the_twin_s_and_llama_cpp_s(
    act: Any, fusion: str, bound: float, path: Path, device: Device, twin: NumpyTwin
) -> None:
    """40 tokens: five windows, three pieces of a prompt, past the context before it was stretched."""
    ids = tokens(40)
    want = twin.logits(ids)
    assert 0.3 < want.std() < 3, "logits of ordinary size"
    with Engine.load(path, device, n_ctx=64, act=act, fusion=fusion, progress=False) as engine:
        assert nmse(engine.prompt_logits(ids), want) <= bound
        assert nmse(decoded(engine, ids), want) <= bound
        if act == "f32":
            assert differences_to_llama_cpp(decoded(engine, LLAMA_CPP["ids"])).max() < TO_PEER


@pytest.mark.vulkan
def test_generation_after_a_prompt_is_the_twin_s(path: Path, device: Device, twin: NumpyTwin) -> None:
    """The device's own token loop goes on from a cache that a prompt has filled, over several windows, by experts of the token before."""
    ids = tokens(19)
    want, margins = twin.generate_greedy(ids, 30)
    assert min(margins) > 1e-3, "no step is a near tie, which rounding may decide"
    with Engine.load(path, device, n_ctx=64, act="f32", progress=False) as engine:
        engine.prompt(ids[:-1])
        assert list(engine.generate(ids[-1], 30)) == want


@pytest.mark.vulkan
def test_a_window_longer_than_the_context_hides_nothing(wide: Path, device: Device, twin: NumpyTwin) -> None:
    ids = tokens(24)
    want = NumpyTwin(wide, n_ctx=64).logits(ids)
    np.testing.assert_allclose(want[:8], twin.logits(ids[:8]), rtol=1e-9)
    assert nmse(twin.logits(ids)[8:], want[8:]) > 1e-2, "the shorter window does hide something"
    with Engine.load(wide, device, n_ctx=64, act="f32", progress=False) as engine:
        assert nmse(engine.prompt_logits(ids), want) <= FLOAT_NMSE
        assert nmse(decoded(engine, ids), want) <= FLOAT_NMSE
